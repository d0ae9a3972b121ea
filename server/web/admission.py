"""Admission to the images routes: one block holds the ticket of a request, and frees what it has at its end."""

import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.types import Receive, Scope, Send

from ..errors import InvalidRequest, shown
from . import forms
from .error_handlers import ANSWERED
from .fields import Timeout
from .middleware.bodies import LIKELIHOODS, UPLOADS, Body
from .service import Service

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
HEADER = "X-Request-Timeout"
_timeout: TypeAdapter[float | None] = TypeAdapter(Timeout)
_schema = _timeout.json_schema()
TIMEOUT_PARAMETER = {"name": HEADER, "in": "header", "required": False, "schema": _schema["anyOf"][0],
                     "description": _schema["description"], "example": _schema["examples"][0]}


class AdmittingRoute(APIRoute):
    """A route whose requests have a ticket, and are admitted once they are read.

    JSON and small uploads are read in a moment. A large upload gets room for one image when its head is read, unless
    many others have such room. So a client learns that the queue is full before it sends megabytes.
    """

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def admitting(http: Request) -> Response:
            return Held(http, handle, self.path)

        return admitting


@dataclass(eq=False)
class Held(Response):
    """Makes the response of a route and sends it, and holds the request's resources until it is sent.

    Errors raised before the first byte reach the error handlers, as errors of a route do.
    """

    http: Request
    handle: Handler
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http, path = self.http, self.path
        service: Service = http.app.state.service
        body: Body = scope["linpix.body"]
        ledger, timeout_s = service.ledger, timeout_of(body.headers.get(HEADER.lower()))
        with ledger.holding(http.state.request_id, path.rsplit("/", 1)[1], http.state.client, timeout_s) as ticket:
            http.state.timeout_s, http.state.ticket = timeout_s, ticket
            body.deadline, body.timeout_s = ticket.deadline, ticket.timeout_s  # reading ends at the deadline, too
            if path in UPLOADS:
                if body.large and (body.take_place() or not ledger.has_room(ticket.client)):  # then reserve raises
                    ledger.reserve(ticket, draws=path != LIKELIHOODS)
                await forms.read(http)
            try:
                response = await self.handle(http)
            except Exception as error:
                if not isinstance(error, ANSWERED):  # a bug, which would be counted nowhere else
                    ticket.outcome = "failed"
                raise
            await response(scope, receive, send)


def timeout_of(text: str | None) -> float:
    """The seconds that the header X-Request-Timeout allows; inf without it. Raises InvalidRequest."""
    try:
        seconds = _timeout.validate_python(text)
    except ValidationError:
        raise InvalidRequest(f"{HEADER} must be a number of seconds greater than 0, got {shown(text)}",
                             param=HEADER) from None
    return math.inf if seconds is None else seconds
