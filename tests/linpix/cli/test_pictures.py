"""Pictures in Python: of every kind and size in, as uploads are read; and out, as arrays that
notebooks show.
"""

import io
import pickle

import numpy as np
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from PIL import Image

import linpix
from tests.fuzz.pictures import noise
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
    values = noise(30, 40, 3)
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


WIDE = {"I;16": "<u2", "I;16L": "<u2", "I;16B": ">u2", "I;16N": "=u2", "I": "=i4"}
THROUGH = {"CMYK": "RGB", "LAB": "RGB", "La": "LA", "RGBa": "RGBA"}


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "LA", "PA", "RGBA", "RGBX", "YCbCr", "HSV", *THROUGH, *WIDE]
)
def test_pil_images_of_every_mode_are_taken(tiny, mode):
    grey = np.full((20, 20), 40, np.uint8)
    if mode in WIDE:
        values = (grey * np.uint32(257)).astype(WIDE[mode])
        picture = Image.frombytes(mode, (20, 20), values.tobytes())
    else:
        picture = Image.fromarray(grey).convert(THROUGH.get(mode, mode)).convert(mode)
    [kept] = linpix.complete(str(tiny), picture, 8)
    assert mode == "1" or (np.abs(kept.astype(int) - 40) <= 1).all(), kept


def test_a_value_of_16_bits_may_be_transparent_and_a_mode_may_be_premultiplied(tiny):
    values = np.where(np.arange(8) < 4, 40, 41).repeat(8).reshape(8, 8)
    keyed = Image.fromarray(values.astype(np.uint16) * 257)
    keyed.info["transparency"] = 41 * 257
    half = Image.fromarray(
        np.dstack([values, np.where(values == 40, 255, 0)]).astype(np.uint8), "LA"
    )
    expected = linpix.complete(str(tiny), half, seed=7)
    assert (expected[0, :4] == 40).all()
    for picture in (keyed, half.convert("La"), half.convert("RGBA").convert("RGBa")):
        assert np.array_equal(linpix.complete(str(tiny), picture, seed=7), expected)


@pytest.mark.parametrize(("least", "most"), [(-1, 9000), (0, 2**16), (0, 255), (3, 1)])
def test_integers_that_are_not_of_16_bits_are_refused_as_pictures(tiny, least, most):
    values = np.full((20, 20), most, np.int32)
    values[0, 0] = least
    with pytest.raises(ValueError, match=r"mode I must have values of 16 bits.*; bring it to 8"):
        linpix.complete(str(tiny), Image.fromarray(values), 3)


def test_tensors_are_taken_or_refused_as_arrays_are(tiny):
    values = noise(8, 8)
    known = np.arange(8)[:, None].repeat(8, 1) < 3
    expected = linpix.complete(str(tiny), values, known, seed=7)
    given = torch.from_numpy(values), torch.from_numpy(known)
    assert np.array_equal(linpix.complete(str(tiny), *given, seed=7), expected)
    cure = r"got float32 of shape \(8, 8\); .*give \(255 \* image\)"
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=cure):
            linpix.complete(str(tiny), torch.zeros(8, 8, dtype=dtype, requires_grad=True), 3)
    with pytest.raises(ValueError, match="known must be bool"):
        linpix.complete(str(tiny), values, torch.zeros(8, 8, requires_grad=True))
    for odd in ([[1, 2], [3]], torch.zeros(8, 8, device="meta"), torch.eye(8).to_sparse()):
        with pytest.raises(ValueError, match="image cannot be read as an array"):
            linpix.complete(str(tiny), odd, 3)


def test_a_picture_of_more_pixels_than_an_upload_may_have_is_reduced(tiny):
    [kept] = linpix.complete(str(tiny), np.full((4200, 4200), 40, np.uint8), 8)
    assert (kept == 40).all()
