"""Shared by a report's tables and its plot: the paper's figures, and how a figure is written."""

import math
from collections.abc import Callable, Sequence
from typing import Any

Report = dict[str, Any]
Result = dict[str, Any]

# Tables 1, 2, 4 and 5 of "Transformers are RNNs" (2020). Table 4 has the rows of 1 (MNIST) and 2 (CIFAR-10), and one
# more. The paper's factors are left out: they follow from the figures.
PAPER: dict[str, Any] = {
    "source": "Katharopoulos et al., Transformers are RNNs, ICML 2020, tables 1, 2, 4 and 5",
    "device": "one P40-class GPU, in table 5 also on a CPU that is not named",
    "columns": {"bits_per_dim": "tables 1, 2 and 4",
                "images_per_second": "tables 1, 2 and 4; batch sizes differ between methods",
                "cpu_seconds": "table 5, one image alone", "gpu_seconds": "table 5, one image alone"},
    "mnist": {
        "softmax": {"bits_per_dim": 0.621, "images_per_second": 0.45, "cpu_seconds": 72.6, "gpu_seconds": 10.2},
        "stateful-softmax": {"bits_per_dim": 0.621, "images_per_second": 7.56, "cpu_seconds": 7.4, "gpu_seconds": 10.4},
        "lsh-1": {"bits_per_dim": 0.745, "images_per_second": 0.68, "cpu_seconds": 46.0, "gpu_seconds": 19.2},
        "lsh-4": {"bits_per_dim": 0.676, "images_per_second": 0.27, "cpu_seconds": 112.0, "gpu_seconds": 55.8},
        "linear": {"bits_per_dim": 0.644, "images_per_second": 142.8, "cpu_seconds": 5.5, "gpu_seconds": 7.3},
    },
    "cifar10": {
        "softmax": {"bits_per_dim": 3.47, "images_per_second": 0.004, "cpu_seconds": 8651.4, "gpu_seconds": 300.1},
        "stateful-softmax": {"bits_per_dim": 3.47, "images_per_second": 0.32, "cpu_seconds": 71.9, "gpu_seconds": 70.4},
        "lsh-1": {"bits_per_dim": 3.39, "images_per_second": 0.015, "cpu_seconds": 2318.9, "gpu_seconds": 221.6},
        "lsh-4": {"bits_per_dim": 3.51, "images_per_second": 0.005, "cpu_seconds": 5263.7, "gpu_seconds": 683.9},
        "linear": {"bits_per_dim": 3.40, "images_per_second": 17.85, "cpu_seconds": 45.1, "gpu_seconds": 61.3},
    },
}
ENGINES = {"eager": "torch", "eager+operator": "torch with our operator", "compiled": "compiled"}  # as readers see them
DATASETS = {784: ("mnist", "MNIST"), 3072: ("cifar10", "CIFAR-10")}  # by number of sub-pixels; else MNIST


def dataset_of(report: Report) -> tuple[str, str]:
    return DATASETS.get(report["subpixels"], DATASETS[784])


def order_of(report: Report) -> list[str]:
    """The paper's backends in its order, whether they ran here or not, and then those that it does not have."""
    return list(dict.fromkeys([*report["paper"][dataset_of(report)[0]], *ran_in(report)]))


def ran_in(report: Report) -> list[str]:
    return list(dict.fromkeys(result["backend"] for result in report["results"]))


def title_of(report: Report) -> str:
    """The model, and what was compared."""
    ran = ran_in(report)
    return f"{report['model']}: {listed([backend for backend in order_of(report) if backend in ran])} attention"


def listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def results_of(results: list[Result], backend: str, engine: str) -> list[Result]:
    return [result for result in results if (result["backend"], result["engine"]) == (backend, engine)]


def rows_of(report: Report) -> list[tuple[str, str, str]]:
    """Name, backend and engine of each row, in the paper's order; engine is "" if a backend did not run here."""
    results = report["results"]
    engines = sorted({result["engine"] for result in results})
    return [(f"{backend} ({ENGINES[engine]})" if engine and len(engines) > 1 else backend, backend, engine)
            for backend in order_of(report)
            for engine in [engine for engine in engines if results_of(results, backend, engine)] or [""]]


def factor(x: float | None, base: float | None) -> str:
    """x / base in words. Bases are from the same engine, so that a factor compares attention alone."""
    return f" ({figure(x / base)}x)" if x and base else ""


def figure(x: float | None, mark: str = "") -> str:
    """Three significant digits, and never an exponent."""
    if x is None:
        return "-"
    digits = max(0, 2 - math.floor(math.log10(abs(x)))) if x else 0
    return f"{mark}{x:,.{digits}f}"


def machine_of(report: Report) -> str:
    machine = report["machine"]
    return (f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
            f"torch {machine['torch']}, load {machine['load']:g} before")


def duration(seconds: float, figure: Callable[[float], str] = figure) -> str:
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 0.999e-3 else ("us", 1e-6)
    return f"{figure(seconds / size)} {unit}"
