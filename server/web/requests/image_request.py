"""What generations, edits and likelihoods ask for, checked."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import numpy as np
from fastapi import Request
from numpy.typing import NDArray

from linpix.model.config import ModelConfig

from ...engine.answers.plan import class_of, plan
from ...engine.answers.ranking import best, likelihoods, recognised
from ...engine.decode.decoder import ImageSpec
from ...engine.decode.particles import check_filter
from ...engine.ticket import Demand, ImageDone, RowsDone
from ...errors import (
    InvalidRequest,
    OptionError,
    TooLarge,
    UnsupportedMedia,
    as_fields,
    shown,
)
from ...pictures import encode, pictures
from ...pictures.overlay import Overlay
from ...pictures.uploads import Upload, warnings_of
from ..admission import HEADER
from ..error_handlers import sendable
from ..service import Service, preferred
from .prompts import wish
from .request_schemas import EditForm, ImageFields, PictureFields

ARRAY_IMAGES, ARRAY_BYTES = 128, 2**26  # largest answer that is an array: all its seeds are in one header
SOON_PIXELS = 2**16  # of a PNG that is written in a millisecond; the largest take 15 to 30 ms
_ERRORS = {400: InvalidRequest, 413: TooLarge, 415: UnsupportedMedia}


class PictureRequest:
    """What every request about pictures asks for, checked: model, class, size and form of the answer, time."""

    def __init__(self, service: Service, http: Request, asked: PictureFields) -> None:
        self.warnings: list[str] = []
        self.served = service.find(asked.model)
        self.config: ModelConfig = self.served.decoder.config
        http.state.model = self.served.name  # for the log
        if asked.response_format not in (None, "b64_json", "url"):
            raise InvalidRequest(f"response_format must be b64_json or url, got {shown(asked.response_format)}",
                                 param="response_format")
        try:
            self.frame = encode.frame_of(asked.size, self.config)
        except ValueError as error:
            raise InvalidRequest(str(error), param="size") from error
        self.size = self.frame.size
        if self.frame.warning:
            self.warnings.append(self.frame.warning)
        self.accepted = preferred(http.headers.get("accept", ""))
        self.alone = encode.MEDIA_TYPES.get(self.accepted)  # the picture itself is the answer, in this format
        allowed = http.state.timeout_s
        if asked.timeout is not None and allowed not in (math.inf, asked.timeout):
            raise InvalidRequest(f"timeout {asked.timeout:g} contradicts {HEADER}: {allowed:g}; send one of them",
                                 param="timeout")
        self.timeout_s = math.inf if asked.timeout is None else asked.timeout
        self.revised_prompt: str | None = None
        self.label = self._label(asked.label, asked.prompt)
        if unknown := asked.unknown:
            names = [sendable(name)[:40] for name in sorted(unknown)]
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            self.warnings.append(f"ignored: {', '.join(names[:20])}{more}")

    def _label(self, label: int | str | None, prompt: str | None) -> int | None:
        """The class asked for by label, or by a prompt that names one."""
        checkpoint = self.served.decoder.checkpoint
        names = checkpoint.class_names
        with naming_fields():
            chosen = class_of(label, checkpoint)
        text = (prompt or "").strip()
        if not text:
            return chosen
        asked = wish(text, names)
        if asked.label is not None and chosen not in (None, asked.label):
            raise InvalidRequest(f"label {shown(label)} contradicts prompt {shown(text)}; send one of them",
                                 param="label")
        if asked.warning:
            self.warnings.append(asked.warning)
        if asked.label is None and chosen is not None:
            self.revised_prompt = names[chosen]
            return chosen
        self.revised_prompt = asked.revised
        return asked.label

    @property
    def soon(self) -> bool:
        """Whether a picture of the answer is encoded in a moment."""
        return self.frame.width * self.frame.height <= SOON_PIXELS


class ImageRequest(PictureRequest):
    """A request for images: also how many, by which method and from which seed."""

    def __init__(self, service: Service, http: Request, asked: ImageFields) -> None:
        self.served = service.find(asked.model)
        checkpoint, n = self.served.decoder.checkpoint, 1 if asked.n is None else asked.n
        method, particles = (asked.method, asked.particles) if isinstance(asked, EditForm) else (None, None)
        self.bulk = asked.priority == "bulk"
        max_n = service.max_images(self.served, bulk=self.bulk)
        if not 1 <= n <= max_n:
            raise InvalidRequest(f"n must be 1..{max_n}, got {shown(asked.n)}", param="n")
        with naming_fields():
            planned = plan(checkpoint, n, completes=isinstance(asked, EditForm), seed=asked.seed,
                         temperature=asked.temperature, candidates=asked.candidates, attempts=asked.attempts,
                         method=method, particles=particles, limit=max_n, slots=self.served.room.slots)
        http.state.images = planned.images  # for the log
        super().__init__(service, http, asked)
        self.plan = replace(planned, label=self.label)
        self.warnings += checkpoint.temperature_warnings(planned.temperature)
        self.stream = bool(asked.stream)
        self.as_url = asked.response_format == "url" and not self.stream
        if asked.response_format == "url" and self.stream:
            self.warnings.append("response_format was ignored: the events of a stream always have b64_json")
        self.array = self.accepted == encode.NPY  # all pictures are the answer, as one array
        self._check_accepted(asked)
        self.format: encode.Format = self.alone or asked.output_format or "png"
        if planned.chooses and self.stream and asked.partial_images:
            raise InvalidRequest("with candidates or particles, a stream has no partial images, since the best are "
                                 "known only when all are drawn; leave out partial_images, got "
                                 f"{shown(asked.partial_images)}", param="partial_images")
        self.partial_images = 0 if planned.chooses else asked.partial_images
        self._overlay: Overlay | None = None
        self._occluded: pictures.Occluded | None = None  # the picture as the model gets it
        self._kept: pictures.Occluded | None = None      # the picture that the answer keeps, if more of it is known
        self._judged: dict[int, dict[str, float]] = {}   # by index, of candidates that are ranked by their likelihoods

    def _check_accepted(self, asked: ImageFields) -> None:
        """Raise InvalidRequest for a media type that contradicts other fields."""
        if (self.alone or self.array) and asked.output_format not in (None, self.alone):
            raise InvalidRequest(f"output_format {asked.output_format} contradicts Accept: {self.accepted}; send one "
                                 "of them", param="output_format")
        if self.alone and (self.plan.answers != 1 or self.stream):
            raise InvalidRequest(f"Accept: {self.accepted} returns one picture, so it needs n=1 and no stream, got "
                                 f"n={self.plan.answers}, stream={str(self.stream).lower()}", param="n")
        if self.array:
            self._check_array()

    def _check_array(self) -> None:
        """Raise InvalidRequest for an array that is too large, or a stream."""
        if self.stream:
            raise InvalidRequest(f"Accept: {encode.NPY} returns all pictures at once, so it works only without stream",
                                 param="stream")
        n = self.plan.answers
        size = n * math.prod(self.shape)
        if n > ARRAY_IMAGES or size > ARRAY_BYTES:
            raise InvalidRequest(f"an array has at most {ARRAY_IMAGES} images and {ARRAY_BYTES:,} bytes; {n} "
                                 f"images of {self.size} have {size:,} bytes. Request fewer or smaller "
                                 "images", param="n")

    def demand(self, known: int | None = None) -> Demand:
        """What it needs. known: tokens that need no step; None: its picture is not decoded yet."""
        plan = self.plan
        return Demand(plan.images, bulk=self.bulk, stream=self.stream and not plan.chooses, known=known,
                      group=plan.group, ranked=plan.candidates is not None and not plan.attempts,
                      attempts=plan.attempts)

    def specs(self) -> list[ImageSpec]:
        return self.plan.specs() if self._occluded is None else self.plan.specs(self.occluded.canvas,
                                                                                self.occluded.known)

    def best(self, drawn: list[ImageDone]) -> list[ImageDone]:
        """The n best of all candidates, which are the answer, the best first.

        If they are ranked by likelihoods, `facts_of` includes these from then on.
        """
        drawn = sorted(drawn, key=lambda image: image.index)
        if self.config.class_first:
            classes = [image.recognised for image in drawn if image.recognised is not None]
            return [drawn[index] for index in recognised(classes, self.plan.answers)]
        found = [likelihoods(image.log_probs, self.occluded.known) for image in drawn if image.log_probs is not None]
        self._judged = {image.index: one._asdict() for image, one in zip(drawn, found, strict=True)}
        shown_images = [self._with_kept(image.canvas) for image in drawn]
        return [drawn[index] for index in best(shown_images, [one.score for one in found], self.plan.answers)]

    def facts_of(self, image: RowsDone | ImageDone) -> dict[str, int | float]:
        """The facts of an answer about one image."""
        found: dict[str, int | float] = {"seed": self.plan.seed_of(image.index)}
        if isinstance(image, ImageDone) and image.estimate is not None:
            found |= image.estimate._asdict()
        if isinstance(image, ImageDone) and (look := image.recognised) is not None:
            found |= {"label": look.label, "confidence": look.confidence}
            if self.plan.attempts > 1:
                found["attempts"] = look.attempts
        return found | self._judged.get(image.index, {})

    def complete(self, upload: Upload, conditioning: Literal["prefix", "full"] | None = None) -> None:
        """Have the hidden part of an upload drawn; if it has an overlay, answer with it. conditioning: see fields."""
        self._occluded = upload.occluded
        self.warnings += map(as_fields, warnings_of(upload, self.served.decoder.checkpoint))
        if conditioning == "prefix":
            if self.plan.particles:
                raise InvalidRequest("method=smc uses the pixels that conditioning=prefix hides; send one of them",
                                     param="conditioning")
            self._kept, self._occluded = upload.occluded, upload.occluded.prefix_only()
        elif conditioning == "full" and upload.occluded.conditioning == "partial" and not self.plan.particles:
            raise InvalidRequest(f"{self.served.name} cannot use all {upload.occluded.known_count} known sub-pixels, "
                                 "since some come after hidden ones; choose a model that is conditional "
                                 "(GET /v1/models), or method=smc, or leave out conditioning", param="conditioning")
        if self.plan.particles:
            with naming_fields():
                check_filter(self.served.decoder, self.occluded.known)
        if (overlay := upload.overlay) is not None:
            if self.array:
                raise InvalidRequest(f"lay_back returns pictures of the upload's size, but Accept: {encode.NPY} "
                                     "requests an array; send one of them", param="lay_back")
            self._overlay, self.size, self.partial_images = overlay, overlay.size, 0

    @property
    def occluded(self) -> pictures.Occluded:
        """The picture as the model gets it. Only after `complete`."""
        assert self._occluded is not None
        return self._occluded

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, channels) of a picture of the answer that is not laid back."""
        return self.frame.height, self.frame.width, self.config.channels

    @property
    def soon(self) -> bool:
        return self._overlay is None and super().soon

    def encode(self, canvas: NDArray[np.uint8], rows: int | None) -> bytes:
        """In the requested format and size; for an array, its sub-pixels. `rows` has no effect if it is laid back."""
        canvas = self._with_kept(canvas)
        if self._overlay is None:
            pixels = encode.framed(canvas, self.config, self.frame, rows)
            return pixels.tobytes() if self.array else encode.encoded(pixels, self.format)
        shape = self.config.height, self.config.width, self.config.channels
        return self._overlay.encoded(canvas.reshape(shape), self.format)

    def _with_kept(self, canvas: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return canvas if self._kept is None else np.where(self._kept.known, self._kept.canvas, canvas)


@contextmanager
def naming_fields() -> Iterator[None]:
    """Raise a ServiceError for an OptionError raised in the block."""
    try:
        yield
    except OptionError as error:
        raise _ERRORS[error.status](str(error), param=error.param) from error
