"""Requests that answer the best of several candidates, over HTTP, against a real server process."""

import base64
import contextlib
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch

from linpix.model import checkpoint, mixture
from linpix.model.attempts import Recognised
from linpix.model.config import PRESETS
from linpix.model.generate import starts_of
from linpix.model.inputs import START
from linpix.model.likelihood import class_log_probs_of
from linpix.model.transformer import Transformer
from linpix.server.engine.answers.ranking import best, likelihoods, recognised
from tests.server.conftest import eventually, serving
from tests.server.web.routes.test_images import PICTURE, edit, encode, events_of, images_of, pixels

BAND = np.full((8, 8), 255, np.uint8)
BAND[2:4] = 0  # hidden: something is known before and after it
HOLE = encode(np.stack([PICTURE, BAND], -1))
LARGE = encode(np.zeros((28, 28), np.uint8))  # of the size of `slow`
COMPLETED = 'linpix_images_completed_total{backend="linear",model="slow",outcome="%s"}'


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def test_the_best_candidates_are_answered_as_their_seeds_draw_them_alone(client, tiny):
    answer = edit(client, HOLE, seed=5, n=3, candidates=8)
    data, every = answer.json()["data"], edit(client, HOLE, seed=5, n=8)
    drawn, net = images_of(every), checkpoint.read(tiny).net
    assert (answer.json()["candidates"], every.json()["candidates"]) == (8, None)
    assert every.json()["data"][0].keys() == {"b64_json", "seed"}
    flat = torch.from_numpy(np.stack(drawn).reshape(8, 64))
    with torch.inference_mode():
        log_probs = mixture.log_likelihood(net(flat), flat).float().numpy()
    found = [likelihoods(one, BAND.reshape(-1) > 0) for one in log_probs]
    chosen = best(list(flat.numpy()), [one.score for one in found], 3)
    assert [item["seed"] for item in data] == [5 + index for index in chosen]
    for item, image, index in zip(data, images_of(answer), chosen, strict=True):
        assert np.array_equal(image, drawn[index])
        assert item["score"] == pytest.approx(found[index].score, abs=1e-3)
        assert item["log_likelihood"] == pytest.approx(found[index].log_likelihood, abs=1e-3)
        assert item["log_likelihood"] < item["score"] < 0


def test_a_class_asked_for_is_the_one_that_likelihoods_assume(client):
    [free], [seven] = (edit(client, HOLE, seed=5, candidates=1, **given).json()["data"] for given in ({}, {"label": 7}))
    assert free["score"] != seven["score"]


def test_the_same_bytes_in_any_company(client):
    def ask() -> list[dict]:
        return edit(client, HOLE, seed=11, n=2, candidates=6).json()["data"]

    expected = ask()
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask) for _ in range(6)]
        others = [pool.submit(edit, client, HOLE, seed=seed, n=4) for seed in range(6)]
        scored = [pool.submit(client.post, "/v1/images/likelihoods", files={"image": HOLE}) for _ in range(6)]
        assert all(answer.result() == expected for answer in answers)
        assert all(other.result().status_code == 200 for other in others + scored)


def test_accept_png_is_the_best_one_with_its_seed_and_score(client):
    [item] = edit(client, HOLE, seed=5, candidates=8).json()["data"]
    answer = client.post("/v1/images/edits", files={"image": HOLE}, data={"seed": 5, "candidates": 8},
                         headers={"accept": "image/png"})
    assert answer.content == base64.b64decode(item["b64_json"])
    assert answer.headers["x-linpix-seed"] == str(item["seed"])
    assert float(answer.headers["x-linpix-score"]) == item["score"]
    assert float(answer.headers["x-linpix-log-likelihood"]) == item["log_likelihood"]


def test_headers_of_the_picture_are_documented_for_edits_alone(client):
    paths = client.get("/openapi.json").json()["paths"]
    for route in ("edits", "generations"):
        headers = paths[f"/v1/images/{route}"]["post"]["responses"]["200"]["headers"]
        assert headers["X-LinPix-Seed"]["schema"]["type"] == "integer"
        assert ("X-LinPix-Score" in headers) == ("X-LinPix-Log-Likelihood" in headers) == (route == "edits")
        assert headers.get("X-LinPix-Score", {"schema": {"type": "number"}})["schema"]["type"] == "number"


def test_a_stream_has_the_best_ones_alone_when_all_are_drawn(client):
    data = edit(client, HOLE, seed=5, n=2, candidates=8).json()["data"]
    events = events_of(edit(client, HOLE, seed=5, n=2, candidates=8, stream=True).text)
    assert [event["type"] for event in events] == ["image_edit.completed"] * 2
    assert [event["image_index"] for event in events] == [0, 1]
    for event, item in zip(events, data, strict=True):
        assert item.items() <= event.items() and event["candidates"] == 8


def test_with_nothing_to_fill_the_candidates_are_alike(client):
    answer = edit(client, encode(np.stack([PICTURE, np.full((8, 8), 255, np.uint8)], -1)), n=2, candidates=3, seed=1)
    assert [(item["seed"], item["score"]) for item in answer.json()["data"]] == [(1, 0.0), (2, 0.0)]
    assert all(np.array_equal(image, PICTURE) for image in images_of(answer))


def test_they_are_laid_back_too(client):
    large = np.stack([PICTURE, BAND], -1).repeat(3, 0).repeat(3, 1)
    laid, plain = (edit(client, encode(large), seed=5, n=2, candidates=4, lay_back=given) for given in (True, False))
    assert laid.json()["size"] == "24x24"
    assert [item["seed"] for item in laid.json()["data"]] == [item["seed"] for item in plain.json()["data"]]
    assert all(np.array_equal(image[:6], large[:6, :, 0]) for image in images_of(laid))


@pytest.mark.parametrize(("fields", "param", "words"), [
    ({"candidates": 0}, "candidates", "greater than or equal to 1, got '0'"),
    ({"candidates": "8_0"}, "candidates", "must not have underscores"),
    ({"candidates": "many"}, "candidates", "valid integer"),
    ({"candidates": 17}, "candidates", "must be 1..16 here, got 17"),
    ({"candidates": 3, "n": 4}, "candidates", "must be 4..16 here, got 3"),
    ({"candidates": 2, "seed": 2**53 - 1}, "seed", "with 2 images the largest seed is 9007199254740990"),
    ({"candidates": 2, "stream": True, "partial_images": 1}, "partial_images", "leave out partial_images, got 1"),
])
def test_invalid_options_are_refused_with_what_is_allowed(client, server, fields, param, words):
    answer = edit(client, HOLE, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]
    assert server.quiet("tiny")


def test_a_model_that_cannot_recognise_classes_has_none_of_generations(client, server):
    answer = client.post("/v1/images/generations", json={"candidates": 4})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "candidates")
    assert "tiny cannot; leave out candidates" in answer.json()["error"]["message"]
    assert server.quiet("tiny")


# --- other models ---

@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """A conditional model, one whose class head is broken, and one without a start token."""
    folder, tiny = tmp_path_factory.mktemp("others"), PRESETS["tiny"]
    configs = {
        "conditional": replace(tiny, patch=4, following=((0, 1, 0), (1, 0, 0)), background=0, background_dim=16,
                               look_ups=("previous", "row", "column", "class")),
        "broken": None, "startless": replace(tiny, classes=0, first_marginal=(1.0,) + (0.0,) * 255)}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, config in configs.items():
            net = Transformer(config or configs["conditional"])
            for parameter in net.parameters():
                parameter.data += 0.1 * torch.randn_like(parameter)
            if name == "broken":  # who names a class draws images without it
                net.class_head.weight.data[3] = 3e38
            names = [str(i) for i in range(net.config.classes)]
            checkpoint.save(folder / name, net, {"class_names": names}, f"# {name}")
    with serving(folder, "--precision", "fp32") as process:  # as what it is compared with
        process.folder = folder
        yield process


def test_what_the_model_takes_for_impossible_is_ranked_too(others):
    with others.client() as client:
        answer = edit(client, HOLE, model="startless", seed=3, n=2, candidates=6).json()
        every = {item["seed"]: item["b64_json"]
                 for item in edit(client, HOLE, model="startless", seed=3, n=6).json()["data"]}
    for item in answer["data"]:
        assert every[item["seed"]] == item["b64_json"]
        assert -1e5 < item["log_likelihood"] < item["score"] < 0
    image = pixels(base64.b64decode(answer["data"][0]["b64_json"]))
    assert np.array_equal(image[BAND > 0], PICTURE[BAND > 0])


def test_a_candidate_without_a_score_ends_its_request_alone(others):
    with others.client() as client:
        assert len(images_of(edit(client, HOLE, model="broken", label=3, seed=3, n=6))) == 6
        failed = edit(client, HOLE, model="broken", label=3, seed=3, candidates=6)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_failed")
    assert others.quiet("broken")
    assert others.metric('linpix_images_waiting{model="broken",priority="interactive"}') == 0


def test_a_model_that_cannot_use_later_pixels_names_one_that_can(others):
    with others.client() as client:
        answer = edit(client, HOLE, model="startless").json()
        refused = edit(client, HOLE, model="startless", conditioning="full").json()["error"]
        before = edit(client, HOLE, model="startless", conditioning="prefix").json()
    assert (answer["conditioning"], before["conditioning"]) == ("partial", "prefix")
    assert answer["warnings"] == ["startless does not use known pixels for what it draws before them; broken uses all "
                                  "known pixels"]
    assert before["warnings"] == [], "it was asked not to use them"
    assert refused["param"] == "conditioning" and "choose broken (GET /v1/models)" in refused["message"]


# --- beside other requests ---

@pytest.fixture(scope="module")
def room(slow):
    with serving(slow, "--slots", "2", "--max-queue", "4", "--client-images", "6") as process:
        yield process


def large(client, **fields) -> httpx.Response:
    return client.post("/v1/images/edits", files={"image": LARGE}, data={"keep_rows": 20, **fields})


def test_candidates_are_admitted_as_images_and_hold_their_place_until_they_are_scored(room):
    with room.client() as client, ThreadPoolExecutor(4) as pool:
        refused = large(client, candidates=7)
        assert refused.status_code == 400 and "must be 1..6 here, got 7" in refused.json()["error"]["message"]
        drawn = room.metric(COMPLETED % "completed")
        answers = [answer.result() for answer in [pool.submit(large, client, candidates=4) for _ in range(4)]]
        accepted = [answer for answer in answers if answer.status_code == 200]
        assert {answer.json()["error"]["code"] for answer in answers if answer not in accepted} == {"client_limit"}
        assert 1 <= len(accepted) < 4 and all(len(answer.json()["data"]) == 1 for answer in accepted)
        assert room.metric(COMPLETED % "completed") == drawn + 4 * len(accepted)
    assert room.quiet("slow")


def test_clients_that_leave_at_any_moment_leave_nothing_behind(room):
    def counts() -> float:
        return sum(room.metric(COMPLETED % outcome) for outcome in ("completed", "cancelled", "failed"))

    chance, before = random.Random(0), counts()
    for _ in range(12):
        with (contextlib.suppress(httpx.TimeoutException),
              httpx.Client(base_url=room.url, timeout=chance.uniform(0.05, 0.5)) as client):
            assert large(client, candidates=6, stream=True).status_code == 200
        assert eventually(lambda: room.quiet("slow"))
    assert counts() <= before + 12 * 6, "one that leaves while its upload is decoded has no images yet"
    assert room.metric('linpix_images_waiting{model="slow",priority="interactive"}') == 0
    with room.client() as client:
        assert large(client, candidates=6).status_code == 200, "there is room for all that fit"


def test_a_client_that_leaves_while_its_candidates_are_scored_leaves_nothing_behind(room):
    """All of its sub-pixels are drawn, and yet some of its images are cancelled: they had no score."""
    drawn = 'linpix_pixels_generated_total{backend="linear",model="slow"}'
    before = room.metric(drawn)
    with room.client() as client:
        assert large(client, candidates=6).status_code == 200
    every = room.metric(drawn) - before

    def left_between() -> bool:
        pixels, cancelled = room.metric(drawn), room.metric(COMPLETED % "cancelled")
        with room.client() as client, client.stream("POST", "/v1/images/edits", files={"image": LARGE}, data={
                "keep_rows": 20, "candidates": 6, "stream": True}) as answer:
            assert answer.status_code == 200
            assert eventually(lambda: room.metric(drawn) == pixels + every)
        assert eventually(lambda: room.quiet("slow"))
        return room.metric(COMPLETED % "cancelled") > cancelled

    assert any(left_between() for _ in range(20))
    with room.client() as client:
        assert large(client, candidates=6).status_code == 200, "there is room for all that fit"


def test_a_deadline_ends_a_request_whose_candidates_are_still_scored(room):
    with room.client() as client:
        codes = {large(client, candidates=6, timeout=seconds).status_code for seconds in (0.02, 0.1, 0.2, 60)}
        assert codes <= {200, 504} and 504 in codes and 200 in codes
    assert eventually(lambda: room.quiet("slow"))


def generate(client, **fields):
    return client.post("/v1/images/generations", json={"model": "conditional", **fields})


@pytest.mark.parametrize("asked", ["generations", "edits"])
@pytest.mark.parametrize("label", [None, 4])
def test_a_model_that_draws_the_class_first_answers_the_candidates_it_recognises(others, asked, label):
    given = {"seed": 3} if label is None else {"seed": 3, "label": label}
    net = checkpoint.load(others.folder / "conditional")
    with others.client() as client:
        def ask(**fields):
            return (generate(client, **given, **fields) if asked == "generations" else
                    edit(client, HOLE, model="conditional", **given, **fields))
        every, answer = ask(n=8), ask(n=3, candidates=8)
    drawn = [image.reshape(-1) for image in images_of(every)]
    labels = [label] * 8
    if label is None:  # as starts_of draws them
        canvas, known = torch.from_numpy(PICTURE.reshape(1, -1)), torch.from_numpy(BAND.reshape(1, -1) > 0)
        scores = (torch.zeros(8, 10) if asked == "generations" else
                  net.read(canvas, known, net.attention.new_state(1), torch.tensor([1])).expand(8, -1))
        starts = starts_of(net, scores, np.arange(3, 11), torch.full((8,), START))
        labels = (starts - START - 1).tolist()
    log_probs = [class_log_probs_of(net, image)[of] for image, of in zip(drawn, labels, strict=True)]
    chosen = recognised([*map(Recognised, labels, log_probs)], 3)
    assert (answer.json()["candidates"], every.json()["candidates"]) == (8, None)
    assert [item["seed"] for item in answer.json()["data"]] == [3 + index for index in chosen]
    for item, image, index in zip(answer.json()["data"], images_of(answer), chosen, strict=True):
        assert np.array_equal(image.reshape(-1), drawn[index])
        assert item["confidence"] == pytest.approx(np.exp(log_probs[index]), rel=1e-4)
        assert item.keys() == {"b64_json", "seed", "label", "confidence"} and item["label"] == labels[index]


def test_a_stream_and_a_png_of_generations_have_the_recognised_ones(others):
    with others.client() as client:
        data = generate(client, seed=5, n=2, candidates=8).json()["data"]
        events = events_of(generate(client, seed=5, n=2, candidates=8, stream=True).text)
        png = client.post("/v1/images/generations", json={"model": "conditional", "seed": 5, "candidates": 8},
                          headers={"accept": "image/png"})
    assert [event["type"] for event in events] == ["image_generation.completed"] * 2
    for event, item in zip(events, data, strict=True):
        assert item.items() <= event.items() and event["candidates"] == 8
    assert png.content == base64.b64decode(data[0]["b64_json"])
    assert float(png.headers["x-linpix-confidence"]) == data[0]["confidence"]


def test_with_nothing_to_draw_the_confidence_is_of_what_the_picture_is_taken_for(others):
    whole = encode(np.stack([PICTURE, np.full((8, 8), 255, np.uint8)], -1))
    net = checkpoint.load(others.folder / "conditional")
    with others.client() as client:
        answer = edit(client, whole, model="conditional", seed=3, n=1, candidates=2)
    assert np.array_equal(images_of(answer)[0], PICTURE)
    expected = np.exp(class_log_probs_of(net, PICTURE.reshape(-1)).max())
    assert answer.json()["data"][0]["confidence"] == pytest.approx(expected, rel=1e-4)
