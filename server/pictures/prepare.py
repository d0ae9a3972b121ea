"""Bring a photographed or scanned digit or letter to MNIST's form: light ink on black, 20 pixels
large, centred by mass.

The paper's tone is a smooth surface fitted to the known pixels. Pixels that differ from it are ink,
dark or light. The heaviest piece of ink is the figure, with the pieces near it; specks, and ink
that reaches the picture's edge, do not count. If this figure is a sheet on a table, the pixels that
differ from the sheet are ink. If no figure is found within the picture, light may have an edge on
the paper. Ruled lines at a figure are not a part of it.

A hole may or may not hide ink, so it counts as little as possible. A hole is not ink. Pieces of ink
at one hole are one figure. If ink reaches a hole, the figure may continue in it: its box then
includes the hole, up to the height that a figure of its width may have (LARGEST_HIDDEN). For the
centre of mass, hidden pixels of the box weigh as much as its known pixels do on average.
"""

import math
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from linpix.model.pieces import components

from .coverage import bounds, means

# pixels in MNIST: the field, a digit's longer side, the centre of its mass
SIDE, LONGER, CENTRE = 28, 20, 14.5
# of x and y in the paper's surface; for shadows, vignettes
DEGREES = ((0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2))
SAMPLES = 64  # along the shorter side, to which the surface is fitted
FAINTEST = 0.08  # ink differs from paper by at least this part of the range
NOISES = 5  # and by at least this many standard deviations of the paper
# largest height of a figure cut off by a hole: times its known height, times its width.
LARGEST_HIDDEN = (1.5, 4 / 3)
# With half hidden, the height of 2,000 test digits is wrong by a
# factor of 1.26; the known half taken as the whole digit would be
# wrong by 2
NARROW = 0.75  # median width of a digit, as a part of its height
# a sheet on a table: its width and height are at least this part of the picture's longer
SHEET = (1 / 3, 0.8, 0.5)
# side, and it fills these parts of the area between its sides, and
# of its box
LONG_LINES = 1.2  # lines at a figure are removed if they make it longer by this factor
# parts of the ink's contrast that become black and white: MNIST's glyphs had no greys
TONES = (0.25, 0.75)

Grey = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels of the picture
Found = tuple[NDArray[np.float64], NDArray[np.float64], bool, Mask]


class NoFigure(ValueError):
    """What was found instead of one figure, and what to do about it."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    canvas: Grey  # (SIDE, SIDE), holes are 0
    known: Mask  # (SIDE, SIDE)
    inverted: bool  # the ink was darker than the paper
    box: Box  # of the figure
    field: Box  # what the canvas shows; it may go beyond the picture
    ink: Mask  # (H, W), the figure's
    paper: NDArray[np.float64]  # (H, W), the paper's tone
    sheet: Mask  # (H, W), known paper and ink, without the table under a sheet


def prepare(grey: Grey, kept: Mask) -> Prepared:
    """grey: (H, W) · kept: (H, W), what is known. Raises NoFigure."""
    sheet = kept
    paper, contrast, inverted, figure = _found(grey, sheet, kept)
    if (spanned := _spanned(figure)) is not None:
        with suppress(NoFigure):  # an empty sheet, or a very thick figure
            paper, contrast, inverted, figure = _found(grey, spanned & kept, kept)
            sheet = spanned & kept
    figure = _thick(figure)
    box = _box(figure, ~kept)
    level = float(np.median(contrast[figure]))
    # with its soft edges
    around = blurred(figure.astype(np.float64), 2 + max(kept.shape) // 250) > 1e-9
    low, high = TONES
    tones = np.where(around & kept, np.clip((contrast / level - low) / (high - low), 0, 1), 0)
    field = _field(tones, kept, box)
    canvas, known = _reduced((255 * tones + 0.5).astype(np.uint8), kept, field)
    strokes = canvas[canvas > canvas.max() // 3]
    # < 255: strokes under a pixel wide
    brightest = float(np.percentile(strokes, 75)) if strokes.size else 255.0
    canvas = np.clip(canvas * (255 / max(brightest, 1.0)) + 0.5, 0, 255).astype(np.uint8)
    return Prepared(canvas, known, inverted, box, field, figure, paper, sheet)


def _found(grey: Grey, sheet: Mask, kept: Mask) -> Found:
    """Paper, contrast, whether ink is dark, and the figure on a sheet; arrays are (H, W). Raises
    NoFigure.
    """
    paper = _paper(grey, sheet)
    found: Found | NoFigure
    try:
        found = _inked(grey, paper, sheet, kept)
    except NoFigure as error:
        found = error
    if isinstance(found, NoFigure) or _cut(found[3]):
        # where light has an edge on the paper, ink is what is darker than its surroundings
        with suppress(NoFigure):
            shaded = _inked(grey, _closed(np.where(sheet, grey, paper)), sheet, kept)
            found = found if _cut(shaded[3]) else shaded
    if isinstance(found, NoFigure):
        raise found
    return found


def _closed(grey: NDArray[np.float64]) -> NDArray[np.float64]:
    """A picture without what is dark and narrow (a morphological closing): a shadow keeps its
    edge.
    """
    values, width = blurred(grey, max(grey.shape) // 500 + 1), min(grey.shape) // 6
    for extreme in (np.maximum, np.minimum):
        for _ in range(2):
            padded, rows = np.pad(values, ((width, width), (0, 0)), mode="edge"), 1
            while step := min(rows, 2 * width + 1 - rows):
                padded, rows = extreme(padded[:-step], padded[step:]), rows + step
            values = padded.T
    return values


def _inked(grey: Grey, paper: NDArray[np.float64], sheet: Mask, kept: Mask) -> Found:
    """As _found. Contrast is how much inkier than the paper a pixel is: at most 1, and 0 where it
    is hidden.

    It is a ratio to the paper's tone, since light multiplies: so it is the same in the shade.
    """
    away = np.where(sheet, grey - paper, 0)
    dark = bool((away**3).sum() < 0)  # in cubes, noise hardly counts
    contrast = (-away if dark else away) / np.maximum(paper if dark else 255 - paper, 16)
    ink = _ink(blurred(contrast, max(kept.shape) // 500), sheet)
    return paper, contrast, dark, _figure(ink, contrast, ~kept)


def _cut(figure: Mask) -> bool:
    """Whether a figure reaches the edge of the picture."""
    return bool(figure[[0, -1]].any() or figure[:, [0, -1]].any())


def _thick(figure: Mask) -> Mask:
    """A figure without lines of under a quarter of its strokes' width, if such lines make it
    longer.
    """
    left, top, right, bottom = map(int, _extent(figure))
    inside = np.s_[top:bottom, left:right]
    around, radius = np.pad(~figure[inside], 1, constant_values=True).astype(np.float64), 1
    while (blurred(around, 2 * radius) < 1e-9).any():
        radius *= 2  # up to half of the strokes' width
    core = blurred(around, radius // 4) < 1e-9
    thick = np.zeros_like(figure)
    thick[inside] = figure[inside] & (
        blurred(core.astype(np.float64), radius // 4 + 1)[1:-1, 1:-1] > 1e-9
    )
    longer = [
        max(right - left, bottom - top)
        for left, top, right, bottom in map(_extent, (figure, thick))
    ]
    return thick if longer[0] > LONG_LINES * longer[1] else figure


def _spanned(figure: Mask) -> Mask | None:
    """The area between a figure's left and right sides, without its edges; None if it is not a
    sheet of paper.
    """
    left, top, right, bottom = _extent(figure)
    wide, tall, least = right - left, bottom - top, SHEET[0] * max(figure.shape)
    spanned = (
        np.logical_or.accumulate(figure, axis=1)
        & np.logical_or.accumulate(figure[:, ::-1], axis=1)[:, ::-1]
    )
    if min(wide, tall) < least or figure.sum() < max(
        SHEET[1] * spanned.sum(), SHEET[2] * wide * tall
    ):
        return None
    return blurred((~spanned).astype(np.float64), 2 + max(figure.shape) // 100) < 1e-9


def _paper(grey: Grey, kept: Mask) -> NDArray[np.float64]:
    """The paper's tone at every pixel, also under ink: a surface fitted to the samples close to it.
    Raises NoFigure.
    """
    height, width = grey.shape
    step = max(1, min(height, width) // SAMPLES)
    ys, xs = np.nonzero(kept[::step, ::step])
    if len(ys) < 4 * len(DEGREES):
        raise NoFigure("too little of the picture is known; hide less of it")
    values = grey[::step, ::step][ys, xs].astype(np.float64)
    terms = _terms(ys * step / height, xs * step / width)
    ring = (
        np.minimum(np.minimum(ys, ys.max() - ys), np.minimum(xs, xs.max() - xs))
        <= max(ys.max(), xs.max()) // 16
    )
    fitted = np.full_like(values, np.median(values[ring]))  # a digit has paper around it
    weights = np.zeros(len(DEGREES))
    for degrees in (1, 1, 3, 3, 6, 6, 6):  # a surface bent from the start would follow thick ink
        away = np.abs(values - fitted)
        near = away <= max(4.0, 2.5 * _spread(away))
        weights[:degrees] = np.linalg.lstsq(terms[near, :degrees], values[near], rcond=None)[0]
        fitted = terms @ weights
    whole = _terms(np.arange(height)[:, None] / height, np.arange(width)[None] / width) @ weights
    # in hidden parts the surface could take any value
    return np.clip(whole, fitted.min(), fitted.max())


def _spread(away: NDArray[np.float64]) -> float:
    """The paper's standard deviation, from distances to its tone. The smallest third of them has no
    ink.
    """
    return float(np.quantile(away, 1 / 3)) / 0.43


def _terms(y: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack(
        np.broadcast_arrays(*[(2 * x - 1) ** i * (2 * y - 1) ** j for i, j in DEGREES]), axis=-1
    )


def blurred(values: NDArray[np.float64], radius: int) -> NDArray[np.float64]:
    """The mean of the square around each pixel."""
    if radius:
        for _ in range(2):
            padded = np.pad(values, ((radius + 1, radius), (0, 0)), mode="edge").cumsum(axis=0)
            values = ((padded[2 * radius + 1 :] - padded[: -2 * radius - 1]) / (2 * radius + 1)).T
    return values


def _ink(smooth: NDArray[np.float64], kept: Mask) -> Mask:
    """Pixels more than half as far from the paper as the median of the ink. Raises NoFigure if
    there are none.
    """
    limit = least = max(FAINTEST, NOISES * _spread(np.abs(smooth[kept])))
    for _ in range(8):
        above = smooth[smooth > limit]
        if not above.size:
            raise NoFigure(
                "no ink was found: use a picture with more contrast between the ink and the paper"
            )
        limit = max(least, float(np.median(above)) / 2)
    return (smooth > limit) & kept


def _figure(ink: Mask, contrast: NDArray[np.float64], hidden: Mask) -> Mask:
    """The ink of one figure. Raises NoFigure if there are several, or it is too small."""
    near_hole = blurred(hidden.astype(np.float64), 1) > 1e-9
    labels = components(ink | near_hole)
    ys, xs = np.nonzero(ink)
    own = labels[ys, xs]
    mass = np.bincount(own, np.maximum(contrast[ys, xs], 0), minlength=int(labels.max()) + 1)
    boxes = np.tile([np.inf, np.inf, 0.0, 0.0], (len(mass), 1))
    for side, least, most in ((0, xs, xs + 1), (1, ys, ys + 1)):
        np.minimum.at(boxes[:, side], own, least)
        np.maximum.at(boxes[:, side + 2], own, most)
    height, width = ink.shape
    sides = np.where(mass > 0, np.maximum(boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]), 0)
    at_edge = (boxes[:, :2].min(axis=1) == 0) | (boxes[:, 2] == width) | (boxes[:, 3] == height)
    inner = ~at_edge & (sides >= max(height, width) / 25) & (mass >= mass.max() / 30)
    main = int(np.argmax(np.where(inner, mass, 0) if inner.any() else mass))
    gaps = (
        np.maximum(boxes[:, :2] - boxes[main, 2:], boxes[main, :2] - boxes[:, 2:]).max(axis=1)
        / sides[main]
    )
    large = mass >= mass[main] / 3
    part = (
        (mass >= mass[main] / 50)
        & (gaps <= np.where(large, 0.1, 0.25))
        & (~at_edge | at_edge[main])
    )
    part &= mass <= mass[main]
    if others := int((large & ~part & ~at_edge & (mass > 0)).sum()):
        raise NoFigure(f"{others + 1} separate shapes were found; crop the picture to one of them")
    if sides[main] < LONGER / 2:
        raise NoFigure(
            f"the ink is only {sides[main]:.0f} pixels large; use a picture in which it has at"
            f" least {LONGER // 2}"
        )
    figure: Mask = ink & part[labels]
    return figure


def _extent(mask: Mask) -> Box:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def _box(figure: Mask, hidden: Mask) -> Box:
    """The figure's extent; on each side where its ink runs into holes, it grows towards their
    extent.
    """
    box, holes = _extent(figure), components(hidden)
    reach = [*box]
    most = 3 + max(figure.shape) // 250  # pixels; the soft edge between ink and hole
    padded = np.pad(figure, most)
    for side, (across, down) in enumerate(((-1, 0), (0, -1), (1, 0), (0, 1))):
        into = np.logical_or.reduce(
            [
                padded[most - step * down :, most - step * across :][
                    : len(figure), : figure.shape[1]
                ]
                for step in range(1, most + 1)
            ]
        )
        entered = np.unique(holes[into & hidden])
        if entered.size:
            beyond = _extent(np.isin(holes, entered))[side]
            reach[side] = min(box[side], beyond) if side < 2 else max(box[side], beyond)
    left, top, right, bottom = box
    height, width = bottom - top, right - left
    top, bottom = _grown(
        top, bottom, reach[1], reach[3], max(LARGEST_HIDDEN[0] * height, LARGEST_HIDDEN[1] * width)
    )
    left, right = _grown(left, right, reach[0], reach[2], NARROW * (bottom - top))
    return left, top, right, bottom


def _grown(
    first: float, last: float, beyond_first: float, beyond_last: float, max_length: float
) -> tuple[float, float]:
    """Extend an interval to include another, in proportion on both sides, up to `max_length`."""
    before, after = max(0.0, first - beyond_first), max(0.0, beyond_last - last)
    share = min(1.0, max(0.0, max_length - (last - first)) / max(before + after, 1e-9))
    return first - share * before, last + share * after


def _field(tones: NDArray[np.float64], kept: Mask, box: Box) -> Box:
    """What the canvas shows: the box's longer side has LONGER canvas pixels, and the mass is
    centred at CENTRE.
    """
    left, top, right, bottom = box
    inside = np.s_[int(top) : int(np.ceil(bottom)), int(left) : int(np.ceil(right))]
    mass, there = tones[inside], kept[inside]
    mass = np.where(there, mass, mass.sum() / max(1, there.sum()))
    side = SIDE * max(right - left, bottom - top) / LONGER
    corner = []
    for axis, first, last in ((1, left, right), (0, top, bottom)):
        along = mass.sum(axis=1 - axis)
        centre = int(first) + 0.5 + float(along @ np.arange(len(along))) / float(along.sum())
        # the box is never cut off
        corner.append(min(first, max(last - side, centre - side * CENTRE / SIDE)))
    return corner[0], corner[1], corner[0] + side, corner[1] + side


def _reduced(tones: Grey, kept: Mask, field: Box) -> tuple[Grey, Mask]:
    """Reduce the field to the canvas, by the rule of coverage.py for partly hidden pixels.

    Beyond the picture there is paper, or a hole where the edge of the picture is hidden.
    """
    height, width = kept.shape
    left, top, right, bottom = field
    above, below = max(0, math.ceil(-top)), max(0, math.ceil(bottom - height))
    before, after = max(0, math.ceil(-left)), max(0, math.ceil(right - width))
    margins = ((above, below), (before, after))
    rows = bounds(SIDE, top + above, bottom + above)
    columns = bounds(SIDE, left + before, right + before)
    values, known = means(
        np.pad(tones, margins)[..., None], np.pad(kept, margins, mode="edge"), rows, columns
    )
    return values[..., 0], known
