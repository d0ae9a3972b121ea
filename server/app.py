"""The application: settings in, routes and their middleware out, and the server that drains."""

import asyncio
import contextlib
import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from model import ops
from server import arrivals, envelope, guard, images, logs, openapi, operations
from server.arrivals import Bodies
from server.backends import BACKENDS
from server.catalogue import Catalogue
from server.comparisons import Comparisons
from server.errors import Draining
from server.faults import Faults
from server.guard import Intake
from server.keys import Keys
from server.listening import WAITING, listen, tell_seldom, url_of
from server.metrics import Metrics
from server.origins import Hosts, Origins, only_here
from server.probes import UVICORN, Probes
from server.service import Service
from server.settings import Settings
from server.worker import Worker, collect

logger = logging.getLogger("linpix")
LINGER_S = 0.2  # for whoever has connected before the door was closed to be told, rather than to be cut off
GRACE_S = 1.0   # for the answers to reach their clients, when a second signal asks for the end


def release() -> str:
    try:
        return version("linpix")
    except PackageNotFoundError:
        return "unknown"


def create_app(settings: Settings) -> FastAPI:
    """The service over the models that the settings name. Raises before anything listens."""
    faults = Faults(settings.faults) if settings.faults else None
    if faults is not None:
        logger.warning("THIS SERVICE BREAKS ON PURPOSE, as --faults (LINPIX_FAULTS) asks for: %s", settings.faults)
    keys = Keys(settings.api_keys) if settings.api_keys else None  # a file that cannot be used is told before the wait
    catalogue = Catalogue(settings, faults)
    batchers = catalogue.read()
    engines = {(batcher.engine.name, batcher.engine.device) for batcher in batchers.values()}
    kernel = "cuda" if ("compiled", "cuda") in engines else ops.kernel() if ("compiled", "cpu") in engines else "eager"
    metrics = Metrics([batcher.labels for batcher in batchers.values()], BACKENDS, release(),
                      kernel)
    worker = Worker(batchers, metrics, settings.request_timeout, settings.watchdog_timeout, faults,
                    settings.client_images)
    intake = Intake()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)

    app = FastAPI(title="LinPix", version=release(), docs_url=None, redoc_url=None, lifespan=lifespan,
                  description="Autoregressive image generators built as linear transformers. The images routes have "
                              "the shape of OpenAI's Images API.")
    app.state.service = Service(settings, worker, Comparisons(worker), catalogue, intake, keys)
    app.include_router(images.router)
    app.include_router(operations.router)
    if settings.metrics_port is None:
        app.include_router(operations.probes)
    app.mount("/static", operations.Static(directory=operations.STATIC), name="static")
    envelope.install(app, metrics=metrics)
    guard.install(app, hosts=Hosts(settings.host, settings.allowed_hosts), origins=Origins(settings.allowed_origins),
                  bodies=Bodies(settings, metrics), keys=keys, metrics=metrics, intake=intake)
    openapi.describe(app, keys=keys is not None, compare_budget=settings.compare_budget)
    return app


class Server(uvicorn.Server):
    """uvicorn, but the first SIGTERM or SIGINT drains: new work gets 503 while running work finishes.

    A second one ends what runs. SIGHUP, where the system has it, reads files again.
    """

    def __init__(self, config: uvicorn.Config, service: Service, probes: Probes | None = None) -> None:
        super().__init__(config)
        self._service, self._worker, self._probes = service, service.worker, probes
        self._drain_until = 0.0
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself would not keep them
        self._reloading = asyncio.Lock()
        self._stale = False  # SIGHUP came, and files were not read again since
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[Any] | None = None) -> None:
        collect()
        gc.enable()  # linpix.py had it wait
        await super().startup(sockets)
        if self.started:
            self._loop = asyncio.get_running_loop()  # from here on there are servers to close: signals drain
            tell_seldom(self._loop)
            for listening in sockets or []:
                listening.listen(WAITING)
                logs.announce(f"LinPix serves {', '.join(self._worker.batchers)} at {url_of(listening)}",
                              self._service.settings.log_format)
            if self._probes is not None:
                await self._probes.begin()
            if hasattr(signal, "SIGHUP"):
                self._loop.add_signal_handler(signal.SIGHUP, self._hang_up)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # linpix.py held it back

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        await super().shutdown(sockets)
        if self._probes is not None:  # last of all: until then it says that the service is draining
            await self._probes.end()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- SIGHUP ---

    def _hang_up(self) -> None:
        """Read again what was read from files at the start: keys at once, checkpoints beside the work."""
        if self._worker.draining:
            return
        self._service.reload_keys()
        if not self._stale:
            self._stale = True
            self._begin(self._reload())

    async def _reload(self) -> None:
        """One after the other; a signal that comes while folders are being looked at has them looked at again."""
        async with self._reloading:
            self._stale = False
            try:
                await self._service.catalogue.reload(self._worker)
            except Exception:
                logger.exception("SIGHUP: the reload failed, and what is served stays")

    # --- SIGTERM and SIGINT ---

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None:  # before start-up: nothing to finish
            super().handle_exit(sig, frame)
        elif self._worker.draining:  # asked twice: end now
            self._drain_until = 0.0
            self._loop.call_soon_threadsafe(lambda: self._begin(self._cut_off()))
        else:
            self._worker.draining = True
            self._drain_until = self._loop.time() + self._service.settings.drain_timeout
            self._loop.call_soon_threadsafe(lambda: self._begin(self._drain()))

    async def _drain(self) -> None:
        assert self._loop is not None
        try:
            self._service.intake.close()
            self._service.comparisons.stop()
            await asyncio.sleep(LINGER_S)  # who connected before the signal, and was not heard yet, is answered too
            while self._worker.requests and self._loop.time() < self._drain_until:
                await asyncio.sleep(0.02)
            self._worker.fail_all(Draining("the server is shutting down, and this request could not be finished in "
                                           "time; send it again after the restart"))
            for server in self.servers:
                server.close()
            await asyncio.sleep(LINGER_S)
        finally:  # whatever else goes wrong, the end was asked for
            self.should_exit = True

    async def _cut_off(self) -> None:
        """Give the last answers a moment, and then wait for nobody who does not take theirs."""
        await asyncio.sleep(GRACE_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _allow_files() -> None:
    """As many open files, so connections, as the system allows: the soft limit is for programs that use select()."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # no such limits here, or no way to raise them
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(settings: Settings) -> None:
    """Run the service until a signal ends it. Raises OSError or ValueError with the cure."""
    _allow_files()
    sys.setswitchinterval(0.0005)  # the engine thread takes back the GIL between quanta; by default it may wait 5 ms
    logs.configure(settings.log_format)
    # both before the weights are read: who comes second is told at once, and not by whoever runs
    sockets = listen(settings.host, settings.port)
    probed = None if settings.metrics_port is None else listen(settings.metrics_host, settings.metrics_port, "metrics-")
    app = create_app(settings)
    if settings.api_keys is None and not only_here(settings.host):
        logger.warning("whoever reaches %s may use this service; --api-keys asks for keys", settings.host)
    probes = None if probed is None else Probes(app.state.service, probed)
    config = uvicorn.Config(app, workers=1, timeout_graceful_shutdown=10,
                            http=arrivals.connection(settings.head_timeout, guard.SECURITY_HEADERS),
                            forwarded_allow_ips=settings.trusted_proxies, **UVICORN)
    server = Server(config, app.state.service, probes)
    server.run(sockets)
    if not server.started:
        raise SystemExit(1)
