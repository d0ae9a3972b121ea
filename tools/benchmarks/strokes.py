"""Digits drawn with strokes of a pen, as the page's board draws them: four hands for each class.

A stroke is a curve through its points, (x, y) in pixels of 28 x 28; a point that stands twice is a
corner.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

SIDE, RADIUS = 28, 1.25  # of the board, and of its pen, in pixels (server/static/editor.js)
Points = Sequence[tuple[float, float]]

# a line for each hand: the class, and its strokes, which `|` divides
DIGITS = """
0  14,4 10,6 8,11 8,17 10,22 14,24 18,22 20,17 20,11 18,6 14,4
0  16,5 12,8 10,14 10,20 12,23 15,22 18,17 19,10 17,5 15,5
0  13,7 8,10 7,15 9,20 14,22 19,20 21,15 19,9 14,7 12,7
0  17,6 13,4 9,8 7,14 9,21 13,24 18,21 20,14 18,7 14,4 12,5
1  14,4 14,24
1  17,4 11,24
1  10,8 15,4 15,4 15,24
1  10,8 14,4 14,4 14,23 | 9,23 19,23
2  9,8 12,4 17,5 19,9 16,14 11,19 8,23 8,23 20,23
2  9,9 11,5 16,4 19,8 17,13 12,19 9,22 8,20 11,19 15,22 20,23
2  8,7 13,5 18,7 18,11 13,16 7,22 7,22 13,21 21,22
2  8,6 13,4 18,5 19,8 14,15 8,23 8,23 19,24
3  9,6 13,4 18,6 18,10 13,13 13,13 18,15 19,20 14,24 8,22
3  9,5 19,5 19,5 13,12 13,12 18,14 19,19 15,23 9,22
3  10,7 13,4 17,6 16,11 12,13 17,15 17,21 13,24 9,21
3  8,7 12,5 17,6 18,9 15,12 11,13 16,14 20,17 18,22 12,23 7,20
4  10,4 8,14 8,14 20,14 | 17,6 17,24
4  16,4 7,17 7,17 21,17 | 16,4 16,24
4  9,5 9,11 12,14 18,12 | 18,4 18,24
4  12,4 8,13 8,15 19,14 | 18,7 15,24
5  10,5 10,13 10,13 15,12 19,15 18,21 13,24 8,22 | 10,5 19,5
5  19,5 10,5 10,5 9,12 9,12 14,11 19,15 18,21 12,23 8,21
5  19,4 12,5 12,5 10,12 10,12 15,12 18,16 15,22 8,23
5  11,6 10,12 15,12 18,16 17,21 12,23 8,20 | 11,6 20,5
6  17,4 12,8 9,15 10,21 14,24 18,21 17,16 13,15 10,18
6  15,4 11,9 9,16 10,22 15,24 19,20 17,16 12,16 9,20
6  18,5 13,6 9,12 8,19 12,23 17,22 18,18 14,16 9,19
6  14,4 10,13 9,19 12,23 17,22 19,18 15,15 11,17 9,20
7  8,5 20,5 20,5 13,24
7  8,7 19,5 19,5 14,14 12,24
7  8,5 19,5 19,5 12,24 | 11,14 18,14
7  8,9 8,5 8,5 20,5 20,5 15,14 14,24
8  17,6 13,4 10,7 12,11 17,15 19,19 15,24 10,21 11,16 16,11 18,7 16,5
8  14,4 10,7 11,12 14,13 18,11 18,6 14,4 | 14,13 9,17 9,22 14,24 19,21 19,16 14,13
8  18,7 14,5 11,8 13,12 16,16 15,21 11,23 9,20 11,15 16,11 19,7
8  19,7 14,4 9,7 11,12 17,15 20,19 15,23 9,22 8,18 12,13 18,10 19,7
9  18,8 14,4 9,7 9,12 13,14 18,11 18,8 18,8 18,24
9  18,7 14,5 10,8 11,13 16,13 18,8 18,14 16,21 11,24
9  19,6 13,5 9,9 12,13 17,11 19,6 19,6 16,15 14,24
9  17,8 14,6 10,9 12,13 16,12 17,8 17,8 18,16 15,22 10,22
"""


def hands() -> Iterator[tuple[int, list[Points]]]:
    """The class of each digit, and its strokes."""
    for line in DIGITS.strip().splitlines():
        label, _, strokes = line.partition("  ")
        yield int(label), [points_of(stroke) for stroke in strokes.split(" | ")]


def points_of(stroke: str) -> Points:
    found = []
    for point in stroke.split():
        x, y = point.split(",")
        found.append((float(x), float(y)))
    return found


def pen_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All of them, (N, 784), and their classes, (N,)."""
    found = list(hands())
    labels = np.array([label for label, _ in found])
    return np.stack([drawn(strokes) for _, strokes in found]), labels


def centred(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images, (N, 784), moved by whole pixels so that their centre of mass is in the middle, as in
    MNIST.
    """
    found, middle = images.reshape(-1, SIDE, SIDE).copy(), SIDE / 2
    for image in found:
        y, x = (
            round(middle - np.average(np.arange(SIDE), weights=image.sum(axis))) for axis in (1, 0)
        )
        image[:] = np.roll(image, (y, x), (0, 1))
    return found.reshape(images.shape)


def drawn(strokes: Sequence[Points]) -> NDArray[np.uint8]:
    """An image, (784,). The pen leaves full ink near its way, and half a pixel of soft edge on
    either side of it.
    """
    strength = np.zeros((SIDE, SIDE))
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    for stroke in strokes:
        for (x0, y0), (x1, y1) in pairwise(curve(stroke)):
            length = (x1 - x0) ** 2 + (y1 - y0) ** 2
            along = np.clip(((x - x0) * (x1 - x0) + (y - y0) * (y1 - y0)) / (length or 1), 0, 1)
            away = np.hypot(x - x0 - along * (x1 - x0), y - y0 - along * (y1 - y0))
            strength = np.maximum(strength, np.clip(RADIUS + 0.5 - away, 0, 1))
    return (255 * strength).round().astype(np.uint8).reshape(-1)


def curve(points: Points, steps: int = 8) -> NDArray[np.float64]:
    """Points of Catmull-Rom splines through these, from corner to corner, (n, 2)."""
    p = np.array([points[0], *points, points[-1]], np.float64)
    t = np.arange(steps)[:, None] / steps
    parts = [
        b
        + t * (c - a) / 2
        + t**2 * (a - 2.5 * b + 2 * c - d / 2)
        + t**3 * (1.5 * (b - c) + (d - a) / 2)
        for a, b, c, d in zip(p, p[1:], p[2:], p[3:], strict=False)
        if (b != c).any()
    ]
    return np.concatenate([*parts, p[-1:]])
