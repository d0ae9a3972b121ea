"""The answers of /v1/status and of the probes. The examples are of the shipped `mnist-small`."""

from typing import Literal

from pydantic import BaseModel, Field

from . import fields


class ModelStatus(BaseModel):
    """Counters grow from the start of the process: a rate is the difference of two answers over their `uptime`s."""

    id: fields.Name
    backend: str = Field(description="kind of decoding: linear or stateful-softmax", examples=["linear"])
    engine: fields.Engine
    precision: fields.Precision
    device: fields.Device
    slots: fields.Slots
    slots_used: int = Field(description="number of slots that hold an image", examples=[2])
    images_waiting: int = Field(description="number of admitted images that have no slot yet", examples=[0])
    images_completed: int = Field(description="number of finished images", examples=[4])
    pixels_generated: int = Field(description="number of decoded sub-pixels", examples=[2744])
    quanta: int = Field(description="number of engine calls, each of several steps", examples=[345])
    step_seconds_sum: float = Field(description="sum, over all quanta, of the mean seconds per step", examples=[0.35])


class ComparisonStatus(BaseModel):
    id: fields.ComparisonId
    model: fields.Name
    status: fields.Phase


class Limits(BaseModel):
    max_n: int = Field(description="largest n that a request may have", examples=[16])
    max_queue: int = Field(description="images that may wait for a slot, per model", examples=[256])
    max_upload: int = Field(description="largest request body, in bytes", examples=[16777216])
    compare_budget: float = Field(description="longest comparison, in seconds", examples=[120.0])


class Status(BaseModel):
    """The values of /metrics that a page shows and updates, and the limits of requests."""

    status: Literal["ready", "starting", "draining", "gone"] = Field(description="whether requests are accepted; gone: "
                                                                     "the process is about to end")
    version: str = Field(description="version of LinPix", examples=["0.1.0"])
    torch: str = Field(description="version of torch", examples=["2.13.0"])
    kernel: str = Field(description="instruction set of the compiled kernels, cuda, or eager", examples=["avx512bf16"])
    uptime: float = Field(description="seconds since the start", examples=[22.15])
    requests_running: int = Field(description="requests with an image in a slot", examples=[1])
    requests_waiting: int = Field(description="requests without an image in a slot yet", examples=[0])
    requests_rejected: dict[str, int] = Field(description="refused requests, by "
                                                          "reason", examples=[{"queue_full": 0, "invalid": 2}])
    rows_sum: int = Field(description="sum, over all quanta, of the number of images", examples=[690])
    models: list[ModelStatus] = Field(description="one entry per model, the default one first")
    comparison: ComparisonStatus | None = Field(description="the latest comparison; null if there was none")
    limits: Limits = Field(description="limits of requests")


class Health(BaseModel):
    status: str = Field(description="alive for /healthz, ready for /readyz", examples=["alive"])
