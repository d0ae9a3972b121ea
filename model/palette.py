"""Palettes: the colours that the values of a model's sub-pixels stand for.

A palette has at most 256 colours. The first is the ground, which may be transparent; all others are
opaque. A transparent ground has a colour too, for what cannot show transparency.
"""

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig

OPAQUE = 128  # least alpha of a pixel that is there


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
