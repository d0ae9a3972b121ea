"""The choice of a decoder's number of threads: all that it may have, or one if other programs need
the same cores.

Threads that share the columns of one pass wait for each other several times in it. If another
program occupies one of their cores, each wait lasts until the operating system gives the core back,
and a single thread is several times faster.
"""

import math
import os
from dataclasses import dataclass, field

import torch

from .machine import usable_cores

FIRST = 4  # initial calls on one thread; the first of them warms up and is not measured
ALONE_EVERY = 512  # one call in this many runs on one thread, to measure its time again
# calls on one thread after a lost comparison; doubled after each loss, up to MAX_PAUSE
PAUSE, MAX_PAUSE = 8, 1024
SETTLED = 64  # after this many calls without a loss, the pause is PAUSE again
WON = 0.9  # several threads win if they take at most this share of one thread's time
FORGET = 0.15  # weight of a new measurement
# threads that take longer than this times one thread's time stop sharing within the call
PATIENCE = 2.0
SHARED = 8  # rows per thread: with more, each thread has its own rows and does not wait for others
_PROCESS = os.getpid()


@dataclass(slots=True)
class _Size:
    """Measurements of passes with a number of rows between two powers of two."""

    alone_s: float = math.inf  # seconds of a pass on one thread, smoothed; inf: not measured
    alone_left: int = FIRST  # calls that still run on one thread
    together: int = 0  # calls since several threads last lost
    together_s: float = 0.0  # seconds of a pass on several threads, smoothed
    pause: int = PAUSE


@dataclass(slots=True)
class Team:
    """Decides the number of threads of each call of one decoder. Not thread-safe."""

    _sizes: dict[int, _Size] = field(default_factory=dict)

    def choose(self, rows: int) -> tuple[int, float]:
        """Threads for a call with this many rows, 1 or all; and how long they may share passes, in
        seconds a pass.
        """
        threads = torch.get_num_threads()
        if threads == 1 or rows > SHARED * threads:
            return threads, math.inf
        size = self._sizes.setdefault(rows.bit_length(), _Size())
        if size.alone_left > 0 or size.together % ALONE_EVERY == ALONE_EVERY - 1:
            return 1, math.inf
        return threads, PATIENCE * size.alone_s

    def learn(self, rows: int, threads: int, passes: int, seconds: float) -> None:
        """Learn from the time of a call. passes: how often it went through the layers.

        Another busy program slows some calls and not others, so means are compared: one slow call
        among many does not count as a loss, and a few fast calls do not make up for earlier losses.
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
        before = size.together_s if size.together else math.inf
        size.together_s = _smoothed(before, pass_s)
        size.together += 1
        if size.together_s > WON * size.alone_s:
            size.alone_left, size.together = size.pause, 0
            size.pause = min(2 * size.pause, MAX_PAUSE)
        elif size.together >= SETTLED:
            size.pause = PAUSE


def _smoothed(before: float, now: float) -> float:
    return now if before == math.inf else (1 - FORGET) * before + FORGET * now


def limit_threads() -> None:
    """Let torch, and with it every decoder, use at most one thread per usable core.

    Changes nothing if the user has set OMP_NUM_THREADS. A process that was forked from one with
    torch gets one thread: OpenMP's threads are not in it, and torch would wait for them for ever.
    """
    if os.getpid() != _PROCESS:
        torch.set_num_threads(1)
    elif not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
