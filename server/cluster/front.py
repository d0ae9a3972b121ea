"""The HTTP server of one front, on a port that all fronts of a machine share; and the metrics of
each process.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from linpix.model import checkpoint, plugins
from linpix.model.provenance import CheckpointError

from .. import app
from ..compare.backends import backends
from ..engine.request import Requests, ServedModel
from ..listening import listen, url_of
from ..metrics import Metrics
from ..serve import Server, configured, probed
from ..settings import Settings
from ..web.keys import Keys
from ..web.middleware.bodies import Bodies
from ..web.service import Service
from .remote import Call, Described, News, Remote

logger = logging.getLogger("linpix")
LOOK_S = 0.5


@contextlib.asynccontextmanager
async def scraped(service: Service, kind: Literal["front", "engine"]) -> AsyncIterator[None]:
    """With --metrics-targets: serve the metrics of this process on a free port, and write it where
    Prometheus looks.

    The folder has a file per process, for file_sd_configs. Files of processes that were killed are
    removed by the next one that begins.
    """
    if (folder := service.settings.metrics_targets) is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*-*.json"):
        if not Path(f"/proc/{file.stem.rpartition('-')[2]}").exists():
            file.unlink(missing_ok=True)
    sockets, file = (
        listen(service.settings.metrics_host, 0, "metrics-"),
        folder / f"{kind}-{os.getpid()}.json",
    )
    target, temporary = (
        url_of(*sockets[0].getsockname()[:2]).removeprefix("http://"),
        file.with_suffix(".new"),
    )
    temporary.write_text(json.dumps([{"targets": [target], "labels": {"replica": file.stem}}]))
    async with probed(service, sockets):
        temporary.replace(file)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def models_of(described: Described, settings: Settings) -> dict[str, ServedModel]:
    """The models that replicas serve, the default one first. Raises CheckpointError if one differs
    here.
    """
    models: dict[str, ServedModel] = {}
    plugins.load(settings.plugin)
    for name, (facts, slots) in described.items():
        source = checkpoint.named(name, settings.checkpoints)
        if source.digest != facts["checkpoint"]:
            raise CheckpointError(
                f"{name}: this front has read another checkpoint than its replicas; give "
                "all of them the same --checkpoints, and restart them"
            )
        models[name] = ServedModel(source, facts, slots, settings.max_queue)
    return models


class FrontServer(Server):
    """uvicorn as in the plain server, but Ray Serve ends it."""

    capture_signals = contextlib.nullcontext  # type: ignore[assignment]

    def __init__(
        self,
        settings: Settings,
        kernel: str,
        described: Described,
        run: Callable[[Call], AsyncIterator[News]],
    ) -> None:
        metrics = Metrics(backends(), kernel)
        requests = Requests(Remote(models_of(described, settings), metrics, run), metrics)
        keys = Keys(settings.api_keys) if settings.api_keys else None
        service = Service(settings, requests, None, None, Bodies(settings, requests), keys)
        self._listening = listen(settings.host, settings.port, shared=True)
        probes = (
            []
            if settings.metrics_port is None
            else listen(settings.metrics_host, settings.metrics_port, "metrics-", shared=True)
        )
        super().__init__(configured(app.application(service), settings), service, probes)

    async def serve_shared(self) -> None:
        """Serve until it has drained."""
        async with scraped(self._service, "front"):
            await self.serve(self._listening)

    @property
    def draining(self) -> bool:
        return self._requests.draining

    def drain(self) -> None:
        """Refuse new requests, finish the others, and end. New connections go to other fronts at
        once.
        """
        if not self.draining:
            self.closes_at_once = True
            self.handle_exit(signal.SIGTERM, None)

    def _announce(self, sockets: list[Any]) -> None:
        """Do nothing: `linpix serve` itself announces where the fronts are."""


async def front_server(
    settings: Settings,
    describe: Callable[[], Awaitable[tuple[Settings, str, Described]]],
    run: Callable[[Call], AsyncIterator[News]],
    *,
    patience_s: float,
) -> FrontServer:
    """The server of a front, once a replica has the same settings and weights: a deployment
    replaces fronts and replicas at the same time. Raises CheckpointError or LookupError if none has
    them within patience_s.

    describe: asks a replica for its settings, its kernel and its models.
    """
    until, waited = time.monotonic() + patience_s, False
    while True:
        theirs, kernel, described = await describe()
        try:
            if theirs != settings:
                raise LookupError("no replica has the settings of this front")
            return FrontServer(settings, kernel, described, run)
        except (CheckpointError, LookupError) as error:
            if time.monotonic() > until:
                raise
            if not waited:
                logger.info(
                    "this front is waiting for a replica with the same settings and weights: %s",
                    error,
                )
            waited = True
            await asyncio.sleep(LOOK_S)
