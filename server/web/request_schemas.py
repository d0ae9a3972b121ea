"""Bodies of requests, and the header with a deadline. All fields may be left out; examples are of
the shipped `mnist-small`. The images routes ignore unknown fields, and their answers warn of them.
"""

import math
from typing import Annotated, Any, Literal

from fastapi import UploadFile
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.json_schema import WithJsonSchema

from linpix.model.attempts import MAX_ATTEMPTS
from linpix.model.philox import MAX_SEED

from ..compare.backends import ATTENTION
from ..errors import InvalidRequest, shown
from ..pictures import encode
from ..pictures.uploads import Preparation
from .schemas import Described

# as generators of clients know files
_FILE = WithJsonSchema({"type": "string", "format": "binary"})
_Model = Annotated[
    str | None,
    Field(
        examples=["mnist-small"], description="a model listed by /v1/models; default: the first one"
    ),
]
_Timeout = Annotated[
    float | None,
    Field(
        gt=0,
        allow_inf_nan=False,
        examples=[600.0],
        description=(
            "seconds within which the request must be finished, else the answer is 504; default:"
            " the server's limit"
        ),
    ),
]
_KeepRows = Annotated[
    int | None,
    Field(
        examples=[14],
        description=(
            "image rows of the model's size "
            "to keep; the rows below are filled in; not together with a mask"
        ),
    ),
]

# a 7, as a PNG of 28x28
_SEVEN = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAABwAAAAcAQAAAABaduI5AAAAO0lEQVR42mNg"
    "wAsY//9gYGJgYGFgYmD4w8DAwGDBwAQlGBgYGBgeQFhMDIxwFtMBmCw7A0wMweLDYxkAEJcGIri9gOoA"
    "AAAASUVORK5CYII="
)

TIMEOUT_HEADER = "X-Request-Timeout"
_timeout: TypeAdapter[float | None] = TypeAdapter(_Timeout)
_schema = _timeout.json_schema()
TIMEOUT_PARAMETER: dict[str, Any] = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "required": False,
    "schema": _schema["anyOf"][0],
    "description": _schema["description"],
    "example": _schema["examples"][0],
}


def timeout_of(text: str) -> float:
    """The seconds that the header X-Request-Timeout allows. Raises InvalidRequest."""
    try:
        # it would read 1_0 as 10
        return _timeout.validate_python(text.replace("_", "x")) or math.inf
    except ValidationError:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER} must be a number of seconds greater than 0, got {shown(text)}",
            param=TIMEOUT_HEADER,
        ) from None


class PictureFields(Described):
    """The fields of every route that answers with pictures, or about one."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra=lambda schema: schema.pop("additionalProperties")
    )

    # an empty text is an absent field, as in forms
    _absent = model_validator(mode="before")(
        lambda cls, given: (
            {
                name: value
                for name, value in given.items()
                if value != "" or name not in cls.model_fields
            }
            if isinstance(given, dict)
            else given
        )
    )

    model: _Model = None
    prompt: str | None = Field(None, examples=["7"])
    """words that name a class, such as 7, seven or a green frog; the first one counts, and warnings
    list all other words; default: any class"""
    size: str | None = Field(
        None,
        examples=["native"],
        description=(
            "width x height in pixels, from the model's own size to"
            f" {encode.LARGEST_SIDE}x{encode.LARGEST_SIDE}: the picture is enlarged by the largest"
            " whole factor that fits, by nearest neighbour, and placed in the middle, and its edge"
            " pixels fill the rest; default, auto and native: the model's own size"
        ),
    )
    response_format: str | None = Field(None, examples=["b64_json"])
    """b64_json: the picture in base64; url: the picture as a data URL; default: b64_json, but url
    for an alias that begins with dall-e, as in OpenAI's API"""
    label: int | str | None = Field(None, examples=[7])
    """class to draw, by index or name; default: any class"""
    timeout: _Timeout = None


class GenerateBody(PictureFields):
    """Unknown fields are ignored, and the answer's warnings name them."""

    model_config = ConfigDict(strict=True)

    n: int | None = Field(None, ge=1, examples=[1])
    """number of images, up to max_n of /v1/status; default: 1"""
    candidates: int | None = Field(None, ge=1, examples=[8])
    """draw this many images and answer with the best n of them; from n to max_n of /v1/status; only
    for models that draw the class first; default: draw n images and answer with all"""
    attempts: int | None = Field(None, ge=1, le=MAX_ATTEMPTS, examples=[1])
    """draw an image up to this many times, until the model recognises its class and it is not torn
    into pieces; only for models that draw the class first; default: the model's own, in /v1/models;
    1 with candidates and at temperature 0"""
    output_format: encode.Format | None = Field(None, examples=["png"])
    """format of the pictures: png (the default), webp (lossless) or jpeg (lossy)"""
    stream: bool | None = Field(None, examples=[False])
    """answer with server-sent events while images are drawn; default: one answer when all images
    are done"""
    partial_images: int | None = Field(None, ge=0, examples=[3])
    """number of unfinished versions of each image in a stream, evenly spread; default: one per
    finished image row; fewer where encoding a large picture takes longer than drawing a row"""
    seed: int | None = Field(None, ge=0, le=MAX_SEED, examples=[1])
    """image i uses seed + i; default: a random seed"""
    temperature: float | None = Field(None, ge=0, le=10, allow_inf_nan=False, examples=[1.0])
    """1: as trained; lower: less varied; higher: more varied; 0: no randomness; default: the
    model's own; /v1/models lists it and the useful range"""
    priority: Literal["interactive", "bulk"] | None = Field(None, examples=["interactive"])
    """interactive (the default): drawn first; bulk: gets one slot in four"""


class UploadFields(Described):
    """A picture, and what of it is hidden."""

    image: Annotated[UploadFile | None, _FILE] = Field(None, examples=["seven.png"])
    """PNG, JPEG or WebP, not smaller than the model's size; without mask and keep_rows, its
    transparent parts are hidden; some clients name it image[]"""
    mask: Annotated[UploadFile | None, _FILE] = Field(None, examples=["mask.png"])
    """picture whose transparent parts say what is hidden, instead of the transparent parts of
    image"""
    keep_rows: _KeepRows = None


class EditFields(GenerateBody):
    """What an edit has besides its pictures."""

    prepare: Preparation | None = Field(None, examples=["none"])
    """mnist: find a dark or light digit in a photograph or scan, and give it the size and position
    of MNIST digits; only for models of 28x28 grey pixels; none (the default): use the middle of the
    picture, in the model's aspect ratio"""
    lay_back: bool | None = Field(None, examples=[False])
    """answer with the upload at its own size, at most 1024 pixels a side, with its hidden parts
    filled in; what is transparent and not to be filled stays so, but in jpeg; not together with
    size or partial_images; default: answer with the model's picture"""
    conditioning: Literal["prefix", "full"] | None = Field(None, examples=["prefix"])
    """prefix: draw as if everything from the first hole on were hidden; the answer still keeps the
    known pixels there; full: refuse the request if the model cannot use all known pixels; default:
    use all known pixels that the model can use"""


class EditForm(EditFields, UploadFields):
    """What is hidden is drawn. Unknown fields are ignored, and the answer's warnings name them."""

    model_config = ConfigDict(strict=False)


class PictureReference(Described):
    """A picture in JSON."""

    model_config = ConfigDict(strict=True)

    image_url: str | None = Field(None, examples=[_SEVEN])
    """the picture as a data URL in base64; no other address is fetched"""
    file_id: str | None = Field(None, examples=[None])
    """always refused, since this server keeps no files"""


class EditBody(EditFields):
    """An edit as JSON, as in OpenAI's API. Unknown fields are ignored, and the answer's warnings
    name them.
    """

    images: list[PictureReference] = Field(examples=[[{"image_url": _SEVEN}]])
    """the picture: exactly one"""
    mask: PictureReference | None = Field(None, examples=[None])
    """picture whose transparent parts say what is hidden"""
    keep_rows: _KeepRows = None


class LikelihoodForm(PictureFields, UploadFields):
    """Unknown fields are ignored, and the answer's warnings name them."""

    label: int | str | None = Field(None, examples=[7])
    """class that the model assumes, by index or name; default: no class; with labels=all, or with a
    model that draws the class first: the mixture of all classes"""
    labels: Literal["all"] | None = Field(None, examples=["all"])
    """all: compute the likelihood under every class, and the probability of each class; default:
    only under label"""
    classes: Literal["plausible"] | None = Field(None, examples=["plausible"])
    """plausible: compute only classes that the model finds possible (0.0001) after it has read the
    whole picture, which is several times faster and gives a lower bound; models that cannot
    recognise classes compute all; default: all classes, exactly"""
    response_format: str | None = Field(None, examples=["b64_json"])
    """b64_json: answer with the map as a PNG too; default: only as numbers"""


class InsideForm(PictureFields, UploadFields):
    """Unknown fields are ignored, and the answer's warnings name them."""

    label: int | str | None = Field(None, examples=[7])
    """class that the model assumes, by index or name; default: no class; a model that draws the
    class first takes the one that it finds most probable, or has drawn"""
    seed: int | None = Field(None, ge=0, le=MAX_SEED, examples=[5])
    """if no image is sent: look at the image that the model draws for this seed"""
    size: str | None = Field(None, examples=["native"])
    """without effect here"""
    response_format: str | None = Field(None, examples=["b64_json"])
    """without effect here: the answer is JSON, or an array if Accept asks for it"""
    token: int | None = Field(None, ge=0, examples=[400])
    """the token to look at, a sub-pixel or pixel in raster order, from 0; default: the last"""
    layer: int | None = Field(None, ge=0, examples=[3])
    """from 0; default: the last"""
    head: int = Field(0, ge=0, examples=[2])
    """a head of this layer, from 0"""
    array: Literal["states", "attention", "distributions"] = Field("states", examples=["attention"])
    """which array answers to Accept: application/x-npy, float16: states (n, D, M + 1), S and z
    after each of n tokens; attention (n, n), a row for each; or distributions (T, 256)"""


class CompareBody(Described):
    """What to compare; see `linpix compare`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: _Model = None
    backends: list[str] | None = Field(
        None,
        min_length=1,
        max_length=8,
        examples=[["linear", "stateful-softmax"]],
        description=f"some of {', '.join(ATTENTION)}, and kinds of --plugin; absent: all of them",
    )
    batch: list[Annotated[int, Field(ge=1, le=256)]] = Field(
        [1, 16], min_length=1, max_length=8, examples=[[1, 16]]
    )
    """batch sizes: numbers of images that are decoded together; 1 is always measured too"""
    budget: float = Field(30.0, gt=0, le=3600, allow_inf_nan=False, examples=[10.0])
    """time for the measurement, in seconds; up to compare_budget of /v1/status"""


# a route ignores the fields of others
_FORM_FIELDS = [
    field for form in (EditForm, LikelihoodForm, InsideForm) for field in form.model_fields.items()
]
FORM_FIELDS = frozenset(name for name, _ in _FORM_FIELDS)
FORM_NUMBERS = frozenset(
    name for name, field in _FORM_FIELDS if field.annotation in (int, int | None, float | None)
)

GENERATE: dict[str, Any] = {  # example bodies, by what they show
    "one image of a class": {"value": {"label": 7, "seed": 1}},
    "several larger images": {"value": {"n": 4, "size": "280x280", "temperature": 0.9}},
    "a stream": {"value": {"prompt": "3", "stream": True, "partial_images": 2}},
}
EDIT: dict[str, Any] = {
    "the lower half": {"value": {"image": "seven.png", "keep_rows": 14, "seed": 5}},
    "the transparent part of a mask": {"value": {"image": "seven.png", "mask": "mask.png", "n": 2}},
}
EDIT_JSON: dict[str, Any] = {
    "the lower half": {
        "value": {
            "images": [{"image_url": _SEVEN}],
            "keep_rows": 14,
            "seed": 5,
        }
    },
}
LIKELIHOOD: dict[str, Any] = {
    "a whole picture, and its class": {"value": {"image": "seven.png", "labels": "all"}},
    "the lower half, as a 7": {"value": {"image": "seven.png", "keep_rows": 14, "label": 7}},
    "the part that a mask hides": {
        "value": {"image": "seven.png", "mask": "mask.png", "response_format": "b64_json"}
    },
}
INSIDE: dict[str, Any] = {
    "a picture, and where its 400th pixel looked": {
        "value": {
            "image": "seven.png",
            "label": 7,
            "token": 400,  # nosec B105  # a token of a picture
            "layer": 3,
            "head": 2,
        }
    },
    "an image that is drawn again": {"value": {"seed": 5, "label": 7}},
}
COMPARE: dict[str, Any] = {
    "two kinds of attention": {
        "value": {"backends": ["linear", "stateful-softmax"], "batch": [1, 16], "budget": 10.0}
    },
}
