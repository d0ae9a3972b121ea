"""The engine thread, and the bridge between it and asyncio: nothing else knows both.

HTTP hands in a request and awaits events; the thread turns one batcher after the other, and gives
what is left of its time to a comparison, if one is under way.
"""

import asyncio
import contextlib
import gc
import itertools
import logging
import math
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from server import logs
from server.batcher import Batcher, Turn
from server.decoders import Decoders
from server.engine import ImageSpec
from server.errors import (
    BatchFailed,
    ClientLimit,
    DeadlinePassed,
    Draining,
    EngineFailed,
    EngineGone,
    EngineLost,
    NotFinite,
    ServiceError,
)
from server.faults import Faults
from server.metrics import PRIORITIES, Metrics
from server.watchdog import Watchdog

logger = logging.getLogger("linpix")
LAST_WORDS_S = 1.0  # for the answers to reach their clients, before a process without an engine ends
COLLECT_S = 1.0     # after the last request of a model that is no longer served: when its memory is given back
AGAIN_S = 6.0       # if anything kept it then: uvicorn's keep-alive, and a second
LOST = 70           # its exit status: an internal software error, by sysexits.h
RESTARTS, RESTARTS_S = 3, 600.0  # the engine thread is begun again so many times in so long; then the process ends
BACKGROUND_PATIENCE = 10         # watchdog time-outs that a comparison's unit of work may take
BACKGROUND_SHARE = 10  # a comparison gets one unit of work for this many quanta of live requests
T = TypeVar("T")


def collect() -> None:
    """Collect garbage now, and keep what lives out of all collections until the next call of this.

    Each would hold every thread up for as long as it takes to look at all objects there are: of torch and FastAPI
    alone 350,000, in 0.2 s, once in 500 requests.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


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
    client: str
    batcher: Batcher
    loop: asyncio.AbstractEventLoop
    timeout_s: float
    images: int                                                # for a start; then what the body says
    stream: bool = False
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    admitted: float = field(default_factory=time.monotonic)
    joined: int = 0                                            # images that have had a slot
    done: int = 0
    began: float = 0.0                                         # on the loop's clock, as the deadline
    rows: dict[int, int] = field(default_factory=dict)         # image rows finished, by image
    given: dict[int, int] = field(default_factory=dict)        # those that came with the request

    @property
    def deadline(self) -> float:
        return self.began + self.timeout_s

    @property
    def left_s(self) -> float:
        """Until its deadline."""
        return self.deadline - self.loop.time()

    def send(self, event: Event) -> None:
        hand_over(self.loop, [(self, event)])


def hand_over(loop: asyncio.AbstractEventLoop, events: Sequence[tuple[Request, Event]]) -> None:
    """From any thread: all of them at once, since to wake the loop is a system call, which gives up the GIL."""
    def put() -> None:
        for request, event in events:
            request.events.put_nowait(event)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:  # the loop is closed: the process is on its way out, and nobody listens
        logger.debug("%d events after their loop closed", len(events))


class Worker:
    """Owns the engine thread. `submit` and `cancel` are called on the event loop."""

    def __init__(self, batchers: dict[str, Batcher], metrics: Metrics, request_timeout_s: float = math.inf,
                 watchdog_timeout_s: float = 60.0, faults: Faults | None = None, client_images: int = 0) -> None:
        """client_images: that one client may have waiting or running; 0: any number."""
        self.metrics, self._timeout_s, self._faults = metrics, request_timeout_s, faults
        self._client_images = client_images
        self.decoders = Decoders()
        self.requests: dict[str, Request] = {}
        self.batchers: dict[str, Batcher] = {}  # replaced, never changed: other threads read it
        self._leaving: list[Batcher] = []       # no longer served, and turned until the last request there is over
        self.draining = False
        self.began = time.monotonic()
        self.gone = ""              # why this process will decode nothing more, once that is so
        self._started = False       # the thread has begun its first round
        self._turning: Batcher | None = None
        self._background: Iterator[None] | None = None
        self._wake = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._watchdog = Watchdog(watchdog_timeout_s, self._busy, self._hung)
        metrics.heartbeat_age.set_function(lambda: self._watchdog.age_s)
        self.serve(batchers)

    def start(self) -> None:
        self._thread.start()
        self._watchdog.start()

    def stop(self) -> None:
        """End the thread after the quantum under way; requests still there end with Draining."""
        self.draining = True
        self.fail_all(Draining())
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join()  # if it hangs, the watchdog still runs
        self._watchdog.stop()

    @property
    def stepping(self) -> bool:
        """Whether the engine thread runs."""
        return self._started and self._thread.is_alive() and not self.gone

    # --- called on the event loop ---

    def serve(self, batchers: dict[str, Batcher]) -> None:
        """From now on requests are admitted to these; those that were admitted elsewhere go on there to their end."""
        for batcher in batchers.values():
            batcher.beat, batcher.decoded_s = self._watchdog.beat, self.decoders.until
            self.metrics.add_model(*batcher.labels)
            for bulk, priority in enumerate(PRIORITIES):
                self.metrics.images_waiting.labels(batcher.labels[0], priority).set_function(
                    partial(self._queued, batcher.labels[0], bool(bulk)))
        old, kept = self.batchers, set(batchers.values())
        self._leaving = [*self._leaving, *(batcher for batcher in old.values() if batcher not in kept)]
        self.batchers = batchers  # after the list: whoever looks in between finds every batcher
        self._let_go()
        self._count_slots({*old, *batchers})

    def _let_go(self) -> None:
        """Forget the batchers that nobody is left in: with them goes their memory."""
        if not self._leaving:
            return
        wanted = {request.batcher for request in self.requests.values()}
        over = [batcher for batcher in self._leaving if batcher not in wanted]
        if over:
            self._leaving = [batcher for batcher in self._leaving if batcher in wanted]
            self._count_slots({batcher.labels[0] for batcher in over})
            gone = [weakref.ref(batcher) for batcher in over]
            asyncio.get_running_loop().call_later(COLLECT_S, self._give_back, gone, AGAIN_S)

    def _give_back(self, gone: list[weakref.ref[Batcher]], again_s: float) -> None:
        """Collect until they are: their last requests are in cycles, and an idle connection keeps its last one."""
        collect()
        if left := [batcher for batcher in gone if batcher() is not None]:
            asyncio.get_running_loop().call_later(again_s, self._give_back, left, 2 * again_s)

    def _pools(self) -> list[Batcher]:
        """Every batcher that may have work."""
        return [*self.batchers.values(), *self._leaving]

    def _queued(self, model: str, bulk: bool) -> int:
        """Images without a slot, in all pools of a model's name."""
        return sum(batcher.queued(bulk) for batcher in self._pools() if batcher.labels[0] == model)

    def has_room(self, client: str) -> bool:
        """Whether an image more of a client would be admitted."""
        return (max(batcher.room() for batcher in self.batchers.values()) > 0
                and (not self._client_images or self._here(client) < self._client_images))

    def admit(self, id: str, endpoint: str, client: str, timeout_s: float = math.inf, images: int = 1) -> Request:
        """Let a request in before its body is read, with room for one image or none: how many it wants, it says there.

        The room is in the queue of the model that has most of it.
        id: of its own, and what clients and the log know it by · timeout_s: what the client allows, if it said so.
        Raises QueueFull, ClientLimit, DeadlineUnreachable, Draining or EngineGone.
        """
        loop = asyncio.get_running_loop()
        batcher = max(self.batchers.values(), key=Batcher.room)
        request = Request(id, endpoint, client, batcher, loop, min(timeout_s, self._timeout_s), images,
                          began=loop.time())
        with self._counting_refusals():
            if self.draining:
                raise Draining()
            self._check_client(client, images)
            # of several models another may be faster: the body will tell which it is to be
            within_s = request.timeout_s if images and len(self.batchers) == 1 else math.inf
            batcher.admit(request.id, images, within_s=within_s, whole=endpoint == "generations")
            self.requests[request.id] = request
            if self.gone:  # looked at when the request can be seen: whoever sets it answers all that it sees then
                self.withdraw(request)
                raise EngineGone(self.gone)
        self._count_requests()
        return request

    def claim(self, request: Request, model: str, images: int, *, stream: bool = False, bulk: bool = False,
              timeout_s: float = math.inf) -> None:
        """Reserve room for all of an admitted request, now that its body is read. timeout_s: from its admission.

        Raises QueueFull, ClientLimit, DeadlineUnreachable or DeadlinePassed; the request is then to be withdrawn.
        """
        before, batcher = request.batcher, self.batchers[model]
        request.timeout_s, request.stream = min(request.timeout_s, timeout_s), stream
        self.check_time(request)
        with self._counting_refusals():
            self._check_client(request.client, images - request.images)
            batcher.admit(request.id, images, bulk=bulk, within_s=request.left_s,
                          whole=request.endpoint == "generations")
        request.batcher = batcher  # in this order, so that a look at it never finds fewer images waiting than it has
        request.images = images
        if before is not batcher:
            before.cancel(request.id)
            self._let_go()

    def submit(self, request: Request, specs: Sequence[ImageSpec]) -> None:
        """Put an admitted request's images in the queue. Raises DeadlineUnreachable or DeadlinePassed."""
        request.given = {index: spec.prefix // request.batcher.row_subpixels for index, spec in enumerate(specs)}
        request.rows = dict(request.given)
        self.check_time(request)
        with self._counting_refusals():
            request.batcher.enqueue(request.id, specs)  # from here on the engine thread knows it
        with self._wake:
            self._wake.notify()

    def _here(self, client: str) -> int:
        """A client's images, waiting or running."""
        return sum(request.images - request.done for request in self.requests.values() if request.client == client)

    def _check_client(self, client: str, images: int) -> None:
        """Raise ClientLimit if so many more would be too many, with the time until they were not."""
        if not self._client_images:
            return
        here = self._here(client)
        if (excess := here + images - self._client_images) > 0:
            ids = {request.id for request in self.requests.values() if request.client == client}
            ends = sorted(end for batcher in self._pools() for end in batcher.ends(ids))
            drawn_s = ends[min(excess, len(ends)) - 1] if ends else 0.0
            raise ClientLimit(here, images, self._client_images, max(drawn_s, self.decoders.until(excess)))

    @contextlib.contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except ServiceError as error:
            self.metrics.requests_rejected.labels(error.code).inc()
            raise

    def check_time(self, request: Request) -> None:
        """Raises DeadlinePassed, after what the loop had no occasion to interrupt."""
        if request.left_s <= 0:
            raise self._late(request)

    def _late(self, request: Request) -> DeadlinePassed:
        self.metrics.deadlines_passed.labels("running" if request.joined else "waiting").inc()
        request.batcher.over(request.id, late=True)
        return DeadlinePassed(request.timeout_s)

    @contextlib.asynccontextmanager
    async def in_time(self, request: Request) -> AsyncIterator[None]:
        """Raises DeadlinePassed, wherever the block is, at the request's deadline."""
        try:
            async with asyncio.timeout_at(request.deadline):
                yield
        except TimeoutError:
            raise self._late(request) from None

    async def decoded(self, request: Request, read: Callable[[], T]) -> T:
        """What read makes of a request's upload, in time. Raises DeadlineUnreachable or DeadlinePassed."""
        with self._counting_refusals():
            self.decoders.check(request.client, request.left_s)
        async with self.in_time(request):
            return await self.decoders.run(request.client, read)

    async def events(self, request: Request, patience_s: float | None = None
                     ) -> AsyncIterator[RowsDone | ImageDone | None]:
        """Events until the last image is there. Raises the ServiceError that ended the request early.

        patience_s: None comes after so many seconds without an event.
        """
        done = 0
        while done < request.images:
            event: Event | None = None
            async with self.in_time(request):
                with contextlib.suppress(TimeoutError):  # of this wait alone: a deadline is not seen as one in here
                    async with asyncio.timeout(patience_s):
                        event = await request.events.get()
            if isinstance(event, ServiceError):
                raise self._late(request) if isinstance(event, DeadlinePassed) else event
            done += isinstance(event, ImageDone)
            yield event

    def withdraw(self, request: Request) -> None:
        """Take back an admission: the request turned out to be none. Safe to call twice."""
        if self.requests.pop(request.id, None) is not None:
            request.batcher.cancel(request.id)
            self._count_requests()
            self._let_go()

    def finish(self, request: Request, outcome: str) -> None:
        """The request is over, however it ended. Frees whatever it still holds; safe to call twice."""
        with self._wake:  # an image that is finished just now is counted here or by the engine thread, not twice
            if self.requests.pop(request.id, None) is None:
                return
            missing = request.images - request.done
        request.batcher.cancel(request.id)
        name, backend = request.batcher.labels
        self.metrics.requests.labels(request.endpoint, outcome).inc()
        self.metrics.request_duration.labels(request.endpoint).observe(time.monotonic() - request.admitted)
        if missing:
            self.metrics.images_completed.labels(name, backend, outcome).inc(missing)
        self._count_requests()
        self._let_go()
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
        died: deque[float] = deque(maxlen=RESTARTS)
        while True:
            try:
                self._rounds()
                return
            except EngineLost as lost:
                self._end(str(lost), EngineFailed(str(lost)))
            except Exception as failure:  # ours to mend; until then it costs what it was about, and no more
                logger.exception("the engine thread died, and is begun again")
                now = time.monotonic()
                if len(died) == RESTARTS and now - died[0] < RESTARTS_S:
                    why = (f"the engine thread died {RESTARTS + 1} times in {now - died[0]:.0f} s, the last time of "
                           f"{type(failure).__name__}")
                    self._end(why, EngineFailed(why))
                died.append(now)
                self.metrics.engine_restarts.inc()
                if self._turning is not None:  # what it was about may be half done; all else is as it was
                    self._abandon(self._turning, failure)

    def _rounds(self) -> None:
        rounds = 0
        while True:
            with self._wake:
                self._started = True
                while not (self._stop or self._busy()):
                    self._wake.wait()
                if self._stop:
                    return
            live = self._round()
            rounds += 1
            if self._background is not None and (not live or rounds % BACKGROUND_SHARE == 0):
                self._watchdog.beat(BACKGROUND_PATIENCE)
                self._work_in_background()

    def _round(self) -> bool:
        """A quantum of each model; returns whether there was one. Nothing is left that would keep a batcher alive."""
        live = False
        for batcher in self._pools():
            if batcher.busy:
                live = True
                self._watchdog.beat()
                self._turning = batcher
                turn = batcher.turn()
                if self._faults is not None:
                    self._faults.end()
                self._publish(batcher, turn)
                self._turning = None
        return live

    def _busy(self) -> bool:
        return self._background is not None or any(batcher.busy for batcher in self._pools())

    def _abandon(self, batcher: Batcher, failure: Exception) -> None:
        """Empty every slot, and answer whoever had an image there or one whose end was not told."""
        batcher.abandon()
        error = BatchFailed(type(failure).__name__)
        for request in list(self.requests.values()):
            if request.batcher is batcher and batcher.waiting(request.id) < request.images - request.done:
                logger.error("a request of %s ends with its batch", batcher.labels[0], extra=logs.of(request.id))
                batcher.cancel(request.id)
                request.send(error)
        self._count_slots({batcher.labels[0]})
        self._turning = None

    def _hung(self, seconds: float) -> None:
        """On the watchdog's thread: a call that does not return cannot be ended, only the process can."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        logger.critical("the engine thread is at:\n%s", "".join(traceback.format_stack(frame)) if frame else "its end")
        why = f"the engine has shown no sign of life for {seconds:g} s, with work to do"
        self._end(why, EngineGone(why))

    def _end(self, why: str, error: ServiceError) -> NoReturn:
        """Answer what is in flight, and end the process, for its supervisor to start it again."""
        logger.critical("%s; the process ends with status %d", why, LOST)
        self.gone = why
        self.fail_all(error)
        time.sleep(LAST_WORDS_S)
        os._exit(LOST)

    def _publish(self, batcher: Batcher, turn: Turn) -> None:
        """Tell everybody whom a turn was about, and count what it did."""
        events: list[tuple[Request, Event]] = []
        try:
            self._sort_out(batcher, turn, events)
        finally:  # what is counted as told is told, whatever goes wrong after it
            for loop, theirs in itertools.groupby(events, key=lambda pair: pair[0].loop):
                hand_over(loop, [*theirs])

    def _sort_out(self, batcher: Batcher, turn: Turn, events: list[tuple[Request, Event]]) -> None:
        now = time.monotonic()
        name, backend = batcher.labels
        metrics = self.metrics
        for row in turn.joined:
            if (request := self.requests.get(row.request)) is not None:
                request.joined += 1
                metrics.queue_wait.observe(turn.joined_at - request.admitted)
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
                    events.append((request, RowsDone(row.index, finished, canvas)))
        for row in turn.finished:
            done = ImageDone(row.index, batcher.engine.image(row.slot))
            with self._wake:
                if (request := self.requests.get(row.request)) is None:
                    continue
                events.append((request, done))
                request.done += 1
            if request.done == request.images:
                batcher.over(request.id)
            metrics.images_completed.labels(name, backend, "completed").inc()
        for late in turn.late:
            if (request := self.requests.get(late)) is not None:
                events.append((request, DeadlinePassed(request.timeout_s)))
        for lost, error in turn.failed.items():
            logger.error("a request of %s ends alone: %s: %s", name, type(error).__name__, error, extra=logs.of(lost))
            known = isinstance(error, NotFinite)
            metrics.faults_isolated.labels(name, "not_finite" if known else "threw").inc()
            message = str(error) if known else (f"the engine failed on an image of this request "
                                                f"({type(error).__name__}), also without the rest of its batch")
            if (request := self.requests.get(lost)) is not None:
                events.append((request, EngineFailed(f"{message}; another seed or temperature may succeed")))
        if turn.steps:
            metrics.pixels_generated.labels(name, backend).inc(turn.subpixels)
            metrics.state_saturations.labels(name).inc(turn.saturated)
        if turn.retries:
            metrics.quanta_retried.labels(name).inc()
        elif turn.steps:
            metrics.engine_step.labels(name, backend).observe(turn.seconds / turn.steps)
            metrics.engine_step_batch_size.observe(turn.rows)
        self._count_slots({name})
        self._count_requests()

    def _count_slots(self, models: set[str]) -> None:
        with self._wake:  # as for requests
            pools = self._pools()
            for name in models:
                alike = {batcher for batcher in pools if batcher.labels[0] == name}  # one, or an old one beside it
                self.metrics.set_slots(name, sum(batcher.engine.slots for batcher in alike),
                                       sum(len(batcher.scheduler.running) for batcher in alike))

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
