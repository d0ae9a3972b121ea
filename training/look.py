"""What pictures look like in numbers: greys, ink, loose pieces of drawn and real ones; ground and
ink for a board.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linpix.model.config import ModelConfig
from linpix.model.pieces import DIVIDED, VISIBLE, components, visible

from .readers import Labels, Pixels

FULL = 252  # least distance from the ground of full ink
SPECK = 4  # most pixels of a piece that counts as a speck
TOGETHER = 1_000  # pictures
# of pictures as `prepare` makes them: the longer side of their ink, and how far its centre of
DIGIT, OFF = (18, 22), 2
# mass may be from the middle, in pixels


@dataclass(frozen=True, slots=True)
class Look:
    greys: float  # mean number of different values in a picture
    full_ink: float  # mean number of pixels with full ink
    # share of pictures, but of divided classes, whose visible ink is in more than one piece, where
    pieces: float
    # corners connect
    specks: float  # share of the same pictures with a piece of at most SPECK pixels beside others
    # classes whose pictures often are in more than one piece
    divided: list[int] = field(default_factory=list)


def look_of(
    images: Pixels,
    config: ModelConfig,
    ground: int,
    labels: Labels | None = None,
    divided: Sequence[int] | None = None,
) -> Look:
    """images: (count, T) of one channel · ground: the value of pixels without ink · labels:
    (count,).

    divided: classes of which real pictures are; None: as the images are, none without labels.
    """
    greys = (np.diff(np.sort(images, 1), axis=1) != 0).sum(1) + 1
    full = np.abs(images.astype(np.int16) - ground) >= FULL
    sizes = [
        np.bincount(components(ink).ravel())[1:]
        for ink in visible(images, ground).reshape(-1, config.height, config.width)
    ]
    apart = np.array([len(size) > 1 for size in sizes])
    specks = np.array([len(size) > 1 and size.min() <= SPECK for size in sizes])
    if labels is None:
        labels, divided = np.zeros(len(images), np.int64), []
    elif divided is None:
        divided = [
            int(label) for label in np.unique(labels) if apart[labels == label].mean() >= DIVIDED
        ]
    counted = ~np.isin(labels, divided)
    pieces = specked = 1.0
    if counted.any():
        pieces, specked = apart[counted].mean(), specks[counted].mean()
    return Look(
        round(float(greys.mean()), 1),
        round(float(full.sum(1).mean()), 1),
        round(float(pieces), 4),
        round(float(specked), 4),
        [*divided],
    )


def board_of(images: Pixels, config: ModelConfig) -> dict[str, Any]:
    """What a drawing board needs to know: ground and ink, a value a channel, and whether `prepare`
    makes such pictures.

    images: (count, T) · ground: the median of the pictures' edges; null if less than half of the
    edges is near it, as in photographs · ink: the median of the pixels that differ most from the
    ground · prepare: mnist or null.
    """
    pictures = images[:: max(1, len(images) // TOGETHER)].reshape(
        -1, *config.image_shape[:2], config.channels
    )
    around = np.ones(config.image_shape[:2], np.bool_)
    around[1:-1, 1:-1] = False
    edge = pictures[:, around].reshape(-1, config.channels)
    ground = np.median(edge, 0)
    if np.mean(np.abs(edge - ground).max(1) < VISIBLE) < 0.5:
        return {"ground": None, "ink": None, "prepare": None}
    away: NDArray[np.float64] = np.abs(pictures - ground).max(3)
    inky = np.asarray(away > max(VISIBLE, float(away.max()) / 2))
    ink = np.median(pictures[inky], 0) if inky.any() else 255 - ground
    whole = inky.any((1, 2))
    digits = (
        config.image_shape == (28, 28)
        and ground[0] < VISIBLE
        and whole.any()
        and _like_mnist(pictures[whole, ..., 0].astype(np.float64))
    )
    prepared = "mnist" if digits else None
    return {
        "ground": [int(value) for value in ground],
        "ink": [int(value) for value in ink],
        "prepare": prepared,
    }


def _like_mnist(pictures: NDArray[np.float64]) -> bool:
    """Whether most pictures, (count, 28, 28), none of them empty, show ink of a digit's size in the
    middle.
    """
    fits = np.ones(len(pictures), np.bool_)
    sides = []
    for axis in (1, 2):
        there: NDArray[np.bool_] = np.any(pictures >= VISIBLE, axis)
        sides.append(28 - there.argmax(1) - there[:, ::-1].argmax(1))
        mass = pictures.sum(axis)
        fits &= np.abs(mass @ (np.arange(28) - 13.5) / mass.sum(1)) <= OFF
    longer = np.maximum(*sides)
    return bool(np.mean(fits & (longer >= DIGIT[0]) & (longer <= DIGIT[1])) > 0.5)
