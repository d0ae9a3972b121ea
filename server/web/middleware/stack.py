"""The middleware of every request: Gate, and in it CORS if other origins are allowed. bodies.py
limits the bodies that it lets through.
"""

import logging
import math
import re
import secrets
import time
import urllib.parse
from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request as Http
from starlette.responses import RedirectResponse
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import (
    ServiceError,
    exhausted,
    has_run_out,
    rate_limited,
    unauthorized,
    unexpected,
)
from ...logs import REQUEST_ID, access
from ...origins import Origins
from ..error_handlers import HANDLERS, handle
from ..keys import Keys
from .bodies import Bodies, Exchange

logger = logging.getLogger("linpix")

# this server's own resources only, and nothing inline
POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:;"
    " object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {  # of every answer
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    # not no-referrer: forms of our own pages would then come from origin null
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_SECURITY_HEADERS = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
_ID = re.compile(r"[A-Za-z0-9][\w.:=+/@-]{0,127}", re.ASCII)
_TRACE = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Gate:
    """Request ids, security headers, a 500 for unexpected exceptions, and a line of the log for
    every request.

    Refuses hosts that are not this service's, pages of origins that may not use it, requests under
    /v1/ without a key if the server has any, and bodies that are too large or of another type.
    scope["linpix.exchange"] is the Exchange. scope["state"]["client"] is the peer's address, or the
    name of its key once that is checked. Routes may set `model` and `images` in scope["state"], to
    be logged. X-Request-Id and traceparent of trusted proxies are kept. HEAD is answered as GET is;
    uvicorn sends no body then.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        origins: Origins,
        bodies: Bodies,
        keys: Keys | None = None,
        root_path: str = "",
    ) -> None:
        """root_path: under which a proxy serves all of this; the paths of requests may begin with
        it.
        """
        self.app, self.origins, self.bodies, self.keys = app, origins, bodies, keys
        # a page that may use the service must be able to read its refusals
        self._checked: ASGIApp = (
            self._check
            if not origins.allowed
            else CORSMiddleware(
                ExceptionMiddleware(self._check, HANDLERS),
                allow_origins=[*origins.allowed],
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["*"],
                allow_private_network=True,
            )
        )
        self._root_path = root_path
        self._ids = set[str]()  # of requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        if method == "HEAD":
            scope = {**scope, "method": "GET"}
        path = scope["path"]
        if self._root_path and path.startswith(f"{self._root_path}/"):
            scope["path"] = path.removeprefix(self._root_path)
        state, peer = scope.setdefault("state", {}), scope.get("client")
        exchange = scope["linpix.exchange"] = Exchange(self.bodies, scope, receive, send)
        given = exchange.headers if state.get("trusted") else {}
        request_id, trace = given.get("x-request-id", ""), given.get("traceparent", "")
        if not _ID.fullmatch(request_id) or request_id in self._ids:  # requests need different ones
            request_id = secrets.token_hex(8)
        self._ids.add(request_id)
        REQUEST_ID.set(request_id)
        state.update(
            request_id=request_id, client=peer[0][:64] if peer else "unknown", began=exchange.began
        )
        exchange.added = [(b"x-request-id", request_id.encode()), *_SECURITY_HEADERS]
        if _TRACE.fullmatch(trace):
            state["traceparent"] = trace
            exchange.added.append((b"traceparent", trace.encode()))

        try:
            if refusal := self.origins.refusal(scope["method"], scope["path"], exchange.headers):
                raise refusal
            if (
                scope["path"].endswith("/") and scope["path"].strip("/")
            ) or path == self._root_path != "":
                await _redirect(path, scope)(scope, receive, exchange.send)
            else:
                await self._checked(scope, exchange.receive, exchange.send)
        except Exception as failure:
            # too late for another answer: the connection is closed in the middle of this one
            if exchange.status:
                raise
            if not isinstance(failure, ServiceError):
                found = getattr(scope.get("route"), "path", "(no route)")
                logger.exception("unexpected failure at %s %s", method, found)
                failure = exhausted() if has_run_out(failure) else unexpected(request_id)
            await (await handle(Http(scope), failure))(scope, receive, exchange.send)
        finally:
            # a refused request has not found its route yet, and routes that are not FastAPI's do
            # not say theirs
            route = getattr(scope.get("route"), "path", None) or _template(
                scope["app"].routes, {**scope, "root_path": ""}
            )
            access(
                method=method,
                route=route,
                status=exchange.status,
                duration_s=round(time.monotonic() - exchange.began, 6),
                client=state["client"],
                model=state.get("model"),
                images=state.get("images"),
                traceparent=state.get("traceparent"),
            )
            exchange.hold(0)
            self._ids.discard(request_id)

    async def _check(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check key and body, as far as the head shows them, and go on with the application.
        Raises ServiceError.
        """
        exchange: Exchange = scope["linpix.exchange"]
        state = scope["state"]
        if self.keys is not None and scope["path"].startswith("/v1/"):
            authorization = exchange.headers.get("authorization", "")
            scheme, _, presented = authorization.partition(" ")
            key = self.keys.find(presented.strip()) if scheme.lower() == "bearer" else None
            if key is None:
                raise unauthorized(presented=bool(presented))
            if wait_s := key.take(time.monotonic()):
                raise rate_limited(key.name, key.rate, math.ceil(wait_s))
            state["client"] = key.name
        state["timeout_s"] = exchange.check(state["client"])
        await self.app(scope, receive, send)


def _redirect(path: str, scope: Scope) -> RedirectResponse:
    """To the same path without a slash at its end, or with one if it has none. Relative, since a
    proxy may have removed the beginning of the path."""
    there = path.removesuffix("/").rsplit("/", 1)[1]
    there = f"../{there}" if path.endswith("/") else f"{there}/"
    query = scope["query_string"].decode("latin-1")
    return RedirectResponse(urllib.parse.quote(there) + (f"?{query}" if query else ""))


def _template(routes: Iterable[BaseRoute], scope: Scope) -> str | None:
    """The template of a route that matches, such as /v1/models/{model}: the path itself may contain
    anything.
    """
    for route in routes:
        # one without a path holds those of a file of web/routes
        if route.matches(scope)[0] is not Match.NONE:
            included = getattr(route, "original_router", None)
            return _template(included.routes, scope) if included else getattr(route, "path", None)
    return None
