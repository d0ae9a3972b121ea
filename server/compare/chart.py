"""The files of a report. matplotlib draws report.svg: images per second by batch beside the
paper's, and the time of a step."""

import io
import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .report import (
    Report,
    Result,
    dataset_of,
    duration,
    machine_of,
    markdown,
    measured,
    results_of,
    rows_of,
    title_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MISSING = (
    "report.svg needs matplotlib, which is not installed; run: pip install '.[train]' in the folder"
    " of LinPix"
)
_COLOURS = {
    "softmax": "#d9622b",
    "stateful-softmax": "#2a8fd8",
    "lsh-1": "#b07cc6",
    "lsh-4": "#b8960c",
    "linear": "#1a9e77",
}  # as in training/experiments and server/static/race.js
_OTHER, _DIM = "#7a8394", "#5b6475"
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "linpix",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "text.color": "#1f2430",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#b8bfca",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e9ef",
    "xtick.color": _DIM,
    "ytick.color": _DIM,
    "ytick.labelcolor": "#1f2430",
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}

Row = tuple[str, str, str]  # name, backend and engine


def write(report: Report, folder: Path) -> list[str]:
    """Write report.json, report.md and, if matplotlib is installed, report.svg: renamed once they
    are complete.

    Returns what is missing, in words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"report.json": json.dumps(report, indent=2, allow_nan=False) + "\n"}
    missing: list[str] = []
    if find_spec("matplotlib") is None:
        missing = [MISSING]
        (folder / "report.svg").unlink(missing_ok=True)  # of another report
    else:
        texts["report.svg"] = svg(report)
    texts["report.md"] = markdown(report, *missing)
    for name, text in texts.items():
        new = folder / f".{name}.{os.getpid()}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(folder / name)
    return missing


def svg(report: Report) -> str:
    """Above, bars for each batch and for the paper, on one scale; below, lines for the largest
    batch.
    """
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    rows = [row for row in rows_of(report) if row[2]]
    dataset, title = dataset_of(report)
    columns = []
    for batch in sorted({result["batch"] for result in report["results"]}):
        results = [result for result in report["results"] if result["batch"] == batch]
        columns.append((f"images/s, B = {batch}", results))
    paper = [
        {"backend": backend, "engine": "eager", **figures}
        for backend, figures in report["paper"][dataset].items()
    ]
    with matplotlib.rc_context(_STYLE):
        chart = Figure(
            figsize=(max(8.5, 2 + 2.4 * (len(columns) + 1)), 4.4 + 0.28 * len(rows)),
            layout="constrained",
        )
        chart.suptitle(title_of(report), x=0.01, ha="left", fontsize=13, fontweight="bold")
        chart.supxlabel(
            f"{machine_of(report)}; the paper: {title} on a P40-class GPU\n"
            "~ and pale: estimated from steps at some positions; †: disturbed by other work",
            x=0.01,
            ha="left",
            fontsize=8,
            color=_DIM,
        )
        parts: Any = chart.subfigures(2, 1, height_ratios=(0.9 + 0.28 * len(rows), 2.7))
        plots = parts[0].subplots(1, len(columns) + 1, sharex=True, sharey=True, squeeze=False)[0]
        for axes, (name, results) in zip(
            plots, [*columns, (f"images/s, paper, {title}", paper)], strict=True
        ):
            _bars(axes, rows, results)
            axes.set_title(name)
        low, high = plots[0].get_xlim()
        # on the right there is room for figures
        plots[0].set_xlim(low / 2, high * (high / low) ** 0.3)
        _lines(parts[1].subplots(), rows, columns[-1][1], max(1, report["tokens"] - 1))
        text = io.StringIO()
        chart.savefig(text, format="svg", metadata={"Date": None, "Title": title_of(report)})
    return text.getvalue()


def _bars(axes: "Axes", rows: Sequence[Row], results: list[Result]) -> None:
    """A bar for each row that has a speed, the first row at the top."""
    for place, (_, backend, engine) in enumerate(rows):
        colour = _COLOURS.get(backend, _OTHER)
        for result in results_of(results, backend, engine):
            if speed := result["images_per_second"]:
                alpha = 0.55 if result.get("estimated") else 1.0
                axes.barh(place, speed, height=0.7, color=colour, alpha=alpha)
                axes.annotate(
                    measured(result, "images_per_second"),
                    (speed, place),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8.5,
                )
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(visible=False)  # each bar has its figure


def _lines(axes: "Axes", rows: Sequence[Row], results: list[Result], last: int) -> None:
    for name, backend, engine in rows:
        style = "-" if engine == "eager" else "--"
        for result in results_of(results, backend, engine):
            if points := result["step_seconds"]:
                axes.plot(
                    [point["position"] for point in points],
                    [point["seconds"] for point in points],
                    marker="o",
                    markersize=3.5,
                    linestyle=style,
                    color=_COLOURS.get(backend, _OTHER),
                    label=name,
                    clip_on=False,
                    zorder=3,
                )
    axes.set_title(f"time of a step at B = {results[0]['batch']}, by position of the token")
    axes.set_xlim(0, last)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda seconds, _: duration(seconds, lambda x: f"{x:g}"))
    if axes.lines:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
