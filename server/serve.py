"""The server: uvicorn, which drains on SIGTERM and reloads models on SIGHUP; and metrics on a
separate port.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Coroutine
from contextvars import Context
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from . import logs
from .app import create_app
from .errors import draining
from .listening import AT_ONCE, WAITING, listen, log_refused_connections, url_of
from .memory import collect
from .origins import Origins, is_loopback
from .settings import Settings, misspelt
from .web import error_handlers
from .web.middleware.bodies import Bodies
from .web.middleware.connection import Connection
from .web.middleware.stack import Gate
from .web.routes import operations
from .web.service import Service

logger = logging.getLogger("linpix")
# pause while draining, so that clients that have just connected get an answer, and are not cut off
LINGER_S = 0.2
GRACE_S = 1.0  # for the last answers to reach their clients after a second signal


@contextlib.asynccontextmanager
async def probed(service: Service, sockets: list[socket.socket]) -> AsyncIterator[None]:
    """Serve metrics and health on a port of their own (--metrics-port): as long as the service
    runs, also while it drains. Without sockets, do nothing."""
    if not sockets:
        yield
        return
    settings = service.settings
    app = FastAPI(openapi_url=None, exception_handlers=error_handlers.HANDLERS)
    app.state.service = service
    app.include_router(operations.probes)
    app.add_middleware(
        Gate,
        origins=Origins(settings.metrics_host, settings.allowed_hosts),
        bodies=Bodies(settings, service.requests),
    )
    server = uvicorn.Server(
        configured(
            app,
            settings,
            lifespan="off",
            timeout_graceful_shutdown=1,
            forwarded_allow_ips="",
            ssl_certfile=None,
            ssl_keyfile=None,
        )
    )
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]  # the service does
    serving = asyncio.ensure_future(server.serve(sockets))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    yield
    server.should_exit = True
    await serving


class Server(uvicorn.Server):
    """uvicorn, but the first SIGTERM or SIGINT drains: new requests get 503 while admitted ones
    finish.

    A second one ends those too. SIGHUP, where the system has it, makes it read checkpoints again.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, probes: list[socket.socket]
    ) -> None:
        """probes: sockets for metrics and health, if they have a port of their own."""
        super().__init__(config)
        self._service, self._requests, self._probes = service, service.requests, probes
        self._beside = contextlib.AsyncExitStack()  # what serves these
        self._drain_until = 0.0
        # when it drains: other processes on the same port can answer better than 503
        self.closes_at_once = False
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself keeps only weak references
        self._stale = asyncio.Event()  # a SIGHUP has come since the last reload began
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[Any] | None = None) -> None:
        # no limits of files here, or no way to raise them
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            # both limits are the hard one: the soft one is for users of select()
            resource.setrlimit(
                resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1:] * 2
            )
        collect()
        gc.enable()  # linpix/__main__.py disabled it
        await super().startup(sockets)
        if self.started:
            # from here on, signals drain: there are servers to close
            self._loop = asyncio.get_running_loop()
            log_refused_connections(self._loop)
            for listening in sockets or []:
                listening.listen(WAITING)
            await self._beside.enter_async_context(probed(self._service, self._probes))
            self._begin(self._reload())
            self._announce(sockets or [])

    def _announce(self, sockets: list[Any]) -> None:
        """Announce that the service is ready, and handle SIGHUP from now on."""
        for what, those, by in (
            (", ".join(self._requests.drawer.models), sockets, self._service.settings.scheme),
            ("metrics and health", self._probes, "http"),
        ):
            for listening in those:
                host, port = listening.getsockname()[:2]
                logs.announce(f"LinPix serves {what} at {url_of(host, port, by)}")
        if hasattr(signal, "SIGHUP"):  # not by the loop, which gives the signal up when it closes
            loop = asyncio.get_running_loop()
            signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(self._stale.set))
            # linpix/__main__.py blocked it
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        await super().shutdown(sockets)
        await self._beside.aclose()  # last: until then /readyz says that the service is draining

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- SIGHUP ---

    async def _reload(self) -> None:
        """Reload checkpoints while requests go on. A signal during a reload causes another one
        after it.
        """
        while self._service.reload_models is not None:
            await self._stale.wait()
            self._stale.clear()
            try:
                await self._service.reload_models()
            except Exception:
                logger.exception(
                    "SIGHUP: the reload failed; the models that are served do not change"
                )

    # --- SIGTERM and SIGINT ---

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal may have interrupted a request's task, whose context would name that request
        in the log.
        """
        if self._loop is None:  # before start-up: nothing to finish
            super().handle_exit(sig, frame)
            return
        if self._requests.draining:  # the second signal: end now
            self._drain_until = 0.0
            work = self._cut_off()
        else:
            # by _announce
            if hasattr(signal, "SIGHUP") and callable(signal.getsignal(signal.SIGHUP)):
                # to the end of the process: it would end the drain
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
            self._requests.draining = True
            self._drain_until = self._loop.time() + self._service.settings.drain_timeout
            work = self._drain(signal.Signals(sig).name)
        self._loop.call_soon_threadsafe(self._begin, work, context=Context())

    async def _drain(self, why: str) -> None:
        assert self._loop is not None
        began = self._loop.time()
        try:
            logger.info(
                "%s: draining, for up to %g s; requests in progress: %d",
                why,
                self._service.settings.drain_timeout,
                len(self._requests.in_progress),
            )
            self._service.bodies.close()
            if self._service.comparisons is not None:
                self._service.comparisons.stop()
            # connected before the signal, but not read yet: answered too
            await asyncio.sleep(LINGER_S)
            if self.closes_at_once:
                self._close()
            while self._requests.in_progress and self._loop.time() < self._drain_until:
                await asyncio.sleep(0.02)
            logger.info(
                "drained in %.1f s; requests that were not finished: %d",
                self._loop.time() - began,
                len(self._requests.in_progress),
            )
            self._requests.fail_all(
                draining(
                    "the server is shutting down and could not finish this request in time; "
                    "send it again after the restart"
                )
            )
            self._close()
            await asyncio.sleep(LINGER_S)
        finally:  # also after an exception: the signal must end the process
            self.should_exit = True

    def _close(self) -> None:
        for server in self.servers:
            server.close()

    async def _cut_off(self) -> None:
        """Wait GRACE_S for clients to read the last answers, then abort all connections."""
        logger.info("a second signal: the requests in progress end now")
        await asyncio.sleep(GRACE_S)
        for client in list(self.server_state.connections):
            client.transport.abort()


def warn_of_exposure(settings: Settings) -> None:
    if settings.api_keys is None and not is_loopback(settings.host):
        logger.warning(
            "no API keys set: anyone who can reach %s can use this service; see --api-keys",
            settings.host,
        )


def check_tls(settings: Settings) -> None:
    """Raise ValueError if the certificate and its key cannot be used: before the weights are
    read.
    """
    if settings.tls_cert is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.tls_cert, settings.tls_key
        )
    except OSError as error:
        raise ValueError(
            f"--tls-cert {settings.tls_cert} with --tls-key {settings.tls_key}: {error}; give a"
            " certificate and its own key, both in PEM and readable, the key without a passphrase"
        ) from error


def configured(app: Any, settings: Settings, **others: Any) -> uvicorn.Config:
    """uvicorn's configuration for an app. others: options in place of the service's.

    Only our own log: uvicorn's would show queries, and warn of requests that are not HTTP or ask
    for another protocol. No header that names the server. No web sockets: they would bypass Gate.
    No uvloop, even if it is installed: its reads have no limit, and when files run out it logs
    nothing.
    """
    options: dict[str, Any] = {
        "http": Connection,
        "loop": "asyncio",
        "log_config": None,
        "log_level": "error",
        "access_log": False,
        "server_header": False,
        "ws": "none",
        "backlog": AT_ONCE,
        "timeout_graceful_shutdown": 10,
        "timeout_keep_alive": settings.head_timeout,
        "forwarded_allow_ips": settings.trusted_proxies,
        "ssl_certfile": settings.tls_cert,
        "ssl_keyfile": settings.tls_key,
    }
    return uvicorn.Config(app, workers=1, **options | others)


def serve(settings: Settings) -> None:
    """Run the service until a signal ends it. Raises OSError or ValueError with the cure."""
    # the engine thread takes the GIL back between quanta; by default it may wait 5 ms
    sys.setswitchinterval(0.0005)
    logs.configure(settings.log_format, settings.log_level)
    for sentence in misspelt(os.environ) + settings.idle():
        logger.warning("%s", sentence)
    # both before the weights are read: a second server with the same port fails at once
    sockets = listen(settings.host, settings.port)
    probes = []
    if settings.metrics_port is not None:
        probes = listen(settings.metrics_host, settings.metrics_port, "metrics-")
    app = create_app(settings)
    warn_of_exposure(settings)
    server = Server(configured(app, settings), app.state.service, probes)
    server.run(sockets)
    if not server.started:
        raise SystemExit(1)
