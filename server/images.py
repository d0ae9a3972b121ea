"""POST /v1/images/generations and /v1/images/edits: a route translates, and does nothing else."""

import asyncio
import base64
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import numpy as np
from fastapi import APIRouter, Body, File, Form, Request, Response, UploadFile
from fastapi.responses import JSONResponse
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from numpy.typing import NDArray
from starlette.types import Receive, Scope, Send

from model.config import ModelConfig
from model.philox import MAX_SEED
from server import arrivals, fields, pictures
from server.admission import HEADER, AdmittedDep, AdmittingRoute, TimeoutHeader, timeout_of
from server.engine import ImageSpec
from server.envelope import body_of, sendable
from server.errors import (
    BodyTooLarge,
    Exhausted,
    InvalidRequest,
    ModelNotFound,
    NotJson,
    ServiceError,
    TooLarge,
    UnsupportedMedia,
    shown,
)
from server.openapi import drawn
from server.schemas import (
    EDIT,
    FORM_FIELDS,
    GENERATE,
    EditEvent,
    EditResponse,
    GenerateBody,
    GenerationEvent,
    ImagesResponse,
)
from server.service import Service, ServiceDep
from server.worker import ImageDone
from server.worker import Request as Admitted

router = APIRouter(prefix="/v1/images", tags=["images"], route_class=AdmittingRoute)
SOON_PIXELS = 2**16  # of a PNG that is written in a millisecond; the largest take 15 to 30
PING_S = 15.0    # of silence, after which a stream says that it is there: proxies cut off what is silent for a minute
UNREAD_S = 10.0  # after a request's deadline, that the end of its stream may take to be read
T = TypeVar("T")
logger = logging.getLogger("linpix")
_PICTURE_ERRORS = {400: InvalidRequest, 413: TooLarge, 415: UnsupportedMedia}


class Ask:
    """What generations and edits have in common, checked: model, count, seed, temperature, label, form of answer."""

    def __init__(self, service: Service, http: Request, *, model: str | None, n: int | None, size: str | None,
                 response_format: str | None, stream: bool | None, partial_images: int | None, seed: int | None,
                 temperature: float | None, label: int | str | None, prompt: str | None, timeout: float | None,
                 priority: str | None, ignored: list[str]) -> None:
        self.warnings: list[str] = []
        self.name, self.batcher = service.find(model)
        self.config: ModelConfig = self.batcher.engine.config
        self.n = 1 if n is None else n
        self.bulk = priority == "bulk"
        most = service.most(self.batcher, bulk=self.bulk)
        if not 1 <= self.n <= most:
            raise InvalidRequest(f"n must be 1..{most}, got {shown(n)}", param="n")
        http.state.model, http.state.images = self.name, self.n  # for the log
        if response_format not in (None, "b64_json"):
            raise InvalidRequest(f"response_format must be b64_json, got {shown(response_format)}",
                                 param="response_format")
        try:
            self.factor = pictures.parse_size(size, self.config)
        except pictures.PictureError as error:
            raise picture_error(error) from error
        self.size = f"{self.config.width * self.factor}x{self.config.height * self.factor}"
        self.png = preferred(http.headers.get("accept", "")) == "image/png"
        self.stream = bool(stream)
        if self.png and (self.n != 1 or self.stream):
            raise InvalidRequest("Accept: image/png answers one picture: it goes with n=1 and without stream, "
                                 f"got n={self.n}, stream={str(self.stream).lower()}", param="n")
        self.partial_images = partial_images
        self.seed = secrets.randbelow(MAX_SEED - self.n) if seed is None else seed
        if self.seed + self.n - 1 > MAX_SEED:
            raise InvalidRequest(f"image i uses seed + i, which must stay under 2^53: with n={self.n} the largest "
                                 f"seed is {MAX_SEED - self.n + 1}, got {seed}", param="seed")
        allowed = timeout_of(http)
        if timeout is not None and allowed not in (None, timeout):
            raise InvalidRequest(f"timeout {timeout:g} contradicts {HEADER}: {allowed:g}; send one of them",
                                 param="timeout")
        self.timeout_s = math.inf if timeout is None else timeout
        self.temperature = 1.0 if temperature is None else temperature
        self.label = self._label(label, prompt)
        if ignored:
            names = [sendable(name)[:40] for name in sorted(ignored)]
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            self.warnings.append(f"ignored: {', '.join(names[:20])}{more}")

    def _label(self, label: int | str | None, prompt: str | None) -> int | None:
        """The class asked for by label, or by a prompt that names one."""
        checkpoint = self.batcher.engine.checkpoint
        names, chosen = checkpoint.class_names, None
        if label is not None:
            chosen = checkpoint.class_of(str(label))
            if chosen is None:
                allowed = f"0..{len(names) - 1} or one of {', '.join(names)}" if names else "none: it knows no classes"
                raise InvalidRequest(f"label must be a class of {self.name}: {allowed}; got {shown(label)}",
                                     param="label")
        text = (prompt or "").strip()
        prompted = checkpoint.class_of(text)
        if prompted is not None:
            if chosen is not None and chosen != prompted:
                raise InvalidRequest(f"label {shown(label)} contradicts prompt {shown(text)}; send one of them",
                                     param="label")
            return prompted
        if text:
            self.warnings.append("prompt was ignored: it names no class of this model"
                                 + (f"; classes: {', '.join(names)}" if names else ""))
        return chosen

    def specs(self, occluded: pictures.Occluded | None = None) -> list[ImageSpec]:
        return [ImageSpec(seed=self.seed + index, temperature=self.temperature, label=self.label,
                          canvas=occluded.canvas if occluded else None, known=occluded.known if occluded else None)
                for index in range(self.n)]

    def claim(self, service: Service, admitted: Admitted) -> None:
        service.worker.claim(admitted, self.name, self.n, stream=self.stream, bulk=self.bulk, timeout_s=self.timeout_s)


def preferred(accept: str) -> str:
    """The media type that an Accept header lists first."""
    return accept.split(",")[0].split(";")[0].strip()


def partial_rows(partial_images: int | None, given: int, height: int) -> set[int]:
    """After how many finished image rows a stream shows a partial image: each, or that many evenly spread.

    given: image rows that were known from the start; only what follows is shown.
    """
    if partial_images is None or partial_images >= height - given:
        return set(range(given + 1, height + 1))
    return {given + (height - given) * (index + 1) // (partial_images + 1) for index in range(partial_images)}


def picture_error(error: pictures.PictureError) -> ServiceError:
    return _PICTURE_ERRORS[error.status](str(error), param=error.param)


_GENERATIONS = drawn("image_generation", GenerationEvent, InvalidRequest("n must be 1..16, got 17", param="n"),
                     ModelNotFound("mnist-large", ["mnist-small"]), NotJson("text/plain"),
                     links={"generate": {"model": "model", "seed": "data/0/seed"}})
_FORM = {"examples": EDIT, "encoding": {"image[]": {"explode": True}}}  # so that /docs sends no part for no picture
_EDITS = drawn("image_edit", EditEvent,
               InvalidRequest("nothing says what to fill in: send an image with transparency, or a mask with "
                              "transparency, or keep_rows", param="image"),
               ModelNotFound("mnist-large", ["mnist-small"]), BodyTooLarge(20_000_000, 2**24), Exhausted(),
               UnsupportedMedia("image must be a PNG, JPEG or WebP picture, got 5 bytes that begin with b'hello'",
                                param="image"))


@router.post("/generations", response_model=ImagesResponse, operation_id="generate", responses=_GENERATIONS)
async def generate(body: Annotated[GenerateBody, Body(openapi_examples=GENERATE)], http: Request, service: ServiceDep,
                   admitted: AdmittedDep, x_request_timeout: TimeoutHeader = None) -> Response:
    """Draw images: unconditional, or of one class."""
    ignored = list(body.model_extra or {})
    ask = Ask(service, http, **body.model_dump(exclude=set(ignored)), ignored=ignored)
    specs = ask.specs()
    ask.claim(service, admitted)
    service.worker.submit(admitted, specs)
    return await answer(service, http, ask, admitted, "image_generation", {})


@router.post("/edits", response_model=EditResponse, operation_id="edit", responses=_EDITS,
             openapi_extra={"requestBody": {"content": {"multipart/form-data": _FORM}, "description": "A picture, and "
                            "what to fill in. Unknown fields are ignored, and the answer's warnings name them."}})
async def edit(
        http: Request, service: ServiceDep, admitted: AdmittedDep,
        image: Annotated[UploadFile | None, File(description="PNG, JPEG or WebP of the model's size or more; without "
                                                 "mask and keep_rows its transparent parts are to be filled in",
                                                 examples=["seven.png"])] = None,
        image_list: Annotated[list[UploadFile] | None, File(alias="image[]", examples=[[]], description="another name "
                                                            "for image, as some clients send it; one picture")] = None,
        mask: Annotated[UploadFile | None, File(description="a picture whose transparent parts are to be filled in, "
                                                "instead of the image's own", examples=["mask.png"])] = None,
        keep_rows: Annotated[fields.KeptRows | None, Form()] = None,
        model: Annotated[fields.Model | None, Form()] = None,
        prompt: Annotated[fields.Prompt | None, Form()] = None,
        n: Annotated[fields.Count | None, Form()] = None,
        size: Annotated[fields.Size | None, Form()] = None,
        response_format: Annotated[fields.Format | None, Form()] = None,
        stream: Annotated[fields.Stream | None, Form()] = None,
        partial_images: Annotated[fields.Partials | None, Form()] = None,
        seed: Annotated[fields.Seed | None, Form()] = None,
        temperature: Annotated[fields.Temperature | None, Form()] = None,
        label: Annotated[fields.Label | None, Form()] = None,
        timeout: Annotated[fields.Timeout | None, Form()] = None,
        priority: Annotated[fields.Priority | None, Form()] = None,
        x_request_timeout: TimeoutHeader = None) -> Response:
    """Complete an occluded image: known sub-pixels come back unchanged, the holes are drawn."""
    ignored = [name for name in await http.form() if name not in FORM_FIELDS]
    ask = Ask(service, http, model=model, n=n, size=size, response_format=response_format, stream=stream,
              partial_images=partial_images, seed=seed, temperature=temperature, label=label, prompt=prompt,
              timeout=timeout, priority=priority, ignored=ignored)
    uploads = [upload for upload in [image, *(image_list or [])] if upload is not None]
    if len(uploads) != 1:
        raise InvalidRequest(f"send exactly one picture as image or image[], got {len(uploads)}", param="image")
    ask.claim(service, admitted)

    def read() -> pictures.Occluded:  # in its thread, so that uploads that wait for one are files, and no memory
        return pictures.read_occluded(uploads[0].file.read(), ask.config,
                                      mask=None if mask is None else mask.file.read(), keep_rows=keep_rows)

    try:
        occluded = await unless_gone(http, service.worker.decoded(admitted, read))
    except pictures.PictureError as error:
        raise picture_error(error) from error
    except (OSError, MemoryError, RuntimeError) as error:  # of reading a file, or of beginning a thread
        logger.exception("a picture could not be decoded")
        raise Exhausted() from error
    if occluded is None:
        service.worker.finish(admitted, "cancelled")
        return Response(status_code=499)  # nobody reads it: the client left
    await http.close()  # its files: a slot is waited for without them
    arrivals.body_of(http.scope).let_go()
    facts = {"conditioning": occluded.conditioning, "known": occluded.known_count,
             "known_before_first_hole": occluded.known_before_first_hole,
             "known_after_last_hole": occluded.known_after_last_hole}
    service.worker.submit(admitted, ask.specs(occluded))
    return await answer(service, http, ask, admitted, "image_edit", facts)


async def answer(service: Service, http: Request, ask: Ask, admitted: Admitted, kind: str,
                 facts: dict[str, Any]) -> Response:
    """Wait for the images of an admitted request and give them in the form asked for."""
    engine = ask.batcher.engine
    common = {"created": int(time.time()), "model": ask.name, "checkpoint": engine.checkpoint.digest,
              "engine": engine.name, "precision": engine.precision, "device": engine.device,
              "state": engine.state_format, "size": ask.size, "output_format": "png", "warnings": ask.warnings, **facts}
    if ask.stream:
        return Streaming(stream_events(service, ask, admitted, kind, common), service, admitted)
    outcome = "failed"
    try:
        response = await unless_gone(http, in_one_piece(service, ask, admitted, common))
        outcome = "cancelled" if response is None else "completed"
    except asyncio.CancelledError:
        outcome = "cancelled"
        raise
    finally:
        service.worker.finish(admitted, outcome)
    return response or Response(status_code=499)  # nobody reads it: the client left


async def in_one_piece(service: Service, ask: Ask, admitted: Admitted, common: dict[str, Any]) -> Response:
    """The answer that is no stream. Each image is encoded as soon as it is done. Raises ServiceError."""
    engine = ask.batcher.engine
    pngs = {event.index: await encoded(service, ask, admitted, event.canvas)
            async for event in service.worker.events(admitted) if isinstance(event, ImageDone)}
    if ask.png:
        headers = {"x-linpix-seed": str(ask.seed), "x-linpix-model": quote(ask.name),
                   "x-linpix-checkpoint": engine.checkpoint.digest, "x-linpix-engine": engine.name,
                   "x-linpix-precision": engine.precision, "x-linpix-device": engine.device,
                   "x-linpix-state": engine.state_format}
        return Response(pngs[0], media_type="image/png", headers=headers)
    data = [{"b64_json": base64.b64encode(png).decode(), "seed": ask.seed + index}
            for index, png in sorted(pngs.items())]
    return JSONResponse(common | {"data": data})


async def encoded(service: Service, ask: Ask, admitted: Admitted, canvas: NDArray[np.uint8],
                  rows: int | None = None) -> bytes:
    """As pictures.png; what takes more than a moment is done in a thread. Raises DeadlinePassed."""
    work = partial(pictures.png, canvas, ask.config, ask.factor, rows=rows)
    if ask.config.width * ask.config.height * ask.factor**2 <= SOON_PIXELS:
        png = work()
        service.worker.check_time(admitted)
    else:
        async with service.worker.in_time(admitted):
            png = await asyncio.to_thread(work)
    return png


async def unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of work, or None if the client closes its connection first."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


async def stream_events(service: Service, ask: Ask, admitted: Admitted, kind: str,
                        common: dict[str, Any]) -> AsyncIterator[bytes]:
    """Server-sent events of one request; Streaming sees to it that the request is finished."""
    shown = dict.fromkeys(range(ask.n), 0)
    rows = partial_rows(ask.partial_images, admitted.given[0], ask.config.height)
    try:
        async for event in service.worker.events(admitted, PING_S):
            if event is None:
                yield KEEPALIVE_COMMENT
                continue
            data = common | {"image_index": event.index, "seed": ask.seed + event.index}
            if isinstance(event, ImageDone):
                data |= {"type": f"{kind}.completed",
                         "b64_json": base64.b64encode(await encoded(service, ask, admitted, event.canvas)).decode()}
            elif event.rows in rows:
                png = await encoded(service, ask, admitted, event.canvas, event.rows)
                data |= {"type": f"{kind}.partial_image", "partial_image_index": shown[event.index],
                         "rows": event.rows, "b64_json": base64.b64encode(png).decode()}
                shown[event.index] += 1
            else:
                continue
            yield format_sse_event(event=data["type"], data_str=json.dumps(data))
        service.worker.finish(admitted, "completed")
    except ServiceError as error:
        service.worker.finish(admitted, "failed")
        yield format_sse_event(event="error", data_str=json.dumps(body_of(error)))


class Streaming(EventSourceResponse):
    """An event stream whose request ends with it, even if the client left before the first event, or does not read."""

    def __init__(self, events: AsyncIterator[bytes], service: Service, admitted: Admitted) -> None:
        super().__init__(events, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._service, self._admitted = service, admitted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._admitted.deadline + UNREAD_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            logger.warning("a request ends: its client does not read the stream")
        finally:
            self._service.worker.finish(self._admitted, "cancelled")
