"""How the service is doing: /v1/status, /metrics, /healthz and /readyz."""

import gzip
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Response
from pydantic import Field

from ...engine.request import ServedModel
from ...errors import starting
from ..openapi import LEAVING, error_responses, ok_response
from ..schemas import Described, Device, Engine, LatestComparison, Name, Precision, Slots
from ..service import ServiceDep, weights

router = APIRouter()
probes = APIRouter(tags=["operations"])  # on a separate port, if --metrics-port is set
_TEXT = {
    "text/plain": {
        "schema": {"type": "string"},
        "example": (
            "# HELP linpix_requests_running Requests of which an image has had a slot.\n"
            "# TYPE linpix_requests_running gauge\nlinpix_requests_running 1.0\n"
        ),
    }
}

# what /v1/status takes from the metrics
_STEP, _ROWS, _REJECTED, _WAITING = (
    "linpix_engine_step_seconds",
    "linpix_engine_step_batch_size_sum",
    "linpix_requests_rejected_total",
    "linpix_images_waiting",
)
_WATCHED = (
    f"{_STEP}_sum",
    f"{_STEP}_count",
    _ROWS,
    _REJECTED,
    _WAITING,
    "linpix_images_completed_total",
    "linpix_pixels_generated_total",
    "linpix_requests_running",
    "linpix_requests_waiting",
    "linpix_state_slots",
    "linpix_state_slots_used",
    "linpix_kernel_info",
)


# --- answers; the examples are of the shipped `mnist-small` ---


class ModelStatus(Described):
    """Counters grow from the start of the process: a rate is the difference of two answers over
    their `uptime`s.
    """

    id: Name
    backend: str = Field(examples=["linear"])
    """kind of decoding: linear or stateful-softmax"""
    engine: Engine
    precision: Precision
    device: Device
    slots: Slots
    slots_used: int = Field(examples=[2])
    """number of slots that hold an image"""
    images_waiting: int = Field(examples=[0])
    """number of admitted images that have no slot yet"""
    images_completed: int = Field(examples=[4])
    """number of finished images"""
    pixels_generated: int = Field(examples=[2744])
    """number of decoded sub-pixels"""
    quanta: int = Field(examples=[345])
    """number of engine calls, each of several steps"""
    step_seconds_sum: float = Field(examples=[0.35])
    """sum, over all quanta, of the mean seconds per step"""


class Limits(Described):
    max_n: int = Field(examples=[16])
    """largest n that a request may have"""
    max_queue: int = Field(examples=[256])
    """images that may wait for a slot, per model"""
    max_upload: int = Field(examples=[16777216])
    """largest request body, in bytes"""
    compare_budget: float = Field(examples=[120.0])
    """longest comparison, in seconds"""


class Status(Described):
    """The values of /metrics that a page shows and updates, and the limits of requests."""

    status: Literal["ready", "starting", "draining", "gone"]
    """whether requests are accepted; gone: the process is about to end"""
    version: str = Field(examples=["0.1.0"])
    """version of LinPix"""
    torch: str = Field(examples=["2.13.0"])
    """version of torch"""
    kernel: str = Field(examples=["avx512bf16"])
    """instruction set of the compiled kernels, cuda, or eager"""
    uptime: float = Field(examples=[22.15])
    """seconds since the start"""
    requests_running: int = Field(examples=[1])
    """requests of which an image has had a slot"""
    requests_waiting: int = Field(examples=[0])
    """requests of which no image has had a slot yet"""
    requests_rejected: dict[str, int] = Field(examples=[{"queue_full": 0, "invalid": 2}])
    """refused requests, by reason"""
    rows_sum: int = Field(examples=[690])
    """sum, over all quanta, of the number of images"""
    models: list[ModelStatus]
    """one entry per model, the default one first"""
    comparison: LatestComparison | None
    """the latest comparison; null if there was none"""
    limits: Limits
    """limits of requests"""


# --- routes ---


@probes.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    responses=ok_response("all metrics", content=_TEXT),
)
async def show_metrics(
    service: ServiceDep, accept_encoding: Annotated[str, Header(include_in_schema=False)] = ""
) -> Response:
    """Prometheus text."""
    text = service.requests.metrics.text()
    headers = {"vary": "accept-encoding"}
    if weights(accept_encoding).get("gzip"):
        text = gzip.compress(text, compresslevel=1)
        headers["content-encoding"] = "gzip"
    return Response(text, 200, headers, "text/plain; version=0.0.4; charset=utf-8")


@router.get(
    "/v1/status",
    summary="State of the service",
    tags=["operations"],
    responses=ok_response("counters, queue, slots and limits"),
)
async def show_status(service: ServiceDep) -> Status:
    """Counters, queue, slots and the kernel in use, as in /metrics, and the limits of requests."""
    requests, settings = service.requests, service.settings
    drawer = requests.drawer
    latest = service.comparisons and service.comparisons.latest()
    values = requests.metrics.values(*_WATCHED)
    version, torch, kernel = next(
        labels for name, *labels in values if name == "linpix_kernel_info"
    )
    return Status(
        status=(
            "gone"
            if drawer.gone
            else "draining"
            if requests.draining
            else "ready"
            if service.ready
            else "starting"
        ),
        version=version,
        torch=torch,
        kernel=kernel,
        uptime=time.monotonic() - requests.began,
        requests_running=int(values["linpix_requests_running",]),
        requests_waiting=int(values["linpix_requests_waiting",]),
        requests_rejected={
            labels[0]: int(x) for (name, *labels), x in values.items() if name == _REJECTED
        },
        rows_sum=int(values[_ROWS,]),
        models=[_status_of(served, values) for served in drawer.models.values()],
        comparison=latest
        and LatestComparison(id=latest.id, model=latest.model, status=latest.status),
        limits=Limits(
            max_n=service.max_images(*drawer.models.values()),
            max_queue=settings.max_queue,
            max_upload=settings.max_upload,
            compare_budget=settings.compare_budget,
        ),
    )


def _status_of(served: ServedModel, values: dict[tuple[str, ...], float]) -> ModelStatus:
    name, backend = served.name, served.backend
    facts: dict[str, Any] = served.facts
    return ModelStatus(
        id=name,
        backend=backend,
        **facts,
        # replicas have their own
        slots=served.slots,
        slots_used=int(values.get(("linpix_state_slots_used", name), 0)),
        images_waiting=int(
            sum(
                x
                for (metric, *labels), x in values.items()
                if metric == _WAITING and labels[0] == name
            )
        ),
        images_completed=int(values["linpix_images_completed_total", name, backend, "completed"]),
        pixels_generated=int(values["linpix_pixels_generated_total", name, backend]),
        quanta=int(values[f"{_STEP}_count", name, backend]),
        step_seconds_sum=values[f"{_STEP}_sum", name, backend],
    )


@probes.get(
    "/healthz",
    summary="Whether the process is alive",
    responses=ok_response(
        "the process is alive", content={"application/json": {"example": {"status": "alive"}}}
    ),
)
async def check_alive() -> dict[str, str]:
    """The process is alive."""
    return {"status": "alive"}


@probes.get(
    "/readyz",
    summary="Whether requests are accepted",
    responses=ok_response(
        "requests are accepted", content={"application/json": {"example": {"status": "ready"}}}
    )
    | error_responses(*LEAVING, starting()),
)
async def check_ready(service: ServiceDep) -> dict[str, str]:
    """The weights are loaded, the engine runs, and the service is not draining."""
    service.requests.check_open()
    if not service.ready:
        raise starting()
    return {"status": "ready"}
