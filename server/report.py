"""What a comparison found, for people: a table for the terminal, report.md and report.svg beside report.json.

Nothing here measures, and nothing here needs torch.
"""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

Report = dict[str, Any]
Result = dict[str, Any]

# Tables 4 and 5 of "Transformers are RNNs" (2020). Its factors are left out: they follow from the figures.
PAPER: dict[str, Any] = {
    "source": "Katharopoulos et al., Transformers are RNNs, ICML 2020, tables 4 and 5",
    "device": "one P40-class GPU, in table 5 also on a CPU that is not named",
    "columns": {"bits_per_dim": "table 4", "images_per_second": "table 4; batch sizes differ between methods",
                "cpu_seconds": "table 5, one image alone", "gpu_seconds": "table 5, one image alone"},
    "mnist": {
        "softmax": {"bits_per_dim": 0.621, "images_per_second": 0.45,
                    "cpu_seconds": 72.6, "gpu_seconds": 10.2},
        "stateful-softmax": {"bits_per_dim": 0.621, "images_per_second": 7.56,
                             "cpu_seconds": 7.4, "gpu_seconds": 10.4},
        "lsh-1": {"bits_per_dim": 0.745, "images_per_second": 0.68,
                  "cpu_seconds": 46.0, "gpu_seconds": 19.2},
        "lsh-4": {"bits_per_dim": 0.676, "images_per_second": 0.27,
                  "cpu_seconds": 112.0, "gpu_seconds": 55.8},
        "linear": {"bits_per_dim": 0.644, "images_per_second": 142.8,
                   "cpu_seconds": 5.5, "gpu_seconds": 7.3},
    },
    "cifar10": {
        "softmax": {"bits_per_dim": 3.47, "images_per_second": 0.004,
                    "cpu_seconds": 8651.4, "gpu_seconds": 300.1},
        "stateful-softmax": {"bits_per_dim": 3.47, "images_per_second": 0.32,
                             "cpu_seconds": 71.9, "gpu_seconds": 70.4},
        "lsh-1": {"bits_per_dim": 3.39, "images_per_second": 0.015,
                  "cpu_seconds": 2318.9, "gpu_seconds": 221.6},
        "lsh-4": {"bits_per_dim": 3.51, "images_per_second": 0.005,
                  "cpu_seconds": 5263.7, "gpu_seconds": 683.9},
        "linear": {"bits_per_dim": 3.40, "images_per_second": 17.85,
                   "cpu_seconds": 45.1, "gpu_seconds": 61.3},
    },
}
DATASETS = {784: ("mnist", "MNIST"), 3072: ("cifar10", "CIFAR-10")}  # by sub-pixels, else MNIST
ORDER = ("softmax", "stateful-softmax", "lsh-1", "lsh-4", "linear")  # of the paper's rows


def write(report: Report, folder: Path) -> None:
    """Write report.json, report.md and report.svg, each under a temporary name and then renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"report.json": json.dumps(report, indent=2, allow_nan=False) + "\n",
             "report.md": markdown(report), "report.svg": svg(report)}
    for name, text in texts.items():
        new = folder / f".{name}.{os.getpid()}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(folder / name)


def table(report: Report) -> str:
    """For a terminal: one line a backend and batch."""
    rows = [("backend", "engine", "batch", "images/s", "s/image", "state/image", "last/first tenth",
             "bits/dim")]
    for result in report["results"]:
        mark = "~" if result["estimated"] else ""
        rows.append((result["backend"], result["engine"], str(result["batch"]),
                     _figure(result["images_per_second"], mark), _figure(result["seconds_per_image"], mark),
                     _size(result["state_bytes"]), _ratio(result["tail_over_head"]),
                     _figure(result["bits_per_dim"])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) if index < 2 else cell.rjust(width)
                       for index, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows]
    marks = "~ estimated from the steps at some positions; s/image: until the batch is done"
    return "\n".join([*lines, "", marks, *_remarks(report)])


def markdown(report: Report) -> str:
    """The paper's tables beside ours."""
    dataset, title = _dataset(report)
    paper, results = report["paper"][dataset], report["results"]
    engines = sorted({result["engine"] for result in results})
    rows = [(backend, engine) for backend in ORDER for engine in engines
            if backend in paper or _of(results, backend, engine)]
    batches = sorted({result["batch"] for result in results})

    def at(backend: str, engine: str, batch: int) -> Result:
        return next((r for r in _of(results, backend, engine) if r["batch"] == batch), {})

    def name(backend: str, engine: str) -> str:
        return f"{backend} ({engine})" if len(engines) > 1 else backend

    throughput = [["backend", "bits/dim", *(f"images/s, B = {batch}" for batch in batches),
                   "paper: bits/dim", "paper: images/s"]]
    alone = [["backend", "seconds", "paper: CPU", "paper: GPU"]]
    for backend, engine in rows:
        ours = [at(backend, engine, batch) for batch in batches]
        against = [at("softmax", engine, batch).get("images_per_second") for batch in batches]
        theirs = paper.get(backend, {})
        throughput.append([
            name(backend, engine), _figure(ours[0].get("bits_per_dim")),
            *(_measured(one, "images_per_second", base)
              for one, base in zip(ours, against, strict=True)),
            _printed(theirs, "bits_per_dim"),
            _printed(theirs, "images_per_second", paper["softmax"])])
        one, base = at(backend, engine, 1), at("linear", engine, 1).get("seconds_per_image")
        alone.append([
            name(backend, engine), _measured(one, "seconds_per_image", base),
            *(_printed(theirs, device, paper["linear"]) for device in ("cpu_seconds", "gpu_seconds"))])
    steps = [["backend", "B", "first step", "middle step", "last step", "last / first tenth",
              "state per image"]]
    for backend, engine in rows:
        for result in _of(results, backend, engine):
            points = result["step_seconds"]
            chosen = (points[0], points[len(points) // 2], points[-1]) if points else ()
            steps.append([name(backend, engine), str(result["batch"]),
                          *([_duration(point["seconds"]) for point in chosen] or ["-"] * 3),
                          _ratio(result["tail_over_head"]), _size(result["state_bytes"])])
    command = f"`{report['command']}` · " if report["command"] else ""
    commit = f"commit `{report['commit']}` · " if report["commit"] else ""
    sizes = (f"The paper's networks have {16 if dataset == 'cifar10' else 8} layers of width 256, this one "
             f"{report['layers']} of width {report['d_model']}.")
    if report["subpixels"] not in DATASETS:
        sizes += f" Its images have {report['subpixels']} sub-pixels, MNIST's 784: compare factors only."
    return "\n".join([
        f"# {report['model']}: linear and softmax attention",
        "",
        f"{command}{commit}{report['created']}  ",
        f"{_machine(report)} · {', '.join(engines)} engine",
        "",
        "## Images per second (the paper's table 4)",
        "",
        *_grid(throughput),
        "",
        f"Factors against softmax at the same batch and engine. The paper: {title} on "
        f"{report['paper']['device']}. {sizes}",
        "",
        "## Seconds for one image alone (table 5)",
        "",
        *_grid(alone),
        "",
        "Factors against linear.",
        "",
        "## What a step costs",
        "",
        *_grid(steps),
        "",
        *(f"- {remark}" for remark in (
            "`~`: estimated from the steps at some positions (report.json lists them), with straight lines "
            "between; the others are whole decodes with drawing, from the first sub-pixel to the last.",
            "Steps are lower quartiles over rounds through the positions, there and back. softmax keeps no "
            "state and computes its whole prefix again at each position; stateful-softmax keeps all keys "
            "and values.",
            *_remarks(report))),
        "",
        "![cost of a step, and images per second](report.svg)",
        ""])


def _dataset(report: Report) -> tuple[str, str]:
    return DATASETS.get(report["subpixels"], DATASETS[784])


def _of(results: list[Result], backend: str, engine: str) -> list[Result]:
    return [result for result in results if (result["backend"], result["engine"]) == (backend, engine)]


def _remarks(report: Report) -> list[str]:
    difference = report["largest_logit_difference"]
    first = [] if difference is None else [
        f"The two softmax forms agree: with the same weights, in float32, their parameters differ by at most "
        f"{difference:.1e}."]
    return [*first, *report["notes"]]


def _machine(report: Report) -> str:
    machine = report["machine"]
    return (f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
            f"torch {machine['torch']}, load {machine['load']:g} before")


def _grid(rows: list[list[str]]) -> list[str]:
    """A Markdown table; the first row is its head, the first column its names."""
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:])]


def _measured(result: Result, field: str, base: float | None) -> str:
    """Our figure and its factor against base."""
    x, mark = result.get(field), "~" if result.get("estimated") else ""
    return _figure(x, mark if x else "") + (f" ({_figure(x / base)}x)" if x and base else "")


def _printed(figures: dict[str, float], field: str, base: dict[str, float] | None = None) -> str:
    """The paper's figure as printed, and its factor against base's."""
    if field not in figures:
        return "-"
    return f"{figures[field]:g}" + (f" ({_figure(figures[field] / base[field])}x)" if base else "")


def _figure(x: float | None, mark: str = "") -> str:
    """Three digits, and never an exponent."""
    if x is None:
        return "-"
    digits = max(0, 2 - math.floor(math.log10(abs(x)))) if x else 0
    return f"{mark}{x:,.{digits}f}"


def _ratio(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}"


def _duration(seconds: float, figure: Callable[[float], str] = _figure) -> str:
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 0.999e-3 else ("us", 1e-6)
    return f"{figure(seconds / size)} {unit}"


def _size(count: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{_figure(count / size)} {unit}"
    return f"{count} B"


# --- report.svg ---

_HEIGHT, _TOP, _BOTTOM = 430, 92, 352    # pixels; the plots stand between top and bottom
_LEFT, _WIDE = 70, 380                   # of the step plot
_BAR, _GAP = 44, 22                      # a bar with its share of space, and the space between groups
_COLOURS = {"linear": "#2a8fd8", "stateful-softmax": "#1a9e77", "softmax": "#d9622b",
            "lsh-1": "#b07cc6", "lsh-4": "#b8960c"}
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
    series = sorted({(result["backend"], result["engine"]) for result in results}, key=_place)
    left = _LEFT + _WIDE + 80
    groups = [(f"B = {batch}", [r for r in results if r["batch"] == batch]) for batch in batches]
    width = left + max(320, sum(len(bars) * _BAR + _GAP for _, bars in groups) + 3 * _BAR + 4 * _GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" '
        f'height="{_HEIGHT}" role="img">',
        f"<title>{escape(report['model'])}: what linear and softmax attention cost</title>",
        f"<style>{_STYLE}</style>", f'<rect class="page" width="{width}" height="{_HEIGHT}"/>',
        _text(16, 26, f"{report['model']}: linear and softmax attention", "title"),
        *_legend(series, any(result["estimated"] for result in results)),
        *(_step_plot(report, [r for r in results if r["batch"] == batches[-1]]) if batches else ()),
        *(_bar_plot(report, groups, left, width - 10) if batches else ()),
        _text(16, _HEIGHT - 12, _machine(report), "small faint"), "</svg>"]
    return "\n".join(parts) + "\n"


def _place(series: tuple[str, str]) -> tuple[int, str]:
    """Backends in the order of the colours, each with its engines."""
    return list(_COLOURS).index(series[0]), series[1]


def _mark(engine: str) -> str:
    """What tells other engines from the eager one of the same colour: a rim, as lines are dashed."""
    return "" if engine == "eager" else ' class="axis" stroke-width="2"'


def _legend(series: list[tuple[str, str]], estimated: bool) -> list[str]:
    parts, x = [], 16.0
    for backend, engine in series:
        name = backend if engine == "eager" else f"{backend}, {engine}"
        parts += [f'<rect x="{x:g}" y="40" width="12" height="12" rx="2" '
                  f'fill="{_COLOURS[backend]}"{_mark(engine)}/>', _text(x + 18, 50, name)]
        x += 18 + 7 * len(name) + 22
    if estimated:
        parts.append(_text(x, 50, "~ and pale: estimated from steps at some positions", "faint"))
    return parts


def _step_plot(report: Report, results: list[Result]) -> list[str]:
    last, right = max(1, report["subpixels"] - 1), _LEFT + _WIDE
    y, low, high = _log_axis([point["seconds"] for result in results for point in result["step_seconds"]])
    parts = [_text(_LEFT, 78, f"Time of a step of {results[0]['batch']} images, by position (log)", "title"),
             *_decades(y, low, high, _LEFT, right, lambda tick: _duration(tick, lambda x: f"{x:g}"))]
    for quarter in range(5):
        x = _LEFT + _WIDE * quarter / 4
        parts += [f'<line class="axis" x1="{x:g}" y1="{_BOTTOM}" x2="{x:g}" y2="{_BOTTOM + 4}"/>',
                  _text(x, _BOTTOM + 18, str(round(last * quarter / 4)), "small", "middle")]
    parts.append(_text(_LEFT + _WIDE / 2, _BOTTOM + 36, "position of the sub-pixel", "small faint", "middle"))
    for result in results:
        colour = _COLOURS[result["backend"]]
        points = [(_LEFT + _WIDE * p["position"] / last, y(p["seconds"])) for p in result["step_seconds"]]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        dash = "" if result["engine"] == "eager" else ' stroke-dasharray="6 3"'
        parts += [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>',
                  *(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points)]
    return parts


def _bar_plot(report: Report, groups: list[tuple[str, list[Result]]], left: float, right: float) -> list[str]:
    dataset, title = _dataset(report)
    paper = [{"backend": name, "engine": "eager", "estimated": False,
              "images_per_second": figures["images_per_second"]}
             for name, figures in report["paper"][dataset].items()
             if any(bar["backend"] == name for _, bars in groups for bar in bars)]
    everything = [*groups, (f"paper, {title}", paper)]
    y, low, high = _log_axis([bar["images_per_second"] for _, bars in everything for bar in bars])
    parts = [_text(left, 78, "Images per second, by batch (log)", "title"),
             *_decades(y, low, high, left, right, lambda tick: f"{tick:g}")]
    x = left + _GAP
    for label, bars in everything:
        if bars is paper:
            parts.append(f'<line class="axis" x1="{x:g}" y1="{_TOP}" x2="{x:g}" y2="{_BOTTOM + 40}" '
                         'stroke-dasharray="3 3"/>')
            x += _GAP
            parts.append(_text(x, _BOTTOM + 36, "P40-class GPU", "small faint"))
        parts.append(_text(x + len(bars) * _BAR / 2, _BOTTOM + 18, label, "small", "middle"))
        for bar in sorted(bars, key=lambda bar: _place((bar["backend"], bar["engine"]))):
            top = y(bar["images_per_second"])
            pale = ' fill-opacity="0.55"' if bar["estimated"] else ""
            parts += [f'<rect x="{x + 4:g}" y="{top:.1f}" width="{_BAR - 8}" height="{_BOTTOM - top:.1f}" '
                      f'fill="{_COLOURS[bar["backend"]]}"{pale}{_mark(bar["engine"])}/>',
                      _text(x + _BAR / 2, top - 5, _short(bar), "small", "middle")]
            x += _BAR
        x += _GAP
    parts.append(_text(left + _GAP, _BOTTOM + 36, "this machine", "small faint"))
    return parts


def _short(bar: Result) -> str:
    """Few enough characters to stand above a bar."""
    x = bar["images_per_second"]
    text = f"{x:.0f}" if x >= 10 else f"{x:.1f}" if x >= 1 else f"{float(f'{x:.2g}'):f}".rstrip("0")
    return ("~" if bar["estimated"] else "") + text


def _log_axis(values: list[float]) -> tuple[Callable[[float], float], int, int]:
    """From a value to its height in pixels, and the exponents of the lowest and highest decade."""
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
