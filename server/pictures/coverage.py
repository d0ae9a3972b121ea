"""From the pixels of a picture to fewer ones, parts of which may be hidden: what is cropped, and one rule for the rest.

A larger pixel covers a rectangle of the picture. It is known if at least half of its area is, and its value is the mean
over its known part alone. So hidden paint has no weight, not even in a pixel that is hidden in part.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

FINE = 256  # bounds are multiples of 1/256 pixel: sums of bytes are then exact in float64, in whatever order

Bounds = NDArray[np.float64]  # (parts + 1,), rising, in pixels from the first edge of the picture
Crop = tuple[int, int, int, int]  # left, top, width, height


def centred(size: tuple[int, int], ratio: tuple[int, int]) -> Crop:
    """The largest part of an aspect ratio around the centre. size, ratio: width and height."""
    (width, height), (across, down) = size, ratio
    crop_width = min(width, max(1, round(height * across / down)))
    crop_height = min(height, max(1, round(width * down / across)))
    return (width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height


def moved(hidden: NDArray[np.bool_], size: tuple[int, int], crop: Crop, within: Crop) -> tuple[Crop, Crop, float]:
    """Move the crop of a picture to the middle of what is hidden, if that is not in it and at most half as long.

    Returns it, the same part of what says what is hidden, and the share of the hidden area that is outside.
    hidden: (H, W), of the picture itself or of its mask · size: width and height of the picture · within: the crop of
    `hidden`. A mask of another shape than the picture does not move it.
    """
    if not hidden.any():
        return crop, within, 0.0
    (tall, wide), (width, height) = hidden.shape, size
    if abs(wide * height - tall * width) <= max(size):  # of one shape, to a pixel of the mask
        columns, rows = np.flatnonzero(hidden.any(axis=0)), np.flatnonzero(hidden.any(axis=1))
        left, from_left = _reaching(crop[0], crop[2], width, columns, wide, within[0], within[2])
        top, from_top = _reaching(crop[1], crop[3], height, rows, tall, within[1], within[3])
        crop, within = (left, top, *crop[2:]), (from_left, from_top, *within[2:])
    left, top, wide, tall = within
    return crop, within, 1 - float(hidden[top:top + tall, left:left + wide].sum() / hidden.sum())


def _reaching(start: int, length: int, whole: int, holes: NDArray[np.intp], parts: int, within: int, inside: int
              ) -> tuple[int, int]:
    """Where one side of `moved`'s crop begins in the picture, and in its mask.

    start, length, whole: of the crop and the picture · holes: places in the mask, rising · parts, within, inside: of
    the mask, and where the crop begins in it and how long it is there.
    """
    scale = whole / parts
    first, last = math.floor(holes[0] * scale), math.ceil((holes[-1] + 1) * scale)
    if (start <= first and last <= start + length) or last - first > length / 2:
        return start, within
    start = max(0, min((first + last - length) // 2, whole - length))
    return start, min(round(start / scale), parts - inside)


def bounds(parts: int, start: float, stop: float) -> Bounds:
    """Of equal parts from start to stop."""
    return np.round(np.linspace(start, stop, parts + 1) * FINE) / FINE


def sums(pixels: NDArray[Any], rows: Bounds, columns: Bounds) -> Iterator[NDArray[np.float64]]:
    """(H, W, ...) to the sums over rectangles between these bounds: one row of them, (parts, ...), at a time."""
    at = columns.astype(np.intp)
    inside = (columns - at).reshape(-1, *[1] * (pixels.ndim - 2))  # of the pixel in which a bound lies
    for top, bottom in pairwise(rows):
        band = _band(pixels, top, bottom)
        before = np.concatenate([np.zeros_like(band[:1]), band.cumsum(axis=0)])
        yield np.diff(before[at] + inside * band[np.minimum(at, len(band) - 1)], axis=0)


def _band(pixels: NDArray[Any], top: float, bottom: float) -> NDArray[np.float64]:
    first, last = int(np.ceil(top)), int(bottom)
    if first > last:  # both within one pixel
        part: NDArray[np.float64] = pixels[last] * (bottom - top)
        return part
    band: NDArray[np.float64] = pixels[first:last].sum(axis=0, dtype=np.uint64).astype(np.float64)
    if first > top:
        band += pixels[first - 1] * (first - top)
    if bottom > last:
        band += pixels[last] * (bottom - last)
    return band


def half_known(kept: NDArray[np.bool_], height: int, width: int) -> NDArray[np.bool_]:
    """Stretch a mask of any size to (height, width), by the rule."""
    if kept.shape == (height, width):
        return kept
    rows, columns = bounds(height, 0, kept.shape[0]), bounds(width, 0, kept.shape[1])
    areas = np.diff(columns)
    return np.stack([2 * known >= (bottom - top) * areas for (top, bottom), known
                     in zip(pairwise(rows), sums(kept.view(np.uint8), rows, columns), strict=True)])


def means(pixels: NDArray[np.uint8], kept: NDArray[np.bool_], rows: Bounds, columns: Bounds,
          known: NDArray[np.bool_] | None = None) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Pixels (H, W, channels), of which `kept` (H, W) are known, to values and what is known; hidden ones are 0.

    known: what the rule gives, if that was looked up elsewhere.
    """
    areas = np.stack([*sums(kept.view(np.uint8), rows, columns)])
    totals = np.stack([*sums(pixels * kept[..., None], rows, columns)])
    if known is None:
        known = 2 * areas >= np.outer(np.diff(rows), np.diff(columns))
    known = known & (areas > 0)
    values = np.floor(totals / np.where(known, areas, 1)[..., None] + 0.5)
    return np.where(known[..., None], values, 0).astype(np.uint8), known


def reduced(pixels: NDArray[np.uint8], kept: NDArray[np.bool_], height: int, width: int
            ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """A whole picture (H, W, channels), by the rule. kept: a mask of any size, which is stretched over it.

    What is known is looked up in the mask itself: a mask of the size asked for is taken pixel by pixel.
    """
    own = half_known(kept, *pixels.shape[:2])
    if pixels.shape[:2] == (height, width):
        return np.where(own[..., None], pixels, np.uint8(0)), own
    return means(pixels, own, bounds(height, 0, pixels.shape[0]), bounds(width, 0, pixels.shape[1]),
                 None if own is kept else half_known(kept, height, width))
