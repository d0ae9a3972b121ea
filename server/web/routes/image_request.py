"""What generations and edits have in common: the fields of a request, checked."""

import math
import secrets

from fastapi import Request

from model.config import ModelConfig
from model.philox import MAX_SEED
from server.engine.decode.decoder import ImageSpec
from server.errors import (
    InvalidRequest,
    ServiceError,
    TooLarge,
    UnsupportedMedia,
    shown,
)
from server.pictures import pictures
from server.web.admission import HEADER, timeout_of
from server.web.error_handlers import sendable
from server.web.service import Service, preferred

_PICTURE_ERRORS = {400: InvalidRequest, 413: TooLarge, 415: UnsupportedMedia}


class ImageRequest:
    """What generations and edits have in common, checked: model, count, seed, temperature, label, form of answer."""

    def __init__(self, service: Service, http: Request, *, model: str | None, n: int | None, size: str | None,
                 response_format: str | None, stream: bool | None, partial_images: int | None, seed: int | None,
                 temperature: float | None, label: int | str | None, prompt: str | None, timeout: float | None,
                 priority: str | None, ignored: list[str]) -> None:
        self.warnings: list[str] = []
        self.served = service.find(model)
        self.config: ModelConfig = self.served.decoder.config
        self.n = 1 if n is None else n
        self.bulk = priority == "bulk"
        max_n = service.max_images(self.served, bulk=self.bulk)
        if not 1 <= self.n <= max_n:
            raise InvalidRequest(f"n must be 1..{max_n}, got {shown(n)}", param="n")
        http.state.model, http.state.images = self.served.name, self.n  # for the log
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
        checkpoint = self.served.decoder.checkpoint
        names, chosen = checkpoint.class_names, None
        if label is not None:
            chosen = checkpoint.class_of(str(label))
            if chosen is None:
                allowed = f"0..{len(names) - 1} or one of {', '.join(names)}" if names else "none: it knows no classes"
                raise InvalidRequest(f"label must be a class of {self.served.name}: {allowed}; got {shown(label)}",
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


def picture_error(error: pictures.PictureError) -> ServiceError:
    return _PICTURE_ERRORS[error.status](str(error), param=error.param)
