"""How the service is doing: /v1/status, /metrics, /healthz and /readyz."""

import time

from fastapi import APIRouter, Response

from ...engine.ledger.ledger import ServedModel
from ...errors import Starting
from ..openapi import LEAVING, error_responses, ok_response
from ..service import ServiceDep
from ..status_schemas import (
    ComparisonStatus,
    Health,
    Limits,
    ModelStatus,
    Status,
)

router = APIRouter()
probes = APIRouter(tags=["operations"])  # on a separate port, if --metrics-port is set
_TEXT = {"text/plain": {"schema": {"type": "string"}, "example":
         "# HELP linpix_requests_running Requests with an image in a slot.\n"
                        "# TYPE linpix_requests_running gauge\nlinpix_requests_running 1.0\n"}}

# what /v1/status takes from the metrics
_STEP, _ROWS, _REJECTED, _WAITING = ("linpix_engine_step_seconds", "linpix_engine_step_batch_size_sum",
                                     "linpix_requests_rejected_total", "linpix_images_waiting")
_WATCHED = (f"{_STEP}_sum", f"{_STEP}_count", _ROWS, _REJECTED, _WAITING, "linpix_images_completed_total",
            "linpix_pixels_generated_total", "linpix_requests_running", "linpix_requests_waiting",
            "linpix_state_slots", "linpix_state_slots_used", "linpix_kernel_info")


@probes.get("/metrics", summary="Metrics for Prometheus", response_class=Response,
            responses=ok_response("all metrics", content=_TEXT))
async def metrics(service: ServiceDep) -> Response:
    """Prometheus text."""
    return Response((await service.ledger.measured()).text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/status", summary="State of the service", tags=["operations"],
            responses=ok_response("counters, queue, slots and limits"))
async def status(service: ServiceDep) -> Status:
    """Counters, queue, slots and the kernel in use, as in /metrics, and the limits of requests."""
    ledger, settings, latest = service.ledger, service.settings, await service.comparisons.latest()
    values = (await ledger.measured()).values(*_WATCHED)
    version, torch, kernel = next(labels for name, *labels in values if name == "linpix_kernel_info")
    return Status(
        status="gone" if ledger.gone else "draining" if ledger.draining else "ready" if ledger.ready else "starting",
        version=version, torch=torch, kernel=kernel, uptime=time.monotonic() - ledger.began,
        requests_running=int(values["linpix_requests_running",]),
        requests_waiting=int(values["linpix_requests_waiting",]),
        requests_rejected={labels[0]: int(x) for (name, *labels), x in values.items() if name == _REJECTED},
        rows_sum=int(values[_ROWS,]), models=[_status_of(served, values) for served in ledger.models.values()],
        comparison=latest and ComparisonStatus(id=latest.id, model=latest.model, status=latest.status),
        limits=Limits(max_n=service.max_images(*ledger.models.values()), max_queue=settings.max_queue,
                      max_upload=settings.max_upload, compare_budget=settings.compare_budget))


def _status_of(served: ServedModel, values: dict[tuple[str, ...], float]) -> ModelStatus:
    name, backend, facts = served.name, served.backend, served.facts
    return ModelStatus(
        id=name, backend=backend, engine=facts["engine"], precision=facts["precision"], device=facts["device"],
        slots=int(values["linpix_state_slots", name]), slots_used=int(values["linpix_state_slots_used", name]),
        images_waiting=int(sum(x for (metric, *labels), x in values.items() if metric == _WAITING
                               and labels[0] == name)),
        images_completed=int(values["linpix_images_completed_total", name, backend, "completed"]),
        pixels_generated=int(values["linpix_pixels_generated_total", name, backend]),
        quanta=int(values[f"{_STEP}_count", name, backend]), step_seconds_sum=values[f"{_STEP}_sum", name, backend])


@probes.head("/healthz", include_in_schema=False)
@probes.get("/healthz", summary="Whether the process is alive", responses=ok_response("the process is alive"))
async def healthz() -> Health:
    """The process is alive."""
    return Health(status="alive")


@probes.head("/readyz", include_in_schema=False)
@probes.get("/readyz", summary="Whether requests are accepted",
            responses=ok_response("requests are accepted", example={"status": "ready"})
            | error_responses(*LEAVING, Starting()))
async def readyz(service: ServiceDep) -> Health:
    """The weights are loaded, the engine runs, and the service is not draining."""
    service.ledger.check_open()
    if not service.ledger.ready:
        raise Starting()
    return Health(status="ready")
