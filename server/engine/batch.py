"""One model being decoded: its scheduler and its decoder, advanced one quantum at a time.

The service's engine thread and bulk work on the command line run the same quanta. A quantum that raises is run again
without the images that make it raise, and only their requests end.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable

from .. import logs
from .decode.decoder import Decoder
from .decode.failures import EngineLost, NotFinite, Outcome, QuantumPlan, isolate
from .decode.image_spec import ImageSpec
from .decode.judging import Judging
from .decode.prefill import Judged, Prefills, PrefillsRun
from .messages import ImageProgress, QuantumReport, Submission
from .schedule.passes import PassesLearned
from .schedule.quantum import QUANTUM_S, QuantumLength
from .schedule.scheduler import ScheduledImage, Scheduler

logger = logging.getLogger("linpix")
RESTORED = 2           # images restored in one call: few, as all their tokens are prefilled again without a heartbeat
MAX_FAILED_QUANTA = 3  # quanta in a row that decode nothing, not even a test image: the engine is then lost


class Batcher:
    """Used by the thread that runs its quanta; `busy` may be read by any thread."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, config = decoder, decoder.config
        self.name, self.backend = decoder.checkpoint.name, decoder.checkpoint.net.attention.steps_as
        self.beat: Callable[[], None] = lambda: None  # called before each call of the engine
        self.image_row = config.row_length  # tokens; also the longest quantum, so that streams show each image row
        self.scheduler = Scheduler(decoder.slots, config.length)
        self._submissions: dict[str, Submission] = {}
        self._unreported: Counter[str] = Counter()  # images of each request not yet reported as finished
        self._length = QuantumLength(decoder.stride, self.image_row)
        self._ended, self._went_on = 0.0, False     # when the last quantum ended, and whether there was more to do
        self._prefills = Prefills(decoder)
        self._judging = Judging(decoder)
        self._decoded_s = QUANTUM_S  # decoding time of the last quantum
        self._advances: dict[int, tuple[int, int]] = {}  # in a quantum, by slot: new position, and passes
        self._passes = PassesLearned(config.length)
        self._failed_quanta = 0

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or len(self.scheduler.waiting))

    def submit(self, submission: Submission) -> None:
        """Append a request's images to the queue."""
        self._submissions[submission.request] = submission
        self._unreported[submission.request] = len(submission.specs)
        self.scheduler.enqueue(submission.request, len(submission.specs), self._prefix(submission.specs[0]),
                               submission.bulk)

    def cancel(self, request: str) -> None:
        """Forget a request, or do nothing if it is not here. Its slots are free when the next quantum begins."""
        if self._submissions.pop(request, None) is not None:
            del self._unreported[request]
            self.scheduler.cancel(request)

    def run_quantum(self) -> QuantumReport:
        """Let waiting images join, prefill for a while, run one quantum, let finished images leave. Raises EngineLost.

        While images decode, prefill may take as long as their last quantum, so it gets half of the time. A piece that
        takes longer is made up for in the next quanta. If no image can decode yet, there are no steps.
        """
        since = self._ended if self._went_on else time.perf_counter()
        joined, failed = self._join()
        joined_at = time.monotonic()
        prefills = self._prefill()
        failed |= prefills.failed
        again = sum(self._drawn_again(judged, failed) for judged in prefills.judged)
        for request in failed:
            self.cancel(request)
        plan = self.scheduler.plan(self._length.steps(len(self.scheduler.decoding)))
        saturated, began = self.decoder.saturated, time.perf_counter()
        outcome = self._decode(plan) if plan else Outcome()
        seconds = time.perf_counter() - began
        if outcome.not_finite or outcome.failed:
            failed |= self._failures(plan, outcome)
        taken, passes = self._done(plan)
        finished = self._leave(taken)
        if outcome.retries:
            self._check_hope(taken, outcome)
        elif passes:
            self._failed_quanta = 0
            self._length.learn(len(taken), seconds / passes)
        self._decoded_s = min(seconds, QUANTUM_S)
        self._ended, self._went_on = time.perf_counter(), self.busy
        report = QuantumReport(
            joined=joined, joined_at=joined_at, running=self._running(taken), finished=finished, failed=failed,
            overtaken=self.scheduler.waiting.overtaken, images=len(taken), passes=passes,
            subpixels=sum(count for _, count in taken) * self.decoder.config.token_size, seconds=seconds,
            cycle_s=self._ended - since, saturated=self.decoder.saturated - saturated, retries=outcome.retries,
            ratios=self._passes.ratios, prefilled=prefills.done, again=again,
            judged_s=[judged.seconds for judged in prefills.judged], repeats=self._judging.repeats)
        for image in finished:  # only now: if something above raises, `abandon` must still know their requests
            self._unreported[image.request] -= 1
            if not self._unreported[image.request]:
                del self._unreported[image.request], self._submissions[image.request]
        return report

    def abandon(self) -> list[str]:
        """After an exception from run_quantum: empty every slot. Returns the requests that lost an image."""
        self.scheduler.running.clear()
        self._prefills.clear()
        self._went_on = False
        waiting = Counter(image.request for image in self.scheduler.waiting)
        lost = [request for request, images in self._unreported.items() if waiting[request] < images]
        for request in lost:
            self.cancel(request)
        return lost

    # --- parts of a quantum ---

    def _join(self) -> tuple[list[str], dict[str, Exception]]:
        """Give free slots to waiting images, one request after the other, for at most the time of a quantum.

        Returns the request of each image that joined, and what the engine raised, by request.
        """
        joined: list[str] = []
        failed: dict[str, Exception] = {}
        began = time.perf_counter()
        while time.perf_counter() - began < QUANTUM_S and (images := self.scheduler.join()):
            request = images[0].request
            try:
                self._take(images)
                joined += [request] * len(images)
            except EngineLost:
                raise
            except Exception as error:
                logger.exception("a request of %s could not get its slots", self.name, extra=logs.of(request))
                failed[request] = error
                self.cancel(request)
        return joined, failed

    def _take(self, images: list[ScheduledImage]) -> None:
        specs = self._submissions[images[0].request].specs
        self.beat()
        self.decoder.take([image.slot for image in images], [specs[image.index] for image in images])
        for image in images:
            self._passes.begin(image.slot)
            self._judging.begin(image, specs[image.index])
        self._fold_in(images)

    def _fold_in(self, images: list[ScheduledImage]) -> None:
        conditioned, position = bool(self.decoder.conditioned[images[0].slot]), images[0].position
        if (conditioned or position) and position < self.scheduler.length:  # else nothing to fold in, or to draw
            self._prefills.append(images, position, read=conditioned)

    def _prefill(self) -> PrefillsRun:
        """Prefill, and judge drawn images, for the time that run_quantum gives it."""
        beside = bool(self.scheduler.decoding)
        return self._prefills.run(self._decoded_s if beside else QUANTUM_S, self.beat, beside=beside)

    def _drawn_again(self, judged: Judged, failed: dict[str, Exception]) -> bool:
        """Begin an image again if the model does not recognise its class; else let it leave. Returns whether it begins.

        failed: its request is added here if the engine raises.
        """
        image = judged.image
        if image.cancelled:
            return False
        spec = self._submissions[image.request].specs[image.index]
        position = self._prefix(spec)
        if (following := self._judging.next_attempt(judged, spec, position)) is None:
            return False
        self.beat()
        try:
            self.decoder.take([image.slot], [following])
        except EngineLost:
            raise
        except Exception as error:
            logger.exception("an image of %s could not be started again", self.name, extra=logs.of(image.request))
            failed[image.request] = error
            return False
        image.position = position
        self._passes.begin(image.slot)
        self._fold_in([image])
        return True

    def _leave(self, plan: QuantumPlan) -> list[ImageProgress]:
        """After a quantum: finished images leave, and drawn ones wait to be judged. Returns the finished ones."""
        finished: list[ScheduledImage] = []
        for image in self.scheduler.advance(plan):
            if self.decoder.skips and (image.held or image.slot not in self._judging.attempts):
                self._passes.finish(image.slot, bool(self.decoder.conditioned[image.slot]))
            if image.held:
                self._prefills.judge(image)
            else:
                finished.append(image)
        if self.decoder.fill_freed_with_nan:
            for slot in self.scheduler.free:
                self.decoder.pool.fill_with_nan(slot)
        return [self._answer(image) for image in finished]

    def _answer(self, image: ScheduledImage) -> ImageProgress:
        """The report of a finished image."""
        canvas, label, recognised = self.decoder.image(image.slot), self.decoder.label(image.slot), None
        if (attempts := self._judging.attempts.pop(image.slot, None)) is not None:
            assert attempts.canvas is not None and attempts.best is not None, "it has been judged"
            canvas, label, recognised = attempts.canvas, attempts.best.label, attempts.best
        return ImageProgress(image.request, image.index, image.position, 0, canvas, label, recognised)

    def _prefix(self, spec: ImageSpec) -> int:
        """Known tokens of an image before its first unknown one."""
        return spec.prefix // self.decoder.config.token_size

    def _decode(self, plan: QuantumPlan) -> Outcome:
        """Run one quantum; _done says how far each image got, except those that the outcome names."""
        self._advances.clear()
        self.decoder.keep([image.slot for image, _ in plan])
        try:
            return Outcome(not_finite=self._run(plan))
        except EngineLost:
            raise
        except Exception as error:
            logger.exception("a quantum of %s with %d images failed; running it again in parts", self.name, len(plan))
            return isolate(plan, self._run, self._restore, error)

    def _run(self, plan: QuantumPlan) -> list[int]:
        """Decode a plan's images; returns the slots whose parameters were not finite."""
        self.beat()
        slots = [image.slot for image, _ in plan]
        done = self.decoder.quantum(slots, [image.position for image, _ in plan], [count for _, count in plan])
        self._advances |= zip(slots, zip(done.positions, done.passes, strict=True), strict=True)
        return done.not_finite

    def _done(self, plan: QuantumPlan) -> tuple[QuantumPlan, int]:
        """The plan with the steps that were taken, and the most passes of one image, at least 1 if there were steps."""
        done, most = [], min(1, len(plan))
        for image, _ in plan:
            position, passes = self._advances.get(image.slot, (image.position, 0))
            if self.decoder.skips:
                self._passes.add(image.slot, self.decoder.left(image.slot, image.position), passes)
            done.append((image, position - image.position))
            most = max(most, passes)
        return done, most

    def _restore(self, plan: QuantumPlan) -> None:
        for first in range(0, len(plan), RESTORED):
            some = plan[first:first + RESTORED]
            self.beat()
            self.decoder.restore([image.slot for image, _ in some], [image.position for image, _ in some])

    def _failures(self, plan: QuantumPlan, outcome: Outcome) -> dict[str, Exception]:
        """Requests that end because of an image in this quantum; their other images are cancelled."""
        error = NotFinite(f"model {self.name!r} produced NaN or infinite values for an image of this request")
        bad = dict.fromkeys(outcome.not_finite, error) | outcome.failed
        failed = {image.request: bad[image.slot] for image, _ in plan if image.slot in bad and not image.cancelled}
        for request in failed:
            self.cancel(request)
        return failed

    def _check_hope(self, plan: QuantumPlan, outcome: Outcome) -> None:
        """Raise EngineLost if MAX_FAILED_QUANTA quanta in a row decoded no image, nor a test image in a free slot."""
        failed = len(outcome.failed) == len(plan) and not self._decodes_a_test_image(self.scheduler.free[0])
        self._failed_quanta = self._failed_quanta + 1 if failed else 0
        if self._failed_quanta == MAX_FAILED_QUANTA:
            raise EngineLost(f"{self.name} decoded no image in {MAX_FAILED_QUANTA} quanta in a row, and could not "
                             "decode a test image either")

    def _decodes_a_test_image(self, slot: int) -> bool:
        try:
            self.decoder.take([slot], [ImageSpec(seed=0)])
            self._run([(ScheduledImage("test image", 0, 0, slot), self.decoder.stride)])
        except EngineLost:
            raise
        except Exception:
            logger.exception("%s cannot decode a test image either", self.name)
            return False
        return True

    def _running(self, plan: QuantumPlan) -> list[ImageProgress]:
        """The progress of the images in slots, after a plan was carried out."""
        steps = {image.slot: count for image, count in plan}
        running = []
        for slot, image in self.scheduler.running.items():
            new_row = image.position // self.image_row > (image.position - steps.get(slot, 0)) // self.image_row
            shown = new_row and self._submissions[image.request].stream
            running.append(ImageProgress(image.request, image.index, image.position,
                                         self.decoder.left(slot, image.position),
                                         self.decoder.image(slot) if shown else None))
        return running
