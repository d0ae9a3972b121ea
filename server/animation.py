"""Images coming into being, to look at: the grid as it fills, an animation of it, a preview on a terminal, a bar.

A picture is (height, width) of greys or (height, width, 3) of colours, uint8.
"""

import io
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TextIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from model.config import ModelConfig
from model.generate import tile
from server.batcher import Turn
from server.engine import ImageSpec

Picture = NDArray[np.uint8]
UNDRAWN = 48                     # grey of what is not drawn yet; black would pass for the background of a digit
MOST_FRAMES = 60
PLAYED_MS, SLOWEST_MS, HELD_MS = 2400, 120, 2000  # all frames but the last, one of them at most, and the last
WIDEST = 560                     # up to where an animation is enlarged, in pixels
LARGEST_SIDE, LARGEST_FRAME = 16_383, 2**22  # pixels; WebP's limit, and what makes 60 frames some hundred MB
REDRAWN_S = 0.1                  # between pictures on a terminal
TRUE_COLOURS = 2**24
HALF_BLOCK = "\N{UPPER HALF BLOCK}"

# What terminals of 256 colours agree on: a cube of 6 x 6 x 6 from number 16 on, then 24 greys.
_LEVELS = (0, 95, 135, 175, 215, 255)
_PALETTE = np.array([(r, g, b) for r in _LEVELS for g in _LEVELS for b in _LEVELS]
                    + [(grey, grey, grey) for grey in range(8, 239, 10)], np.int64)


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

    def __init__(self, count: int, begun: int, height: int, frames: int = MOST_FRAMES) -> None:
        """begun: image rows that every image begins with, out of height."""
        self.rows = np.full(count, begun, np.int64)
        self.moments = [self.rows.copy()]  # (count,) each
        self._drawn, self._total, self._intervals, self._last = 0, count * (height - begun), frames - 1, 0

    def advance(self, progress: Iterable[tuple[int, int]]) -> None:
        """progress: indices of images, and how many rows of them are finished by now."""
        for index, rows in progress:
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


# --- the terminal ---

def half_blocks(picture: Picture, colours: int) -> list[str]:
    """Lines of a terminal, each showing two rows of pixels. colours: TRUE_COLOURS, or 256 to take the nearest."""
    pixels = np.broadcast_to(picture.reshape(*picture.shape[:2], -1), (*picture.shape[:2], 3))
    if colours == TRUE_COLOURS:
        codes = [[f"2;{r};{g};{b}" for r, g, b in row] for row in pixels.tolist()]
    else:
        distances = ((pixels[..., None, :].astype(np.int64) - _PALETTE) ** 2).sum(-1)
        codes = [[f"5;{16 + number}" for number in row] for row in distances.argmin(-1).tolist()]
    lines = []
    for top in range(0, len(codes), 2):
        line, before = "", ""
        for column, upper in enumerate(codes[top]):
            lower = f"48;{codes[top + 1][column]}" if top + 1 < len(codes) else "49"
            paint = f"\x1b[38;{upper};{lower}m"
            line += HALF_BLOCK if paint == before else paint + HALF_BLOCK
            before = paint
        lines.append(line + "\x1b[0m")
    return lines


def colours_of(stream: TextIO, wanted: Literal["auto", "always", "never"], environment: Mapping[str, str]) -> int:
    """How many colours to show on a stream: TRUE_COLOURS, 256, or 0 for no preview there."""
    try:
        HALF_BLOCK.encode(stream.encoding)
    except UnicodeEncodeError:
        if wanted == "always":
            raise ValueError(f"--preview always: the {stream.encoding} of standard error has no {HALF_BLOCK!a}; "
                             "set PYTHONIOENCODING=utf-8") from None
        return 0
    can = stream.isatty() and environment.get("TERM", "dumb") != "dumb" and not environment.get("NO_COLOR")
    if wanted == "never" or (wanted == "auto" and not can):
        return 0
    return TRUE_COLOURS if environment.get("COLORTERM", "") in ("truecolor", "24bit") else 256


def terminal_size(stream: TextIO) -> os.terminal_size:
    """Columns and lines of a stream's terminal; of COLUMNS and LINES, else 80 and 24, where it says nothing."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        size = os.terminal_size((0, 0))
    return size if min(size) > 0 else shutil.get_terminal_size()


class Preview:
    """The first images, as many as fit, drawn over themselves as they grow; below them is a line for the bar."""

    def __init__(self, stream: TextIO, count: int, config: ModelConfig, colours: int, size: os.terminal_size) -> None:
        self._stream, self._colours, self._lines = stream, colours, 0
        width, height = max(1, size.columns - 1), max(2, 2 * (size.lines - 2))  # in pixels
        self.columns = max(1, min(count, (width - 1) // (config.width + 1)))
        down = max(1, min(-(-count // self.columns), (height - 1) // (config.height + 1)))
        self.count = min(count, self.columns * down)
        self._reduction = max(1, -(-(self.columns * (config.width + 1) + 1) // width),
                              -(-(down * (config.height + 1) + 1) // height))

    def draw(self, sheet: Picture) -> None:
        """Always of the same shape."""
        if self._reduction > 1:
            sheet = np.asarray(Image.fromarray(sheet).reduce(self._reduction))
        lines = half_blocks(sheet, self._colours)
        up = f"\x1b[{self._lines}A\r" if self._lines else ""
        self._stream.write(up + "".join(line + "\n" for line in lines))
        self._stream.flush()
        self._lines = len(lines)


class Progress:
    """What is seen of images while they are drawn: a bar on a terminal, a preview where it is wanted, and the film.

    A context; inside it call done for each finished image, then turned for each turn.
    """

    def __init__(self, specs: Sequence[ImageSpec], config: ModelConfig, stream: TextIO, *, colours: int,
                 frames: int) -> None:
        """specs: alike but for seed and temperature · colours: as colours_of says · frames: of the film, at most."""
        first, self._config, self._known = specs[0], config, specs[0].known
        self._row = config.width * config.channels
        self.film = Film(len(specs), first.prefix // self._row, config.height, frames)
        self._preview = Preview(stream, len(specs), config, colours, terminal_size(stream)) if colours else None
        self._live = stream.isatty()
        self._canvas = np.zeros((self._preview.count if self._preview else 0, config.subpixels), np.uint8)
        if first.canvas is not None:
            self._canvas[:] = first.canvas
        self._finished, self._drawn_at = 0, 0.0
        self._bar = tqdm(total=len(specs) * (config.subpixels - first.prefix), file=stream, disable=not self._live,
                         desc=f"0/{len(specs)} images", bar_format="{l_bar}{bar}| [{elapsed}<{remaining}]")

    def __enter__(self) -> "Progress":
        if self._live:
            self._draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._draw()
        self._bar.close()

    def done(self, index: int, image: NDArray[np.uint8]) -> None:
        self._finished += 1
        if index < len(self._canvas):
            self._canvas[index] = image
        self._bar.set_description_str(f"{self._finished}/{len(self.film.rows)} images", refresh=False)

    def turned(self, turn: Turn, image: Callable[[int], NDArray[np.uint8]]) -> None:
        """image: gives the sub-pixels of a slot, (T,), as far as they are."""
        self.film.advance((row.index, row.position // self._row) for row in turn.moved)
        if self._preview and self._live and time.perf_counter() - self._drawn_at >= REDRAWN_S:
            for row in turn.moved:
                if row.index < len(self._canvas):
                    self._canvas[row.index] = image(row.slot)
            self._draw()
        self._bar.update(turn.subpixels)

    def _draw(self) -> None:
        if self._preview:
            self._bar.clear()
            self._preview.draw(grid(self._canvas, self._config, rows=self.film.rows[:len(self._canvas)],
                                    known=self._known, columns=self._preview.columns))
            self._bar.refresh()
            self._drawn_at = time.perf_counter()
