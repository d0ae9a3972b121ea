"""One model of this process as the event loop knows it: its room, its requests, and when they will be done."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from ...errors import DeadlineUnreachable, QueueFull
from ..batch import Batcher
from ..messages import QuantumReport
from ..schedule.forecast import Outlook, Remaining, Room, latest_end, queue_order
from ..schedule.passes import UNKNOWN, expected_passes
from ..schedule.quantum import QUANTUM_S
from ..schedule.step_time import MIN_FACTOR, SafetyFactor, StepTimeEstimate
from .ledger import ServedModel
from .ticket import Demand, Ticket

STALE_S = 5.0  # seconds without use after which measurements of a model, of judging or of prefill are forgotten:
               # if they were wrong and every request was refused because of them, nothing would correct them


class LocalModel(ServedModel):
    """Used on the event loop only. Images are counted here as the reports say, at most a quantum late."""

    def __init__(self, batcher: Batcher, max_queue: int, uploads_s: Callable[[int], float] = lambda uploads: 0.0
                 ) -> None:
        """uploads_s: seconds until so many uploads are decoded, of those that hold room in the queue."""
        decoder = batcher.decoder
        super().__init__(decoder.checkpoint, decoder.facts, batcher.backend, Room(decoder.slots, max_queue))
        self.batcher, self.decoder = batcher, decoder
        self.step_time, self.safety = StepTimeEstimate(), SafetyFactor()
        self._uploads_s, self._length = uploads_s, batcher.scheduler.length
        self._reserved: dict[str, Ticket] = {}  # admitted; to be scored, or their images are not known yet
        self.queued: dict[str, Ticket] = {}     # their images wait or run, in the order they came
        self._waiting = [0, 0]                  # images that have had no slot yet: interactive, bulk
        self._in_slots = 0
        self._judge_s = 0.0                     # to judge one image, smoothed
        self._judged_at = -math.inf             # when this was last measured
        self._prefill_s = 0.0                   # for one token of a prefill, or one reading, smoothed
        self._prefilled_at = -math.inf
        self._repeats = 0.0                     # mean redraws of an image that may be drawn again
        self._last: QuantumReport | None = None
        self._last_at = 0.0
        self._ratios = UNKNOWN
        self._in_progress: list[Remaining] | None = None  # what _running returned; None: to be computed again

    @property
    def idle(self) -> bool:
        return not (self._reserved or self.queued)

    def waiting(self, bulk: bool | None = None) -> int:
        """Images that have had no slot yet, of one class or of both."""
        return sum(self._waiting) if bulk is None else self._waiting[bulk]

    @property
    def slots_used(self) -> int:
        return len(self._last.running) if self._last else 0

    @property
    def undone(self) -> int:
        """Images of all tickets here that are not done."""
        return self._in_slots + sum(self._waiting)

    def room_left(self, bulk: bool = False) -> int:
        return self.room.left(bulk, self.room.slots - self._in_slots, sum(self._waiting), self._waiting[True])

    # --- admission ---

    def admit(self, ticket: Ticket, demand: Demand, *, check_deadline: bool = True) -> None:
        """Give a ticket the room that it demands, in place of the room it has here.

        Raises QueueFull with the time until there is room, or DeadlineUnreachable; the ticket then has no room here.
        """
        self.leave(ticket)
        images, bulk = demand.images, demand.bulk
        if not self.queued and time.monotonic() - self._last_at > STALE_S:
            self.step_time.forget()
            self.safety = SafetyFactor()
        if images > self.room_left(bulk):
            limit = self.room.queue_of(bulk)
            waiting = self._waiting[bulk]
            if images > self.room_left():  # in either class
                waiting, limit = sum(self._waiting), self.room.max_queue
            room_s = max(self._outlook().until_room(self.room, images, bulk, self.step_time), self._uploads_s(images))
            raise QueueFull(waiting, images, limit, room_s)
        ticket.demand = demand
        ticket.promised = math.inf
        (self._reserved if demand.known is None else self.queued)[ticket.id] = ticket
        self._waiting[bulk] += images
        if check_deadline:
            self._predict(ticket)

    def queue(self, ticket: Ticket, known: int) -> None:
        """Queue an admitted ticket: its images are known now. Raises DeadlineUnreachable; the ticket then leaves."""
        self.queued[ticket.id] = self._reserved.pop(ticket.id)
        ticket.demand = replace(ticket.demand, known=known)
        self._predict(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Free what a ticket holds here."""
        if (self._reserved.pop(ticket.id, None) or self.queued.pop(ticket.id, None)) is not None:
            self._waiting[ticket.demand.bulk] -= ticket.waiting
            if ticket.joined > ticket.done:
                self._in_slots -= ticket.joined - ticket.done
                self._in_progress = None

    def settle(self, ticket: Ticket) -> None:
        """A ticket's images are all drawn, or its time is up: learn whether the prediction held."""
        if ticket.promised < math.inf:
            self.safety.learn(broken=ticket.late or time.monotonic() > ticket.promised)
            ticket.promised = math.inf  # once

    def _predict(self, ticket: Ticket) -> None:
        """Raise DeadlineUnreachable if the ticket would probably not be done in time; the ticket then leaves."""
        ticket.promised = math.inf
        # the images that are drawn last, one in each slot, are judged after all are drawn
        running = self._running()
        demand = ticket.demand
        more_s = min(demand.images, self.room.slots) * self.judge_s if demand.attempts else 0.0
        more_s += self.prefill_s(demand.known or 0) * (2 if running else 1)  # half of the time while others decode
        left_s, factor = ticket.left_s - more_s, self.safety.value
        images = min(self.room.slots, len(running) + sum(self._waiting)) if running else 0
        if not self.step_time.confident(images, left_s):
            return
        longest = max(self._length * max(ratios) for ratios in self._ratios) * (1 + self._repeats)
        bound = latest_end(self.room.slots, longest, sum(image.steps for image in running), sum(self._waiting))
        if bound * self.step_time.slowest(self.room.slots) * factor <= left_s:  # nearly always
            return
        needed_s = self._outlook(ticket).until_done(ticket.id, self.step_time)
        ticket.promised = time.monotonic() + needed_s * factor
        if needed_s * factor > left_s:
            if needed_s <= left_s:
                self.safety.learn(broken=False)
            self.leave(ticket)
            raise DeadlineUnreachable(ticket.left_s, needed_s * factor + more_s, len(running) + sum(self._waiting))

    def too_late(self) -> list[Ticket]:
        """Waiting tickets that would hardly be done in time even if they got a slot now; marks them as late.

        Decoding them all the same would also delay the tickets behind them.
        """
        if not sum(self._waiting):
            return []
        images = self.slots_used
        step_s, late = self.step_time(min(images + 1, self.room.slots)), []
        for ticket in self.queued.values():
            if ticket.joined or ticket.late:
                continue
            left_s = ticket.left_s - QUANTUM_S  # the next report comes up to a quantum later
            alone_s = self._passes(ticket, ticket.demand.known or 0) * step_s
            if alone_s * MIN_FACTOR <= left_s:  # nearly always
                continue
            if (self.step_time.confident(images + 1 if images else 0, left_s)
                    and self._outlook().until_done(ticket.id, self.step_time) * MIN_FACTOR > left_s):
                ticket.late = True
                late.append(ticket)
        return late

    def ends(self, tickets: list[Ticket]) -> list[float]:
        """Seconds until each image of these tickets will be done, in order."""
        ids = {ticket.id for ticket in tickets}
        return [end.at for end in self._outlook().ends(self.step_time) if end.image.request in ids]

    @property
    def passes_left(self) -> float:
        """Passes that all images here will probably still need."""
        tickets = chain(self.queued.values(), self._reserved.values())
        waiting = sum(ticket.waiting * self._passes(ticket, ticket.demand.known or 0)
                      for ticket in tickets if not ticket.demand.scored_only)
        return waiting + sum(image.steps for image in self._running())

    # --- reports ---

    def joined(self, ticket: Ticket) -> None:
        """One of a ticket's images got a slot."""
        ticket.joined += 1
        self._waiting[ticket.demand.bulk] -= 1
        self._in_slots += 1

    def finished(self, ticket: Ticket) -> None:
        """One of a ticket's images is done, and has left its slot."""
        ticket.done += 1
        self._in_slots -= 1
        if ticket.done == ticket.demand.images:
            self.settle(ticket)

    def judged(self, seconds: float) -> None:
        """One image was judged, in so many seconds."""
        self._judge_s = 0.7 * (self.judge_s or seconds) + 0.3 * seconds
        self._judged_at = time.monotonic()

    @property
    def judge_s(self) -> float:
        """Seconds that judging one image takes; 0 if none was measured lately."""
        return self._judge_s if time.monotonic() - self._judged_at <= STALE_S else 0.0

    def prefill_s(self, known: int) -> float:
        """Seconds that prefill takes for a request with so many known tokens; 0 if none was measured lately."""
        if not known or time.monotonic() - self._prefilled_at > STALE_S:
            return 0.0
        return self._prefill_s * (1 if self.config.patch else known)

    def apply(self, report: QuantumReport) -> None:
        """Learn from what a report says of all images together."""
        for tokens, seconds in report.prefilled:
            self._prefill_s = 0.7 * (self._prefill_s or seconds / tokens) + 0.3 * seconds / tokens
            self._prefilled_at = time.monotonic()
        for seconds in report.judged_s:
            self.judged(seconds)
        self._last, self._last_at, self._ratios = report, time.monotonic(), report.ratios
        self._repeats = report.repeats
        self._in_progress = None
        if report.passes and not report.retries:
            self.step_time.learn(report.images, report.passes, report.cycle_s)

    def emptied(self) -> None:
        """The slots are empty: the engine thread was restarted."""
        self._last = self._in_progress = None

    def _passes(self, ticket: Ticket, known: int, left: int | None = None) -> float:
        """Passes that an image of a ticket will probably need if so many of its tokens are known.

        left: tokens still to be decoded, of an image in a slot.
        """
        conditioned = bool(known and self.config.patch)
        once = expected_passes(self._ratios, self._length - known, self._length, conditioned)
        now = once if left is None else expected_passes(self._ratios, left, self._length, conditioned)
        return now + self._repeats * once if ticket.demand.attempts > 1 else now

    def _running(self) -> list[Remaining]:
        """Images in slots. Computed once per report, since every admission needs it."""
        if self._in_progress is None:
            self._in_progress = [Remaining(image.request, self._passes(ticket, ticket.demand.known or 0, image.left),
                                           ticket.demand.bulk)
                                 for image in (self._last.running if self._last else [])
                                 if (ticket := self.queued.get(image.request)) is not None]
        return self._in_progress

    def _outlook(self, ticket: Ticket | None = None) -> Outlook:
        """All images that have or need a slot.

        An upload that is not decoded yet counts as wholly hidden, but `ticket` itself as wholly known.
        """
        classes: tuple[list[Remaining], list[Remaining]] = ([], [])
        for other in chain(self.queued.values(), self._reserved.values()):
            demand = other.demand
            if demand.scored_only:
                continue
            known = demand.known if demand.known is not None else self._length if other is ticket else 0
            classes[demand.bulk].extend([Remaining(other.id, self._passes(other, known), demand.bulk)] * other.waiting)
        overtaken = self._last.overtaken if self._last else 0
        return Outlook(self.room.slots, self._length, self._running(), queue_order(*classes, overtaken))
