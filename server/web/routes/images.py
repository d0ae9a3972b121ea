"""POST /v1/images/generations and /v1/images/edits: drawing images, and completing a picture.
Answers are a picture, an array, JSON or server-sent events.
"""

import base64
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal
from urllib.parse import quote

import numpy as np
from fastapi import APIRouter, Body, File, Request, Response
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from linpix.model.attempts import unsure
from linpix.model.palette import pictures_of

from ...engine.image import best_of
from ...engine.job import label_of, new_job
from ...engine.request import Event
from ...engine.request import Request as Admitted
from ...errors import InvalidRequest, ServiceError, model_not_found, not_json, shown
from ...pictures import encode, uploads
from ...pictures.overlay import Overlay
from ..answers import Answer, as_json
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
    body: Annotated[GenerateBody, Body(openapi_examples=GENERATE)], http: Request
) -> Response:
    """Draw images: of any class, or of one.

    Choose `image/png` as the media type of the response to see the picture itself.
    """
    return Images(http, body, ImagesResponse, GenerationEvent)


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
async def edit(form: Annotated[EditForm, File()], http: Request) -> Response:
    """Complete an occluded image: known sub-pixels come back unchanged, and the holes are drawn.

    Choose `image/png` as the media type of the response to see the picture itself.
    """
    images = Images(http, form, EditResponse, EditEvent)
    upload = await decoded(
        images, form, preparation=form.prepare or "none", lay_back=bool(form.lay_back)
    )
    images.complete(upload, form.conditioning)
    return images


class Images(Answer):
    """Images of a job. For an edit, `complete` says what of them is known."""

    def __init__(
        self,
        http: Request,
        fields: GenerateBody,
        response: type[ImagesResponse],
        event: type[GenerationEvent],
    ) -> None:
        """response, event: what answers as JSON and streams consist of."""
        self.response, self.event = response, event
        n = 1 if fields.n is None else fields.n
        http.state.images = fields.candidates or n  # for the log, if the request is refused
        super().__init__(http, fields)
        service, bulk = self.service, fields.priority == "bulk"
        max_n = service.max_images(self.model, bulk=bulk)
        if not 1 <= n <= max_n:
            raise InvalidRequest(f"n must be 1..{max_n}, got {shown(fields.n)}", param="n")
        chooses = fields.candidates is not None or fields.attempts is not None
        able = (
            service.instead_of(self.model, lambda config: config.class_first) if chooses else None
        )
        self.job = replace(
            new_job(
                self.checkpoint,
                n,
                label=self.label,
                seed=fields.seed,
                temperature=fields.temperature,
                candidates=fields.candidates,
                attempts=fields.attempts,
                limit=max_n,
                able=able,
            ),
            bulk=bulk,
            stream=bool(fields.stream),
        )
        self.warnings += self.checkpoint.temperature_warnings(self.job.temperature)
        # tools made for DALL-E read url
        usual = "url" if (fields.model or "").startswith("dall-e") else None
        self.as_url = (fields.response_format or usual) == "url" and not self.job.stream
        if fields.response_format == "url" and self.job.stream:
            self.warnings.append(
                "response_format was ignored: the events of a stream always have b64_json"
            )
        self.array = self.accepted == encode.NPY  # all pictures are the answer, as one array
        self.format: encode.Format = self.sole_format or fields.output_format or "png"
        self.upload: uploads.Upload | None = None  # the answer keeps all that is known of it
        self.overlay: Overlay | None = None  # the upload, in whose holes the pictures are laid
        self.partial_images = 0 if self.job.candidates else fields.partial_images
        self.facts: dict[str, Any] = {"candidates": fields.candidates}  # of all images
        self._check(fields)

    def _check(self, fields: GenerateBody) -> None:
        """Raise InvalidRequest for fields that contradict each other, the accepted media type, or
        the model.
        """
        n = self.job.answers
        if (self.sole_format or self.array) and fields.output_format not in (
            None,
            self.sole_format,
        ):
            raise InvalidRequest(
                f"output_format {fields.output_format} contradicts Accept: {self.accepted}; send"
                " one of them",
                param="output_format",
            )
        if self.sole_format and (n != 1 or self.job.stream):
            raise InvalidRequest(
                f"Accept: {self.accepted} returns one picture, so it needs n=1 and no stream, got "
                f"n={n}, stream={str(self.job.stream).lower()}",
                param="n",
            )
        if self.array and self.job.stream:
            raise InvalidRequest(
                f"Accept: {encode.NPY} returns all pictures at once, so it works only without"
                " stream",
                param="stream",
            )
        if self.array and n > ARRAY_IMAGES:
            raise InvalidRequest(
                f"an array has at most {ARRAY_IMAGES} images; request fewer, got {n}", param="n"
            )
        self._limit(self.frame, 4 if self.config.palette else self.config.channels)
        if self.job.candidates and self.job.stream and fields.partial_images:
            raise InvalidRequest(
                "with candidates, a stream has no partial images, since the best are known only "
                "when all are drawn; leave out partial_images, got "
                f"{shown(fields.partial_images)}",
                param="partial_images",
            )
        if not isinstance(fields, EditForm):
            return
        if fields.lay_back and self.frame.width != self.config.width:
            raise InvalidRequest(
                "lay_back returns pictures of the upload's size; leave out size, got "
                f"{shown(fields.size)}",
                param="size",
            )
        if fields.lay_back and self.partial_images:
            raise InvalidRequest(
                "with lay_back, a stream has no partial images; leave out partial_images, got "
                f"{shown(self.partial_images)}",
                param="partial_images",
            )
        if fields.lay_back and self.array:
            raise InvalidRequest(
                f"lay_back returns pictures of the upload's size, but Accept: {encode.NPY} "
                "requests an array; send one of them",
                param="lay_back",
            )
        if fields.prepare == "mnist":
            uploads.check_preparable(self.config)

    def _limit(self, frame: encode.Frame, channels: int, upload_bytes: int = 0) -> None:
        """Find how many bytes the answer may have, besides what it keeps of an upload. Raises
        InvalidRequest if these are too many.
        """
        n = 1 if self.job.stream else self.job.answers  # the events of a stream are sent one by one
        each_bytes = encode.max_bytes(frame, channels, self.format) * 4 // 3 + FACTS_BYTES
        if self.array:
            each_bytes = frame.width * frame.height * channels
        self.held_bytes = n * each_bytes + upload_bytes
        allowed = min(ANSWER_BYTES, self.service.bodies.budgets[BYTES][1])
        if self.held_bytes > allowed:
            raise InvalidRequest(
                f"an answer has at most {allowed:,} bytes; {n} images of {frame.size} may have"
                f" {self.held_bytes:,}. Request fewer or smaller images, or several requests",
                param="n",
            )

    def complete(
        self, upload: uploads.Upload, conditioning: Literal["prefix", "full"] | None
    ) -> None:
        """Have the hidden part of an upload drawn. conditioning: see EditForm. Raises
        InvalidRequest.
        """
        self.upload, given = upload, upload.prefix_only() if conditioning == "prefix" else upload
        self.job = replace(self.job, canvas=given.canvas, known=given.known)
        self.warnings += uploads.warnings_of(upload, self.checkpoint)
        prepared = (
            None
            if upload.figure is None
            else {
                "inverted": upload.inverted,
                "box": upload.figure,
                "b64_json": base64.b64encode(upload.seen()).decode(),
            }
        )
        self.facts |= given.facts | {"crop": upload.crop, "prepared": prepared}
        if self.facts["conditioning"] == "partial":
            able = self.service.instead_of(self.model, lambda config: bool(config.patch))
            if conditioning == "full":
                raise InvalidRequest(
                    f"{self.model.name} cannot use all {self.facts['known']} known sub-pixels, "
                    "since some come after hidden ones; choose "
                    f"{able or 'a model that is conditional'} (GET /v1/models), or leave out "
                    "conditioning",
                    param="conditioning",
                )
            self.warnings.append(
                f"{self.model.name} does not use known pixels for what it draws before them; "
                + (
                    f"{able} uses all known pixels"
                    if able
                    else (
                        "a model that is conditional would use all of them, but none is loaded here"
                    )
                )
            )
        if (over := upload.overlay) is not None:
            self.overlay, self.partial_images, self.inline = over, 0, False
            height, width, channels = over.blank.shape
            kept_bytes = over.blank.nbytes + over.hidden.nbytes
            if over.alpha is not None:
                channels, kept_bytes = channels + 1, kept_bytes + over.alpha.nbytes
            kept_bytes += 2 * self.job.answers * len(over.profile)  # in each file, in base64
            self._limit(encode.Frame(1, width, height), channels, kept_bytes)

    async def in_one_piece(self, request: Admitted) -> Response:
        """Each image is encoded as soon as it is done."""
        found = {
            place: await self.made(request, self.encode, event)
            async for place, event in self.returned(request)
            if event is not None and event.done
        }
        files, facts = zip(*(found[place] for place in sorted(found)), strict=True)
        return await self.made(request, self._response, files, facts)

    async def events(self, request: Admitted) -> AsyncIterator[bytes]:
        # an image that is drawn again sends its partial images again, with the same numbers
        shown = partial_rows(self.partial_images, request.given, self.config.height)
        release, common = self.service.requests.release, self._common()
        try:
            async for place, event in self.returned(request, PING_S):
                if event is None:
                    yield KEEPALIVE_COMMENT
                    continue
                if not (event.done or event.rows in shown):
                    continue
                sent = await self.made(request, self._event, request, event, place, shown, common)
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
        request: Admitted,
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
            if not self.inline and any(event.rows < rows <= last for rows in shown):
                return None
            own = {
                "type": f"{kind}.partial_image",
                "partial_image_index": shown.index(event.rows),
                "rows": event.rows,
            }
        text, facts = self.encode(event)
        warnings = self.warnings + unsure([facts])
        sent = self.event(
            **(common | {"warnings": warnings}),
            created_at=common["created"],
            image_index=place,
            **facts,
            **own,
            b64_json=text,
        )
        return format_sse_event(event=sent.type, data_str=sent.model_dump_json(ensure_ascii=True))

    async def returned(
        self, request: Admitted, patience_s: float | None = None
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

    def encode(self, event: Event) -> tuple[Any, dict[str, Any]]:
        """An image in the requested format and size, as text in base64 if JSON is to have it, and
        its facts. For an array, its sub-pixels. Unfinished rows are black.
        """
        began, canvas = time.monotonic(), event.canvas
        if self.upload is not None:
            canvas = np.where(self.upload.known, self.upload.canvas, canvas)
        if self.overlay is not None:
            file = self.overlay.encoded(pictures_of(canvas, self.config), self.format)
        else:
            kind: Literal["npy"] | encode.Format = "npy" if self.array else self.format
            rows = None if event.done else event.rows
            file = encode.drawn(canvas, self.config, self.frame, kind, rows)
        content = file if self.sole_format or self.array else base64.b64encode(file).decode()
        facts: dict[str, Any] = {"seed": self.job.seed + event.image}
        if (recognised := event.recognised) is not None:
            facts |= {
                "label": label_of(recognised.label, self.checkpoint),
                "confidence": recognised.confidence,
                "confident": recognised.accepted,
            }
            if self.job.attempts > 1:
                facts["attempts"] = recognised.attempts
        self.encoding = self.encoding[0] or began, time.monotonic()
        return content, facts

    def _response(self, files: tuple[Any, ...], facts: tuple[dict[str, Any], ...]) -> Response:
        """A picture or an array, with the facts in headers, where commas separate those of several
        images; or JSON.
        """
        warnings = self.warnings + unsure(facts)
        if self.sole_format or self.array:
            headers = {name: quote(value, safe="+") for name, value in self.model.facts.items()}
            headers |= {
                name: ",".join(quote(str(own[name]), safe="+") for own in facts)
                for name in facts[0]
            }
            if "confident" in headers:  # true or false, as in JSON
                headers["confident"] = headers["confident"].lower()
            if warnings:
                headers["warnings"] = quote("; ".join(warnings), safe=READABLE)
            size = self.frame.height, self.frame.width
            return Response(
                encode.npy([*files], *size) if self.array else files[0],
                media_type=self.accepted,
                headers={
                    f"x-linpix-{name.replace('_', '-')}": value for name, value in headers.items()
                },
            )
        data = [
            ImageData(
                b64_json=None if self.as_url else text,
                revised_prompt=self.revised_prompt,
                url=f"data:image/{self.format};base64,{text}" if self.as_url else None,
                **own,
            )
            for text, own in zip(files, facts, strict=True)
        ]
        return as_json(self.response(data=data, **(self._common() | {"warnings": warnings})))

    def _common(self) -> dict[str, Any]:
        """Fields that are the same for all images."""
        return {
            "created": int(time.time()),
            **self.model.facts,
            "size": (self.overlay or self.frame).size,
            "output_format": self.format,
            "warnings": self.warnings,
            **self.facts,
        }


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
