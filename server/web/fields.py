"""Fields that bodies, answers and statuses share, each defined once; examples are of the shipped `mnist-small`."""

import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from linpix.model.attempts import MAX_ATTEMPTS
from linpix.model.philox import MAX_SEED

from ..errors import InvalidRequest, shown
from ..pictures import encode
from ..pictures.uploads import Preparation


def _plain(value: object) -> object:
    if isinstance(value, str) and "_" in value:
        raise PydanticCustomError("number", "a number must not have underscores")
    return value


Plain = BeforeValidator(_plain)  # for numbers in forms and headers: pydantic reads 1_0 as 10

# --- requests: bodies, forms and headers; all may be left out ---

Model = Annotated[str | None, Field(examples=["mnist-small"], description="a model listed by /v1/models; default: the "
    "first one")]
Prompt = Annotated[str | None, Field(examples=["7"], description="words that name a class, such as 7, seven or a green "
    "frog; the first one counts, and warnings list all other words; default: any class")]
Label = Annotated[int | str | None, Field(examples=[7], description="class to draw, by index or name; default: any "
    "class")]
Count = Annotated[int | None, Field(ge=1, examples=[1], description="number of images, up to max_n of /v1/status; "
    "default: 1"), Plain]
Candidates = Annotated[int | None, Field(ge=1, examples=[8], description="draw this many images and answer with the "
    "best n of them; from n to max_n of /v1/status; only for models that draw the class first; default: draw n images "
    "and answer with all"), Plain]
Attempts = Annotated[int | None, Field(ge=1, le=MAX_ATTEMPTS, examples=[1], description="draw an image up to this many "
    "times, until the model recognises its class and it is not torn into pieces; only for models that draw the class "
    "first; default: the model's own, in /v1/models; 1 with candidates and at temperature 0"), Plain]
Size = Annotated[str | None, Field(examples=["native"], description="width x height in pixels, from the model's own "
    f"size to {encode.LARGEST_SIDE}x{encode.LARGEST_SIDE}: the picture is enlarged by the largest whole factor that "
    "fits, by nearest neighbour, and placed in the middle, and its edge pixels fill the rest; default, auto and "
    "native: the model's own size")]
Format = Annotated[str | None, Field(examples=["b64_json"], description="b64_json: the picture in base64; url: the "
    "picture as a data URL; default: b64_json, but url for an alias that begins with dall-e, as in OpenAI's API")]
OutputFormat = Annotated[encode.Format | None, Field(examples=["png"], description="format of the pictures: png (the "
    "default), webp (lossless) or jpeg (lossy)")]
Stream = Annotated[bool | None, Field(examples=[False], description="answer with server-sent events while images are "
    "drawn; default: one answer when all images are done")]
Partials = Annotated[int | None, Field(ge=0, examples=[3], description="number of unfinished versions of each image in "
    "a stream, evenly spread; default: one per finished image row"), Plain]
Seed = Annotated[int | None, Field(ge=0, le=MAX_SEED, examples=[1], description="image i uses seed + i; default: a "
    "random seed"), Plain]
Temperature = Annotated[float | None, Field(ge=0, le=10, allow_inf_nan=False, examples=[1.0], description="1: as "
    "trained; lower: less varied; higher: more varied; 0: no randomness; default: the model's own; /v1/models lists it "
    "and the useful range"), Plain]
Timeout = Annotated[float | None, Field(gt=0, allow_inf_nan=False, examples=[600.0], description="seconds within which "
    "the request must be finished, else the answer is 504; default: the server's limit"), Plain]
Priority = Annotated[Literal["interactive", "bulk"] | None, Field(examples=["interactive"], description="interactive "
    "(the default): drawn first; bulk: gets one slot in four")]

KeptRows = Annotated[int | None, Field(examples=[14], description="image rows of the model's size to keep; the rows "
    "below are filled in; not together with a mask"), Plain]

Prepare = Annotated[Preparation | None, Field(examples=["none"], description="mnist: find a dark or light digit in a "
    "photograph or scan, and give it the size and position of MNIST digits; only for models of 28x28 grey pixels; none "
    "(the default): use the middle of the picture, in the model's aspect ratio")]
LayBack = Annotated[bool | None, Field(examples=[False], description="answer with the upload at its own size, at most "
    "1024 pixels a side, with its hidden parts filled in; not together with size or partial_images; default: answer "
    "with the model's picture")]

Conditioning = Annotated[Literal["prefix", "full"] | None, Field(examples=["prefix"], description="prefix: draw as if "
    "everything from the first hole on were hidden; the answer still keeps the known pixels there; full: refuse the "
    "request if the model cannot use all known pixels; default: use all known pixels that the model can use")]

TIMEOUT_HEADER = "X-Request-Timeout"
_timeout: TypeAdapter[float | None] = TypeAdapter(Timeout)
_schema = _timeout.json_schema()
TIMEOUT_PARAMETER: dict[str, Any] = {"name": TIMEOUT_HEADER, "in": "header", "required": False,
                                     "schema": _schema["anyOf"][0], "description": _schema["description"],
                                     "example": _schema["examples"][0]}


def timeout_of(text: str | None) -> float:
    """The seconds that the header X-Request-Timeout allows; inf without it. Raises InvalidRequest."""
    try:
        seconds = _timeout.validate_python(text)
    except ValidationError:
        raise InvalidRequest(f"{TIMEOUT_HEADER} must be a number of seconds greater than 0, got {shown(text)}",
                             param=TIMEOUT_HEADER) from None
    return math.inf if seconds is None else seconds


# --- answers, events and statuses ---

T = TypeVar("T")
# for a field that is absent where it does not apply, and never null
Maybe = Annotated[T | SkipJsonSchema[None], Field(exclude_if=lambda value: value is None,
                                                  json_schema_extra=lambda field: field.pop("default"))]

Name = Annotated[str, Field(examples=["mnist-small"], description="name of the model")]
Digest = Annotated[str, Field(examples=["3a5c28c7a2e8abb38d47ccf109d3683aff7fa3209f51d8bf853d3eefa96e0acc"],
                              description="SHA-256 of the checkpoint's files, hexadecimal")]
Engine = Annotated[str, Field(examples=["compiled"], description="compiled (LinPix's kernels), eager (torch alone), or "
    "eager+operator (torch, with LinPix's kernel for the attention step)")]
Precision = Annotated[str, Field(examples=["bf16"], description="precision of matrix products: fp32, bf16 or int8")]
Device = Annotated[str, Field(examples=["cpu"], description="cpu or cuda")]
State = Annotated[str, Field(examples=["fp32"], description="format of the recurrent states: fp32; or, on a GPU with "
    "--state and --defer, for example fp16/8")]
Slots = Annotated[int, Field(examples=[64], description="images that can be decoded at once")]
Picture = Annotated[str, Field(examples=["iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAAAAABX..."], description="the picture in "
    "base64, in the format of output_format")]
PictureURL = Annotated[str, Field(examples=["data:image/png;base64,iVBORw0KGgo..."], description="the picture as a "
    "data URL; present instead of b64_json with response_format=url")]
RevisedPrompt = Annotated[str, Field(examples=["7"], description="only for requests with a prompt: what was drawn, one "
    "class or an image of any class")]
CandidatesDrawn = Annotated[int | None, Field(examples=[8], description="number of images that were drawn; the answer "
    "has the best of them; null without candidates")]
PartialIndex = Annotated[int, Field(examples=[0], description="number of the partial image, from 0; absent for "
    "completed images")]
FinishedRows = Annotated[int, Field(examples=[14], description="number of finished image rows; the others are black; "
    "absent for completed images")]
DrawnSeed = Annotated[int, Field(examples=[1], description="seed that draws this image again, alone, with the same "
    "number of attempts")]
Confidence = Annotated[float, Field(examples=[0.97], description="probability that the model gives to the image's "
    "class after it has drawn the whole image; present with candidates or attempts, for models that draw the class "
    "first")]
LabelDrawn = Annotated[int | str, Field(examples=[7], description="class that the image was drawn as: the requested "
    "one, or the one that the model drew first, by its index; by its name, if that index is the name of another class; "
    "present with confidence")]
AttemptsMade = Annotated[int, Field(examples=[1], description="number of times that this image was drawn; absent if "
    "one attempt was requested")]
ComparisonId = Annotated[str, Field(examples=["cmp-1"], description="id from the answer of POST /v1/compare")]
Phase = Annotated[Literal["running", "completed", "cancelled", "failed"],
                  Field(examples=["running"], description="running, or how it ended")]
