"""A comparison of one model's backends on this machine: time their steps, and whole images if there is time.

The work comes in short units, so that a service can fit it between live requests.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from linpix.model.checkpoint import Checkpoint
from linpix.model.packing import choose

from ..memory import free_bytes
from .backends import (
    BACKENDS,
    SPECS,
    Backend,
    CompiledBackend,
    config_of,
    first_position,
    random_net,
    state_bytes,
)
from .checkpoints import sources_of
from .measure import Cell, CellKind, Measurement, OutOfTime, Stopwatch
from .results import circumstances, findings

UNIT_S = 0.05        # a unit of work ends after this, so that live requests need not wait longer
ROUNDS = 40          # most rounds over the positions of one cell
ROUNDS_SHARE = 0.4   # of the time left after the survey, before whole images are decoded; time left then goes there too
MARGIN = 1.2         # a decode begins only if this many times its predicted time is left
DECODES = 9          # most whole decodes of a cell; several, as a hiccup may dominate a short one
DECODES_SHARE = 0.1  # of the budget, for all whole decodes but each cell's first
MEMORY_SHARE = 0.25  # of the free memory, at most, for one backend's states


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """What to compare, and for how long."""

    backends: tuple[str, ...] = BACKENDS
    batches: tuple[int, ...] = (1, 16, 64)  # images decoded together; 1 is always measured beside them
    budget_s: float = 60.0                  # time for measuring, without set-up

    def __post_init__(self) -> None:
        for backend in self.backends:
            if backend not in BACKENDS:
                raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if not self.backends:
            raise ValueError(f"backends must name at least one of {', '.join(BACKENDS)}, got none")
        for batch in self.batches:
            if type(batch) is not int or batch < 1:
                raise ValueError(f"batch must be an integer of at least 1, got {batch!r}")
        if not (math.isfinite(self.budget_s) and self.budget_s > 0):
            raise ValueError(f"budget must be a number of seconds above 0, got {self.budget_s!r}")


class Comparison:
    """Measure a checkpoint's backends against each other within a budget.

    `run` does the work, one short unit at each `next`; to cancel, stop calling it. Only time inside units
    counts. `report` is replaced, never changed.
    """

    def __init__(self, checkpoint: Checkpoint, twins: Sequence[Checkpoint], plan: ComparisonPlan, *, command: str = "",
                 clock: Callable[[], float] = time.perf_counter,
                 processor: Callable[[], float] | None = time.thread_time) -> None:
        """twins: see find_twins; attention that no checkpoint has gets random weights. Raises ValueError.

        clock, processor: see Stopwatch.
        """
        config = checkpoint.net.config
        sources = sources_of(checkpoint, twins)
        self.plan, self.progress = plan, 0.0
        best = choose(config_of("linear", config))
        precisions = {"eager": "fp32", best.engine: best.precision}  # by engine, for engines that can run here
        self._kinds: list[CellKind] = [(name, engine) for name in BACKENDS if name in plan.backends
                                       for engine in (reversed(precisions) if SPECS[name].compiled else ("eager",))]
        self.cells = [Cell(backend, engine, precisions[engine], batch, sources[backend])
                      for batch in sorted({1, *plan.batches}) for backend, engine in self._kinds]
        wanted = {config_of(cell.backend, config): cell.source for cell in self.cells}
        self._nets = {one: source.net if source else random_net(one) for one, source in wanted.items()}
        self._watch = Stopwatch(clock, processor)
        self._measured = Measurement(config, max(cell.batch for cell in self.cells), self._watch)
        self._difference: float | None = None
        self._circumstances = circumstances(checkpoint, sources, plan.budget_s, command)
        self._describe()

    def run(self) -> Iterator[None]:
        """Do the work; yields after each unit of about UNIT_S."""
        work = self._work()
        over = False
        try:
            while not over:
                self._watch.begin()
                over = True
                for _ in work:
                    if self._watch.unit() >= UNIT_S:
                        over = False
                        break
                self._watch.end()
                yield
        finally:
            self._measured.backends.clear()  # their memories are large, and only the report is still needed
            self._nets.clear()
        self._describe()
        self.progress = 1.0

    def _describe(self) -> None:
        self.report = self._circumstances | findings(self.cells, self._measured, self._difference)

    def _work(self) -> Iterator[None]:
        yield from self._set_up()
        began = self._watch.elapsed()
        self._watch.deadline = began + self.plan.budget_s
        for stage in (self._survey(), self._rounds(ROUNDS_SHARE), self._decodes(), self._rounds(1.0)):
            try:
                for _ in stage:
                    self.progress = min(0.99, (self._watch.elapsed() - began) / self.plan.budget_s)
                    yield
            except OutOfTime:
                pass  # what was measured counts, and later stages find no time either
            for cell in self.cells:
                if not (cell.round_seconds or cell.note):
                    cell.note = (f"the budget of {self.plan.budget_s:g} s ended before the steps were timed at "
                                 f"{len(self._measured.coarse)} positions")
            self._describe()

    def _survey(self) -> Iterator[None]:
        """A first figure for every cell, from few positions, before any gets a better one."""
        for cell in sorted(self.cells, key=lambda cell: self._kinds.index(cell.kind)):
            if not cell.note:
                yield from self._measured.survey(cell)

    def _rounds(self, share: float) -> Iterator[None]:
        """Rounds over all positions, the cell with the least time spent on it first."""
        until = self._watch.elapsed() + share * self._watch.left()
        while ready := [cell for cell in self._surveyed() if cell.rounds < ROUNDS
                        and self._watch.elapsed() + cell.round_seconds / (1 - cell.waited) < until]:
            yield from self._measured.round(min(ready, key=lambda cell: cell.spent))

    def _decodes(self) -> Iterator[None]:
        """Decode whole images while there is time; the fastest cells first, and short decodes several times."""
        again_s = DECODES_SHARE * self.plan.budget_s / len(self.cells)
        for cell in sorted(self._surveyed(), key=self._measured.seconds):
            while MARGIN * (seconds := self._measured.seconds(cell)) < self._watch.left() * (1 - cell.waited):
                yield from self._measured.decode(cell)
                if len(cell.decodes) == DECODES or sum(cell.decodes[1:]) + seconds > again_s:
                    break
            self._describe()

    def _surveyed(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.round_seconds]

    def _set_up(self) -> Iterator[None]:
        """Fill the memories, and measure how far the two softmax forms agree."""
        config, measured = self._measured.config, self._measured
        cells = {cell.kind: [one for one in self.cells if one.kind == cell.kind] for cell in self.cells}
        for kind, alike in cells.items():
            name, engine = kind
            net, free, rows = self._nets[config_of(name, config)], free_bytes(), 1
            for cell in alike:
                needed = state_bytes(name, net.config) * cell.batch
                if needed > MEMORY_SHARE * free:
                    cell.note = (f"its states would take {needed / 2**30:.1f} GiB, but only {MEMORY_SHARE:.0%} of the "
                                 f"free {free / 2**30:.1f} GiB may be used")
                else:
                    rows = max(rows, cell.batch)
            backend = CompiledBackend(net, rows) if engine == "compiled" else Backend(name, net, rows)
            measured.backends[kind] = backend
            yield from backend.fill(measured.canvas[:1])
            if name == "stateful-softmax" and ("softmax", "eager") in cells:
                length = config.length
                at = {t for t in (measured.coarse[0], length // 8, length // 4, length // 2, length - 1)
                      if t >= first_position(config)}
                self._difference = yield from backend.difference(measured.canvas[:1], sorted(at))
