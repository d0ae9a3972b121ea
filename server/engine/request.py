"""A request: a job in progress, from its admission until all of its answer is known. Used on the
event loop only.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from linpix.model.attempts import Recognised
from linpix.model.checkpoint import Checkpoint
from linpix.model.inside import View

from ..errors import (
    ClientLeft,
    DeadlinePassed,
    ServiceError,
    deadline_passed,
    draining,
    engine_gone,
)
from ..metrics import Metrics
from .image import Image
from .job import Job

# a quarter of the queue is closed to bulk images, so that they never shut others out
BULK_QUEUE = 4


class Event(NamedTuple):
    """News of one image: `rows` finished image rows of it, or the whole of it if it is `done`."""

    image: int  # its number among the job's images
    rows: int
    canvas: NDArray[np.uint8]  # (T,)
    done: bool = False
    recognised: Recognised | None = None  # if the model has checked it
    # Scoring's log_probs and priors
    scores: tuple[NDArray[np.float32], NDArray[np.float64]] | None = None
    view: View | None = None  # of a job that looks inside


class Started(NamedTuple):
    """When an image got its first slot."""

    at: float  # by time.monotonic
    quanta_s: float  # Model.quanta_s at that time
    images_s: float


class ServedModel:
    """A model that requests may ask for, decoded in this process or in replicas."""

    def __init__(
        self, checkpoint: Checkpoint, facts: dict[str, str], slots: int, max_queue: int
    ) -> None:
        """facts: of Decoder · max_queue: images that may wait."""
        self.kernels = ""  # of GpuPool; replicas have their own
        self.checkpoint, self.facts, self.slots = checkpoint, facts, slots
        self.name, self.config = checkpoint.name, checkpoint.net.config
        self.backend = checkpoint.net.attention.steps_as  # its attention, as metrics name it
        # images that may wait: in all, of them bulk ones
        self.queue = max_queue, max_queue - max_queue // BULK_QUEUE


@dataclass(slots=True, eq=False)
class Request:
    """Times are by time.monotonic, which is the loop's clock."""

    id: str
    endpoint: str
    client: str
    job: Job
    model: ServedModel
    timeout_s: float  # from `began`
    began: float = field(default_factory=time.monotonic)  # when its head was read
    deadline: float = field(init=False)
    # images that are not done; 1 for a picture to be scored, to its end
    undone: int = field(init=False)
    tokens: int = field(init=False)  # of each image, to be drawn
    given: int = field(init=False)  # image rows of each that are known from the start
    images: list[Image] = field(default_factory=list)  # the current attempt at each
    begun: dict[int, Started] = field(default_factory=dict)  # of images, by number
    drawn: float = 0.0  # when the last image was, by time.monotonic; 0: none yet
    outcome: str = "cancelled"  # "completed", "cancelled" or "failed": what is counted at its end
    late: bool = False  # its deadline has passed, or can no longer be met
    released: bool = False
    # of each unfinished image that is streamed: its finished rows in the last event, taken or not
    rows: dict[int, int] = field(default_factory=dict)
    expiry: asyncio.TimerHandle | None = None  # sends deadline_passed
    events: asyncio.Queue[Event | ServiceError | None] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.deadline, self.undone = self.began + self.timeout_s, self.job.count
        config, known, prefix = self.model.config, self.job.known, self.job.prefix
        self.given = prefix // config.token_size // config.row_length
        # a conditional model also reads the known sub-pixels behind a hole; others decode these
        read = int(known.sum()) if known is not None and config.patch else prefix
        self.tokens = config.length - read // config.token_size

    def send(self, event: Event | ServiceError | None) -> None:
        if isinstance(event, Event) and not event.done:
            self.rows[event.image] = event.rows
        self.events.put_nowait(event)

    def check_time(self) -> None:
        """Raise deadline_passed if the deadline passed during work that the event loop could not
        interrupt.
        """
        if self.deadline <= time.monotonic():
            self.late = True
            raise deadline_passed(self.timeout_s)

    async def next_event(self, patience_s: float | None = None) -> Event | None:
        """The next event; None after patience_s without one. Raises the ServiceError that ended the
        request early.
        """
        event = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                event = await self.events.get()
        if isinstance(event, ServiceError):
            self.late |= isinstance(event, DeadlinePassed)
            raise event
        return event


class Drawer(Protocol):
    """What draws the images of requests, and scores their pictures: the engine of this process
    (Admission), or replicas (server/cluster).
    """

    gone: str  # why it no longer draws; empty while it does

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """Which requests may ask for, by name; the default one is first."""

    def check_room(
        self, client: str, images: int = 1, *, bulk: bool = False, model: ServedModel | None = None
    ) -> None:
        """Raise ServiceError if there is no room for a client's images now. Nothing is held.

        model: None for the one with most room
        """

    def check(self, request: Request) -> None:
        """Raise ServiceError if there is no room for a request now, or not enough time."""

    def begin(self, request: Request) -> None:
        """Have an admitted request's images drawn, or its picture scored. The first event of a
        stream is None: its answer can begin.
        """

    def end(self, request: Request) -> None:
        """Free what a request holds."""


class Requests:
    """The requests that are served, and how they begin and end."""

    def __init__(self, drawer: Drawer, metrics: Metrics) -> None:
        self.drawer, self.metrics = drawer, metrics
        self.in_progress: dict[str, Request] = {}  # admitted ones, by id
        self.draining = False
        self.began = time.monotonic()

    def check_open(self) -> None:
        """Raise ServiceError if no request is admitted any more."""
        if self.draining:
            raise draining()
        if self.drawer.gone:
            raise engine_gone(self.drawer.gone)

    def fail_all(self, error: ServiceError) -> None:
        for request in self.in_progress.values():
            request.send(error)

    @contextlib.contextmanager
    def admit(self, request: Request) -> Iterator[None]:
        """A request's life: however it ends, it is counted, and what it holds is freed. Raises
        ServiceError.
        """
        try:
            request.check_time()
        except ServiceError:
            self.metrics.deadlines_passed.labels("waiting").inc()
            raise
        try:
            self.check_open()
            self.drawer.check(request)
        except ServiceError as error:
            self.metrics.requests_rejected.labels(error.code).inc()
            raise
        self.in_progress[request.id] = request
        try:
            self.drawer.begin(request)
            yield
        except ClientLeft:  # it stays "cancelled"
            raise
        except Exception:
            request.outcome = "failed"
            raise
        finally:
            self.release(request)

    def release(self, request: Request, outcome: str = "") -> None:
        """Free what a request holds, and count how it ended, before its last byte is sent. Later
        calls do nothing.
        """
        if request.released:
            return
        request.released, request.outcome = True, outcome or request.outcome
        if request.expiry is not None:
            request.expiry.cancel()
        del self.in_progress[request.id]
        self.drawer.end(request)
