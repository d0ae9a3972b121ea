"""A comparison of one model's backends on this machine: time their steps, and whole images if there
is time.

The work comes in short units, so that a service can fit it between live requests.
"""

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from typing import Any

import torch

from linpix.model.checkpoint import Checkpoint
from linpix.model.choice import choose
from linpix.model.config import ModelConfig
from linpix.model.machine import processor_name
from linpix.model.provenance import commit
from linpix.model.transformer import Transformer

from ..errors import InvalidRequest
from ..memory import free_bytes
from .backends import Backend, CompiledBackend, backends, config_of, is_stateful, random_net
from .checkpoints import sources_of
from .measure import Cell, Stopwatch
from .report import PAPER, Report, Result, listed

UNIT_S = 0.05  # a unit of work ends after this, so that live requests need not wait longer
ROUNDS = 40  # most rounds over the positions of one cell
# of the time left after the survey, before whole images are decoded; time left then goes there too
ROUNDS_SHARE = 0.4
MARGIN = 1.2  # a decode begins only if this many times its predicted time is left
DECODES = 9  # most whole decodes of a cell; several, as a hiccup may dominate a short one
DECODES_SHARE = 0.1  # of the budget, for all whole decodes but each cell's first
MEMORY_SHARE = 0.25  # of the free memory, at most, for one backend's states


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """What to compare, and for how long."""

    backends: tuple[str, ...] = field(default_factory=backends)
    # images decoded together; 1 is always measured beside them
    batches: tuple[int, ...] = (1, 16, 64)
    budget_s: float = 60.0  # time for measuring, without set-up

    def __post_init__(self) -> None:
        known = backends()
        for backend in self.backends:
            if backend not in known:
                raise InvalidRequest(
                    f"backend must be one of {', '.join(known)}, got {backend!r}",
                    param="backends",
                )
        if not (math.isfinite(self.budget_s) and self.budget_s > 0):
            raise InvalidRequest(
                f"budget must be a number of seconds above 0, got {self.budget_s!r}", param="budget"
            )


class Comparison:
    """Measure a checkpoint's backends against each other within a budget.

    `run` does the work, one short unit at each `next`; to cancel, stop calling it. Only time inside
    units counts. `report` is replaced, never changed.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        twins: Sequence[Checkpoint],
        plan: ComparisonPlan,
        *,
        command: str = "",
        clock: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        """twins: see find_twins; attention that no checkpoint has gets random weights. Raises
        ValueError.

        clock, processor: see Stopwatch.
        """
        own_config = checkpoint.net.config
        sources, batches = sources_of(checkpoint, twins), sorted({1, *plan.batches})
        self.plan, self.progress, self._watch = plan, 0.0, Stopwatch(clock, processor)
        nets: dict[ModelConfig, Transformer] = {}  # several backends may share one
        # notes: by name and batch
        self._backends, notes = list[Backend](), dict[tuple[str, int], str]()
        for name in backends():
            if name not in plan.backends:
                continue
            config, source = config_of(name, own_config), sources[name]
            if config not in nets:
                nets[config] = source.net if source else random_net(config)
            net = nets[config]
            free = free_bytes()
            rows = 1
            for batch in batches:
                needed = batch * (net.attention.state_bytes if is_stateful(name) else 0)
                if needed > MEMORY_SHARE * free:
                    notes[name, batch] = (
                        f"its states would take {needed / 2**30:.1f} GiB, but only "
                        f"{MEMORY_SHARE:.0%} of the free {free / 2**30:.1f} GiB may be used"
                    )
                else:
                    rows = batch
            if name == "linear" and choose(config).engine == "compiled":
                self._backends.append(CompiledBackend(net, rows))
            self._backends.append(Backend(name, net, rows))
        self.cells: list[Cell] = []
        for batch, backend in product(batches, self._backends):
            note = notes.get((backend.name, batch), "")
            self.cells.append(Cell(backend, batch, sources[backend.name], self._watch, note))
        # of the parameters of the two softmax forms, once it is measured
        self._difference: float | None = None
        self._circumstances: Report = {  # what is known before anything is measured
            "model": checkpoint.name,
            "digest": checkpoint.digest,
            "attention": own_config.attention,
            "twins": sorted({one.name for one in sources.values() if one} - {checkpoint.name}),
            "subpixels": own_config.subpixels,
            "tokens": own_config.length,
            "layers": own_config.layers,
            "d_model": own_config.d_model,
            "machine": {
                "cpu": processor_name(),
                "cores": os.cpu_count(),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "platform": platform.platform(),
                "load": round(os.getloadavg()[0], 2),
            },
            "commit": commit(),
            "command": command,
            "budget_s": plan.budget_s,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "paper": PAPER,
        }
        self._describe()

    def run(self) -> Iterator[None]:
        """Do the work; yields after each unit of about UNIT_S."""
        yield from self._watch.units(self._work(), UNIT_S)
        self._describe()
        self.progress = 1.0

    def _describe(self) -> None:
        self.report = self._circumstances | {
            "spent_s": _rounded(self._watch.spent),
            "largest_logit_difference": _rounded(self._difference),
            "notes": _notes(self.cells),
            "results": [_result(cell) for cell in self.cells],
        }

    def _work(self) -> Iterator[None]:
        # fill the memories, and measure how far the two softmax forms agree
        for backend in self._backends:
            yield from backend.fill()
            if backend.name == "stateful-softmax" and "softmax" in self.plan.backends:
                self._difference = yield from backend.difference()
        began = self._watch.elapsed()
        self._watch.deadline = began + self.plan.budget_s
        for stage in (
            self._survey(),
            self._rounds(ROUNDS_SHARE),
            self._decodes(),
            self._rounds(1.0),
        ):
            # what was measured counts, and later stages find no time either
            with suppress(TimeoutError):
                for _ in stage:
                    self.progress = min(0.99, (self._watch.elapsed() - began) / self.plan.budget_s)
                    yield
            for cell in self.cells:
                if not (cell.round_seconds or cell.note):
                    cell.note = (
                        f"the budget of {self.plan.budget_s:g} s ended before the steps were timed"
                        f" at {len(cell.backend.coarse)} positions"
                    )
            self._describe()

    def _survey(self) -> Iterator[None]:
        """A first figure for every cell, from few positions, before any gets a better one."""
        for cell in sorted(self.cells, key=lambda cell: self._backends.index(cell.backend)):
            if not cell.note:
                yield from cell.survey()

    def _rounds(self, share: float) -> Iterator[None]:
        """Rounds over all positions, the cell with the least time spent on it first."""
        until = self._watch.elapsed() + share * self._watch.left()
        while ready := [
            cell
            for cell in self._surveyed()
            if cell.rounds < ROUNDS
            and self._watch.elapsed() + cell.round_seconds / (1 - cell.waited) < until
        ]:
            yield from min(ready, key=lambda cell: cell.spent).round()

    def _decodes(self) -> Iterator[None]:
        """Decode whole images while there is time; the fastest cells first, and short decodes
        several times.
        """
        again_s = DECODES_SHARE * self.plan.budget_s / len(self.cells)
        for cell in sorted(self._surveyed(), key=Cell.seconds):
            seconds = cell.seconds()
            while MARGIN * seconds < self._watch.left() * (1 - cell.waited):
                yield from cell.decode()
                if len(cell.decodes) == DECODES or sum(cell.decodes[1:]) + seconds > again_s:
                    break
                seconds = cell.seconds()
            self._describe()

    def _surveyed(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.round_seconds]


# --- the report ---


def _result(cell: Cell) -> Result:
    backend, estimated = cell.backend, cell.decoded is None
    weights = bits_per_dim = None
    if cell.source:
        weights = cell.source.name
        bits_per_dim, _ = _bits_per_dim(cell.source.provenance)
    steps: dict[int, float] = {}
    speed = seconds = tail_over_head = positions = None
    disturbed = ""
    if cell.round_seconds:
        steps, seconds, disturbed = cell.steps(), cell.seconds(), cell.disturbed()
        speed, tail_over_head = cell.batch / seconds, cell.tail_over_head()
        positions = [*steps] if estimated else None
    return {
        "backend": backend.name,
        "engine": backend.engine,
        "weights": weights,
        "precision": backend.precision,
        "batch": cell.batch,
        "images_per_second": _rounded(speed),
        "seconds_per_image": _rounded(seconds),  # until the batch's images are done
        "state_bytes": backend.state_bytes,
        "step_seconds": [{"position": t, "seconds": _rounded(x)} for t, x in steps.items()],
        "tail_over_head": _rounded(tail_over_head),
        "estimated": estimated,
        "positions": positions,
        "bits_per_dim": bits_per_dim,
        "exception": backend.net.attention.exception or None,
        "disturbed": bool(disturbed),
        "note": cell.note or disturbed or None,
    }


def _notes(cells: Sequence[Cell]) -> list[str]:
    notes = [f"No figure for {cell}: {cell.note}." for cell in cells if cell.note]
    exceptions: dict[str, list[str]] = {}
    for name, backend in {cell.backend.name: cell.backend for cell in cells}.items():
        exceptions.setdefault(backend.net.attention.exception, []).append(name)
    notes += [
        f"{text}, so bits/dim of {listed(names)} is not strictly autoregressive (*). Drawing does"
        " not see later sub-pixels, since it computes the prefix again at each position."
        for text, names in exceptions.items()
        if text
    ]
    if lost := list(dict.fromkeys(cell.backend.name for cell in cells if cell.source is None)):
        notes.append(
            f"{listed(lost)} used random weights of the same architecture, because there is no"
            " checkpoint. Speed does not depend on the weights; bits/dim is not given."
        )
    sources = {cell.source.name: cell.source.provenance for cell in cells if cell.source}
    if trained := [
        f"{name} saw {facts['images']:,} images in {facts['minutes']:.0f} minutes"
        for name, facts in sources.items()
        if "minutes" in facts
    ]:
        notes.append(f"Training of the models whose bits/dim is given: {', '.join(trained)}.")
    splits: dict[str, list[str]] = {}
    for name, facts in sources.items():
        splits.setdefault(_bits_per_dim(facts)[1], []).append(name)
    if measured_on := [f"{split} for {listed(names)}" for split, names in splits.items() if split]:
        notes.append(f"bits/dim was measured on {', on '.join(measured_on)}.")
    if busy := [cell.waited for cell in cells if cell.round_seconds and cell.disturbed()]:
        notes.append(
            f"Other work used the processor of the rows marked † for up to {max(busy):.0%} of the"
            " time. Speeds are of processor time; those of such rows may be too low by a quarter."
        )
    return notes


def _bits_per_dim(provenance: dict[str, Any]) -> tuple[float | None, str]:
    """bits/dim on the largest number of test images, else on validation images; and on which, in
    words.
    """
    bits = dict(provenance.get("bits_per_dim") or {})
    tests = {
        name: int(name.removeprefix("test_"))
        for name in bits
        if name.removeprefix("test_").isdecimal()
    }
    for name in (*sorted(tests, key=tests.__getitem__, reverse=True), "validation"):
        if bits.get(name):
            return float(bits[name]), (
                f"{tests[name]:,} test images" if name in tests else "validation images"
            )
    return None, ""


def _rounded(x: float | None) -> float | None:
    """To five digits: more would be noise."""
    return None if x is None else float(f"{x:.5g}")
