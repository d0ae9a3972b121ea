"""How many threads a decoder uses: all that it may have, or one where other programs need the same cores.

Threads that share the columns of one pass wait for each other several times in it. When another program has one of
their cores, each wait lasts until the operating system gives it back, and one thread alone is several times faster.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

FIRST = 4                 # calls on one thread at the beginning; the very first one warms up, and is not counted
ALONE_EVERY = 512         # calls: one of so many runs on one thread, to know how long that takes
PAUSE, MAX_PAUSE = 8, 1024  # calls on one thread after a lost comparison: twice as many after each, up to a limit
SETTLED = 64              # calls without a loss after which losses before them are forgotten
WON = 0.9                 # threads have to take at most this part of the time of one thread
FORGET = 0.15             # weight of a new measurement
PATIENCE = 2.0            # times as long as one thread: threads that take longer go on alone in the middle of a call
SHARED = 8                # rows a thread: with more, each thread has rows of its own, and waits for no other


@dataclass(slots=True)
class _Size:
    """What is known of passes with a number of rows between two powers of two."""

    alone_s: float = math.inf  # a pass on one thread, smoothed; inf: not measured
    alone_left: int = FIRST    # calls that still run on one thread
    together: int = 0          # calls since the last that several threads lost
    together_s: float = 0.0    # a pass of these, smoothed
    pause: int = PAUSE


@dataclass(slots=True)
class Team:
    """Decides the number of threads of each call of one decoder. Of one thread at a time."""

    _sizes: dict[int, _Size] = field(default_factory=dict)

    def choose(self, rows: int) -> tuple[int, float]:
        """Threads for a call of so many rows, 1 or all; and for how long they may share passes, in seconds a pass."""
        threads = torch.get_num_threads()
        if threads == 1 or rows > SHARED * threads:
            return threads, math.inf
        size = self._sizes.setdefault(rows.bit_length(), _Size())
        if size.alone_left > 0 or size.together % ALONE_EVERY == ALONE_EVERY - 1:
            return 1, math.inf
        return threads, PATIENCE * size.alone_s

    def learn(self, rows: int, threads: int, passes: int, seconds: float) -> None:
        """That a call of so many rows went through the layers so often, and took so long on so many threads.

        A busy neighbour makes some calls slow and others not, so means are compared. One slow call among many is an
        accident; and a few fast ones do not make up for the losses before them.
        """
        size = self._sizes.get(rows.bit_length())
        if size is None or rows > SHARED * torch.get_num_threads() or not passes:
            return
        pass_s = seconds / passes
        if threads == 1:
            if size.alone_left < FIRST or size.alone_s < math.inf:
                size.alone_s = _smoothed(size.alone_s, pass_s)
            size.alone_left = max(0, size.alone_left - 1)
            size.together += size.together > 0
            return
        pass_s = min(pass_s, PATIENCE * size.alone_s)
        size.together_s = _smoothed(size.together_s if size.together else math.inf, pass_s)
        size.together += 1
        if size.together_s > WON * size.alone_s:
            size.alone_left, size.pause, size.together = size.pause, min(2 * size.pause, MAX_PAUSE), 0
        elif size.together >= SETTLED:
            size.pause = PAUSE


def _smoothed(before: float, now: float) -> float:
    return now if before == math.inf else (1 - FORGET) * before + FORGET * now


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: by its affinity, and by the CPU quotas of its control groups."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Cores that each control group of this process allows, and each one above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers != "" and "cpu" not in controllers.split(","):
            continue
        mounted = root / ("sys/fs/cgroup/cpu" if controllers else "sys/fs/cgroup")
        for group in (Path(path), *Path(path).parents):
            try:
                folder = mounted / group.relative_to("/")
                quota, period = ((folder / "cpu.max").read_text().split() if controllers == "" else
                                 ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")))
                if quota not in ("max", "-1"):
                    yield int(quota) / int(period)
            except (OSError, ValueError):  # not mounted here, or no limit
                continue


def limit_threads() -> None:
    """Let torch, and with it every decoder, use no more threads than there are usable cores.

    OMP_NUM_THREADS, where the user has set it, is left alone.
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
