"""Time and peak memory by length: each measured in a process of its own, and their tables and
plots.
"""

import ctypes
import itertools
import multiprocessing
import re
import resource
import signal
import statistics
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .record import Row, Sitting, table

# column, title, unit shown, and its size
MEASURES = (("seconds", "time", "ms", 1e-3), ("bytes", "peak memory", "MiB", 2**20))
END_S = 10.0  # for a process that has answered
Measured = tuple[float, int]  # seconds, bytes
Curve = list[tuple[int, float]]  # length, seconds or bytes


def in_a_process(
    measure: Callable[..., Measured],
    arguments: tuple[Any, ...],
    sitting: Sitting,
    what: str,
) -> Measured | None:
    """measure(*arguments) in a new process; None if it did not fit in memory or the sitting ended.

    what: its name in the error if it fails otherwise.
    """
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    device = torch.get_default_device().type
    process = context.Process(target=_child, args=(theirs, measure, arguments, device), daemon=True)
    process.start()
    theirs.close()
    while process.is_alive() and not mine.poll(0.1):
        if sitting.stop_requested:
            process.terminate()
    try:
        found: Measured | None = mine.recv()
    except EOFError:
        found = None
    process.join(END_S)
    process.kill()  # has already ended, unless native threads keep it from ending
    process.join()
    if found is None and process.exitcode not in (0, -signal.SIGKILL, -signal.SIGTERM):
        raise ChildProcessError(
            f"measuring {what} ended with status {process.exitcode}; what it printed above says why"
        )
    return found


def doublings(shortest: int, longest: int) -> list[int]:
    """Lengths up to the longest, each twice the one before."""
    return [shortest << times for times in range((longest // shortest).bit_length())]


def missing(
    rows: list[Row], rounds: int, lengths: list[int], kinds: tuple[str, ...]
) -> list[tuple[int, int, str]]:
    """Round, length and kind of what has no row yet."""
    done = {(row["round"], row["length"], row["kind"]) for row in rows}
    points = itertools.product(range(rounds), lengths, kinds)
    return [point for point in points if point not in done]


def on_gpu() -> bool:
    return torch.get_default_device().type == "cuda"


def wait() -> None:
    if on_gpu():
        torch.cuda.synchronize()


def peak_of(call: Callable[[], object]) -> int:
    """Peak bytes of a call, beyond those allocated before it."""
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - allocated
    peak = 0
    for _ in range(5):
        with suppress(AttributeError, OSError):  # not glibc
            # else memory that earlier calls freed counts as allocated before
            ctypes.CDLL(None).malloc_trim(0)
        before = _resident(reset=True)
        call()
        after = _resident()
        peak = max(0, after["VmHWM"] - after["RssFile"] - before["RssAnon"])
        if abs(after["RssFile"] - before["RssFile"]) <= max(2**20, peak / 50):
            break  # else pages of libraries changed meanwhile, and the peak includes them
    return peak


def _resident(*, reset: bool = False) -> dict[str, int]:
    """Bytes of this process in memory: peak since the last reset (VmHWM), own (RssAnon), of files
    (RssFile).
    """
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        found = re.findall(r"^(VmHWM|RssAnon|RssFile):\s*(\d+)", status, re.MULTILINE)
        return {name: 1024 * int(kib) for name, kib in found}
    # not Linux: the peak since the start, from which peak_of subtracts the earlier peak
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"VmHWM": most, "RssAnon": most, "RssFile": 0}


def _child(
    answer: Connection, measure: Callable[..., Measured], arguments: tuple[Any, ...], device: str
) -> None:
    # Ctrl-C is for the parent, which ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        # if memory runs out, this process is killed
        Path("/proc/self/oom_score_adj").write_text("1000")
    torch.set_default_device(device)
    try:
        answer.send(measure(*arguments))
    except RuntimeError as error:  # torch has no error type for CPU memory
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        answer.send(None)


def medians(rows: list[Row], kind: str, what: str) -> Curve:
    """Length and median over rounds of seconds or bytes, for the lengths that fitted."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["kind"] == kind and row[what] is not None:
            found.setdefault(row["length"], []).append(max(row[what], 1e-9))
    return sorted((length, statistics.median(values)) for length, values in found.items())


def draw_lengths(both: Any, kinds: tuple[str, ...], rows: list[Row]) -> None:
    """Plot time and memory of a sequence by its length on two matplotlib axes."""
    for axes, (what, title, unit, size) in zip(both, MEASURES, strict=True):
        for kind in kinds:
            curve = medians(rows, kind, what)
            lengths, values = np.reshape(curve, (-1, 2)).T
            axes.loglog(lengths, values / size, "o-", markersize=4, label=kind, base=2)
        axes.set_yscale("log")
        axes.set(xlabel="sequence length N", ylabel=f"{unit} a sequence", title=title)
        axes.legend()


def tables_of(kinds: tuple[str, ...], lengths: list[int], rows: list[Row]) -> list[str]:
    """Markdown tables of time and memory of a sequence by its length."""
    tables = []
    for what, _, unit, size in MEASURES:
        lines = []
        for kind in kinds:
            cells = {N: f"{value / size:.4g}" for N, value in medians(rows, kind, what)}
            lines.append([kind, *(cells.get(N, "-") for N in lengths)])
        tables.append(table([f"{unit} a sequence", *(f"N = {N:,}" for N in lengths)], lines))
    return tables


def exponents(rows: list[Row], kind: str) -> list[str]:
    """How time and memory grow with the length, by `exponent`."""
    return [exponent(medians(rows, kind, what)) for what, *_ in MEASURES]


def exponent(curve: Curve) -> str:
    """Slope of the logarithms by least squares over the last two doublings, with their lengths, as
    text.
    """
    if len(curve) < 2:
        return "-"
    last = curve[-3:]
    lengths, values = np.log(last).T
    slope = np.polyfit(lengths, values, 1)[0]
    return f"{slope:.2f} (N = {last[0][0]:,} to {last[-1][0]:,})"
