"""The engine thread, and the bridge between it and asyncio: nothing else knows both.

HTTP hands in a request and awaits events; the thread turns one batcher after the other, and gives
what is left of its time to a comparison, if one is under way.
"""

import asyncio
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from server.batcher import Batcher, Turn
from server.engine import ImageSpec
from server.errors import DeadlinePassed, Draining, EngineFailed, EngineLost, ServiceError
from server.metrics import Metrics

logger = logging.getLogger("linpix")
_DEAD = "the engine has stopped after an error in the server; it must be restarted"
LAST_WORDS_S = 1.0  # for the answers to reach their clients, before a process without an engine ends
LOST = 70           # its exit status: an internal software error, by sysexits.h
BACKGROUND_SHARE = 10  # a comparison gets one unit of work for this many quanta of live requests


@dataclass(frozen=True, slots=True)
class RowsDone:
    """`rows` image rows of an image are finished; the rest of its canvas is not decoded yet."""

    index: int
    rows: int
    canvas: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ImageDone:
    index: int
    canvas: NDArray[np.uint8]


Event = RowsDone | ImageDone | ServiceError


@dataclass(slots=True, eq=False)
class Request:
    """One admitted request: the engine thread writes events, the event loop reads them."""

    id: str
    endpoint: str
    batcher: Batcher
    images: int
    stream: bool
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    admitted: float = field(default_factory=time.monotonic)
    joined: int = 0                                            # images that have had a slot
    done: int = 0
    deadline: float = math.inf                                 # on the loop's clock
    rows: dict[int, int] = field(default_factory=dict)         # image rows finished, by image
    given: dict[int, int] = field(default_factory=dict)        # those that came with the request

    def send(self, event: Event) -> None:
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the loop is closed: the process is on its way out, and nobody listens
            logger.debug("event for request %s after its loop closed", self.id)


class Worker:
    """Owns the engine thread. `submit` and `cancel` are called on the event loop."""

    def __init__(self, batchers: dict[str, Batcher], metrics: Metrics, request_timeout_s: float = math.inf) -> None:
        self.batchers, self.metrics, self._timeout_s = batchers, metrics, request_timeout_s
        self.requests: dict[str, Request] = {}
        self.draining = False
        self._started = False       # the thread has begun its first round
        self._dead = False          # it has ended without being asked to
        self._background: Iterator[None] | None = None
        self._wake = threading.Condition()
        self._stop = False
        self._ids = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        for name, batcher in batchers.items():
            metrics.state_slots.labels(name).set(batcher.engine.slots)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the quantum under way; requests still there end with Draining."""
        self.draining = True
        self.fail_all(Draining())
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join()

    @property
    def stepping(self) -> bool:
        """Whether the engine thread runs."""
        return self._started and self._thread.is_alive() and not self._dead

    # --- called on the event loop ---

    def admit(self, model: str, images: int, *, endpoint: str, stream: bool) -> Request:
        """Reserve room for a request before its upload is decoded. Raises QueueFull, Draining or EngineFailed."""
        if self.draining:
            self.metrics.requests_rejected.labels("draining").inc()
            raise Draining()
        if self._dead:
            raise EngineFailed(_DEAD)
        batcher, loop = self.batchers[model], asyncio.get_running_loop()
        request = Request(f"req-{next(self._ids)}", endpoint, batcher, images, stream, loop,
                          deadline=loop.time() + self._timeout_s)
        try:
            batcher.admit(request.id, images)
        except ServiceError:
            self.metrics.requests_rejected.labels("queue_full").inc()
            raise
        self.requests[request.id] = request
        self._count_requests()
        return request

    def submit(self, request: Request, specs: Sequence[ImageSpec]) -> None:
        """Put an admitted request's images in the queue."""
        request.given = {index: spec.prefix // request.batcher.row_subpixels for index, spec in enumerate(specs)}
        request.rows = dict(request.given)
        request.batcher.enqueue(request.id, specs)  # from here on the engine thread knows it
        with self._wake:
            self._wake.notify()

    async def events(self, request: Request) -> AsyncIterator[RowsDone | ImageDone]:
        """Events until the last image is there. Raises the ServiceError that ended the request early."""
        done = 0
        while done < request.images:
            try:
                async with asyncio.timeout_at(request.deadline):
                    event = await request.events.get()
            except TimeoutError:
                raise DeadlinePassed(self._timeout_s) from None
            if isinstance(event, ServiceError):
                raise event
            done += isinstance(event, ImageDone)
            yield event

    def withdraw(self, request: Request) -> None:
        """Take back an admission: the request turned out to be none. Safe to call twice."""
        if self.requests.pop(request.id, None) is not None:
            request.batcher.cancel(request.id)
            self._count_requests()

    def finish(self, request: Request, outcome: str) -> None:
        """The request is over, however it ended. Frees whatever it still holds; safe to call twice."""
        if self.requests.pop(request.id, None) is None:
            return
        request.batcher.cancel(request.id)
        name, backend = request.batcher.labels
        self.metrics.requests.labels(request.endpoint, outcome).inc()
        self.metrics.request_duration.labels(request.endpoint).observe(time.monotonic() - request.admitted)
        if missing := request.images - request.done:
            self.metrics.images_completed.labels(name, backend, outcome).inc(missing)
        self._count_requests()
        with self._wake:
            self._wake.notify()  # the engine thread frees the slots, even if it was idle

    def fail_all(self, error: ServiceError) -> None:
        for request in list(self.requests.values()):
            request.send(error)

    def run_in_background(self, work: Iterator[None]) -> None:
        """Run a generator between quanta, one `next` at a time, at low priority."""
        with self._wake:
            self._background = work
            self._wake.notify()

    # --- the engine thread ---

    def _run(self) -> None:
        try:
            self._rounds()
        except EngineLost as lost:
            logger.critical("%s", lost)
            self._dead = True
            self.fail_all(EngineFailed(str(lost)))
            time.sleep(LAST_WORDS_S)
            os._exit(LOST)
        except Exception:  # ours to mend; until then nobody waits on a thread that is gone
            logger.exception("the engine thread ended")
            self._dead = True
            self.fail_all(EngineFailed(_DEAD))

    def _rounds(self) -> None:
        rounds = 0
        while True:
            with self._wake:
                self._started = True
                while not (self._stop or self._background or any(b.busy for b in self.batchers.values())):
                    self._wake.wait()
                if self._stop:
                    return
            live = False
            for batcher in self.batchers.values():
                if batcher.busy:
                    live = True
                    self._turn(batcher)
            rounds += 1
            if self._background is not None and (not live or rounds % BACKGROUND_SHARE == 0):
                self._work_in_background()

    def _turn(self, batcher: Batcher) -> None:
        try:
            self._publish(batcher, batcher.turn())
        except EngineLost:
            raise
        except Exception as failure:
            logger.exception("a quantum of %s failed", batcher.labels[0])
            error = EngineFailed(f"the engine failed on this batch ({type(failure).__name__}); "
                                 "the same request may succeed if it is sent again")
            for lost in batcher.abandon():
                if (request := self.requests.get(lost)) is not None:
                    request.send(error)
            self.metrics.state_slots_used.labels(batcher.labels[0]).set(0)

    def _publish(self, batcher: Batcher, turn: Turn) -> None:
        now = time.monotonic()
        name, backend = batcher.labels
        metrics = self.metrics
        for row in turn.joined:
            if (request := self.requests.get(row.request)) is not None:
                request.joined += 1
                metrics.queue_wait.observe(now - turn.seconds - request.admitted)
        width = batcher.row_subpixels
        for row in turn.moved:
            request, rows = self.requests.get(row.request), row.position // width
            if request is None or rows == request.rows[row.index]:
                continue
            before, request.rows[row.index] = request.rows[row.index], rows
            if before == request.given[row.index]:
                metrics.first_row.observe(now - request.admitted)
            if request.stream:
                canvas = batcher.engine.image(row.slot)
                for finished in range(before + 1, rows + 1):
                    request.send(RowsDone(row.index, finished, canvas))
        for row in turn.finished:
            if (request := self.requests.get(row.request)) is not None:
                request.done += 1
                metrics.images_completed.labels(name, backend, "completed").inc()
                request.send(ImageDone(row.index, batcher.engine.image(row.slot)))
        for lost in turn.failed:
            logger.error("%s gave parameters that are not finite for an image of %s", name, lost)
            if (request := self.requests.get(lost)) is not None:
                request.send(EngineFailed(f"{name} gave parameters that are not finite for an image of this request; "
                                          "another seed or temperature may succeed"))
        if turn.steps:
            metrics.pixels_generated.labels(name, backend).inc(turn.subpixels)
            metrics.engine_step.labels(name, backend).observe(turn.seconds / turn.steps)
            metrics.engine_step_batch_size.observe(turn.rows)
            metrics.state_saturations.labels(name).inc(turn.saturated)
        metrics.state_slots_used.labels(name).set(len(batcher.scheduler.running))
        self._count_requests()

    def _count_requests(self) -> None:
        with self._wake:  # both threads come here: the later count is the one that stays
            requests = list(self.requests.values())
            self.metrics.requests_waiting.set(sum(not request.joined for request in requests))
            self.metrics.requests_running.set(sum(bool(request.joined) for request in requests))

    def _work_in_background(self) -> None:
        work = self._background
        assert work is not None
        try:
            next(work)
            return
        except StopIteration:
            pass
        except Exception:
            logger.exception("background work failed")
        with self._wake:
            if self._background is work:  # and not what came after it
                self._background = None
