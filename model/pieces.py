"""Pieces of a picture, which are connected components of its ink, in numpy alone; and whether a
drawn one is torn.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

VISIBLE = 32  # least distance from the ground of ink that is seen
# largest share of real pictures in several pieces where a drawn one in several is torn, of classes
# that
WHOLE = 0.06
# are not divided
# least share of a class's real pictures in several pieces where no drawn one of it is: dots of i
# and j
DIVIDED = 0.25


def components(mask: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Number each pixel of (H, W): 0 outside the mask; from 1 on inside, equal if pixels touch,
    even at a corner.

    Numbers rise from the first line to the last, in the order in which pieces begin.
    """
    width = mask.shape[1]
    steps = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    rows, starts = np.nonzero(steps == 1)
    # runs of pixels, row by row; the ends are in the same order as the starts
    _, ends = np.nonzero(steps == -1)
    # runs of the next image row that touch a run are consecutive in these orders
    below = (rows + 1) * (width + 2)
    first = np.searchsorted(rows * (width + 2) + ends, below + starts)
    count = np.searchsorted(rows * (width + 2) + starts, below + ends, side="right") - first
    upper = np.repeat(np.arange(len(rows)), count)
    lower = (
        np.arange(count.sum()) - np.repeat(count.cumsum() - count, count) + np.repeat(first, count)
    )
    root = np.arange(len(rows))
    while not np.array_equal(root[upper], root[lower]):
        least = np.minimum(root[upper], root[lower])
        for runs in (upper, lower):
            np.minimum.at(root, root[runs], least)
        while not np.array_equal(root, shorter := root[root]):
            root = shorter
    labels = np.zeros(mask.shape, np.intp)
    labels[mask] = np.repeat(np.unique(root, return_inverse=True)[1] + 1, ends - starts)
    return labels


def visible(images: NDArray[np.uint8], ground: int) -> NDArray[np.bool_]:
    """Pixels of one channel with ink that is seen, on the ground's value."""
    ink: NDArray[np.bool_] = np.abs(images.astype(np.int16) - ground) >= VISIBLE
    return ink


def whole(look: Mapping[str, Any] | None, label: int | None) -> bool:
    """Whether pictures of a class that look as those that a model was trained on are hardly ever in
    several pieces.
    """
    return look is not None and look["pieces"] <= WHOLE and label not in look.get("divided", ())


def torn(
    images: NDArray[np.uint8], ground: int, known: NDArray[np.bool_] | None = None
) -> NDArray[np.bool_]:
    """Whether visible ink is in more pieces than it must be, (B,). images, known: (B, H, W).

    One piece is enough, but where known ground divides known ink, no completion can join it.
    """
    ink = visible(images, ground)
    apart = np.pad(ink, ((0, 0), (0, 1), (0, 0)))  # one below the other, with an empty line between
    labels = components(apart.reshape(-1, apart.shape[2])).reshape(apart.shape)
    pieces = np.diff(np.maximum.accumulate(labels.max((1, 2))), prepend=0)
    found: NDArray[np.bool_] = pieces > 1
    for i in np.flatnonzero(found):
        if known is None:
            break
        joined = components(ink[i] | ~known[i])  # as if all that is hidden were ink
        found[i] = pieces[i] > max(1, len(np.unique(joined[ink[i] & known[i]])))
    return found
