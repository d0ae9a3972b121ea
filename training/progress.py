"""Progress of a training run: one line that is updated on a terminal, or a line a minute
elsewhere.
"""

import math
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from linpix.model.config import ModelConfig
from linpix.model.palette import pictures_of

from .evaluate import Evaluation
from .plots import can_plot
from .readers import Pixels
from .run import Run

# seconds between lines in a pipe, and between updates of the line on a terminal
EVERY_S, LIVE_S = 60.0, 0.5
BUSY = 0.25  # share of the time for which a run may wait for a processor without a word about it
FEW = 200  # a mean over fewer pictures says little
MISSING = (
    "curve.svg needs matplotlib, which is not installed; run: pip install '.[train]' in the folder"
    " of LinPix"
)


class Progress:
    """Reports one sitting of a run on standard error."""

    def __init__(self, run: Run, max_images: float, max_minutes: float) -> None:
        """max_images, max_minutes: limits of this sitting, as in train."""
        self._run, self._live = run, sys.stderr.isatty()
        self._images, self._minutes = run.images, run.minutes
        self._max_images = min(run.config.images or math.inf, run.images + max_images)
        self._max_minutes = min(run.config.minutes or math.inf, run.minutes + max_minutes)
        self._began, self._held_up = time.monotonic(), _held_up_s()
        self._bar = tqdm(bar_format="{desc}", disable=not self._live, leave=True)
        self._reported_at, self._bits = time.monotonic(), math.nan
        first = ": the first step compiles it, which takes up to a minute" * run.config.compile
        self._say(f"training begins{first}", live=True)

    def close(self) -> None:
        self._bar.close()

    def step(self, losses: list[Tensor]) -> None:
        """Report after a step, unless the last report is too recent. losses: bits/dim of the last
        steps.
        """
        now = time.monotonic()
        if now - self._reported_at < (LIVE_S if self._live else EVERY_S):
            return
        self._reported_at = now
        if losses:
            self._bits = float(torch.stack(losses[-100:]).mean())
        self._say(self.line(), live=True)

    def line(self) -> str:
        """The line: images, bits/dim, images/s, and minutes left."""
        run, minutes = self._run, self._run.minutes - self._minutes
        rate = (run.images - self._images) / (60 * minutes) if minutes else 0.0
        left = self._max_minutes - run.minutes
        if rate:
            left = min(left, (self._max_images - run.images) / rate / 60)
        rest = "" if math.isinf(left) else f", {max(0.0, left):.1f} minutes left"
        return (
            f"{run.images:,} images, {self._bits:.3f} bits/dim in training, {rate:.1f}"
            f" images/s{rest}"
        )

    def evaluated(
        self,
        found: Evaluation | None,
        samples: Path | None,
        images: Pixels | None,
        kept: float | None = None,
    ) -> None:
        """Report an evaluation. found: on held-out pictures, if there are any · samples: path of
        the grid · images: (n, T), the images in it · kept: bits/dim of earlier weights, if these
        are better and remain the checkpoint."""
        text = f"{self._run.images:,} images"
        if found is not None:
            text += (
                f", {found.bits_per_dim:.3f} +- {found.interval:.3f} bits/dim on {found.images:,}"
                " pictures held out"
            )
            if found.images < FEW:
                text += ": too few pictures for a reliable value, look at the samples"
        if kept is not None:
            text += f"; the checkpoint keeps earlier weights, which have {kept:.3f}"
        if samples is not None:
            text += f"; samples: {samples}"
        self._say(text)
        if (
            images is not None
            and self._live
            and os.environ.get("TERM", "dumb") != "dumb"
            and not os.environ.get("NO_COLOR")
        ):
            for line in drawn(images, self._run.model, shutil.get_terminal_size().columns):
                self._say(line)

    def ended(self, pictures: int) -> None:
        """Report how often the schedule has come to each of so many pictures, and how to draw a
        curve.
        """
        run, spent_s = self._run, time.monotonic() - self._began
        waited = (_held_up_s() - self._held_up) / max(1e-9, spent_s)
        if run.config.minutes:
            text = f"this run saw each picture {run.images / max(1, pictures):.1f} times"
            if waited > BUSY:
                text += (
                    f"; other programs held it up for {waited:.0%} of the time, so --minutes"
                    f" {math.ceil(run.config.minutes / (1 - min(waited, 0.95)))} would train it as"
                    f" long as an idle machine in {run.config.minutes:g}"
                )
            self._say(text)
        if not can_plot():
            self._say(MISSING)

    def _say(self, text: str, *, live: bool = False) -> None:
        """live: a terminal shows the text until the next one replaces it."""
        if live and self._live:
            self._bar.set_description_str(text)
        elif self._live:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)


def _held_up_s() -> float:
    """Seconds for which the main thread was ready to run, but another program had its processor; 0
    if not known.
    """
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without such counts
        return 0.0


def drawn(images: Pixels, config: ModelConfig, columns: int) -> list[str]:
    """Lines of half blocks in 24-bit colour that show the first images (n, T), as many as fit into
    these columns.
    """
    fitting = max(1, columns // (config.width + 1))
    pictures = pictures_of(images[:fitting], config)[..., :3]
    padded = np.pad(pictures, ((0, 0), (0, config.height % 2), (0, 1), (0, 0)))
    row = np.concatenate([*padded], axis=1)
    colours = np.broadcast_to(row, (*row.shape[:2], 3))
    lines = []
    for upper, lower in zip(colours[::2], colours[1::2], strict=True):
        blocks = np.concatenate([upper, lower], axis=1).tolist()
        line = ["\x1b[38;2;{};{};{};48;2;{};{};{}m\u2580".format(*block) for block in blocks]
        lines.append("".join(line) + "\x1b[0m")
    return lines
