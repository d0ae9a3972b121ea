"""A request about pictures, from its fields to the last byte of its answer: what its routes have in
common.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TypeVar

from fastapi import Request as Http
from fastapi import Response
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from .. import logs
from ..engine.job import Job, class_of
from ..engine.request import Request
from ..errors import ClientLeft, InvalidRequest, deadline_passed, exhausted, shown
from ..pictures import encode
from .error_handlers import sendable
from .middleware.bodies import Exchange
from .prompts import wish
from .request_schemas import TIMEOUT_HEADER, PictureFields
from .service import Service, preferred

# after a request's deadline, in which its client may still read the end of the stream; an answer
# in one piece has this time from when it is ready, and more at the speed of a slow telephone
UNREAD_S, SLOWEST_BYTES_S = 10.0, 2**15
T = TypeVar("T")
logger = logging.getLogger("linpix")


class Answer(Response):
    """A response that does its work when it is sent. Its route only checks the fields, and makes
    the job. FastAPI then calls it: the request is admitted, waited for, released once all of its
    answer is known, and sent. Errors before the first byte reach the error handlers, as a route's
    do.
    """

    job: Job
    # when the first picture began to be encoded, and the last one ended; by time.monotonic
    encoding = 0.0, 0.0
    held_bytes = 0  # what it may have in memory until it is sent, besides what is small

    def __init__(self, http: Http, fields: PictureFields) -> None:
        """Raises InvalidRequest."""
        super().__init__()
        service: Service = http.app.state.service
        self.http, self.service, self.warnings = http, service, list[str]()
        self.model = service.find(fields.model)
        self.config, self.checkpoint = self.model.config, self.model.checkpoint
        http.state.model = self.model.name  # for the log
        if fields.response_format not in (None, "b64_json", "url"):
            raise InvalidRequest(
                f"response_format must be b64_json or url, got {shown(fields.response_format)}",
                param="response_format",
            )
        self.frame = encode.frame_of(fields.size, self.config)
        if self.frame.warning:
            self.warnings.append(self.frame.warning)
        # whether a picture is encoded in a moment, so that no thread is needed
        self.inline = self.frame.width * self.frame.height <= encode.INLINE_PIXELS
        self.accepted = preferred(http.headers.get("accept", ""))
        # the picture itself is the answer, in this format
        self.sole_format = encode.MEDIA_TYPES.get(self.accepted)
        header_s = http.state.timeout_s
        if fields.timeout is not None and header_s not in (math.inf, fields.timeout):
            raise InvalidRequest(
                f"timeout {fields.timeout:g} contradicts {TIMEOUT_HEADER}: {header_s:g}; send one"
                " of them",
                param="timeout",
            )
        self.timeout_s = min(header_s, fields.timeout or math.inf, service.settings.request_timeout)
        self.label = class_of(fields.label, self.checkpoint)
        self.revised_prompt: str | None = None
        if prompt := (fields.prompt or "").strip():
            self._read(prompt)
        if fields.model_extra:
            names = [sendable(name)[:40] for name in sorted(fields.model_extra)]
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            self.warnings.append(f"ignored: {', '.join(names[:20])}{more}")

    def _read(self, prompt: str) -> None:
        """Have a prompt choose the class, if no label has done so."""
        names, label = self.checkpoint.class_names, self.label
        wished, revised, warning = wish(prompt, names)
        if None not in (label, wished) and label != wished:
            raise InvalidRequest(
                f"label {shown(label)} contradicts prompt {shown(prompt)}; send one of them",
                param="label",
            )
        if warning:
            self.warnings.append(warning)
        self.revised_prompt = revised if label is None or wished is not None else names[label]
        self.label = wished if label is None else label

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        requests, state = self.service.requests, self.http.state
        exchange: Exchange = scope["linpix.exchange"]
        exchange.hold(self.held_bytes)
        request = Request(
            state.request_id,
            scope["path"].rsplit("/", 1)[1],
            state.client,
            self.job,
            self.model,
            self.timeout_s,
            state.began,
        )
        state.counted = True  # from here on, admission counts it
        try:
            with requests.admit(request):
                if self.job.stream:
                    await while_connected(self.http, requests.answering(request))
                    response: Response = EventSourceResponse(
                        self.events(request),
                        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
                    )
                else:
                    response = await while_connected(self.http, self.in_one_piece(request))
                    requests.release(request, "completed")
                if self.job.stream:
                    end = request.deadline + UNREAD_S
                else:
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

    async def made(self, request: Request, make: Callable[..., T], *arguments: object) -> T:
        """The result of work, which is done in a thread if it takes more than a moment. Raises
        ServiceError.
        """
        try:
            if self.inline:
                result = make(*arguments)
            else:
                async with asyncio.timeout_at(request.deadline):
                    result = await self.service.encoders.run(
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
