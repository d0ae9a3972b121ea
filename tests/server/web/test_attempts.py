"""Images that are drawn again until the model recognises their class, over HTTP."""

import base64
from pathlib import Path

import numpy as np
import pytest

from linpix.model import checkpoint
from linpix.model.attempts import RECOGNISED
from linpix.model.config import PRESETS
from linpix.model.likelihood import class_log_probs_of
from tests.nets import CLASS_FIRST, perturbed_net, saved
from tests.server.web.routes.test_images import (
    PICTURE,
    assert_refused,
    edit,
    encode,
    events_of,
    generate,
    images_of,
)
from tools.harness.servers import here

HIDDEN = np.full((8, 8), 255, np.uint8)
HIDDEN[4:] = 0
HALF = encode(np.stack([PICTURE, HIDDEN], -1))
AGAIN = 'linpix_images_drawn_again_total{backend="linear",model="%s"}'
FIRST_ROWS = 'linpix_first_row_seconds_count{model="%s"}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`once` and `thrice` draw the class first; `thrice` says itself that three attempts are made.
    `plain` does not.
    """
    folder = tmp_path_factory.mktemp("attempts")
    for name, config, own in (
        ("once", CLASS_FIRST, {}),
        ("thrice", CLASS_FIRST, {"attempts": 3}),
        ("plain", PRESETS["tiny"], {}),
    ):
        saved(folder / name, perturbed_net(config), **own)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with here(folder, precision="fp32") as process:
        yield process


def test_the_label_of_an_answer_is_a_label_for_the_same_class(folder, tmp_path):
    """Classes 1 to 10: an index is the name of another class."""
    net, names = checkpoint.read(folder / "once").net, [str(number) for number in range(1, 11)]
    checkpoint.save(tmp_path / "counted", net, {"class_names": names}, "")
    with here(tmp_path) as server, server.client() as client:
        for name in names:
            body = {"prompt": name, "seed": 3, "candidates": 1}
            [drawn] = generate(client, **body).json()["data"]
            [event] = events_of(generate(client, **body, stream=True).text)
            assert drawn["revised_prompt"] == name and event["label"] == drawn["label"]
            [again] = generate(client, **body | {"label": drawn["label"]}).json()["data"]
            assert again == drawn
            alone = generate(client, headers={"accept": "image/png"}, **body)
            assert alone.headers["x-linpix-label"] == str(drawn["label"])


def ask(client, route: str, **fields):
    return generate(client, **fields) if route == "generations" else edit(client, HALF, **fields)


@pytest.mark.parametrize("route", ["generations", "edits"])
def test_an_answer_has_its_attempts_and_how_sure_the_model_is_of_it(client, folder, route):
    data = ask(client, route, model="once", seed=3, n=3, label=4, attempts=3)
    net = checkpoint.load(folder / "once")
    assert data.status_code == 200, data.text
    for number, (item, image) in enumerate(zip(data.json()["data"], images_of(data), strict=True)):
        assert item.keys() == {"b64_json", "seed", "label", "confidence", "confident", "attempts"}
        assert item["confidence"] < RECOGNISED and item["confident"] is False
        assert (item["seed"], item["label"], item["attempts"]) == (3 + number, 4, 3)
        assert item["confidence"] == pytest.approx(
            np.exp(class_log_probs_of(net, image.reshape(-1))[4]), rel=1e-4
        )
        assert route == "generations" or np.array_equal(image[:4], PICTURE[:4])
    [warning] = data.json()["warnings"]
    assert warning.startswith("unsure of seed 3, 4, 5: ")


def test_the_seed_of_an_answer_draws_the_same_bytes_alone_with_as_many_attempts(client):
    every = generate(client, model="once", seed=3, n=3, attempts=3).json()["data"]
    for item in every:
        assert generate(client, model="once", seed=item["seed"], attempts=3).json()["data"] == [
            item
        ]


def test_a_png_answer_has_the_attempts_in_its_headers(client):
    [item] = generate(client, model="once", seed=5, attempts=3).json()["data"]
    png = generate(client, headers={"accept": "image/png"}, model="once", seed=5, attempts=3)
    assert png.content == base64.b64decode(item["b64_json"])
    assert (png.headers["x-linpix-attempts"], png.headers["x-linpix-seed"]) == ("3", "5")
    assert float(png.headers["x-linpix-confidence"]) == item["confidence"]
    assert png.headers["x-linpix-confident"] == "false"
    assert "unsure of seed 5: " in png.headers["x-linpix-warnings"]
    array = generate(
        client, headers={"accept": "application/x-npy"}, model="once", seed=5, n=2, attempts=3
    )
    assert array.headers["x-linpix-attempts"] == "3,3"


# --- streams ---


@pytest.mark.parametrize("route", ["generations", "edits"])
@pytest.mark.parametrize("partial", [0, 2, None])
def test_a_stream_has_the_partial_images_of_every_attempt_and_then_the_answer(
    client, route, partial
):
    asked = {"model": "once", "seed": 3, "n": 2, "attempts": 3}
    data = ask(client, route, **asked).json()["data"]
    events = events_of(
        ask(
            client,
            route,
            **asked,
            stream=True,
            **({} if partial is None else {"partial_images": partial}),
        ).text
    )
    rows = 8 if route == "generations" else 4
    for number, item in enumerate(data):
        *parts, last = [event for event in events if event["image_index"] == number]
        assert last["type"].endswith(".completed") and item.items() <= last.items()
        numbers = [event["partial_image_index"] for event in parts]
        assert numbers == 3 * [*range(rows if partial is None else partial)]
        shown = [event["rows"] for event in parts]
        assert len(set(zip(numbers, shown, strict=True))) == len(set(numbers)), (
            "a number stands for one row"
        )
        assert all("confidence" not in event and "attempts" not in event for event in parts)
    assert {event["type"].rsplit(".", 1)[1] for event in events[-1:]} == {"completed"}


# --- what is asked for ---


@pytest.mark.parametrize("route", ["generations", "edits"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attempts": 2, "candidates": 4}, "got 4 candidates and 2 attempts"),
        (
            {"attempts": 2, "temperature": 0},
            "at temperature 0 further attempts draw the same image",
        ),
        ({"attempts": 0}, "greater than or equal to 1"),
        ({"attempts": 17}, "less than or equal to 16"),
        ({"attempts": "many"}, "valid integer"),
    ],
)
def test_attempts_that_cannot_be_are_refused_with_what_is_allowed(client, route, fields, words):
    assert_refused(ask(client, route, model="once", **fields), "attempts", words)


@pytest.mark.parametrize("route", ["generations", "edits"])
@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ({"model": "plain"}, set()),
        ({"model": "once"}, set()),
        ({"model": "thrice", "temperature": 0}, set()),
        ({"model": "thrice", "candidates": 4}, {"label", "confidence", "confident"}),
    ],
)
def test_one_attempt_is_accepted_everywhere_and_draws_as_ever(client, route, fields, keys):
    once, plain = (
        ask(client, route, seed=3, **fields, **more).json()["data"]
        for more in ({"attempts": 1}, {})
    )
    assert once == plain and once[0].keys() == {"b64_json", "seed"} | keys


@pytest.mark.parametrize("route", ["generations", "edits"])
def test_a_request_that_says_nothing_gets_the_attempts_of_its_model(client, route):
    own, said, once = (
        ask(client, route, seed=3, **fields).json()["data"]
        for fields in ({"model": "thrice"}, {"model": "once", "attempts": 3}, {"model": "once"})
    )
    assert own == said and own[0]["attempts"] == 3 and "attempts" not in once[0]


def test_a_comparison_that_names_no_model_is_of_the_first_that_can_be_compared(client):
    begun = client.post("/v1/compare", json={"budget": 1, "batch": [1], "backends": ["linear"]})
    assert begun.status_code == 202, begun.text
    assert begun.json()["model"] == "plain" != client.get("/v1/models").json()["data"][0]["id"]
    client.delete(f"/v1/compare/{begun.json()['id']}")


@pytest.mark.parametrize(
    ("fields", "again"),
    [
        ({"model": "once", "attempts": 4, "n": 2}, 6),
        ({"model": "thrice"}, 2),
        ({"model": "once"}, 0),
        ({"model": "once", "candidates": 4}, 0),
    ],
)
def test_images_that_are_drawn_again_are_counted_and_first_rows_once_an_image(
    client, server, fields, again
):
    name, images = AGAIN % fields["model"], fields.get("candidates", fields.get("n", 1))
    first_rows = FIRST_ROWS % fields["model"]
    before = server.metric(name), server.metric(first_rows)
    assert generate(client, seed=3, **fields).status_code == 200
    assert server.metric(name) - before[0] == again
    assert server.metric(first_rows) - before[1] == images


def test_a_whole_picture_is_answered_with_how_sure_the_model_is_and_was_drawn_once(
    client, server, folder
):
    whole = encode(np.stack([PICTURE, np.full((8, 8), 255, np.uint8)], -1))
    before = server.metric(AGAIN % "once")
    answer = edit(client, whole, model="once", seed=3, attempts=9)
    assert np.array_equal(images_of(answer)[0], PICTURE)
    expected = np.exp(
        class_log_probs_of(checkpoint.load(folder / "once"), PICTURE.reshape(-1)).max()
    )
    assert answer.json()["data"][0]["confidence"] == pytest.approx(expected, rel=1e-4)
    assert answer.json()["data"][0]["attempts"] == 1 and server.metric(AGAIN % "once") == before
