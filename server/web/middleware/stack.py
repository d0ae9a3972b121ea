"""The middleware every request passes: its log record, then its host and origin, then its API key and its size.

BodyLimits (bodies.py) is outermost. AccessLog gives every answer, refusals included, an id, security headers and a
line in the log. HostAndOrigin refuses foreign hosts and pages. ApiKeys asks for a key where there are any.
"""

import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import Draining, ForeignHost, ForeignOrigin, RateLimited, ServiceError, Unauthorized, Unexpected
from server.logs import REQUEST_ID, access
from server.metrics import Metrics
from server.origins import Hosts, Origins
from server.web.error_handlers import response_of
from server.web.keys import Keys
from server.web.middleware.bodies import Body, BodyBudget, BodyLimits, UploadDrain, body_of
from server.web.middleware.headers import SECURITY_HEADERS

logger = logging.getLogger("linpix")

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class AccessLog:
    """Request ids, security headers, a 500 for what nobody expected, and a line of the log for every request.

    scope["state"]["client"] is the peer's address from here on, and the name of its key once ApiKeys has seen one;
    routes may set `model` and `images` there, to be logged.
    """

    def __init__(self, app: ASGIApp, *, intake: UploadDrain) -> None:
        self.app, self.intake = app, intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        request_id = secrets.token_hex(8)
        REQUEST_ID.set(request_id)
        peer = scope.get("client")
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, client=peer[0][:64] if peer else "unknown")

        async def send_recorded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                if self.intake.closed:
                    headers["connection"] = "close"  # so that nobody sends a request into the end of the process
            await send(message)

        try:
            await self.app(scope, receive, send_recorded)
        except Exception:
            if status:  # too late to answer otherwise: the connection is closed in the middle
                raise
            logger.exception("unexpected failure at %s %s", _method(scope), _route(scope))
            await response_of(Unexpected(request_id))(scope, receive, send_recorded)
        finally:
            access(method=_method(scope), route=_route(scope), status=status,
                   duration_s=round(time.perf_counter() - began, 6), client=state["client"], model=state.get("model"),
                   images=state.get("images"))


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "OTHER"


def _route(scope: Scope) -> str | None:
    """The template of the route that was found, such as /v1/models/{model}: what stood in its place may be anything.

    The page's files are no route to FastAPI, and one here.
    """
    found = getattr(scope.get("route"), "path", None) or None
    return "/static" if found is None and scope["path"].startswith("/static/") else found


class HostAndOrigin:
    """Refuses hosts that are not this service's, and pages of origins that may not use it."""

    def __init__(self, app: ASGIApp, *, hosts: Hosts, origins: Origins, metrics: Metrics) -> None:
        self.app, self.hosts, self.origins, self.metrics = app, hosts, origins, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self.app(scope, receive, send)
            return
        self.metrics.requests_rejected.labels(refusal.code).inc()
        await response_of(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ServiceError | None:
        headers = Headers(scope=scope)
        for host in headers.getlist("host"):
            if not self.hosts.accept(host):
                return ForeignHost(host)
        page = self.origins.foreign(scope["method"], scope["path"], headers)
        if page is not None:
            return ForeignOrigin(page, headers.get("host", "this server"))
        return None


class ApiKeys:
    """Asks for a key at /v1/, counts its requests, and refuses bodies that say they are too large."""

    def __init__(self, app: ASGIApp, *, keys: Keys | None, metrics: Metrics, intake: UploadDrain) -> None:
        self.app, self.keys, self.metrics, self.intake = app, keys, metrics, intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if self.keys is not None and scope["path"].startswith("/v1/"):
                scope["state"]["client"] = self._client(self.keys, headers)
            body_of(scope).check()
        except ServiceError as error:
            await response_of(error)(scope, receive, send)
            return
        await self.app(scope, self._taken_in(body_of(scope), receive), send)

    def _client(self, keys: Keys, headers: Headers) -> str:
        """The name of the key that a request brings. Raises Unauthorized or RateLimited."""
        scheme, _, presented = headers.get("authorization", "").partition(" ")
        key = keys.find(presented.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            self.metrics.requests_rejected.labels("unauthorized").inc()
            raise Unauthorized(presented=bool(presented))
        try:
            keys.admit(key)
        except RateLimited:
            self.metrics.requests_rejected.labels("rate_limited").inc()
            raise
        return key.name

    def _taken_in(self, body: Body, receive: Receive) -> Callable[[], Awaitable[Message]]:
        async def taken_in() -> Message:
            if body.whole:  # what still comes was read before, or is the end of the connection
                return await receive()
            try:
                return await self.intake.next(receive)
            except Draining:
                self.metrics.requests_rejected.labels("draining").inc()
                raise

        return taken_in


def install(app: FastAPI, *, hosts: Hosts, origins: Origins, bodies: BodyBudget, keys: Keys | None,
            metrics: Metrics, intake: UploadDrain) -> None:
    """Put all of it before an app's routes, the last one named outermost."""
    app.add_middleware(ApiKeys, keys=keys, metrics=metrics, intake=intake)
    if origins.allowed:  # between the two: a page that may use the service must be able to read its refusals
        app.add_middleware(CORSMiddleware, allow_origins=origins.allowed, allow_methods=["*"], allow_headers=["*"],
                           expose_headers=["*"], allow_private_network=True)
    app.add_middleware(HostAndOrigin, hosts=hosts, origins=origins, metrics=metrics)
    app.add_middleware(AccessLog, intake=intake)
    app.add_middleware(BodyLimits, bodies=bodies)
