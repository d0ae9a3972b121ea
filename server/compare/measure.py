"""The timing of one comparison: steps of each backend at some positions, whole decodes, and
estimates from them.

The work comes in short units, so that a service can fit it between live requests; only time inside
units counts.
"""

import math
import statistics
from collections.abc import Callable, Generator, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from linpix.model.checkpoint import Checkpoint
from linpix.model.generate import noise_of

from .backends import Backend

# a step is repeated this many times, or for this long; the quickest counts
BURST, BURST_S = 4, 0.05
# decodes that took this many times the sum of their usual steps were disturbed by other work
BUSY = 1.5
WAITED = 0.25  # and so was a cell whose thread was off the processor for this part of its time
SLACK = 1.15  # an undisturbed decode takes at most this many times that sum; more does not count


class Stopwatch:
    """Seconds spent inside units of work."""

    def __init__(self, clock: Callable[[], float], processor: Callable[[], float]) -> None:
        """processor: seconds that this thread has been on a processor."""
        self.clock, self.processor, self.spent = clock, processor, 0.0
        self.deadline = math.inf  # in seconds spent in units, not on the wall clock
        self._began = 0.0

    def units(self, work: Iterator[None], seconds: float) -> Iterator[None]:
        """Do the work; yields after each unit of about so many seconds."""
        over = False
        while not over:
            self._began, over = self.clock(), True
            for _ in work:
                if self.clock() - self._began >= seconds:
                    over = False
                    break
            self.spent = self.elapsed()
            yield

    def elapsed(self) -> float:
        """Seconds spent in units; to be called inside one."""
        return self.spent + self.clock() - self._began

    def left(self) -> float:
        return self.deadline - self.elapsed()


class Cell:
    """One backend at one batch size, a line of the report: its measurements, and what follows from
    them.
    """

    def __init__(
        self, backend: Backend, batch: int, source: Checkpoint | None, watch: Stopwatch, note: str
    ) -> None:
        """source: of the weights; None: random ones · note: why there will be no figure."""
        self.backend, self.batch, self.source, self.watch = backend, batch, source, watch
        self.length = backend.net.config.length
        self.note = note
        self.spent, self.rounds = 0.0, 0
        # predicted, of the next round, on the processor; 0 before the survey
        self.round_seconds = 0.0
        self.timed_s = 0.0  # of its steps and decodes
        self.waited_s = 0.0  # the part of timed_s in which other work had the processor
        self.decodes: list[float] = []  # seconds of whole decodes

    def __str__(self) -> str:
        engine = "" if self.backend.engine == "eager" else f" ({self.backend.engine})"
        return f"{self.backend.name}{engine} at batch {self.batch}"

    # --- work, in short units; raises TimeoutError when the budget is spent ---

    def survey(self) -> Iterator[None]:
        """Few positions, for a first figure."""
        coarse, samples = self.backend.coarse, self.backend.samples
        yield from self._visit(coarse[0], burst=1)
        samples.pop((self._rows(coarse[0]), coarse[0]), None)  # it was only to warm up
        for t in coarse:
            if (self._rows(t), t) not in samples:
                yield from self._visit(t, burst=2)
        self._predict()

    def round(self) -> Iterator[None]:
        """Visit all positions, every second round backwards: so drift of the machine affects all of
        them alike.
        """
        for t in self.backend.positions[:: -1 if self.rounds % 2 else 1]:
            yield from self._visit(t, BURST)
        self.rounds += 1
        self._predict()

    def decode(self) -> Iterator[None]:
        """Draw the batch's images from start to end, with seeds 0, 1, 2, ..., and time that."""
        backend, config, clock = self.backend, self.backend.net.config, self.watch.clock
        yield from backend.clear(self.batch)
        began = clock()
        canvas = torch.zeros(self.batch, config.subpixels, dtype=torch.uint8)
        noise = noise_of(config, np.arange(self.batch), np.arange(self.length))
        seconds = clock() - began
        for t in range(0, self.length, backend.stride):
            rows = self._rows(t)
            for group in range(0, self.batch, rows):
                some = slice(group, group + rows)
                seconds += yield from self._timed(backend.step(canvas[some], t, noise[some, t]))
            yield
        self.decodes.append(seconds)

    def _visit(self, t: int, burst: int) -> Iterator[None]:
        """Time a step at t, or the steps of a call that includes t. The first of a burst warms the
        caches.
        """
        began, rows, backend = self.watch.elapsed(), self._rows(t), self.backend
        u = torch.full((rows, backend.net.config.token_size, 2), 0.5)
        taken: list[float] = []
        while len(taken) < burst and sum(taken) < BURST_S:
            step = backend.step(backend.canvas[:rows], min(t, self.length - backend.stride), u)
            taken.append((yield from self._timed(step)))
        backend.samples.setdefault((rows, t), []).append(min(taken) / backend.stride)
        self.spent += self.watch.elapsed() - began
        yield

    def _timed(self, work: Iterator[None]) -> Generator[None, None, float]:
        """Do some work and return its seconds on the processor, without those between units."""
        watch, processor = self.watch, self.watch.processor
        seconds = 0.0
        while True:
            if watch.elapsed() > watch.deadline:
                raise TimeoutError
            worked = processor()
            began = watch.clock()
            over = bool(next(work, True))  # None while there is more
            took = watch.clock() - began
            used = min(took, processor() - worked)
            seconds += used
            self.timed_s += took
            self.waited_s += took - used
            if over:
                return seconds
            yield

    def _rows(self, t: int) -> int:
        """Rows of one pass at position t. Batches that are larger than that share samples."""
        return self.backend.together(self.batch, t)

    def _predict(self) -> None:
        """Predict the seconds of the next round over the positions."""
        positions = self.backend.positions
        at = self._costs()[positions].tolist()
        share = self.backend.stride / self.batch
        passes = [x * self._rows(t) * share for t, x in zip(positions, at, strict=True)]
        self.round_seconds = sum(x * min(BURST, math.ceil(BURST_S / x)) for x in passes)

    # --- what follows from it ---

    @property
    def waited(self) -> float:
        """The part of its time in which other work had the processor."""
        return min(0.99, self.waited_s / self.timed_s) if self.timed_s else 0.0

    @property
    def decoded(self) -> float | None:
        """Median seconds of a whole decode; None if there was no time for one."""
        return statistics.median(self.decodes) if self.decodes else None

    def steps(self) -> dict[int, float]:
        """Seconds of a step of the batch, by position. If it goes in groups of rows, one group
        stands for all.
        """
        steps = {}
        for t in self.backend.positions:
            rows = self._rows(t)
            taken = sorted(self.backend.samples.get((rows, t), []))
            if taken:
                # the lower quartile: other work on the machine can only add time, and comes in
                # bursts
                steps[t] = taken[(len(taken) - 1) // 4] * self.batch / rows
        return steps

    def seconds(self) -> float:
        """Seconds to decode the batch, on the processor: measured, else estimated from its
        steps.
        """
        estimate = float(self._costs().sum())
        return estimate if self.decoded is None else min(self.decoded, SLACK * estimate)

    def _costs(self) -> NDArray[np.float64]:
        """Seconds of a step at every position, with straight lines between those of `steps`."""
        steps = self.steps()
        return np.interp(range(self.length), [*steps], [*steps.values()])

    def disturbed(self) -> str:
        """How other work slowed it down, in words; empty if it is not known to have."""
        if self.waited > WAITED:
            return f"other work used its processor for {self.waited:.0%} of the time"
        if self.decoded is None:
            return ""
        usual = float(self._costs().sum())
        if self.decoded > BUSY * usual:
            return (
                f"other work kept the machine busy: a whole decode took {self.decoded:.3g} s, and"
                f" its typical steps add up to {usual:.3g} s"
            )
        return ""

    def tail_over_head(self) -> float:
        """Median step time in the last tenth of the positions / that in the first tenth."""
        costs, tenth = self._costs(), max(1, self.length // 10)
        return float(np.median(costs[-tenth:]) / np.median(costs[:tenth]))
