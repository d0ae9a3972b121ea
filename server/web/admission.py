"""The images routes from a request's head to the last byte of its answer: whatever it holds is free at the end."""

import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.types import Receive, Scope, Send

from server.engine.ledger import Ledger
from server.engine.ticket import Ticket
from server.errors import DeadlinePassed, InvalidRequest, shown
from server.web import forms
from server.web.fields import Timeout
from server.web.middleware.bodies import body_of, client_of
from server.web.service import service_of

HEADER = "X-Request-Timeout"
TimeoutHeader = Annotated[Timeout | None, Header(alias=HEADER)]
_timeout: TypeAdapter[float] = TypeAdapter(Timeout)


class AdmittingRoute(APIRoute):
    """A route whose requests have a ticket, and are admitted once they are read.

    JSON and small uploads are read in a moment. A large upload gets room for one image from its head on, unless many
    others have: so a client learns before it sends megabytes that the queue is full.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, endpoint = super().get_route_handler(), self.path.rsplit("/", 1)[1]

        async def admitting(http: Request) -> Response:
            ledger, body, client = service_of(http).ledger, body_of(http.scope), client_of(http.scope)
            timeout_s = timeout_of(http)
            ticket = http.state.ticket = ledger.ticket(http.state.request_id, endpoint, client,
                                                       math.inf if timeout_s is None else timeout_s)
            body.until(ticket.deadline, DeadlinePassed(ticket.timeout_s))

            async def respond() -> Response:
                if endpoint == "edits":
                    if body.large and (body.take_place() or not ledger.has_room(client)):  # no room: to be refused
                        ledger.reserve(ticket)
                    await forms.read(http)
                return await handle(http)

            return _Holding(ledger, ticket, respond)

        return admitting


class _Holding(Response):
    """Makes the response and sends it, while its ticket holds what it needs.

    Errors raised before the first byte reach the error handlers as those of a route do.
    """

    def __init__(self, ledger: Ledger, ticket: Ticket, respond: Callable[[], Awaitable[Response]]) -> None:
        self._ledger, self._ticket, self._respond = ledger, ticket, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._ledger.holding(self._ticket):
            response = await self._respond()
            await response(scope, receive, send)


async def _ticket(http: Request) -> Ticket:  # not a plain function, as in service.py
    ticket = http.state.ticket
    assert isinstance(ticket, Ticket)
    return ticket


TicketDep = Annotated[Ticket, Depends(_ticket)]


def timeout_of(http: Request) -> float | None:
    """What the header allows, seconds. Raises InvalidRequest."""
    text = http.headers.get(HEADER)
    if text is None:
        return None
    try:
        return _timeout.validate_python(text)
    except ValidationError:
        raise InvalidRequest(f"{HEADER} must be a number of seconds greater than 0, got {shown(text)}",
                             param=HEADER) from None
