"""A model of this process, as the event loop knows it: its requests, its room, and when images will
be done.
"""

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..errors import ServiceError, deadline_unreachable, queue_full
from .decode.engine import Engine
from .decode.scheduler import QUANTUM_S, bulk_is_next
from .image import Image, State
from .job import Job
from .request import Request, ServedModel

MEASURED_S = 0.25  # seconds that images must have been in slots before their pace counts
# images of which less than 1/MEASURED_SHARE must be drawn do not count: their time is prefill
MEASURED_SHARE = 8
# forget the pace after so long without use: a wrong one that refuses all would never be corrected
STALE_S = 5.0
NEW = 0.2  # weight of one image in the smoothed pace
CONFIDENT = 2  # images that must have been measured
# factor on predicted times: when the queue is as long as deadlines allow, a bare prediction would
# let
SAFETY = 1.25
# half of the admitted images be decoded nearly to their end for nothing


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
        kind = bulk_is_next(len(classes[False]), len(classes[True]), overtaken)
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
        self.in_quanta = 0.0, 0.0  # seconds of all quanta, and of the images that had slots in them
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

    def refusal(self, job: Job) -> ServiceError | None:
        """queue_full, with the time until there is room, if there is none for a job now."""
        room = left = self.slots + self.queue[False] - self.undone
        if job.bulk:
            running = self.undone - self.waiting()
            left = min(room, self.slots - running + self.queue[True] - self.waiting(bulk=True))
        if (excess := job.count - left) <= 0:
            return None
        bulk = job.count <= room  # only bulk images have too little room
        # none, if all room is held by pictures to be scored
        until_s = [end for end, _ in self.ends()]
        return queue_full(
            self.waiting(True if bulk else None),
            job.count,
            self.queue[bulk],
            until_s[min(excess, len(until_s)) - 1] if until_s else 0.0,
        )

    def admit(self, request: Request) -> None:
        """Raises deadline_unreachable."""
        job, now = request.job, time.monotonic()
        if not self.requests and now - self._measured_at > STALE_S:
            self.pace = Pace()
        if not job.scored:
            tokens = self.undone * self.config.length + request.tokens * job.count  # at most
            # all work divided among all slots, and one image more: Graham, "Bounds on
            # multiprocessing timing anomalies"
            bound_s = (self.config.length + tokens / self.slots) * self.seconds_per_token(
                self.slots
            )
            # others must not become late by it, but for hasty ones, which could keep it out
            left_s = {
                other.id: other.deadline - now
                for other in (*self.requests.values(), request)
                if other.timeout_s >= request.timeout_s
            }
            if bound_s * SAFETY > min(left_s.values()):  # hardly ever
                new = [Remaining(request.id, request.tokens)] * job.count
                late, before = (
                    {
                        id: SAFETY * end
                        for end, id in self.ends(images, bulk=job.bulk)
                        if SAFETY * end > left_s.get(id, math.inf)
                    }
                    for images in (new, ())
                )
                if late.keys() - before.keys():
                    ahead = sum(
                        other.undone for other in self.requests.values() if not other.job.scored
                    )
                    raise deadline_unreachable(left_s[request.id], late.get(request.id), ahead)
        self.requests[request.id] = request

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
            for index, (began, *_) in request.begun.items():
                image = request.images[index]
                if image.slot and request.tokens >= self._enough:
                    drawn += request.tokens - int(self.engine.slots.left[image.slot])
                    seconds, running = seconds + now - began, running + 1
        # not by the first tokens: they are cold
        known = 0 < self._enough * running <= drawn and seconds > MEASURED_S
        return (seconds / drawn) * math.sqrt(batch / running) if known else 0.0

    def measure(self, request: Request, image: Image) -> None:
        """Learn from the time of an image that is done, or whose deadline has passed: else only
        quick ones counted.
        """
        self._measured_at = now = time.monotonic()
        # in no slot, nothing is left
        drawn = request.tokens - int(self.engine.slots.left[image.slot])
        began, quanta_s, images_s = request.begun[image.index]
        seconds = self.in_quanta[0] - quanta_s  # 0 by a coarse clock
        # by the mean number of images: of a crowd, the last ends alone
        if drawn >= self._enough and seconds:
            self.pace.learn((self.in_quanta[1] - images_s) / seconds, (now - began) / drawn)

    def too_late(self) -> list[Request]:
        """Requests without a slot that would hardly be done in time even if they got one now.

        Decoding them all the same would also delay the requests behind them.
        """
        waiting = [
            request
            for request in self.requests.values()
            if not (request.begun or request.late or request.job.scored)
        ]
        token_s = (
            self.seconds_per_token(min(len(self.engine.slots.running) + 1, self.slots))
            if waiting
            else 0.0
        )
        next_report = time.monotonic() + QUANTUM_S  # at the latest
        return [
            request
            for request in waiting
            if request.tokens * token_s * SAFETY > request.deadline - next_report
        ]
