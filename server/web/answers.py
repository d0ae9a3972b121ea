"""Answers of the images routes: an admitted request's images as a picture, an array, JSON or server-sent events."""

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import Request as Http
from fastapi import Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from .. import logs
from ..engine.request import Event, Request
from ..errors import ClientLeft, ServiceError
from ..pictures import encode
from .asked import Asked, AskedImages
from .error_handlers import envelope
from .schemas import EditResponse, ImageData, ImageEvent, ImagesResponse, Usage

PING_S = 15.0    # of silence before a stream sends a comment: proxies close connections that are silent for a minute
UNREAD_S = 10.0  # after a request's deadline, in which its client may still read the end of the stream
READABLE = "+ ;:,.'()"  # characters that are not quoted in a header that is a sentence
T = TypeVar("T")
logger = logging.getLogger("linpix")


class Answer(Response):
    """The answer to a request that is admitted when the answer begins, and ends with its last byte.

    Errors before the first byte reach the error handlers, as those of a route do.
    """

    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self.asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        requests, request = self.asked.service.requests, self.asked.request()
        try:
            with requests.admit(request):
                response = await self.respond(request)
                await response(scope, receive, send)
        finally:
            scope["state"]["counted"] = request.released  # and so it was counted
            if logs.TRACED and request.begun:
                began = min(request.begun.values())
                drawing = began + max((image.prefill_s for image in request.images), default=0.0)
                logs.spans(("queue", request.began, began), ("prefill", began, drawing),
                           ("decode", drawing, request.drawn))

    async def respond(self, request: Request) -> Response:
        """The response itself. Raises ServiceError."""
        response = await while_connected(self.asked.http, self.in_one_piece(request))
        self.asked.service.requests.release(request, "completed")
        return response

    async def in_one_piece(self, request: Request) -> Response:
        """The response, once all of it is there. Raises ServiceError."""
        raise NotImplementedError


class Images(Answer):
    """The images of a job."""

    asked: AskedImages

    def __init__(self, asked: AskedImages, form: type[ImagesResponse] | type[EditResponse], event: type[ImageEvent],
                 facts: dict[str, Any]) -> None:
        """facts: fields of `form` and `event` that only their route knows."""
        super().__init__(asked)
        self.form, self.event = form, event
        sized = asked.overlay or asked.frame
        self.common = {"created": int(time.time()), **asked.model.facts, "size": sized.size,
                       "output_format": asked.format, "warnings": asked.warnings, **facts}

    async def respond(self, request: Request) -> Response:
        if not self.asked.stream:
            return await super().respond(request)
        await while_connected(self.asked.http, self.asked.service.requests.answering(request))
        return Stream(self.events(request), request)

    async def in_one_piece(self, request: Request) -> Response:
        """Each image is encoded as soon as it is done."""
        asked, media_type = self.asked, f"image/{self.asked.format}"
        found = {place: (await self.encoded(request, event), asked.facts_of(event))
                 async for place, event in self.returned(request) if event is not None and event.done}
        files, facts = zip(*(found[place] for place in sorted(found)), strict=True)
        if asked.sole_format:
            return Response(files[0], media_type=media_type, headers=self._facts_headers(facts))

        def answer() -> Response:
            if asked.array:
                return Response(encode.npy([*files], asked.shape), media_type=encode.NPY,
                                headers=self._facts_headers(facts))
            texts = [base64.b64encode(file).decode() for file in files]
            data = [ImageData(b64_json=None if asked.as_url else text, revised_prompt=asked.revised_prompt,
                              url=f"data:{media_type};base64,{text}" if asked.as_url else None, **own)
                    for text, own in zip(texts, facts, strict=True)]
            return as_json(self.form(data=data, **self.common))

        return answer() if asked.encodes_inline else await asyncio.to_thread(answer)

    def _facts_headers(self, images: tuple[dict[str, int | float | str], ...]) -> dict[str, str]:
        """Headers with the facts that JSON has beside its pictures. Commas separate the values of several images."""
        headers = {name: quote(value, safe="+") for name, value in self.asked.model.facts.items()}
        headers |= {name: ",".join(quote(str(facts[name]), safe="+") for facts in images) for name in images[0]}
        if self.asked.warnings:
            headers["warnings"] = quote("; ".join(self.asked.warnings), safe=READABLE)
        return {f"x-linpix-{name.replace('_', '-')}": value for name, value in headers.items()}

    async def returned(self, request: Request, patience_s: float | None = None
                       ) -> AsyncIterator[tuple[int, Event | None]]:
        """The events of images in the answer, each with the image's place there; as Request.next_event gives them.

        Of candidates, these are the best ones, once all are drawn.
        """
        job, done, candidates = request.job, 0, list[Event]()
        while done < job.images:
            event = await request.next_event(patience_s)
            done += event is not None and event.done
            if event is None or not job.candidates:
                yield event.image if event else 0, event
            elif event.done:
                candidates.append(event)
        for place, event in enumerate(self.asked.best(candidates) if candidates else []):
            yield place, event

    async def encoded(self, request: Request, event: Event) -> bytes:
        """One image as a file, encoded in a thread if it takes more than a moment. Raises DeadlinePassed."""
        began = time.monotonic()
        if self.asked.encodes_inline:
            file = self.asked.encode(event)
            request.check_time()
        else:
            async with request.in_time():
                file = await asyncio.to_thread(self.asked.encode, event)
        if logs.TRACED:
            logs.spans(("encode", began, time.monotonic()))
        return file

    async def events(self, request: Request) -> AsyncIterator[bytes]:
        """Server-sent events."""
        # an image that is drawn again sends its partial images again, with the same numbers
        shown = {rows: index for index, rows in enumerate(sorted(partial_rows(
            self.asked.partial_images, request.given, request.model.config.height)))}
        release, kind = self.asked.service.requests.release, self.event.kind
        try:
            async for place, event in self.returned(request, PING_S):
                if event is None:
                    yield KEEPALIVE_COMMENT
                    continue
                if not (event.done or event.rows in shown):
                    continue
                own: dict[str, Any] = {"type": f"{kind}.completed", "usage": Usage()} if event.done else {
                    "type": f"{kind}.partial_image", "partial_image_index": shown[event.rows], "rows": event.rows}
                sent = self.event(**self.common, created_at=self.common["created"], image_index=place,
                                  **self.asked.facts_of(event), **own,
                                  b64_json=base64.b64encode(await self.encoded(request, event)).decode())
                yield format_sse_event(event=sent.type, data_str=sent.model_dump_json(ensure_ascii=True))
            release(request, "completed")
        except ServiceError as error:
            release(request, "failed")
            yield format_sse_event(event="error", data_str=envelope(error).model_dump_json(ensure_ascii=True))


class Stream(EventSourceResponse):
    """Server-sent events, which end soon after the deadline even if the client does not read them."""

    def __init__(self, events: AsyncIterator[bytes], request: Request) -> None:
        super().__init__(events, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._request.deadline + UNREAD_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            logger.warning("a request was ended because its client does not read the stream")


def partial_rows(partial_images: int | None, given: int, height: int) -> set[int]:
    """The numbers of finished image rows at which a stream shows a partial image: all, or so many, evenly spread.

    given: image rows that were known from the start; only the following ones count.
    """
    if partial_images is None or partial_images >= height - given:
        return set(range(given + 1, height + 1))
    return {given + (height - given) * (index + 1) // (partial_images + 1) for index in range(partial_images)}


def as_json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


async def while_connected(http: Http, work: Awaitable[T]) -> T:
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
