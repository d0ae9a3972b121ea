"""The palette and the size of a model, chosen from the pictures that it is trained on."""

import dataclasses
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from linpix.model.config import Colour, ModelConfig
from linpix.model.palette import OPAQUE

from ..folders import walk
from ..readers import PICTURE_FORMATS, DataError, contents, read_picture

COLOURS = 64  # most colours of a palette for which no number is given
# a picture has few colours if so many of them have so large a share of its pixels; it is coloured
# if its channels differ by more on average, of 255
FEW, MOSTLY, COLOURED = 32, 0.9, 12
LARGEST, REDUCED = 32, 24  # longest side of pictures that keep their size, and of all others
LOOKED_AT = 4_000  # so many pictures, chosen at random, decide about the palette
STEP = 4  # sides are multiples of it
CANDIDATES = 4096  # the most frequent colours, of which a palette is chosen
GROUND = 0.01  # least share of transparent pixels that makes the ground transparent


def of_pictures(folder: Path, preset: ModelConfig, most: int) -> ModelConfig:
    """The preset with the size of the pictures in a folder, and with a palette of at most so many
    colours. Raises DataError.
    """
    files = [path for path, reason in walk(folder) if not reason]
    if not files:
        raise DataError(folder, "has no pictures", "give a folder of pictures")
    try:
        with Image.open(files[0], formats=PICTURE_FORMATS) as picture:
            width, height = picture.size
    except OSError as error:
        raise DataError(files[0], f"is not a readable picture ({error})", "remove it") from error
    if height % preset.patch or width % preset.patch:
        raise DataError(
            folder,
            f"has pictures of {width} x {height}, expected sides that are multiples of"
            f" {preset.patch} pixels",
            "give the folder with --preset auto, which makes them so",
        )
    at_random = np.random.default_rng(0).permutation(len(files))[:LOOKED_AT]
    shape = height, width, 4
    seen = [read_picture(contents(files[at]), files[at], shape) for at in at_random]
    palette = choose(np.stack(seen).reshape(-1, *shape), most)
    return dataclasses.replace(preset, height=height, width=width, palette=palette, background=0)


def choose(pictures: NDArray[np.uint8], most: int) -> tuple[Colour, ...]:
    """At most so many colours for pictures (count, height, width, 4); the ground is the first.

    They are colours of the pictures. Each next one is the colour whose pixels would gain most: the
    number of them times the squared distance to the nearest colour so far.
    """
    there = pictures[..., 3] >= OPAQUE
    colours, counts = _counted(pictures[there])
    edge = np.ones(pictures.shape[1:3], np.bool_)
    edge[1:-1, 1:-1] = False
    if np.mean(there) <= 1 - GROUND:
        taken = {colour[0] for colour in colours[:, :3].tolist() if len({*colour}) == 1}
        lightest = max({*range(256)} - taken, default=255)  # of the greys that no pixel has
        palette = [np.array([lightest, lightest, lightest, 0])]
    else:
        at_edge, often = _counted(pictures[there & edge])
        palette = [at_edge[often.argmax()]]
    far = np.full(len(colours), 2.0**20)
    if palette[0][3]:
        far = ((colours - palette[0]) ** 2).sum(1)
    while len(palette) < most and (counts * far).max(initial=0) > 0:
        palette.append(colours[(counts * far).argmax()])
        far = np.minimum(far, ((colours - palette[-1]) ** 2).sum(1))
    return tuple(tuple(int(part) for part in colour) for colour in palette)


def _counted(pixels: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The most frequent colours of opaque pixels (n, 4), and how many pixels have each."""
    opaque = np.ascontiguousarray(pixels)
    opaque[:, 3] = 255
    found, counts = np.unique(opaque.view(np.uint32), return_counts=True)
    most = np.argsort(-counts, kind="stable")[:CANDIDATES]
    return found[most, None].view(np.uint8).astype(np.int64), counts[most]


def has_few_colours(picture: Image.Image) -> bool:
    """Whether a picture, RGBA, is in colour but has few colours, as sprites, icons and flags."""
    values = np.asarray(picture).copy()
    there = values[..., 3] >= OPAQUE
    if not there.any():
        return False
    _, counts = _counted(values[there])
    parts = values[there][:, :3].astype(np.int64)
    coloured = (parts.max(1) - parts.min(1)).mean() > COLOURED
    return bool(coloured and counts[:FEW].sum() >= MOSTLY * there.sum())


def size_of(pictures: list[Image.Image]) -> tuple[int, int]:
    """The width and height for pictures with a palette, multiples of STEP: those of the largest
    one, unless it is too large.
    """
    sizes = np.array([_unenlarged(picture).size for picture in pictures])
    width, height = sizes.max(0)
    if max(width, height) > LARGEST:
        width, height = np.rint(np.median(sizes / sizes.max(1, keepdims=True), 0) * REDUCED)
    return int(-(-width // STEP) * STEP), int(-(-height // STEP) * STEP)


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
    return Image.fromarray(np.pad(values, rest, mode="edge" if opaque else "constant"))


def _unenlarged(picture: Image.Image) -> Image.Image:
    """Pixel art at its own size, if it was enlarged by a whole factor; else the same picture."""
    values = np.asarray(picture)
    for factor in range(min(picture.size) // STEP, 1, -1):
        own = values[::factor, ::factor]
        # of other lengths where the factor divides no side
        if np.array_equal(own.repeat(factor, 0).repeat(factor, 1), values):
            return Image.fromarray(own)
    return picture.copy()
