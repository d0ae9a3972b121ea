"""Admission to the images routes: one block holds the ticket of a request, and frees what it has at its end."""

import inspect
import json
import math
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ..errors import InvalidRequest, shown
from . import forms
from .error_handlers import ANSWERED
from .fields import Timeout
from .middleware.bodies import LIKELIHOODS, UPLOADS, Body
from .service import Service

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
HEADER = "X-Request-Timeout"
_timeout: TypeAdapter[float] = TypeAdapter(Timeout)
TIMEOUT_PARAMETER = {"name": HEADER, "in": "header", "required": False, "schema": {"title": HEADER,
                                                                                   **_timeout.json_schema()}}


class AdmittingRoute(APIRoute):
    """A route whose requests have a ticket, and are admitted once they are read.

    JSON and small uploads are read in a moment. A large upload gets room for one image when its head is read, unless
    many others have such room. So a client learns that the queue is full before it sends megabytes.
    """

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()
        if self.path not in UPLOADS and self.body_field is not None:
            if (names := {*inspect.signature(self.endpoint).parameters}) != {"body", "http"}:
                raise TypeError(f"{self.path}: the function of an AdmittingRoute for JSON is called with body and http "
                                f"alone, and has {sorted(names)}")
            handle = _directly(self.endpoint, TypeAdapter[Any](self.body_field.field_info.annotation or Any), handle)

        async def admitting(http: Request) -> Response:
            return cast(Response, partial(_hold, http, handle, self.path))  # FastAPI only calls it

        return admitting


def _directly(endpoint: Callable[..., Awaitable[Response]], body: TypeAdapter[Any], handle: Handler) -> Handler:
    """A handler that calls a route's function with the request and its JSON, 0.1 ms faster than FastAPI's handler.

    A body that is not valid goes to FastAPI's handler, which says what is wrong.
    """
    async def handler(http: Request) -> Response:
        try:
            given = body.validate_python(json.loads(await http.body()))
        except ClientDisconnect:
            return Response(status_code=499)
        except (ValueError, RecursionError, MemoryError):
            return await handle(http)
        return await endpoint(body=given, http=http)

    return handler


async def _hold(http: Request, handle: Handler, path: str, scope: Scope, receive: Receive, send: Send) -> None:
    """Make the response and send it; meanwhile the ticket holds the request's resources.

    It is called as FastAPI calls a response. So errors raised before the first byte reach the error handlers, as
    errors of a route do.
    """
    service: Service = http.app.state.service
    body: Body = scope["linpix.body"]
    ledger, endpoint, timeout_s = service.ledger, path.rsplit("/", 1)[1], timeout_of(body.headers.get(HEADER.lower()))
    with ledger.holding(http.state.request_id, endpoint, http.state.client, timeout_s) as ticket:
        http.state.timeout_s, http.state.ticket = timeout_s, ticket
        body.deadline, body.timeout_s = ticket.deadline, ticket.timeout_s  # reading ends at the deadline, too
        if path in UPLOADS:
            if body.large and (body.take_place() or not ledger.has_room(ticket.client)):  # then reserve raises
                ledger.reserve(ticket, draws=path != LIKELIHOODS)
            await forms.read(http)
        try:
            response = await handle(http)
        except Exception as error:
            if not isinstance(error, ANSWERED):  # a bug, which would be counted nowhere else
                ticket.outcome = "failed"
            raise
        await response(scope, receive, send)


def timeout_of(text: str | None) -> float:
    """The seconds that the header X-Request-Timeout allows; inf without it. Raises InvalidRequest."""
    if text is None:
        return math.inf
    try:
        return _timeout.validate_python(text)
    except ValidationError:
        raise InvalidRequest(f"{HEADER} must be a number of seconds greater than 0, got {shown(text)}",
                             param=HEADER) from None
