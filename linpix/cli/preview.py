"""Progress on a terminal: a preview in half blocks of colour, or a bar.

A picture is (height, width) of greys or (height, width, 3 or 4) of colours, uint8.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from itertools import groupby, product, zip_longest
from typing import Literal, TextIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from linpix.model.config import ModelConfig
from linpix.server.engine.image import Image as Drawn
from linpix.server.engine.image import Report
from linpix.server.engine.job import Job
from linpix.server.pictures.animation import Film, Picture, grid

REDRAWN_S = 0.1  # least time between pictures on a terminal
TRUE_COLOURS = 2**24
HALF_BLOCK = "\N{UPPER HALF BLOCK}"

# The palette of terminals with 256 colours: a cube of 6 x 6 x 6 from number 16 on, then 24 greys.
_LEVELS = (0, 95, 135, 175, 215, 255)
_PALETTE = np.array(
    [*product(_LEVELS, repeat=3), *((grey, grey, grey) for grey in range(8, 239, 10))], np.int64
)


# --- the terminal ---


def half_blocks(picture: Picture, colours: int) -> list[str]:
    """Lines of a terminal, each showing two rows of pixels. colours: TRUE_COLOURS, or 256 to take
    the nearest.
    """
    pixels = picture.reshape(*picture.shape[:2], -1)[..., :3]
    pixels = np.broadcast_to(pixels, (*picture.shape[:2], 3))
    codes: list[list[str]] = []  # of each pixel, as terminals name its colour
    if colours == TRUE_COLOURS:
        for row in pixels.tolist():
            codes.append([f"2;{red};{green};{blue}" for red, green, blue in row])
    else:
        distances = ((pixels[..., None, :].astype(np.int64) - _PALETTE) ** 2).sum(-1)
        for row in distances.argmin(-1).tolist():
            codes.append([f"5;{16 + number}" for number in row])
    lines = []
    for uppers, lowers in zip_longest(codes[::2], codes[1::2]):
        below = ["49"] * len(uppers)  # the terminal's own background
        if lowers is not None:
            below = [f"48;{code}" for code in lowers]
        paints = [f"\x1b[38;{upper};{lower}m" for upper, lower in zip(uppers, below, strict=True)]
        runs = [paint + HALF_BLOCK * len([*run]) for paint, run in groupby(paints)]
        lines.append("".join(runs) + "\x1b[0m")
    return lines


def colours_of(
    stream: TextIO, wanted: Literal["auto", "always", "never"], environment: Mapping[str, str]
) -> int:
    """How many colours to show on a stream: TRUE_COLOURS, 256, or 0 for no preview there."""
    try:
        HALF_BLOCK.encode(stream.encoding)
    except UnicodeEncodeError:
        if wanted == "always":
            raise ValueError(
                f"--preview always: the encoding {stream.encoding} of standard error has no "
                f"{HALF_BLOCK!a}; set PYTHONIOENCODING=utf-8"
            ) from None
        return 0
    can = (
        stream.isatty()
        and environment.get("TERM", "dumb") != "dumb"
        and not environment.get("NO_COLOR")
    )
    if wanted == "never" or (wanted == "auto" and not can):
        return 0
    return TRUE_COLOURS if environment.get("COLORTERM", "") in ("truecolor", "24bit") else 256


def terminal_size(stream: TextIO) -> os.terminal_size:
    """Columns and lines of a stream's terminal; if it does not say, of COLUMNS and LINES, else 80
    and 24.
    """
    with contextlib.suppress(OSError, ValueError):
        size = os.get_terminal_size(stream.fileno())
        if min(size) > 0:
            return size
    return shutil.get_terminal_size()


class Progress:
    """The progress of images while they are drawn: a bar on a terminal, a preview above it where it
    is wanted, and the film.

    The preview has the first images, as many as fit, and is redrawn in place. A context manager;
    inside it, call done for each finished image, then advanced for each quantum.
    """

    def __init__(
        self, job: Job, config: ModelConfig, stream: TextIO, *, colours: int, frames: int
    ) -> None:
        """colours: as colours_of says · frames: of the film, at most."""
        self._config, self._known, self._stream, self._colours = config, job.known, stream, colours
        self.film = Film(
            job.count, job.prefix * config.height // config.subpixels, config.height, frames
        )
        size = terminal_size(stream)
        width, height = max(1, size.columns - 1), max(2, 2 * (size.lines - 2))  # in pixels
        self._columns = max(1, min(job.count, (width - 1) // (config.width + 1)))
        down = max(1, min(-(-job.count // self._columns), (height - 1) // (config.height + 1)))
        self._reduction = max(
            1,
            -(-(self._columns * (config.width + 1) + 1) // width),
            -(-(down * (config.height + 1) + 1) // height),
        )
        previewed = min(job.count, self._columns * down) if colours else 0
        self._canvas = np.zeros((previewed, config.subpixels), np.uint8)
        if job.canvas is not None:
            self._canvas[:] = job.canvas
        self._live = stream.isatty()
        # lines: of the preview, once it was drawn
        self._finished, self._drawn_at, self._lines = 0, 0.0, 0
        self._bar = tqdm(
            total=job.count * config.height,
            file=stream,
            disable=not self._live,
            desc=f"0/{job.count} images",
            bar_format="{l_bar}{bar}| [{elapsed}<{remaining}]",
        )

    def __enter__(self) -> "Progress":
        if self._live:
            self._draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._draw()
        self._bar.close()

    def done(self, image: Drawn) -> None:
        self._finished += 1
        self._put(image, image.canvas)
        self._bar.set_description_str(
            f"{self._finished}/{len(self.film.rows)} images", refresh=False
        )

    def advanced(self, report: Report) -> None:
        # one row of each image at a time: several rows of background are drawn at once
        for step in range(max((len(rows) for _, rows, _ in report.rows), default=0)):
            self.film.advance((image.index, rows[: step + 1][-1]) for image, rows, _ in report.rows)
        for image, _, canvas in report.rows:
            self._put(image, canvas)
        if self._live and time.perf_counter() - self._drawn_at >= REDRAWN_S:
            self._draw()
        # less, if an image is drawn again
        self._bar.update(int(self.film.rows.sum()) - self._bar.n)

    def _put(self, image: Drawn, canvas: NDArray[np.uint8] | None) -> None:
        if canvas is not None and image.index < len(self._canvas):
            self._canvas[image.index] = canvas

    def _draw(self) -> None:
        """Draw the preview over the last one; the line below it is for the bar."""
        if not self._colours:
            return
        sheet = grid(
            self._canvas,
            self._config,
            rows=self.film.rows[: len(self._canvas)],
            known=self._known,
            columns=self._columns,
        )
        if self._reduction > 1:
            sheet = np.asarray(Image.fromarray(sheet).reduce(self._reduction))
        lines = half_blocks(sheet, self._colours)
        up = f"\x1b[{self._lines}A\r" if self._lines else ""
        self._bar.clear()
        self._stream.write(up + "".join(line + "\n" for line in lines))
        self._stream.flush()
        self._bar.refresh()
        self._lines, self._drawn_at = len(lines), time.perf_counter()
