"""Grids and animations of images as they are drawn, read back to pixels."""

import io
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from PIL import Image, ImageSequence

from linpix.model.config import PRESETS
from linpix.server.pictures import animation
from linpix.server.pictures.animation import MAX_FRAMES, UNDRAWN, Film
from linpix.server.web.routes.images import ANSWER_BYTES
from tests.nets import PALETTE

TINY, DIGITS, COLOURS = PRESETS["tiny"], PRESETS["mnist-small"], PRESETS["cifar10-conditional"]
OPAQUE = replace(PALETTE, palette=((9, 9, 9, 255), *PALETTE.palette[1:]))
RNG = np.random.default_rng(0)


def noise(count, config) -> np.ndarray:
    return RNG.integers(0, config.values, (count, config.subpixels), np.uint8)


def enlarged(picture, factor) -> np.ndarray:
    return picture.repeat(factor, axis=0).repeat(factor, axis=1)


def frames_of(content: bytes, mode: str) -> list[tuple[np.ndarray, int]]:
    """Pixels and milliseconds of each frame, as Pillow reads them back."""
    with Image.open(io.BytesIO(content)) as picture:
        frames = []
        for frame in ImageSequence.Iterator(picture):
            shown = np.asarray(frame.convert(mode))
            frames.append((shown, frame.info["duration"]))
        return frames


# --- the grid ---


def test_a_grid_shows_finished_rows_and_what_was_known_and_else_grey():
    images, known = noise(3, TINY), np.zeros(64, np.bool_)
    known[-3:] = True
    sheet = animation.grid(images, TINY, rows=np.array([0, 2, 8]), known=known)
    assert sheet.shape == (10, 28)
    for index, rows in enumerate((0, 2, 8)):
        expected = images[index].copy()
        expected[rows * 8 : 61] = UNDRAWN
        assert np.array_equal(sheet[1:9, 1 + 9 * index : 9 + 9 * index].reshape(-1), expected)


@pytest.mark.parametrize(("count", "batch"), [(1, 1), (5, 2), (40, 8), (3, 3)])
def test_frames_do_not_depend_on_the_length_of_quanta(count, batch):
    """Quanta are cut at random, and never longer than an image row."""
    config, films = DIGITS, []
    for _ in range(3):
        film = Film(count, 4, config.height)
        for first in range(0, count, batch):
            position, some = 4 * 28, range(first, min(first + batch, count))
            while position < config.subpixels:
                position = min(config.subpixels, position + int(RNG.integers(1, 29)))
                film.advance((index, position // 28) for index in some)
        films.append(np.stack(film.moments))
    assert all(np.array_equal(film, films[0]) for film in films)
    assert (films[0][0] == 4).all() and (films[0][-1] == 28).all()
    assert len(films[0]) == min(MAX_FRAMES, 24 * -(-count // batch) + 1)
    assert (np.diff(films[0], axis=0) >= 0).all() and np.diff(films[0], axis=0).sum(
        axis=1
    ).min() > 0


def test_an_image_that_is_drawn_again_loses_no_row_and_adds_no_frame():
    film = Film(2, 0, 8, frames=60)
    for progress in (
        [(0, 4), (1, 8)],
        [(0, 5), (1, 0)],
        [(0, 6), (1, 5)],
        [(0, 2), (1, 8)],
        [(0, 8), (1, 8)],
    ):
        film.advance(progress)
    assert [moment.tolist() for moment in film.moments] == [[0, 0], [4, 8], [5, 8], [6, 8], [8, 8]]


# --- the animation ---


def stages(images, config) -> list[np.ndarray]:
    film = Film(len(images), 0, config.height)
    for rows in range(1, config.height + 1):
        film.advance((index, rows) for index in range(len(images)))
    return [animation.grid(images, config, rows=rows) for rows in film.moments]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("GIF", TINY),
        ("GIF", DIGITS),
        ("GIF", PALETTE),
        ("GIF", OPAQUE),
        ("WEBP", DIGITS),
        ("WEBP", COLOURS),
    ],
    ids=["gif-tiny", "gif-grey", "gif-palette", "gif-opaque", "webp-grey", "webp-colour"],
)
def test_an_animation_read_back_is_the_frames_enlarged(kind, config):
    frames = stages(noise(4, config), config)
    content = animation.animate(frames, kind, 3)
    mode = "L" if config.channels == 1 else "RGB"
    read = frames_of(content, "RGBA" if config.palette else mode)
    assert len(read) == len(frames) == config.height + 1
    for (shown, _), frame in zip(read, frames, strict=True):
        expected = enlarged(frame, 3)
        if config.palette:  # a transparent pixel may have any colour
            assert np.array_equal(shown[..., 3], expected[..., 3])
            there = expected[..., 3] > 0
            shown, expected = shown[there], expected[there]
        assert np.array_equal(shown, expected)
    assert [duration for _, duration in read] == animation.durations(len(frames))
    with Image.open(io.BytesIO(content)) as picture:
        assert picture.info["loop"] == 0  # for ever


def test_colours_of_a_gif_are_near_and_stay_what_they_are_while_the_rest_is_drawn():
    y, x = np.mgrid[0:32, 0:32]
    smooth = np.stack([8 * y, 8 * x, 255 - 4 * (x + y)], axis=-1).reshape(1, -1).astype(np.uint8)
    frames = stages(smooth, COLOURS)
    read = [shown.astype(int) for shown, _ in frames_of(animation.animate(frames, "GIF", 2), "RGB")]
    assert len(read) == 33
    assert np.abs(read[-1] - enlarged(frames[-1], 2)).mean() < 8
    for rows, shown in enumerate(read):
        top = 2 * (rows + 1)
        assert np.array_equal(shown[:top], read[-1][:top])
        assert np.abs(shown[top : 2 * 33, 2:-2] - UNDRAWN).max(initial=0) < 8


@pytest.mark.parametrize(
    "config",
    [TINY, DIGITS, COLOURS, PALETTE, replace(PALETTE, height=48, width=24)],
    ids=["tiny", "grey", "colour", "palette", "tall"],
)
def test_no_drawing_exceeds_the_bytes_that_are_counted_for_it(config):
    drawing = animation.drawing(noise(1, config)[0], config, None, 0)
    assert len(drawing) < animation.max_bytes(config) < 2**26
    assert len(frames_of(drawing, "RGBA")) == min(MAX_FRAMES, config.height + 1)
    stored = 0
    with Image.open(io.BytesIO(drawing)) as picture:
        for frame in ImageSequence.Iterator(picture):
            left, top, right, bottom = frame.tile[0].extents
            stored += (right - left) * (bottom - top)
    assert stored < 2 * picture.width * picture.height, "each row is in one frame"


def test_a_drawing_of_every_size_is_within_the_bytes_of_an_answer():
    pixels = replace(PALETTE, patch=1)  # divides all sides
    for height, width in product(range(8, 65), repeat=2):
        config = replace(pixels, height=height, width=width)
        assert animation.max_bytes(config) < ANSWER_BYTES // 40
        sides = animation.sheet_size(1, config)
        assert 500 < max(sides) * animation.enlargement(1, config, None) <= animation.WIDEST


@pytest.mark.parametrize(
    ("count", "config"),
    [(1, DIGITS), (4, DIGITS), (10, DIGITS), (64, DIGITS), (1, COLOURS), (16, COLOURS), (3, TINY)],
)
def test_an_animation_is_enlarged_to_a_width_that_one_sees(count, config):
    factor = animation.enlargement(count, config, None)
    assert 280 < animation.sheet_size(count, config)[0] * factor <= 560
    assert animation.enlargement(count, config, 2) == 2


@pytest.mark.parametrize(("count", "factor"), [(20_000, None), (5, 64), (64, 64)])
def test_an_animation_of_too_many_pixels_is_refused_with_the_cure(count, factor):
    assert animation.enlargement(1, DIGITS, 64) == 64
    with pytest.raises(
        ValueError, match="draw fewer images" + ", or give a smaller --scale" * bool(factor)
    ):
        animation.enlargement(count, DIGITS, factor)
