"""What requests about pictures ask for, checked: their job, and the form of the answer."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
from fastapi import Request as Http
from numpy.typing import NDArray

from linpix.model.checkpoint import folded

from ..engine.attempts import best_of
from ..engine.job import Job, class_of, label_of, new_job
from ..engine.request import Event, Request
from ..errors import InvalidRequest, shown
from ..pictures import encode, uploads
from ..pictures.overlay import Overlay
from .error_handlers import sendable
from .fields import TIMEOUT_HEADER
from .request_schemas import EditForm, ImageFields, PictureFields
from .service import Service, preferred

ARRAY_IMAGES, ARRAY_BYTES = 128, 2**26  # largest answer that is an array: all its seeds are in one header
LONGEST = 1_000  # characters of a prompt that are read
MAX_LISTED = 10  # largest number of words without effect that a warning lists

# Other words for classes of MNIST and CIFAR-10. A model whose classes have other names understands only these names.
_SYNONYMS = {
    "0": "zero nought", "1": "one", "2": "two", "3": "three", "4": "four", "5": "five", "6": "six", "7": "seven",
    "8": "eight", "9": "nine",
    "airplane": "aeroplane plane aircraft jet airliner", "automobile": "car auto sedan", "bird": "birdie sparrow",
    "cat": "kitten kitty tomcat", "deer": "stag doe fawn reindeer", "dog": "puppy hound doggy",
    "frog": "toad treefrog", "horse": "pony foal mare stallion", "ship": "boat vessel ferry steamer yacht",
    "truck": "lorry",
}


class Asked:
    """What every request about pictures asks for: model, class, size and form of the answer, time."""

    job: Job
    overlay: Overlay | None = None  # the upload, in whose holes the pictures are laid

    def __init__(self, http: Http, fields: PictureFields) -> None:
        """Raises ServiceError or OptionError."""
        service: Service = http.app.state.service
        self.http, self.service, self.warnings = http, service, list[str]()
        self.model = service.find(fields.model)
        self.config, self.checkpoint = self.model.config, self.model.checkpoint
        http.state.model = self.model.name  # for the log
        if fields.response_format not in (None, "b64_json", "url"):
            raise InvalidRequest(f"response_format must be b64_json or url, got {shown(fields.response_format)}",
                                 param="response_format")
        try:
            self.frame = encode.frame_of(fields.size, self.config)
        except ValueError as error:
            raise InvalidRequest(str(error), param="size") from error
        if self.frame.warning:
            self.warnings.append(self.frame.warning)
        self.accepted = preferred(http.headers.get("accept", ""))
        self.sole_format = encode.MEDIA_TYPES.get(self.accepted)  # the picture itself is the answer, in this format
        header_s = http.state.timeout_s
        if fields.timeout is not None and header_s not in (math.inf, fields.timeout):
            raise InvalidRequest(f"timeout {fields.timeout:g} contradicts {TIMEOUT_HEADER}: {header_s:g}; send one of "
                                 "them", param="timeout")
        self.timeout_s = min(header_s, fields.timeout or math.inf, service.settings.request_timeout)
        self.revised_prompt: str | None = None
        self.label = self._label(fields.label, fields.prompt)
        if fields.model_extra:
            names = [sendable(name)[:40] for name in sorted(fields.model_extra)]
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            self.warnings.append(f"ignored: {', '.join(names[:20])}{more}")

    def request(self) -> Request:
        """The request for the job, to be admitted."""
        state = self.http.state
        return Request(state.request_id, self.http.url.path.rsplit("/", 1)[1], state.client, self.job, self.model,
                       self.timeout_s, state.began)

    @property
    def encodes_inline(self) -> bool:
        """Whether a picture is encoded in a moment, so that no thread is needed."""
        return self.overlay is None and self.frame.width * self.frame.height <= encode.INLINE_PIXELS

    def _label(self, label: int | str | None, prompt: str | None) -> int | None:
        """The class asked for by label, or by a prompt that names one."""
        names, chosen = self.checkpoint.class_names, class_of(label, self.checkpoint)
        text = (prompt or "").strip()
        if not text:
            return chosen
        wished = wish(text, names)
        if wished.label is not None and chosen not in (None, wished.label):
            raise InvalidRequest(f"label {shown(label)} contradicts prompt {shown(text)}; send one of them",
                                 param="label")
        if wished.warning:
            self.warnings.append(wished.warning)
        if wished.label is None and chosen is not None:
            self.revised_prompt = names[chosen]
            return chosen
        self.revised_prompt = wished.revised
        return wished.label


class AskedImages(Asked):
    """A request for images: also how many, from which seed, and in which form."""

    def __init__(self, http: Http, fields: ImageFields) -> None:
        n = 1 if fields.n is None else fields.n
        http.state.images = fields.candidates or n  # for the log, if the request is refused
        super().__init__(http, fields)
        service, bulk = self.service, fields.priority == "bulk"
        max_n = service.max_images(self.model, bulk=bulk)
        if not 1 <= n <= max_n:
            raise InvalidRequest(f"n must be 1..{max_n}, got {shown(fields.n)}", param="n")
        chooses = fields.candidates is not None or fields.attempts is not None
        able = service.instead_of(self.model, lambda config: config.class_first) if chooses else None
        self.stream = bool(fields.stream)
        self.job = replace(new_job(
            self.checkpoint, n, label=self.label, seed=fields.seed, temperature=fields.temperature,
            candidates=fields.candidates, attempts=fields.attempts, limit=max_n, able=able),
            bulk=bulk, stream=self.stream)
        http.state.images = self.job.images
        self.warnings += self.checkpoint.temperature_warnings(self.job.temperature)
        usual = "url" if (fields.model or "").startswith("dall-e") else None  # tools made for DALL-E read url
        self.as_url = (fields.response_format or usual) == "url" and not self.stream
        if fields.response_format == "url" and self.stream:
            self.warnings.append("response_format was ignored: the events of a stream always have b64_json")
        self.array = self.accepted == encode.NPY  # all pictures are the answer, as one array
        self.format: encode.Format = self.sole_format or fields.output_format or "png"
        self.kept: uploads.Upload | None = None  # what the answer keeps, if that is more than the model gets
        self.partial_images = fields.partial_images
        if self.sole_format or self.array:
            self._check_accepted(fields)
        if self.job.candidates:
            if self.stream and fields.partial_images:
                raise InvalidRequest("with candidates, a stream has no partial images, since the best are known only "
                                     "when all are drawn; leave out partial_images, got "
                                     f"{shown(fields.partial_images)}", param="partial_images")
            self.partial_images = 0

    def _check_accepted(self, fields: ImageFields) -> None:
        """Raise InvalidRequest for a media type that contradicts other fields."""
        n = self.job.answers
        if fields.output_format not in (None, self.sole_format):
            raise InvalidRequest(f"output_format {fields.output_format} contradicts Accept: {self.accepted}; send one "
                                 "of them", param="output_format")
        if self.sole_format and (n != 1 or self.stream):
            raise InvalidRequest(f"Accept: {self.accepted} returns one picture, so it needs n=1 and no stream, got "
                                 f"n={n}, stream={str(self.stream).lower()}", param="n")
        if self.array and self.stream:
            raise InvalidRequest(f"Accept: {encode.NPY} returns all pictures at once, so it works only without stream",
                                 param="stream")
        size = n * math.prod(self.shape) if self.array else 0
        if self.array and (n > ARRAY_IMAGES or size > ARRAY_BYTES):
            raise InvalidRequest(f"an array has at most {ARRAY_IMAGES} images and {ARRAY_BYTES:,} bytes; {n} "
                                 f"images of {self.frame.size} have {size:,} bytes. Request fewer or smaller "
                                 "images", param="n")

    def check_edit(self, form: EditForm) -> None:
        """Raise InvalidRequest or OptionError for options of an edit that contradict each other or its model."""
        if form.lay_back and self.frame.width != self.config.width:
            raise InvalidRequest("lay_back returns pictures of the upload's size; leave out size, got "
                                 f"{shown(form.size)}", param="size")
        if form.lay_back and self.partial_images:
            raise InvalidRequest("with lay_back, a stream has no partial images; leave out partial_images, got "
                                 f"{shown(self.partial_images)}", param="partial_images")
        if form.lay_back and self.array:
            raise InvalidRequest(f"lay_back returns pictures of the upload's size, but Accept: {encode.NPY} "
                                 "requests an array; send one of them", param="lay_back")
        if form.prepare == "mnist":
            uploads.check_preparable(self.config)

    def complete(self, upload: uploads.Upload, conditioning: Literal["prefix", "full"] | None = None
                 ) -> uploads.Upload:
        """Have the hidden part of an upload drawn. Returns it as the model gets it. conditioning: see fields.

        Raises InvalidRequest.
        """
        self.warnings += uploads.warnings_of(upload, self.checkpoint)
        if conditioning == "prefix":
            self.kept, upload = upload, upload.prefix_only()
        elif upload.conditioning == "partial":
            able = self.service.instead_of(self.model, lambda config: bool(config.patch))
            if conditioning == "full":
                raise InvalidRequest(f"{self.model.name} cannot use all {int(upload.known.sum())} known sub-pixels, "
                                     "since some come after hidden ones; choose "
                                     f"{able or 'a model that is conditional'} (GET /v1/models), or leave out "
                                     "conditioning", param="conditioning")
            self.warnings.append(f"{self.model.name} does not use known pixels for what it draws before them; "
                                 + (f"{able} uses all known pixels" if able else
                                    "a model that is conditional would use all of them, but none is loaded here"))
        self.overlay = upload.overlay
        if upload.overlay is not None:
            self.partial_images = 0
        self.job = replace(self.job, canvas=upload.canvas, known=upload.known)
        return upload

    # --- the form of the answer ---

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, channels) of a picture that is not laid back."""
        return self.frame.height, self.frame.width, self.config.channels

    def best(self, candidates: Sequence[Event]) -> list[Event]:
        """The best of all candidates, the best first."""
        candidates = sorted(candidates, key=lambda event: event.image)
        return [candidates[index] for index in best_of([event.recognised for event in candidates
                                                        if event.recognised is not None], self.job.answers)]

    def facts_of(self, event: Event) -> dict[str, int | float | str]:
        """What an answer says of one image."""
        facts: dict[str, int | float | str] = {"seed": self.job.seed + event.image}
        if (recognised := event.recognised) is not None:
            facts |= {"label": label_of(recognised.label, self.checkpoint), "confidence": recognised.confidence}
            if self.job.attempts > 1:
                facts["attempts"] = recognised.attempts
        return facts

    def encode(self, event: Event) -> bytes:
        """An image in the requested format and size; for an array, its sub-pixels. Unfinished rows are black."""
        canvas = event.canvas
        if self.kept is not None:
            canvas = np.where(self.kept.known, self.kept.canvas, canvas)
        picture = canvas.reshape(self.config.height, self.config.width, self.config.channels)
        if self.overlay is not None:
            return self.overlay.encoded(picture, self.format)
        pixels: NDArray[np.uint8] = encode.framed(picture, self.frame, None if event.done else event.rows)
        return pixels.tobytes() if self.array else encode.encoded(pixels, self.format)


# --- prompts ---

class Wish(NamedTuple):
    """What a prompt asks for, as far as a model can draw it."""

    label: int | None
    revised: str   # what the prompt was taken for, for clients that show `revised_prompt`
    warning: str   # about words without effect; empty if there are none


def wish(prompt: str, names: Sequence[str]) -> Wish:
    """names: of the model's classes, in the order of their indices. A prompt that is one index asks for that class."""
    text, *known = map(folded, (prompt[:LONGEST], *names))
    exact = known.index(text) if text in known else int(text) if text in map(str, range(len(names))) else None
    if exact is not None:
        return Wish(exact, names[exact], "")
    said = _spaced(text)
    found = [(said.find(named), -len(named), label, named) for label, name in enumerate(known)
             for named in map(_spaced, (name, *_SYNONYMS.get(name, "").split())) if named.strip() and named in said]
    if not found:
        return Wish(None, "an image of any class" if names else "an image", "prompt was ignored: it names no class of "
                    f"this model{'; classes: ' if names else ''}{', '.join(names)}")
    _, _, label, named = min(found)  # the first one; of several that begin there, the longest
    others = [word for word in dict.fromkeys(said.split()) if word not in named.split()]
    listed = sendable(", ".join(word[:40] for word in others[:MAX_LISTED])) + (", ..." if others[MAX_LISTED:] else "")
    return Wish(label, names[label], f"prompt: these words have no effect: {listed}" if others else "")


def _spaced(text: str) -> str:
    """The words of a text, each between two spaces; a number keeps its sign and what follows its point."""
    return " ".join(["", *re.findall(r"(?<!\w)-?\d+\.\d+|(?<!\w)-\d+|[^\W_]+", text), ""])
