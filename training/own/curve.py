"""curve.svg: bits/dim by the number of images that a run has seen, in training and on the pictures
held out.
"""

import csv
import io
from importlib.util import find_spec
from pathlib import Path

from ..files import put

MISSING = (
    "curve.svg needs matplotlib, which is not installed; run: pip install '.[train]' in the folder"
    " of LinPix"
)


def write_curve(folder: Path) -> bool:
    """Draw the log of a run as curve.svg beside it; returns whether matplotlib is there to do
    so.
    """
    if find_spec("matplotlib") is None:
        return False
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    with (folder / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    with matplotlib.rc_context(
        {
            "svg.hashsalt": "linpix",
            "svg.fonttype": "none",
            "axes.grid": True,
            "grid.alpha": 0.3,
            "legend.frameon": False,
        }
    ):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="images", ylabel="bits/dim")
        # values after the first tenth: the first ones are so high that all others would look alike
        late = []
        for column, label, style in (
            ("train", "in training", "-"),
            ("validation", "pictures held out", "o-"),
        ):
            points = [(int(row["images"]), float(row[column])) for row in rows if row[column]]
            if points:
                axes.plot(*zip(*points, strict=True), style, markersize=4, label=label)
                late += [bits for images, bits in points if images >= points[-1][0] / 10]
        if late:
            margin = 0.05 * (max(late) - min(late)) + 0.01
            axes.set_ylim(min(late) - margin, max(late) + margin)
            axes.legend()
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    put(folder / "curve.svg", drawn.getvalue())
    return True
