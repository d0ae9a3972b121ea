"""What drawn grey pictures look like beside real ones, in numbers of what a visitor sees: greys, ink, loose pieces."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from linpix.model.config import ModelConfig

VISIBLE, FULL = 32, 252  # least distances from the ground: of ink that is seen, and of full ink
SPECK = 4                # most pixels of a piece that counts as a speck
TOGETHER = 1_000         # pictures


@dataclass(frozen=True, slots=True)
class Look:
    greys: float     # mean number of different values in a picture
    full_ink: float  # mean number of pixels with full ink
    pieces: float    # share of pictures whose visible ink is in more than one piece, where corners connect
    specks: float    # share of pictures with a piece of at most SPECK pixels beside others


def look_of(images: NDArray[np.uint8], config: ModelConfig, ground: int) -> Look:
    """images: (count, T) of one channel · ground: the value of pixels without ink."""
    ink = np.abs(images.astype(np.int16) - ground)
    greys = (np.diff(np.sort(images, 1), axis=1) != 0).sum(1) + 1
    sizes = [size for at in range(0, len(ink), TOGETHER)
             for size in _sizes(ink[at:at + TOGETHER].reshape(-1, config.height, config.width) >= VISIBLE)]
    several = [size for size in sizes if len(size) > 1]
    return Look(round(float(greys.mean()), 1), round(float((ink >= FULL).sum(1).mean()), 1),
                round(len(several) / len(images), 4),
                round(sum(int(size.min()) <= SPECK for size in several) / len(images), 4))


def _sizes(ink: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Pixels of each piece of each picture. ink: (B, height, width)."""
    with torch.device("cpu"):
        seen = torch.from_numpy(ink)
        places = torch.arange(1, ink[0].size + 1, dtype=torch.float32).view(ink.shape[1:])
        # each pixel takes the largest number of its neighbours, until a whole piece has the largest one within it
        found, before = seen * places, torch.zeros(())
        while not torch.equal(found, before):
            before, found = found, F.max_pool2d(found[:, None], 3, stride=1, padding=1)[:, 0] * seen
        return [np.unique(piece[piece > 0].numpy(), return_counts=True)[1] for piece in found]
