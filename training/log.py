"""The log of a run as log.csv and for TensorBoard; and its curve, curve.svg: bits/dim by the number
of images that the run has seen, in training and on the pictures held out.
"""

import csv
import io
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path
from typing import Any

from .files import put, writing
from .plots import can_plot, svg
from .run import Run

CURVES = {"train": ("in training", "-"), "validation": ("pictures held out", "o-")}


class Log:
    """log.csv, with a line per hundred steps, at least one a minute, and one per evaluation; also
    for TensorBoard.
    """

    FIELDS = ("step", "images", "minutes", "train", "norm", "learning_rate", "validation")

    def __init__(self, folder: Path, step: int, images: int) -> None:
        self._path, self._board = folder / "log.csv", None
        # steps after the save are taken again
        self._rows = [row for row in _rows_of(self._path) if int(row["step"]) <= step and step]
        self._put()
        with suppress(ImportError), writing(folder / "tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(folder / "tensorboard", purge_step=images + 1)

    def write(self, run: Run, **values: float) -> None:
        numbers = {name: f"{value:.6g}" for name, value in values.items()}
        row = {"step": run.step, "images": run.images, "minutes": f"{run.minutes:.2f}"}
        self._rows.append(row | numbers)
        self._put()
        if self._board is not None:
            with writing(self._path.with_name("tensorboard")):
                for name, value in values.items():
                    self._board.add_scalar(name, value, run.images)

    def _put(self) -> None:
        """Write the whole log anew: if the disk is full, it does not end in half a line."""
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, self.FIELDS)
        table.writeheader()
        table.writerows(self._rows)
        put(self._path, text.getvalue().encode())

    def close(self) -> None:
        if self._board is not None:
            with suppress(OSError):  # log.csv has it all
                self._board.close()


def history(folder: Path) -> list[dict[str, float]]:
    """The lines of the log in a folder, as numbers: those of FIELDS that each line has."""
    lines = []
    for row in _rows_of(folder / "log.csv"):
        lines.append({name: float(text) for name, text in row.items() if text})
    return lines


def _rows_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a log that are whole, if there is one."""
    if not path.exists():
        return []
    lines = csv.DictReader(path.read_text(errors="replace").splitlines())
    return [row for row in lines if _is_whole(row)]


def _is_whole(row: dict[str, Any]) -> bool:
    if tuple(row) != Log.FIELDS or None in row.values():
        return False
    try:
        [float(text or 0) for text in row.values()]
        int(row["step"]), int(row["images"])
    except ValueError:
        return False
    return True


def write_curve(folder: Path) -> None:
    """Draw the log of a run as curve.svg beside it, if matplotlib is there to do so."""
    if can_plot():
        rows = _rows_of(folder / "log.csv")
        put(folder / "curve.svg", svg(lambda figure: _draw(figure, rows)))


def _draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    figure.set_size_inches(7, 4)
    axes = figure.add_subplot(xlabel="images", ylabel="bits/dim")
    # values after the first tenth: the first ones are so high that all others would look alike
    late: list[float] = []
    for column, (label, style) in CURVES.items():
        there = [row for row in rows if row[column]]
        if there:
            images = [int(row["images"]) for row in there]
            bits = [float(row[column]) for row in there]
            axes.plot(images, bits, style, markersize=4, label=label)
            late += bits[bisect_left(images, images[-1] / 10) :]
    if late:
        margin = 0.05 * (max(late) - min(late)) + 0.01
        axes.set_ylim(min(late) - margin, max(late) + margin)
        axes.legend()
