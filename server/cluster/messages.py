"""Messages between fronts and replicas: orders, and answers, most of them events as in engine/ledger/ticket.py."""

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..compare.jobs import Job
from ..engine.decode.image_spec import ImageSpec
from ..engine.ledger.ticket import Demand, Event
from .desk import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """A picture whose likelihood is requested; the fields are those of model/likelihood.py's Scoring."""

    canvas: NDArray[np.uint8]
    known: NDArray[np.bool_] | None
    labels: Sequence[int | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One admitted request of a front: images to draw, or one picture to score."""

    id: str
    endpoint: str
    client: str
    model: str
    facts: dict[str, str]      # of the model's decoder, with weights and precision, as the answer will report them
    demand: Demand
    work: float                # multiplications, if each token that is not known takes a pass
    timeout_s: float           # from when its head was read
    spent_s: float             # the part of it that has passed
    specs: Sequence[ImageSpec] = ()
    hidden: Hidden | None = None


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A picture is scored: what its Scoring found."""

    log_probs: NDArray[np.float32]  # (labels, T)
    priors: NDArray[np.float64]     # (labels,)


@dataclass(frozen=True, slots=True)
class Took:
    """How long the replica had the order, last in an answer in one piece: the rest of the time is transport."""

    seconds: float


Answer = Event | Likelihood | Took


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A model as a replica serves it: what a front must know of its decoder."""

    facts: dict[str, str]  # of Decoder
    backend: str
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of a replica."""

    at: float = 0.0     # when it was reported, by time.time(); an idle replica that repeats a report keeps its time
    ahead: float = 0.0  # multiplications that its orders still need
    pace: float = 0.0   # multiplications a second with full slots; 0: not measured
    room: int = 0       # images that the model with most room would admit
    facts: dict[str, dict[str, str]] = field(default_factory=dict)  # by model; none: it has not reported yet
    since: float = math.inf  # when it began, by time.time()


class ReplicaLost(Exception):
    """The replica of an order died, or was ended, before it had answered all of it."""


class Fleet(Protocol):
    """How a front reaches the replicas and the desk. Raises ReplicaLost."""

    @property
    def room(self) -> int:
        """Images that the replica with most room would admit, by its last report; 0 if there is no replica."""

    @property
    def replicas(self) -> int:
        """How many replicas can be reached."""

    async def draw(self, order: Order) -> list[Answer]:
        """The whole answer of an order at once."""

    def stream(self, order: Order) -> AsyncIterator[list[Answer]]:
        """The answer of an order as it comes; first an empty list, when it is admitted."""

    async def compare(self, what: str, *about: Any) -> Job | None:
        """Begin, find or cancel a comparison, or return the latest, at the replica that has them."""

    def elsewhere(self, client: str) -> int:
        """Images of a client at other fronts, by the desk's last answer."""

    async def enter(self, client: str, here: int, images: int, limit: int) -> int | None:
        """Count more images of a client with `here` at this front; or return how many it has, if more are too many."""

    async def take(self, key: str, rate: str) -> float:
        """Count a request of a key; returns 0, or the seconds until one is allowed."""

    async def collected(self) -> dict[str, Snapshot]:
        """The metrics of all other processes, by their names."""
