"""The HTTP server of one front, with stand-ins for models, comparisons and keys of other processes."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from linpix.model import checkpoint
from linpix.model.checkpoint import Checkpoint

from .. import app as service_app
from ..compare.backends import BACKENDS
from ..compare.comparison import ComparisonPlan
from ..compare.jobs import Comparisons, Job
from ..core import release
from ..engine.ledger.ledger import ServedModel
from ..engine.schedule.forecast import Room
from ..errors import RateLimited
from ..listening import listen
from ..metrics import Metrics
from ..serve import Probes, Server, configured
from ..settings import Settings
from ..web.keys import Key, Keys
from ..web.middleware.bodies import BodyDrain
from ..web.service import Service
from .desk import Snapshot
from .front import FrontLedger
from .messages import Description, Fleet

logger = logging.getLogger("linpix")


class FarModel(ServedModel):
    """A model that replicas serve: its limits, but no queue, since each replica has its own."""

    def __init__(self, source: Checkpoint, described: Description, max_queue: int, fleet: Fleet) -> None:
        super().__init__(source, described.facts, described.backend, Room(described.slots, max_queue))
        self._fleet = fleet

    def room_left(self, bulk: bool = False) -> int:
        return self._fleet.room


def models_of(described: dict[str, Description], settings: Settings, fleet: Fleet) -> dict[str, ServedModel]:
    """The models that replicas serve, the default one first. Raises CheckpointError if one differs here."""
    found: dict[str, ServedModel] = {}
    for name, about in described.items():
        source = checkpoint.read(checkpoint.find(name, settings.checkpoints))
        if source.digest != about.facts["checkpoint"]:
            raise checkpoint.CheckpointError(f"{name}: this front has read another checkpoint than its replicas; give "
                                             "all of them the same --checkpoints, and restart them")
        found[name] = FarModel(source, about, settings.max_queue, fleet)
    return found


class FarComparisons(Comparisons):
    """The comparisons, all of which are at one replica."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def _ask(self, what: str, *about: Any) -> Job:
        found = await self._fleet.compare(what, *about)
        assert found is not None
        return found

    async def begin(self, model: str, plan: ComparisonPlan) -> Job:
        return await self._ask("begin", model, plan)

    async def find(self, id: str) -> Job:
        return await self._ask("find", id)

    async def cancel(self, id: str) -> Job:
        return await self._ask("cancel", id)

    async def latest(self) -> Job | None:
        return await self._fleet.compare("latest")

    def stop(self) -> None:
        """Do nothing: a front that ends does not end comparisons that other fronts' clients watch."""


class SharedKeys(Keys):
    """Keys whose rates hold over all fronts."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        assert settings.api_keys is not None
        super().__init__(settings.api_keys)
        self._fleet = fleet

    async def count(self, key: Key) -> None:
        if key.rate and (wait := await self._fleet.take(key.name, key.rate)):
            raise RateLimited(key.name, key.rate, max(1, round(wait + 0.5)))


class Beaten(Fleet, Protocol):
    """A Fleet that also sends this front's beat to the desk."""

    async def beat(self, clients: dict[str, int], snapshot: Snapshot, drained: bool) -> bool:
        """Report this front to the desk; returns whether it is to drain."""


class FrontServer(Server):
    """uvicorn over a front's ledger, as in the plain server, but its signals come from the desk and from Ray Serve."""

    def __init__(self, settings: Settings, name: str, kernel: str, described: dict[str, Description], fleet: Beaten,
                 beat_s: float) -> None:
        metrics = Metrics([(model, about.backend) for model, about in described.items()], BACKENDS, release(), kernel)
        self._front = FrontLedger(name, models_of(described, settings, fleet), metrics, fleet, settings)
        keys = SharedKeys(settings, fleet) if settings.api_keys else None
        service = Service(settings, self._front, FarComparisons(fleet), None, BodyDrain(), keys)
        self._listening = listen(settings.host, settings.port, shared=True)
        probed: list[socket.socket] | None = None
        if settings.metrics_port is not None:
            probed = listen(settings.metrics_host, settings.metrics_port, "metrics-", shared=True)
        super().__init__(configured(service_app.application(service), settings), service,
                         None if probed is None else Probes(service, probed))
        self._fleet, self._beat_s, self.over = fleet, beat_s, False

    @property
    def draining(self) -> bool:
        return self._front.draining

    @property
    def facts(self) -> dict[str, dict[str, str]]:
        """How images are made, as answers report it, by model."""
        return {name: served.facts for name, served in self._front.models.items()}

    def snapshot(self) -> Snapshot:
        return list(self._front.metrics.registry.collect())

    async def serve_shared(self) -> None:
        """Serve until it has drained."""
        try:
            await self.serve(self._listening)
        finally:
            self.over = True

    def drain(self, *, others: bool = False) -> None:
        """Refuse new requests, finish the others, and end.

        others: whether other fronts go on; connections should then go to them from now on.
        """
        if not self._front.draining:
            self.closes_at_once = others
            self.handle_exit(signal.SIGTERM, None)

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    def _announce(self, sockets: list[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Begin to beat; `linpix serve` itself announces where the fronts are."""
        self._begin(self._beat())

    async def _beat(self) -> None:
        while not self.over:
            if await self._fleet.beat(dict(self._front.clients), self.snapshot(), False):
                self.drain()
            await asyncio.sleep(self._beat_s)


async def front_server(settings: Settings, name: str,
                       describe: Callable[[], Awaitable[tuple[Settings, str, dict[str, Description]]]], fleet: Beaten,
                       beat_s: float, *, patience_s: float) -> FrontServer:
    """The server of a front, once a replica has the same settings and weights: a deployment replaces fronts and
    replicas at the same time. Raises CheckpointError or LookupError if none has them within patience_s.

    describe: asks the newest replica for its settings, its kernel and its models.
    """
    until, waited = time.monotonic() + patience_s, False
    while True:
        theirs, kernel, described = await describe()
        try:
            if theirs != settings:
                raise LookupError("no replica has the settings of this front")
            return FrontServer(settings, name, kernel, described, fleet, beat_s)
        except (checkpoint.CheckpointError, LookupError) as error:
            if time.monotonic() > until:
                raise
            if not waited:
                logger.info("this front is waiting for a replica with the same settings and weights: %s", error)
            waited = True
            await asyncio.sleep(beat_s)
