"""The palette and the size of a model, chosen from the pictures that it is trained on."""

import dataclasses
import math
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from linpix.model.config import ModelConfig
from linpix.model.palette import OPAQUE, choose, counted

from .folders import walk
from .readers import DataError, Pixels, Unreadable, contents, opened, read_picture

SIDES = 8, 64  # least and most pixels of a side
COLOURS = 64  # most colours of a palette for which no number is given
# a picture has few colours if so many of them have so large a share of its pixels; it is coloured
# if its channels differ by more on average, of 255
FEW, MOSTLY, COLOURED = 32, 0.9, 12
LARGEST, REDUCED = 32, 24  # longest side of pictures that keep their size, and of all others
LOOKED_AT = 4_000  # so many pictures, chosen at random, decide about the palette
STEP = 4  # sides that are chosen are multiples of it, and patches are at most so large


def at_size(preset: ModelConfig, width: int, height: int) -> ModelConfig:
    """The preset for pictures of this size, with the largest patches that divide it."""
    common = math.gcd(width, height)
    patch = max(side for side in range(1, STEP + 1) if common % side == 0)
    if not preset.patch:
        patch = 0
    return dataclasses.replace(preset, width=width, height=height, patch=patch)


def of_pictures(
    folder: Path, preset: ModelConfig, most: int, size: tuple[int, int] | None = None
) -> ModelConfig:
    """The preset with the size of the pictures in a folder, and with a palette of at most so many
    colours. Raises DataError, also if they do not have the width and height of size.
    """
    files = [path for path, reason in walk(folder) if not reason]
    seen, shape = list[Pixels](), (0, 0, 4)
    for at in np.random.default_rng(0).permutation(len(files)):
        file = files[at]
        with suppress(Unreadable):  # load leaves it out, with a warning
            if not seen:
                with opened(file, file) as picture:
                    shape = (picture.height, picture.width, 4)
            seen.append(read_picture(contents(file), file, shape))
            _check_size(folder, (shape[1], shape[0]), size)
        if len(seen) == LOOKED_AT:
            break
    if not seen:
        return preset  # load says what is there instead
    height, width, _ = shape
    palette = choose(np.stack(seen).reshape(-1, *shape), most)
    sized = at_size(preset, width, height)
    return dataclasses.replace(sized, palette=palette, background=0)


def _check_size(folder: Path, theirs: tuple[int, int], size: tuple[int, int] | None) -> None:
    least, most = SIDES
    expected = f"sides of {least} to {most} pixels"
    if size:
        expected = f"{size[0]} x {size[1]} as --size says"
    in_range = least <= min(theirs) and max(theirs) <= most
    # a list where --preset auto chose it
    if not in_range or theirs != tuple(size or theirs):
        raise DataError(
            folder,
            f"has pictures of {theirs[0]} x {theirs[1]} (width x height), expected {expected}",
            "give the folder with --preset auto, which makes them so",
        )


def has_few_colours(picture: Image.Image) -> bool:
    """Whether a picture, RGBA, is in colour but has few colours, as sprites, icons and flags."""
    values = np.asarray(picture)
    there = values[..., 3] >= OPAQUE
    if not there.any():
        return False
    pixels = values[there]
    _, counts = counted(pixels)
    few = counts[:FEW].sum() >= MOSTLY * len(pixels)
    return bool(few) and is_coloured(pixels[:, :3])


def is_coloured(pixels: Pixels) -> bool:
    """Whether pixels, (..., 3), are in colour on the whole."""
    values = pixels.astype(np.int64)
    return bool((values.max(-1) - values.min(-1)).mean() > COLOURED)


def size_of(pictures: list[Image.Image]) -> tuple[int, int]:
    """The width and height for pictures with a palette, multiples of STEP within SIDES: those of
    the largest one, unless it is too large.
    """
    sizes = np.array([_unenlarged(picture).size for picture in pictures])
    width, height = sizes.max(0)
    if max(width, height) > LARGEST:
        width, height = np.rint(np.median(sizes / sizes.max(1, keepdims=True), 0) * REDUCED)
    sides = [max(SIDES[0], int(-(-side // STEP) * STEP)) for side in (width, height)]
    return sides[0], sides[1]


def fitted(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """A picture, RGBA, in the middle of one of this size: reduced if it is larger, not enlarged.

    The rest is transparent, or if nothing in it is, as the pixels of its edge.
    """
    picture = _unenlarged(picture)
    picture.thumbnail(size, Image.Resampling.BOX)
    values = np.asarray(picture)
    across, down = size[0] - picture.width, size[1] - picture.height
    rest = ((down // 2, down - down // 2), (across // 2, across - across // 2), (0, 0))
    opaque = values[..., 3].min() >= OPAQUE
    padded = np.pad(values, rest, "edge") if opaque else np.pad(values, rest)
    return Image.fromarray(padded)


def _unenlarged(picture: Image.Image) -> Image.Image:
    """Pixel art at its own size, if it was enlarged by a whole factor; else the same picture."""
    values = np.asarray(picture)
    for factor in range(min(picture.size) // STEP, 1, -1):
        own = values[::factor, ::factor]
        # of other lengths where the factor divides no side
        if np.array_equal(own.repeat(factor, 0).repeat(factor, 1), values):
            return Image.fromarray(own)
    return picture.copy()
