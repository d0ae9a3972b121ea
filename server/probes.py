"""Metrics and health on a port of their own (--metrics-port), beside the server that owns the signals."""

import asyncio
import contextlib
import socket
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI

from . import logs
from .listening import AT_ONCE, url_of
from .origins import Hosts, Origins
from .web import error_handlers
from .web.middleware import stack
from .web.middleware.bodies import BodyBudget
from .web.middleware.connection import connection
from .web.middleware.headers import SECURITY_HEADERS
from .web.routes import operations
from .web.service import Service

# of every server of ours: the log is ours alone, and tells no queries, nor (as warnings) what is no HTTP, or asks for
# another protocol; nor does an answer tell what made it; and no web sockets, which would pass by the guard;
# nor uvloop where it happens to be installed: the limits of connection.py are for asyncio's own transports
UVICORN: dict[str, Any] = {"loop": "asyncio", "log_config": None, "log_level": "error", "access_log": False,
                           "server_header": False, "ws": "none", "backlog": AT_ONCE}


class Probes(uvicorn.Server):
    """Answers on its own port as long as the service runs, draining included."""

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
