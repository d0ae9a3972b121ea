"""Crop a partly hidden picture and reduce it to fewer pixels, by one rule for pixels that are
partly hidden.

A larger pixel covers a rectangle of the picture. It is known if at least half of its area is known,
and its value is the mean over its known part alone. So hidden paint never has weight, even in a
pixel that is only partly hidden.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

# bounds are multiples of 1/256 pixel: sums of bytes are then exact in float64, in any order
FINE = 256

# (parts + 1,), ascending, in pixels from the left or top edge of the picture
Bounds = NDArray[np.float64]
Crop = tuple[int, int, int, int]  # left, top, right, bottom
Span = tuple[int, int]  # where a crop begins and ends on one axis


def centred(size: tuple[int, int], ratio: tuple[int, int]) -> Crop:
    """The largest crop of an aspect ratio around the centre. size, ratio: width and height."""
    (width, height), (across, down) = size, ratio
    crop_width = min(width, max(1, round(height * across / down)))
    crop_height = min(height, max(1, round(width * down / across)))
    left, top = (width - crop_width) // 2, (height - crop_height) // 2
    return left, top, left + crop_width, top + crop_height


def cut(values: NDArray[Any], crop: Crop) -> NDArray[Any]:
    """A crop of (H, W)."""
    left, top, right, bottom = crop
    return values[top:bottom, left:right]


def moved(
    hidden: NDArray[np.bool_], size: tuple[int, int], crop: Crop, within: Crop
) -> tuple[Crop, Crop, float]:
    """On each axis, centre a picture's crop on the hidden part, if that is not inside it and at
    most half its length.

    Returns the crop, the same crop in `hidden`, and the share of the hidden area outside.
    hidden: (H, W), of the picture itself or of its mask · size: width and height of the picture ·
    within: the crop of `hidden`. A mask whose aspect ratio is not the picture's does not move the
    crop.
    """
    if not hidden.any():
        return crop, within, 0.0
    (tall, wide), (width, height) = hidden.shape, size
    # the same aspect ratio, to a pixel of the mask
    if abs(wide * height - tall * width) <= max(size):
        columns, rows = np.flatnonzero(hidden.any(axis=0)), np.flatnonzero(hidden.any(axis=1))
        (left, right), (from_left, to_right) = _reaching(
            crop[::2], width, columns, wide, within[::2]
        )
        (top, bottom), (from_top, to_bottom) = _reaching(
            crop[1::2], height, rows, tall, within[1::2]
        )
        crop, within = (left, top, right, bottom), (from_left, from_top, to_right, to_bottom)
    return crop, within, 1 - float(cut(hidden, within).sum() / hidden.sum())


def _reaching(
    span: Span, whole: int, holes: NDArray[np.intp], parts: int, within: Span
) -> tuple[Span, Span]:
    """The crop of `moved` on one axis, in the picture and in its mask; span, within: as it was.

    whole: length of the picture · holes: places in the mask, ascending · parts: length of the mask.
    """
    scale, length, inside = whole / parts, span[1] - span[0], within[1] - within[0]
    first, last = math.floor(holes[0] * scale), math.ceil((holes[-1] + 1) * scale)
    if (span[0] <= first and last <= span[1]) or last - first > length / 2:
        return span, within
    start = max(0, min((first + last - length) // 2, whole - length))
    there = min(round(start / scale), parts - inside)
    return (start, start + length), (there, there + inside)


def bounds(parts: int, start: float, stop: float) -> Bounds:
    """The bounds of equal parts from start to stop."""
    return np.round(np.linspace(start, stop, parts + 1) * FINE) / FINE


def sums(pixels: NDArray[Any], rows: Bounds, columns: Bounds) -> Iterator[NDArray[np.float64]]:
    """Sums of pixels (H, W, ...) over rectangles between these bounds; yields (parts, ...), a row
    of rectangles.
    """
    at = columns.astype(np.intp)
    # how far each bound lies inside its pixel, 0 to 1
    inside = (columns - at).reshape(-1, *[1] * (pixels.ndim - 2))
    for top, bottom in pairwise(rows):
        first, last = min(int(top), len(pixels) - 1), math.ceil(bottom)
        band = (
            pixels[first:last].sum(axis=0, dtype=np.uint64)
            - (top - first) * pixels[first]
            - (last - bottom) * pixels[last - 1]
        )  # bounds may be inside one line of pixels
        before = np.concatenate([np.zeros_like(band[:1]), band.cumsum(axis=0)])
        yield np.diff(before[at] + inside * band[np.minimum(at, len(band) - 1)], axis=0)


def half_known(kept: NDArray[np.bool_], height: int, width: int) -> NDArray[np.bool_]:
    """Stretch a mask of any size to (height, width), by the rule of this module."""
    if kept.shape == (height, width):
        return kept
    rows, columns = bounds(height, 0, kept.shape[0]), bounds(width, 0, kept.shape[1])
    areas = np.diff(columns)
    return np.stack(
        [
            2 * known >= (bottom - top) * areas
            for (top, bottom), known in zip(
                pairwise(rows), sums(kept.view(np.uint8), rows, columns), strict=True
            )
        ]
    )


def means(
    pixels: NDArray[np.uint8],
    kept: NDArray[np.bool_],
    rows: Bounds,
    columns: Bounds,
    known: NDArray[np.bool_] | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Reduce pixels (H, W, channels), known where `kept` (H, W) is; returns values, 0 where hidden,
    and what is known.

    known: the result of the rule, if it was computed elsewhere.
    """
    areas = np.stack([*sums(kept.view(np.uint8), rows, columns)])
    totals = np.stack([*sums(pixels * kept[..., None], rows, columns)])
    if known is None:
        known = 2 * areas >= np.outer(np.diff(rows), np.diff(columns))
    known = known & (areas > 0)
    values = np.floor(totals / np.where(known, areas, 1)[..., None] + 0.5)
    return np.where(known[..., None], values, 0).astype(np.uint8), known


def reduced(
    pixels: NDArray[np.uint8], kept: NDArray[np.bool_], height: int, width: int
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Reduce a whole picture (H, W, channels) by the rule. kept: a mask of any size, stretched over
    the picture.

    What is known is computed from the mask itself, so a mask of the requested size is taken pixel
    by pixel.
    """
    own = half_known(kept, *pixels.shape[:2])
    if pixels.shape[:2] == (height, width):
        return np.where(own[..., None], pixels, np.uint8(0)), own
    return means(
        pixels,
        own,
        bounds(height, 0, pixels.shape[0]),
        bounds(width, 0, pixels.shape[1]),
        None if own is kept else half_known(kept, height, width),
    )
