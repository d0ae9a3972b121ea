"""The answers to images requests: a picture, JSON or server-sent events."""

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
from fastapi import Request, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from numpy.typing import NDArray
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from ...engine.ledger.ledger import Ledger
from ...engine.ledger.ticket import ImageDone, RowsDone, Scored, Ticket
from ...errors import ClientLeft, ServiceError
from ...pictures import encode
from ..error_handlers import envelope
from ..schemas import EditResponse, ImageData, ImageEvent, ImagesResponse, Usage
from .image_request import ImageRequest

PING_S = 15.0    # of silence before a stream sends a comment: proxies close connections that are silent for a minute
UNREAD_S = 10.0  # after a request's deadline, in which its client may still read the end of the stream
READABLE = "+ ;:,.'()"  # characters that are not quoted in a header that is a sentence
Form = type[ImagesResponse] | type[EditResponse]
T = TypeVar("T")
logger = logging.getLogger("linpix")


def partial_rows(partial_images: int | None, given: int, height: int) -> set[int]:
    """The numbers of finished image rows at which a stream shows a partial image: all, or so many, evenly spread.

    given: image rows that were known from the start; only the following ones count.
    """
    if partial_images is None or partial_images >= height - given:
        return set(range(given + 1, height + 1))
    return {given + (height - given) * (index + 1) // (partial_images + 1) for index in range(partial_images)}


async def respond(ledger: Ledger, http: Request, request: ImageRequest, ticket: Ticket, form: Form,
                  event: type[ImageEvent], facts: dict[str, Any]) -> Response:
    """Draw the images of an admitted request, and answer with them in the requested form. Raises ServiceError.

    facts: fields of `form` and `event` that only their route knows.
    """
    submitting = ledger.submit(ticket, request.plan.specs(request.answer.occluded))
    await (while_connected(http, submitting) if request.stream else submitting)  # in a front, a stream waits here
    sized = request.answer.overlay or request.answer.frame
    common = {"created": int(time.time()), **request.served.facts, "size": sized.size,
              "output_format": request.format, "warnings": request.warnings, **facts}
    if request.stream:
        return Stream(stream_events(ledger, request, ticket, event, common), ticket)
    response = await while_connected(http, in_one_piece(request, ticket, form, common))
    ledger.release(ticket, "completed")
    return response


async def in_one_piece(request: ImageRequest, ticket: Ticket, form: Form, common: dict[str, Any]) -> Response:
    """A response that is not a stream. Each image is encoded as soon as it is done. Raises ServiceError."""
    found = {place: (await encoded(request, ticket, event.canvas), request.answer.facts_of(event))
             async for place, event in answered(request, ticket) if isinstance(event, ImageDone)}
    files = [found[place] for place in sorted(found)]
    media_type = f"image/{request.format}"
    if request.alone:
        return Response(files[0][0], media_type=media_type, headers=_headers(request, [files[0][1]]))

    def answer() -> Response:
        if request.array:
            return Response(encode.npy([file for file, _ in files], request.answer.shape), media_type=encode.NPY,
                            headers=_headers(request, [facts for _, facts in files]))
        data = []
        for file, facts in files:
            text = base64.b64encode(file).decode()
            data.append(ImageData(b64_json=None if request.as_url else text,
                                  url=f"data:{media_type};base64,{text}" if request.as_url else None,
                                  revised_prompt=request.revised_prompt, **facts))
        return as_json(form(data=data, **common))

    return answer() if request.answer.soon else await asyncio.to_thread(answer)


def as_json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


def _headers(request: ImageRequest, images: list[dict[str, int | float]]) -> dict[str, str]:
    """Headers with the facts that JSON has beside its pictures. Commas separate the values of several images."""
    headers = {name: quote(value, safe="+") for name, value in request.served.facts.items()}
    headers |= {name: ",".join(quote(str(facts[name]), safe="+") for facts in images) for name in images[0]}
    if request.warnings:
        headers["warnings"] = quote("; ".join(request.warnings), safe=READABLE)
    return {f"x-linpix-{name.replace('_', '-')}": value for name, value in headers.items()}


async def answered(request: ImageRequest, ticket: Ticket, patience_s: float | None = None
                   ) -> AsyncIterator[tuple[int, RowsDone | ImageDone | None]]:
    """The events of images in the answer, each with the image's place there; as Ticket.next_event gives them.

    Of candidates, these are the best ones, once all are drawn.
    """
    plan, done = request.plan, 0
    drawn: list[ImageDone] = []
    while done < plan.images:
        event = await ticket.next_event(patience_s)
        assert not isinstance(event, Scored)
        done += isinstance(event, ImageDone)
        if plan.candidates is not None and isinstance(event, ImageDone):
            drawn.append(event)
        elif event is None or plan.candidates is None:
            yield event.index if event else 0, event
    for place, image in enumerate(request.answer.best(drawn) if drawn else []):
        yield place, image


async def encoded(request: ImageRequest, ticket: Ticket, canvas: NDArray[np.uint8], rows: int | None = None) -> bytes:
    """One image as a file, encoded in a thread if it takes more than a moment. Raises DeadlinePassed."""
    work = partial(request.answer.encode, canvas, rows)
    if request.answer.soon:
        png = work()
        ticket.check_time()
    else:
        async with ticket.in_time():
            png = await asyncio.to_thread(work)
    return png


async def while_connected(http: Request, work: Awaitable[T]) -> T:
    """The result of work. Raises ClientLeft if the client closes its connection first."""

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        here.reschedule(0.0)  # long past: now

    try:
        async with asyncio.timeout(None) as here:
            watching = asyncio.ensure_future(watch())
            try:
                return await work
            finally:
                watching.cancel()
    except TimeoutError:
        if not here.expired():
            raise
        raise ClientLeft("the client disconnected while it waited for its answer") from None


async def stream_events(ledger: Ledger, request: ImageRequest, ticket: Ticket, form: type[ImageEvent],
                        common: dict[str, Any]) -> AsyncIterator[bytes]:
    """Server-sent events of one request."""
    # an image that is drawn again sends its partial images again, with the same numbers
    rows = {rows: index for index, rows in enumerate(
        sorted(partial_rows(request.partial_images, ticket.given, request.config.height)))}
    try:
        async for place, event in answered(request, ticket, PING_S):
            if event is None:
                yield KEEPALIVE_COMMENT
                continue
            if isinstance(event, ImageDone):
                png = await encoded(request, ticket, event.canvas)
                own: dict[str, Any] = {"type": f"{form.kind}.completed", "usage": Usage()}
            elif event.rows in rows:
                png = await encoded(request, ticket, event.canvas, event.rows)
                own = {"type": f"{form.kind}.partial_image", "partial_image_index": rows[event.rows],
                       "rows": event.rows}
            else:
                continue
            sent = form(**common, image_index=place, **request.answer.facts_of(event), **own,
                        b64_json=base64.b64encode(png).decode())
            yield format_sse_event(event=sent.type, data_str=sent.model_dump_json(ensure_ascii=True))
        ledger.release(ticket, "completed")
    except ServiceError as error:
        ledger.release(ticket, "failed")
        yield format_sse_event(event="error", data_str=envelope(error).model_dump_json(ensure_ascii=True))


class Stream(EventSourceResponse):
    """Server-sent events, which end soon after the deadline even if the client does not read them."""

    def __init__(self, events: AsyncIterator[bytes], ticket: Ticket) -> None:
        super().__init__(events, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._ticket.deadline + UNREAD_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            logger.warning("a request was ended because its client does not read the stream")
