"""Plots as SVG files. They need matplotlib, which is an extra."""

import io
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


def svg(draw: Callable[[Any], None]) -> bytes:
    """An SVG file of what draw adds to the matplotlib figure that it is called with."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    with matplotlib.rc_context(
        {
            "svg.hashsalt": "linpix",
            "svg.fonttype": "none",
            "axes.grid": True,
            "grid.alpha": 0.3,
            "legend.frameon": False,
        }
    ):
        figure = Figure(layout="constrained")
        draw(figure)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()
