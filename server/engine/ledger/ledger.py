"""What the routes know of admitted requests: their tickets, and how they begin and end. On the event loop only.

A request is admitted once, with room for all its images. `release` frees the room and counts the outcome: just before
the last byte of the answer, at a refusal, or at the latest when `holding` ends.
"""

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from linpix.model.checkpoint import Checkpoint
from linpix.model.likelihood import Scoring

from ...errors import ClientLeft, Draining, EngineGone, Exhausted, ServiceError
from ...metrics import Measured, Metrics
from ...pictures.upload_slots import UploadSlots
from ..decode.image_spec import ImageSpec
from ..schedule.forecast import Room
from .ticket import Demand, Ticket

T = TypeVar("T")


class ServedModel(ABC):
    """A model that requests may ask for, decoded in this process or elsewhere."""

    def __init__(self, checkpoint: Checkpoint, facts: dict[str, str], backend: str, room: Room) -> None:
        """facts: of Decoder · backend: its attention, as metrics name it."""
        self.checkpoint, self.facts, self.backend, self.room = checkpoint, facts, backend, room
        self.name, self.config = checkpoint.name, checkpoint.net.config

    @abstractmethod
    def room_left(self, bulk: bool = False) -> int:
        """Images of a class that would be admitted now."""


class Ledger(ABC):
    """LocalLedger has its images drawn by the engine thread of this process, FrontLedger by replicas."""

    def __init__(self, models: Mapping[str, ServedModel], metrics: Metrics, uploads: UploadSlots, *,
                 request_timeout_s: float, client_images: int) -> None:
        """models: which requests are admitted to, by name · client_images: that one client may have; 0: any number."""
        self.models, self.metrics, self.uploads = models, metrics, uploads
        self._timeout_s, self._client_images = request_timeout_s, client_images
        self.tickets: dict[str, Ticket] = {}  # admitted requests, by id
        self.draining = False
        self.gone = ""                        # why this process no longer decodes; empty while it does
        self.began = time.monotonic()

    @abstractmethod
    def start(self) -> None:
        """Called on the event loop, before the first request."""

    async def stop(self) -> None:
        """Requests that are still here end with Draining."""
        self.draining = True
        self.fail_all(Draining())

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether images can be drawn."""

    @abstractmethod
    async def measured(self) -> Measured:
        """The metrics of all processes that serve together."""

    def check_open(self) -> None:
        """Raise Draining or EngineGone if no request is admitted any more."""
        if self.draining:
            raise Draining()
        if self.gone:
            raise EngineGone(self.gone)

    def fail_all(self, error: ServiceError) -> None:
        for ticket in self.tickets.values():
            ticket.send(error)

    # --- a request, from its head to its end ---

    @contextlib.contextmanager
    def holding(self, id: str, endpoint: str, client: str, timeout_s: float = math.inf) -> Iterator[Ticket]:
        """A request's life, once its head is read: however it ends, it is counted, and what it holds is freed.

        timeout_s: the client's limit; the body may set a shorter one. Raises Draining or EngineGone.
        """
        ticket = Ticket(id, endpoint, client, min(timeout_s, self._timeout_s))
        try:
            with self._refusing(ticket):
                self.check_open()
            yield ticket
        except Exception as error:
            if not isinstance(error, ClientLeft) and (ticket.outcome or isinstance(error, Exhausted)):
                ticket.outcome = "failed"  # if the client left, it stays "cancelled"
            raise
        finally:
            self.release(ticket)

    @abstractmethod
    def has_room(self, client: str) -> bool:
        """Whether one more image of a client would be admitted."""

    def reserve(self, ticket: Ticket, *, draws: bool) -> None:
        """Give an upload room for one image before it is read, at the model with most room. Raises as admit does."""
        served = max(self.models.values(), key=lambda served: served.room_left())
        # with several models, only the body says which one is requested, and it may be faster than this one
        self._admit(ticket, served, Demand(1), check_deadline=draws and len(self.models) == 1)

    def admit(self, ticket: Ticket, served: ServedModel, demand: Demand, timeout_s: float = math.inf) -> None:
        """Give a request all the room that it demands, once its body is read. timeout_s: counted from its head.

        Raises Draining, EngineGone, DeadlinePassed, ClientLimit, QueueFull or DeadlineUnreachable; the request then
        holds nothing.
        """
        ticket.timeout_s = min(ticket.timeout_s, timeout_s)
        ticket.check_time()
        self._admit(ticket, served, demand, check_deadline=not demand.scored_only)

    @abstractmethod
    def _admit(self, ticket: Ticket, served: ServedModel, demand: Demand, *, check_deadline: bool) -> None: ...

    async def decode_upload(self, ticket: Ticket, read: Callable[[], T]) -> T:
        """Run `read` on an upload in a thread; return its result. Raises DeadlineUnreachable or DeadlinePassed."""
        with self._refusing(ticket):
            self.uploads.check(ticket.client, ticket.left_s)
        async with ticket.in_time():
            return await self.uploads.run(ticket.client, read)

    @abstractmethod
    async def submit(self, ticket: Ticket, specs: Sequence[ImageSpec]) -> None:
        """Have an admitted request's images drawn. Raises ServiceError."""

    @abstractmethod
    async def score(self, ticket: Ticket, scoring: Scoring) -> None:
        """Have an admitted request's image scored. Raises DeadlinePassed."""

    @abstractmethod
    def release(self, ticket: Ticket, outcome: str = "") -> None:
        """Free what a request holds, and count how it ended, before its last byte is sent. Later calls do nothing."""

    @contextlib.contextmanager
    def _refusing(self, ticket: Ticket) -> Iterator[None]:
        """A ServiceError in the block is a refusal: it is counted, and what the request holds is freed at once."""
        try:
            yield
        except ServiceError as error:
            self.metrics.requests_rejected.labels(error.code).inc()
            self.release(ticket)
            raise
