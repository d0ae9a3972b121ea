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
    saturated: int       # elements of state that were clamped
    failed: list[str]    # requests with an image whose parameters were not finite: they are over


class Batcher:
    """Thread-safe where it says so; `turn` belongs to one thread."""

    def __init__(self, engine: Engine, max_queue: int) -> None:
        self.engine = engine
        config = engine.config
        self.scheduler = Scheduler(engine.slots, max_queue, config.subpixels)
        self.labels = (engine.checkpoint.name, engine.checkpoint.net.attention.steps_as)  # as metrics name them
        self.row_subpixels = config.width * config.channels  # also the longest quantum: what a stream shows at once
        self.step_seconds = 0.0                     # of the last quantum, smoothed; 0 before the first
        self._step_seconds: dict[int, float] = {}   # the same by the number of rows, in powers of two
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

    def turn(self) -> Turn:
        """Let newcomers join, run one quantum, and let the finished leave."""
        joined = self._join()
        with self._lock:
            plan = self.scheduler.plan(self._quantum(len(self.scheduler.running)))
        began, clamped = time.perf_counter(), self.engine.saturated
        steps = plan[0][1] if plan else 0
        lost: list[int] = []
        if steps:
            lost = self.engine.quantum([row.slot for row, _ in plan], [row.position for row, _ in plan],
                                       [count for _, count in plan])
        seconds = time.perf_counter() - began
        with self._lock:
            failed = sorted({row.request for row, _ in plan if row.slot in lost and not row.cancelled})
            for request in failed:
                self.scheduler.cancel(request)
                self._specs.pop(request, None)
            finished = self.scheduler.advance(plan)
            freed = self.scheduler.free if self.engine.poison else []
        for slot in freed:
            self.engine.pool.poison(slot)
        if steps:
            self._learn(len(plan), seconds / steps)
        moved = [row for row, _ in plan if not row.cancelled]
        return Turn(joined, moved, finished, len(plan), steps, sum(count for _, count in plan), seconds,
                    self.engine.saturated - clamped, failed)

    def _join(self) -> list[Row]:
        """Give slots to those who wait, one request after the other; what a long prefill delays joins next time."""
        joined: list[Row] = []
        began = time.perf_counter()
        while time.perf_counter() - began < QUANTUM_S:
            with self._lock:
                rows = self.scheduler.join()
                if not rows:
                    break
                specs = self._specs[rows[0].request]
            self.engine.take([row.slot for row in rows], [specs[row.index] for row in rows])
            joined += rows
        return joined

    def _quantum(self, rows: int) -> int:
        """k: steps that fit in QUANTUM_S at the speed last seen for so many rows, at most one image row.

        As many as the engine takes together, or a multiple of them.
        """
        stride = self.engine.stride
        seconds = self._step_seconds.get(rows.bit_length())
        if seconds is None:  # the next smaller size, as if each row cost the same
            known = [size for size in self._step_seconds if size < rows.bit_length()]
            if not known:
                return stride
            seconds = self._step_seconds[max(known)] * 2 ** (rows.bit_length() - max(known))
        return max(stride, min(self.row_subpixels, int(QUANTUM_S / seconds)) // stride * stride)

    def _learn(self, rows: int, seconds: float) -> None:
        before = self._step_seconds.get(rows.bit_length(), seconds)
        self.step_seconds = self._step_seconds[rows.bit_length()] = 0.7 * before + 0.3 * seconds

    def abandon(self) -> list[str]:
        """After a failed quantum: empty every running slot; returns the requests that lost an image."""
        with self._lock:
            lost = sorted({row.request for row in self.scheduler.running.values()})
            for request in lost:
                self.scheduler.cancel(request)
                self._specs.pop(request, None)
            self.scheduler.running.clear()
        return lost
