"""A model with a palette over HTTP: pictures in its colours, uploads in any, transparent ground."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

import linpix
from linpix.model.palette import nearest, pictures_of
from tests.linpix.test_main import succeeds
from tests.nets import COLOURS, PALETTE, net_of, saved
from tests.server.pictures.test_animation import frames_of
from tests.server.web.routes.test_images import assert_refused, edit, encode, generate
from tools.harness.servers import here

# opaque but for the left third of the upper half, which is ground
VALUES = np.random.default_rng(0).integers(1, 4, (8, 8), dtype=np.uint8)
VALUES[:4, :3] = 0
PICTURE = pictures_of(VALUES.reshape(1, 64), PALETTE)[0]
KEPT = np.arange(8)[:, None].repeat(8, 1) < 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("few") / "few", net_of(PALETTE, spread=0.1))


@pytest.fixture(scope="module")
def server(folder):
    with here(folder.parent) as process:
        yield process


def mask_of(kept: np.ndarray) -> bytes:
    return encode(np.dstack([kept, kept]).astype(np.uint8) * 255)


def opened(answer) -> list[Image.Image]:
    files = [base64.b64decode(image["b64_json"]) for image in answer.json()["data"]]
    return [Image.open(io.BytesIO(file)) for file in files]


def rgba(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGBA"))


def test_a_drawn_picture_is_a_png_of_the_palette_with_a_transparent_ground(client):
    card = client.get("/v1/models/few").json()
    assert card["palette"] == ["#fefefe00", "#c81e14ff", "#14a03cff", "#1e28dcff"]
    assert (card["channels"], card["board"]["ground"]) == (1, [254, 254, 254])
    for size, scale in (("8x8", 1), ("400x400", 50)):
        images = opened(generate(client, n=8, seed=3, size=size))
        for image in images:
            assert (image.mode, image.size) == ("P", (8 * scale, 8 * scale))
            values = np.asarray(image)[::scale, ::scale]
            assert np.array_equal(values.repeat(scale, 0).repeat(scale, 1), np.asarray(image))
            assert np.array_equal(rgba(image)[::scale, ::scale], np.array(COLOURS)[values])
    assert {0, 1, 2, 3} == {*np.unique([np.asarray(image) for image in images])}


def test_a_gif_draws_on_transparent_ground_as_sample_does(client, folder, tmp_path):
    [png] = opened(generate(client, seed=3))
    answer = generate(client, headers={"accept": "image/gif"}, seed=3)
    succeeds(f"sample --model {folder} --seed 3 --out", f"{tmp_path}/drawn.gif")
    assert answer.content == (tmp_path / "drawn.gif").read_bytes()
    # one pixel of each, without the border; a row of ground adds no frame
    found = [shown[56::56, 56::56][:8, :8] for shown, _ in frames_of(answer.content, "RGBA")]
    there = rgba(png)[..., 3] > 0
    inked = [rows for rows in range(9) if not rows or there[rows - 1].any()]
    assert len(found) == len(inked) > 2
    for rows, picture in zip(inked, found, strict=True):
        assert np.array_equal(picture[..., 3] > 0, there & (np.arange(8) < rows)[:, None])
        assert np.array_equal(picture[:rows][there[:rows]], rgba(png)[:rows][there[:rows]])


@pytest.mark.parametrize("form", ["webp", "jpeg", "npy"])
def test_other_formats_show_the_same_colours(client, form):
    [png] = opened(generate(client, seed=3))
    if form == "npy":
        answer = generate(client, headers={"accept": "application/x-npy"}, seed=3)
        [found] = np.load(io.BytesIO(answer.content))
    else:
        [image] = opened(generate(client, seed=3, output_format=form))
        found = rgba(image)
    there = rgba(png)[..., 3] > 0
    assert found.shape == (8, 8, 4)
    assert np.abs(found[there].astype(int) - rgba(png)[there]).max() <= (
        90 if form == "jpeg" else 0
    )
    assert form == "jpeg" or np.array_equal(found[..., 3] > 0, there)


def test_partial_pictures_have_ground_below_what_is_drawn(client):
    answer = generate(client, seed=3, stream=True, partial_images=1)
    lines = [line for line in answer.text.splitlines() if '"b64_json"' in line]
    part = base64.b64decode(lines[0].partition('"b64_json":"')[2].partition('"')[0])
    with Image.open(io.BytesIO(part)) as image:
        assert image.mode == "P" and not rgba(image)[4:, :, 3].any()


@pytest.mark.parametrize("said_by", ["mask", "keep_rows"])
def test_transparent_parts_are_known_ground_where_a_mask_says_what_is_hidden(client, said_by):
    said = {"mask": mask_of(KEPT)} if said_by == "mask" else {"keep_rows": 4}
    answer = edit(client, encode(PICTURE), n=3, **said)
    assert answer.json()["known"] == 32 and answer.json()["warnings"] == []
    for image in opened(answer):
        assert np.array_equal(np.asarray(image)[:4], VALUES[:4])


def test_transparent_parts_are_holes_where_nothing_else_says_what_is_hidden(client):
    answer = edit(client, encode(PICTURE))
    assert answer.json()["known"] == 64 - 12
    [image] = opened(answer)
    assert np.array_equal(np.asarray(image)[VALUES > 0], VALUES[VALUES > 0])


def test_an_enlarged_upload_gets_the_nearest_colours_whatever_its_transparent_parts_hide(client):
    large = PICTURE.repeat(5, 0).repeat(5, 1).astype(np.int16)
    large[..., :3] += np.random.default_rng(1).integers(-9, 10, (40, 40, 3))
    large = large.clip(0, 255).astype(np.uint8)
    large[large[..., 3] == 0, :3] = (200, 30, 20)
    answer = edit(client, encode(large), keep_rows=4)
    [image] = opened(answer)
    assert np.array_equal(np.asarray(image)[:4], VALUES[:4])
    assert answer.json()["warnings"] == []


def test_colours_that_the_model_does_not_know_are_warned_of(client):
    far = np.full((8, 8, 3), (250, 250, 0), np.uint8)
    [warning] = edit(client, encode(far), keep_rows=4).json()["warnings"]
    assert "colours are far from those that the model knows" in warning


def test_a_completion_is_laid_back_with_hard_edges_and_transparent_ground(client):
    large = PICTURE.repeat(5, 0).repeat(5, 1)
    answer = edit(client, encode(large), keep_rows=4, lay_back=True, seed=1)
    plain = edit(client, encode(large), keep_rows=4, seed=1)
    [laid], [small] = opened(answer), opened(plain)
    assert laid.size == (40, 40)
    expected = rgba(small).repeat(5, 0).repeat(5, 1)
    there = expected[..., 3] > 0
    assert np.array_equal(rgba(laid)[..., 3] > 0, there)
    assert np.array_equal(rgba(laid)[there], expected[there])


def test_a_picture_with_transparent_ground_is_scored_whole(client, folder):
    files = {"image": ("p.png", encode(PICTURE), "image/png")}
    found = client.post("/v1/images/likelihoods", files=files).json()
    assert (found["counted"], np.shape(found["map"])) == (64, (8, 8, 1))
    own = linpix.score(folder, PICTURE)
    assert own.log_likelihood == pytest.approx(found["log_likelihood"], rel=1e-5)
    lower = linpix.score(folder, PICTURE, known=4)
    assert np.isnan(own.map).sum() == 0 and np.isnan(lower.map).sum() == 32


def test_python_gives_the_colours_that_a_server_gives_and_takes_them_back(client, folder):
    drawn = linpix.sample(folder, 3, seed=7)
    assert drawn.shape == (3, 8, 8, 4)
    served = [rgba(image) for image in opened(generate(client, n=3, seed=7))]
    assert np.array_equal(drawn, served)
    assert drawn.grid().mode == "RGBA" and drawn[0].grid(scale=1).size == (10, 10)
    done = linpix.complete(folder, drawn[0], known=4, count=2, seed=1)
    assert np.array_equal(done[:, :4], drawn[:1, :4].repeat(2, 0))
    assert {*nearest(done.reshape(-1, 4), PALETTE)} <= {0, 1, 2, 3}


def test_a_palette_is_no_ground_to_prepare_digits_on(client):
    assert_refused(edit(client, encode(PICTURE), prepare="mnist"), "prepare", "8x8 coloured ones")
