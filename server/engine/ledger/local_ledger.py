"""The ledger of a process with an engine: what its requests hold, and how they end. Used on the event loop only.

The engine thread decodes the images and reports every quantum; events, metrics and predictions follow from these
reports.
"""

import asyncio
import logging
import math
import time
from collections.abc import Sequence

from linpix.model.likelihood import Scoring

from ... import logs
from ...errors import ClientLimit, DeadlinePassed, EngineFailed, ServiceError
from ...metrics import Measured, Metrics
from ...pictures.upload_slots import UploadSlots
from ..batch import Batcher
from ..decode.image_spec import ImageSpec
from ..decode.scoring import ScoringJob
from ..messages import QuantumReport, Submission
from ..thread import EngineThread
from .ledger import Ledger, ServedModel
from .local_model import LocalModel
from .served_models import ServedModels
from .ticket import Demand, ImageDone, Scored, Ticket

logger = logging.getLogger("linpix")


class LocalLedger(Ledger):
    def __init__(self, batchers: dict[str, Batcher], metrics: Metrics, thread: EngineThread, *, max_queue: int,
                 request_timeout_s: float = math.inf, client_images: int = 0) -> None:
        """max_queue: images of one model that may wait · others: as of Ledger."""
        uploads = UploadSlots()
        self.served_models = ServedModels(batchers, metrics, thread, max_queue, uploads.until)
        self.models: dict[str, LocalModel]
        super().__init__(self.served_models.models, metrics, uploads, request_timeout_s=request_timeout_s,
                         client_images=client_images)
        self._thread = thread
        self._at: dict[str, LocalModel] = {}  # the model of each admitted request, by id
        metrics.heartbeat_age.set_function(lambda: thread.heartbeat_age_s)
        metrics.requests_waiting.set_function(lambda: sum(not ticket.joined for ticket in self.tickets.values()))
        metrics.requests_running.set_function(lambda: sum(bool(ticket.joined) for ticket in self.tickets.values()))

    def start(self) -> None:
        """Start the engine thread. Called on the event loop."""
        self._thread.start(self, asyncio.get_running_loop().call_soon_threadsafe)

    async def stop(self) -> None:
        """Also end the engine thread, after the current quantum."""
        await super().stop()
        await asyncio.to_thread(self._thread.stop)

    @property
    def ready(self) -> bool:
        return self._thread.running and not self.gone

    def has_room(self, client: str) -> bool:
        return (max(served.room_left() for served in self.models.values()) > 0
                and (not self._client_images or self._images_of(client) < self._client_images))

    def _admit(self, ticket: Ticket, served: ServedModel, demand: Demand, *, check_deadline: bool) -> None:
        assert isinstance(served, LocalModel)
        with self._refusing(ticket):
            self.check_open()
            self._check_client(ticket, demand.images)
            if (before := self._at.pop(ticket.id, None)) is not None:
                before.leave(ticket)
            served.admit(ticket, demand, check_deadline=check_deadline)
        self.tickets[ticket.id], self._at[ticket.id] = ticket, served

    async def submit(self, ticket: Ticket, specs: Sequence[ImageSpec]) -> None:
        """Hand an admitted request's images to the engine thread. Raises DeadlinePassed or DeadlineUnreachable."""
        served, first = self._at[ticket.id], specs[0]
        ticket.check_time()
        if ticket.demand.known is None:
            with self._refusing(ticket):
                served.queue(ticket, first.known_tokens(served.config))
        ticket.given = first.known_rows(served.config)
        ticket.rows = [ticket.given] * len(specs)
        ticket.outcome = "cancelled"  # unless something else ends it
        ticket.expiry = asyncio.get_running_loop().call_at(
            ticket.deadline, lambda: ticket.send(DeadlinePassed(ticket.timeout_s)))
        self._thread.submit(served.batcher, Submission(ticket.id, specs, ticket.demand.bulk, ticket.demand.stream))

    async def score(self, ticket: Ticket, scoring: Scoring) -> None:
        ticket.check_time()
        ticket.outcome = "cancelled"  # unless something else ends it
        self._thread.score(ScoringJob(ticket.id, ticket.client, scoring))

    def release(self, ticket: Ticket, outcome: str = "") -> None:
        if ticket.released:
            return
        ticket.released, ticket.outcome = True, outcome or ticket.outcome
        if ticket.expiry is not None:
            ticket.expiry.cancel()
        if ticket.late:
            self.metrics.deadlines_passed.labels("running" if ticket.joined else "waiting").inc()
        served = self._at.pop(ticket.id, None)
        self.tickets.pop(ticket.id, None)
        if ticket.outcome:
            self.metrics.requests.labels(ticket.endpoint, ticket.outcome).inc()
            self.metrics.request_duration.labels(ticket.endpoint).observe(time.monotonic() - ticket.began)
        if served is None:
            return
        if ticket.late:
            served.settle(ticket)
        served.leave(ticket)
        if ticket.outcome and ticket.undone:
            self._thread.cancel(served.batcher, ticket.id)
        if ticket.outcome and ticket.undone and not ticket.demand.scored_only:
            self.metrics.images_completed.labels(served.name, served.backend, ticket.outcome).inc(ticket.undone)
        if len(self.served_models.entries) > len(self.models):
            self.served_models.forget_idle()

    async def measured(self) -> Measured:
        return self.metrics

    def _images_of(self, client: str) -> int:
        """A client's images, waiting or running."""
        return sum(ticket.undone for ticket in self.tickets.values() if ticket.client == client)

    def _check_client(self, ticket: Ticket, images: int) -> None:
        """Raise ClientLimit, with the time until there is room, if so many more images are too many for one client."""
        entries = self.served_models.entries.values()
        if not self._client_images or images + sum(served.undone for served in entries) <= self._client_images:
            return  # all clients together have no more than that
        here = self._images_of(ticket.client)
        more = images - (ticket.demand.images if ticket.id in self.tickets else 0)
        if (excess := here + more - self._client_images) > 0:
            theirs = [other for other in self.tickets.values() if other.client == ticket.client]
            until_s = max(self.served_models.until_drawn(excess, theirs), self.uploads.until(excess))
            raise ClientLimit(here, more, self._client_images, until_s)

    # --- reports of the engine thread ---

    def quantum_done(self, batcher: Batcher, report: QuantumReport) -> None:
        """Send events to the requests of one quantum, and count it in the metrics."""
        served = self.served_models.entries.get(batcher)
        if served is None:  # the model is no longer served, and its last request has ended
            return
        metrics, now = self.metrics, time.monotonic()
        for request in report.joined:
            if (ticket := served.queued.get(request)) is not None:
                served.joined(ticket)
                metrics.queue_wait.observe(report.joined_at - ticket.began)
        for image in (*report.running, *report.finished):
            if ((ticket := served.queued.get(image.request)) is not None
                    and ticket.progressed(image, image.position // batcher.image_row)):
                metrics.first_row.observe(now - ticket.began)
        for image in report.finished:
            if (ticket := served.queued.get(image.request)) is not None:
                assert image.canvas is not None
                ticket.send(ImageDone(image.index, image.canvas, image.recognised))
                served.finished(ticket)
                metrics.images_completed.labels(served.name, served.backend, "completed").inc()
        for request, error in report.failed.items():
            self._failed(served, request, error)
        served.apply(report)
        for ticket in served.too_late():
            self._thread.cancel(batcher, ticket.id)
            ticket.send(DeadlinePassed(ticket.timeout_s))
        self.served_models.count(served, report)

    def _failed(self, served: LocalModel, request: str, error: Exception,
                cure: str = "another seed or temperature may succeed") -> None:
        logger.error("a request of %s failed, others continue: %s: %s", served.name, type(error).__name__, error,
                     extra=logs.of(request))
        why = f"the engine failed on an image of this request ({type(error).__name__})"
        not_finite = isinstance(error, FloatingPointError)
        self.metrics.faults_isolated.labels(served.name, "not_finite" if not_finite else "threw").inc()
        if (ticket := self.tickets.get(request)) is not None:
            ticket.send(EngineFailed(f"{error if not_finite else why}; {cure}"))

    def score_done(self, score: ScoringJob, error: Exception | None) -> None:
        if (ticket := self.tickets.get(score.request)) is None:  # the request has ended meanwhile
            return
        if error is None:
            ticket.send(Scored())
        else:
            self._failed(self._at[score.request], score.request, error, "try again, or with another model")

    def batch_lost(self, batcher: Batcher | None, requests: Sequence[str], error: ServiceError) -> None:
        self.metrics.engine_restarts.inc()
        served = None if batcher is None else self.served_models.entries.get(batcher)
        if served is None:
            return
        served.emptied()
        for request in requests:
            if (ticket := served.queued.get(request)) is not None:
                logger.error("a request of %s failed with its whole batch", served.name, extra=logs.of(request))
                ticket.send(error)

    def engine_gone(self, why: str, error: ServiceError) -> None:
        self.gone = why
        self.fail_all(error)
