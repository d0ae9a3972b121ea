"""Pictures in Python: of every kind and size in, as uploads are read; and out, as arrays that
notebooks show.
"""

import io
import pickle

import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from PIL import Image

import linpix
from tests.server.web.routes.test_images import images_of


def test_images_are_shown_in_a_notebook_and_their_numbers_are_those_of_an_array(tiny, tmp_path):
    drawn, show = linpix.sample(str(tiny), 3, seed=7), DisplayFormatter().format
    with Image.open(io.BytesIO(show(drawn)[0]["image/png"])) as shown:
        assert shown.size == (560 // 28 * 28, 560 // 28 * 10) and np.array_equal(
            shown, drawn.grid()
        )
    sheet = np.asarray(drawn.grid(columns=2, scale=1))
    assert sheet.shape == (19, 19) and np.array_equal(sheet[1:9, 10:18], drawn[1])
    for one in (drawn[0], 255 - drawn[1:]):
        plain = np.asarray(one)
        assert (
            "image/png" in show(one)[0]
            and not one.seeds
            and (repr(one), str(one)) == (repr(plain), str(plain))
        )
    for other in (drawn[:, :3], drawn == 0, drawn / 255, drawn.reshape(3, -1), drawn[0, 0, 0]):
        assert "image/png" not in show(other)[0]
    assert drawn.sum() == np.asarray(drawn).sum() and bool((drawn == drawn).all())
    again = pickle.loads(pickle.dumps(drawn))
    assert (
        np.array_equal(again, drawn) and again.seeds == drawn.seeds and repr(again) == repr(drawn)
    )
    assert np.array_equal(pickle.loads(pickle.dumps(drawn[0])), drawn[0])
    score = linpix.score(str(tiny), drawn[0], posterior=True)
    assert len(repr(score)) < 100 and f"{score.bits_per_dim:.4f} bits/dim" in repr(score)
    with Image.open(io.BytesIO(show(score)[0]["image/png"])) as shown:
        assert shown.size == (280, 280)


def test_pictures_come_as_paths_pil_images_and_arrays_of_any_size_as_uploads_do(
    tiny, server, tmp_path
):
    values = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    photo, turned = Image.fromarray(values), Image.Exif()
    turned[0x112] = 6
    photo.save(tmp_path / "photo.png")
    photo.transpose(Image.Transpose.ROTATE_90).save(
        tmp_path / "turned.jpg", quality=100, subsampling=0, exif=turned
    )
    expected = images_of(
        server.client().post(
            "/v1/images/edits",
            files={"image": ("a.png", (tmp_path / "photo.png").read_bytes())},
            data={"seed": "7", "keep_rows": "3"},
        )
    )
    for image in (
        tmp_path / "photo.png",
        str(tmp_path / "photo.png"),
        photo,
        values,
        photo.convert("RGBA"),
    ):
        assert np.array_equal(linpix.complete(str(tiny), image, 3, seed=7), expected)
    known = np.arange(30)[:, None].repeat(40, axis=1) < 12
    upright = [
        linpix.complete(str(tiny), each, 8)[0].astype(int)
        for each in (tmp_path / "turned.jpg", Image.open(tmp_path / "turned.jpg"), photo)
    ]
    assert np.array_equal(*upright[:2]) and np.abs(upright[0] - upright[2]).max() < 8
    with pytest.warns(UserWarning, match="25 % of the hidden pixels are outside"):
        linpix.complete(str(tiny), photo, known)
    known[:, :5] = known[:, -5:] = True  # what is cropped away
    holes = np.dstack([values, np.where(known, 255, 0).astype(np.uint8)])
    seen = linpix.complete(str(tiny), holes, seed=7)
    assert np.array_equal(seen, linpix.complete(str(tiny), photo, Image.fromarray(holes), seed=7))
    assert np.array_equal(seen, linpix.complete(str(tiny), photo, known, seed=7))


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "LA", "PA", "RGBX", "CMYK", "YCbCr", "HSV", "I;16", "I"]
)
def test_pil_images_of_every_mode_are_taken(tiny, mode):
    grey = np.full((20, 20), 40, np.uint8)
    picture = (
        Image.fromarray(grey.astype(np.uint16) * 257)
        if mode.startswith("I")
        else Image.fromarray(grey)
    )
    picture = picture.convert("RGB").convert("CMYK") if mode == "CMYK" else picture
    [kept] = linpix.complete(
        str(tiny), picture if picture.mode == mode else picture.convert(mode), 8
    )
    assert mode == "1" or (np.abs(kept.astype(int) - 40) <= 1).all(), kept


def test_a_picture_of_more_pixels_than_an_upload_may_have_is_reduced(tiny):
    [kept] = linpix.complete(str(tiny), np.full((5000, 5000), 40, np.uint8), 8)
    assert (kept == 40).all()
