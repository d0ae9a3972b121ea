"""A comparison of one model's backends on this machine: time their steps, and whole images if there is time.

The work comes in short units, so that a service can fit it between live requests.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from linpix.model.checkpoint import Checkpoint
from linpix.model.packing import choose

from ..errors import InvalidRequest
from ..memory import free_bytes
from .backends import BACKENDS, STATEFUL, Backend, CompiledBackend, config_of, random_net
from .checkpoints import sources_of
from .measure import Cell, OutOfTime, Stopwatch
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
                raise InvalidRequest(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}", param="backends")
        if not self.backends:
            raise InvalidRequest(f"backends must name at least one of {', '.join(BACKENDS)}, got none",
                                 param="backends")
        for batch in self.batches:
            if type(batch) is not int or batch < 1:
                raise InvalidRequest(f"batch must be an integer of at least 1, got {batch!r}", param="batch")
        if not (math.isfinite(self.budget_s) and self.budget_s > 0):
            raise InvalidRequest(f"budget must be a number of seconds above 0, got {self.budget_s!r}", param="budget")


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
        sources, batches = sources_of(checkpoint, twins), sorted({1, *plan.batches})
        self.plan, self.progress, self._watch = plan, 0.0, Stopwatch(clock, processor)
        wanted = {name: config_of(name, checkpoint.net.config) for name in BACKENDS if name in plan.backends}
        nets = {config: source.net if (source := sources[name]) else random_net(config)
                for name, config in wanted.items()}
        self._backends, notes = list[Backend](), dict[tuple[str, int], str]()  # notes: by name and batch
        for name, config in wanted.items():
            net, free, rows = nets[config], free_bytes(), 1
            for batch in batches:
                needed = batch * (net.attention.state_bytes if name in STATEFUL else 0)
                if needed > MEMORY_SHARE * free:
                    notes[name, batch] = (f"its states would take {needed / 2**30:.1f} GiB, but only "
                                          f"{MEMORY_SHARE:.0%} of the free {free / 2**30:.1f} GiB may be used")
                else:
                    rows = batch
            if name == "linear" and choose(config).engine == "compiled":
                self._backends.append(CompiledBackend(net, rows))
            self._backends.append(Backend(name, net, rows))
        self.cells = [Cell(backend, batch, sources[backend.name], self._watch, notes.get((backend.name, batch), ""))
                      for batch in batches for backend in self._backends]
        self._difference: float | None = None
        self._circumstances = circumstances(checkpoint, sources, plan.budget_s, command)
        self._describe()

    def run(self) -> Iterator[None]:
        """Do the work; yields after each unit of about UNIT_S."""
        work = self._work()
        over = False
        while not over:
            self._watch.begin()
            over = True
            for _ in work:
                if self._watch.unit() >= UNIT_S:
                    over = False
                    break
            self._watch.end()
            yield
        self._describe()
        self.progress = 1.0

    def _describe(self) -> None:
        self.report = self._circumstances | findings(self.cells, self._watch.spent, self._difference)

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
                                 f"{len(cell.backend.coarse)} positions")
            self._describe()

    def _survey(self) -> Iterator[None]:
        """A first figure for every cell, from few positions, before any gets a better one."""
        for cell in sorted(self.cells, key=lambda cell: self._backends.index(cell.backend)):
            if not cell.note:
                yield from cell.survey()

    def _rounds(self, share: float) -> Iterator[None]:
        """Rounds over all positions, the cell with the least time spent on it first."""
        until = self._watch.elapsed() + share * self._watch.left()
        while ready := [cell for cell in self._surveyed() if cell.rounds < ROUNDS
                        and self._watch.elapsed() + cell.round_seconds / (1 - cell.waited) < until]:
            yield from min(ready, key=lambda cell: cell.spent).round()

    def _decodes(self) -> Iterator[None]:
        """Decode whole images while there is time; the fastest cells first, and short decodes several times."""
        again_s = DECODES_SHARE * self.plan.budget_s / len(self.cells)
        for cell in sorted(self._surveyed(), key=Cell.seconds):
            while MARGIN * (seconds := cell.seconds()) < self._watch.left() * (1 - cell.waited):
                yield from cell.decode()
                if len(cell.decodes) == DECODES or sum(cell.decodes[1:]) + seconds > again_s:
                    break
            self._describe()

    def _surveyed(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.round_seconds]

    def _set_up(self) -> Iterator[None]:
        """Fill the memories, and measure how far the two softmax forms agree."""
        for backend in self._backends:
            yield from backend.fill()
            if backend.name == "stateful-softmax" and "softmax" in self.plan.backends:
                self._difference = yield from backend.difference()
