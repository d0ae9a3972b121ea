"""Likelihoods over HTTP, against a real server process."""

import base64
import dataclasses
import io
import math
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import linpix
from linpix.model import checkpoint, mixture
from linpix.model.config import PRESETS
from linpix.model.inputs import START
from linpix.server.engine.thread import EngineThread
from linpix.training.evaluate import bits_of
from tests.nets import CONDITIONAL, perturbed_net, saved
from tests.server.web.routes.test_images import (
    PICTURE,
    assert_refused,
    encode,
    generate,
    message_of,
    occluded,
    refusal,
)
from tools.harness.servers import eventually, here, serving

PATH = "/v1/images/likelihoods"
# as large as the images of `slow`: half a second for all classes
LARGE = encode(np.zeros((28, 28), np.uint8))
COUNTED = 'linpix_requests_total{endpoint="likelihoods",outcome="%s"}'


@pytest.fixture(scope="module")
def net(tiny):
    return checkpoint.read(tiny).net


def ask(client, image=None, mask=None, headers=None, **fields):
    files = {"image": ("picture.png", encode(PICTURE) if image is None else image)}
    if mask is not None:
        files["mask"] = ("mask.png", mask)
    return client.post(PATH, files=files, data=fields, headers=headers)


def told(*given, **fields):
    answer = ask(*given, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def map_of(answer) -> np.ndarray:
    return np.array(answer["map"], dtype=np.float64)


def masked(hidden: np.ndarray) -> bytes:
    """A mask that hides these pixels (H, W)."""
    return encode(
        np.stack([np.zeros_like(hidden, np.uint8), np.where(hidden, 0, 255).astype(np.uint8)], -1)
    )


def log_probs_of(net, picture=PICTURE, start=START) -> np.ndarray:
    images = torch.from_numpy(picture.reshape(1, -1).copy())
    with torch.inference_mode():
        return (
            mixture.log_likelihood(net(images, torch.tensor([start])), images)[0].double().numpy()
        )


# --- what is answered ---


def test_a_whole_picture_has_the_bits_per_dim_of_evaluate(client, net):
    answer = told(client)
    assert answer["bits_per_dim"] == pytest.approx(
        float(bits_of(net, PICTURE.reshape(1, -1))[0]), abs=1e-4
    )
    assert (answer["model"], answer["label"], answer["labels"], answer["counted"]) == (
        "tiny",
        None,
        None,
        64,
    )
    assert (answer["known"], answer["b64_json"], answer["warnings"]) == (0, None, [])
    assert answer["log_likelihood"] == pytest.approx(-64 * math.log(2) * answer["bits_per_dim"])


def test_a_label_reaches_the_model(client, net):
    answer = told(client, label="3")
    assert answer["label"] == "3"
    assert answer["log_likelihood"] == pytest.approx(
        log_probs_of(net, start=START + 4).sum(), abs=1e-3
    )
    assert answer["log_likelihood"] != pytest.approx(told(client)["log_likelihood"], abs=1e-2)
    assert told(client, prompt="3")["log_likelihood"] == answer["log_likelihood"]


def test_the_map_has_the_bits_of_each_sub_pixel_and_nothing_where_it_is_known(client, net):
    hidden = np.zeros((8, 8), bool)
    hidden[2:5, 3:6] = True
    answer = told(client, mask=masked(hidden))
    bits = map_of(answer)
    assert bits.shape == (8, 8, 1)
    assert np.array_equal(np.isnan(bits[..., 0]), ~hidden)
    assert bits[..., 0][hidden] == pytest.approx(
        -log_probs_of(net).reshape(8, 8)[hidden] / math.log(2), abs=1e-4
    )
    assert np.nansum(bits) == pytest.approx(9 * answer["bits_per_dim"], abs=1e-4)
    assert (answer["counted"], answer["known"], answer["conditioning"]) == (9, 55, "partial")
    assert (answer["known_before_first_hole"], answer["known_after_last_hole"]) == (19, 26)


def test_a_map_is_a_picture_too_with_black_for_what_was_expected(client):
    answer = told(client, image=occluded(3), response_format="b64_json", size="16x16")
    with Image.open(io.BytesIO(base64.b64decode(answer["b64_json"]))) as picture:
        grey, alpha = np.moveaxis(np.asarray(picture), -1, 0)
    assert grey.shape == (16, 16)
    bits = map_of(answer)[..., 0].repeat(2, 0).repeat(2, 1)
    assert np.array_equal(alpha == 255, ~np.isnan(bits))
    assert np.abs(grey[6:] - np.clip(bits[6:] * 255 / 8, 0, 255)).max() <= 0.51
    alone = ask(client, image=occluded(3), size="16x16", headers={"accept": "image/png"})
    assert (alone.headers["content-type"], alone.headers["x-linpix-model"]) == ("image/png", "tiny")
    assert alone.content == base64.b64decode(answer["b64_json"])
    assert float(alone.headers["x-linpix-bits-per-dim"]) == pytest.approx(
        answer["bits_per_dim"], rel=1e-5
    )


def test_what_transparent_pixels_show_beneath_is_what_is_scored(client):
    """As a mask hides it; the other ways to hide the same pixels give the same."""
    hidden = np.arange(8)[:, None].repeat(8, 1) >= 4
    expected = map_of(told(client, mask=masked(hidden)))
    for answer in (told(client, image=occluded(4)), told(client, keep_rows=4)):
        assert np.array_equal(map_of(answer), expected, equal_nan=True)
    opaque = np.stack([PICTURE, np.full_like(PICTURE, 255)], -1)
    assert told(client, image=encode(opaque))["counted"] == 64


def test_all_labels_give_the_posterior_with_the_most_probable_first(client):
    answer = told(client, labels="all")
    shares = [entry["posterior"] for entry in answer["labels"]]
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)
    assert sorted(entry["label"] for entry in answer["labels"]) == list("0123456789")
    likelihoods = np.array([entry["log_likelihood"] for entry in answer["labels"]])
    assert shares == pytest.approx(np.exp(likelihoods - np.logaddexp.reduce(likelihoods)))
    for entry in answer["labels"][:2]:
        alone = told(client, label=entry["label"])
        assert entry["log_likelihood"] == pytest.approx(alone["log_likelihood"], abs=1e-3)
        assert entry["bits_per_dim"] == pytest.approx(alone["bits_per_dim"], abs=1e-4)


def test_without_a_label_all_labels_together_are_a_mixture(client):
    answer = told(client, labels="all")
    likelihoods = [entry["log_likelihood"] for entry in answer["labels"]]
    assert answer["log_likelihood"] == pytest.approx(
        np.logaddexp.reduce(likelihoods) - math.log(10)
    )
    assert np.nansum(map_of(answer)) == pytest.approx(
        -answer["log_likelihood"] / math.log(2), abs=1e-3
    )
    one = told(client, labels="all", label="7")
    [seven] = [entry for entry in one["labels"] if entry["label"] == "7"]
    assert one["label"] == "7" and one["log_likelihood"] == seven["log_likelihood"]
    assert map_of(one) == pytest.approx(map_of(told(client, label="7")), abs=1e-4)


# --- other models ---


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """A conditional model, one of colours without classes, one without a start token, and one of
    NaN.
    """
    folder, tiny = tmp_path_factory.mktemp("others"), PRESETS["tiny"]
    configs = {
        "conditional": CONDITIONAL,
        "colour": dataclasses.replace(tiny, channels=3, classes=0),
        "broken": tiny,
        "startless": dataclasses.replace(tiny, classes=0, first_marginal=(1.0,) + (0.0,) * 255),
    }
    for name, config in configs.items():
        net = perturbed_net(config)
        if name == "broken":
            net.head.bias.data[0] = 1e38  # times any weight: not finite
            net.head.weight.data[:] = 1e38
        if name == "conditional":
            net.class_head.weight.data *= 300  # sure of the class, as a trained model is
        saved(folder / name, net)
    with here(folder) as process:
        yield process


def test_a_conditional_model_uses_every_known_pixel(others):
    hidden = np.zeros((8, 8), bool)
    hidden[2:5, 3:6] = True
    changed = PICTURE.copy()
    changed[7, 7] = 255 - changed[7, 7]  # after the last hole
    with others.client() as client:
        one, other = (
            told(client, encode(picture), masked(hidden), model="conditional", labels="all")
            for picture in (PICTURE, changed)
        )
    assert (one["conditioning"], one["counted"], one["known"]) == ("full", 9, 55)
    assert one["log_likelihood"] != other["log_likelihood"]
    assert sum(entry["posterior"] for entry in one["labels"]) == pytest.approx(1)


def test_implausible_classes_are_left_out_on_request_and_the_answer_says_so(others):
    with others.client() as client:
        exact = told(client, model="conditional", labels="all")
        bound = told(client, model="conditional", labels="all", classes="plausible")
        worst = exact["labels"][-1]
        asked = told(
            client, model="conditional", labels="all", classes="plausible", label=worst["label"]
        )
        folder = client.app.state.service.settings.checkpoints
        found = linpix.score("conditional", PICTURE, plausible=True, checkpoints=folder)
    assert exact["exact"] and len(exact["labels"]) == 10
    assert not bound["exact"] and 1 <= len(bound["labels"]) < 10
    assert bound["log_likelihood"] <= exact["log_likelihood"] + 1e-3
    assert worst["label"] not in {one["label"] for one in bound["labels"]}
    assert asked["exact"] and asked["log_likelihood"] == pytest.approx(worst["log_likelihood"])
    assert not found.exact and found.log_likelihood == pytest.approx(bound["log_likelihood"])


def test_a_model_of_colours_has_three_numbers_a_pixel_and_no_classes(others):
    with others.client() as client:
        answer = told(
            client, encode(np.stack([PICTURE] * 3, -1)), model="colour", response_format="b64_json"
        )
        assert (map_of(answer).shape, answer["counted"]) == ((8, 8, 3), 192)
        assert_refused(ask(client, model="colour", labels="all"), "labels", "leave it out")


def test_a_picture_that_is_impossible_is_refused_and_is_the_clients_fault(others):
    failed = others.metric(COUNTED % "failed")
    with others.client() as client:
        answer = ask(client, model="startless")
        assert answer.status_code == 400 and "sub-pixel impossible" in message_of(answer)
        # so commands say it in a line
        with pytest.raises(ValueError, match="sub-pixel impossible"):
            linpix.score(
                "startless", PICTURE, checkpoints=client.app.state.service.settings.checkpoints
            )
        assert (
            told(
                client,
                encode(np.where(np.arange(64).reshape(8, 8) == 0, 0, PICTURE).astype(np.uint8)),
                model="startless",
            )["counted"]
            == 64
        )
    assert others.metric(COUNTED % "failed") == failed


def test_values_that_are_not_finite_end_one_request_alone(others):
    with others.client() as client:
        answer = ask(client, model="broken")
        assert refusal(answer) == (500, "engine_failed")
        assert told(client, model="conditional")["counted"] == 64
    assert others.metric('linpix_faults_isolated_total{fault="not_finite",model="broken"}') == 1
    assert others.quiet("broken")


# --- bad input ---


@pytest.mark.parametrize(
    ("files", "fields", "status", "param", "words"),
    [
        ({}, {"label": "1"}, 415, None, "must be a form"),
        ({"mask": occluded()}, {}, 400, "image", "exactly one picture"),
        ({"image": occluded(), "mask": encode(PICTURE)}, {}, 400, "mask", "no alpha channel"),
        (
            {"image": occluded(), "mask": masked(np.zeros((8, 8), bool))},
            {},
            400,
            "mask",
            "hides nothing",
        ),
        ({"image": encode(PICTURE)}, {"keep_rows": "8"}, 400, "keep_rows", "hides nothing"),
        (
            {"image": encode(PICTURE), "mask": occluded()},
            {"keep_rows": "4"},
            400,
            "mask",
            "use one of them",
        ),
        ({"image": encode(PICTURE)}, {"label": "ten"}, 400, "label", "0..9"),
        ({"image": encode(PICTURE)}, {"labels": "some"}, 400, "labels", "got 'some'"),
        (
            {"image": encode(PICTURE)},
            {"response_format": "url"},
            400,
            "response_format",
            "b64_json",
        ),
        ({"image": encode(PICTURE)}, {"model": "big"}, 404, "model", "loaded: tiny"),
        ({"image": encode(PICTURE)}, {"timeout": "0"}, 400, "timeout", "greater than 0"),
    ],
)
def test_a_bad_upload_or_field_is_refused_and_holds_nothing(
    client, server, files, fields, status, param, words
):
    answer = client.post(
        PATH, files={name: ("p.png", data) for name, data in files.items()}, data=fields
    )
    assert_refused(answer, param, words, status)
    assert server.quiet("tiny")
    assert server.metric(COUNTED % "failed") == 0


# --- beside other requests ---


def test_images_drawn_meanwhile_are_the_same_bit_for_bit(server):
    with server.client() as client, ThreadPoolExecutor(8) as pool:
        body = {"n": 4, "seed": 40}
        expected = generate(client, **body).json()["data"]
        scores = [pool.submit(ask, client, labels="all") for _ in range(12)]
        drawn = [pool.submit(generate, client, **body) for _ in range(6)]
        assert all(answer.result().json()["data"] == expected for answer in drawn)
        [likelihood] = {score.result().json()["log_likelihood"] for score in scores}
        assert likelihood == told(client, labels="all")["log_likelihood"]


@pytest.fixture(scope="module")
def scoring(slow):
    with serving(slow, "--slots 1 --max-queue 1 --client-images 2") as process:
        yield process


def test_a_client_that_leaves_is_not_scored_any_further(scoring):
    completed = 'linpix_images_completed_total{backend="linear",model="slow",outcome="%s"}'

    left = 0

    # a client that leaves while its upload is decoded is not counted
    def left_three_times() -> bool:
        nonlocal left
        left += 1
        with (
            pytest.raises(httpx.TimeoutException),
            httpx.Client(base_url=scoring.url, timeout=0.2) as client,
        ):
            ask(client, LARGE, labels="all")
        return scoring.metric(COUNTED % "cancelled") >= 3

    assert eventually(left_three_times)
    assert eventually(lambda: scoring.quiet("slow"))
    assert scoring.metric(COUNTED % "cancelled") <= left, "each is counted once"
    assert all(
        scoring.metric(completed % outcome) == 0 for outcome in ("completed", "cancelled", "failed")
    )


def test_a_deadline_ends_a_request_and_frees_its_place(scoring):
    with scoring.client() as client:
        for given in ({"timeout": "0.15"}, {"headers": {"x-request-timeout": "0.15"}}):
            answer = ask(client, LARGE, labels="all", **given)
            assert refusal(answer) == (504, "deadline_passed")
        assert eventually(lambda: scoring.quiet("slow"))
        assert told(client, LARGE)["counted"] == 784


@pytest.mark.parametrize(
    ("limit", "code"),
    [({"max_queue": 1}, "queue_full"), ({"client_images": 2}, "client_limit")],
    ids=["queue", "client"],
)
def test_a_request_takes_the_place_of_one_image_in_queue_and_limits(tiny, monkeypatch, limit, code):
    begin, held = EngineThread.run_in_background, []
    monkeypatch.setattr(EngineThread, "run_in_background", lambda *work: held.append(work))
    with (
        here(tiny.parent, slots=1, **limit) as process,
        process.client() as client,
        ThreadPoolExecutor(6) as pool,
    ):
        asked = [pool.submit(ask, client) for _ in range(6)]
        assert eventually(lambda: sum(answer.done() for answer in asked) == 4 and len(held) == 2)
        refused = [answer.result() for answer in asked if answer.done()]
        assert {answer.status_code for answer in refused} == {429}
        assert {answer.json()["error"]["code"] for answer in refused} == {code}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        for work in held:
            begin(*work)
        assert [answer.result().status_code for answer in asked].count(200) == 2
        assert process.metric(COUNTED % "completed") == 2
        assert process.quiet("tiny")
