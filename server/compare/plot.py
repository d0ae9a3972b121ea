"""report.svg: what a step costs over the image, and images/s by batch, as one picture without a chart library."""

import itertools
import math
from collections.abc import Callable
from xml.sax.saxutils import escape

from .paper import ENGINES, Report, Result, dataset_of, duration, machine_of, order_of, title_of

_HEIGHT, _TOP, _BOTTOM = 430, 92, 352    # pixels; the plots stand between top and bottom
_LEFT, _WIDE = 70, 380                   # of the step plot
_BAR, _GAP = 44, 22                      # a bar with its share of space, and the space between groups
_PALETTE = ("#d9622b", "#1a9e77", "#b07cc6", "#b8960c", "#2a8fd8", "#8c564b", "#d6619e")  # in the paper's order
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2430 }
.title { font-size: 14px; font-weight: 600 } .small { font-size: 11px } .faint { fill: #5b6475 }
.page { fill: #ffffff } .grid { stroke: #dfe3ea } .axis { stroke: #5b6475 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e8ee } .faint { fill: #a3adbd } .page { fill: #14171d } .grid { stroke: #323844 }
  .axis { stroke: #a3adbd }
}
"""


def svg(report: Report) -> str:
    """Step cost over positions at the largest batch, and images per second by batch beside the paper's."""
    results = [result for result in report["results"] if result["images_per_second"]]
    batches = sorted({result["batch"] for result in results})
    colours = dict(zip(order_of(report), itertools.cycle(_PALETTE), strict=False))
    series = [(backend, engine) for backend in colours
              for engine in sorted({result["engine"] for result in results if result["backend"] == backend})]
    left = _LEFT + _WIDE + 80
    groups = [(f"B = {batch}", [r for r in results if r["batch"] == batch]) for batch in batches]
    groups.append((f"paper, {dataset_of(report)[1]}", _paper_bars(report, {result["backend"] for result in results})))
    width = left + max(320, sum(len(bars) * _BAR + _GAP for _, bars in groups) + 3 * _GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" '
        f'height="{_HEIGHT}" role="img">',
        f"<title>{escape(title_of(report))}: time of a step, and images per second</title>",
        f"<style>{_STYLE}</style>", f'<rect class="page" width="{width}" height="{_HEIGHT}"/>',
        _text(16, 26, title_of(report), "title"),
        *_legend(series, colours, results),
        *(_step_plot(report, [r for r in results if r["batch"] == batches[-1]], colours) if batches else ()),
        *(_bar_plot(groups, colours, left, width - 10) if batches else ()),
        _text(16, _HEIGHT - 12, f"{machine_of(report)}; {ENGINES['eager']} is the engine if none is named",
              "small faint"), "</svg>"]
    return "\n".join(parts) + "\n"


def _mark(engine: str) -> str:
    """A rim for bars of other engines, which have the eager engine's colour; their lines are dashed."""
    return "" if engine == "eager" else ' class="axis" stroke-width="2"'


def _legend(series: list[tuple[str, str]], colours: dict[str, str], results: list[Result]) -> list[str]:
    parts, x = [], 16.0
    for backend, engine in series:
        name = backend if engine == "eager" else f"{backend}, {ENGINES[engine]}"
        parts += [f'<rect x="{x:g}" y="40" width="12" height="12" rx="2" '
                  f'fill="{colours[backend]}"{_mark(engine)}/>', _text(x + 18, 50, name)]
        x += 18 + 7 * len(name) + 22
    marks = {"estimated": "~ and pale: estimated from steps at some positions",
             "disturbed": "†: disturbed by other work"}
    legend = [words for fact, words in marks.items() if any(result.get(fact) for result in results)]
    return [*parts, _text(x, 50, "; ".join(legend), "faint")] if legend else parts


def _step_plot(report: Report, results: list[Result], colours: dict[str, str]) -> list[str]:
    last, right = max(1, report["tokens"] - 1), _LEFT + _WIDE
    y, low, high = _log_axis([point["seconds"] for result in results for point in result["step_seconds"]])
    parts = [_text(_LEFT, 78, f"Time of a step of {results[0]['batch']} images, by position (log)", "title"),
             *_decades(y, low, high, _LEFT, right, lambda tick: duration(tick, lambda x: f"{x:g}"))]
    for quarter in range(5):
        x = _LEFT + _WIDE * quarter / 4
        parts += [f'<line class="axis" x1="{x:g}" y1="{_BOTTOM}" x2="{x:g}" y2="{_BOTTOM + 4}"/>',
                  _text(x, _BOTTOM + 18, str(round(last * quarter / 4)), "small", "middle")]
    parts.append(_text(_LEFT + _WIDE / 2, _BOTTOM + 36, "position of the token", "small faint", "middle"))
    for result in results:
        colour = colours[result["backend"]]
        points = [(_LEFT + _WIDE * p["position"] / last, y(p["seconds"])) for p in result["step_seconds"]]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        dash = "" if result["engine"] == "eager" else ' stroke-dasharray="6 3"'
        parts += [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>',
                  *(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points)]
    return parts


def _paper_bars(report: Report, backends: set[str]) -> list[Result]:
    return [{"backend": name, "engine": "eager", "estimated": False, "images_per_second": figures["images_per_second"]}
            for name, figures in report["paper"][dataset_of(report)[0]].items() if name in backends]


def _bar_plot(groups: list[tuple[str, list[Result]]], colours: dict[str, str], left: float, right: float) -> list[str]:
    """Groups of bars, each with the label below it; the last group is the paper's."""
    order = list(colours)
    y, low, high = _log_axis([bar["images_per_second"] for _, bars in groups for bar in bars])
    parts = [_text(left, 78, "Images per second, by batch (log)", "title"),
             *_decades(y, low, high, left, right, lambda tick: f"{tick:g}")]
    x = left + _GAP
    for label, bars in groups:
        if bars is groups[-1][1]:
            parts.append(f'<line class="axis" x1="{x:g}" y1="{_TOP}" x2="{x:g}" y2="{_BOTTOM + 40}" '
                         'stroke-dasharray="3 3"/>')
            x += _GAP
            parts.append(_text(x, _BOTTOM + 36, "P40-class GPU", "small faint"))
        parts.append(_text(x + len(bars) * _BAR / 2, _BOTTOM + 18, label, "small", "middle"))
        for bar in sorted(bars, key=lambda bar: (order.index(bar["backend"]), bar["engine"])):
            top = y(bar["images_per_second"])
            pale = ' fill-opacity="0.55"' if bar["estimated"] else ""
            parts += [f'<rect x="{x + 4:g}" y="{top:.1f}" width="{_BAR - 8}" height="{_BOTTOM - top:.1f}" '
                      f'fill="{colours[bar["backend"]]}"{pale}{_mark(bar["engine"])}/>',
                      _text(x + _BAR / 2, top - 5, _short(bar), "small", "middle")]
            x += _BAR
        x += _GAP
    parts.append(_text(left + _GAP, _BOTTOM + 36, "this machine", "small faint"))
    return parts


def _short(bar: Result) -> str:
    """Few enough characters to stand above a bar."""
    x = bar["images_per_second"]
    text = f"{x:.0f}" if x >= 10 else f"{x:.1f}" if x >= 1 else f"{float(f'{x:.2g}'):f}".rstrip("0")
    return ("~" if bar["estimated"] else "") + text + ("†" if bar.get("disturbed") else "")


def _log_axis(values: list[float]) -> tuple[Callable[[float], float], int, int]:
    """A function from a value to its y in pixels, and the exponents of the lowest and highest decade."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 0.1)
    high = max(high, low + 1)
    return lambda value: _BOTTOM - (_BOTTOM - _TOP) * (math.log10(value) - low) / (high - low), low, high


def _decades(y: Callable[[float], float], low: int, high: int, left: float, right: float,
             name: Callable[[float], str]) -> list[str]:
    parts = []
    for exponent in range(low, high + 1):
        at, kind = y(10.0**exponent), "axis" if exponent == low else "grid"
        parts += [f'<line class="{kind}" x1="{left:g}" y1="{at:.1f}" x2="{right:g}" y2="{at:.1f}"/>',
                  _text(left - 8, at + 4, name(10.0**exponent), "small", "end")]
    return parts


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
