"""One model being decoded: its scheduler and its decoder, advanced one quantum at a time.

The service's engine thread and the command line run the same quanta. A quantum that raises is run
again without the images that make it raise, and only their requests end.
"""

import logging
import time
from collections.abc import Callable

import numpy as np

from ... import logs
from ..image import Image, Report, State
from ..job import Job
from .decoder import Decoder
from .failures import EngineLost, Outcome, isolate
from .prefill import Prefills
from .scheduler import QUANTUM_S, Scheduler
from .slots import NEVER, Plan, slots_of

logger = logging.getLogger("linpix")
PARTS = 8  # quanta of an image, at least: one that joins waits for the end of a quantum
# images restored in one call: few, as all their tokens are prefilled again without a heartbeat
RESTORED = 2
# quanta in a row that decode nothing, not even a test image: the engine is then lost
MAX_FAILED_QUANTA = 3


class Engine:
    """Used by the thread that runs its quanta; any thread may read `busy` and the scheduler, up to
    a quantum late.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.config = decoder, decoder.config
        self.name = decoder.checkpoint.name
        self.beat: Callable[[], None] = lambda: None  # called before each call of the decoder
        self.slots = decoder.slots
        self.scheduler = Scheduler(self.slots, decoder.stride)
        self._prefills = Prefills(decoder)
        self._decoded_s = QUANTUM_S  # seconds of decoding in the last quantum
        self._failed_quanta = 0
        self._report = Report()

    @property
    def busy(self) -> bool:
        return bool(self.slots.running or self.scheduler.interactive or self.scheduler.bulk)

    def run_quantum(self) -> Report:
        """Let waiting images join, prefill for a while, run one quantum, let finished images leave.
        Raises EngineLost.

        While images are decoding, prefill gets at most half of the time. If no image can decode
        yet, no step is taken.
        """
        report = self._report = Report()
        self._join()
        report.joined_at, report.running = time.monotonic(), len(self.slots.running)
        drawing = bool(self.slots.drawing.any())
        seconds = self._decoded_s if drawing else QUANTUM_S
        ended: list[Image] = []
        if self._prefills.waiting or self._prefills.overdrawn_s:
            ended = self._prefills.run(seconds, self.beat, report, while_decoding=drawing)
        self.slots.drawing[[image.slot for image in ended if image.state is State.DRAWING]] = True
        for request in report.failed:
            self.scheduler.cancel(request)
        most = -(-self.config.length // PARTS)
        if self.slots.streams[self.slots.drawing].any():
            most = self.config.row_length
        plan = self.scheduler.plan(most)
        if len(plan):
            self._decode(plan)
        self._leave([image for image in ended if image.state is State.DONE])
        return report

    def abandon(self) -> list[str]:
        """After an exception from run_quantum: empty every slot. Returns the requests that lost an
        image.
        """
        running = self.slots.running.values()
        lost = {image.request for image in (*running, *self._report.finished)}
        lost |= self._report.failed.keys()
        for request in lost:
            self.scheduler.cancel(request)
        return [*lost]

    # --- parts of a quantum ---

    def _join(self) -> None:
        """Give free slots to waiting images, for at most the time of a quantum."""
        end = time.perf_counter() + QUANTUM_S
        while time.perf_counter() < end:
            images = self.scheduler.join()
            if not images:
                return
            request = images[0].request
            try:
                self._take(images)
                self._report.joined += images
            except EngineLost:
                raise
            except Exception as error:
                logger.exception(
                    "a request of %s could not get its slots", self.name, extra=logs.of(request)
                )
                self._report.failed[request] = error
                self.scheduler.cancel(request)

    def _take(self, images: list[Image]) -> None:
        """Put images that share what is known into their slots."""
        self.beat()
        job, length, table = images[0].job, self.config.length, self.slots
        slots = np.array(slots_of(images))
        self.decoder.take(images)
        prefix, state = job.prefix // self.config.token_size, State.DRAWING
        if table.conditioned[slots[0]] and prefix < length:  # else nothing is to be drawn
            state = State.READING
        elif 0 < prefix < length:
            state = State.PREFILL
        table.position[slots] = 0 if state is State.PREFILL else prefix
        table.left[slots] = table.left_from[slots, prefix]
        table.drawing[slots] = state is State.DRAWING
        table.streams[slots] = job.stream
        table.next_row[slots] = NEVER
        if job.stream or images[0].attempt == 1:
            table.next_row[slots] = prefix // self.config.row_length + 1
        for image in images:
            image.state = state  # last: the event loop may look at any time
        if state is not State.DRAWING:
            self._prefills.waiting.append(images)

    def _decode(self, plan: Plan) -> None:
        """Run one quantum. Images that cannot be decoded end their requests."""
        report, slots, position = self._report, plan[:, 0], self.slots.position
        before, saturated, began = position[slots], self.decoder.saturated, time.perf_counter()
        report.batch, report.passes = len(plan), 1
        self.decoder.keep(slots.tolist())
        try:
            outcome = Outcome(not_finite=self._run(plan))
        except EngineLost:
            raise
        except Exception as error:
            logger.exception(
                "a quantum of %s with %d images failed; running it again in parts",
                self.name,
                len(plan),
            )
            outcome = isolate(plan, self._run, self._restore, error)
        report.seconds = time.perf_counter() - began
        self._decoded_s = min(report.seconds, QUANTUM_S)
        report.saturated, report.retries = self.decoder.saturated - saturated, outcome.retries
        self.slots.left[slots] = self.slots.left_from[slots, position[slots]]
        report.subpixels = int((position[slots] - before).sum()) * self.config.token_size
        if outcome.not_finite or outcome.failed:
            self._end_failed(outcome)
        self._report_rows()
        if outcome.retries:
            self._check_engine_lives(plan, outcome)
        else:
            self._failed_quanta = 0
            self.scheduler.learn(len(plan), report.seconds / report.passes)

    def _run(self, plan: Plan) -> list[int]:
        """Decode a plan's images; returns the slots whose parameters were not finite."""
        self.beat()
        done = self.decoder.quantum(plan)
        self.slots.position[plan[:, 0]] = done.positions
        self._report.passes = max(self._report.passes, int(done.passes.max()))
        return done.not_finite

    def _restore(self, plan: Plan) -> None:
        for first in range(0, len(plan), RESTORED):
            self.beat()
            self.decoder.restore(plan[first : first + RESTORED, 0].tolist())

    def _report_rows(self) -> None:
        """Report newly finished image rows."""
        rows, next_row = self.slots.position // self.config.row_length, self.slots.next_row
        due = np.flatnonzero(self.slots.drawing & (rows >= next_row))
        images = [self.slots.running[slot] for slot in due.tolist()]
        streams = [image.slot for image in images if image.job.stream]
        canvases = {}
        if streams:
            canvases = dict(zip(streams, self.decoder.canvases(streams), strict=True))
        for image in images:
            new = range(int(next_row[image.slot]), int(rows[image.slot]) + 1)
            self._report.rows.append((image, new, canvases.get(image.slot)))
            next_row[image.slot] = new.stop if image.job.stream else NEVER

    def _end_failed(self, outcome: Outcome) -> None:
        """End requests because of an image in this quantum; their other images are cancelled."""
        error = FloatingPointError(
            f"model {self.name!r} produced NaN or infinite values for an image of this request"
        )
        bad = dict.fromkeys(outcome.not_finite, error) | outcome.failed
        failed = {self.slots.running[slot].request: error for slot, error in bad.items()}
        self._report.failed |= failed
        for request in failed:
            self.scheduler.cancel(request)

    def _leave(self, done: list[Image]) -> None:
        """Images that are done leave. Those that are drawn are done, or are checked first."""
        drawn = self.slots.drawing & (self.slots.position >= self.config.length)
        for image in [self.slots.running[slot] for slot in np.flatnonzero(drawn).tolist()]:
            if image.job.attempts > 1 or image.job.candidates:
                image.state, image.retried = State.CHECKING, False
                self.slots.drawing[image.slot] = False
                self._prefills.waiting.append([image])
            else:
                image.state = State.DONE
                done.append(image)
        self._report.finished += done  # before anything can raise: see `abandon`
        canvases = self.decoder.canvases(slots_of(done)) if done else ()
        for image, canvas in zip(done, canvases, strict=True):
            image.canvas, image.label = canvas, self.decoder.label(image.slot)
            if image.recognised:
                image.label = image.recognised.label
            self.slots.release(image)
        if self.decoder.fill_freed_with_nan:
            for slot in self.slots.free:
                self.decoder.pool.fill_with_nan(slot)

    def _check_engine_lives(self, plan: Plan, outcome: Outcome) -> None:
        """Raise EngineLost if MAX_FAILED_QUANTA quanta in a row decoded no image, nor a test image
        in a free slot.
        """
        failed = len(outcome.failed) == len(plan)
        failed = failed and not self._decodes_a_test_image(int(plan[0, 0]))
        self._failed_quanta = self._failed_quanta + 1 if failed else 0
        if self._failed_quanta == MAX_FAILED_QUANTA:
            raise EngineLost(
                f"{self.name} decoded no image in {MAX_FAILED_QUANTA} quanta in a row, and could"
                " not decode a test image either"
            )

    def draw_test_image(self, slot: int) -> None:
        """Begin an image in a free slot, which stays free. Raises what the decoder raises."""
        self.decoder.take([Image("test image", Job(), 0, 0, None, slot=slot)])
        self.beat()
        self.slots.position[slot] = 0
        self.decoder.quantum(np.array([[slot, self.decoder.stride]]))

    def _decodes_a_test_image(self, slot: int) -> bool:
        try:
            self.draw_test_image(slot)
        except EngineLost:
            raise
        except Exception:
            logger.exception("%s cannot decode a test image either", self.name)
            return False
        return True
