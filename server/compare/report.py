"""A comparison's findings for readers: tables for the terminal and for report.md, with the paper's
figures.

This module measures nothing, and does not need torch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

Report = dict[str, Any]
Result = dict[str, Any]

# Tables 1, 2, 4 and 5 of "Transformers are RNNs" (2020). Table 4 has the rows of 1 (MNIST) and 2
# (CIFAR-10), and one more. The paper's factors are left out: they follow from the figures.
_COLUMNS = {
    "bits_per_dim": "tables 1, 2 and 4",
    "images_per_second": "tables 1, 2 and 4; batch sizes differ between methods",
    "cpu_seconds": "table 5, one image alone",
    "gpu_seconds": "table 5, one image alone",
}
_FIGURES = {
    "mnist": {
        "softmax": (0.621, 0.45, 72.6, 10.2),
        "stateful-softmax": (0.621, 7.56, 7.4, 10.4),
        "lsh-1": (0.745, 0.68, 46.0, 19.2),
        "lsh-4": (0.676, 0.27, 112.0, 55.8),
        "linear": (0.644, 142.8, 5.5, 7.3),
    },
    "cifar10": {
        "softmax": (3.47, 0.004, 8651.4, 300.1),
        "stateful-softmax": (3.47, 0.32, 71.9, 70.4),
        "lsh-1": (3.39, 0.015, 2318.9, 221.6),
        "lsh-4": (3.51, 0.005, 5263.7, 683.9),
        "linear": (3.40, 17.85, 45.1, 61.3),
    },
}
PAPER: dict[str, Any] = {
    "source": "Katharopoulos et al., Transformers are RNNs, ICML 2020, tables 1, 2, 4 and 5",
    "device": "one P40-class GPU, in table 5 also on a CPU that is not named",
    "columns": _COLUMNS,
}
for _dataset, _rows in _FIGURES.items():
    PAPER[_dataset] = {
        backend: dict(zip(_COLUMNS, row, strict=True)) for backend, row in _rows.items()
    }
# as readers see them
ENGINES = {"eager": "torch", "eager+operator": "torch with our operator", "compiled": "compiled"}
# by number of sub-pixels; else MNIST
DATASETS = {784: ("mnist", "MNIST"), 3072: ("cifar10", "CIFAR-10")}


def table(report: Report) -> str:
    """A table for a terminal: one line per backend, engine and batch."""
    rows = [
        (
            "backend",
            "engine",
            "batch",
            "images/s",
            "s/image",
            "state/image",
            "last/first tenth",
            "bits/dim",
        )
    ]
    for result in report["results"]:
        rows.append(
            (
                result["backend"],
                ENGINES[result["engine"]],
                str(result["batch"]),
                measured(result, "images_per_second"),
                measured(result, "seconds_per_image"),
                _size(result["state_bytes"]),
                _ratio(result["tail_over_head"]),
                _bits(result),
            )
        )
    widths = [0] * len(rows[0])
    for row in rows:
        widths = [max(width, len(cell)) for width, cell in zip(widths, row, strict=True)]
    sides = "<<>>>>>>"  # words to the left, figures to the right
    line = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    lines = [line.format(*row) for row in rows]
    marks = (
        "~ estimated from the steps at some positions; s/image: time until the whole batch is"
        " finished; * not strictly autoregressive; † disturbed by other work"
    )
    return "\n".join([*lines, "", marks, *_remarks(report)])


def markdown(
    report: Report, chart: str = "![images per second, and time of a step](report.svg)"
) -> str:
    """report.md: our tables beside the paper's. chart: the link to it, or why there is none."""
    dataset, title = dataset_of(report)
    engines = sorted({result["engine"] for result in report["results"]})
    command = f"`{report['command']}` · " if report["command"] else ""
    commit = f"commit `{report['commit']}` · " if report["commit"] else ""
    layers, table_number = (16, 2) if dataset == "cifar10" else (8, 1)
    sizes = (
        f"The paper's networks have {layers} layers of width 256, this one has {report['layers']}"
        f" of width {report['d_model']}."
    )
    if report["subpixels"] not in DATASETS:
        sizes += (
            f" Its images have {report['subpixels']} sub-pixels, but MNIST's have 784: compare only"
            " the factors."
        )
    paragraphs = [
        f"# {title_of(report)}",
        (
            f"{command}{commit}{report['created']}  \n"
            f"{machine_of(report)} · {listed([ENGINES[engine] for engine in engines])}"
        ),
        f"## Bits/dim and images per second (the paper's tables {table_number} and 4)",
        _grid(_throughput(report)),
        (
            "Factors are relative to softmax at the same batch in the same engine. Factors of"
            " torch compare kinds of attention; compiled against torch compares kernels. The"
            f" paper: {title} on {report['paper']['device']}. {sizes}"
        ),
        "## Seconds for one image alone (table 5)",
        _grid(_alone(report)),
        "Factors are relative to linear in the same engine.",
        "## Time of a step",
        _grid(_steps(report)),
        "\n".join(
            f"- {remark}"
            for remark in (
                (
                    "`~`: estimated from the steps at some positions (report.json lists them), with"
                    " straight lines between them. Other figures are measured: a whole decode with"
                    " drawing, from the first sub-pixel to the last, or the median of several if"
                    " there was time. Seconds are those that the thread was on its processor. †:"
                    " other work disturbed this row."
                ),
                "torch uses only torch, without LinPix's kernels. compiled uses LinPix's kernels.",
                (
                    "The time of a step is the lower quartile over several rounds through the"
                    " positions, forwards and backwards. softmax, lsh-1 and lsh-4 keep no state and"
                    " compute the whole prefix again at each position; stateful-softmax keeps all"
                    " keys and values."
                ),
                *_remarks(report),
            )
        ),
        chart,
    ]
    return "\n\n".join(paragraphs) + "\n"


def _throughput(report: Report) -> list[list[str]]:
    """Bits/dim and images per second, with factors against softmax."""
    paper = report["paper"][dataset_of(report)[0]]
    batches = sorted({result["batch"] for result in report["results"]})
    grid = [
        [
            "backend",
            "bits/dim",
            *(f"images/s, B = {batch}" for batch in batches),
            "paper: bits/dim",
            "paper: images/s",
        ]
    ]
    for name, backend, engine in rows_of(report):
        ours = [_at(report, backend, engine, batch) for batch in batches]
        bases = [_at(report, "softmax", engine, batch) for batch in batches]
        theirs = paper.get(backend, {})
        grid.append(
            [
                name,
                _bits(ours[0]),
                *(
                    measured(one, "images_per_second", base)
                    for one, base in zip(ours, bases, strict=True)
                ),
                _printed(theirs, "bits_per_dim"),
                _printed(theirs, "images_per_second", paper["softmax"]),
            ]
        )
    return grid


def _alone(report: Report) -> list[list[str]]:
    """Seconds for one image, with factors against linear."""
    paper = report["paper"][dataset_of(report)[0]]
    grid = [["backend", "seconds", "paper: CPU", "paper: GPU"]]
    for name, backend, engine in rows_of(report):
        base = _at(report, "linear", engine, 1)
        grid.append(
            [
                name,
                measured(_at(report, backend, engine, 1), "seconds_per_image", base),
                *(
                    _printed(paper.get(backend, {}), device, paper["linear"])
                    for device in ("cpu_seconds", "gpu_seconds")
                ),
            ]
        )
    return grid


def _steps(report: Report) -> list[list[str]]:
    grid = [
        [
            "backend",
            "B",
            "first step",
            "middle step",
            "last step",
            "last / first tenth",
            "state per image",
        ]
    ]
    for name, backend, engine in rows_of(report):
        for result in results_of(report["results"], backend, engine):
            points = result["step_seconds"]
            times = ["-"] * 3
            if points:
                places = (0, len(points) // 2, -1)
                times = [duration(points[place]["seconds"]) for place in places]
            grid.append(
                [
                    name,
                    str(result["batch"]),
                    *times,
                    _ratio(result["tail_over_head"]),
                    _size(result["state_bytes"]),
                ]
            )
    return grid


def _at(report: Report, backend: str, engine: str, batch: int) -> Result:
    return next(
        (r for r in results_of(report["results"], backend, engine) if r["batch"] == batch), {}
    )


def _remarks(report: Report) -> list[str]:
    remarks, difference = [*report["notes"]], report["largest_logit_difference"]
    if difference is not None:
        remarks.insert(
            0,
            "The two softmax forms agree: with the same weights, in float32, their parameters"
            f" differ by at most {difference:.1e}.",
        )
    return remarks


def _grid(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is its head, the first column has the names."""
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))


def _bits(result: Result) -> str:
    """bits/dim, with a star if it is not strictly autoregressive."""
    bits = result.get("bits_per_dim")
    return figure(bits) + ("*" if bits and result.get("exception") else "")


def _printed(figures: dict[str, float], field: str, base: dict[str, float] | None = None) -> str:
    """The paper's figure as printed, and its factor against base's."""
    if field not in figures:
        return "-"
    return f"{figures[field]:g}" + (factor(figures[field], base[field]) if base else "")


def _ratio(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}"


def _size(count: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{figure(count / size)} {unit}"
    return f"{count} B"


# --- names and figures, for charts too ---


def dataset_of(report: Report) -> tuple[str, str]:
    return DATASETS.get(report["subpixels"], DATASETS[784])


def title_of(report: Report) -> str:
    """The model, and what was compared."""
    ran = dict.fromkeys(backend for _, backend, engine in rows_of(report) if engine)
    return f"{report['model']}: {listed(list(ran))} attention"


def listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def results_of(results: list[Result], backend: str, engine: str) -> list[Result]:
    return [
        result for result in results if (result["backend"], result["engine"]) == (backend, engine)
    ]


def rows_of(report: Report) -> list[tuple[str, str, str]]:
    """Name, backend and engine of each row, in the paper's order; engine is "" if a backend did not
    run here.
    """
    results = report["results"]
    engines = sorted({result["engine"] for result in results})
    order = dict.fromkeys(
        [*report["paper"][dataset_of(report)[0]], *(result["backend"] for result in results)]
    )
    rows = []
    for backend in order:
        ran = [engine for engine in engines if results_of(results, backend, engine)]
        for engine in ran or [""]:
            name = backend
            if engine and len(engines) > 1:
                name += f" ({ENGINES[engine]})"
            rows.append((name, backend, engine))
    return rows


def factor(x: float | None, base: float | None) -> str:
    """x / base in words. Bases are from the same engine, so that a factor compares attention
    alone.
    """
    return f" ({figure(x / base)}x)" if x and base else ""


def figure(x: float | None) -> str:
    """Three significant digits, and never an exponent."""
    if x is None:
        return "-"
    digits = max(0, 2 - math.floor(math.log10(abs(x)))) if x else 0
    return f"{x:,.{digits}f}"


def measured(result: Result, field: str, base: Result | None = None) -> str:
    """Our figure with the marks that it needs, and its factor against base's."""
    x = result.get(field)
    if not x:
        return figure(x)
    before = "~" if result.get("estimated") else ""
    after = "†" if result.get("disturbed") else ""
    if base:
        after += factor(x, base.get(field))
    return before + figure(x) + after


def machine_of(report: Report) -> str:
    machine = report["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"torch {machine['torch']}, load {machine['load']:g} before"
    )


def duration(seconds: float, figure: Callable[[float], str] = figure) -> str:
    unit, size = "us", 1e-6
    if seconds >= 1:
        unit, size = "s", 1.0
    elif seconds >= 0.999e-3:
        unit, size = "ms", 1e-3
    return f"{figure(seconds / size)} {unit}"
