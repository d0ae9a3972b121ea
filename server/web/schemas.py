"""Answers: OpenAI's Images API, with our extensions; models; comparisons. Examples are of the
shipped `mnist-small`.
"""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import CoreSchema

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


class Described(BaseModel):
    """A model whose fields are described by the texts below them."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        for field in handler.resolve_ref_schema(schema)["properties"].values():
            if "description" in field:
                field["description"] = " ".join(field["description"].split())
        return schema


class ErrorFields(Described):
    message: str = Field(examples=["n must be 1..16, got 17"])
    """what is wrong, what was given, and what is allowed"""
    type: str = Field(examples=["invalid_request_error"])
    """kind of error, with the names of OpenAI's API"""
    param: str | None = Field(examples=["n"])
    """the field that is wrong; null if the error is not in one field"""
    code: str = Field(examples=["invalid_value"])
    """the cause, as a code for programs"""


class ErrorEnvelope(Described):
    error: ErrorFields
    """the error; all routes use this form"""


class ImageFacts(Described):
    """One image of an answer."""

    seed: int = Field(examples=[1])
    """seed that draws this image again, alone, with the same number of attempts"""
    label: Maybe[int | str] = Field(None, examples=[7])
    """class that the image was drawn as: the requested one, or the one that the model drew first,
    by its index; by its name, if that index is the name of another class; present with
    confidence"""
    confidence: Maybe[float] = Field(None, examples=[0.97])
    """probability that the model gives to the image's class after it has drawn the whole image;
    present with candidates or attempts, for models that draw the class first"""
    confident: Maybe[bool] = Field(None, examples=[True])
    """whether the model recognises the class, mostly with 0.99, in an image in one piece; false: no
    attempt was so, and this is the best of them; present with confidence"""
    attempts: Maybe[int] = Field(None, examples=[1])
    """number of times that this image was drawn; absent if one attempt was requested"""


class ImageData(ImageFacts):
    b64_json: Maybe[Picture] = None
    url: Maybe[str] = Field(None, examples=["data:image/png;base64,iVBORw0KGgo..."])
    """the picture as a data URL; present instead of b64_json with response_format=url"""
    revised_prompt: Maybe[str] = Field(None, examples=["7"])
    """only for requests with a prompt: what was drawn, one class or an image of any class"""


class Usage(Described):
    """Always 0."""

    input_tokens: Zero = 0
    input_tokens_details: dict[str, int] = Field(
        {"image_tokens": 0, "text_tokens": 0}, examples=[{"image_tokens": 0, "text_tokens": 0}]
    )
    """input tokens by kind, always 0"""
    output_tokens: Zero = 0
    total_tokens: Zero = 0


class Drawn(Described):
    """The fields that every answer and event of the images routes has."""

    created: Created
    model: Name
    checkpoint: Digest
    engine: Engine
    precision: Precision
    device: Device
    state: State
    size: str = Field(examples=["28x28"])
    """width x height of the pictures, in pixels"""
    output_format: encode.Format = Field("png", examples=["png"])
    """format of the pictures"""
    warnings: list[str] = Field(examples=[[]])
    """parts of the request that were ignored, or carried out differently"""


Sides = Annotated[list[int | float], Field(min_length=4, max_length=4)]


class Prepared(Described):
    """What `prepare` did."""

    inverted: bool = Field(examples=[True])
    """whether the ink was darker than the paper"""
    box: Sides = Field(examples=[[212, 96, 388, 410]])
    """position of the digit: left, top, right, bottom in pixels of the upload; if the digit touches
    a hole, this includes the part of the hole where it may continue"""
    b64_json: str = Field(examples=["iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAQAAADYBBcf..."])
    """the picture that the model sees: a PNG in base64, transparent where the model draws"""


class Conditioning(Described):
    """How much of a picture was known."""

    conditioning: Literal["prefix", "full", "partial"] = Field(examples=["prefix"])
    """prefix: all known pixels come before the first hole, so they influence all drawn pixels;
    full: some come later, but a conditional model reads all of them before it draws; partial: some
    come later, and known pixels influence only the pixels after them; warnings then name a loaded
    model that uses all of them"""
    known: int = Field(examples=[392])
    """known sub-pixels"""
    known_before_first_hole: int = Field(examples=[392])
    """known sub-pixels before the first hole; they influence all drawn pixels"""
    known_after_last_hole: int = Field(examples=[0])
    """known sub-pixels after the last hole; they have no influence unless conditioning is full"""


class UploadFacts(Conditioning):
    """What the answer to an edit adds: which part of the picture the model saw, and how much of it
    was known.
    """

    crop: Sides = Field(examples=[[0, 0, 28, 28]])
    """part of the upload that the model's picture shows: left, top, right, bottom in pixels, after
    the rotation that its EXIF data ask for; with prepare it may extend beyond the upload"""
    prepared: Prepared | None = None
    """null without prepare"""


class ImagesResponse(Drawn):
    candidates: CandidatesDrawn
    usage: Usage = Usage()
    """zeros, for programs that sum the usage"""
    data: list[ImageData]
    """the images, in the order of their seeds; with candidates, in the order in which they were
    chosen"""


class EditResponse(ImagesResponse, UploadFacts):
    pass


class GenerationEvent(ImageFacts, Drawn):
    """One image of a stream, finished or not."""

    kind: ClassVar = "image_generation"  # prefix of its events' names
    created_at: int = Field(examples=[1795303560])
    """the same as created, as OpenAI's events name it"""
    quality: Literal["auto"] = "auto"
    """always auto: a model draws in one quality"""
    background: Literal["opaque"] = "opaque"
    """always opaque, as the model's pictures are; but see lay_back"""
    candidates: CandidatesDrawn
    image_index: int = Field(examples=[0])
    """number of the image, from 0"""
    type: Literal["image_generation.partial_image", "image_generation.completed"]
    """the same as `event`"""
    partial_image_index: Maybe[int] = Field(None, examples=[0])
    """number of the partial image, from 0; absent for completed images"""
    rows: Maybe[int] = Field(None, examples=[14])
    """number of finished image rows; the others are black; absent for completed images"""
    b64_json: Picture
    usage: Maybe[Usage] = None
    """zeros, for programs that sum the usage; absent for partial images"""


class EditEvent(GenerationEvent, UploadFacts):
    kind = "image_edit"
    type: Literal["image_edit.partial_image", "image_edit.completed"]  # type: ignore[assignment]
    """as `event`"""


class Board(Described):
    """What a drawing board for pictures to complete needs to know of the training pictures."""

    ground: list[int] | None = Field(None, examples=[[0]])
    """value of their background, one per channel; null: they have no common one"""
    ink: list[int] | None = Field(None, examples=[[255]])
    """value of what is drawn on it, one per channel"""
    prepare: Literal["mnist"] | None = Field(None, examples=["mnist"])
    """value of prepare that makes such pictures of photographs; null: none does"""


class ModelCard(Described):
    id: Name
    object: Literal["model"] = "model"
    """kind of object"""
    created: int = Field(examples=[1795195165])
    """time of training, seconds since 1970"""
    owned_by: Literal["linpix"] = "linpix"
    """always linpix; OpenAI's clients expect this field"""
    checkpoint: Digest
    bits_per_dim: dict[str, float] = Field(examples=[{"test_1000": 0.8225, "test_10000": 0.8423}])
    """bits/dim for each set of images that it was measured on; test_10000: 10,000 test images"""
    engine: Engine
    precision: Precision
    device: Device
    state: State
    kernels: str = Field(examples=[""])
    """on a GPU: the kernels that were fastest when the model was loaded, by the number of images in
    progress; else empty"""
    attention: str = Field(examples=["linear"])
    """linear or softmax"""
    width: int = Field(examples=[28])
    """width of its images, in pixels"""
    height: int = Field(examples=[28])
    """height of its images, in pixels"""
    channels: int = Field(examples=[1])
    """sub-pixels per pixel: 1 for grey or a palette, 3 for RGB"""
    palette: list[str] = Field(examples=[[]])
    """the colours of its pictures, as #rrggbbaa, that of the background first; empty: any"""
    conditional: bool = Field(examples=[False])
    """whether the model reads all known pixels before it draws; other models know only those before
    the one that they draw"""
    classes: list[str] = Field(examples=[["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]])
    """class names, in the order of their indices; empty: it has no classes"""
    sizes: list[str] = Field(examples=[["28x28", "56x56", "84x84"]])
    """sizes at which the picture fills the whole answer: its multiples"""
    temperature: float = Field(examples=[1.0])
    """best temperature of the model; used for requests that give none"""
    temperature_range: list[float] = Field(min_length=2, max_length=2, examples=[[0.3, 1.5]])
    """lowest and highest useful temperature"""
    attempts: int = Field(examples=[1])
    """how many times an image may be drawn until the model recognises its class and it is not torn,
    for requests that do not say so"""
    limits: str | None = Field(
        examples=["It draws one handwritten digit in the middle, and nothing else."]
    )
    """one sentence about what the model cannot do; null: no limit is known"""
    class_agreement: float | None = Field(examples=[0.76])
    """share of the images drawn for a class that a classifier of the same pictures recognises as
    that class; null: not measured"""
    board: Board
    """ground and ink for a drawing board"""
    aliases: list[str] = Field(examples=[[]])
    """other names that requests may use for this model"""
    state_bytes: int = Field(examples=[67584])
    """bytes of the state of one image"""
    slots: Slots


class ModelList(Described):
    object: Literal["list"] = "list"
    """kind of object"""
    data: list[ModelCard]
    """the models, the default one first"""


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


class LatestComparison(Described):
    id: ComparisonId
    model: Name
    status: Literal["running", "completed", "cancelled", "failed"] = Field(examples=["running"])
    """running, or how it ended"""


class Comparison(LatestComparison):
    """A comparison that is running or has ended."""

    progress: float = Field(ge=0, le=1, examples=[0.5])
    """part of the budget that has been used; 1 when completed"""
    budget: float = Field(examples=[10.0])
    """time for the measurement, in seconds"""
    shared_device: bool = Field(examples=[False])
    """whether other requests were decoded at the same time"""
    error: str | None = Field(examples=[None])
    """why it failed; null if it did not"""
    report: dict[str, Any] | None = Field(examples=[REPORT])
    """the figures so far, in the form of report.json of `linpix compare`: the conditions, and in
    results, for each backend, engine and batch, images_per_second, seconds_per_image, state_bytes
    of one image, step_seconds at some positions, and bits_per_dim; null before the measurement
    starts"""
