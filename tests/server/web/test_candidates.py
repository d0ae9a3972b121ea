"""Requests that answer the best of several candidates, over HTTP, against a real server process."""

import base64
from dataclasses import replace

import numpy as np
import pytest
import torch

from linpix.model import checkpoint
from linpix.model.attempts import Recognised
from linpix.model.config import PRESETS
from linpix.model.generate import starts_of
from linpix.model.inputs import START
from linpix.model.likelihood import class_log_probs_of
from linpix.server.engine.image import best_of as best
from tests.nets import CONDITIONAL, perturbed_net, saved
from tests.server.web.routes.test_images import (
    PICTURE,
    assert_refused,
    edit,
    encode,
    events_of,
    generate,
    images_of,
    message_of,
    refusal,
)
from tools.harness.servers import here

BAND = np.full((8, 8), 255, np.uint8)
BAND[2:4] = 0  # hidden: something is known before and after it
HOLE = encode(np.stack([PICTURE, BAND], -1))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """A conditional model, one whose class head is broken, and one without a start token."""
    folder, startless = tmp_path_factory.mktemp("others"), (1.0,) + (0.0,) * 255
    for name, config in (
        ("conditional", CONDITIONAL),
        ("broken", CONDITIONAL),
        ("startless", replace(PRESETS["tiny"], classes=0, first_marginal=startless)),
    ):
        net = perturbed_net(config)
        if name == "broken":  # who names a class draws images without it
            net.class_head.weight.data[3] = 3e38
        saved(folder / name, net)
    with here(folder, precision="fp32") as process:  # as what it is compared with
        process.folder = folder
        yield process


def test_a_candidate_without_a_score_ends_its_request_alone(others):
    with others.client() as client:
        assert len(images_of(edit(client, HOLE, model="broken", label=3, seed=3, n=6))) == 6
        failed = edit(client, HOLE, model="broken", label=3, seed=3, candidates=6)
        assert refusal(failed) == (500, "engine_failed")
    assert others.quiet("broken")
    assert others.metric('linpix_images_waiting{model="broken",priority="interactive"}') == 0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"candidates": 0}, "candidates", "greater than or equal to 1, got '0'"),
        ({"candidates": "8_0"}, "candidates", "must not have underscores"),
        ({"candidates": "many"}, "candidates", "valid integer"),
        ({"candidates": 17}, "candidates", "must be 1..16 here, got 17"),
        (
            {"candidates": 2, "stream": True, "partial_images": 1},
            "partial_images",
            "leave out partial_images, got 1",
        ),
    ],
)
def test_invalid_options_are_refused_with_what_is_allowed(others, fields, param, words):
    with others.client() as client:
        assert_refused(edit(client, HOLE, model="conditional", **fields), param, words)
    assert others.quiet("conditional")


@pytest.mark.parametrize("option", ["candidates", "attempts"])
def test_a_model_that_cannot_recognise_classes_names_one_that_can(others, server, option):
    with others.client() as client:
        answers = [
            edit(client, HOLE, model="startless", **{option: 4}),
            generate(client, model="startless", **{option: 4}),
        ]
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, option)
        assert (
            message_of(answer)
            == f"{option} need a model that can recognise classes, and startless cannot; leave out"
            f" {option}, or use a model that draws the class first, such as broken"
        )
    assert others.quiet("startless")
    with server.client() as client:  # which has no such model
        refused = generate(client, model="tiny", **{option: 4}).json()["error"]
    assert refused["message"].endswith("or use a model that draws the class first")


def test_a_model_that_cannot_use_later_pixels_names_one_that_can(others):
    with others.client() as client:
        answer = edit(client, HOLE, model="startless").json()
        refused = edit(client, HOLE, model="startless", conditioning="full").json()["error"]
        before = edit(client, HOLE, model="startless", conditioning="prefix").json()
    assert (answer["conditioning"], before["conditioning"]) == ("partial", "prefix")
    assert answer["warnings"] == [
        "startless does not use known pixels for what it draws before them; broken uses all "
        "known pixels"
    ]
    assert before["warnings"] == [], "it was asked not to use them"
    assert (
        refused["param"] == "conditioning"
        and "choose broken (GET /v1/models)" in refused["message"]
    )


@pytest.mark.parametrize("asked", ["generations", "edits"])
@pytest.mark.parametrize("label", [None, 4])
def test_a_model_that_draws_the_class_first_answers_the_candidates_it_recognises(
    others, asked, label
):
    given = {"seed": 3} if label is None else {"seed": 3, "label": label}
    net = checkpoint.load(others.folder / "conditional")
    with others.client() as client:

        def ask(**fields):
            return (
                generate(client, model="conditional", **given, **fields)
                if asked == "generations"
                else edit(client, HOLE, model="conditional", **given, **fields)
            )

        every, answer = ask(n=8), ask(n=3, candidates=8)
    drawn = [image.reshape(-1) for image in images_of(every)]
    labels = [label] * 8
    if label is None:  # as starts_of draws them
        canvas, known = (
            torch.from_numpy(PICTURE.reshape(1, -1)),
            torch.from_numpy(BAND.reshape(1, -1) > 0),
        )
        scores = (
            torch.zeros(8, 10)
            if asked == "generations"
            else net.read(canvas, known, net.attention.new_state(1), torch.tensor([1])).expand(
                8, -1
            )
        )
        starts = starts_of(net, scores, np.arange(3, 11), torch.full((8,), START))
        labels = (starts - START - 1).tolist()
    log_probs = [
        class_log_probs_of(net, image)[of] for image, of in zip(drawn, labels, strict=True)
    ]
    chosen = best([*map(Recognised, labels, log_probs)], 3)
    assert (answer.json()["candidates"], every.json()["candidates"]) == (8, None)
    assert [item["seed"] for item in answer.json()["data"]] == [3 + index for index in chosen]
    for item, image, index in zip(answer.json()["data"], images_of(answer), chosen, strict=True):
        assert np.array_equal(image.reshape(-1), drawn[index])
        assert item["confidence"] == pytest.approx(np.exp(log_probs[index]), rel=1e-4)
        assert (
            item.keys() == {"b64_json", "seed", "label", "confidence", "confident"}
            and item["label"] == labels[index]
        )


def test_a_stream_and_a_png_of_generations_have_the_recognised_ones(others):
    with others.client() as client:
        data = generate(client, model="conditional", seed=5, n=2, candidates=8).json()["data"]
        events = events_of(
            generate(client, model="conditional", seed=5, n=2, candidates=8, stream=True).text
        )
        png = generate(
            client, headers={"accept": "image/png"}, model="conditional", seed=5, candidates=8
        )
    assert [event["type"] for event in events] == ["image_generation.completed"] * 2
    for event, item in zip(events, data, strict=True):
        assert item.items() <= event.items() and event["candidates"] == 8
    assert png.content == base64.b64decode(data[0]["b64_json"])
    assert float(png.headers["x-linpix-confidence"]) == data[0]["confidence"]
