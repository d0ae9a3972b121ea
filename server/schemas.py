"""What goes over the wire: OpenAI's Images API, with our extras."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from model.philox import MAX_SEED
from server.backends import BACKENDS

Seed = Annotated[int, Field(ge=0, le=MAX_SEED, description="image i uses seed + i; drawn if absent")]
Temperature = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False,
                                     description="1 as trained, lower is tidier, 0 the mean of the likeliest mixture")]
Count = Annotated[int, Field(ge=1, description="images to make, up to the server's limit")]
Label = Annotated[int | str, Field(description="class, by index or name")]
Model = Annotated[str, Field(description="a name of /v1/models; the default model if absent")]
Size = Annotated[str, Field(description="auto, native, or an integer multiple such as 56x56")]
Timeout = Annotated[float, Field(gt=0, allow_inf_nan=False,
                                 description="seconds from admission until all is to be done, else 504")]
Priority = Annotated[Literal["interactive", "bulk"],
                     Field(description="interactive (the default) goes first; of four slots given one is for bulk")]
Partials = Annotated[int, Field(ge=0, description="partial images of a stream; absent: one per finished row")]


class GenerateBody(BaseModel):
    """Unknown fields are ignored, and the answer's warnings name them."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Model | None = None
    prompt: Annotated[str, Field(description="a class name or digit conditions the image; else ignored")] | None = None
    n: Count | None = None
    size: Size | None = None
    response_format: Annotated[str, Field(description="b64_json")] | None = None
    stream: bool | None = None
    partial_images: Partials | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    label: Label | None = None
    timeout: Timeout | None = None
    priority: Priority | None = None


class CompareBody(BaseModel):
    """What to compare; see `linpix compare`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Model | None = None
    backends: Annotated[list[str], Field(min_length=1, max_length=8,
                                         description=f"of {', '.join(BACKENDS)}; default: all")] | None = None
    batch: Annotated[list[Annotated[int, Field(ge=1, le=256)]], Field(min_length=1, max_length=8)] = [1, 16]
    budget: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False, description="seconds to measure in")] = 30.0


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(BaseModel):
    error: ErrorFields


class ImageData(BaseModel):
    b64_json: str = Field(description="PNG")
    seed: int = Field(description="reproduces this image alone")


class ImagesResponse(BaseModel):
    created: int
    data: list[ImageData]
    model: str
    checkpoint: str = Field(description="digest of the checkpoint")
    engine: str
    precision: str
    device: str = Field(description="cpu or cuda")
    state: str = Field(description="how the state was kept: fp32, or on a GPU with --state and --defer such as fp16/8")
    size: str
    output_format: Literal["png"] = "png"
    warnings: list[str]


class EditResponse(ImagesResponse):
    conditioning: Literal["prefix", "partial"]
    known: int = Field(description="known sub-pixels")
    known_before_first_hole: int = Field(description="these condition everything that is drawn")
    known_after_last_hole: int = Field(description="these steered nothing")


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["linpix"] = "linpix"
    checkpoint: str
    bits_per_dim: dict[str, float]
    engine: str
    precision: str
    device: str
    state: str
    attention: str
    width: int
    height: int
    channels: int
    classes: list[str]
    sizes: list[str]
    state_bytes: int
    slots: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Comparison(BaseModel):
    """A comparison under way or over."""

    id: str
    status: Literal["running", "completed", "cancelled", "failed"]
    progress: float = Field(ge=0, le=1)
    model: str
    budget: float
    shared_device: bool = Field(description="whether live requests ran beside it")
    error: str | None
    report: dict[str, Any] | None = Field(description="report.json, as far as it is")


class ModelStatus(BaseModel):
    """Counters grow from the start of the process: a rate is the difference of two answers over their `uptime`s."""

    id: str
    backend: str
    engine: str
    precision: str
    device: str
    slots: int
    slots_used: int
    images_waiting: int = Field(description="admitted, and without a slot")
    images_completed: int
    pixels_generated: int = Field(description="sub-pixels")
    quanta: int
    step_seconds_sum: float = Field(description="over quanta, each with its mean seconds of a step")


class ComparisonStatus(BaseModel):
    id: str
    model: str
    status: Literal["running", "completed", "cancelled", "failed"]


class Limits(BaseModel):
    max_n: int
    max_queue: int
    max_upload: int = Field(description="bytes")
    compare_budget: float = Field(description="seconds")


class Status(BaseModel):
    """What /metrics says, of what a page shows while it watches."""

    status: Literal["ready", "starting", "draining", "gone"]
    version: str
    torch: str
    kernel: str = Field(description="instruction set of the compiled kernels, cuda, or eager")
    uptime: float = Field(description="seconds")
    requests_running: int
    requests_waiting: int
    requests_rejected: dict[str, int] = Field(description="by reason")
    rows_sum: int = Field(description="over quanta, the rows in each")
    models: list[ModelStatus]
    comparison: ComparisonStatus | None = Field(description="the latest one")
    limits: Limits


class Health(BaseModel):
    status: str
