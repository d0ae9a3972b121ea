"""What a comparison found, for people: a table for the terminal, report.md and report.svg beside report.json.

Nothing here measures, and nothing here needs torch.
"""

import json
import os
from pathlib import Path

from server.figures import DATASETS, ORDER, Report, Result, dataset_of, duration, figure, machine_of, results_of
from server.plot import svg


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
                     figure(result["images_per_second"], mark), figure(result["seconds_per_image"], mark),
                     _size(result["state_bytes"]), _ratio(result["tail_over_head"]),
                     figure(result["bits_per_dim"])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) if index < 2 else cell.rjust(width)
                       for index, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows]
    marks = "~ estimated from the steps at some positions; s/image: until the batch is done"
    return "\n".join([*lines, "", marks, *_remarks(report)])


def markdown(report: Report) -> str:
    """The paper's tables beside ours."""
    dataset, title = dataset_of(report)
    paper, results = report["paper"][dataset], report["results"]
    engines = sorted({result["engine"] for result in results})
    rows = [(backend, engine) for backend in ORDER
            for engine in [engine for engine in engines if results_of(results, backend, engine)]
            or ([""] if backend in paper else [])]  # the paper has backends that did not run here
    batches = sorted({result["batch"] for result in results})

    def at(backend: str, engine: str, batch: int) -> Result:
        return next((r for r in results_of(results, backend, engine) if r["batch"] == batch), {})

    def name(backend: str, engine: str) -> str:
        return f"{backend} ({engine})" if engine and len(engines) > 1 else backend

    throughput = [["backend", "bits/dim", *(f"images/s, B = {batch}" for batch in batches),
                   "paper: bits/dim", "paper: images/s"]]
    alone = [["backend", "seconds", "paper: CPU", "paper: GPU"]]
    for backend, engine in rows:
        ours = [at(backend, engine, batch) for batch in batches]
        against = [at("softmax", engine, batch).get("images_per_second") for batch in batches]
        theirs = paper.get(backend, {})
        throughput.append([
            name(backend, engine), figure(ours[0].get("bits_per_dim")),
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
        for result in results_of(results, backend, engine):
            points = result["step_seconds"]
            chosen = (points[0], points[len(points) // 2], points[-1]) if points else ()
            steps.append([name(backend, engine), str(result["batch"]),
                          *([duration(point["seconds"]) for point in chosen] or ["-"] * 3),
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
        f"{machine_of(report)} · {', '.join(engines)} engine",
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


def _remarks(report: Report) -> list[str]:
    difference = report["largest_logit_difference"]
    first = [] if difference is None else [
        f"The two softmax forms agree: with the same weights, in float32, their parameters differ by at most "
        f"{difference:.1e}."]
    return [*first, *report["notes"]]


def _grid(rows: list[list[str]]) -> list[str]:
    """A Markdown table; the first row is its head, the first column its names."""
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:])]


def _measured(result: Result, field: str, base: float | None) -> str:
    """Our figure and its factor against base."""
    x, mark = result.get(field), "~" if result.get("estimated") else ""
    return figure(x, mark if x else "") + (f" ({figure(x / base)}x)" if x and base else "")


def _printed(figures: dict[str, float], field: str, base: dict[str, float] | None = None) -> str:
    """The paper's figure as printed, and its factor against base's."""
    if field not in figures:
        return "-"
    return f"{figures[field]:g}" + (f" ({figure(figures[field] / base[field])}x)" if base else "")


def _ratio(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}"


def _size(count: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{figure(count / size)} {unit}"
    return f"{count} B"
