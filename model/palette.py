"""Palettes: the colours that the values of a model's sub-pixels stand for.

A palette has at most 256 colours. The first is the ground, which may be transparent; all others are
opaque. A transparent ground has a colour too, for what cannot show transparency.
"""

import numpy as np
from numpy.typing import NDArray

from .config import Colour, ModelConfig

OPAQUE = 128  # least alpha of a pixel that is there
CANDIDATES = 4096  # the most frequent colours, of which a palette is chosen
CLEAR = 0.01  # least share of transparent pixels that makes the ground transparent


def painted(values: NDArray[np.uint8], config: ModelConfig) -> NDArray[np.uint8]:
    """What values show, (...): the palette's colours, (..., 4), or without a palette themselves,
    (..., 1).

    Values without a colour, which no model draws, show the ground.
    """
    if not config.palette:
        return values[..., None]
    colours = np.full((256, 4), config.palette[0], np.uint8)
    colours[: len(config.palette)] = config.palette
    return colours[values]


def pictures_of(images: NDArray[np.uint8], config: ModelConfig) -> NDArray[np.uint8]:
    """What images (..., T) show: (..., height, width, channels), four of them with a palette."""
    if config.palette:
        return painted(images.reshape(*images.shape[:-1], config.height, config.width), config)
    return images.reshape(*images.shape[:-1], config.height, config.width, config.channels)


def nearest(pixels: NDArray[np.uint8], config: ModelConfig) -> NDArray[np.uint8]:
    """The palette's colour that is nearest to each pixel. pixels: (n, 4) · returns (n,).

    What is mostly transparent is the ground. Other pixels are so if they have exactly its colour.
    """
    palette = np.array(config.palette)
    # as single integers, which are sorted much faster
    found, back = np.unique(np.ascontiguousarray(pixels).view(np.uint32), return_inverse=True)
    colours = found[:, None].view(np.uint8)
    distances = [((palette - colour)[:, :3] ** 2).sum(1) for colour in colours.astype(np.int64)]
    far = np.array(distances)
    far[far[:, 0] > 0, 0] += 0 if palette[0, 3] else 2**20
    values = np.where(colours[:, 3] < OPAQUE, 0, far.argmin(1))
    return values.astype(np.uint8)[back.reshape(-1)]


def choose(pictures: NDArray[np.uint8], most: int) -> tuple[Colour, ...]:
    """At most so many colours for pictures (count, height, width, 4); the ground is the first.

    They are colours of the pictures. Each next one is the colour whose pixels would gain most: the
    number of them times the squared distance to the nearest colour so far.
    """
    there = pictures[..., 3] >= OPAQUE
    colours, counts = counted(pictures[there])
    edge = np.ones(pictures.shape[1:3], np.bool_)
    edge[1:-1, 1:-1] = False
    if np.mean(there) <= 1 - CLEAR:
        taken = {colour[0] for colour in colours[:, :3].tolist() if len({*colour}) == 1}
        lightest = max({*range(256)} - taken, default=255)  # of the greys that no pixel has
        palette = [np.array([lightest, lightest, lightest, 0])]
    else:
        at_edge, often = counted(pictures[there & edge])
        palette = [at_edge[often.argmax()]]
    far = np.full(len(colours), 2.0**20)
    if palette[0][3]:
        far = ((colours - palette[0]) ** 2).sum(1)
    while len(palette) < most and (counts * far).max(initial=0) > 0:
        palette.append(colours[(counts * far).argmax()])
        far = np.minimum(far, ((colours - palette[-1]) ** 2).sum(1))
    return tuple(tuple(colour.tolist()) for colour in palette)


def counted(pixels: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The most frequent colours of opaque pixels (n, 4), and how many pixels have each."""
    opaque = pixels | np.array([0, 0, 0, 255], np.uint8)
    found, counts = np.unique(opaque.view(np.uint32), return_counts=True)
    most = np.argsort(-counts, kind="stable")[:CANDIDATES]
    return found[most, None].view(np.uint8).astype(np.int64), counts[most]
