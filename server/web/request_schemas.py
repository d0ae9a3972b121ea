"""Bodies of requests. The images routes ignore unknown fields, and their answers warn of them."""

from typing import Annotated, Any, Literal

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.json_schema import SkipJsonSchema

from ..compare.backends import BACKENDS
from . import fields

_FILE = WithJsonSchema({"type": "string", "format": "binary"})  # as generators of clients know files


class PictureFields(BaseModel):
    """The fields of every route that answers with pictures, or about one."""

    model_config = ConfigDict(extra="allow", json_schema_extra=lambda schema: schema.pop("additionalProperties"))

    _absent = model_validator(mode="before")(lambda cls, given: {  # an empty text is an absent field, as in forms
        name: value for name, value in given.items() if value != "" or name not in cls.model_fields
    } if isinstance(given, dict) else given)

    model: fields.Model = None
    prompt: fields.Prompt = None
    size: fields.Size = None
    response_format: fields.Format = None
    label: fields.Label = None
    timeout: fields.Timeout = None


class ImageFields(PictureFields):
    """The fields of routes that draw images."""

    n: fields.Count = None
    candidates: fields.Candidates = None
    attempts: fields.Attempts = None
    output_format: fields.OutputFormat = None
    stream: fields.Stream = None
    partial_images: fields.Partials = None
    seed: fields.Seed = None
    temperature: fields.Temperature = None
    priority: fields.Priority = None


class GenerateBody(ImageFields):
    """Unknown fields are ignored, and the answer's warnings name them."""

    model_config = ConfigDict(strict=True)


class UploadFields(BaseModel):
    """A picture, and what of it is hidden."""

    image: Annotated[UploadFile | None, _FILE, Field(examples=["seven.png"], description="PNG, JPEG or WebP, not "
        "smaller than the model's size; without mask and keep_rows, its transparent parts are hidden; some clients "
        "name it image[]")] = None
    # not in the OpenAPI: clients that are generated from it would have two fields named image
    image_list: Annotated[SkipJsonSchema[list[UploadFile] | None], Field(alias="image[]")] = None
    mask: Annotated[UploadFile | None, _FILE, Field(examples=["mask.png"], description="picture whose transparent "
        "parts say what is hidden, instead of the transparent parts of image")] = None
    keep_rows: fields.KeptRows = None


class EditForm(ImageFields, UploadFields):
    """What is hidden is drawn. Unknown fields are ignored, and the answer's warnings name them."""

    prepare: fields.Prepare = None
    lay_back: fields.LayBack = None
    conditioning: fields.Conditioning = None


class LikelihoodForm(PictureFields, UploadFields):
    """Unknown fields are ignored, and the answer's warnings name them."""

    label: Annotated[int | str | None, Field(examples=[7], description="class that the model assumes, by index or "
        "name; default: no class; with labels=all, or with a model that draws the class first: the mixture of all "
        "classes")] = None
    labels: Annotated[Literal["all"] | None, Field(description="all: compute the likelihood under every class, and the "
                                            "probability of each class; default: only under label",
                                            examples=["all"])] = None
    response_format: Annotated[str | None, Field(examples=["b64_json"], description="b64_json: answer with the map as "
        "a PNG too; default: only as numbers")] = None


class CompareBody(BaseModel):
    """What to compare; see `linpix compare`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: fields.Model = None
    backends: Annotated[list[str] | None, Field(min_length=1, max_length=8, examples=[["linear", "stateful-softmax"]],
                                         description=f"some of {', '.join(BACKENDS)}; absent: all of "
                                                     "them")] = None
    batch: Annotated[list[Annotated[int, Field(ge=1, le=256)]], Field(min_length=1, max_length=8, examples=[[1, 16]],
                                                                      description="batch sizes: numbers of images that "
                                                                      "are decoded together; 1 is always measured "
                                                                      "too")] = [1, 16]
    budget: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False, examples=[10.0], description="time for the "
                                   "measurement, in seconds; up to compare_budget of /v1/status")] = 30.0


def names_of(form: type[UploadFields]) -> frozenset[str]:
    """The names that a form's fields have on the wire."""
    return frozenset(field.alias or name for name, field in form.model_fields.items())


FORM_LISTS = ("image[]",)  # fields of forms that may be sent more than once
FILES = ("image", "image[]", "mask")
FORM_FIELDS = names_of(EditForm) | names_of(LikelihoodForm)  # of any form; a route ignores the fields of others

GENERATE: dict[str, Any] = {  # example bodies, by what they show
    "one image of a class": {"value": {"label": 7, "seed": 1}},
    "several larger images": {"value": {"n": 4, "size": "280x280", "temperature": 0.9}},
    "a stream": {"value": {"prompt": "3", "stream": True, "partial_images": 2}},
}
EDIT: dict[str, Any] = {
    "the lower half": {"value": {"image": "seven.png", "keep_rows": 14, "seed": 5}},
    "the transparent part of a mask": {"value": {"image": "seven.png", "mask": "mask.png", "n": 2}},
}
LIKELIHOOD: dict[str, Any] = {
    "a whole picture, and its class": {"value": {"image": "seven.png", "labels": "all"}},
    "the lower half, as a 7": {"value": {"image": "seven.png", "keep_rows": 14, "label": 7}},
    "the part that a mask hides": {"value": {"image": "seven.png", "mask": "mask.png", "response_format": "b64_json"}},
}
COMPARE: dict[str, Any] = {
    "two kinds of attention": {"value": {"backends": ["linear", "stateful-softmax"], "batch": [1, 16], "budget": 10.0}},
}
