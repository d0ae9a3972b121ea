"""A model of this process, as the event loop knows it: its requests, its room, and when images will be done."""

import math
import time
from collections.abc import Sequence

from ..errors import ServiceError, deadline_unreachable, queue_full
from .decode.engine import Engine
from .decode.scheduler import QUANTUM_S
from .forecast import CONFIDENT, SAFETY, Pace, Remaining, ends, queue_order
from .image import Image, State
from .job import Job
from .request import Request, ServedModel

MEASURED_S = 0.25  # seconds that images must have been in slots before their pace counts
MEASURED_SHARE = 8  # images of which less than 1/MEASURED_SHARE must be drawn do not count: their time is prefill
STALE_S = 5.0  # forget the pace after so long without use: a wrong one that refuses all would never be corrected


class Model(ServedModel):
    """Used on the event loop only. The engine thread changes images meanwhile, so numbers may be a quantum old."""

    def __init__(self, engine: Engine, max_queue: int) -> None:
        decoder = engine.decoder
        super().__init__(decoder.checkpoint, decoder.facts, decoder.slots, max_queue)
        self.engine, self.pace, self.kernels = engine, Pace(), decoder.kernels
        self.requests: dict[str, Request] = {}  # in the order they came
        self._measured_at = -math.inf
        self._enough = self.config.length // MEASURED_SHARE

    @property
    def undone(self) -> int:
        return sum(request.undone for request in self.requests.values())

    def waiting(self, bulk: bool | None = None) -> int:
        """Images without a slot, of one class or of both; a picture to be scored counts as one."""
        return sum(request.job.scored + sum(image.state is State.WAITING for image in request.images)
                   for request in self.requests.values() if bulk in (None, request.job.bulk))

    def refusal(self, job: Job) -> ServiceError | None:
        """queue_full, with the time until there is room, if there is none for a job now."""
        room = left = self.slots + self.queue[False] - self.undone
        if job.bulk:
            running = self.undone - self.waiting()
            left = min(room, self.slots - running + self.queue[True] - self.waiting(bulk=True))
        if (excess := job.count - left) <= 0:
            return None
        bulk = job.count <= room  # only bulk images have too little room
        until_s = [end for end, _ in self.ends()]  # none, if all room is held by pictures to be scored
        return queue_full(self.waiting(True if bulk else None), job.count, self.queue[bulk],
                          until_s[min(excess, len(until_s)) - 1] if until_s else 0.0)

    def admit(self, request: Request) -> None:
        """Raises deadline_unreachable."""
        job, now = request.job, time.monotonic()
        if not self.requests and now - self._measured_at > STALE_S:
            self.pace.forget()
        if not job.scored:
            tokens = self.undone * self.config.length + request.tokens * job.count  # at most
            # all work divided among all slots, and one image more: Graham, "Bounds on multiprocessing timing anomalies"
            bound_s = (self.config.length + tokens / self.slots) * self.seconds_per_token(self.slots)
            if bound_s * SAFETY > (left_s := request.deadline - now):  # hardly ever
                new = [Remaining(request.id, request.tokens)] * job.count
                needed_s = SAFETY * max(end for end, id in self.ends(new, bulk=job.bulk) if id == request.id)
                if needed_s > left_s:
                    ahead = sum(other.undone for other in self.requests.values() if not other.job.scored)
                    raise deadline_unreachable(left_s, needed_s, ahead)
        self.requests[request.id] = request

    def ends(self, new: Sequence[Remaining] = (), *, bulk: bool = False) -> list[tuple[float, str]]:
        """Seconds until each image will be done, and its request. new: images that would come last in their class."""
        classes: tuple[list[Remaining], list[Remaining]] = ([], [])
        running, left = [], self.engine.scheduler.left.tolist()
        for request in self.requests.values():
            for image in request.images:
                if image.state is State.WAITING:
                    classes[request.job.bulk].append(Remaining(request.id, request.tokens))
                elif image.state is not State.DONE:
                    running.append(Remaining(request.id, left[image.slot]))
        classes[bulk].extend(new)
        return ends(self.slots, running, queue_order(*classes), self.seconds_per_token)

    def seconds_per_token(self, batch: int) -> float:
        """The pace with so many images in slots; until images have finished, that of the running ones; else 0."""
        if self.pace.measured >= CONFIDENT:
            return self.pace(batch)
        drawn, seconds, now, running = 0, 0.0, time.monotonic(), 0
        for request in self.requests.values():
            for index, began in request.begun.items():
                image = request.images[index]
                if image.slot and image.state is not State.DONE and request.tokens >= self._enough:
                    drawn += request.tokens - int(self.engine.scheduler.left[image.slot])
                    seconds, running = seconds + now - began, running + 1
        known = 0 < self._enough * running <= drawn and seconds > MEASURED_S  # not by the first tokens: they are cold
        return (seconds / drawn) * math.sqrt(batch / running) if known else 0.0

    def finished(self, request: Request, image: Image) -> None:
        """One of a request's images is done: learn from the time it took."""
        self._measured_at = now = time.monotonic()
        if request.tokens >= self._enough:
            batch = min(len(self.engine.scheduler.running) + 1, self.slots)
            self.pace.learn(batch, (now - request.begun[image.index]) / request.tokens)

    def too_late(self) -> list[Request]:
        """Requests without a slot that would hardly be done in time even if they got one now.

        Decoding them all the same would also delay the requests behind them.
        """
        waiting = [request for request in self.requests.values()
                   if not (request.begun or request.late or request.job.scored)]
        batch = min(len(self.engine.scheduler.running) + 1, self.slots)
        token_s = self.seconds_per_token(batch) if waiting else 0.0
        next_report = time.monotonic() + QUANTUM_S  # at the latest
        return [request for request in waiting if request.tokens * token_s * SAFETY > request.deadline - next_report]
