"""Masks such as users make: which pixels of a picture to complete are known, for training and
measuring.

Kinds: halves cut at any line, hidden rectangles, everything outside a window hidden, strokes of a
brush, single pixels at any density, and the end of the picture in raster order. A mask covers whole
pixels: all channels of a pixel are known, or none.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from linpix.model.config import ModelConfig

SHARES = {  # by kind
    "half": 0.25,
    "hole": 0.25,
    "window": 0.07,
    "brush": 0.18,
    "scattered": 0.20,
    "rows": 0.05,
}

_Hidden = NDArray[np.bool_]  # (height, width)


def known_of(
    generator: np.random.Generator, config: ModelConfig, count: int, kind: str | None = None
) -> _Hidden:
    """Masks of one kind, or of all kinds by SHARES: (count, T) bool, true where a sub-pixel is
    known.
    """
    if kind is None:
        kinds = list(generator.choice([*SHARES], count, p=[*SHARES.values()]))
    else:
        kinds = [kind] * count
    known = np.stack([~_MAKERS[each](generator, config.height, config.width) for each in kinds])
    return known.reshape(count, -1).repeat(config.channels, 1)


def _half(generator: np.random.Generator, height: int, width: int) -> _Hidden:
    across, far = generator.random(2) < 0.5
    size = height if across else width
    line = size // 2
    if generator.random() >= 0.3:
        line = int(generator.integers(size // 6, size - size // 6 + 1))
    beyond = (np.arange(size) < line) == far
    return np.broadcast_to(beyond[:, None] if across else beyond, (height, width)).copy()


def _hole(generator: np.random.Generator, height: int, width: int) -> _Hidden:
    hidden = np.zeros((height, width), np.bool_)
    if generator.random() < 0.2:  # the centre
        hidden[height // 4 : height - height // 4, width // 4 : width - width // 4] = True
        return hidden
    y, x = (generator.integers(0, max(1, size * 5 // 7)) for size in (height, width))
    tall, wide = (
        generator.integers(max(1, size // 5), max(2, size * 2 // 3 + 1)) for size in (height, width)
    )
    hidden[y : y + tall, x : x + wide] = True
    return hidden


def _window(generator: np.random.Generator, height: int, width: int) -> _Hidden:
    return ~_hole(generator, height, width)


def _brush(generator: np.random.Generator, height: int, width: int) -> _Hidden:
    """Strokes that wander; the width is constant within a stroke."""
    hidden = np.zeros((height, width), np.bool_)
    for _ in range(generator.integers(1, 5)):
        half = generator.integers(1, 1 + max(1, width * 3 // 14)) / 2
        y, x, direction = generator.random(3) * (height, width, 2 * np.pi)
        for _ in range(generator.integers(width // 5, width * 3 // 2 + 1)):
            top, left = max(0, int(y - half)), max(0, int(x - half))
            hidden[top : int(y + half) + 1, left : int(x + half) + 1] = True
            direction += generator.normal() * 0.4
            y = np.clip(y + np.sin(direction), 0, height - 1)
            x = np.clip(x + np.cos(direction), 0, width - 1)
    return hidden


def _scattered(generator: np.random.Generator, height: int, width: int) -> _Hidden:
    share: float = max(generator.random(2))  # the more is hidden, the more is to learn
    return generator.random((height, width)) < share


def _rows(generator: np.random.Generator, height: int, width: int) -> _Hidden:
    hidden = np.zeros(height * width, np.bool_)
    hidden[generator.integers(min(width, height * width - 1), height * width) :] = True
    return hidden.reshape(height, width)


_MAKERS: dict[str, Callable[[np.random.Generator, int, int], _Hidden]] = {
    "half": _half,
    "hole": _hole,
    "window": _window,
    "brush": _brush,
    "scattered": _scattered,
    "rows": _rows,
}
