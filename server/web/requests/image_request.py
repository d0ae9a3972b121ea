"""What generations, edits and likelihoods ask for, checked."""

import math
from dataclasses import replace
from typing import Literal

from fastapi import Request

from linpix.model.config import ModelConfig

from ...engine.answers.plan import class_of, plan
from ...engine.ledger.ticket import Demand
from ...errors import InvalidRequest, shown
from ...pictures import encode
from ...pictures.pictures import Occluded
from ...pictures.uploads import Upload, warnings_of
from ..admission import HEADER
from ..error_handlers import sendable
from ..service import Service, preferred
from .answer import Answer
from .prompts import wish
from .request_schemas import ImageFields, PictureFields

ARRAY_IMAGES, ARRAY_BYTES = 128, 2**26  # largest answer that is an array: all its seeds are in one header


class PictureRequest:
    """What every request about pictures asks for, checked: model, class, size and form of the answer, time."""

    def __init__(self, service: Service, http: Request, asked: PictureFields) -> None:
        """Raises ServiceError or OptionError."""
        self.warnings: list[str] = []
        self.served = service.find(asked.model)
        self.config: ModelConfig = self.served.config
        http.state.model = self.served.name  # for the log
        if asked.response_format not in (None, "b64_json", "url"):
            raise InvalidRequest(f"response_format must be b64_json or url, got {shown(asked.response_format)}",
                                 param="response_format")
        try:
            self.frame = encode.frame_of(asked.size, self.config)
        except ValueError as error:
            raise InvalidRequest(str(error), param="size") from error
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
        if asked.model_extra:
            names = [sendable(name)[:40] for name in sorted(asked.model_extra)]
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            self.warnings.append(f"ignored: {', '.join(names[:20])}{more}")

    def _label(self, label: int | str | None, prompt: str | None) -> int | None:
        """The class asked for by label, or by a prompt that names one."""
        checkpoint = self.served.checkpoint
        names, chosen = checkpoint.class_names, class_of(label, checkpoint)
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


class ImageRequest(PictureRequest):
    """A request for images: also how many, by which method and from which seed."""

    def __init__(self, service: Service, http: Request, asked: ImageFields) -> None:
        n = 1 if asked.n is None else asked.n
        http.state.images = asked.candidates or n  # for the log, if the request is refused
        super().__init__(service, http, asked)
        checkpoint = self.served.checkpoint
        self.bulk = asked.priority == "bulk"
        max_n = service.max_images(self.served, bulk=self.bulk)
        if not 1 <= n <= max_n:
            raise InvalidRequest(f"n must be 1..{max_n}, got {shown(asked.n)}", param="n")
        chooses = asked.candidates is not None or asked.attempts is not None
        able = service.instead_of(self.served, lambda config: config.class_first) if chooses else None
        self.plan = plan(checkpoint, n, label=self.label, seed=asked.seed, temperature=asked.temperature,
                         candidates=asked.candidates, attempts=asked.attempts, limit=max_n, able=able)
        http.state.images = self.plan.images
        self.warnings += checkpoint.temperature_warnings(self.plan.temperature)
        self.stream = bool(asked.stream)
        self.as_url = asked.response_format == "url" and not self.stream
        if asked.response_format == "url" and self.stream:
            self.warnings.append("response_format was ignored: the events of a stream always have b64_json")
        self.array = self.accepted == encode.NPY  # all pictures are the answer, as one array
        self.format: encode.Format = self.alone or asked.output_format or "png"
        self.answer = Answer(self.plan, self.config, self.frame, self.format, self.array)
        if self.alone or self.array:
            self._check_accepted(asked)
        if asked.candidates is not None and self.stream and asked.partial_images:
            raise InvalidRequest("with candidates, a stream has no partial images, since the best are known only when "
                                 f"all are drawn; leave out partial_images, got {shown(asked.partial_images)}",
                                 param="partial_images")
        self.partial_images = asked.partial_images if asked.candidates is None else 0

    def _check_accepted(self, asked: ImageFields) -> None:
        """Raise InvalidRequest for a media type that contradicts other fields."""
        if asked.output_format not in (None, self.alone):
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
        size = n * math.prod(self.answer.shape)
        if n > ARRAY_IMAGES or size > ARRAY_BYTES:
            raise InvalidRequest(f"an array has at most {ARRAY_IMAGES} images and {ARRAY_BYTES:,} bytes; {n} "
                                 f"images of {self.frame.size} have {size:,} bytes. Request fewer or smaller "
                                 "images", param="n")

    def demand(self, known: int | None = None) -> Demand:
        """What it needs. known: tokens that need no step; None: its picture is not decoded yet."""
        planned = self.plan
        return Demand(planned.images, bulk=self.bulk, stream=self.stream and planned.candidates is None, known=known,
                      attempts=planned.attempts)

    def complete(self, service: Service, upload: Upload, conditioning: Literal["prefix", "full"] | None = None
                 ) -> Occluded:
        """Have the hidden part of an upload drawn. Returns it as the model gets it. conditioning: see fields.

        Raises InvalidRequest or OptionError.
        """
        self.warnings += warnings_of(upload, self.served.checkpoint)
        occluded = upload.occluded
        if conditioning == "prefix":
            occluded = occluded.prefix_only()
        elif occluded.conditioning == "partial":
            able = service.instead_of(self.served, lambda config: bool(config.patch))
            if conditioning == "full":
                raise InvalidRequest(f"{self.served.name} cannot use all {occluded.known_count} known sub-pixels, "
                                     "since some come after hidden ones; choose "
                                     f"{able or 'a model that is conditional'} (GET /v1/models), or leave out "
                                     "conditioning", param="conditioning")
            self.warnings.append(f"{self.served.name} does not use known pixels for what it draws before them; "
                                 + (f"{able} uses all known pixels" if able else
                                    "a model that is conditional would use all of them, but none is loaded here"))
        if upload.overlay is not None:
            if self.array:
                raise InvalidRequest(f"lay_back returns pictures of the upload's size, but Accept: {encode.NPY} "
                                     "requests an array; send one of them", param="lay_back")
            self.partial_images = 0
        self.answer = replace(self.answer, occluded=occluded, overlay=upload.overlay,
                              kept=None if occluded is upload.occluded else upload.occluded)
        return occluded
