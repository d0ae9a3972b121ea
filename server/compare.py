"""Backends of one model side by side on this machine: measure their steps, and whole images where there is time.

The work comes in short units, so that a service can fit it between live requests.
"""

import dataclasses
import json
import math
import os
import platform
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model import checkpoint as checkpoints
from model.checkpoint import Checkpoint
from model.generate import noise_of
from model.packing import choose
from model.transformer import Transformer
from server.backends import (
    BACKENDS,
    Backend,
    CompiledBackend,
    attention_of,
    first_position,
    free_bytes,
    other_attention,
    random_net,
    rows_together,
    state_bytes,
)
from server.figures import PAPER

Kind = tuple[str, str]  # backend, engine
CHEAP_FIRST: tuple[Kind, ...] = (("linear", "compiled"), ("linear", "eager"), ("stateful-softmax", "eager"),
                                 ("softmax", "eager"))
UNIT_S = 0.05        # a unit of work ends after this, so that live requests get their turn
BURST, BURST_S = 4, 0.05  # a step is taken so often, or for so long, in a row, and the quickest counts
ROUNDS = 40          # over the positions of one cell, at most
ROUNDS_SHARE = 0.4   # of the budget, before whole images are decoded; what then is left goes there too
MARGIN = 1.2         # a decode is begun if this many times its predicted time is left
BUSY = 1.5           # a decode that took this many times its usual steps is remarked upon
MEMORY_SHARE = 0.25  # of the free memory, for one backend's states


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """What to compare, and for how long."""

    backends: tuple[str, ...] = BACKENDS
    batches: tuple[int, ...] = (1, 16, 64)  # images decoded together; 1 is always measured beside them
    budget_s: float = 60.0                  # time to measure in, set-up aside

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


def find_twins(checkpoint: Checkpoint, folder: Path) -> list[Checkpoint]:
    """The checkpoints in `folder` to compare this one with.

    Those trained as its twins, or as those of the model that it is a twin of; and that model, if no twin has its
    attention. Raises CheckpointError if there is one that cannot be read.
    """
    family = checkpoint.net.config.twin_of or checkpoint.name
    twins: list[Checkpoint] = []
    head: list[Checkpoint] = []
    for candidate in checkpoints.folders(folder):
        try:
            theirs = json.loads((candidate / "config.json").read_text())["architecture"]
            related, named = theirs.get("twin_of") == family, candidate.name == family
            known = theirs["attention"] in ("linear", "softmax")
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue  # not a checkpoint of ours, so not a twin either
        if known and (related or (named and candidate.name != checkpoint.name)):
            (twins if related else head).append(checkpoints.read(candidate))
    covered = {twin.net.config.attention for twin in twins}
    return twins + [model for model in head if model.net.config.attention not in covered]


def integrate(seconds: dict[int, float], length: int) -> float:
    """The sum over positions 0..length-1 of what is known at some of them, with straight lines between."""
    positions = sorted(seconds)
    return float(np.interp(np.arange(length), positions, [seconds[t] for t in positions]).sum())


def _usual(samples: Sequence[float]) -> float:
    """The lower quartile: what else the machine does can only add, and does so in bursts of its own."""
    return sorted(samples)[(len(samples) - 1) // 4]


class _OutOfTime(Exception):
    """The budget ended inside a measurement."""


@dataclass(slots=True, eq=False)
class Cell:
    """One backend in one engine at one batch size: a line of the report."""

    backend: str
    engine: str
    batch: int
    spent: float = 0.0
    rounds: int = 0
    round_seconds: float = 0.0    # what the next round will take; 0 before the survey
    decoded: float | None = None  # seconds of a whole decode
    note: str = ""                # why there is no figure

    @property
    def kind(self) -> Kind:
        return self.backend, self.engine

    def __str__(self) -> str:
        return f"{self.backend}{'' if self.engine == 'eager' else ' (compiled)'} at batch {self.batch}"


class Comparison:
    """Measure a checkpoint's backends against each other within a budget.

    `run` does the work, one short unit at each `next`; to cancel, stop calling it. Only time inside units
    counts. `report` and `progress` may be read from other threads: they are replaced, never changed.
    """

    def __init__(self, checkpoint: Checkpoint, twins: Sequence[Checkpoint], plan: ComparisonPlan, *,
                 command: str = "", clock: Callable[[], float] = time.perf_counter) -> None:
        """twins: see find_twins; an attention that nobody has gets random weights. Raises ValueError."""
        if checkpoint.net.config.attention == "lsh":
            raise ValueError(f"{checkpoint.name} has lsh attention, which is not compared yet; "
                             "name a linear or softmax model")
        for twin in twins:
            _check_twin(checkpoint, twin)
        config = self._config = checkpoint.net.config
        self.plan, self.progress, self._clock = plan, 0.0, clock
        self._sources: dict[str, Checkpoint | None] = {other_attention(config.attention): None}
        self._sources |= {twin.net.config.attention: twin for twin in twins if _comparable(checkpoint, twin)}
        if config.twin_of or config.attention not in self._sources:  # a twin stands for itself
            self._sources[config.attention] = checkpoint
        other = self._sources[other_attention(config.attention)]
        length = self._length = config.subpixels
        first, tenth = min(first_position(config), length - 1), max(1, length // 10)
        self._coarse = sorted({first, length // 4, length // 2, length * 3 // 4, length - 1})
        self._positions = sorted({*self._coarse, max(first, tenth // 2), max(first, tenth - 1),
                                  length - tenth, length - 1 - tenth // 2})
        best = choose(dataclasses.replace(config, attention="linear"))
        self._precisions = {"eager": "fp32", best.engine: best.precision}  # by engine, of those that can run here
        self._kinds = [kind for kind in CHEAP_FIRST if kind[0] in plan.backends and kind[1] in self._precisions]
        self.cells = [Cell(*kind, batch) for batch in sorted({1, *plan.batches}) for kind in self._kinds]
        self._backends: dict[Kind, Backend] = {}
        self._samples: dict[tuple[Kind, int, int], list[float]] = {}  # step seconds by kind, rows, position
        self._spent = self._unit_began = 0.0
        self._deadline = math.inf  # in time spent, not on the wall
        self._difference: float | None = None
        self._circumstances: dict[str, Any] = {
            "model": checkpoint.name, "digest": checkpoint.digest, "attention": config.attention,
            "twin": other.name if other else None, "subpixels": length, "layers": config.layers,
            "d_model": config.d_model, "machine": _machine(), "commit": checkpoints.commit(), "command": command,
            "budget_s": plan.budget_s, "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "paper": PAPER,
        }
        self.report = self._describe()

    def run(self) -> Iterator[None]:
        """Units of about UNIT_S each."""
        work = self._work()
        over = False
        try:
            while not over:
                self._unit_began = self._clock()
                over = True
                for _ in work:
                    if self._clock() - self._unit_began >= UNIT_S:
                        over = False
                        break
                self._spent = self._elapsed()
                yield
        finally:
            self._backends.clear()  # their memories are large, and the report outlives them
        self.report, self.progress = self._describe(), 1.0

    def _elapsed(self) -> float:
        """Seconds spent in units; asked inside one."""
        return self._spent + self._clock() - self._unit_began

    def _work(self) -> Iterator[None]:
        yield from self._set_up()
        began = self._elapsed()
        self._deadline = began + self.plan.budget_s
        for stage in (self._survey(), self._rounds(ROUNDS_SHARE), self._decodes(), self._rounds(1.0)):
            try:
                for _ in stage:
                    self.progress = min(0.99, (self._elapsed() - began) / self.plan.budget_s)
                    yield
            except _OutOfTime:
                pass  # what is known stands, and the later stages find no time either
            for cell in self.cells:
                if not (cell.round_seconds or cell.note):
                    cell.note = (f"the budget of {self.plan.budget_s:g} s ended before its steps were timed "
                                 f"at {len(self._coarse)} positions")
            self.report = self._describe()

    def _survey(self) -> Iterator[None]:
        """Each cell's figure from few positions, before any gets a better one."""
        for cell in sorted(self.cells, key=lambda cell: CHEAP_FIRST.index(cell.kind)):
            if not cell.note:
                yield from self._visit(cell, self._coarse[0], burst=1)
                self._samples.pop(self._key(cell, self._coarse[0]), None)  # that was to warm up
                for t in self._coarse:
                    if self._key(cell, t) not in self._samples:
                        yield from self._visit(cell, t, burst=2)
                cell.round_seconds = self._round_seconds(cell)

    def _rounds(self, share: float) -> Iterator[None]:
        """Over all positions, there and back: drift of the machine then hits all of them alike."""
        until = self._elapsed() + share * (self._deadline - self._elapsed())
        while ready := [cell for cell in self._surveyed() if cell.rounds < ROUNDS
                        and self._elapsed() + cell.round_seconds < until]:
            cell = min(ready, key=lambda cell: cell.spent)
            for t in self._positions[:: -1 if cell.rounds % 2 else 1]:
                yield from self._visit(cell, t)
            cell.rounds += 1
            cell.round_seconds = self._round_seconds(cell)

    def _decodes(self) -> Iterator[None]:
        """Whole images, as far as there is time; the fastest cells first."""
        for cell in sorted(self._surveyed(), key=self._seconds):
            if MARGIN * self._seconds(cell) < self._deadline - self._elapsed():
                yield from self._decode(cell)
                self.report = self._describe()

    def _surveyed(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.round_seconds]

    def _key(self, cell: Cell, t: int) -> tuple[Kind, int, int]:
        """Cells whose batch is larger than what goes through the network together share their samples."""
        return cell.kind, rows_together(cell.backend, self._config, cell.batch, t), t

    def _steps(self, cell: Cell) -> dict[int, float]:
        """Seconds of a step of the batch, by position. Of groups of rows, one stands for all."""
        keys = [key for t in self._positions if (key := self._key(cell, t)) in self._samples]
        return {t: _usual(self._samples[kind, rows, t]) * cell.batch / rows for kind, rows, t in keys}

    def _seconds(self, cell: Cell) -> float:
        """Of decoding the batch: measured if it was, else from the steps."""
        return integrate(self._steps(cell), self._length) if cell.decoded is None else cell.decoded

    def _tail_over_head(self, cell: Cell) -> float:
        """Median step in the last tenth of the positions over that in the first."""
        steps, tenth = self._steps(cell), max(1, self._length // 10)
        costs = np.interp(np.arange(self._length), list(steps), list(steps.values()))
        return float(np.median(costs[-tenth:]) / np.median(costs[:tenth]))

    def _set_up(self) -> Iterator[None]:
        """Networks, memories, and how far the two softmax forms agree."""
        generator = torch.Generator().manual_seed(0)
        rows = max(cell.batch for cell in self.cells)
        self._canvas = torch.randint(256, (rows, self._length), dtype=torch.uint8, generator=generator)
        self._u = torch.full((rows, 2), 0.5)
        nets: dict[str, Transformer] = {}
        for kind in self._kinds:
            name, engine = kind
            if (attention := attention_of(name)) not in nets:
                source = self._sources[attention]
                nets[attention] = source.net if source else random_net(self._config, attention)
                yield
            net, free, rows = nets[attention], free_bytes(), 1
            for cell in self.cells:
                if cell.kind == kind:
                    needed = state_bytes(name, net.config) * cell.batch
                    if needed > MEMORY_SHARE * free:
                        cell.note = (f"its states would take {needed / 2**30:.1f} GiB, and of the free "
                                     f"{free / 2**30:.1f} GiB at most {MEMORY_SHARE:.0%} may be used")
                    else:
                        rows = max(rows, cell.batch)
            backend = self._backends[kind] = (CompiledBackend(net, rows) if engine == "compiled"
                                              else Backend(name, net, rows))
            yield from backend.fill(self._canvas[:1])
            if name == "stateful-softmax" and ("softmax", "eager") in self._kinds:
                length = self._length
                at = {t for t in (self._coarse[0], length // 8, length // 4, length // 2, length - 1)
                      if t >= first_position(self._config)}
                self._difference = yield from backend.difference(self._canvas[:1], sorted(at))

    def _timed(self, work: Iterator[None]) -> Generator[None, None, float]:
        """Carry work out and return its seconds, those between units aside. Raises _OutOfTime."""
        seconds = 0.0
        while True:
            if self._elapsed() > self._deadline:
                raise _OutOfTime
            began = self._clock()
            try:
                next(work)
            except StopIteration:
                return seconds + self._clock() - began
            seconds += self._clock() - began
            yield

    def _visit(self, cell: Cell, t: int, burst: int = BURST) -> Iterator[None]:
        """Time a step of a cell at t, or a call's steps that t is one of. The first of a burst warms the caches."""
        began = self._elapsed()
        key, backend = self._key(cell, t), self._backends[cell.kind]
        at = min(t, self._length - backend.stride)
        taken: list[float] = []
        while len(taken) < burst and sum(taken) < BURST_S:
            step = backend.step(self._canvas[: key[1]], at, self._u[: key[1]])
            taken.append((yield from self._timed(step)))
        self._samples.setdefault(key, []).append(min(taken) / backend.stride)
        cell.spent += self._elapsed() - began
        yield

    def _round_seconds(self, cell: Cell) -> float:
        """What one round over the positions is going to take."""
        steps = self._steps(cell)
        at = np.interp(self._positions, list(steps), list(steps.values())).tolist()
        share = self._backends[cell.kind].stride / cell.batch
        passes = [x * self._key(cell, t)[1] * share for t, x in zip(self._positions, at, strict=True)]
        return sum(x * min(BURST, math.ceil(BURST_S / x)) for x in passes)

    def _decode(self, cell: Cell) -> Iterator[None]:
        """Draw the batch's images from start to end, with seeds 0, 1, 2, ..., and time that."""
        backend = self._backends[cell.kind]
        yield from backend.clear(cell.batch)
        began = self._clock()
        canvas = torch.zeros(cell.batch, self._length, dtype=torch.uint8)
        noise = noise_of(np.arange(cell.batch), np.arange(self._length))
        seconds = self._clock() - began
        for t in range(0, self._length, backend.stride):
            rows = self._key(cell, t)[1]
            for group in range(0, cell.batch, rows):
                some = slice(group, group + rows)
                seconds += yield from self._timed(backend.step(canvas[some], t, noise[some, t]))
            yield
        cell.decoded = seconds

    def _describe(self) -> dict[str, Any]:
        """report.json, as far as it is."""
        names = dict.fromkeys(name for name, _ in self._kinds)
        lost = [name for name in names if self._sources[attention_of(name)] is None]
        busy = [f"{cell.decoded:.3g} s for {usual:.3g} s ({cell})"
                for cell in self.cells if cell.decoded is not None
                and cell.decoded > BUSY * (usual := integrate(self._steps(cell), self._length))]
        notes = [f"No figure for {cell}: {cell.note}."
                 for cell in self.cells if cell.note]
        if lost:
            notes.append(f"Random weights of the same architecture for {' and '.join(lost)}, for want of a "
                         "checkpoint: speed does not depend on the weights, and bits/dim is not given.")
        told = [f"{name} saw {facts['images']:,} images in {facts['minutes']:.0f} minutes"
                for name, facts in ((s.name, s.provenance) for s in self._sources.values() if s) if "minutes" in facts]
        if told:
            notes.append(f"Training behind bits/dim: {', '.join(told)}.")
        if busy:
            notes.append("Other work kept the machine busy: whole decodes took longer than their usual steps "
                         f"add up to, namely {', '.join(busy)}.")
        return self._circumstances | {
            "spent_s": _rounded(self._spent), "largest_logit_difference": _rounded(self._difference),
            "notes": notes, "results": [self._result(cell) for cell in self.cells]}

    def _result(self, cell: Cell) -> dict[str, Any]:
        source = self._sources[attention_of(cell.backend)]
        steps, seconds = (self._steps(cell), self._seconds(cell)) if cell.round_seconds else ({}, None)
        estimated = cell.decoded is None
        return {
            "backend": cell.backend, "engine": cell.engine, "weights": source.name if source else None,
            "precision": self._precisions[cell.engine], "batch": cell.batch,
            "images_per_second": _rounded(cell.batch / seconds if seconds else None),
            "seconds_per_image": _rounded(seconds),  # until the batch's images are done
            "state_bytes": state_bytes(cell.backend, self._config),
            "step_seconds": [{"position": t, "seconds": _rounded(x)} for t, x in steps.items()],
            "tail_over_head": _rounded(self._tail_over_head(cell)) if seconds else None,
            "estimated": estimated, "positions": list(steps) if estimated and seconds else None,
            "bits_per_dim": _bits_per_dim(source), "note": cell.note or None,
        }


def _comparable(checkpoint: Checkpoint, twin: Checkpoint) -> bool:
    """Whether a twin may stand for its attention: of several linear ones that with the feature map of the model."""
    ours, theirs = checkpoint.net.config, twin.net.config
    return theirs.attention != "linear" or (theirs.feature_map, theirs.random_features) == (
        ours.feature_map, ours.random_features)


def _check_twin(checkpoint: Checkpoint, twin: Checkpoint) -> None:
    ours, theirs = checkpoint.net.config, twin.net.config
    free = {"attention", "twin_of", "feature_map", "random_features", "lsh_rounds", "lsh_buckets", "lsh_chunk", "eps",
            "first_marginal"}  # these may differ
    names = [entry.name for entry in dataclasses.fields(ours) if entry.name not in free]
    if differing := [name for name in names if getattr(ours, name) != getattr(theirs, name)]:
        raise ValueError(f"{twin.name} cannot be compared with {checkpoint.name}: "
                         f"they differ in {', '.join(differing)}")


def _bits_per_dim(source: Checkpoint | None) -> float | None:
    """Of the most test images that it was evaluated on, else of validation."""
    bits = dict(source.provenance.get("bits_per_dim") or {}) if source else {}
    tests = sorted((name for name in bits if name.startswith("test")), key=lambda name: (len(name), name))
    return next((float(bits[name]) for name in (*reversed(tests), "validation") if bits.get(name)), None)


def _rounded(x: float | None) -> float | None:
    """To five digits: more would be noise."""
    return None if x is None else float(f"{x:.5g}")


def _machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass  # not Linux
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(),
            "torch": torch.__version__, "platform": platform.platform(), "load": round(os.getloadavg()[0], 2)}
