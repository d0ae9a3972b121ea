"""Who waits, who runs in which slot, and when each will be done.

Plain Python on purpose: no torch, no clock, no threads, so that its tests run in milliseconds.
Times are counted in steps of one sub-pixel; whoever knows the speed turns them into seconds.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field


class Full(Exception):
    """No room for that many images; `steps` is how long until there is."""

    def __init__(self, waiting: int, steps: int) -> None:
        super().__init__(f"{waiting} images are waiting")
        self.waiting, self.steps = waiting, steps


@dataclass(slots=True, eq=False)
class Row:
    """One image of one request, from the queue to its last sub-pixel."""

    request: str
    index: int            # among the request's images
    position: int         # next sub-pixel to predict
    slot: int = 0         # 0 while it waits
    cancelled: bool = False


@dataclass(slots=True)
class Scheduler:
    """Slots 1..slots for the images of one model, first come first served, with a bounded queue."""

    slots: int
    max_queue: int        # images that may wait, beyond those that find a free slot
    length: int           # T
    waiting: deque[Row] = field(default_factory=deque)
    running: dict[int, Row] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)  # admitted requests whose images are not known yet

    @property
    def free(self) -> list[int]:
        return [slot for slot in range(1, self.slots + 1) if slot not in self.running]

    @property
    def queued(self) -> int:
        """Images admitted that have no slot yet."""
        return len(self.waiting) + sum(self.reserved.values())

    def admit(self, request: str, images: int) -> None:
        """Reserve room for a request's images, or raise Full. Nothing else can refuse it later."""
        room = self.max_queue + self.slots - len(self.running)
        if self.queued + images > room:
            raise Full(self.queued, self.steps_until_room(images))
        self.reserved[request] = images

    def enqueue(self, request: str, position: int) -> list[Row]:
        """Turn a reservation into waiting rows that will begin at `position`; returns them in image order."""
        rows = [Row(request, index, position) for index in range(self.reserved.pop(request))]
        self.waiting.extend(rows)
        return rows

    def cancel(self, request: str) -> None:
        """Forget a request wherever it is. Its running rows keep their slots until the quantum under way ends."""
        self.reserved.pop(request, None)
        self.waiting = deque(row for row in self.waiting if row.request != request)
        for row in self.running.values():
            row.cancelled |= row.request == request

    def join(self) -> list[Row]:
        """Between quanta: free the slots of cancelled rows, then give free ones to the request that waits longest.

        Returns its rows that found a slot; call again for the next request's, until there are none.
        """
        self.running = {slot: row for slot, row in self.running.items() if not row.cancelled}
        joined: list[Row] = []
        for slot in self.free:
            if not self.waiting or (joined and self.waiting[0].request != joined[0].request):
                break
            row = self.waiting.popleft()
            row.slot = slot
            self.running[slot] = row
            joined.append(row)
        return joined

    def plan(self, quantum: int) -> list[tuple[Row, int]]:
        """Each running row with its number of steps in the next quantum, most steps first."""
        rows = [(row, min(quantum, self.length - row.position)) for row in self.running.values() if not row.cancelled]
        return sorted(rows, key=lambda turn: (-turn[1], turn[0].slot))

    def advance(self, plan: list[tuple[Row, int]]) -> list[Row]:
        """Record that a plan was carried out; returns the finished rows that somebody still wants."""
        for row, steps in plan:
            row.position += steps
        done = [row for row in self.running.values() if row.position >= self.length or row.cancelled]
        for row in done:
            del self.running[row.slot]
        return [row for row in done if not row.cancelled]

    def steps_until_room(self, images: int) -> int:
        """Steps until a request of that many images would be admitted, if nobody else comes or leaves.

        Every remaining length is known, so this replays the future: slots free up in order of their
        remaining steps, and each takes the next waiting image.
        """
        ends = [self.length - row.position for row in self.running.values() if not row.cancelled]
        ends += [0] * (self.slots - len(ends))
        heapq.heapify(ends)
        waits = [self.length - row.position for row in self.waiting] + [self.length] * sum(self.reserved.values())
        leaving = len(waits) + images - self.max_queue  # images that must have a slot by then
        now = 0
        for ahead in range(max(0, leaving)):
            now = heapq.heappop(ends)
            heapq.heappush(ends, now + (waits[ahead] if ahead < len(waits) else self.length))
        return now
