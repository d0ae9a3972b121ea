"""A request about pictures, from its fields to the last byte of its answer: what its routes have in
common.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from fastapi import Request as Http
from fastapi import Response
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from .. import logs
from ..engine.job import Job, class_of
from ..engine.request import Request, Requests, ServedModel
from ..errors import ClientLeft, InvalidRequest, deadline_passed, exhausted, shown
from ..pictures import encode
from ..pictures.uploads import Upload
from .error_handlers import sendable
from .middleware.bodies import Exchange
from .prompts import wish
from .request_schemas import TIMEOUT_HEADER, PictureFields
from .service import Service, preferred

# after a request's deadline, in which its client may still read the end of the stream; an answer
# in one piece has this time from when it is ready, and more at the speed of a slow telephone
UNREAD_S, SLOWEST_BYTES_S = 10.0, 2**15
LISTED = 20  # largest number of unknown fields that a warning names
T = TypeVar("T")
logger = logging.getLogger("linpix")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What was asked for. All of it is checked, and all that needs no picture before an upload is
    decoded. The Job is made of `options` once.
    """

    # fmt: off
    model: ServedModel
    label: int | None
    timeout_s: float
    frame: encode.Frame
    accepted: str                           # the media type that the client prefers
    alone: bool                             # pictures themselves are the answer, not JSON
    inline: bool                            # a picture is encoded in a moment: it needs no thread
    revised_prompt: str | None
    warnings: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of Job
    facts: Mapping[str, Any] = field(default_factory=dict)    # of all images of the answer
    held_bytes: int = 0                     # what the answer may have in memory, until it is sent
    # of images
    # npy: all pictures are the answer, as an array; gif: one, as it is drawn
    format: encode.Format | Literal["gif", "npy"] = "png"
    as_url: bool = False
    partial_images: int | None = None
    upload: Upload | None = None            # the answer keeps all that is known of it
    # fmt: on


def order_of(http: Http, fields: PictureFields) -> Order:
    """What all routes about pictures have in common. Raises ServiceError."""
    service: Service = http.app.state.service
    model = service.find(fields.model)
    http.state.model = model.name  # for the log
    if fields.response_format not in (None, "b64_json", "url"):
        raise InvalidRequest(
            f"response_format must be b64_json or url, got {shown(fields.response_format)}",
            param="response_format",
        )
    frame = encode.frame_of(fields.size, model.config)
    header_s = http.state.timeout_s
    if fields.timeout is not None and header_s not in (math.inf, fields.timeout):
        raise InvalidRequest(
            f"timeout {fields.timeout:g} contradicts {TIMEOUT_HEADER}: {header_s:g}; send one"
            " of them",
            param="timeout",
        )
    label, revised_prompt = class_of(fields.label, model.checkpoint), None
    warnings = [frame.warning]
    if prompt := (fields.prompt or "").strip():
        names = model.checkpoint.class_names
        wished, revised_prompt, warning = wish(prompt, names)
        if None not in (label, wished) and label != wished:
            raise InvalidRequest(
                f"label {shown(label)} contradicts prompt {shown(prompt)}; send one of them",
                param="label",
            )
        warnings.append(warning)
        if wished is not None:
            label = wished
        elif label is not None:
            revised_prompt = names[label]
    if fields.model_extra:
        unknown = [sendable(name)[:40] for name in sorted(fields.model_extra)]
        more = f" and {len(unknown) - LISTED} more" if len(unknown) > LISTED else ""
        warnings.append(f"ignored: {', '.join(unknown[:LISTED])}{more}")
    accepted = preferred(http.headers.get("accept", ""))
    return Order(
        model=model,
        label=label,
        timeout_s=min(header_s, fields.timeout or math.inf, service.settings.request_timeout),
        frame=frame,
        accepted=accepted,
        alone=accepted in encode.MEDIA_TYPES,
        inline=frame.width * frame.height <= encode.INLINE_PIXELS,
        revised_prompt=revised_prompt,
        warnings=[warning for warning in warnings if warning],
    )


class Answer(Response):
    """A response that does its work when it is sent. Its route only makes the order. FastAPI then
    calls it: the request is admitted, waited for, released once all of its answer is known (slots
    are free before the client reads), and sent. Errors before the first byte reach the error
    handlers, as a route's do.
    """

    # when the first picture began to be encoded, and the last one ended; by time.monotonic
    encoding = 0.0, 0.0

    def __init__(self, http: Http, order: Order) -> None:
        """order: with its upload, if there is one."""
        super().__init__()
        self.http, self.order = http, order

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        order, state = self.order, self.http.state
        requests: Requests = self.http.app.state.service.requests
        exchange: Exchange = scope["linpix.exchange"]
        exchange.hold(order.held_bytes)
        request = Request(
            state.request_id,
            scope["path"].rsplit("/", 1)[1],
            state.client,
            Job(**order.options),
            order.model,
            order.timeout_s,
            state.began,
        )
        state.counted = True  # from here on, admission counts it
        try:
            with requests.admit(request):
                if request.job.stream:
                    await while_connected(self.http, request.next_event())
                    response: Response = EventSourceResponse(
                        self.events(request),
                        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
                    )
                    end = request.deadline + UNREAD_S
                else:
                    response = await while_connected(self.http, self.in_one_piece(request))
                    requests.release(request, "completed")
                    end = time.monotonic() + UNREAD_S + len(response.body) / SLOWEST_BYTES_S
                try:
                    async with asyncio.timeout_at(end):
                        await response(scope, receive, send)
                except TimeoutError:
                    logger.warning(
                        "a request was ended because its client does not read the answer"
                    )
        finally:
            if logs.TRACED and request.begun:
                began = min(request.begun.values())[0]
                drawing = began + max((image.prefill_s for image in request.images), default=0.0)
                logs.spans(
                    ("queue", request.began, began),
                    ("prefill", began, drawing),
                    ("decode", drawing, request.drawn),
                    ("encode", *self.encoding),
                )

    async def in_one_piece(self, request: Request) -> Response:
        """The response, once all of it is there. Raises ServiceError."""
        raise NotImplementedError

    def events(self, request: Request) -> AsyncIterator[bytes]:
        """Server-sent events. Releases the request with the last one."""
        raise NotImplementedError

    async def in_time(
        self, request: Request, make: Callable[..., T], *arguments: object, inline: bool = True
    ) -> T:
        """The result of work, which is done in a thread if it takes more than a moment. Raises
        ServiceError.
        """
        try:
            if inline and self.order.inline:
                result = make(*arguments)
            else:
                async with asyncio.timeout_at(request.deadline):
                    result = await self.http.app.state.service.encoders.run(
                        request.client, partial(make, *arguments)
                    )
        except TimeoutError:
            request.late = True
            raise deadline_passed(request.timeout_s) from None
        # Pillow raises OSError if an encoder has no memory
        except (OSError, MemoryError, RuntimeError) as error:
            logger.exception("an answer could not be encoded")
            raise exhausted() from error
        request.check_time()
        return result


def as_json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


async def while_connected(http: Http, work: Awaitable[T]) -> T:
    """The result of work. Raises ClientLeft if the client, whose body has been read, closes its
    connection first.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(http.receive())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft("the client disconnected while it waited for its answer")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
