"""One model being served: its scheduler and its engine, turned one quantum at a time.

The service's worker and bulk work on the command line turn the same crank. A quantum that throws is run again without
the rows that make it throw, and only their requests end.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from server import logs
from server.engine import Engine, ImageSpec
from server.errors import DeadlineUnreachable, EngineLost, NotFinite, QueueFull
from server.faults import Faults
from server.isolation import Outcome, Plan, isolate
from server.pace import LEAST_MARGIN, Margin, Pace
from server.prefill import Prefills
from server.scheduler import Full, Row, Scheduler

logger = logging.getLogger("linpix")
RESTORED = 2       # rows put back in one call: a prefill of all that they have, and the watchdog waits
HOPELESS = 3       # quanta in a row of which nothing could be decoded, and no probe either: the engine is lost
QUANTUM_S = 0.050  # longest quantum, and prefill between two: how long a newcomer waits, how late a cancellation acts
STALE_S = 5.0      # an idle engine's pace is forgotten: were it wrong, and all refused for it, nothing would mend it


@dataclass(slots=True)
class Terms:
    """What an admitted request was told; times are of time.perf_counter."""

    until: float  # when it is to be done
    whole: bool   # its images have no known pixels, as far as can be told before they are there
    promised: float = math.inf  # when it will be done, which is looked at only where it may be too late
    told: float = 0.0           # when that was foreseen


@dataclass(frozen=True, slots=True)
class Turn:
    """What one quantum did."""

    joined: list[Row]
    joined_at: float     # of time.monotonic
    late: list[str]      # requests that had their turn when there was no time left for them, and are over
    moved: list[Row]     # rows that took steps and are still wanted, finished ones included
    finished: list[Row]
    rows: int            # rows in the quantum
    steps: int           # steps of the longest row
    subpixels: int       # of all rows
    seconds: float       # of decoding, prefill excluded
    saturated: int       # elements of state that were clamped
    failed: dict[str, Exception]  # requests that are over: NotFinite, or what the engine threw at an image of theirs
    retries: int         # runs of the quantum after the first


class Batcher:
    """Thread-safe where it says so; `turn` belongs to one thread."""

    def __init__(self, engine: Engine, max_queue: int, faults: Faults | None = None) -> None:
        self.engine, self._faults = engine, faults
        self.beat: Callable[[], None] = lambda: None  # called before each call of the engine
        # seconds until so many of the uploads that hold room in queues are decoded
        self.decoded_s: Callable[[int], float] = lambda uploads: 0.0
        config = engine.config
        self.scheduler = Scheduler(engine.slots, max_queue, config.subpixels)
        self.labels = (engine.checkpoint.name, engine.checkpoint.net.attention.steps_as)  # as metrics name them
        self.row_subpixels = config.width * config.channels  # also the longest quantum: what a stream shows at once
        self.pace = Pace()                          # by the clock, from the end of one quantum to that of the next
        self._margin = Margin()
        self._step_seconds: dict[int, float] = {}   # of decoding alone, smoothed, by rows in powers of two
        self._ended, self._went_on = 0.0, False     # when the last quantum was over, and whether there was more to do
        self._terms: dict[str, Terms] = {}
        self._specs: dict[str, Sequence[ImageSpec]] = {}
        self._prefills = Prefills(engine)
        self._hopeless = 0
        self._lock = threading.Lock()

    def admit(self, request: str, images: int, *, bulk: bool = False, within_s: float = math.inf,
              whole: bool = True) -> None:
        """Reserve room, in place of what the request has. From any thread. What it was promised a moment ago holds.

        within_s: seconds until it is to be done · whole: whether its images have no known pixels.
        Raises QueueFull with the time until there is room, or DeadlineUnreachable; the request then has no room at all.
        """
        with self._lock:
            if not self.busy and time.perf_counter() - self._ended > STALE_S:
                self.pace.forget()
                self._margin = Margin()
            now, terms = time.perf_counter(), self._terms.get(request)
            until = now + within_s
            if (terms is not None and now - terms.told < QUANTUM_S and terms.promised <= until
                    and terms.whole == whole and self.scheduler.reserved.get(request) == (images, bulk)):
                terms.until = until  # its head told all of it, a moment ago
                return
            try:
                self.scheduler.admit(request, images, bulk)
            except Full as full:
                self._forget(request)
                room_s = max(self.scheduler.until_room(images, bulk, self.pace), self.decoded_s(images))
                raise QueueFull(full.waiting, images, full.allowed, room_s) from full
            self._terms[request] = Terms(until, whole)
            self._promise(request)

    def enqueue(self, request: str, specs: Sequence[ImageSpec]) -> None:
        """The admitted request's images, alike but for seed and temperature. From any thread.

        Raises DeadlineUnreachable, now that the steps are known, and the request then has no room any more.
        """
        with self._lock:
            self.scheduler.enqueue(request, specs[0].prefix)
            terms = self._terms[request]
            if not terms.whole:
                terms.whole = True
                self._promise(request)
            self._specs[request] = specs

    def _promise(self, request: str) -> None:
        """Raise DeadlineUnreachable, and forget the request, if what is known of it would not be done in time."""
        scheduler, margin, terms, now = self.scheduler, self._margin, self._terms[request], time.perf_counter()
        terms.promised = math.inf
        rows = min(scheduler.slots, len(scheduler.running) + scheduler.queued()) if scheduler.running else 0
        if not self.pace.sure(rows, terms.until - now):
            return
        if now + scheduler.bound() * self.pace.slowest(scheduler.slots) * margin.factor <= terms.until:  # nearly always
            return
        foreseen_s = scheduler.until_done(request, self.pace, terms.whole)
        terms.promised, terms.told = now + foreseen_s * margin.factor, now
        if terms.promised > terms.until:
            if now + foreseen_s <= terms.until:
                margin.learn(broken=False)
            self._forget(request)
            raise DeadlineUnreachable(terms.until - now, terms.promised - now,
                                      len(scheduler.running) + scheduler.queued())

    def over(self, request: str, *, late: bool = False) -> None:
        """A request's images are all done, or its time is up: was it as promised? From any thread."""
        with self._lock:
            self._told(request, late)

    def _told(self, request: str, late: bool) -> None:
        terms = self._terms.get(request)
        if terms is not None and terms.promised < math.inf:
            self._margin.learn(broken=late or time.perf_counter() > terms.promised)
            terms.promised = math.inf  # once

    def _forget(self, request: str) -> None:
        self.scheduler.cancel(request)
        self._terms.pop(request, None)
        self._specs.pop(request, None)

    def most(self, bulk: bool) -> int:
        """Images that one request of a class may have, so that it fits when nobody else is there."""
        return self.scheduler.slots + self.scheduler.queue_of(bulk)

    def room(self) -> int:
        """Interactive images that would be admitted now. From any thread."""
        with self._lock:
            return self.scheduler.room()

    def ends(self, requests: Collection[str]) -> list[float]:
        """Seconds until each image of these requests will be done, in order. From any thread."""
        with self._lock:
            return [end.at for end in self.scheduler.forecast(self.pace) if end.row.request in requests]

    def cancel(self, request: str) -> None:
        """From any thread; a running image's slot is free after the quantum under way."""
        with self._lock:
            self._forget(request)

    @property
    def busy(self) -> bool:
        return bool(len(self.scheduler.waiting) or self.scheduler.running)

    def turn(self) -> Turn:
        """Let newcomers join, prefill a while, run one quantum, and let the finished leave. Raises EngineLost."""
        since = self._ended if self._went_on else time.perf_counter()
        joined, failed, late = self._join()
        joined_at = time.monotonic()
        for request, error in self._prefills.run(QUANTUM_S, self.beat).items():
            failed[request] = error
            self.cancel(request)
        with self._lock:
            plan = self.scheduler.plan(self._quantum(len(self.scheduler.decoding)))
        began, clamped = time.perf_counter(), self.engine.saturated
        steps = plan[0][1] if plan else 0
        outcome = self._decode(plan) if steps else Outcome()
        seconds = time.perf_counter() - began
        with self._lock:
            bad = dict.fromkeys(outcome.lost, self._not_finite()) | outcome.poison
            failed |= {row.request: bad[row.slot] for row, _ in plan if row.slot in bad and not row.cancelled}
            for request in failed:
                self._forget(request)
            finished = self.scheduler.advance(plan)
            free = self.scheduler.free
            self._ended, self._went_on = time.perf_counter(), self.busy
            if steps and not outcome.retries:
                self._learn(len(plan), seconds / steps)
                self.pace.learn(len(plan), steps, self._ended - since)
        if steps:
            self._hopeless = self._hopeless + 1 if len(outcome.poison) == len(plan) and not self._probe(free[0]) else 0
        if self._hopeless == HOPELESS:
            raise EngineLost(f"{self.labels[0]} could not decode a single image in {HOPELESS} quanta in a row, nor one "
                             "of its own in their place")
        for slot in free if self.engine.poison else []:
            self.engine.pool.poison(slot)
        moved = [row for row, _ in plan if not row.cancelled]
        return Turn(joined, joined_at, late, moved, finished, len(plan), steps, sum(count for _, count in plan),
                    seconds, self.engine.saturated - clamped, failed, outcome.retries)

    def _decode(self, plan: Plan) -> Outcome:
        """One quantum, whose rows end up where the plan says, but for those of which the outcome tells."""
        slots = [row.slot for row, _ in plan]
        if self._faults is not None:
            self._faults.begin([row for row, _ in plan], self.engine.seed[slots].tolist(), self.engine.pool.poison)
        self.engine.keep(slots)
        try:
            return Outcome(lost=self._run(plan))
        except EngineLost:
            raise
        except Exception as error:
            logger.exception("a quantum of %s threw with %d rows, and is run again in parts", self.labels[0], len(plan))
            return isolate(plan, self._run, self._restore, error)

    def _run(self, plan: Plan) -> list[int]:
        """Rows of a plan, decoded; returns the slots that were not finite."""
        slots = [row.slot for row, _ in plan]
        self.beat()
        if self._faults is not None:
            self._faults.run()
        lost = self.engine.quantum(slots, [row.position for row, _ in plan], [count for _, count in plan])
        if self._faults is not None:
            self._faults.ran([row for row, _ in plan])
        return lost

    def _restore(self, plan: Plan) -> None:
        for first in range(0, len(plan), RESTORED):
            some = plan[first:first + RESTORED]
            self.beat()
            self.engine.restore([row.slot for row, _ in some], [row.position for row, _ in some])

    def _probe(self, slot: int) -> bool:
        """Whether the engine decodes an image of its own, nobody's request, in this free slot."""
        try:
            self.engine.take([slot], [ImageSpec(seed=0)])
            self._run([(Row("probe", 0, 0, slot), self.engine.stride)])
        except EngineLost:
            raise
        except Exception:
            logger.exception("nor does %s decode an image of its own", self.labels[0])
            return False
        return True

    def _not_finite(self) -> NotFinite:
        return NotFinite(f"{self.labels[0]} gave parameters that are not finite for an image of this request")

    def _join(self) -> tuple[list[Row], dict[str, Exception], list[str]]:
        """Give slots to those who wait, one request after the other; who is delayed for long joins next time.

        Returns rows that joined, requests at which the engine threw, and those that there is no time left for: decoded
        all the same, each would make the ones behind it late as well.
        """
        joined: list[Row] = []
        late: list[str] = []
        failed: dict[str, Exception] = {}
        began = time.perf_counter()
        while time.perf_counter() - began < QUANTUM_S:
            with self._lock:
                if (lost := self._too_late()) is not None:
                    self._told(lost, late=True)
                    self._forget(lost)
                    late.append(lost)
                    continue
                rows = self.scheduler.join()
                if not rows:
                    break
                specs = self._specs[rows[0].request]
            try:
                self.beat()
                if self._faults is not None:
                    self._faults.take([spec.seed for spec in specs])
                self.engine.take([row.slot for row in rows], [specs[row.index] for row in rows])
                joined += rows
                if 0 < rows[0].position < self.scheduler.length:  # else there is nothing to fold in, or to draw
                    self._prefills.append(rows, rows[0].position)
            except EngineLost:
                raise
            except Exception as error:
                logger.exception("a request of %s could not be given its slots", self.labels[0],
                                 extra=logs.of(rows[0].request))
                failed[rows[0].request] = error
                self.cancel(rows[0].request)
        return joined, failed, late

    def _too_late(self) -> str | None:
        """The request that is next, if it would hardly be done in time even with a slot of its own from now on."""
        first, rows = self.scheduler.waiting.first(), len(self.scheduler.running)
        if first is None or rows == self.scheduler.slots:
            return None
        left_s = self._terms[first.request].until - time.perf_counter()
        if (self.scheduler.length - first.position) * self.pace(rows + 1) * LEAST_MARGIN <= left_s:  # nearly always
            return None
        late = self.scheduler.until_done(first.request, self.pace) * LEAST_MARGIN > left_s
        return first.request if late and self.pace.sure(rows + 1 if rows else 0, left_s) else None

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
        self._step_seconds[rows.bit_length()] = 0.7 * before + 0.3 * seconds

    def waiting(self, request: str) -> int:
        """Images of a request that have had no slot."""
        with self._lock:
            reserved = self.scheduler.reserved.get(request)
            return (reserved.images if reserved else 0) + sum(row.request == request for row in self.scheduler.waiting)

    def queued(self, bulk: bool | None = None) -> int:
        """Images, of a class or of both, that are admitted and have no slot. From any thread."""
        with self._lock:
            return self.scheduler.queued(bulk)

    def abandon(self) -> None:
        """After an error of ours: empty every slot. Whose images were there is for the caller to know."""
        with self._lock:
            self.scheduler.running.clear()
            self._prefills.clear()
            self._went_on = False
