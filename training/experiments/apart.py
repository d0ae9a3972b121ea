"""Measurements of time and peak memory, each in a process of its own."""

import multiprocessing
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .record import Sitting

Measured = tuple[float, int]  # seconds, bytes


def in_a_process(measure: Callable[..., Measured], arguments: tuple[Any, ...], sitting: Sitting, what: str,
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
    process.join()
    if found is None and process.exitcode not in (0, -signal.SIGKILL, -signal.SIGTERM):
        raise ChildProcessError(f"measuring {what} ended with status {process.exitcode}; what it printed above says "
                                "why")
    return found


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
        before = _resident(reset=True)
        call()
        after = _resident()
        peak = max(0, after["VmHWM"] - after["RssFile"] - before["RssAnon"])
        if abs(after["RssFile"] - before["RssFile"]) <= max(2**20, peak / 50):
            break  # else pages of libraries changed meanwhile, and the peak includes them
    return peak


def _resident(*, reset: bool = False) -> dict[str, int]:
    """Bytes of this process in memory: peak since the last reset (VmHWM), own (RssAnon), of files (RssFile)."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        names = ("VmHWM:", "RssAnon:", "RssFile:")
        return {words[0][:-1]: 1024 * int(words[1]) for words in lines if words[0] in names}
    except OSError:  # not Linux: the peak since the start, from which peak_of subtracts the earlier peak
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"VmHWM": most, "RssAnon": most, "RssFile": 0}


def _child(answer: Connection, measure: Callable[..., Measured], arguments: tuple[Any, ...], device: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this process is killed
    torch.set_default_device(device)
    try:
        answer.send(measure(*arguments))
    except RuntimeError as error:  # torch has no error type for CPU memory
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        answer.send(None)
