"""POST /v1/images/generations and /v1/images/edits: drawing images, and completing a picture.
Answers are a picture, an array, JSON or server-sent events.
"""

import base64
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import quote

import numpy as np
from fastapi import APIRouter, Body, File, Response
from fastapi import Request as Http
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from linpix.model.attempts import unsure
from linpix.model.palette import pictures_of

from ...engine.image import best_of
from ...engine.job import Job, checked_options, label_of
from ...engine.request import Event, Request
from ...errors import InvalidRequest, ServiceError, model_not_found, not_json, shown
from ...pictures import animation, encode, uploads
from ..answers import Answer, Order, as_json, order_of
from ..error_handlers import envelope
from ..middleware.bodies import BYTES
from ..openapi import UPLOADING, image_responses, schema_of
from ..request_schemas import (
    EDIT,
    EDIT_JSON,
    GENERATE,
    TIMEOUT_PARAMETER,
    EditBody,
    EditForm,
    GenerateBody,
)
from ..schemas import EditEvent, EditResponse, GenerationEvent, ImageData, ImagesResponse, Usage
from ..uploads import FormRoute, decoded

router = APIRouter(prefix="/v1/images", tags=["images"])
forms = APIRouter(prefix="/v1/images", tags=["images"], route_class=FormRoute)

_GENERATIONS = image_responses(
    GenerationEvent,
    InvalidRequest("n must be 1..16, got 17", param="n"),
    model_not_found("mnist-large", ["mnist-small"]),
    not_json("text/plain"),
)
_EDITS = image_responses(
    EditEvent,
    InvalidRequest(
        "it is not clear what to fill in: erase that part of the picture (save it "
        "as a PNG with transparent pixels), or use a mask or keep_rows",
        param="image",
    ),
    *UPLOADING,
)

# of silence before a stream sends a comment: proxies close connections that are silent for a minute
PING_S = 15.0
ARRAY_IMAGES = 128  # of one answer that is an array: all its seeds are in one header
ANSWER_BYTES = 2**26  # largest answer, or event of a stream
FACTS_BYTES = 2**9  # of one image in JSON, besides its picture
READABLE = "+ ;:,.'()"  # characters that are not quoted in a header that is a sentence


@router.post(
    "/generations",
    response_model=ImagesResponse,
    operation_id="generate",
    responses=_GENERATIONS,
    summary="Draw images",
    openapi_extra={"parameters": [TIMEOUT_PARAMETER]},
)
async def generate(
    body: Annotated[GenerateBody, Body(openapi_examples=GENERATE)], http: Http
) -> Response:
    """Draw images: of any class, or of one.

    Choose `image/png` as the media type of the response to see the picture itself.
    """
    return ImagesAnswer(http, images_order(http, body))


@forms.post(
    "/edits",
    response_model=EditResponse,
    operation_id="edit",
    responses=_EDITS,
    summary="Complete a picture",
    openapi_extra={
        "parameters": [TIMEOUT_PARAMETER],
        "requestBody": {
            "content": {
                "multipart/form-data": {"examples": EDIT},
                "application/json": {"schema": schema_of(EditBody), "examples": EDIT_JSON},
            },
            "description": (
                "A picture, and which part of "
                "it to fill in. Unknown fields are ignored and listed in the answer's warnings."
            ),
        },
    },
)
async def edit(form: Annotated[EditForm, File()], http: Http) -> Response:
    """Complete an occluded image: known sub-pixels come back unchanged, and the holes are drawn.

    Choose `image/png` as the media type of the response to see the picture itself.
    """
    order = images_order(http, form)
    upload = await decoded(
        http, order, form, preparation=form.prepare or "none", lay_back=bool(form.lay_back)
    )
    return EditAnswer(http, with_upload(http, order, form, upload))


def images_order(http: Http, fields: GenerateBody) -> Order:
    """All of an order of images but its upload. Raises ServiceError."""
    n = 1 if fields.n is None else fields.n
    http.state.images = fields.candidates or n  # for the log, if the request is refused
    order, service = order_of(http, fields), http.app.state.service
    model, checkpoint, bulk = order.model, order.model.checkpoint, fields.priority == "bulk"
    max_n = service.max_images(model, bulk=bulk)
    if not 1 <= n <= max_n:
        raise InvalidRequest(f"n must be 1..{max_n}, got {shown(fields.n)}", param="n")
    able = None
    if fields.candidates is not None or fields.attempts is not None:
        able = service.instead_of(model, lambda config: config.class_first)
    options = checked_options(
        checkpoint,
        n,
        label=order.label,
        seed=fields.seed,
        temperature=fields.temperature,
        candidates=fields.candidates,
        attempts=fields.attempts,
        limit=max_n,
        able=able,
    )
    stream = bool(fields.stream)
    warnings = [*order.warnings, *checkpoint.temperature_warnings(options["temperature"])]
    if fields.response_format == "url" and stream:
        warnings.append("response_format was ignored: the events of a stream always have b64_json")
    # tools made for DALL-E read url
    usual = "url" if (fields.model or "").startswith("dall-e") else None
    order = replace(
        order,
        warnings=warnings,
        options=options | {"bulk": bulk, "stream": stream},
        facts={"candidates": fields.candidates},
        format=encode.MEDIA_TYPES.get(order.accepted, fields.output_format or "png"),
        as_url=(fields.response_format or usual) == "url" and not stream,
        partial_images=0 if fields.candidates else fields.partial_images,
    )
    return _checked(http, order, fields)


def _checked(http: Http, order: Order, fields: GenerateBody) -> Order:
    """The order, with the bytes that its answer may have. Raises InvalidRequest for fields that
    contradict each other, the accepted media type, or the model.
    """
    config = order.model.config
    n, stream = order.options["answers"], order.options["stream"]
    array = order.format == "npy"
    if order.alone and fields.output_format not in (None, order.format):
        raise InvalidRequest(
            f"output_format {fields.output_format} contradicts Accept: {order.accepted}; send"
            " one of them",
            param="output_format",
        )
    if order.alone and not array and (n != 1 or stream):
        raise InvalidRequest(
            f"Accept: {order.accepted} returns one picture, so it needs n=1 and no stream, got "
            f"n={n}, stream={str(stream).lower()}",
            param="n",
        )
    if array and stream:
        raise InvalidRequest(
            f"Accept: {encode.NPY} returns all pictures at once, so it works only without stream",
            param="stream",
        )
    if array and n > ARRAY_IMAGES:
        raise InvalidRequest(
            f"an array has at most {ARRAY_IMAGES} images; request fewer, got {n}", param="n"
        )
    if order.format == "gif":
        if order.frame.width != config.width:
            raise InvalidRequest(
                f"Accept: {order.accepted} returns an animation of its own size; leave out size,"
                f" got {shown(fields.size)}",
                param="size",
            )
        order = replace(order, inline=False)
    channels = 4 if config.palette else config.channels
    order = replace(order, held_bytes=_held_bytes(http, order, order.frame, channels))
    if fields.candidates and stream and fields.partial_images:
        raise InvalidRequest(
            "with candidates, a stream has no partial images, since the best are known only "
            "when all are drawn; leave out partial_images, got "
            f"{shown(fields.partial_images)}",
            param="partial_images",
        )
    if not isinstance(fields, EditForm):
        return order
    if fields.lay_back and order.frame.width != config.width:
        raise InvalidRequest(
            f"lay_back returns pictures of the upload's size; leave out size, got"
            f" {shown(fields.size)}",
            param="size",
        )
    if fields.lay_back and order.partial_images:
        raise InvalidRequest(
            "with lay_back, a stream has no partial images; leave out partial_images, got "
            f"{shown(order.partial_images)}",
            param="partial_images",
        )
    if fields.lay_back and order.format in ("gif", "npy"):
        raise InvalidRequest(
            f"lay_back returns pictures of the upload's size, but Accept: {order.accepted} "
            "requests something else; send one of them",
            param="lay_back",
        )
    if fields.prepare == "mnist":
        uploads.check_preparable(config)
    return order


def _held_bytes(
    http: Http, order: Order, frame: encode.Frame, channels: int, upload_bytes: int = 0
) -> int:
    """How many bytes the answer may have, with what it keeps of an upload. Raises InvalidRequest
    if these are too many.
    """
    # the events of a stream are sent one by one
    n = 1 if order.options["stream"] else order.options["answers"]
    if order.format == "npy":
        each_bytes = frame.width * frame.height * channels
    elif order.format == "gif":
        each_bytes = animation.max_bytes(order.model.config)
    else:
        each_bytes = encode.max_bytes(frame, channels, order.format) * 4 // 3 + FACTS_BYTES
    held_bytes = n * each_bytes + upload_bytes
    allowed = min(ANSWER_BYTES, http.app.state.service.bodies.budgets[BYTES][1])
    if held_bytes > allowed:
        raise InvalidRequest(
            f"an answer has at most {allowed:,} bytes; {n} images of {frame.size} may have"
            f" {held_bytes:,}. Request fewer or smaller images, or several requests",
            param="n",
        )
    return held_bytes


def with_upload(http: Http, order: Order, form: EditForm, upload: uploads.Upload) -> Order:
    """The complete order of an edit: the hidden part of its upload is drawn. Raises
    InvalidRequest.
    """
    model, prepared = order.model, None
    warnings = [*order.warnings, *uploads.warnings_of(upload, model.checkpoint)]
    given = upload.prefix_only() if form.conditioning == "prefix" else upload
    facts = given.facts
    if upload.figure is not None:
        seen = base64.b64encode(upload.seen()).decode()
        prepared = {"inverted": upload.inverted, "box": upload.figure, "b64_json": seen}
    if facts["conditioning"] == "partial":
        able = http.app.state.service.instead_of(model, lambda config: bool(config.patch))
        if form.conditioning == "full":
            raise InvalidRequest(
                f"{model.name} cannot use all {facts['known']} known sub-pixels, "
                "since some come after hidden ones; choose "
                f"{able or 'a model that is conditional'} (GET /v1/models), or leave out "
                "conditioning",
                param="conditioning",
            )
        better = "a model that is conditional would use all of them, but none is loaded here"
        if able:
            better = f"{able} uses all known pixels"
        warnings.append(
            f"{model.name} does not use known pixels for what it draws before them; {better}"
        )
    order = replace(
        order,
        upload=upload,
        warnings=warnings,
        options={**order.options, "canvas": given.canvas, "known": given.known},
        facts={**order.facts, **facts, "crop": upload.crop, "prepared": prepared},
    )
    if (over := upload.overlay) is None:
        return order
    height, width, channels = over.blank.shape
    kept_bytes = over.blank.nbytes + over.hidden.nbytes
    if over.alpha is not None:
        channels, kept_bytes = channels + 1, kept_bytes + over.alpha.nbytes
    kept_bytes += 2 * order.options["answers"] * len(over.profile)  # in each file, in base64
    held_bytes = _held_bytes(http, order, encode.Frame(1, width, height), channels, kept_bytes)
    return replace(order, held_bytes=held_bytes, partial_images=0, inline=False)


class ImagesAnswer(Answer):
    """Images of a job."""

    # what answers as JSON and streams consist of
    response: type[ImagesResponse] = ImagesResponse
    event: type[GenerationEvent] = GenerationEvent

    async def in_one_piece(self, request: Request) -> Response:
        """Each image is encoded as soon as it is done."""
        found = {
            place: await self.in_time(request, self.encode, request.job, event)
            async for place, event in self.returned(request)
            if event is not None and event.done
        }
        images = [found[place] for place in sorted(found)]
        return await self.in_time(request, self._response, images)

    async def events(self, request: Request) -> AsyncIterator[bytes]:
        # an image that is drawn again sends its partial images again, with the same numbers
        order = self.order
        shown = partial_rows(order.partial_images, request.given, order.model.config.height)
        release, common = self.http.app.state.service.requests.release, self._common()
        try:
            async for place, event in self.returned(request, PING_S):
                if event is None:
                    yield KEEPALIVE_COMMENT
                    continue
                if not (event.done or event.rows in shown):
                    continue
                sent = await self.in_time(
                    request, self._event, request, event, place, shown, common
                )
                if sent is not None:
                    yield sent
            release(request, "completed")
        except ServiceError as error:
            release(request, "failed")
            yield format_sse_event(
                event="error", data_str=envelope(error).model_dump_json(ensure_ascii=True)
            )

    def _event(
        self,
        request: Request,
        event: Event,
        place: int,
        shown: Sequence[int],
        common: dict[str, Any],
    ) -> bytes | None:
        """One event of a stream. None if later rows of the same image wait to be shown: where
        encoding takes longer than drawing, only the last are encoded.
        """
        kind = self.event.kind
        own: dict[str, Any] = {"type": f"{kind}.completed", "usage": Usage()}
        if not event.done:
            last = request.rows[event.image]
            if not self.order.inline and any(event.rows < rows <= last for rows in shown):
                return None
            own = {
                "type": f"{kind}.partial_image",
                "partial_image_index": shown.index(event.rows),
                "rows": event.rows,
            }
        text, facts = self.encode(request.job, event)
        warnings = [*self.order.warnings, *unsure([facts])]
        sent = self.event(
            **common,
            warnings=warnings,
            created_at=common["created"],
            image_index=place,
            **facts,
            **own,
            b64_json=text,
        )
        return format_sse_event(event=sent.type, data_str=sent.model_dump_json(ensure_ascii=True))

    async def returned(
        self, request: Request, patience_s: float | None = None
    ) -> AsyncIterator[tuple[int, Event | None]]:
        """The events of images in the answer, each with the image's place there; as
        Request.next_event gives them.

        Of candidates, these are the best ones, once all are drawn.
        """
        job, done, candidates = request.job, 0, dict[int, Event]()
        while done < job.count:
            event = await request.next_event(patience_s)
            done += event is not None and event.done
            if event is None:
                yield 0, None
            elif not job.candidates:
                yield event.image, event
            elif event.done:
                candidates[event.image] = event
        if candidates:
            checked = [candidates[index].recognised for index in range(job.count)]
            for place, index in enumerate(
                best_of([image for image in checked if image is not None], job.answers)
            ):
                yield place, candidates[index]

    def encode(self, job: Job, event: Event) -> tuple[Any, dict[str, Any]]:
        """An image in the requested format and size, as text in base64 if JSON is to have it, and
        its facts. For an array, its sub-pixels. Unfinished rows are black.
        """
        began, canvas, order = time.monotonic(), event.canvas, self.order
        upload, model = order.upload, order.model
        if upload is not None:
            canvas = np.where(upload.known, upload.canvas, canvas)
        if upload is not None and upload.overlay is not None:
            assert order.format != "gif" and order.format != "npy"
            file = upload.overlay.encoded(pictures_of(canvas, model.config), order.format)
        elif order.format == "gif":
            begun = job.prefix * model.config.height // model.config.subpixels
            file = animation.drawing(canvas, model.config, job.known, begun)
        else:
            rows = None if event.done else event.rows
            file = encode.drawn(canvas, model.config, order.frame, order.format, rows)
        content = file if order.alone else base64.b64encode(file).decode()
        facts: dict[str, Any] = {"seed": job.seed + event.image}
        if (recognised := event.recognised) is not None:
            facts["label"] = label_of(recognised.label, model.checkpoint)
            facts["confidence"] = recognised.confidence
            facts["confident"] = recognised.accepted
            if job.attempts > 1:
                facts["attempts"] = recognised.attempts
        self.encoding = self.encoding[0] or began, time.monotonic()
        return content, facts

    def _response(self, images: Sequence[tuple[Any, dict[str, Any]]]) -> Response:
        """A picture or an array, with the facts in headers, where commas separate those of several
        images; or JSON. images: of `encode`.
        """
        order = self.order
        files, facts = [file for file, _ in images], [own for _, own in images]
        warnings = [*order.warnings, *unsure(facts)]
        if order.alone:
            headers = {
                f"x-linpix-{name}": quote(value, safe="+")
                for name, value in order.model.facts.items()
            }
            for name in facts[0]:
                values = [quote(str(own[name]), safe="+") for own in facts]
                headers[f"x-linpix-{name}"] = ",".join(values)
            if "confident" in facts[0]:  # true or false, as in JSON
                headers["x-linpix-confident"] = headers["x-linpix-confident"].lower()
            if warnings:
                headers["x-linpix-warnings"] = quote("; ".join(warnings), safe=READABLE)
            content = files[0]
            if order.format == "npy":
                content = encode.npy(files, order.frame.height, order.frame.width)
            return Response(content, media_type=order.accepted, headers=headers)
        data = []
        for text, own in images:
            url = f"data:image/{order.format};base64,{text}" if order.as_url else None
            sent = None if order.as_url else text
            data.append(
                ImageData(b64_json=sent, revised_prompt=order.revised_prompt, url=url, **own)
            )
        return as_json(self.response(data=data, warnings=warnings, **self._common()))

    def _common(self) -> dict[str, Any]:
        """Fields that are the same for all images."""
        order = self.order
        overlay = None if order.upload is None else order.upload.overlay
        return {
            "created": int(time.time()),
            **order.model.facts,
            "size": (overlay or order.frame).size,
            "output_format": order.format,
            **order.facts,
        }


class EditAnswer(ImagesAnswer):
    response, event = EditResponse, EditEvent


def partial_rows(partial_images: int | None, given: int, height: int) -> Sequence[int]:
    """The numbers of finished image rows at which a stream shows a partial image: all, or so many,
    evenly spread.

    given: image rows that were known from the start; only the following ones count.
    """
    if partial_images is None or partial_images >= height - given:
        return range(given + 1, height + 1)
    return [
        given + (height - given) * (index + 1) // (partial_images + 1)
        for index in range(partial_images)
    ]
