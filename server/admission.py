"""The door of the images routes: who asks, by when, and room in the queue before anything of the body is read."""

import math
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.types import Scope

from server.arrivals import body_of
from server.errors import DeadlinePassed, InvalidRequest
from server.schemas import Timeout
from server.service import service_of
from server.worker import Request as Admitted

HEADER = "X-Request-Timeout"
TimeoutHeader = Annotated[Timeout | None, Header(alias=HEADER)]
_timeout: TypeAdapter[float] = TypeAdapter(Timeout)


class AdmittingRoute(APIRoute):
    """A route whose requests are admitted by their headers, and hold nothing any more if they come to nothing."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, endpoint = super().get_route_handler(), self.path.rsplit("/", 1)[1]

        async def admitting(http: Request) -> Response:
            service, timeout_s, client = service_of(http), timeout_of(http), client_of(http.scope)
            body = body_of(http.scope)
            # where it comes to a refusal, a small body that is there may as well say what it is refused
            images = 0 if not service.worker.has_room(client) and await body.soon() else 1
            admitted = service.worker.admit(http.state.request_id, endpoint, client,
                                            math.inf if timeout_s is None else timeout_s, images)
            http.state.admitted = admitted
            body.until(admitted.deadline, DeadlinePassed(admitted.timeout_s))
            try:
                return await handle(http)
            except BaseException:
                service.worker.withdraw(admitted)
                raise

        return admitting


def admitted_of(http: Request) -> Admitted:
    admitted = http.state.admitted
    assert isinstance(admitted, Admitted)
    return admitted


AdmittedDep = Annotated[Admitted, Depends(admitted_of)]


def client_of(scope: Scope) -> str:
    """Whose request it is, as far as limits are concerned: whoever the guard knows by a key, else an address."""
    known = scope.get("state", {}).get("client")
    return str(known or (scope.get("client") or ("unknown",))[0])


def timeout_of(http: Request) -> float | None:
    """What the header allows, seconds. Raises InvalidRequest."""
    text = http.headers.get(HEADER)
    if text is None:
        return None
    try:
        return _timeout.validate_python(text)
    except ValidationError:
        raise InvalidRequest(f"{HEADER} must be a number of seconds greater than 0, got {text[:80]!r}",
                             param=HEADER) from None
