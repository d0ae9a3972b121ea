"""The engine thread: it alone runs the models' quanta, one after the other, and reports each to the event loop.

No state is shared that would need a lock: other threads only read whether there is work. Calls for the thread wait in
its inbox; its reports are calls on the event loop.
"""

import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import NoReturn, Protocol

from ..errors import BatchFailed, EngineFailed, EngineGone, ServiceError
from .batch import Batcher
from .decode.failures import EngineLost
from .decode.scoring import ScoringJob, ScoringQueue
from .messages import QuantumReport, Submission
from .watchdog import Watchdog

logger = logging.getLogger("linpix")
LAST_WORDS_S = 1.0  # seconds for answers to reach clients before a process without an engine exits
LOST = 70           # exit status of such a process: an internal software error, by sysexits.h
RESTARTS, RESTARTS_S = 3, 600.0  # the process ends if the engine thread dies more often than this in so many seconds
BACKGROUND_PATIENCE = 10  # watchdog time-outs that one unit of background work may take
BACKGROUND_SHARE = 10     # background work gets one unit in so many rounds of quanta


class Reports(Protocol):
    """The receiver of the engine thread's reports; every call is made on the event loop, in order."""

    def quantum_done(self, batcher: Batcher, report: QuantumReport) -> None: ...

    def batch_lost(self, batcher: Batcher | None, requests: Sequence[str], error: ServiceError) -> None:
        """The thread died and was restarted; these requests lost an image."""

    def score_done(self, score: ScoringJob, error: Exception | None) -> None: ...

    def engine_gone(self, why: str, error: ServiceError) -> None:
        """This process no longer decodes, and is about to exit."""


class EngineThread:
    """Public methods may be called from any thread."""

    def __init__(self, watchdog_timeout_s: float = 60.0) -> None:
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._batchers: Sequence[Batcher] = ()  # replaced, never changed in place: the watchdog reads it
        self._current: Batcher | None = None    # the one whose quantum is running
        self._scores = ScoringQueue()
        self._background: Iterator[None] | None = None
        self._running = False
        self._call_on_loop: Callable[..., object]
        self._reports: Reports
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._watchdog = Watchdog(watchdog_timeout_s, self._has_work, self._hung)

    def start(self, reports: Reports, call_on_loop: Callable[..., object]) -> None:
        """call_on_loop: makes a call on the event loop, as loop.call_soon_threadsafe does."""
        self._reports, self._call_on_loop = reports, call_on_loop
        self._thread.start()
        self._watchdog.start()

    def stop(self) -> None:
        """End the thread after the current quantum."""
        self._inbox.put(None)
        self._thread.join()  # if it hangs, the watchdog still runs
        self._watchdog.stop()

    def serve(self, batchers: Sequence[Batcher]) -> None:
        """Run the quanta of these models from now on, and forget all others."""
        self._inbox.put(partial(self._serve, batchers))

    def submit(self, batcher: Batcher, submission: Submission) -> None:
        self._inbox.put(partial(batcher.submit, submission))

    def cancel(self, batcher: Batcher, request: str) -> None:
        self._inbox.put(partial(self._cancel, batcher, request))

    def score(self, score: ScoringJob) -> None:
        """Score an image in pieces, at most one after each round of quanta."""
        self._inbox.put(partial(self._scores.append, score))

    def run_in_background(self, work: Iterator[None] | None) -> None:
        """Run a generator between quanta, one `next` at a time; it replaces an earlier one. None ends that one."""
        self._inbox.put(partial(setattr, self, "_background", work))

    @property
    def running(self) -> bool:
        return self._running and self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Whether a model has images to decode or to score."""
        return self._scores.busy or any(batcher.busy for batcher in self._batchers)

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last heartbeat while there is work; else 0."""
        return self._watchdog.age_s

    # --- on the engine thread ---

    def _run(self) -> None:
        died: deque[float] = deque(maxlen=RESTARTS)
        while True:
            try:
                self._rounds()
                return
            except EngineLost as lost:
                self._end(str(lost), EngineFailed(str(lost)))
            except Exception as failure:  # a bug of ours, which costs this batch and nothing else
                logger.exception("the engine thread died; restarting it")
                now = time.monotonic()
                if len(died) == RESTARTS and now - died[0] < RESTARTS_S:
                    why = (f"the engine thread died {RESTARTS + 1} times in {now - died[0]:.0f} s, the last time "
                           f"because of {type(failure).__name__}")
                    self._end(why, EngineFailed(why))
                died.append(now)
                self._abandon(failure)

    def _rounds(self) -> None:
        self._running, rounds = True, 0
        live = True  # after a restart, there may be work
        while self._take_calls(wait=not live and self._background is None):
            live = self._round()
            rounds += 1
            if self._background is not None and (not live or rounds % BACKGROUND_SHARE == 0):
                self._watchdog.beat(BACKGROUND_PATIENCE)
                self._work_in_background(self._background)

    def _take_calls(self, wait: bool) -> bool:
        """Make the calls in the inbox. wait: for at least one. Returns False if the thread is to stop."""
        try:
            while (call := self._inbox.get(block=wait)) is not None:
                call()
                wait = False
            return False
        except Empty:
            return True

    def _round(self) -> bool:
        """Run a quantum of each busy model, and then a piece of a likelihood; returns whether there was any work.

        Keeps no reference to any model.
        """
        live = False
        for batcher in self._batchers:
            if batcher.busy:
                live, self._current = True, batcher
                self._watchdog.beat()
                self.report(self._reports.quantum_done, batcher, batcher.run_quantum())
                self._current = None
        if self._scores.busy:
            self._watchdog.beat()
            if (ended := self._scores.advance(drawing=live)) is not None:
                self.report(self._reports.score_done, *ended)
            live = True
        return live

    def _cancel(self, batcher: Batcher, request: str) -> None:
        batcher.cancel(request)
        self._scores.cancel(request)

    def _serve(self, batchers: Sequence[Batcher]) -> None:
        for batcher in batchers:
            batcher.beat = self._watchdog.beat
        self._batchers = batchers

    def _has_work(self) -> bool:
        return self._background is not None or self.busy

    def _abandon(self, failure: Exception) -> None:
        """Empty the slots of the model whose quantum raised; everything else is as it was."""
        batcher, self._current = self._current, None
        lost = [] if batcher is None else batcher.abandon()
        self.report(self._reports.batch_lost, batcher, lost, BatchFailed(type(failure).__name__))

    def _work_in_background(self, work: Iterator[None]) -> None:
        try:
            next(work)
            return
        except StopIteration:
            pass
        except Exception:
            logger.exception("background work failed")
        self._background = None

    def report(self, call: Callable[..., None], *about: object) -> None:
        """Make a call on the event loop."""
        try:
            self._call_on_loop(call, *about)
        except RuntimeError:  # the event loop is closed: the process is ending, and no client waits for an answer
            logger.debug("a report came after the event loop was closed")

    def _hung(self, seconds: float) -> None:
        """End the process: a call that does not return cannot be ended. Runs on the watchdog's thread."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        logger.critical("the engine thread is at:\n%s", "".join(traceback.format_stack(frame)) if frame else "its end")
        why = f"the engine made no progress for {seconds:g} s"
        self._end(why, EngineGone(why))

    def _end(self, why: str, error: ServiceError) -> NoReturn:
        """Answer all requests with the error, and end the process, so that its supervisor starts it again."""
        logger.critical("%s; the process ends with status %d", why, LOST)
        self.report(self._reports.engine_gone, why, error)
        time.sleep(LAST_WORDS_S)
        os._exit(LOST)
