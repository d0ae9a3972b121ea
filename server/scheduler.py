"""Who waits, who runs in which slot, and when each will be done.

Plain Python on purpose: no torch, no clock, no threads, so that its tests run in milliseconds.
Times are counted in steps of one sub-pixel; whoever knows the speed gives the seconds of a step.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

BULK_EVERY = 4  # while bulk images wait, one of so many slots goes to the one that has waited longest
BULK_QUEUE = 4  # and one part in so many of the queue is not theirs, so that bulk alone never shuts others out

Pace = Callable[[int], float]  # time of one step, by the number of rows that take it


def in_steps(rows: int) -> float:
    return 1.0


class Full(Exception):
    """No room for that many images beside those that wait."""

    def __init__(self, waiting: int, allowed: int) -> None:
        super().__init__(f"{waiting} images are waiting")
        self.waiting, self.allowed = waiting, allowed


@dataclass(slots=True, eq=False)
class Row:
    """One image of one request, from the queue to its last sub-pixel."""

    request: str
    index: int            # among the request's images
    position: int         # next sub-pixel to predict
    slot: int = 0         # 0 while it waits
    cancelled: bool = False
    bulk: bool = False
    prefilled: bool = True  # false while the inputs before its position are being folded in: it does not decode yet


class Reservation(NamedTuple):
    """Room for an admitted request whose images are not known yet."""

    images: int
    bulk: bool


class End(NamedTuple):
    """An image's end, foreseen."""

    at: float     # from now
    row: Row
    free: int     # slots that nobody takes then
    waiting: int  # images without a slot then
    bulk: int     # those of them that are bulk


class Line:
    """Images that wait for a slot: who is next is decided here, for slots given now and for those foreseen."""

    def __init__(self) -> None:
        self.interactive: deque[Row] = deque()
        self.bulk: deque[Row] = deque()
        self._overtaken = 0  # slots given to interactive images in a row while bulk waited

    def __len__(self) -> int:
        return len(self.interactive) + len(self.bulk)

    def __iter__(self) -> Iterator[Row]:
        return itertools.chain(self.interactive, self.bulk)

    def append(self, row: Row) -> None:
        (self.bulk if row.bulk else self.interactive).append(row)

    def first(self) -> Row | None:
        """The image that gets the next slot."""
        if self.bulk and (not self.interactive or self._overtaken >= BULK_EVERY - 1):
            return self.bulk[0]
        return self.interactive[0] if self.interactive else None

    def take(self) -> Row:
        """Remove the first one, which gets a slot."""
        row = self.first()
        assert row is not None
        self._overtaken = 0 if row.bulk or not self.bulk else self._overtaken + 1
        return (self.bulk if row.bulk else self.interactive).popleft()

    def without(self, request: str = "") -> "Line":
        """A copy, less the images of a request."""
        line = Line()
        line._overtaken = self._overtaken
        line.interactive, line.bulk = (deque(row for row in rows if row.request != request) if request else rows.copy()
                                       for rows in (self.interactive, self.bulk))
        return line


@dataclass(slots=True)
class Scheduler:
    """Slots 1..slots for the images of one model, first come first served in each class, with a bounded queue."""

    slots: int
    max_queue: int        # images that may wait, beyond those that find a free slot
    length: int           # T
    waiting: Line = field(default_factory=Line)
    running: dict[int, Row] = field(default_factory=dict)
    reserved: dict[str, Reservation] = field(default_factory=dict)  # admitted requests whose images are not known yet

    @property
    def free(self) -> list[int]:
        return [slot for slot in range(1, self.slots + 1) if slot not in self.running]

    def queued(self, bulk: bool | None = None) -> int:
        """Images admitted that have no slot yet, of one class or of both."""
        line = len(self.waiting) if bulk is None else len(self.waiting.bulk if bulk else self.waiting.interactive)
        return line + sum(place.images for place in self.reserved.values() if bulk in (None, place.bulk))

    def queue_of(self, bulk: bool) -> int:
        """How many images of a class may wait."""
        return self.max_queue - self.max_queue // BULK_QUEUE if bulk else self.max_queue

    def room(self, bulk: bool = False) -> int:
        """Images of a class that would be admitted now."""
        return self._room(bulk, self.slots - len(self.running), self.queued(), self.queued(bulk=True))

    def _room(self, bulk: bool, free: int, waiting: int, waiting_bulk: int) -> int:
        room = self.max_queue + free - waiting
        return min(room, self.queue_of(bulk=True) + free - waiting_bulk) if bulk else room

    def admit(self, request: str, images: int, bulk: bool = False) -> None:
        """Reserve room for a request's images, in place of what it had before. Nothing else can refuse it later.

        Raises Full, and then the request has no room at all.
        """
        self.reserved.pop(request, None)
        if images > self.room(bulk):
            if images > self.room():  # whatever its class
                raise Full(self.queued(), self.max_queue)
            raise Full(self.queued(bulk=True), self.queue_of(bulk=True))
        self.reserved[request] = Reservation(images, bulk)

    def enqueue(self, request: str, position: int) -> list[Row]:
        """Turn a reservation into waiting rows that will begin at `position`; returns them in image order."""
        place = self.reserved.pop(request)
        rows = [Row(request, index, position, bulk=place.bulk) for index in range(place.images)]
        for row in rows:
            self.waiting.append(row)
        return rows

    def cancel(self, request: str) -> None:
        """Forget a request wherever it is. Its running rows keep their slots until the quantum under way ends."""
        self.reserved.pop(request, None)
        self.waiting = self.waiting.without(request)
        for row in self.running.values():
            row.cancelled |= row.request == request

    def join(self) -> list[Row]:
        """Between quanta: free the slots of cancelled rows, then give free ones to the request that is next.

        Returns its rows that found a slot; call again for the next request's, until there are none.
        """
        self.running = {slot: row for slot, row in self.running.items() if not row.cancelled}
        joined: list[Row] = []
        for slot in self.free:
            first = self.waiting.first()
            if first is None or (joined and first.request != joined[0].request):
                break
            row = self.waiting.take()
            row.slot = slot
            self.running[slot] = row
            joined.append(row)
        return joined

    @property
    def decoding(self) -> list[Row]:
        """Running rows that may take steps."""
        return [row for row in self.running.values() if row.prefilled and not row.cancelled]

    def plan(self, quantum: int) -> list[tuple[Row, int]]:
        """Each decoding row with its number of steps in the next quantum, most steps first."""
        rows = [(row, min(quantum, self.length - row.position)) for row in self.decoding]
        return sorted(rows, key=lambda turn: (-turn[1], turn[0].slot))

    def advance(self, plan: list[tuple[Row, int]]) -> list[Row]:
        """Record that a plan was carried out; returns the finished rows that somebody still wants."""
        for row, steps in plan:
            row.position += steps
        done = [row for row in self.running.values() if row.position >= self.length or row.cancelled]
        for row in done:
            del self.running[row.slot]
        return [row for row in done if not row.cancelled]

    # --- what is to come, if nobody else comes or leaves: every remaining length is known, so it is replayed ---

    def _replay(self, brief: str = "") -> list[tuple[int, Row]]:
        """Steps until each image admitted so far has ended, in the order in which they have or get their slots.

        Images that are not known yet count as whole ones; those of the request `brief` as if they had no hole.
        """
        line = self.waiting.without()
        for request, place in self.reserved.items():
            for index in range(place.images):
                line.append(Row(request, index, self.length if request == brief else 0, bulk=place.bulk))
        ends = [(self.length - row.position, row) for row in self.running.values() if not row.cancelled]
        # when slots are free: as many as can matter
        free = [0] * min(self.slots - len(ends), len(line)) + [end for end, _ in ends]
        heapq.heapify(free)
        queue = [line.take() for _ in range(len(line))] if line.bulk else line.interactive
        for row in queue:
            end = free[0] + self.length - row.position
            heapq.heapreplace(free, end)
            ends.append((end, row))
        return ends

    def forecast(self, pace: Pace = in_steps) -> Iterator[End]:
        """The ends of all images admitted so far, in order. No slot is left free while an image waits."""
        replay = self._replay()
        bulk, now, at = sum(row.bulk for _, row in replay[self.slots:]), 0, 0.0
        for ended, (end, row) in enumerate(sorted(replay, key=lambda image: image[0])):
            left = len(replay) - ended
            at, now = at + (end - now) * pace(min(left, self.slots)), end
            if left > self.slots:
                bulk -= replay[self.slots + ended][1].bulk
            yield End(at, row, max(self.slots - left + 1, 0), max(left - 1 - self.slots, 0), bulk)

    def until_room(self, images: int, bulk: bool = False, pace: Pace = in_steps) -> float:
        """Time until a request of that many images would be admitted."""
        if images <= self.room(bulk):
            return 0.0
        ends = [*self.forecast(pace)]
        return next((end.at for end in ends if images <= self._room(bulk, end.free, end.waiting, end.bulk)),
                    ends[-1].at if ends else 0.0)

    def until_done(self, request: str, pace: Pace = in_steps, whole: bool = True) -> float:
        """Time until the last image of an admitted request. Not whole: if nothing is to be drawn once it has a slot."""
        replay = self._replay("" if whole else request)
        done = max((end for end, row in replay if row.request == request), default=0)
        now, at = 0, 0.0
        last = sorted(end for end, _ in replay)[-self.slots:]  # until the first of them every slot is taken
        for rows, end in zip(range(len(last), 0, -1), last, strict=True):
            at, now = at + (min(end, done) - now) * pace(rows), end
            if end >= done:
                break
        return at

    def bound(self) -> float:
        """Steps by which all that is admitted is done, or fewer: much faster to know than the forecast.

        What is to be done, shared out evenly, and one image more: Graham, "Bounds on multiprocessing timing
        anomalies", 1969.
        """
        running = sum(self.length - row.position for row in self.running.values())
        return self.length + (running + self.length * self.queued()) / self.slots
