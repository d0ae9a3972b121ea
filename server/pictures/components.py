"""Connected components of a mask, in numpy alone."""

import numpy as np
from numpy.typing import NDArray


def components(mask: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Number each pixel of (H, W): 0 outside the mask; from 1 on inside, equal if pixels touch, even at a corner."""
    width = mask.shape[1]
    steps = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    rows, starts = np.nonzero(steps == 1)
    _, ends = np.nonzero(steps == -1)  # runs of pixels, row by row; the ends are in the same order as the starts
    below = (rows + 1) * (width + 2)   # runs of the next image row that touch a run are consecutive in these orders
    first = np.searchsorted(rows * (width + 2) + ends, below + starts)
    count = np.searchsorted(rows * (width + 2) + starts, below + ends, side="right") - first
    upper = np.repeat(np.arange(len(rows)), count)
    lower = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count) + np.repeat(first, count)
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
