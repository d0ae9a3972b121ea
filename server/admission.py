"""The door of the images routes: who asks, by when, and room in the queue before anything of the body is read."""

import math
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from server.arrivals import body_of
from server.errors import DeadlinePassed, InvalidRequest, ServiceError
from server.fields import Timeout
from server.service import service_of
from server.worker import Request as Admitted

HEADER = "X-Request-Timeout"
# Of a form, what is in memory as long as its request waits: up to 1 MiB of a file, and 4 bytes a character of a field.
MOST_FILES, MOST_FIELDS, FIELD_BYTES = 4, 64, 2**16
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
                if endpoint == "edits":
                    await read_form(http)
                return await handle(http)
            except BaseException:
                service.worker.withdraw(admitted)
                raise

        return admitting


async def read_form(http: Request) -> None:
    """Read the form within limits of ours; FastAPI then finds it read. Raises ServiceError."""
    try:
        await http.form(max_files=MOST_FILES, max_fields=MOST_FIELDS, max_part_size=FIELD_BYTES)
    except ServiceError:
        raise
    except Exception as error:  # a client's mistake whatever it is, such as a charset that nobody knows
        why = error.detail if isinstance(error, HTTPException) else type(error).__name__
        raise InvalidRequest(f"the body cannot be read as a form ({why}); send multipart/form-data of at most "
                             f"{MOST_FILES} files, and {MOST_FIELDS} fields of {FIELD_BYTES:,} bytes") from error


async def _admitted(http: Request) -> Admitted:  # not a plain function, as in service.py
    admitted = http.state.admitted
    assert isinstance(admitted, Admitted)
    return admitted


AdmittedDep = Annotated[Admitted, Depends(_admitted)]


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
