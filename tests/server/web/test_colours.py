"""A colour model that draws pixels and uses every known one, over HTTP: any hole, any picture."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.model.transformer import Transformer
from tests.server.conftest import serving
from tests.server.web.routes.test_images import edit, encode, events_of, generate, images_of, pixels

RANDOM = np.random.default_rng(0)
PICTURE = RANDOM.integers(0, 256, (8, 8, 3), dtype=np.uint8)
HOLES = {"everything": np.s_[:], "one pixel": np.s_[3, 5], "the first": np.s_[0, 0], "the last": np.s_[7, 7],
         "the upper border": np.s_[0], "the right border": np.s_[:, 7], "all but one": np.s_[1:],
         "a frame": np.s_[::7]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    config = replace(PRESETS["tiny"], channels=3, tokens="pixel", look_ups=("previous", "row", "column", "class"),
                     patch=4, neighbours=((0, -1, 0), (-1, 0, 1), (-1, 1, 2)), following=((0, 1, 0), (1, 0, 1)))
    folder = tmp_path_factory.mktemp("colours")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Transformer(config)
        for parameter in net.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    checkpoint.save(folder / "colours", net, {"class_names": [*"0123456789"]}, "# colours")
    with serving(folder) as process:
        yield process


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def holed(hole, picture: np.ndarray = PICTURE) -> tuple[bytes, np.ndarray]:
    """The picture, transparent where it has a hole, and what is known of it, (8, 8)."""
    alpha = np.full(picture.shape[:2], 255, np.uint8)
    alpha[hole] = 0
    return encode(np.dstack([picture, alpha])), alpha > 0


@pytest.mark.parametrize("name", HOLES)
def test_any_hole_is_filled_and_what_is_known_stays(client, name):
    image, known = holed(HOLES[name])
    answer = edit(client, image, n=3, seed=7)
    told, found = answer.json(), images_of(answer)
    late = known.reshape(-1)[np.argmin(known):].any()
    assert (told["known"], told["conditioning"]) == (3 * known.sum(), "full" if late else "prefix")
    assert all(np.array_equal(one[known], PICTURE[known]) for one in found)
    assert len({one.tobytes() for one in found}) > 1
    repainted = PICTURE.copy()
    repainted[~known] = 255 - PICTURE[~known]
    assert edit(client, holed(HOLES[name], repainted)[0], n=3, seed=7).json()["data"] == told["data"]


def test_nothing_hidden_comes_back_as_it_was(client):
    answer = edit(client, holed(np.s_[:0])[0], n=2, seed=1)
    assert answer.json()["known"] == 192 and all(np.array_equal(one, PICTURE) for one in images_of(answer))


def test_a_palette_a_larger_mask_a_portrait_and_a_panorama(client):
    palette = Image.fromarray(PICTURE).quantize(16)
    known = np.asarray(palette) != 3
    colours = np.asarray(palette.convert("RGB"))
    transparent = encode_palette(palette, 3)
    [found] = images_of(edit(client, transparent, seed=1))
    assert np.array_equal(found[known], colours[known]) and not known.all()

    mask = np.full((120, 120), 255, np.uint8)
    mask[30:60, 45:75] = 0  # of 15 a pixel
    [found] = images_of(edit(client, encode(PICTURE), mask=encode(np.dstack([mask, mask])), seed=1))
    kept = np.ones((8, 8), np.bool_)
    kept[2:4, 3:5] = False
    assert np.array_equal(found[kept], PICTURE[kept])

    long = RANDOM.integers(0, 256, (16, 64, 3), dtype=np.uint8)
    for turned in (False, True):
        shape = long.transpose(1, 0, 2) if turned else long
        alpha = np.full(shape.shape[:2], 255, np.uint8)
        alpha[(slice(56, 62), slice(4, 9)) if turned else (slice(4, 9), slice(56, 62))] = 0
        answer = edit(client, encode(np.dstack([shape, alpha])), seed=1, lay_back=True)
        assert answer.json()["crop"] == ([0, 48, 16, 64] if turned else [48, 0, 64, 16])
        [laid] = images_of(answer)
        assert laid.shape == shape.shape and np.array_equal(laid[alpha > 0], shape[alpha > 0])


def encode_palette(picture: Image.Image, transparent: int) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", transparency=transparent)
    return buffer.getvalue()


def test_candidates_are_those_whose_class_it_recognises_and_a_stream_has_their_rows(client):
    image, known = holed(np.s_[2:5, 1:6])
    best = edit(client, image, seed=3, n=2, candidates=5).json()["data"]
    assert best[0]["seed"] != best[1]["seed"] and all(0 < item["confidence"] <= 1 for item in best)
    for item in best:
        [alone] = edit(client, image, seed=item["seed"]).json()["data"]
        assert alone["b64_json"] == item["b64_json"]
    assert all(0 < item["confidence"] <= 1 for item in generate(client, seed=1, n=2, candidates=3).json()["data"])
    events = events_of(edit(client, image, seed=3, stream=True, partial_images=3).text)
    assert [event["rows"] for event in events[:-1]] == sorted(event["rows"] for event in events[:-1])
    whole = pixels(base64.b64decode(events[-1]["b64_json"]))
    assert np.array_equal(whole[known], PICTURE[known])


def test_likelihoods_have_three_numbers_a_pixel(client):
    image, known = holed(np.s_[2:5, 1:6])
    found = client.post("/v1/images/likelihoods", files={"image": image}, data={"labels": "all"}).json()
    assert (found["conditioning"], found["counted"]) == ("full", 45)
    bits = np.array(found["map"], dtype=np.float64)
    assert bits.shape == (8, 8, 3) and np.array_equal(np.isnan(bits), np.stack([known] * 3, -1))
    assert np.nansum(bits) * np.log(2) == pytest.approx(-found["log_likelihood"], rel=1e-5)
    assert sum(one["posterior"] for one in found["labels"]) == pytest.approx(1)


def test_what_makes_no_sense_in_colour_is_refused(client):
    answer = edit(client, holed(np.s_[2:5])[0], prepare="mnist")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prepare"
    assert "8x8 with 3 channels" in answer.json()["error"]["message"]


def test_readings_are_counted_once_a_request(client, server):
    name = 'linpix_prefill_seconds_count{model="colours"}'
    before = server.metric(name)
    edit(client, holed(np.s_[2:5])[0], n=4)
    edit(client, holed(np.s_[:])[0])  # nothing to read
    edit(client, holed(np.s_[:0])[0])  # nothing to draw
    assert server.metric(name) == before + 1
