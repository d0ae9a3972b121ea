"""A grid of images while they are drawn, and an animation of it.

A picture is (height, width) of greys, (height, width, 3) of colours, or (height, width, 4) with
alpha, uint8.
"""

import io
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from linpix.model.config import ModelConfig
from linpix.model.generate import tile

Picture = NDArray[np.uint8]
UNDRAWN = 48  # grey of what is not drawn yet; black would pass for the background of a digit
MAX_FRAMES = 60
# all frames but the last; longest of these; the last
PLAYED_MS, SLOWEST_MS, HELD_MS = 2400, 120, 2000
# pixels: an animation is enlarged up to this width, and one of a single image to this height
WIDEST = 560
# pixels; WebP's limit, and 60 such frames have some hundred MB
LARGEST_SIDE, LARGEST_FRAME = 16_383, 2**22


# --- the grid ---


def grid(
    images: NDArray[np.uint8],
    config: ModelConfig,
    *,
    rows: NDArray[np.int64] | None = None,
    known: NDArray[np.bool_] | None = None,
    columns: int = 0,
) -> Picture:
    """Images (count, T) side by side.

    rows: (count,) finished image rows; unless known (T,), pixels after them are grey, or with a
          palette ground · columns: 0:
          see columns_for.
    """
    if rows is not None:
        drawn = np.arange(config.subpixels) < rows[:, None] * (config.width * config.channels)
        if known is not None:
            drawn |= known
        undrawn = 0 if config.palette else UNDRAWN
        images = np.where(drawn, images, np.uint8(undrawn))
    return tile(images, config, columns or columns_for(len(images)))


def columns_for(count: int) -> int:
    """Columns of a grid: all images, if at most 6; else 6 to 10, whichever leaves the fewest places
    empty.
    """
    return min(
        range(min(6, count), min(10, count) + 1), key=lambda columns: (-count % columns, -columns)
    )


class Film:
    """How many rows of each image are finished, and at which moments a frame is taken.

    The first frame is taken before anything is drawn, the last when everything is; between them are
    at most frames - 2, evenly spread over the rows to draw. Only whole image rows count, so frames
    do not depend on the length of quanta.
    """

    def __init__(self, count: int, begun: int, height: int, frames: int = MAX_FRAMES) -> None:
        """begun: image rows, out of height, that are finished from the start in every image."""
        self.rows = np.full(count, begun, np.int64)
        self.moments = [self.rows.copy()]  # (count,) each
        self._total, self._intervals, self._last = max(1, count * (height - begun)), frames - 1, 0

    def advance(self, progress: Iterable[tuple[int, int]]) -> None:
        """progress: pairs of an image's index and the number of its rows that are finished by
        now.
        """
        for index, finished in progress:
            # an image that is drawn again has fewer finished rows
            self.rows[index] = max(finished, self.rows[index])
        interval = int((self.rows - self.moments[0]).sum()) * self._intervals // self._total
        if interval > self._last:
            self._last = interval
            self.moments.append(self.rows.copy())


# --- the animation ---


def sheet_size(count: int, config: ModelConfig) -> tuple[int, int]:
    """Width and height, in pixels, of the grid of `count` images."""
    columns = columns_for(count)
    return columns * (config.width + 1) + 1, -(-count // columns) * (config.height + 1) + 1


def enlargement(count: int, config: ModelConfig, factor: int | None) -> int:
    """The factor by which a grid is enlarged: the given one, else the largest within WIDEST, for a
    single image in its height too.

    Raises ValueError if an animation of that size cannot be written.
    """
    width, height = sheet_size(count, config)
    highest = WIDEST if count == 1 else LARGEST_SIDE
    factor = factor or max(1, min(WIDEST // width, highest // height))
    if max(width, height) * factor > LARGEST_SIDE or width * height * factor**2 > LARGEST_FRAME:
        further = ", or give a smaller --scale" if factor > 1 else ""
        raise ValueError(
            f"--count {count}: a frame of the animation would have {width * factor} x"
            f" {height * factor} pixels; at most {LARGEST_FRAME} are allowed, {LARGEST_SIDE} a"
            f" side; draw fewer images{further}"
        )
    return factor


def durations(frames: int) -> list[int]:
    """Milliseconds of each frame, in GIF's steps of 10."""
    moving = max(1, frames - 1)
    return [min(SLOWEST_MS, PLAYED_MS // moving // 10 * 10)] * (frames - 1) + [HELD_MS]


def drawing(
    image: NDArray[np.uint8], config: ModelConfig, known: NDArray[np.bool_] | None, begun: int
) -> bytes:
    """A GIF of one image (T,) while it is drawn, row after row, as `linpix sample` writes it. known
    and begun: as of `grid` and Film.
    """
    film = Film(1, begun, config.height)
    for rows in range(begun + 1, config.height + 1):
        film.advance([(0, rows)])
    frames = [grid(image[None], config, rows=rows, known=known) for rows in film.moments]
    return animate(frames, "GIF", enlargement(1, config, None))


def max_bytes(config: ModelConfig) -> int:
    """Bytes that no `drawing` exceeds. GIF has at most 12 bits for a pixel. After the first, frames
    have only the rows that changed, each of which is in one frame.
    """
    width, height = sheet_size(1, config)
    frames = min(MAX_FRAMES, config.height + 1)
    pixels = width * height * enlargement(1, config, None) ** 2
    return 1024 * frames + 2 * pixels * 2


def animate(frames: Sequence[Picture], kind: Literal["GIF", "WEBP"], factor: int) -> bytes:
    """An animation that repeats, and pauses on its last frame. Exact, except a GIF of more than 256
    colours. What was drawn in a frame is not transparent in a later one.
    """
    pictures = [Image.fromarray(frame) for frame in frames]
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {"optimize": False}
    if kind == "GIF" and pictures[0].mode == "RGBA":
        pictures, transparent = indexed(frames)
        if transparent is not None:
            options["transparency"] = transparent
    if kind == "GIF" and pictures[0].mode == "RGB":
        # One palette for all frames, from the first and the last, which have all colours that are
        # shown: with one per frame, finished pixels would change colour. No dithering: its dots
        # flicker, and are visible when enlarged.
        seen = Image.fromarray(np.concatenate([frames[0], frames[-1]]))
        palette = seen.quantize(256, Image.Quantize.MEDIANCUT, kmeans=2)
        pictures = [
            picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures
        ]
    pictures = [
        picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
        for picture in pictures
    ]
    out = io.BytesIO()
    pictures[0].save(
        out,
        kind,
        save_all=True,
        append_images=pictures[1:],
        duration=durations(len(frames)),
        loop=0,
        **options,
    )
    return out.getvalue()


def indexed(frames: Sequence[Picture]) -> tuple[list[Image.Image], int | None]:
    """Pictures of four channels by numbers of their colours, exact if these are at most 256, and
    the number of the transparent colour; None if all are opaque.
    """
    numbers = [np.ascontiguousarray(frame).view(np.uint32)[..., 0] for frame in frames]
    seen = np.unique(np.stack([numbers[0], numbers[-1]]))[:256]
    colours = seen[:, None].view(np.uint8)
    pictures = [
        Image.fromarray(np.searchsorted(seen, each).clip(0, 255).astype(np.uint8), "P")
        for each in numbers
    ]
    for picture in pictures:
        picture.putpalette(colours[:, :3].tobytes())
    transparent = int(colours[:, 3].argmin())
    return pictures, None if colours[transparent, 3] else transparent
