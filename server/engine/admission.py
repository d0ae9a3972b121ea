"""Admission: which requests the engine of this process takes, and what its reports mean for them.

A request is admitted once, when everything about it is known, with room for all its images. Used on
the event loop only.
"""

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from linpix.model.inside import Inside
from linpix.model.likelihood import Scoring

from .. import logs
from ..errors import ServiceError, client_limit, deadline_passed, engine_failed
from ..memory import collect
from ..metrics import PRIORITIES, Metrics
from .decode.engine import Engine
from .image import Image, Report, images_of, next_or_best
from .model import Model
from .request import Event, Request, ServedModel, Started
from .thread import EngineThread, Work

logger = logging.getLogger("linpix")
# seconds from the last request of a model that is no longer served until its memory is freed
COLLECT_S = 1.0
# seconds until the next attempt, then twice as long: connections hold it for up to --head-timeout
AGAIN_S = 7.0


class Admission:
    """The Drawer of this process: it knows the room and time of its models, and receives the
    reports of their engine thread.
    """

    gone = ""

    def __init__(
        self,
        engines: dict[str, Engine],
        metrics: Metrics,
        thread: EngineThread,
        *,
        max_queue: int,
        client_images: int = 0,
    ) -> None:
        """engines: by name, the default one first · max_queue: images of one model that may wait ·
        client_images: that one client may have; 0: any number."""
        self.metrics, self._thread = metrics, thread
        self._max_queue, self._client_images = max_queue, client_images
        self._requests: dict[str, Request] = {}  # by id
        # of `models`, and those that are decoded until their last request ends
        self._all: dict[Engine, Model] = {}
        self.serve(engines)
        metrics.heartbeat_age.set_function(lambda: thread.watchdog.age_s)
        metrics.requests_waiting.set_function(
            lambda: sum(not request.begun for request in self._requests.values())
        )
        metrics.requests_running.set_function(
            lambda: sum(bool(request.begun) for request in self._requests.values())
        )

    def start(self) -> None:
        """Called on the event loop, before the first request."""
        self._thread.start(self, asyncio.get_running_loop().call_soon_threadsafe)

    async def stop(self) -> None:
        """End the engine thread, after the current quantum."""
        await asyncio.to_thread(self._thread.stop)

    @property
    def ready(self) -> bool:
        return self._thread.running and not self.gone

    # --- requests ---

    def check_room(
        self, client: str, images: int = 1, *, bulk: bool = False, model: ServedModel | None = None
    ) -> None:
        theirs = {
            request.id: request.undone
            for request in self._requests.values()
            if request.client == client
        }
        here, limit = sum(theirs.values()), self._client_images
        excess = here + images - limit
        if limit and excess > 0:
            ends = [end for served in self._all.values() for end in served.ends()]
            until_s = sorted(end for end, id in ends if id in theirs) or [0.0]
            raise client_limit(here, images, limit, until_s[min(excess, len(until_s)) - 1])
        assert model is None or isinstance(model, Model)
        full = None
        for asked in [model] if model else self.models.values():
            try:
                return asked.check_room(images, bulk=bulk)
            except ServiceError as error:
                full = full or error
        assert full is not None
        raise full

    def check(self, request: Request) -> None:
        job, model = request.job, request.model
        self.check_room(request.client, job.count, bulk=job.bulk, model=model)
        assert isinstance(model, Model)
        model.check_time(request)

    def begin(self, request: Request) -> None:
        job, model = request.job, request.model
        assert isinstance(model, Model)
        self._requests[request.id] = model.requests[request.id] = request
        if model.engine not in self._all:  # it was replaced while the upload was decoded
            self._add(model)
        request.expiry = asyncio.get_running_loop().call_at(
            request.deadline, lambda: request.send(deadline_passed(request.timeout_s))
        )
        if job.stream:
            request.send(None)
        if job.scored:
            assert job.canvas is not None
            self._run_in_background(request, job.canvas, job.label)
        else:
            request.images = images_of(job, request.id)
            self._thread.submit(model.engine, request.images)

    def _run_in_background(
        self, request: Request, canvas: NDArray[np.uint8], label: int | None
    ) -> None:
        pieces = self._studied(request, canvas, label)
        self._thread.run_in_background(Work(request.id, request.client, pieces))

    def _studied(
        self, request: Request, canvas: NDArray[np.uint8], label: int | None
    ) -> Iterator[None]:
        """Score a picture, or look inside the model that reads it, piece by piece. On the engine
        thread.
        """
        job, net = request.job, request.model.checkpoint.net
        if job.look:
            inside = Inside(net, canvas, job.known, label)
            while inside.advance():
                yield
            event = Event(0, 0, canvas, True, view=inside.view(*job.look))
        else:
            scoring = Scoring(
                net, canvas, job.known, job.labels, plausible=job.plausible, asked=label
            )
            while scoring.advance():
                yield
            scores = scoring.log_probs.cpu().numpy(), scoring.priors
            event = Event(0, 0, canvas, True, scores=scores)
        self._thread.report(request.send, event)

    def end(self, request: Request) -> None:
        metrics, job, model = self.metrics, request.job, request.model
        assert isinstance(model, Model)
        metrics.requests.labels(request.endpoint, request.outcome).inc()
        metrics.request_duration.labels(request.endpoint, model.name).observe(
            time.monotonic() - request.began
        )
        if request.late:
            metrics.deadlines_passed.labels("running" if request.begun else "waiting").inc()
            for image in request.images:
                if image.slot and image.attempt == 1 and image.index in request.begun:
                    model.measure(request, image)
        del self._requests[request.id], model.requests[request.id]
        if request.undone:
            self._thread.cancel(request.id, model.engine)
            if not job.scored:
                metrics.images_completed.labels(model.name, model.backend, request.outcome).inc(
                    request.undone
                )
        if len(self._all) > len(self.models):
            self._forget_idle()

    # --- models ---

    def serve(self, engines: dict[str, Engine]) -> None:
        """Admit requests to these models from now on. Requests admitted to other models go on until
        they end.
        """
        self.models: dict[str, Model] = {
            name: self._all.get(engine) or Model(engine, self._max_queue)
            for name, engine in engines.items()
        }
        for model in self.models.values():
            self._add(model)
        self._forget_idle()

    def _add(self, model: Model) -> None:
        """Have a model decoded, and the gauges follow it; it counts together with one of its name
        that it replaces.
        """
        self._all[model.engine] = model
        self._thread.serve([*self._all])
        self.metrics.add_model(name := model.name, model.backend)

        def total(number: Callable[[Model], int]) -> int:
            return sum(number(model) for model in self._all.values() if model.name == name)

        self.metrics.state_slots.labels(name).set_function(lambda: total(lambda model: model.slots))
        self.metrics.state_slots_used.labels(name).set_function(
            lambda: total(lambda model: len(model.engine.slots.running))
        )
        for bulk, priority in enumerate(PRIORITIES):
            self.metrics.images_waiting.labels(name, priority).set_function(
                partial(total, partial(Model.waiting, bulk=bool(bulk)))
            )

    def _forget_idle(self) -> None:
        """Free the memory of models that are no longer served and have no requests."""
        over = [
            model
            for model in self._all.values()
            if not model.requests and model not in self.models.values()
        ]
        if not over:
            return
        for model in over:
            del self._all[model.engine]
        self._thread.serve([*self._all])
        for name in {model.name for model in over} - {model.name for model in self._all.values()}:
            self.metrics.state_slots.remove(name)
            self.metrics.state_slots_used.remove(name)
        gone = [weakref.ref(model.engine) for model in over]
        asyncio.get_running_loop().call_later(COLLECT_S, self._give_back, gone, AGAIN_S)

    def _give_back(self, gone: "list[weakref.ref[Engine]]", again_s: float) -> None:
        """Collect garbage until the engines are freed: cycles and idle connections still hold their
        last requests.
        """
        collect()
        if left := [engine for engine in gone if engine() is not None]:
            asyncio.get_running_loop().call_later(again_s, self._give_back, left, 2 * again_s)

    # --- reports of the engine thread ---

    def quantum_done(self, engine: Engine, report: Report) -> None:
        """Send events to the requests of one quantum, and count it in the metrics."""
        model, now = self._all.get(engine), time.monotonic()
        if model is None:  # the model is no longer served, and its last request has ended
            return
        queue_wait, first_row = (
            self.metrics.queue_wait.labels(model.name),
            self.metrics.first_row.labels(model.name),
        )
        for image in report.joined:
            if (request := model.requests.get(image.request)) is not None and image.attempt == 1:
                request.begun[image.index] = Started(
                    report.joined_at, model.quanta_s, model.images_s
                )
                queue_wait.observe(report.joined_at - request.began)
        passed_s = now - report.joined_at
        model.quanta_s += passed_s
        model.images_s += passed_s * report.running
        for image, rows, canvas in report.rows:
            if (request := model.requests.get(image.request)) is not None:
                if image.attempt == 1 and rows.start == request.given + 1:
                    first_row.observe(now - request.began)
                if canvas is not None:
                    for row in rows:
                        request.send(Event(image.index, row, canvas))
        for image in report.finished:
            if (request := model.requests.get(image.request)) is not None:
                self._finished(model, request, image)
        for id, error in report.failed.items():
            if (request := model.requests.get(id)) is not None:
                self._failed(request, error)
        for request in model.too_late():
            request.late = True
            self._thread.cancel(request.id, engine)
            request.send(deadline_passed(request.timeout_s))
        metrics, labels = self.metrics, (model.name, model.backend)
        if report.passes:
            metrics.pixels_generated.labels(*labels).inc(report.subpixels)
            metrics.state_saturations.labels(model.name).inc(report.saturated)
        for seconds in report.prefill_s:
            metrics.prefill.labels(model.name).observe(seconds)
        if report.retries:
            metrics.quanta_retried.labels(model.name).inc()
        elif report.passes:
            metrics.engine_step.labels(*labels).observe(report.seconds / report.passes)
            metrics.engine_step_batch_size.observe(report.batch)

    def _finished(self, model: Model, request: Request, image: Image) -> None:
        """An attempt at an image is done: begin the next one, or send the best."""
        following = next_or_best(image)
        if following.canvas is None:
            request.images[image.index] = following
            self.metrics.images_drawn_again.labels(model.name, model.backend).inc()
            self._thread.submit(model.engine, [following])
            return
        model.measure(request, image)
        if request.job.look:  # what was drawn is looked at
            self._run_in_background(request, following.canvas, following.label)
            return
        request.undone, request.drawn = request.undone - 1, time.monotonic()
        height, recognised = model.config.height, following.recognised
        request.send(Event(image.index, height, following.canvas, True, recognised))
        self.metrics.images_completed.labels(model.name, model.backend, "completed").inc()

    def _failed(
        self,
        request: Request,
        error: Exception,
        cure: str = "another seed or temperature may succeed",
    ) -> None:
        name = request.model.name
        logger.error(
            "a request of %s failed, others continue: %s: %s",
            name,
            type(error).__name__,
            error,
            extra=logs.of(request.id),
        )
        why = f"the engine failed on an image of this request ({type(error).__name__})"
        not_finite = isinstance(error, FloatingPointError)
        self.metrics.faults_isolated.labels(name, "not_finite" if not_finite else "threw").inc()
        request.send(engine_failed(f"{error if not_finite else why}; {cure}"))

    def work_done(self, id: str, error: Exception | None) -> None:
        if error is not None and (request := self._requests.get(id)) is not None:
            self._failed(request, error, "try again, or with another model")

    def batch_lost(self, requests: Sequence[str], error: ServiceError) -> None:
        self.metrics.engine_restarts.inc()
        for id in requests:
            if (request := self._requests.get(id)) is not None:
                logger.error(
                    "a request of %s failed with its whole batch",
                    request.model.name,
                    extra=logs.of(id),
                )
                request.send(error)

    def engine_gone(self, why: str, error: ServiceError) -> None:
        self.gone = why
        for request in self._requests.values():
            request.send(error)
