"""One model being served: its scheduler and its engine, turned one quantum at a time.

The service's worker and bulk work on the command line turn the same crank.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from server.engine import Engine, ImageSpec
from server.errors import QueueFull
from server.scheduler import Full, Row, Scheduler

QUANTUM_S = 0.050  # longest quantum: how long a newcomer waits, and how late a cancellation acts


@dataclass(frozen=True, slots=True)
class Turn:
    """What one quantum did."""

    joined: list[Row]
    moved: list[Row]     # rows that took steps and are still wanted, finished ones included
    finished: list[Row]
    rows: int            # rows in the quantum
    steps: int           # steps of the longest row
    subpixels: int       # of all rows
    seconds: float       # of decoding, prefill excluded


class Batcher:
    """Thread-safe where it says so; `turn` belongs to one thread."""

    def __init__(self, engine: Engine, max_queue: int) -> None:
        self.engine = engine
        config = engine.config
        self.scheduler = Scheduler(engine.slots, max_queue, config.subpixels)
        backend = {"linear": "linear", "softmax": "stateful-softmax"}[config.attention]
        self.labels = (engine.checkpoint.name, backend)       # as metrics name them
        self.row_subpixels = config.width * config.channels  # also the longest quantum: what a stream shows at once
        self.step_seconds = 0.0                            # smoothed; 0 before the first quantum
        self._specs: dict[str, Sequence[ImageSpec]] = {}
        self._lock = threading.Lock()

    def admit(self, request: str, images: int) -> None:
        """Reserve room, or raise QueueFull with the time until there is some. From any thread."""
        with self._lock:
            try:
                self.scheduler.admit(request, images)
            except Full as full:
                raise QueueFull(full.waiting, images, self.scheduler.max_queue,
                                max(1.0, full.steps * self.step_seconds)) from full

    def enqueue(self, request: str, specs: Sequence[ImageSpec]) -> list[Row]:
        """The admitted request's images, alike but for seed and temperature. From any thread."""
        with self._lock:
            self._specs[request] = specs
            return self.scheduler.enqueue(request, specs[0].prefix)

    def cancel(self, request: str) -> None:
        """From any thread; a running image's slot is free after the quantum under way."""
        with self._lock:
            self.scheduler.cancel(request)
            self._specs.pop(request, None)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def quantum(self) -> int:
        """k: steps that fit in QUANTUM_S at the speed last seen, at most one image row."""
        if not self.step_seconds:
            return 1
        return max(1, min(self.row_subpixels, int(QUANTUM_S / self.step_seconds)))

    def turn(self) -> Turn:
        """Let newcomers join, run one quantum, and let the finished leave."""
        with self._lock:
            joined = self.scheduler.join()
            plan = self.scheduler.plan(self.quantum())
            groups: dict[str, list[Row]] = {}
            for row in joined:
                groups.setdefault(row.request, []).append(row)
            specs = {request: self._specs[request] for request in groups}
        for request, rows in groups.items():
            self.engine.take([row.slot for row in rows], [specs[request][row.index] for row in rows])
        began = time.perf_counter()
        steps = plan[0][1] if plan else 0
        if steps:
            self.engine.quantum([row.slot for row, _ in plan], [row.position for row, _ in plan],
                                [count for _, count in plan])
        seconds = time.perf_counter() - began
        with self._lock:
            finished = self.scheduler.advance(plan)
        if steps:
            latest = seconds / steps
            self.step_seconds = latest if not self.step_seconds else 0.7 * self.step_seconds + 0.3 * latest
        moved = [row for row, _ in plan if not row.cancelled]
        return Turn(joined, moved, finished, len(plan), steps, sum(count for _, count in plan), seconds)

    def abandon(self) -> list[str]:
        """After a failed quantum: empty every running slot; returns the requests that lost an image."""
        with self._lock:
            lost = sorted({row.request for row in self.scheduler.running.values()})
            for request in lost:
                self.scheduler.cancel(request)
                self._specs.pop(request, None)
            self.scheduler.running.clear()
        return lost
