"""Completions by sequential Monte Carlo over HTTP, against a real server process."""

import base64
import contextlib
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.server.conftest import eventually, serving
from tests.server.web.routes.test_images import PICTURE, edit, encode, events_of, images_of, occluded
from tests.server.web.test_candidates import BAND, COMPLETED, HOLE

COLUMN = np.full((28, 28), 255, np.uint8)
COLUMN[14:, 9:12] = 0  # known pixels follow hidden ones in each image row


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def smc(client, **fields) -> httpx.Response:
    return edit(client, HOLE, method="smc", **fields)


def test_an_answer_says_how_it_was_found_and_its_seed_finds_it_again(client):
    answer = smc(client, seed=5, n=3, particles=4)
    told, data = answer.json(), answer.json()["data"]
    assert (told["method"], told["particles"], told["candidates"]) == ("smc", 4, None)
    assert [item["seed"] for item in data] == [5, 6, 7]
    for item, image in zip(data, images_of(answer), strict=True):
        assert np.array_equal(image[BAND > 0], PICTURE[BAND > 0])
        assert 1 <= item["effective_sample_size"] <= 4 and item["log_evidence"] < 0
        assert item.keys() == {"b64_json", "seed", "effective_sample_size", "log_evidence"}
        assert [item] == smc(client, seed=item["seed"], particles=4).json()["data"]
    assert len({item["b64_json"] for item in data}) == 3


def test_it_is_off_unless_it_is_asked_for_and_has_16_particles_then(client):
    plain, named = edit(client, HOLE, seed=5).json(), edit(client, HOLE, seed=5, method="raster").json()
    assert plain["data"] == named["data"] and plain["data"][0].keys() == {"b64_json", "seed"}
    assert (plain["method"], plain["particles"]) == ("raster", None)
    assert edit(client, HOLE, seed=5, method="raster", particles=4).json()["particles"] is None
    assert smc(client, seed=5).json()["data"] == smc(client, seed=5, particles=16).json()["data"] != plain["data"]


def test_the_same_bytes_in_any_company(client):
    def ask() -> list[dict]:
        return smc(client, seed=11, n=2, particles=8).json()["data"]

    expected = ask()
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(ask) for _ in range(8)]
        others = [pool.submit(edit, client, HOLE, seed=seed, n=seed % 5 + 1) for seed in range(12)]
        assert all(answer.result() == expected for answer in answers)
        assert all(other.result().status_code == 200 for other in others)


def test_accept_png_is_the_answer_with_its_estimates(client):
    [item] = smc(client, seed=5, particles=8).json()["data"]
    answer = client.post("/v1/images/edits", files={"image": HOLE}, data={"seed": 5, "method": "smc", "particles": 8},
                         headers={"accept": "image/png"})
    assert answer.content == base64.b64decode(item["b64_json"])
    assert float(answer.headers["x-linpix-effective-sample-size"]) == item["effective_sample_size"]
    assert float(answer.headers["x-linpix-log-evidence"]) == item["log_evidence"]


def test_a_stream_has_the_answers_alone(client):
    data = smc(client, seed=5, n=2, particles=4).json()["data"]
    events = events_of(smc(client, seed=5, n=2, particles=4, stream=True).text)
    assert [(event["type"], event["image_index"]) for event in events] == [("image_edit.completed", 0),
                                                                           ("image_edit.completed", 1)]
    for event, item in zip(events, data, strict=True):
        assert item.items() <= event.items() and event["method"] == "smc"


@pytest.mark.parametrize(("fields", "param", "words"), [
    ({"method": "gibbs"}, "method", "'raster' or 'smc', got 'gibbs'"),
    ({"particles": 4}, "particles", "leave out particles"),
    ({"method": "smc", "particles": 1}, "particles", "greater than or equal to 2"),
    ({"method": "smc", "particles": 17}, "particles", "at most 16 here, got 17 particles and n=1"),
    ({"method": "smc", "conditioning": "prefix"}, "conditioning", "send one of them"),
    ({"method": "smc", "n": 2, "particles": 16}, "particles", "at most 16 here, got 16 particles and n=2"),
    ({"method": "smc", "candidates": 4}, "candidates", "leave out candidates"),
    ({"method": "smc", "temperature": 0.9}, "temperature", "at temperature 1, got 0.9"),
    ({"method": "smc", "stream": True, "partial_images": 1}, "partial_images", "leave out partial_images, got 1"),
    ({"method": "smc", "seed": 2**53 - 1, "n": 2, "particles": 2}, "seed", "largest seed is 9007199254740990"),
])
def test_invalid_options_are_refused_with_what_is_allowed(client, server, fields, param, words):
    answer = edit(client, HOLE, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]
    assert server.quiet("tiny")


def test_where_nothing_is_known_after_the_first_hole_it_is_refused(client, server):
    answer = edit(client, occluded(), method="smc")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "method"
    assert "leave out method" in answer.json()["error"]["message"]
    assert server.quiet("tiny")


def test_generations_have_no_method(client):
    answer = client.post("/v1/images/generations", json={"method": "smc", "particles": 4}).json()
    assert answer["warnings"] == ["ignored: method, particles"] and len(answer["data"]) == 1


# --- beside other requests ---

@pytest.fixture(scope="module")
def room(slow):
    with serving(slow, "--slots", "4", "--max-queue", "8") as process:
        yield process


def large(client, **fields) -> httpx.Response:
    picture = encode(np.stack([np.zeros_like(COLUMN), COLUMN], -1))
    return client.post("/v1/images/edits", files={"image": picture}, data={"method": "smc", **fields})


def test_particles_are_admitted_as_images_as_many_as_there_are_slots(room):
    with room.client() as client, ThreadPoolExecutor(4) as pool:
        refused = large(client, particles=5)
        assert refused.status_code == 400 and "at most 4 here" in refused.json()["error"]["message"]
        drawn = room.metric(COMPLETED % "completed")
        answers = [answer.result() for answer in [pool.submit(large, client, particles=4) for _ in range(4)]]
        accepted = [answer for answer in answers if answer.status_code == 200]
        assert {answer.json()["error"]["code"] for answer in answers if answer not in accepted} <= {"queue_full"}
        assert room.metric(COMPLETED % "completed") == drawn + 4 * len(accepted)
        assert accepted and all(len(answer.json()["data"]) == 1 for answer in accepted)
    assert room.quiet("slow")


def test_clients_that_leave_at_any_moment_leave_nothing_behind(room):
    chance = random.Random(0)
    for _ in range(12):
        with (contextlib.suppress(httpx.TimeoutException),
              httpx.Client(base_url=room.url, timeout=chance.uniform(0.05, 0.5)) as client):
            assert large(client, particles=4, stream=True).status_code == 200
        assert eventually(lambda: room.quiet("slow"))
    assert room.metric('linpix_images_waiting{model="slow",priority="interactive"}') == 0
    with room.client() as client:
        assert large(client, particles=4).status_code == 200, "there is room for all that fit"


def test_a_deadline_ends_all_particles(room):
    with room.client() as client:
        codes = {large(client, particles=4, timeout=seconds).status_code for seconds in (0.005, 0.02, 60)}
        assert codes == {200, 504}
    assert eventually(lambda: room.quiet("slow"))
