"""Uploads become sub-pixels by stated rules; bad ones raise only InvalidRequest."""

import base64
import dataclasses
import gzip
import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import ExifTags, Image

from linpix.model.config import ModelConfig
from linpix.model.inputs import first_hole
from linpix.server.errors import InvalidRequest
from linpix.server.pictures import uploads
from linpix.server.pictures.pictures import opened
from linpix.server.pictures.uploads import Upload
from tests.fuzz.pictures import chunk, encode, noise, png_of

GREY = ModelConfig(height=8, width=8)
COLOUR = ModelConfig(height=8, width=8, channels=3)
WIDE = ModelConfig(height=4, width=12)
UINT8 = NDArray[np.uint8]


def with_alpha(colours: UINT8, alpha: UINT8) -> UINT8:
    return np.concatenate([colours.reshape(*alpha.shape, -1), alpha[..., None]], axis=2)


def read(image: bytes, config: ModelConfig = GREY, **options: Any) -> Upload:
    return uploads.read(image, config, **options)


def prefix(upload: Upload) -> int:
    return first_hole(upload.known)


def assert_refused(
    param: str, words: list[str], image: bytes, *, status: int = 400, **options: Any
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(image, **options)
    assert (caught.value.param, caught.value.status) == (param, status)
    assert [word for word in words if word not in str(caught.value)] == []


HALF = np.repeat(np.array([255] * 4 + [0] * 4, np.uint8), 8).reshape(8, 8)  # as alpha: a hole below
LEFT = np.ascontiguousarray(HALF.T)  # at the right


# What comes through unchanged


@pytest.mark.parametrize(("config", "shape"), [(GREY, (8, 8)), (COLOUR, (8, 8, 3))])
def test_known_subpixels_of_a_picture_of_the_models_size_come_back_exactly(config, shape):
    colours = noise(*shape)
    image = with_alpha(colours, HALF)
    occluded = read(encode(image), config)
    half = config.subpixels // 2
    assert occluded.canvas.dtype == np.uint8 and occluded.known.dtype == np.bool_
    assert np.array_equal(occluded.canvas[:half], colours.reshape(-1)[:half])
    assert occluded.known[:half].all() and not occluded.known[half:].any()
    assert not occluded.canvas[half:].any(), "holes are 0"


@pytest.mark.parametrize(
    ("config", "shape"), [(GREY, (8, 8)), (COLOUR, (8, 8, 3)), (WIDE, (4, 12))]
)
@pytest.mark.parametrize(
    "way", ["an opaque alpha channel", "an opaque mask", "keep_rows of all rows"]
)
def test_nothing_to_fill_is_allowed_and_changes_nothing(config, shape, way):
    colours = noise(*shape)
    opaque = np.full(shape[:2], 255, np.uint8)
    if way == "an opaque alpha channel":
        occluded = read(encode(with_alpha(colours, opaque)), config)
    elif way == "an opaque mask":
        occluded = read(encode(colours), config, mask=encode(with_alpha(colours, opaque)))
    else:
        occluded = read(encode(colours), config, keep_rows=config.height)
    assert np.array_equal(occluded.canvas, colours.reshape(-1)) and occluded.known.all()
    assert occluded.facts == {
        "conditioning": "prefix",
        "known": config.subpixels,
        "known_before_first_hole": config.subpixels,
        "known_after_last_hole": 0,
    }


# What the counts mean


@pytest.mark.parametrize(
    ("holes", "expected"),
    [
        ([20, 21], ("partial", 186, 60, 126)),
        ([0], ("partial", 189, 0, 189)),
        ([63], ("prefix", 189, 189, 0)),
        ([5, 50], ("partial", 186, 15, 39)),
        (list(range(64)), ("prefix", 0, 0, 0)),
    ],
)
def test_counts_are_in_subpixels(holes, expected):
    alpha = np.full(64, 255, np.uint8)
    alpha[holes] = 0
    occluded = read(encode(with_alpha(noise(8, 8, 3), alpha.reshape(8, 8))), COLOUR)
    assert tuple(occluded.facts.values()) == expected
    told = read(
        encode(with_alpha(noise(8, 8, 3), alpha.reshape(8, 8))),
        dataclasses.replace(COLOUR, patch=4),
    )
    assert told.facts["conditioning"] == expected[0].replace("partial", "full")


# What is a hole


def test_alpha_under_128_is_a_hole_and_128_is_not():
    alpha = np.full((8, 8), 128, np.uint8)
    alpha[3, 5] = 127
    for occluded in (
        read(encode(with_alpha(noise(8, 8), alpha))),
        read(encode(noise(8, 8)), mask=encode(with_alpha(noise(8, 8), alpha))),
    ):
        assert list(np.flatnonzero(~occluded.known)) == [3 * 8 + 5]


@pytest.mark.parametrize("rows", [0, 1, 5, 8])
@pytest.mark.parametrize("scale", [1, 3])
def test_keep_rows_keeps_that_many_rows_of_the_models_image(rows, scale):
    occluded = read(encode(noise(8 * scale, 8 * scale)), keep_rows=rows)
    assert prefix(occluded) == occluded.known.sum() == rows * 8


@pytest.mark.parametrize("rows", [-1, 9, 10**30])
def test_keep_rows_outside_the_image_is_refused(rows):
    assert_refused("keep_rows", ["0 to 8", str(rows)], encode(noise(8, 8)), keep_rows=rows)


@pytest.mark.parametrize("side", [1, 2, 8, 24, 50])
@pytest.mark.parametrize("picture_side", [8, 16, 37])
def test_a_mask_of_any_size_is_resized_by_nearest_neighbour(side, picture_side):
    alpha = np.where(np.arange(side) < side / 2, 255, 0).astype(np.uint8)[None].repeat(side, 0)
    occluded = read(
        encode(noise(picture_side, picture_side)), mask=encode(with_alpha(alpha, alpha))
    )
    expected = LEFT > 0 if side > 1 else np.ones((8, 8), np.bool_)
    assert np.array_equal(occluded.known.reshape(8, 8), expected)


@pytest.mark.parametrize("picture_side", [8, 9, 13, 64, 100])
def test_a_mask_of_the_models_size_is_taken_pixel_by_pixel(picture_side):
    alpha = np.where(noise(8, 8) < 100, 0, 255).astype(np.uint8)
    occluded = read(
        encode(noise(picture_side, picture_side)), mask=encode(with_alpha(alpha, alpha))
    )
    assert np.array_equal(occluded.known.reshape(8, 8), alpha > 0)


def test_a_mask_is_cropped_as_the_picture_is():
    alpha = np.full((16, 32), 255, np.uint8)
    alpha[:, 16:] = 0
    # of the picture's size, of its middle, smaller
    for mask in (alpha, alpha[:, 8:24], alpha[:8, 12:20]):
        occluded = read(encode(noise(16, 32)), mask=encode(with_alpha(mask, mask)))
        assert np.array_equal(occluded.known.reshape(8, 8), LEFT > 0)


def test_a_mask_decides_alone_and_black_shows_through_the_image():
    colours = np.full((8, 8), 200, np.uint8)
    alpha = HALF.copy()
    alpha[0] = 52
    image = encode(with_alpha(colours, alpha))
    mask = encode(with_alpha(colours, np.full((8, 8), 255, np.uint8)))
    occluded = read(image, mask=mask)
    assert occluded.known.all()
    assert occluded.canvas.reshape(8, 8)[:, 0].tolist() == [41, 200, 200, 200, 0, 0, 0, 0]


def test_a_mask_without_alpha_is_refused():
    assert_refused("mask", ["alpha"], encode(noise(8, 8)), mask=encode(noise(8, 8)))


def test_holes_together_with_keep_rows_are_refused():
    assert_refused("keep_rows", ["transparent"], encode(with_alpha(noise(8, 8), HALF)), keep_rows=8)
    opaque = encode(with_alpha(noise(8, 8), np.full((8, 8), 128, np.uint8)))
    assert read(opaque, keep_rows=8).known.all(), "what is half transparent is no hole"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_that_says_nothing_of_what_to_fill_in_is_refused(kind):
    assert_refused(
        "image", ["PNG with transparent pixels", "a mask", "keep_rows"], encode(noise(8, 8), kind)
    )


# Sizes other than the model's


def test_a_larger_picture_is_averaged_block_by_block():
    large = noise(24, 40, 3)
    config = ModelConfig(height=3, width=5, channels=3)
    means = large.reshape(3, 8, 5, 8, 3).mean(axis=(1, 3))
    occluded = read(encode(large), config, keep_rows=3)
    assert np.array_equal(occluded.canvas.reshape(3, 5, 3), np.floor(means + 0.5))


@pytest.mark.parametrize("scale", [1, 3, 0.5])
@pytest.mark.parametrize("way", ["mask", "alpha"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("first", "last", "left"), [(0, 6, 0), (20, 28, 16), (50, 58, 46), (90, 96, 80)]
)
def test_a_hole_outside_the_middle_of_a_panorama_has_the_crop_around_it(
    first, last, left, turned, way, scale
):
    picture, alpha = noise(16, 96), np.full((16, 96), 255, np.uint8)
    alpha[4:10, first:last] = 0
    grid = (np.arange(int(16 * scale))[:, None] / scale, np.arange(int(96 * scale))[None] / scale)
    painted = alpha[tuple(part.astype(int) for part in grid)]
    if turned:
        picture, alpha, painted = picture.T, alpha.T, painted.T
    config = ModelConfig(height=16, width=16)
    found = (
        read(encode(with_alpha(picture, alpha)), config)
        if way == "alpha"
        else read(encode(picture), config, mask=encode(with_alpha(painted, painted)))
    )
    assert (
        found.crop == ((0, left, 16, left + 16) if turned else (left, 0, left + 16, 16))
        and found.missed == 0
    )
    expected = (alpha[left : left + 16] if turned else alpha[:, left : left + 16]) > 0
    assert np.array_equal(found.known.reshape(16, 16), expected)


def test_holes_outside_the_crop_are_reported():
    picture, alpha = noise(16, 64), np.full((16, 64), 255, np.uint8)
    alpha[:, :32] = 0  # too long to be completed as a whole
    config = ModelConfig(height=16, width=16)
    found = read(encode(with_alpha(picture, alpha)), config)
    assert found.missed == 0.75 and (found.known.reshape(16, 16) == (np.arange(16) >= 8)).all()
    assert found.prefix_only().missed == 0.75
    assert read(encode(picture), config, keep_rows=8).missed == 0
    wider = with_alpha(np.zeros((4, 32), np.uint8), np.full((4, 32), 255, np.uint8))
    wider[:, :14, 1] = 0  # of another shape: cropped as it is
    assert read(encode(picture), config, mask=encode(wider)).missed == 1


@pytest.mark.parametrize(("width", "height"), [(7, 8), (8, 7), (7, 100), (1, 1)])
def test_a_smaller_picture_is_refused_with_the_size_wanted(width, height):
    assert_refused("image", ["8x8", f"{width}x{height}"], encode(noise(height, width)), keep_rows=4)


@pytest.mark.parametrize("way", ["alpha", "mask"])
@pytest.mark.parametrize("side", [8, 13, 16, 40, 333])
def test_colours_of_holes_do_not_bleed_into_known_neighbours(way, side):
    """Whatever stands in the holes, even where a hole's edge runs through a block."""
    hole = np.hypot(*(np.indices((side, side)) - side / 2)) < side / 3
    alpha = np.where(hole, 0, 255).astype(np.uint8)
    colours = np.where(hole, 250, 10).astype(np.uint8)
    image = with_alpha(colours, alpha)
    occluded = read(encode(image)) if way == "alpha" else read(encode(colours), mask=encode(image))
    assert 0 < occluded.known.sum() < 64
    assert (occluded.canvas[occluded.known] == 10).all() and (
        occluded.canvas[~occluded.known] == 0
    ).all()


# Kinds of pictures


def test_colour_becomes_grey_by_itu_r_601_and_grey_becomes_colour():
    colours, grey = noise(8, 8, 3), noise(8, 8)
    assert np.array_equal(
        read(encode(colours), GREY, keep_rows=8).canvas,
        np.asarray(Image.fromarray(colours).convert("L")).reshape(-1),
    )
    assert np.array_equal(
        read(encode(grey), COLOUR, keep_rows=8).canvas, grey.reshape(-1).repeat(3)
    )


def test_16_bit_grey_is_scaled_to_8_bits():
    wide = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    occluded = read(encode(Image.fromarray(wide)), keep_rows=8)
    assert np.array_equal(occluded.canvas, np.round(wide / 257).reshape(-1))


def test_16_bit_grey_with_alpha_keeps_both():
    samples = np.stack([noise(8, 8), HALF], axis=2).astype(np.uint16) * 257
    scanlines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    occluded = read(png_of(16, 4, 8, 8, scanlines))
    assert prefix(occluded) == 32 and np.array_equal(
        occluded.canvas[:32], noise(8, 8).reshape(-1)[:32]
    )


@pytest.mark.parametrize(
    ("depth", "row", "value"),
    [
        (1, b"\x0f", 1),
        (2, b"\0\xff", 3),
        (4, b"\0\0\xff\xff", 15),
        (16, b"\3\xe8" * 4 + b"\3\xe9" * 4, 1001),
    ],
)
def test_grey_of_fewer_or_more_bits_may_have_a_transparent_value(depth, row, value):
    occluded = read(
        png_of(depth, 0, 8, 8, (b"\0" + row) * 8, chunk(b"tRNS", struct.pack(">H", value)))
    )
    assert np.array_equal(occluded.known.reshape(8, 8), LEFT > 0)


def test_16_bit_colour_may_have_a_transparent_value():
    samples = np.full((8, 8, 3), 0x1234, np.uint16)
    samples[4:] = 0x5678
    scanlines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    occluded = read(
        png_of(16, 2, 8, 8, scanlines, chunk(b"tRNS", struct.pack(">3H", *[0x5678] * 3))), COLOUR
    )
    assert prefix(occluded) == occluded.known.sum() == 96


@pytest.mark.parametrize("transparency", [7, bytes([255] * 7 + [20] + [200] * 8)])
def test_a_palette_may_have_transparent_entries(transparency):
    colours = np.arange(64, dtype=np.uint8).reshape(8, 8) % 16
    picture = Image.fromarray(colours, "P")
    picture.putpalette(
        [value for entry in range(16) for value in (entry * 3, entry * 5, entry * 7)]
    )
    occluded = read(encode(picture, transparency=transparency), COLOUR)
    assert np.array_equal(occluded.known.reshape(64, 3)[:, 0], colours.reshape(-1) != 7)
    assert occluded.canvas[:9].tolist() == [0, 0, 0, 3, 5, 7, 6, 10, 14]


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_grey_and_colour_may_have_a_transparent_value(mode):
    colours = np.full((8, 8), 9, np.uint8)
    colours[5:] = 4
    transparency = 4 if mode == "L" else (4, 4, 4)
    occluded = read(encode(Image.fromarray(colours).convert(mode), transparency=transparency))
    assert prefix(occluded) == occluded.known.sum() == 40 and (occluded.canvas[:40] == 9).all()


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_jpeg_in_grey_colour_or_cmyk_is_read(mode):
    picture = Image.new("RGB", (16, 16), (200, 100, 50)).convert(mode)
    expected = np.asarray(picture.convert("RGB"))[0, 0].astype(int)
    occluded = read(encode(picture, "JPEG", quality=95), COLOUR, keep_rows=8)
    assert np.abs(occluded.canvas.reshape(64, 3) - expected).max() <= 4


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_an_animation_is_refused(kind):
    frames = [Image.new("RGBA", (8, 8), (shade, 0, 0, 255)) for shade in (0, 100, 200)]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:])
    assert_refused("image", ["animated", "3"], data)
    assert_refused("mask", ["animated", "3"], encode(noise(8, 8)), mask=data)


# What is refused, whoever sends it


@pytest.mark.parametrize(
    "data",
    [
        b"hello",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"\0" * 1000,
        encode(noise(8, 8), "GIF"),
        encode(noise(8, 8), "BMP"),
        encode(noise(8, 8), "TIFF"),
        b"RIFF\x10\0\0\0WAVEfmt ",
    ],
)
def test_an_upload_that_is_not_png_jpeg_or_webp_is_415(data):
    words = ["PNG, JPEG or WebP", str(len(data))]
    assert_refused("image", words, data, status=415)
    assert_refused("mask", words, encode(noise(8, 8)), mask=data, status=415)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\n <!DOCTYPE html>\n<title>Log in</title>", "an HTML page"),
        (b"\xef\xbb\xbf<HTML><body>404", "an HTML page"),
        (b'  {"error": {"message": "gone"}}', "JSON"),
        (b"[\n  1, 2]", "JSON"),
        (gzip.compress(b"picture", mtime=0), "gzip"),
        (b"PK\x03\x04" + bytes(40), "a ZIP archive"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a", "git lfs pull"),
        (base64.b64encode(encode(noise(8, 8))), "base64"),
        (base64.encodebytes(encode(noise(40, 40), "JPEG")), "base64"),
        (base64.urlsafe_b64encode(encode(noise(8, 8), "WEBP")), "base64"),
        (b"data:image/png;base64,iVBORw0K", "a data URL"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG"),
    ],
)
def test_what_is_sent_in_place_of_a_picture_is_named(data, words):
    assert_refused("image", [f"{len(data)} bytes: ", words], data, status=415)


@pytest.mark.parametrize("data", [b"hello", b"a text of some words, not in base64", bytes(99)])
def test_what_is_not_known_is_shown_by_its_first_bytes(data):
    assert_refused("image", [f"{len(data)} bytes that begin with"], data, status=415)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("part", [0.05, 0.5, 0.9])
def test_a_truncated_picture_is_refused(kind, part):
    data = encode(noise(64, 64, 3), kind)
    assert_refused("image", ["corrupt"], data[: max(12, int(len(data) * part))], keep_rows=4)


# pytest undoes the module's filter
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("width", "height"), [(4097, 4096), (12000, 10000), (2**31 - 1, 2**31 - 1)]
)
def test_the_declared_size_is_looked_at_before_decoding(width, height):
    bomb = png_of(8, 0, width, height, b"")
    assert_refused("image", ["4096x4096"], bomb, keep_rows=1, status=413)
    assert_refused("mask", ["4096x4096"], encode(HALF), mask=bomb, status=413)


def test_the_declared_size_of_jpeg_and_webp_is_looked_at_too():
    jpeg, webp = (bytearray(encode(HALF, kind, lossless=True)) for kind in ("JPEG", "WEBP"))
    frame = jpeg.index(b"\xff\xc0") + 5
    jpeg[frame : frame + 4] = struct.pack(">HH", 60000, 60000)
    webp[21:25] = struct.pack("<I", 16383 << 14 | 16383)  # 14 bits each, of the size minus one
    for picture in (jpeg, webp):
        assert_refused("image", [], bytes(picture), keep_rows=1, status=413)


def test_a_photograph_of_more_than_16_megapixels_is_decoded_reduced():
    picture = np.zeros((3600, 4800), np.uint8)
    picture[:1800] = 200
    data = encode(picture, "JPEG", quality=90)
    found = opened(data, "image")
    assert (found.scale, found.image.size) == (2, (2400, 1800))
    upload = read(data, GREY, keep_rows=8)
    assert upload.crop == (600, 0, 4200, 3600), "in pixels of the upload"
    assert (
        np.abs(upload.canvas.reshape(8, 8).astype(int) - np.repeat([200, 0], 4)[:, None]).max() < 3
    )
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned = encode(picture, "JPEG", exif=exif)
    assert read(turned, GREY, keep_rows=8).crop == (0, 600, 3600, 4200)


@pytest.mark.parametrize(
    ("width", "height", "progressive"), [(8193, 8192, False), (8000, 6000, True), (1, 60000, False)]
)
def test_a_larger_photograph_or_one_in_several_scans_is_refused_before_decoding(
    width, height, progressive
):
    jpeg = bytearray(encode(HALF, "JPEG", progressive=progressive))
    frame = jpeg.index(b"\xff\xc2" if progressive else b"\xff\xc0") + 5
    jpeg[frame : frame + 4] = struct.pack(">HH", height, width)
    assert_refused(
        "image",
        ["8192x8192"] if width > 1 else [],
        bytes(jpeg),
        keep_rows=1,
        status=413 if width > 1 else 400,
    )


def test_a_jpeg_of_endless_scans_is_refused():
    data = encode(np.zeros((64, 64), np.uint8), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    assert prefix(read(data[:-2] + scan * 100 + data[-2:], GREY, keep_rows=1)) == 8
    assert_refused("image", ["up to 500 scans"], data[:-2] + scan * 1000 + data[-2:], keep_rows=1)
    large = encode(np.zeros((4096, 4096), np.uint8), "JPEG", progressive=True)
    assert_refused("image", ["up to 32 scans"], large[:-2] + scan * 40 + large[-2:], keep_rows=1)
