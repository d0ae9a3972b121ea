"""Finished pictures as files: sizes, formats."""

import io

import numpy as np
import pytest
from PIL import Image

from linpix.model.config import ModelConfig
from linpix.server.pictures.encode import (
    Frame,
    encoded,
    frame_of,
    framed,
    max_bytes,
    npy,
    png,
    sizes,
)
from tests.fuzz.pictures import noise

GREY, COLOUR = ModelConfig(), ModelConfig(height=32, width=32, channels=3)
CANVAS = noise(784)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def test_the_native_size_comes_first_and_the_largest_has_up_to_2048_pixels_a_side():
    listed = sizes(ModelConfig(height=8, width=8))
    assert (listed[0], listed[-1]) == ("8x8", "2048x2048")
    assert sizes(ModelConfig(height=2000, width=8)) == ["8x2000"]
    assert frame_of("8x4000", ModelConfig(height=4000, width=8)) == Frame(1, 8, 4000)


@pytest.mark.parametrize(
    ("text", "factor"),
    [(None, 1), ("auto", 1), ("native", 1), ("28x28", 1), ("140x140", 5), ("2044x2044", 73)],
)
def test_a_size_is_an_integer_multiple_of_the_native_one(text, factor):
    assert frame_of(text, GREY) == Frame(factor, 28 * factor, 28 * factor)


@pytest.mark.parametrize(
    ("width", "height", "inside"),
    [
        (256, 256, 252),
        (512, 512, 504),
        (1024, 1024, 1008),
        (1536, 1024, 1008),
        (1024, 1536, 1008),
        (1792, 1024, 1008),
        (1024, 1792, 1008),
        (1536, 864, 840),
        (2048, 1152, 1148),
        (2048, 2048, 2044),
        (30, 2048, 28),
        (29, 28, 28),
    ],
)
def test_a_size_of_another_shape_has_the_largest_multiple_in_its_middle(width, height, inside):
    frame = frame_of(f"{width}x{height}", GREY)
    assert (frame.size, frame.factor * 28) == (f"{width}x{height}", inside)
    assert f"{inside}x{inside}" in frame.warning
    picture = framed(CANVAS.reshape(28, 28, 1), frame)[..., 0]
    top, left = (height - inside) // 2, (width - inside) // 2
    assert picture.shape == (height, width)
    middle = picture[top : top + inside, left : left + inside]
    assert np.array_equal(middle[:: frame.factor, :: frame.factor], CANVAS.reshape(28, 28))
    assert (picture[:top, left : left + inside] == middle[0]).all(), "its edge goes on above it"
    assert (picture[top : top + inside, left + inside :] == middle[:, -1:]).all(), (
        "and on its right"
    )


def test_a_multiple_needs_nothing_around_it():
    for side in (256, 512, 1024, 2048):
        assert frame_of(f"{side}x{side}", COLOUR) == Frame(side // 32, side, side)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "28",
        "28x28x28",
        "axb",
        "²x²",
        "\uff19\uff19x\uff19\uff19",
        "9" * 50 + "x1",
        "0x0",
        "-28x28",
        "27x28",
        "28x27",
        "1x1",
        "2049x2048",
        "2048x5000",
        "28x28\n",
    ],
)
def test_a_size_that_is_none_or_too_small_or_too_large_is_refused_with_what_is_allowed(text):
    with pytest.raises(ValueError, match="from 28x28 to 2048x2048; got"):
        frame_of(text, GREY)


@pytest.mark.parametrize("config", [GREY, COLOUR])
def test_png_and_webp_are_exact_and_jpeg_is_close(config):
    random = noise(config.subpixels)
    pixels = framed(random.reshape(config.height, config.width, -1), frame_of(8, config))
    for kind, name in (("png", "PNG"), ("webp", "WEBP"), ("jpeg", "JPEG")):
        picture = opened(encoded(pixels, kind))
        assert picture.format == name
        found = np.asarray(picture.convert("L" if config.channels == 1 else "RGB")).reshape(
            pixels.shape
        )
        assert np.abs(found.astype(int) - pixels).max() <= (60 if kind == "jpeg" else 0)
        assert encoded(pixels, kind) == encoded(pixels, kind)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (28, 28, 1), (64, 64, 1), (65, 64, 1), (7, 13, 1), (32, 32, 3)]
)
def test_a_png_of_any_size_has_its_pixels_and_passes_its_checks(shape):
    pixels = noise(*shape)
    data = encoded(pixels)
    Image.open(io.BytesIO(data)).verify()  # sums of all chunks
    picture = Image.open(io.BytesIO(data))
    assert (picture.format, picture.mode) == ("PNG", "L" if shape[2] == 1 else "RGB")
    assert np.array_equal(np.asarray(picture).reshape(shape), pixels)


def test_an_array_is_what_numpy_reads_whatever_its_channels():
    for channels in (1, 3, 4):
        images = noise(5, 4, 6, channels)
        found = np.load(
            io.BytesIO(npy([image.tobytes() for image in images], 4, 6)),
            allow_pickle=False,
        )
        assert found.dtype == np.uint8 and np.array_equal(
            found, images[..., 0] if channels == 1 else images
        )


@pytest.mark.parametrize("config", [GREY, COLOUR, ModelConfig(height=4, width=12)])
@pytest.mark.parametrize(("factor", "rows"), [(1, None), (3, None), (2, 3)])
def test_each_sub_pixel_is_enlarged_and_unfinished_rows_are_black(config, factor, rows):
    canvas = np.random.default_rng(1).integers(1, 256, config.subpixels, dtype=np.uint8)
    before, expected = canvas.copy(), canvas.reshape(config.height, config.width, -1).copy()
    expected[rows or config.height :] = 0
    found = np.asarray(opened(png(canvas, config, factor, rows)))
    assert np.array_equal(
        found.reshape(*found.shape[:2], -1), expected.repeat(factor, 0).repeat(factor, 1)
    )
    assert np.array_equal(canvas, before)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("factor", [1, 2, 7, 9, 31])
@pytest.mark.parametrize("values", [2, 256])
def test_no_file_is_larger_than_its_bound_which_is_of_use(channels, factor, values):
    random = np.random.default_rng(0).integers(0, values, (32, 32, channels)) * (
        255 // (values - 1)
    )
    frame = Frame(factor, 32 * factor + 5, 32 * factor)
    pixels = framed(random.astype(np.uint8), frame)
    for kind in ("png", "webp", "jpeg"):
        bound = max_bytes(frame, channels, kind)
        assert len(encoded(pixels, kind)) <= bound <= 1024 + 1.25 * pixels.size
        if factor > 9 and kind != "jpeg":
            assert bound < pixels.size / 10
