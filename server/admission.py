"""The door of the images routes: who asks, by when, and room in the queue."""

import math
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from server import forms
from server.arrivals import body_of, client_of
from server.errors import DeadlinePassed, Exhausted, InvalidRequest, shown
from server.fields import Timeout
from server.service import service_of
from server.worker import Request as Admitted

HEADER = "X-Request-Timeout"
TimeoutHeader = Annotated[Timeout | None, Header(alias=HEADER)]
_timeout: TypeAdapter[float] = TypeAdapter(Timeout)


class AdmittingRoute(APIRoute):
    """A route whose requests are admitted, and hold nothing any more if they come to nothing.

    JSON and small uploads have no room in the queue until they are read, which takes a moment. A large upload has room
    for one image from its head on, so that nobody sends megabytes in vain, if few others have.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, endpoint = super().get_route_handler(), self.path.rsplit("/", 1)[1]

        async def admitting(http: Request) -> Response:
            service, timeout_s, client = service_of(http), timeout_of(http), client_of(http.scope)
            body, worker = body_of(http.scope), service.worker
            early = body.large and (body.take_place() or not worker.has_room(client))  # without room: to be refused
            admitted = worker.admit(http.state.request_id, endpoint, client,
                                    math.inf if timeout_s is None else timeout_s, int(early))
            http.state.admitted = admitted
            body.until(admitted.deadline, DeadlinePassed(admitted.timeout_s))
            try:
                if endpoint == "edits":
                    await forms.read(http)
                return await handle(http)
            except Exhausted:
                worker.finish(admitted, "failed")
                raise
            except BaseException:
                worker.withdraw(admitted)
                raise

        return admitting


async def _admitted(http: Request) -> Admitted:  # not a plain function, as in service.py
    admitted = http.state.admitted
    assert isinstance(admitted, Admitted)
    return admitted


AdmittedDep = Annotated[Admitted, Depends(_admitted)]


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
