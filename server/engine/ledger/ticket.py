"""The ticket of one request on the event loop: its deadline, what it holds, and the events of its images."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from linpix.model.attempts import Recognised

from ...errors import DeadlinePassed, ServiceError
from ..messages import ImageProgress


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
    recognised: Recognised | None = None  # if the model has judged it


@dataclass(frozen=True, slots=True)
class Scored:
    """The request's image is scored."""


Event = RowsDone | ImageDone | Scored | ServiceError


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs. That of a large upload is made twice: from its head, and again from its body."""

    images: int
    bulk: bool = False
    stream: bool = False
    known: int | None = None    # tokens of each image that need no step; None: upload not decoded yet
    scored_only: bool = False   # its image is not drawn: it holds room in the queue, never a slot
    attempts: int = 0           # for each image, as in ImageSpec


@dataclass(slots=True, eq=False)
class Ticket:
    """Used on the event loop only. Times are by time.monotonic, which is the loop's clock."""

    id: str
    endpoint: str
    client: str
    timeout_s: float                                           # from `began`
    began: float = field(default_factory=time.monotonic)       # when its head was read
    demand: Demand = Demand(0)     # what it has room for
    given: int = 0                 # image rows that are known from the start
    joined: int = 0                # images that have had a slot
    done: int = 0                  # images that are finished, and have left their slot
    rows: list[int] = field(default_factory=list)  # image rows finished, by image
    outcome: str = ""              # "completed", "cancelled" or "failed": set as soon as it is to be counted
    promised: float = float("inf")     # predicted time of its end; inf: no prediction was needed
    late: bool = False             # its deadline has passed, or can no longer be met
    released: bool = False
    expiry: asyncio.TimerHandle | None = None  # sends DeadlinePassed at the deadline, once its images are queued
    _again: set[int] = field(default_factory=set)  # images that were drawn again
    _events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    @property
    def deadline(self) -> float:
        return self.began + self.timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def undone(self) -> int:
        return self.demand.images - self.done

    @property
    def waiting(self) -> int:
        """Images that have had no slot yet."""
        return self.demand.images - self.joined

    def send(self, event: Event) -> None:
        self._events.put_nowait(event)

    def progressed(self, image: ImageProgress, rows: int) -> bool:
        """Record that `rows` image rows of an image are finished, and send the new ones if the request is a stream.

        Returns whether the first decoded image row is among them. An image that is drawn again has fewer image rows
        than before; a stream gets all of them again.
        """
        before, self.rows[image.index] = self.rows[image.index], rows
        if rows < before:
            self._again.add(image.index)
            before = self.given
        if self.demand.stream and image.canvas is not None:
            for finished in range(before + 1, rows + 1):
                self.send(RowsDone(image.index, finished, image.canvas))
        return before == self.given < rows and image.index not in self._again

    def check_time(self) -> None:
        """Raise DeadlinePassed if the deadline passed during work that the event loop could not interrupt."""
        if self.left_s <= 0:
            raise self._passed()

    def _passed(self) -> DeadlinePassed:
        self.late = True
        return DeadlinePassed(self.timeout_s)

    @contextlib.asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Interrupt the block at the deadline, wherever it is, and raise DeadlinePassed."""
        try:
            async with asyncio.timeout_at(self.deadline):
                yield
        except TimeoutError:
            raise self._passed() from None

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Lists of all events there are, until the last image is finished or an error, the last event, ends them."""
        done = 0
        while done < self.demand.images:
            events = [await self._events.get()]
            while not self._events.empty():
                events.append(self._events.get_nowait())
            done += sum(isinstance(event, ImageDone) for event in events)
            ended = next((at for at, event in enumerate(events) if isinstance(event, ServiceError)), None)
            if ended is not None:
                self.late |= isinstance(events[ended], DeadlinePassed)
                yield events[:ended + 1]  # what was sent after the error has no reader
                return
            yield events

    async def scored(self) -> None:
        """Wait until the request's image is scored. Raises the ServiceError that ended the request early."""
        async with self.in_time():
            await self.next_event()

    async def next_event(self, patience_s: float | None = None) -> RowsDone | ImageDone | Scored | None:
        """The next event; None after patience_s without one. Raises the ServiceError that ended the request early."""
        event: Event | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                event = await self._events.get()
        if isinstance(event, ServiceError):
            self.late |= isinstance(event, DeadlinePassed)
            raise event
        return event
