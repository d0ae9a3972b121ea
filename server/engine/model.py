"""A model of this process, as the event loop knows it: its requests, its room, and when images will
be done.
"""

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..errors import deadline_unreachable, queue_full
from .decode.engine import Engine
from .decode.scheduler import QUANTUM_S, bulk_is_next
from .image import Image, State
from .request import Request, ServedModel

MEASURED_S = 0.25  # seconds that images must have been in slots before their pace counts
# images of which less than 1/MEASURED_SHARE must be drawn do not count: their time is prefill
MEASURED_SHARE = 8
# forget the pace after so long without use: a wrong one that refuses all would never be corrected
STALE_S = 5.0
NEW = 0.2  # weight of one image in the smoothed pace
CONFIDENT = 2  # images that must have been measured
# Factor on predicted times, which are a few percent off. Without this margin a full queue would
# decode half of its images almost to the end and then drop them.
SAFETY = 1.25


# --- forecasts: when each admitted image will be done, from one measured number, without a clock
# ---


class Pace:
    """Seconds that an image spends in slots for each token that has to be drawn, by how many images
    are in slots.

    Measured from outside, for finished images: it contains prefill, steps that are skipped, checks
    and further attempts. Numbers of images are taken in powers of the square root of two.
    """

    def __init__(self) -> None:
        self._seconds, self.measured = dict[float, float](), 0  # measured: images

    def learn(self, batch: float, seconds: float) -> None:
        size = round(2 * math.log2(batch))
        before = self._seconds.get(size, seconds)
        self._seconds[size] = before + NEW * (seconds - before)
        self.measured += 1

    def __call__(self, batch: int) -> float:
        """Seconds per token with so many images in slots; 0 when nothing is known.

        A size without measurements is estimated from the nearest one: twice the images take 1.4
        times as long, half way between steps that cost the same for any number and steps that cost
        the same for each image.
        """
        size = 2 * math.log2(batch)
        nearest = min(self._seconds, key=lambda other: abs(other - size), default=size)
        return self._seconds.get(nearest, 0.0) * 2 ** ((size - nearest) / 4)


class Remaining(NamedTuple):
    """What is left to do for one image."""

    request: str
    tokens: float


def queue_order(interactive: Iterable[Remaining], bulk: Iterable[Remaining]) -> list[Remaining]:
    """Waiting images in the order in which they will get slots."""
    classes, order, overtaken = (deque(interactive), deque(bulk)), list[Remaining](), 0
    while classes[False] or classes[True]:
        kind = bulk_is_next(*classes, overtaken)
        order.append(classes[kind].popleft())
        overtaken = 0 if kind or not classes[True] else overtaken + 1
    return order


def ends(
    slots: int,
    running: Sequence[Remaining],
    waiting: Sequence[Remaining],
    pace: Callable[[int], float],
) -> list[tuple[float, str]]:
    """The seconds until each image will be done, and its request, in order of time, if no request
    arrives or leaves.

    running: in slots · waiting: in the order in which they will get slots.
    """
    in_tokens = [(image.tokens, image.request) for image in running]
    free = [0.0] * max(slots - len(running), 0) + [image.tokens for image in running]
    heapq.heapify(free)
    for image in waiting:
        end = free[0] + image.tokens
        heapq.heapreplace(free, end)
        in_tokens.append((end, image.request))
    found, now, at = list[tuple[float, str]](), 0.0, 0.0
    for ended, (end, request) in enumerate(sorted(in_tokens)):
        at, now = at + (end - now) * pace(min(len(in_tokens) - ended, slots)), end
        found.append((at, request))
    return found


class Model(ServedModel):
    """Used on the event loop only. The engine thread changes images meanwhile, so numbers may be a
    quantum old.
    """

    def __init__(self, engine: Engine, max_queue: int) -> None:
        decoder = engine.decoder
        super().__init__(decoder.checkpoint, decoder.facts, decoder.slots.count, max_queue)
        self.engine, self.pace, self.kernels = engine, Pace(), decoder.kernels
        self.requests: dict[str, Request] = {}  # in the order they came
        self._measured_at = -math.inf
        # seconds of all quanta, and of the images that had slots in them
        self.quanta_s, self.images_s = 0.0, 0.0
        self._enough = max(1, self.config.length // MEASURED_SHARE)

    @property
    def undone(self) -> int:
        return sum(request.undone for request in self.requests.values())

    def waiting(self, bulk: bool | None = None) -> int:
        """Images without a slot, of one class or of both; a picture to be scored counts as one."""
        return sum(
            request.job.scored + sum(image.state is State.WAITING for image in request.images)
            for request in self.requests.values()
            if bulk in (None, request.job.bulk)
        )

    def check_room(self, images: int, *, bulk: bool = False) -> None:
        """Raise queue_full, with the time until there is room, if there is none for images now."""
        room = left = self.slots + self.queue[False] - self.undone
        if bulk:
            running = self.undone - self.waiting()
            left = min(room, self.slots - running + self.queue[True] - self.waiting(bulk=True))
        excess = images - left
        if excess <= 0:
            return
        only_bulk = images <= room  # only bulk images have too little room
        # none, if all room is held by pictures to be scored
        until_s = [end for end, _ in self.ends()] or [0.0]
        waiting = self.waiting(only_bulk or None)
        raise queue_full(
            waiting, images, self.queue[only_bulk], until_s[min(excess, len(until_s)) - 1]
        )

    def check_time(self, request: Request) -> None:
        """Raises deadline_unreachable."""
        job, now = request.job, time.monotonic()
        if not self.requests and now - self._measured_at > STALE_S:
            self.pace = Pace()
        if job.scored:
            return
        tokens = self.undone * self.config.length + request.tokens * job.count  # at most
        # all work divided among all slots, and one image more: Graham, "Bounds on
        # multiprocessing timing anomalies"
        bound_s = (self.config.length + tokens / self.slots) * self.seconds_per_token(self.slots)
        # It must not make others late. Requests with a shorter timeout do not count: they could
        # keep it out.
        left_s = {
            other.id: other.deadline - now
            for other in (*self.requests.values(), request)
            if other.timeout_s >= request.timeout_s
        }
        if bound_s * SAFETY <= min(left_s.values()):  # nearly always
            return

        def late_with(images: Sequence[Remaining]) -> dict[str, float]:
            """When the images of late requests end, in seconds."""
            ends = {id: SAFETY * end for end, id in self.ends(images, bulk=job.bulk)}
            return {id: end for id, end in ends.items() if end > left_s.get(id, math.inf)}

        late = late_with([Remaining(request.id, request.tokens)] * job.count)
        if late.keys() - late_with(()).keys():
            ahead = sum(other.undone for other in self.requests.values() if not other.job.scored)
            raise deadline_unreachable(left_s[request.id], late.get(request.id), ahead)

    def ends(self, new: Sequence[Remaining] = (), *, bulk: bool = False) -> list[tuple[float, str]]:
        """Seconds until each image will be done, and its request. new: images that would come last
        in their class.
        """
        classes: tuple[list[Remaining], list[Remaining]] = ([], [])
        running, left = [], self.engine.slots.left.tolist()
        for request in self.requests.values():
            for image in request.images:
                if image.state is State.WAITING:
                    classes[request.job.bulk].append(Remaining(request.id, request.tokens))
                elif image.state is not State.DONE:
                    running.append(Remaining(request.id, left[image.slot]))
        classes[bulk].extend(new)
        return ends(self.slots, running, queue_order(*classes), self.seconds_per_token)

    def seconds_per_token(self, batch: int) -> float:
        """The pace with so many images in slots; until images have finished, that of the running
        ones; else 0.
        """
        if self.pace.measured >= CONFIDENT:
            return self.pace(batch)
        drawn, seconds, now, running = 0, 0.0, time.monotonic(), 0
        for request in self.requests.values():
            for index, started in request.begun.items():
                image = request.images[index]
                if image.slot and request.tokens >= self._enough:
                    drawn += request.tokens - int(self.engine.slots.left[image.slot])
                    seconds, running = seconds + now - started.at, running + 1
        # not by the first tokens: they are cold
        known = 0 < self._enough * running <= drawn and seconds > MEASURED_S
        return (seconds / drawn) * math.sqrt(batch / running) if known else 0.0

    def measure(self, request: Request, image: Image) -> None:
        """Learn from finished images and from late ones. If late ones were left out, the pace
        would look too fast.
        """
        self._measured_at = now = time.monotonic()
        # in no slot, nothing is left
        drawn = request.tokens - int(self.engine.slots.left[image.slot])
        started = request.begun[image.index]
        seconds = self.quanta_s - started.quanta_s  # 0 by a coarse clock
        # use the mean number of images: the last image of a crowd is alone at its end
        if drawn >= self._enough and seconds:
            batch = (self.images_s - started.images_s) / seconds
            self.pace.learn(batch, (now - started.at) / drawn)

    def too_late(self) -> list[Request]:
        """Requests without a slot that would hardly be done in time even if they got one now.

        Decoding them all the same would also delay the requests behind them.
        """
        token_s = self.seconds_per_token(min(len(self.engine.slots.running) + 1, self.slots))
        next_report = time.monotonic() + QUANTUM_S  # at the latest
        return [
            request
            for request in self.requests.values()
            if not (request.begun or request.late or request.job.scored)
            and request.tokens * token_s * SAFETY > request.deadline - next_report
        ]
