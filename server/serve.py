"""The server: uvicorn, which drains on SIGTERM and reads files again on SIGHUP; and metrics on a port of their own."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from types import FrameType
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI

from . import logs
from .app import create_app
from .engine.memory import collect
from .errors import Draining
from .listening import AT_ONCE, WAITING, listen, tell_seldom, url_of
from .origins import Hosts, Origins, only_here
from .settings import Settings, misspelt
from .web import error_handlers
from .web.middleware import stack
from .web.middleware.bodies import BodyBudget
from .web.middleware.connection import connection
from .web.middleware.headers import SECURITY_HEADERS
from .web.routes import operations
from .web.service import Service

logger = logging.getLogger("linpix")
LINGER_S = 0.2  # for whoever has connected before the door was closed to be told, rather than to be cut off
GRACE_S = 1.0   # for the answers to reach their clients, when a second signal asks for the end


# of every server of ours: the log is ours alone, and tells no queries, nor (as warnings) what is no HTTP, or asks for
# another protocol; nor does an answer tell what made it; and no web sockets, which would pass by the guard;
# nor uvloop where it happens to be installed: the limits of connection.py are for asyncio's own transports
UVICORN: dict[str, Any] = {"loop": "asyncio", "log_config": None, "log_level": "error", "access_log": False,
                           "server_header": False, "ws": "none", "backlog": AT_ONCE}


class Probes(uvicorn.Server):
    """Metrics and health on a port of their own (--metrics-port), beside the server that owns the signals.

    It answers as long as the service runs, draining included.
    """

    def __init__(self, service: Service, sockets: list[socket.socket]) -> None:
        settings, metrics = service.settings, service.ledger.metrics
        app = FastAPI(openapi_url=None)
        app.state.service = service
        app.include_router(operations.probes)
        error_handlers.install(app, metrics=metrics)
        stack.install(app, hosts=Hosts(settings.metrics_host, settings.allowed_hosts), origins=Origins(),
                      bodies=BodyBudget(settings, metrics, service.intake), keys=None)
        super().__init__(uvicorn.Config(app, lifespan="off", timeout_graceful_shutdown=1, proxy_headers=False,
                                        http=connection(settings.head_timeout, SECURITY_HEADERS),
                                        **UVICORN))
        self._sockets = sockets
        self._serving: asyncio.Task[None] | None = None

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    async def begin(self) -> None:
        self._serving = asyncio.ensure_future(self.serve(self._sockets))
        while not self.started and not self._serving.done():
            await asyncio.sleep(0.01)

    def announce(self, form: Literal["text", "json"]) -> None:
        for listening in self._sockets:
            logs.announce(f"LinPix serves metrics and health at {url_of(listening)}", form)

    async def end(self) -> None:
        self.should_exit = True
        if self._serving is not None:
            await self._serving


class Server(uvicorn.Server):
    """uvicorn, but the first SIGTERM or SIGINT drains: new work gets 503 while running work finishes.

    A second one ends what runs. SIGHUP, where the system has it, reads files again.
    """

    def __init__(self, config: uvicorn.Config, service: Service, probes: Probes | None = None) -> None:
        super().__init__(config)
        self._service, self._ledger, self._probes = service, service.ledger, probes
        self._drain_until = 0.0
        self.closes_at_once = False  # when it drains: others listen on the same port, and can do better than 503
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself would not keep them
        self._reloading = asyncio.Lock()
        self._stale = False  # SIGHUP came, and files were not read again since
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[Any] | None = None) -> None:
        collect()
        gc.enable()  # linpix/__main__.py had it wait
        await super().startup(sockets)
        if self.started:
            self._loop = asyncio.get_running_loop()  # from here on there are servers to close: signals drain
            tell_seldom(self._loop)
            for listening in sockets or []:
                listening.listen(WAITING)
            if self._probes is not None:
                await self._probes.begin()
            self._announce(sockets or [], self._loop)

    def _announce(self, sockets: list[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Say that the service is there, and take the signals that are for it alone."""
        form = self._service.settings.log_format
        for listening in sockets:
            logs.announce(f"LinPix serves {', '.join(self._ledger.models)} at {url_of(listening)}", form)
        if self._probes is not None:
            self._probes.announce(form)
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # linpix/__main__.py held it back

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
        if self._ledger.draining:
            return
        self._service.reload_keys()
        if not self._stale:
            self._stale = True
            self._begin(self._reload())

    async def _reload(self) -> None:
        """One after the other; a signal that comes while folders are being looked at has them looked at again."""
        async with self._reloading:
            self._stale = False
            if self._service.catalogue is None:
                return
            try:
                await self._service.catalogue.reload(self._ledger)
            except Exception:
                logger.exception("SIGHUP: the reload failed, and what is served stays")

    # --- SIGTERM and SIGINT ---

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None:  # before start-up: nothing to finish
            super().handle_exit(sig, frame)
        elif self._ledger.draining:  # asked twice: end now
            self._drain_until = 0.0
            self._loop.call_soon_threadsafe(lambda: self._begin(self._cut_off()))
        else:
            self._ledger.draining = True
            self._drain_until = self._loop.time() + self._service.settings.drain_timeout
            self._loop.call_soon_threadsafe(lambda: self._begin(self._drain()))

    async def _drain(self) -> None:
        assert self._loop is not None
        try:
            self._service.intake.close()
            self._service.comparisons.stop()
            await asyncio.sleep(LINGER_S)  # who connected before the signal, and was not heard yet, is answered too
            if self.closes_at_once:
                self._close()
            while self._ledger.tickets and self._loop.time() < self._drain_until:
                await asyncio.sleep(0.02)
            self._ledger.fail_all(Draining("the server is shutting down, and this request could not be finished in "
                                           "time; send it again after the restart"))
            self._close()
            await asyncio.sleep(LINGER_S)
        finally:  # whatever else goes wrong, the end was asked for
            self.should_exit = True

    def _close(self) -> None:
        for server in self.servers:
            server.close()

    async def _cut_off(self) -> None:
        """Give the last answers a moment, and then wait for nobody who does not take theirs."""
        await asyncio.sleep(GRACE_S)
        for client in list(self.server_state.connections):
            client.transport.abort()


def _allow_files() -> None:
    """As many open files, so connections, as the system allows: the soft limit is for programs that use select()."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # no such limits here, or no way to raise them
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def warn_of_exposure(settings: Settings) -> None:
    if settings.api_keys is None and not only_here(settings.host):
        logger.warning("no API keys set: anyone who can reach %s can use this service; see --api-keys", settings.host)


def configured(app: Any, settings: Settings) -> uvicorn.Config:
    """How uvicorn serves an app."""
    return uvicorn.Config(app, workers=1, timeout_graceful_shutdown=10,
                          http=connection(settings.head_timeout, SECURITY_HEADERS),
                          forwarded_allow_ips=settings.trusted_proxies, **UVICORN)


def serve(settings: Settings) -> None:
    """Run the service until a signal ends it. Raises OSError or ValueError with the cure."""
    _allow_files()
    sys.setswitchinterval(0.0005)  # the engine thread takes back the GIL between quanta; by default it may wait 5 ms
    logs.configure(settings.log_format)
    for sentence in misspelt(os.environ):
        logger.warning("%s", sentence)
    # both before the weights are read: who comes second is told at once, and not by whoever runs
    sockets = listen(settings.host, settings.port)
    probed = None if settings.metrics_port is None else listen(settings.metrics_host, settings.metrics_port, "metrics-")
    app = create_app(settings)
    warn_of_exposure(settings)
    probes = None if probed is None else Probes(app.state.service, probed)
    server = Server(configured(app, settings), app.state.service, probes)
    server.run(sockets)
    if not server.started:
        raise SystemExit(1)
