"""Fields that bodies, answers and statuses share, each defined once; examples are of the shipped `mnist-small`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from linpix.model.attempts import MAX_ATTEMPTS
from linpix.model.philox import MAX_SEED

from ..pictures import encode
from ..pictures.uploads import Preparation


def never_null(field: dict[str, Any]) -> None:
    """Change the schema of a field, in place, so that the field may be absent, but not null."""
    if {"type": "null"} in field.get("anyOf", []):
        for kind in field.pop("anyOf"):
            field |= kind if kind != {"type": "null"} else {}
        field.pop("default", None)


def _plain(value: object) -> object:
    if isinstance(value, str) and "_" in value:
        raise PydanticCustomError("number", "a number must not have underscores")
    return value


Plain = BeforeValidator(_plain)  # for numbers in forms and headers: pydantic reads 1_0 as 10

# --- requests: bodies, forms and headers ---

Model = Annotated[str, Field(description="a model listed by /v1/models; default: the first "
                                         "one", examples=["mnist-small"])]
Prompt = Annotated[str, Field(description="words that name a class, such as 7, seven or a green frog; the first one "
                              "counts, and warnings list all other words; default: any class",
                              examples=["7"])]
Label = Annotated[int | str, Field(description="class to draw, by index or name; default: any class", examples=[7])]
Count = Annotated[int, Field(ge=1, description="number of images, up to max_n of /v1/status; default: 1",
                             examples=[1]), Plain]
Candidates = Annotated[int, Field(ge=1, description="draw this many images and answer with the best n of them; from n "
                                  "to max_n of /v1/status; only for models that draw the class first; default: draw n "
                                  "images and answer with all", examples=[8]), Plain]
Attempts = Annotated[int, Field(ge=1, le=MAX_ATTEMPTS, description="draw an image up to this many times, until the "
                                "model recognises its class; only for models that draw the class first; default: the "
                                "model's own, in /v1/models; 1 with candidates and at temperature 0",
                                examples=[1]), Plain]
Size = Annotated[str, Field(description="width x height in pixels: an integer multiple of the model's own size, "
                            "enlarged by nearest neighbour; or 256x256, 512x512 or 1024x1024, with the largest "
                            "multiple that fits in the middle; default, auto and native: the model's own "
                            "size", examples=["native"])]
Format = Annotated[str, Field(description="b64_json (the default): the picture in base64; url: the picture as a data "
                                          "URL",
                              examples=["b64_json"])]
OutputFormat = Annotated[encode.Format, Field(description="format of the pictures: png (the default), webp (lossless) "
                                              "or jpeg (lossy)", examples=["png"])]
Stream = Annotated[bool, Field(description="answer with server-sent events while images are drawn; default: one "
                               "answer when all images are done", examples=[False])]
Partials = Annotated[int, Field(ge=0, description="number of unfinished versions of each image in a stream, evenly "
                                "spread; default: one per finished image row", examples=[3]), Plain]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED, description="image i uses seed + i; default: a random seed",
                            examples=[1]), Plain]
Temperature = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False, description="1: as trained; lower: less varied; "
                                     "higher: more varied; 0: no randomness; default: the model's own; /v1/models "
                                     "lists it and the useful range", examples=[1.0]), Plain]
Timeout = Annotated[float, Field(gt=0, allow_inf_nan=False, description="seconds within which the request must be "
                                 "finished, else the answer is 504; default: the server's "
                                 "limit", examples=[600.0]), Plain]
Priority = Annotated[Literal["interactive", "bulk"],
                     Field(description="interactive (the default): drawn first; bulk: gets one slot in four",
                           examples=["interactive"])]

KeptRows = Annotated[int, Field(description="image rows of the model's size to keep; the rows below are filled in; "
                                "not together with a mask", examples=[14]), Plain]

Prepare = Annotated[Preparation, Field(description="mnist: find a dark or light digit in a photograph or scan, and "
                                       "give it the size and position of MNIST digits; only for models of 28x28 grey "
                                       "pixels; none (the default): use the middle of the picture, in the model's "
                                       "aspect ratio",
                                       examples=["none"])]
LayBack = Annotated[bool, Field(description="answer with the upload at its own size, at most 1024 pixels a side, with "
                                "its hidden parts filled in; not together with size or partial_images; default: answer "
                                "with the model's picture",
                                examples=[False])]

Conditioning = Annotated[Literal["prefix", "full"],
                         Field(description="prefix: draw as if everything from the first hole on were hidden; the "
                               "answer still keeps the known pixels there; full: refuse the request if the model "
                               "cannot use all known pixels; default: use all known pixels that the model can use",
                               examples=["prefix"])]

# --- answers, events and statuses ---

Name = Annotated[str, Field(description="name of the model", examples=["mnist-small"])]
Digest = Annotated[str, Field(description="SHA-256 of the checkpoint's files, hexadecimal", examples=[
    "3a5c28c7a2e8abb38d47ccf109d3683aff7fa3209f51d8bf853d3eefa96e0acc"])]
Engine = Annotated[str, Field(description="compiled (LinPix's kernels), eager (torch alone), or eager+operator "
                              "(torch, with LinPix's kernel for the attention step)", examples=["compiled"])]
Precision = Annotated[str, Field(description="precision of matrix products: fp32, bf16 or int8", examples=["bf16"])]
Device = Annotated[str, Field(description="cpu or cuda", examples=["cpu"])]
State = Annotated[str, Field(description="format of the recurrent states: fp32; or, on a GPU with --state and --defer, "
                             "for example fp16/8", examples=["fp32"])]
Slots = Annotated[int, Field(description="images that can be decoded at once", examples=[64])]
Picture = Annotated[str, Field(description="the picture in base64, in the format of output_format",
                               examples=["iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAAAAABX..."])]
DrawnSeed = Annotated[int, Field(description="seed that draws this image again, alone, with the same number of "
                                 "attempts", examples=[1])]
Confidence = Annotated[float, Field(description="probability that the model gives to the image's class after it has "
                                    "drawn the whole image; present with candidates or attempts, for models that draw "
                                    "the class first", examples=[0.97])]
LabelDrawn = Annotated[int, Field(description="index of the class that the image was drawn as: the requested one, or "
                                  "the one that the model drew first; present with confidence", examples=[7])]
AttemptsMade = Annotated[int, Field(description="number of times that this image was drawn; absent if one attempt was "
                                    "requested", examples=[1])]
ComparisonId = Annotated[str, Field(description="id from the answer of POST /v1/compare", examples=["cmp-1"])]
Phase = Annotated[Literal["running", "completed", "cancelled", "failed"],
                  Field(description="running, or how it ended", examples=["running"])]
