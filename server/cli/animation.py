"""A grid of images as it fills, and an animation of it.

A picture is (height, width) of greys or (height, width, 3) of colours, uint8.
"""

import io
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from linpix.model.config import ModelConfig
from linpix.model.generate import tile

Picture = NDArray[np.uint8]
UNDRAWN = 48                     # grey of what is not drawn yet; black would pass for the background of a digit
MAX_FRAMES = 60
PLAYED_MS, SLOWEST_MS, HELD_MS = 2400, 120, 2000  # all frames but the last, one of them at most, and the last
WIDEST = 560                     # up to where an animation is enlarged, in pixels
LARGEST_SIDE, LARGEST_FRAME = 16_383, 2**22  # pixels; WebP's limit, and what makes 60 frames some hundred MB


# --- the grid ---

def grid(images: NDArray[np.uint8], config: ModelConfig, *, rows: NDArray[np.int64] | None = None,
         known: NDArray[np.bool_] | None = None, columns: int = 0) -> Picture:
    """Images (count, T) side by side. rows: (count,) finished image rows; what follows, but for known (T,), is grey.

    columns: 0 for as many as columns_for says.
    """
    if rows is not None:
        drawn = np.arange(config.subpixels) < rows[:, None] * (config.width * config.channels)
        images = np.where(drawn if known is None else drawn | known, images, np.uint8(UNDRAWN))
    return tile(images, config, columns or columns_for(len(images)))


def columns_for(count: int) -> int:
    """Of a grid: up to 10, and of more than 6 those that leave the fewest places empty."""
    return min(range(min(6, count), min(10, count) + 1), key=lambda columns: (-count % columns, -columns))


class Film:
    """How many rows of each image are finished, and at which moments a frame is taken.

    The first is before anything is drawn, the last when everything is; between them at most frames - 2, evenly spread
    over what there is to draw. Whole image rows count, so the frames do not depend on how long quanta happened to be.
    """

    def __init__(self, count: int, begun: int, height: int, frames: int = MAX_FRAMES) -> None:
        """begun: image rows that every image begins with, out of height."""
        self.rows = np.full(count, begun, np.int64)
        self.moments = [self.rows.copy()]  # (count,) each
        self._drawn, self._total, self._intervals, self._last = 0, count * (height - begun), frames - 1, 0

    def advance(self, progress: Iterable[tuple[int, int]]) -> None:
        """progress: indices of images, and how many rows of them are finished by now."""
        for index, finished in progress:
            rows = max(finished, int(self.rows[index]))  # of an image that is drawn again, fewer are finished
            self._drawn += rows - int(self.rows[index])
            self.rows[index] = rows
        interval = self._drawn * self._intervals // max(1, self._total)
        if interval > self._last:
            self._last = interval
            self.moments.append(self.rows.copy())


# --- the animation ---

def sheet_size(count: int, config: ModelConfig) -> tuple[int, int]:
    """Width and height of the grid of so many images."""
    columns = columns_for(count)
    return columns * (config.width + 1) + 1, -(-count // columns) * (config.height + 1) + 1


def enlargement(count: int, config: ModelConfig, factor: int | None) -> int:
    """The factor by which a grid is enlarged: as asked for, else what makes it as wide as WIDEST allows.

    Raises ValueError where an animation of that size could not be written.
    """
    width, height = sheet_size(count, config)
    factor = factor or max(1, min(WIDEST // width, LARGEST_SIDE // height))
    if max(width, height) * factor > LARGEST_SIDE or width * height * factor**2 > LARGEST_FRAME:
        raise ValueError(f"--count {count}: a frame of the animation would have {width * factor} x {height * factor} "
                         f"pixels, and may have up to {LARGEST_FRAME}, {LARGEST_SIDE} a side; animate fewer images"
                         + (", or give a smaller --scale" if factor > 1 else ""))
    return factor


def readable(count: int, config: ModelConfig) -> int:
    """The factor that makes a grid of so many images as wide as WIDEST allows, on a screen."""
    return max(1, WIDEST // sheet_size(count, config)[0])


def durations(frames: int) -> list[int]:
    """Milliseconds of each frame, in steps of 10, which is what GIF can say."""
    moving = max(1, frames - 1)
    return [min(SLOWEST_MS, PLAYED_MS // moving // 10 * 10)] * (frames - 1) + [HELD_MS]


def animate(frames: Sequence[Picture], kind: Literal["GIF", "WEBP"], factor: int) -> bytes:
    """An animation that repeats, and rests on its last frame. Exact, but for a GIF of more than 256 colours."""
    pictures = [Image.fromarray(frame) for frame in frames]
    if kind == "GIF" and pictures[0].mode == "RGB":
        # one palette for all frames, of the first and the last, which have all that is ever shown: with one for each,
        # what was drawn would change colour; without dithering, since its dots flicker, and show when enlarged
        seen = Image.fromarray(np.concatenate([frames[0], frames[-1]]))
        palette = seen.quantize(256, Image.Quantize.MEDIANCUT, kmeans=2)
        pictures = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    pictures = [picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
                for picture in pictures]
    out = io.BytesIO()
    pictures[0].save(out, kind, save_all=True, append_images=pictures[1:], duration=durations(len(frames)), loop=0,
                     **({"lossless": True} if kind == "WEBP" else {"optimize": False}))
    return out.getvalue()
