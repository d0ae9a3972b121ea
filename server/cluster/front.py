"""The ledger of a front, which has no engine: replicas draw its images."""

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Sequence

from prometheus_client import Histogram

from linpix.model.likelihood import Scoring

from ..engine.decode.image_spec import ImageSpec
from ..engine.ledger.ledger import Ledger, ServedModel
from ..engine.ledger.ticket import Demand, Ticket
from ..errors import (
    ClientLimit,
    DeadlinePassed,
    Draining,
    EngineGone,
    QueueFull,
    ServiceError,
)
from ..metrics import Measured, Metrics
from ..pictures.upload_slots import UploadSlots
from ..settings import Settings
from .desk import Together
from .messages import Answer, Fleet, Hidden, Likelihood, Order, ReplicaLost, Took

logger = logging.getLogger("linpix")
RUNS = 2        # of an order: one whose replica died runs only once more, since it may be what kills replicas
LATE_S = 0.5    # seconds from a deadline until the front ends the request; the replica, which counts it, does so before
NEAR = 4        # from 1/NEAR of a client's limit on, the desk is asked. Below, a burst can pass it until the next beat
AGAIN_S = 1.0   # seconds until a client with too many images may try again: only replicas know how long they take
_HOPS_S = (0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.5)
_ELSEWHERE = EngineGone, Draining  # errors of a replica that ends: another can draw the same


class FrontLedger(Ledger):
    """What a front's requests hold: a ticket here, and room at the replica that draws for them.

    Replicas count the requests that they admit; a front counts those that it refuses or that died with a replica.
    """

    def __init__(self, name: str, models: dict[str, ServedModel], metrics: Metrics, fleet: Fleet, settings: Settings
                 ) -> None:
        super().__init__(models, metrics, UploadSlots(), request_timeout_s=settings.request_timeout,
                         client_images=settings.client_images)
        self.name, self._fleet = name, fleet
        self._at: dict[str, ServedModel] = {}  # the model of each admitted request, by id
        self._hops = Histogram("linpix_hop_seconds", "Seconds from a front to a replica and back, for answers in one "
                                                     "piece.",
                               buckets=_HOPS_S, registry=metrics.registry)
        self._orders: dict[str, asyncio.Task[None]] = {}
        self._entered: Counter[str] = Counter()  # images, by client
        self._held: dict[str, int] = {}          # images, by request
        metrics.requests_running.set_function(lambda: 0)  # replicas count these, and those that wait there
        metrics.requests_waiting.set_function(lambda: 0 if fleet.replicas else len(self._orders))

    def start(self) -> None:
        """Do nothing: the replicas have started."""

    @property
    def ready(self) -> bool:
        return self._fleet.replicas > 0

    @property
    def clients(self) -> Counter[str]:
        """Images of each client here, waiting or running."""
        return +self._entered

    async def measured(self) -> Measured:
        return Together(await self._fleet.collected() | {self.name: list(self.metrics.registry.collect())})

    # --- a request ---

    def has_room(self, client: str) -> bool:
        return self._fleet.room > 0 and (not self._client_images or self._entered[client] < self._client_images)

    def _admit(self, ticket: Ticket, served: ServedModel, demand: Demand, *, check_deadline: bool) -> None:
        """Keep what the order will need; the replica that gets it says whether there is room.

        For a large upload this is called before it is read, while its ticket demands nothing yet. It is refused then if
        no replica has room. While there is no replica, as many images may wait here as in the queue of one.
        """
        with self._refusing(ticket):
            self.check_open()
            allowed, images, room = served.room.max_queue, demand.images, self._fleet.room
            here, limit = self._entered[ticket.client], self._client_images
            if limit and here + images > limit:
                raise ClientLimit(here, images, limit, AGAIN_S)
            unread = demand.known is None and not ticket.demand.images and not demand.scored_only
            if self._fleet.replicas and unread and room < images:
                raise QueueFull(max(0, allowed - room), images, allowed, AGAIN_S)
            if not self._fleet.replicas and (waiting := self._entered.total()) + images > allowed:
                raise QueueFull(waiting, images, allowed, AGAIN_S)
        ticket.demand = demand
        self.tickets[ticket.id], self._at[ticket.id] = ticket, served

    async def submit(self, ticket: Ticket, specs: Sequence[ImageSpec]) -> None:
        """Have a replica draw. A stream waits until a replica has admitted it, since its answer begins then.

        Raises DeadlinePassed, ClientLimit, and for a stream any error of the replica.
        """
        served, first = self._at[ticket.id], specs[0]
        config = served.config
        ticket.check_time()
        ticket.demand = dataclasses.replace(ticket.demand, known=first.known_tokens(config))
        ticket.given = first.known_rows(config)
        await self._order(ticket, served, specs=list(specs))

    async def score(self, ticket: Ticket, scoring: Scoring) -> None:
        ticket.check_time()
        canvas, known, labels = scoring.asked
        await self._order(ticket, self._at[ticket.id], hidden=Hidden(canvas=canvas, known=known, labels=labels),
                          scoring=scoring)

    async def _order(self, ticket: Ticket, served: ServedModel, *, specs: Sequence[ImageSpec] = (),
                     hidden: Hidden | None = None, scoring: Scoring | None = None) -> None:
        with self._refusing(ticket):
            await self._enter(ticket)
        loop, tokens = asyncio.get_running_loop(), served.config.length - (ticket.demand.known or 0)
        work = float(ticket.demand.images * tokens * served.checkpoint.net.multiplications)
        order = Order(id=ticket.id, endpoint=ticket.endpoint, client=ticket.client, model=served.name,
                      facts=served.facts, demand=ticket.demand, work=work, timeout_s=ticket.timeout_s,
                      spent_s=0.0, specs=specs, hidden=hidden)
        ticket.expiry = loop.call_at(ticket.deadline + LATE_S, self._expire, ticket)
        admitted: asyncio.Future[None] = loop.create_future()
        self._orders[ticket.id] = loop.create_task(self._run(ticket, order, scoring, admitted))
        ticket.outcome = "cancelled"  # unless something else ends it
        if ticket.demand.stream:
            try:
                async with ticket.in_time():
                    await admitted
            except DeadlinePassed:
                if not admitted.done() or admitted.cancelled():
                    self._count_late(ticket)
                raise

    def _expire(self, ticket: Ticket) -> None:
        self._count_late(ticket)
        ticket.send(DeadlinePassed(ticket.timeout_s))

    def _count_late(self, ticket: Ticket) -> None:
        """Count a request whose time is up. Replicas count those that they have, and say so before."""
        self.metrics.deadlines_passed.labels("waiting").inc()
        self.metrics.requests.labels(ticket.endpoint, "failed").inc()

    async def _enter(self, ticket: Ticket) -> None:
        """Count the images as the client's, at all fronts. Raises ClientLimit.

        The desk, of which there is only one, is asked if the client comes near the limit; else the next beat reports
        the images.
        """
        client, images, limit = ticket.client, ticket.demand.images, self._client_images
        here = self._entered[client]
        self._entered[client] += images
        self._held[ticket.id] = images  # from now on release takes them back, whatever comes
        near = limit and NEAR * (self._fleet.elsewhere(client) + here + images) > limit
        taken = await self._fleet.enter(client, here, images, limit) if near else None
        if taken is not None:
            self._leave(ticket)
            raise ClientLimit(taken, images, limit, AGAIN_S)

    def _leave(self, ticket: Ticket) -> int:
        """No longer count the images of a request as the client's; returns how many were."""
        images = self._held.pop(ticket.id, 0)
        self._entered[ticket.client] -= images
        if not self._entered[ticket.client]:
            del self._entered[ticket.client]
        return images

    # --- its order ---

    async def _run(self, ticket: Ticket, order: Order, scoring: Scoring | None, admitted: asyncio.Future[None]) -> None:
        """Pass on what replicas answer. An order whose replica dies runs again, if no answer to it was passed on."""
        for run in range(RUNS):
            # an id of its own: if the same replica gets it again, the first run's late answers do not belong to it
            order = dataclasses.replace(order, spent_s=time.monotonic() - ticket.began,
                                        id=f"{ticket.id}.{run}" if run else ticket.id)
            passed = False
            try:
                if not order.demand.stream:
                    began = time.monotonic()
                    self._pass_on(ticket, scoring, await self._fleet.draw(order), began)
                    return
                async for answers in self._fleet.stream(order):
                    if not admitted.done():
                        self._admitted(answers, admitted)
                    self._pass_on(ticket, scoring, answers)
                    passed |= bool(answers)
                return
            except ReplicaLost as lost:
                again = run + 1 < RUNS and not passed
                logger.warning("%s; request %s %s", lost, order.id, "runs again on another "
                                                                    "replica" if again else "ends")
                if not again:
                    break
            except Exception as failure:  # a bug, of ours or of the transport
                logger.exception("request %s was lost", order.id)
                self._lose(ticket, admitted, f"the request was lost on its way to a replica ({type(failure).__name__})")
                return
        self._lose(ticket, admitted, "the replicas for this request have ended, or serve other weights")

    def _admitted(self, answers: list[Answer], admitted: asyncio.Future[None]) -> None:
        """Set `admitted` from the first answer of a stream. Raises ReplicaLost if the replica ends."""
        if answers and isinstance(answers[-1], ServiceError):
            if isinstance(answers[-1], _ELSEWHERE):
                raise ReplicaLost(str(answers[-1]))
            admitted.set_exception(answers[-1])
        else:
            admitted.set_result(None)

    def _pass_on(self, ticket: Ticket, scoring: Scoring | None, answers: list[Answer], began: float = 0.0) -> None:
        """began: when the order was sent, if this is its whole answer. Raises ReplicaLost if the replica ends."""
        for answer in answers:
            if isinstance(answer, _ELSEWHERE):
                raise ReplicaLost(str(answer))
        for answer in answers:
            if isinstance(answer, Took):
                self._hops.observe(time.monotonic() - began - answer.seconds)
            elif not isinstance(answer, Likelihood):
                ticket.send(answer)
            elif scoring is not None:
                scoring.take(answer.log_probs, answer.priors)

    def _lose(self, ticket: Ticket, admitted: asyncio.Future[None], why: str) -> None:
        error = EngineGone(why)
        self.metrics.requests.labels(ticket.endpoint, "failed").inc()
        if ticket.demand.stream and not admitted.done():
            admitted.set_exception(error)
        ticket.send(error)

    def release(self, ticket: Ticket, outcome: str = "") -> None:
        """Forget a request, and have the replica forget it too. Later calls do nothing."""
        if ticket.released:
            return
        ticket.released = True
        if ticket.expiry is not None:
            ticket.expiry.cancel()
        self.tickets.pop(ticket.id, None)
        self._at.pop(ticket.id, None)
        if (order := self._orders.pop(ticket.id, None)) is not None:
            order.cancel()
        elif ticket.late:
            self.metrics.deadlines_passed.labels("waiting").inc()
        ticket.outcome, ordered = outcome or ticket.outcome, self._leave(ticket)
        alone = not ordered or (ticket.outcome == "cancelled" and not self._fleet.replicas)
        if ticket.outcome and alone:  # no replica has counted it
            self.metrics.requests.labels(ticket.endpoint, ticket.outcome).inc()
