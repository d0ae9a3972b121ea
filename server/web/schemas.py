"""Answers: OpenAI's Images API, with our extensions; models; comparisons. Examples are of the
shipped `mnist-small`.
"""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from ..pictures import encode

T = TypeVar("T")
# for a field that is absent where it does not apply, and never null
Maybe = Annotated[
    T | SkipJsonSchema[None],
    Field(
        exclude_if=lambda value: value is None, json_schema_extra=lambda field: field.pop("default")
    ),
]

Name = Annotated[str, Field(examples=["mnist-small"], description="name of the model")]
Digest = Annotated[
    str,
    Field(
        examples=["3a5c28c7a2e8abb38d47ccf109d3683aff7fa3209f51d8bf853d3eefa96e0acc"],
        description="SHA-256 of the checkpoint's files, hexadecimal",
    ),
]
Engine = Annotated[
    str,
    Field(
        examples=["compiled"],
        description=(
            "compiled (LinPix's kernels), eager (torch alone), or "
            "eager+operator (torch, with LinPix's kernel for the attention step)"
        ),
    ),
]
Precision = Annotated[
    str, Field(examples=["bf16"], description="precision of matrix products: fp32, bf16 or int8")
]
Device = Annotated[str, Field(examples=["cpu"], description="cpu or cuda")]
State = Annotated[
    str,
    Field(
        examples=["fp32"],
        description="precision of the recurrent states: fp32; or fp16, on a GPU with --state fp16",
    ),
]
Slots = Annotated[int, Field(examples=[64], description="images that can be decoded at once")]
Picture = Annotated[
    str,
    Field(
        examples=["iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAAAAABX..."],
        description="the picture in base64, in the format of output_format",
    ),
]
CandidatesDrawn = Annotated[
    int | None,
    Field(
        examples=[8],
        description=(
            "number of images that were drawn; the answer "
            "has the best of them; null without candidates"
        ),
    ),
]
ComparisonId = Annotated[
    str, Field(examples=["cmp-1"], description="id from the answer of POST /v1/compare")
]


Created = Annotated[
    int, Field(description="time of the answer, seconds since 1970", examples=[1795303560])
]
Zero = Annotated[int, Field(description="always 0", examples=[0])]


class ErrorFields(BaseModel):
    message: str = Field(
        description="what is wrong, what was given, and what is allowed",
        examples=["n must be 1..16, got 17"],
    )
    type: str = Field(
        description="kind of error, with the names of OpenAI's API",
        examples=["invalid_request_error"],
    )
    param: str | None = Field(
        description="the field that is wrong; null if the error is not in one field", examples=["n"]
    )
    code: str = Field(description="the cause, as a code for programs", examples=["invalid_value"])


class ErrorEnvelope(BaseModel):
    error: ErrorFields = Field(description="the error; all routes use this form")


class ImageFacts(BaseModel):
    """One image of an answer."""

    seed: int = Field(
        examples=[1],
        description="seed that draws this image again, alone, with the same number of attempts",
    )
    label: Maybe[int | str] = Field(
        None,
        examples=[7],
        description=(
            "class that the image was drawn as: the requested one, or the one that the model drew"
            " first, by its index; by its name, if that index is the name of another class; present"
            " with confidence"
        ),
    )
    confidence: Maybe[float] = Field(
        None,
        examples=[0.97],
        description=(
            "probability that the model gives to the image's class after it has drawn the whole"
            " image; present with candidates or attempts, for models that draw the class first"
        ),
    )
    confident: Maybe[bool] = Field(
        None,
        examples=[True],
        description=(
            "whether the model recognises the class with 0.99, in an image in one piece; false: no"
            " attempt was so, and this is the best of them; present with confidence"
        ),
    )
    attempts: Maybe[int] = Field(
        None,
        examples=[1],
        description=(
            "number of times that this image was drawn; absent if one attempt was requested"
        ),
    )


class ImageData(ImageFacts):
    b64_json: Maybe[Picture] = None
    url: Maybe[str] = Field(
        None,
        examples=["data:image/png;base64,iVBORw0KGgo..."],
        description=(
            "the picture as a data URL; present instead of b64_json with response_format=url"
        ),
    )
    revised_prompt: Maybe[str] = Field(
        None,
        examples=["7"],
        description=(
            "only for requests with a prompt: what was drawn, one class or an image of any class"
        ),
    )


class Usage(BaseModel):
    """Always 0."""

    input_tokens: Zero = 0
    input_tokens_details: dict[str, int] = Field(
        {"image_tokens": 0, "text_tokens": 0},
        description="input tokens by kind, always 0",
        examples=[{"image_tokens": 0, "text_tokens": 0}],
    )
    output_tokens: Zero = 0
    total_tokens: Zero = 0


class Drawn(BaseModel):
    """The fields that every answer and event of the images routes has."""

    created: Created
    model: Name
    checkpoint: Digest
    engine: Engine
    precision: Precision
    device: Device
    state: State
    size: str = Field(description="width x height of the pictures, in pixels", examples=["28x28"])
    output_format: encode.Format = Field(
        "png", description="format of the pictures", examples=["png"]
    )
    warnings: list[str] = Field(
        description="parts of the request that were ignored, or carried out differently",
        examples=[[]],
    )


Sides = Annotated[list[int | float], Field(min_length=4, max_length=4)]


class Prepared(BaseModel):
    """What `prepare` did."""

    inverted: bool = Field(description="whether the ink was darker than the paper", examples=[True])
    box: Sides = Field(
        description=(
            "position of the digit: left, top, right, bottom in pixels of the upload; if the "
            "digit touches a hole, this includes the part of the hole where it may "
            "continue"
        ),
        examples=[[212, 96, 388, 410]],
    )
    b64_json: str = Field(
        description=(
            "the picture that the model sees: a PNG in base64, transparent where the model draws"
        ),
        examples=["iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAQAAADYBBcf..."],
    )


class Conditioning(BaseModel):
    """How much of a picture was known."""

    conditioning: Literal["prefix", "full", "partial"] = Field(
        examples=["prefix"],
        description=(
            "prefix: all known pixels come before the first hole, so they influence all drawn"
            " pixels; full: some come later, but a conditional model reads all of them before it"
            " draws; partial: some come later, and known pixels influence only the pixels after"
            " them; warnings then name a loaded model that uses all of them"
        ),
    )
    known: int = Field(description="known sub-pixels", examples=[392])
    known_before_first_hole: int = Field(
        description="known sub-pixels before the first hole; they influence all drawn pixels",
        examples=[392],
    )
    known_after_last_hole: int = Field(
        description=(
            "known sub-pixels after the last hole; they have no influence "
            "unless conditioning is full"
        ),
        examples=[0],
    )


class UploadFacts(Conditioning):
    """What the answer to an edit adds: which part of the picture the model saw, and how much of it
    was known.
    """

    crop: Sides = Field(
        description=(
            "part of the upload that the model's picture shows: left, top, right, bottom in pixels,"
            " after the rotation that its EXIF data ask for; with prepare it may extend beyond the"
            " upload"
        ),
        examples=[[0, 0, 28, 28]],
    )
    prepared: Prepared | None = Field(None, description="null without prepare")


class ImagesResponse(Drawn):
    candidates: CandidatesDrawn
    usage: Usage = Field(Usage(), description="zeros, for programs that sum the usage")
    data: list[ImageData] = Field(
        description=(
            "the images, in the order of their seeds; with candidates, in the "
            "order in which they were chosen"
        )
    )


class EditResponse(ImagesResponse, UploadFacts):
    pass


class GenerationEvent(ImageFacts, Drawn):
    """One image of a stream, finished or not."""

    kind: ClassVar = "image_generation"  # prefix of its events' names
    created_at: int = Field(
        description="the same as created, as OpenAI's events name it", examples=[1795303560]
    )
    quality: Literal["auto"] = Field(
        "auto", description="always auto: a model draws in one quality"
    )
    background: Literal["opaque"] = Field(
        "opaque",
        description="always opaque, as the model's pictures are; but see lay_back",
    )
    candidates: CandidatesDrawn
    image_index: int = Field(description="number of the image, from 0", examples=[0])
    type: Literal["image_generation.partial_image", "image_generation.completed"] = Field(
        description="the same as `event`"
    )
    partial_image_index: Maybe[int] = Field(
        None,
        examples=[0],
        description="number of the partial image, from 0; absent for completed images",
    )
    rows: Maybe[int] = Field(
        None,
        examples=[14],
        description=(
            "number of finished image rows; the others are black; absent for completed images"
        ),
    )
    b64_json: Picture
    usage: Maybe[Usage] = Field(
        None, description="zeros, for programs that sum the usage; absent for partial images"
    )


class EditEvent(GenerationEvent, UploadFacts):
    kind = "image_edit"
    type: Literal["image_edit.partial_image", "image_edit.completed"] = Field(  # type: ignore[assignment]
        description="as `event`"
    )


class Board(BaseModel):
    """What a drawing board for pictures to complete needs to know of the training pictures."""

    ground: list[int] | None = Field(
        None,
        description="value of their background, one per channel; null: they have no common one",
        examples=[[0]],
    )
    ink: list[int] | None = Field(
        None, description="value of what is drawn on it, one per channel", examples=[[255]]
    )
    prepare: Literal["mnist"] | None = Field(
        None,
        description="value of prepare that makes such pictures of photographs; null: none does",
        examples=["mnist"],
    )


class ModelCard(BaseModel):
    id: Name
    object: Literal["model"] = Field("model", description="kind of object")
    created: int = Field(description="time of training, seconds since 1970", examples=[1795195165])
    owned_by: Literal["linpix"] = Field(
        "linpix", description="always linpix; OpenAI's clients expect this field"
    )
    checkpoint: Digest
    bits_per_dim: dict[str, float] = Field(
        description=(
            "bits/dim for each set of images that it was measured on; "
            "test_10000: 10,000 test images"
        ),
        examples=[{"test_1000": 0.8225, "test_10000": 0.8423}],
    )
    engine: Engine
    precision: Precision
    device: Device
    state: State
    kernels: str = Field(
        description=(
            "on a GPU: the kernels that were fastest when the model was loaded, by the number "
            "of images in progress; else empty"
        ),
        examples=[""],
    )
    attention: str = Field(description="linear or softmax", examples=["linear"])
    width: int = Field(description="width of its images, in pixels", examples=[28])
    height: int = Field(description="height of its images, in pixels", examples=[28])
    channels: int = Field(
        description="sub-pixels per pixel: 1 for grey or a palette, 3 for RGB", examples=[1]
    )
    palette: list[str] = Field(
        description=(
            "the colours of its pictures, as #rrggbbaa, that of the background first; empty: any"
        ),
        examples=[[]],
    )
    conditional: bool = Field(
        description=(
            "whether the model reads all known pixels before it draws; other models know "
            "only those before the one that they draw"
        ),
        examples=[False],
    )
    classes: list[str] = Field(
        description="class names, in the order of their indices; empty: it has no classes",
        examples=[["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]],
    )
    sizes: list[str] = Field(
        description="sizes at which the picture fills the whole answer: its multiples",
        examples=[["28x28", "56x56", "84x84"]],
    )
    temperature: float = Field(
        description="best temperature of the model; used for requests that give none",
        examples=[1.0],
    )
    temperature_range: list[float] = Field(
        min_length=2,
        max_length=2,
        description="lowest and highest useful temperature",
        examples=[[0.3, 1.5]],
    )
    attempts: int = Field(
        description=(
            "how many times an image may be drawn until the model recognises its class and "
            "it is not torn, for requests that do not say so"
        ),
        examples=[1],
    )
    limits: str | None = Field(
        description="one sentence about what the model cannot do; null: no limit is known",
        examples=["It draws one handwritten digit in the middle, and nothing else."],
    )
    class_agreement: float | None = Field(
        description=(
            "share of the images drawn for a class that a classifier of the "
            "same pictures recognises as that class; null: not measured"
        ),
        examples=[0.76],
    )
    board: Board = Field(description="ground and ink for a drawing board")
    aliases: list[str] = Field(
        description="other names that requests may use for this model", examples=[[]]
    )
    state_bytes: int = Field(description="bytes of the state of one image", examples=[67584])
    slots: Slots


class ModelList(BaseModel):
    object: Literal["list"] = Field("list", description="kind of object")
    data: list[ModelCard] = Field(description="the models, the default one first")


REPORT: dict[str, Any] = {
    "model": "mnist-small",
    "budget_s": 10.0,
    "spent_s": 5.0,
    "results": [
        {
            "backend": "linear",
            "engine": "compiled",
            "precision": "bf16",
            "batch": 1,
            "images_per_second": 102.0,
            "seconds_per_image": 0.0098,
            "state_bytes": 67584,
            "estimated": False,
            "bits_per_dim": 0.96971,
        }
    ],
}


class LatestComparison(BaseModel):
    id: ComparisonId
    model: Name
    status: Literal["running", "completed", "cancelled", "failed"] = Field(
        examples=["running"], description="running, or how it ended"
    )


class Comparison(LatestComparison):
    """A comparison that is running or has ended."""

    progress: float = Field(
        ge=0,
        le=1,
        description="part of the budget that has been used; 1 when completed",
        examples=[0.5],
    )
    budget: float = Field(description="time for the measurement, in seconds", examples=[10.0])
    shared_device: bool = Field(
        description="whether other requests were decoded at the same time", examples=[False]
    )
    error: str | None = Field(description="why it failed; null if it did not", examples=[None])
    report: dict[str, Any] | None = Field(
        description=(
            "the figures so far, in the form of report.json of `linpix compare`: the conditions,"
            " and in results, for each backend, engine and batch, images_per_second,"
            " seconds_per_image, state_bytes of one image, step_seconds at some positions, and"
            " bits_per_dim; null before the measurement starts"
        ),
        examples=[REPORT],
    )
