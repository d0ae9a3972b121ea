"""The timing of one comparison: steps of each backend at some positions, whole decodes, and estimates from them.

The work comes in short units, so that a service can fit it between live requests; only time inside units counts.
"""

import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from linpix.model.checkpoint import Checkpoint
from linpix.model.config import ModelConfig
from linpix.model.generate import noise_of

from .backends import Backend, first_position, rows_together

CellKind = tuple[str, str]    # backend, engine
BURST, BURST_S = 4, 0.05  # a step is repeated this many times, or for this long; the quickest counts
BUSY = 1.5                # decodes that took this many times the sum of their usual steps were disturbed by other work
WAITED = 0.25             # and so was a cell whose thread was off the processor for this part of its time
SLACK = 1.15              # an undisturbed decode takes at most this many times that sum; more does not count


class OutOfTime(Exception):
    """The budget ended inside a measurement."""


@dataclass(slots=True, eq=False)
class Cell:
    """One backend in one engine at one batch size: a line of the report."""

    backend: str
    engine: str
    precision: str
    batch: int
    source: Checkpoint | None     # of the weights; None: random ones
    spent: float = 0.0
    rounds: int = 0
    round_seconds: float = 0.0    # predicted, of the next round, on the processor; 0 before the survey
    note: str = ""                # why there is no figure
    timed_s: float = 0.0          # of its steps and decodes
    waited_s: float = 0.0         # the part of timed_s in which other work had the processor
    decodes: list[float] = field(default_factory=list)  # seconds of whole decodes

    @property
    def kind(self) -> CellKind:
        return self.backend, self.engine

    @property
    def decoded(self) -> float | None:
        """Median seconds of a whole decode; None if there was no time for one."""
        return statistics.median(self.decodes) if self.decodes else None

    @property
    def waited(self) -> float:
        """The part of its time in which other work had the processor."""
        return min(0.99, self.waited_s / self.timed_s) if self.timed_s else 0.0

    def __str__(self) -> str:
        return f"{self.backend}{'' if self.engine == 'eager' else f' ({self.engine})'} at batch {self.batch}"


class Stopwatch:
    """Seconds spent inside units of work, each between `begin` and `end`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter,
                 processor: Callable[[], float] | None = time.thread_time) -> None:
        """processor: seconds that this thread has been on a processor; None if the clock is made up."""
        self.clock, self.processor, self.spent = clock, processor, 0.0
        self.deadline = math.inf  # in seconds spent in units, not on the wall clock
        self._began = 0.0

    def begin(self) -> None:
        self._began = self.clock()

    def end(self) -> None:
        self.spent = self.elapsed()

    def unit(self) -> float:
        """Seconds since the unit began; to be called inside one."""
        return self.clock() - self._began

    def elapsed(self) -> float:
        """Seconds spent in units; to be called inside one."""
        return self.spent + self.unit()

    def left(self) -> float:
        return self.deadline - self.elapsed()

    def timed(self, work: Iterator[None], cell: Cell) -> Generator[None, None, float]:
        """Do a cell's work and return its seconds on the processor, without those between units. Raises OutOfTime."""
        seconds, over = 0.0, False
        while True:
            if self.elapsed() > self.deadline:
                raise OutOfTime
            worked = self.processor() if self.processor else 0.0
            began = self.clock()
            try:
                next(work)
            except StopIteration:
                over = True
            took = self.clock() - began
            used = min(took, self.processor() - worked) if self.processor else took
            seconds += used
            cell.timed_s += took
            cell.waited_s += took - used
            if over:
                return seconds
            yield


class Measurement:
    """Step times by backend, rows and position: survey and round add to them, other methods read them."""

    def __init__(self, config: ModelConfig, rows: int, watch: Stopwatch) -> None:
        """rows: the largest batch."""
        self.config, self.watch = config, watch
        length = self._length = config.length
        first, tenth = min(first_position(config), length - 1), max(1, length // 10)
        self.coarse = sorted({first, length // 4, length // 2, length * 3 // 4, length - 1})
        self.positions = sorted({*self.coarse, max(first, tenth // 2), max(first, tenth - 1),
                                 length - tenth, length - 1 - tenth // 2})
        self.backends: dict[CellKind, Backend] = {}
        self.canvas = torch.randint(256, (rows, config.subpixels), dtype=torch.uint8,
                                    generator=torch.Generator().manual_seed(0))
        self._u = torch.full((rows, config.token_size, 2), 0.5)
        self._samples: dict[tuple[CellKind, int, int], list[float]] = {}  # step seconds by kind, rows, position

    def survey(self, cell: Cell) -> Iterator[None]:
        """Few positions, for a first figure."""
        yield from self._visit(cell, self.coarse[0], burst=1)
        self._samples.pop(self._key(cell, self.coarse[0]), None)  # it was only to warm up
        for t in self.coarse:
            if self._key(cell, t) not in self._samples:
                yield from self._visit(cell, t, burst=2)
        cell.round_seconds = self._round_seconds(cell)

    def round(self, cell: Cell) -> Iterator[None]:
        """Visit all positions, every second round backwards: so drift of the machine affects all of them alike."""
        for t in self.positions[:: -1 if cell.rounds % 2 else 1]:
            yield from self._visit(cell, t, BURST)
        cell.rounds += 1
        cell.round_seconds = self._round_seconds(cell)

    def decode(self, cell: Cell) -> Iterator[None]:
        """Draw the batch's images from start to end, with seeds 0, 1, 2, ..., and time that."""
        backend, clock = self.backends[cell.kind], self.watch.clock
        yield from backend.clear(cell.batch)
        began = clock()
        canvas = torch.zeros(cell.batch, self.config.subpixels, dtype=torch.uint8)
        noise = noise_of(self.config, np.arange(cell.batch), np.arange(self._length))
        seconds = clock() - began
        for t in range(0, self._length, backend.stride):
            rows = self._key(cell, t)[1]
            for group in range(0, cell.batch, rows):
                some = slice(group, group + rows)
                seconds += yield from self.watch.timed(backend.step(canvas[some], t, noise[some, t]), cell)
            yield
        cell.decodes.append(seconds)

    def steps(self, cell: Cell) -> dict[int, float]:
        """Seconds of a step of the batch, by position. If it goes in groups of rows, one group stands for all."""
        keys = [key for t in self.positions if (key := self._key(cell, t)) in self._samples]
        return {t: _usual(self._samples[kind, rows, t]) * cell.batch / rows for kind, rows, t in keys}

    def estimate(self, cell: Cell) -> float:
        """Seconds to decode the batch, estimated from its steps."""
        return integrate(self.steps(cell), self._length)

    def seconds(self, cell: Cell) -> float:
        """Seconds to decode the batch, on the processor: measured, else estimated."""
        estimate = self.estimate(cell)
        return estimate if cell.decoded is None else min(cell.decoded, SLACK * estimate)

    def disturbed(self, cell: Cell) -> str:
        """How other work slowed a cell down, in words; empty if it is not known to have."""
        if cell.waited > WAITED:
            return f"other work used its processor for {cell.waited:.0%} of the time"
        if cell.decoded is not None and cell.decoded > BUSY * (usual := self.estimate(cell)):
            return (f"other work kept the machine busy: a whole decode took {cell.decoded:.3g} s, and its typical "
                    f"steps add up to {usual:.3g} s")
        return ""

    def tail_over_head(self, cell: Cell) -> float:
        """Median step time in the last tenth of the positions / that in the first tenth."""
        steps, tenth = self.steps(cell), max(1, self._length // 10)
        costs = np.interp(np.arange(self._length), list(steps), list(steps.values()))
        return float(np.median(costs[-tenth:]) / np.median(costs[:tenth]))

    def _key(self, cell: Cell, t: int) -> tuple[CellKind, int, int]:
        """The key of a cell's samples. Batches larger than one pass through the network share samples."""
        return cell.kind, rows_together(cell.backend, self.config, cell.batch, t), t

    def _visit(self, cell: Cell, t: int, burst: int) -> Iterator[None]:
        """Time a cell's step at t, or the steps of a call that includes t. The first of a burst warms the caches."""
        began = self.watch.elapsed()
        key, backend = self._key(cell, t), self.backends[cell.kind]
        at = min(t, self._length - backend.stride)
        taken: list[float] = []
        while len(taken) < burst and sum(taken) < BURST_S:
            step = backend.step(self.canvas[: key[1]], at, self._u[: key[1]])
            taken.append((yield from self.watch.timed(step, cell)))
        self._samples.setdefault(key, []).append(min(taken) / backend.stride)
        cell.spent += self.watch.elapsed() - began
        yield

    def _round_seconds(self, cell: Cell) -> float:
        """Predicted seconds of the next round over the positions."""
        steps = self.steps(cell)
        at = np.interp(self.positions, list(steps), list(steps.values())).tolist()
        share = self.backends[cell.kind].stride / cell.batch
        passes = [x * self._key(cell, t)[1] * share for t, x in zip(self.positions, at, strict=True)]
        return sum(x * min(BURST, math.ceil(BURST_S / x)) for x in passes)


def integrate(seconds: dict[int, float], length: int) -> float:
    """The sum over positions 0..length-1 of seconds known at some of them, with straight lines between."""
    positions = sorted(seconds)
    return float(np.interp(np.arange(length), positions, [seconds[t] for t in positions]).sum())


def _usual(samples: Sequence[float]) -> float:
    """The lower quartile: other work on the machine can only add time, and comes in bursts."""
    return sorted(samples)[(len(samples) - 1) // 4]
