"""Forecasts: how many images may be admitted, and when each will be done, given the waiting and running images.

Pure functions, without a clock. Times are counted in steps, which are passes through the layers: in most models one
per token. The caller gives the seconds that a step takes.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .scheduler import bulk_is_next

BULK_QUEUE = 4  # a quarter of the queue is closed to bulk images, so that they never shut others out

StepTime = Callable[[int], float]  # time of one step, by the number of images that take it


def in_steps(images: int) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class Room:
    """How many images may be admitted to one model: as many as there are slots, and a bounded queue."""

    slots: int
    max_queue: int

    def queue_of(self, bulk: bool) -> int:
        """Images of a class that may wait."""
        return self.max_queue - self.max_queue // BULK_QUEUE if bulk else self.max_queue

    def left(self, bulk: bool, free: int, waiting: int, waiting_bulk: int) -> int:
        """Images of a class that may be admitted when so many slots are free and so many images wait."""
        left = self.max_queue + free - waiting
        return min(left, self.queue_of(bulk=True) + free - waiting_bulk) if bulk else left


class Remaining(NamedTuple):
    """What is left to do for one image."""

    request: str
    steps: float
    bulk: bool = False


class End(NamedTuple):
    """The predicted end of one image, and the state of the queue at that time."""

    at: float     # time from now
    image: Remaining
    free: int     # slots without an image
    waiting: int  # images without a slot
    bulk: int     # of these, the bulk ones


def queue_order(interactive: Iterable[Remaining], bulk: Iterable[Remaining], overtaken: int = 0) -> list[Remaining]:
    """Waiting images in the order in which they will get slots, as WaitQueue gives them out."""
    first, second = [*interactive], [*bulk]
    if not second:
        return first
    order: list[Remaining] = []
    i = j = 0
    while i < len(first) or j < len(second):
        if bulk_is_next(len(first) - i, len(second) - j, overtaken):
            order.append(second[j])
            j, overtaken = j + 1, 0
        else:
            order.append(first[i])
            i, overtaken = i + 1, overtaken + 1 if j < len(second) else 0
    return order


@dataclass(frozen=True, slots=True)
class Outlook:
    """All images admitted to a model at one moment. It predicts their ends as if no request arrived or left."""

    slots: int
    length: int                    # tokens
    running: Sequence[Remaining]   # in slots
    waiting: Sequence[Remaining]   # in the order in which they will get slots

    def _replay(self) -> list[tuple[float, Remaining]]:
        """Steps until the end of each image, in the order in which they have or get their slots."""
        ends = [(image.steps, image) for image in self.running]
        # the steps after which slots become free: as many slots as can matter
        free = [0.0] * min(self.slots - len(ends), len(self.waiting)) + [steps for steps, _ in ends]
        heapq.heapify(free)
        for image in self.waiting:
            end = free[0] + image.steps
            heapq.heapreplace(free, end)
            ends.append((end, image))
        return ends

    def ends(self, step_time: StepTime = in_steps) -> Iterator[End]:
        """The ends of all images, in order of time. No slot is counted as free while an image waits."""
        replay = self._replay()
        bulk, now, at = sum(image.bulk for _, image in replay[self.slots:]), 0.0, 0.0
        for ended, (end, image) in enumerate(sorted(replay, key=lambda pair: pair[0])):
            left = len(replay) - ended
            at, now = at + (end - now) * step_time(min(left, self.slots)), end
            if left > self.slots:
                bulk -= replay[self.slots + ended][1].bulk
            yield End(at, image, max(self.slots - left + 1, 0), max(left - 1 - self.slots, 0), bulk)

    def until_room(self, room: Room, images: int, bulk: bool = False, step_time: StepTime = in_steps) -> float:
        """Time until a request of so many images would be admitted."""
        waiting_bulk = sum(image.bulk for image in self.waiting)
        if images <= room.left(bulk, self.slots - len(self.running), len(self.waiting), waiting_bulk):
            return 0.0
        ends = [*self.ends(step_time)]
        return next((end.at for end in ends if images <= room.left(bulk, end.free, end.waiting, end.bulk)),
                    ends[-1].at if ends else 0.0)

    def until_done(self, request: str, step_time: StepTime = in_steps) -> float:
        """Time until the last image of a request: the same as from `ends`, but faster to compute."""
        replay = self._replay()
        done = max((end for end, image in replay if image.request == request), default=0)
        now, at = 0.0, 0.0
        last = sorted(end for end, _ in replay)[-self.slots:]  # until the first of these, every slot is taken
        for images, end in zip(range(len(last), 0, -1), last, strict=True):
            at, now = at + (min(end, done) - now) * step_time(images), end
            if end >= done:
                break
        return at


def latest_end(slots: int, length: float, running_steps: float, waiting: int) -> float:
    """A bound on the steps after which all admitted images are done; much faster to compute than the replay.

    running_steps: of all images in slots · waiting: images, each counted as a whole one. The bound is the remaining
    work, shared by all slots, plus one image: Graham, "Bounds on multiprocessing timing anomalies", 1969.
    """
    return length + (running_steps + length * waiting) / slots
