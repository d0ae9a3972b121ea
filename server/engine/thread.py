"""The engine thread: it alone runs the models' quanta, one after the other, and reports each to the
event loop. A watchdog notices when it hangs.

No state is shared that would need a lock. Calls for the thread wait in its inbox; its reports are
calls on the event loop. The loop also reads, up to a quantum late, whether there is work, what
runs, and the state of images.
"""

import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import NoReturn, Protocol

from .. import logs
from ..errors import ServiceError, batch_failed, engine_failed, engine_gone
from .decode.engine import Engine
from .decode.failures import EngineLost
from .image import Image, Report

logger = logging.getLogger("linpix")
LAST_WORDS_S = 1.0  # seconds for answers to reach clients before a process without an engine exits
LOST = 70  # exit status of such a process: an internal software error, by sysexits.h
# the process ends if the engine thread dies more often than this in so many seconds
RESTARTS, RESTARTS_S = 3, 600.0
PATIENCE = 10  # watchdog time-outs that one piece of background work may take
TICKS = 20  # checks in a time-out of the watchdog: silence is noticed after 1 to 1.1 time-outs


class Reports(Protocol):
    """The receiver of the engine thread's reports; every call is made on the event loop, in
    order.
    """

    def quantum_done(self, engine: Engine, report: Report) -> None: ...

    def batch_lost(self, requests: Sequence[str], error: ServiceError) -> None:
        """A round raised, and its batch is lost: these requests lost an image."""

    def work_done(self, id: str, error: Exception | None) -> None:
        """Background work has ended."""

    def engine_gone(self, why: str, error: ServiceError) -> None:
        """This process no longer decodes, and is about to exit."""


@dataclass(slots=True, eq=False)
class Work:
    """Background work, such as a likelihood or a comparison: a generator that is advanced between
    quanta.
    """

    id: str
    client: str  # clients take turns
    pieces: Iterator[None]
    # while images are drawn, it rests so many times as long as its last piece took
    rest: float = 0.0
    rests_until: float = 0.0  # by perf_counter


class EngineThread:
    """Public methods may be called from any thread."""

    def __init__(self, watchdog_timeout_s: float = 60.0) -> None:
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # replaced, never changed in place: the watchdog reads it
        self._engines: Sequence[Engine] = ()
        self._current: Engine | None = None  # the one whose quantum is running
        self._background: list[Work] = []  # in the order of turns
        # no background work before, while images are drawn; by perf_counter
        self._rests_until = 0.0
        self._call_on_loop: Callable[..., object]
        self._reports: Reports
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.watchdog = Watchdog(watchdog_timeout_s, lambda: self.load > 0, self._hung)

    def start(self, reports: Reports, call_on_loop: Callable[..., object]) -> None:
        """call_on_loop: makes a call on the event loop, as loop.call_soon_threadsafe does."""
        self._reports, self._call_on_loop = reports, call_on_loop
        self._thread.start()
        self.watchdog.start()

    def stop(self) -> None:
        """End the thread after the current quantum."""
        self._inbox.put(None)
        self._thread.join()  # if it hangs, the watchdog still runs
        self.watchdog.stop()

    def serve(self, engines: Sequence[Engine]) -> None:
        """Run the quanta of these models from now on, and forget all others."""
        self._inbox.put(partial(self._serve, engines))

    def submit(self, engine: Engine, images: Sequence[Image]) -> None:
        self._inbox.put(partial(engine.scheduler.submit, images))

    def run_in_background(self, work: Work) -> None:
        """Run a generator between quanta, one `next` at a time."""
        self._inbox.put(lambda: self._background.append(work))

    def cancel(self, id: str, engine: Engine | None = None) -> None:
        """Forget a request, or background work."""
        self._inbox.put(partial(self._cancel, id, engine))

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def load(self) -> int:
        """Models with images to draw, and pieces of background work."""
        return sum(engine.busy for engine in self._engines) + len(self._background)

    # --- on the engine thread ---

    def _run(self) -> None:
        died: deque[float] = deque(maxlen=RESTARTS)
        while True:
            try:
                while self._take_calls(wait=not self.load):
                    self._round()
                return
            except EngineLost as lost:
                self._end(str(lost), engine_failed(str(lost)))
            except Exception as failure:  # a bug of ours, which costs this batch and nothing else
                logger.exception("the engine thread died; restarting it")
                now = time.monotonic()
                if len(died) == RESTARTS and now - died[0] < RESTARTS_S:
                    why = (
                        f"the engine thread died {RESTARTS + 1} times in {now - died[0]:.0f} s, the"
                        f" last time because of {type(failure).__name__}"
                    )
                    self._end(why, engine_failed(why))
                died.append(now)
                # its slots are emptied; everything else is as it was
                engine, self._current = self._current, None
                requests = engine.abandon() if engine else []
                self.report(
                    self._reports.batch_lost, requests, batch_failed(type(failure).__name__)
                )

    def _take_calls(self, wait: bool) -> bool:
        """Make the calls in the inbox. wait: for at least one. Returns False if the thread is to
        stop.
        """
        try:
            while (call := self._inbox.get(block=wait)) is not None:
                call()
                wait = False
            return False
        except Empty:
            return True

    def _round(self) -> None:
        """Run a quantum of each busy model, then background work: one piece if no image is drawn,
        else for as long as the quanta took. A function of its own, so that no local variable keeps
        a model while the thread waits.
        """
        began, drawing = time.perf_counter(), False
        for engine in self._engines:
            if engine.busy:
                drawing, self._current = True, engine
                self.watchdog.beat()
                self.report(self._reports.quantum_done, engine, engine.run_quantum())
                self._current = None
        now = time.perf_counter()
        left_s = now - began if drawing and now >= self._rests_until else 0.0
        if self._background and not drawing:
            self._work(drawing=False)
        while self._background and left_s > 0 and (piece_s := self._work(drawing=True)):
            left_s -= piece_s
        if left_s < 0:
            self._rests_until = time.perf_counter() - left_s  # what was too much is paid back

    def _work(self, *, drawing: bool) -> float:
        """Run a piece of background work, if one is due; returns its seconds. Clients take turns;
        each finishes one piece of work before it begins another. drawing: images are being drawn.
        """
        began, error = time.perf_counter(), None
        work = next(
            (work for work in self._background if not drawing or began >= work.rests_until), None
        )
        if work is None:
            return 0.0
        self.watchdog.beat(PATIENCE)
        try:
            ended = bool(next(work.pieces, True))  # None while there are more
        except Exception as raised:
            logger.exception("background work failed", extra=logs.of(work.id))
            ended, error = True, raised
        now = time.perf_counter()
        work.rests_until = now + work.rest * (now - began)
        left = [] if ended else [work]
        left += [other for other in self._background if other is not work]
        # sorted keeps the order of equals: this work stays before others of its client
        self._background = sorted(left, key=lambda other: other.client == work.client)
        if ended:
            self.report(self._reports.work_done, work.id, error)
        return now - began

    def _cancel(self, id: str, engine: Engine | None) -> None:
        if engine is not None:
            engine.scheduler.cancel(id)
        self._background = [work for work in self._background if work.id != id]

    def _serve(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            engine.beat = self.watchdog.beat
        self._engines = engines

    def report(self, call: Callable[..., None], *about: object) -> None:
        """Make a call on the event loop."""
        try:
            self._call_on_loop(call, *about)
        # the event loop is closed: the process is ending, and no client waits for an answer
        except RuntimeError:
            logger.debug("a report came after the event loop was closed")

    def _hung(self, seconds: float) -> None:
        """End the process: a call that does not return cannot be ended. Runs on the watchdog's
        thread.
        """
        frame = sys._current_frames().get(self._thread.ident or 0)
        logger.critical(
            "the engine thread is at:\n%s",
            "".join(traceback.format_stack(frame)) if frame else "its end",
        )
        why = f"the engine made no progress for {seconds:g} s"
        self._end(why, engine_gone(why))

    def _end(self, why: str, error: ServiceError) -> NoReturn:
        """Answer all requests with the error, and end the process, so that its supervisor starts it
        again.
        """
        logger.critical("%s; the process ends with status %d", why, LOST)
        self.report(self._reports.engine_gone, why, error)
        time.sleep(LAST_WORDS_S)
        os._exit(LOST)


class Watchdog:
    """A thread that calls `silent`, once, when there is work and no heartbeat for timeout_s.

    Time is counted in the watchdog's own checks, not by a clock: a process that is stopped, or that
    gets no CPU time, cannot beat meanwhile.
    """

    def __init__(
        self, timeout_s: float, busy: Callable[[], bool], silent: Callable[[float], None]
    ) -> None:
        """silent is called on the watchdog's thread, with the seconds that a heartbeat was allowed
        to take.
        """
        self.timeout_s, self._busy, self._silent = timeout_s, busy, silent
        # time of the last heartbeat, and time-outs that it is good for
        self._last = time.monotonic(), 1.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def beat(self, patience: float = 1.0) -> None:
        """Record a heartbeat; the next one may take `patience` time-outs."""
        self._last = time.monotonic(), patience

    @property
    def age_s(self) -> float:
        """Seconds since the last heartbeat while there is work; else 0."""
        return time.monotonic() - self._last[0] if self._busy() else 0.0

    def _watch(self) -> None:
        seen, looks = self._last, 0
        while not self._stopped.wait(self.timeout_s / TICKS):
            last = self._last
            looks = looks + 1 if last is seen and self._busy() else 0
            seen = last
            if looks > TICKS * last[1]:
                self._silent(self.timeout_s * last[1])
                return
