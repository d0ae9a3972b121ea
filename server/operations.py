"""What is loaded, how it is doing, and comparisons of backends: every route but the images."""

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.sse import EventSourceResponse, format_sse_event
from fastapi.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from server import compare, fields, images, pictures
from server.backends import BACKENDS
from server.batcher import Batcher
from server.comparisons import Comparisons, Job
from server.errors import (
    ComparisonNotFound,
    Conflict,
    Draining,
    EngineGone,
    InvalidRequest,
    JustCancelled,
    ModelNotFound,
    NotJson,
    Starting,
)
from server.guard import content_policy
from server.openapi import BODY, LEAVING, answered, documented, event_stream
from server.schemas import (
    COMPARE,
    REPORT,
    CompareBody,
    Comparison,
    ComparisonStatus,
    Health,
    Limits,
    ModelCard,
    ModelList,
    ModelStatus,
    Status,
)
from server.service import ServiceDep
from server.twins import not_compared

router = APIRouter()
probes = APIRouter(tags=["operations"])  # on a port of their own, where there is one
STATIC = Path(__file__).parent / "static"
# a page and its modules must be of one release, and are small: parts of them, which nobody wants, would have errors
REVALIDATE = {"cache-control": "no-cache", "accept-ranges": "none"}
_CANCELLED = {"status": "cancelled", "progress": 0.0}  # in examples: before it had begun
_EVENTS = event_stream(Comparison, {
    "comparison.progress": {"report": REPORT}, "comparison.cancelled": _CANCELLED,
    "comparison.completed": {"status": "completed", "progress": 1.0, "report": REPORT},
    "comparison.failed": {"status": "failed",
                          "error": "the engine has shown no sign of life for 600 s, with work to do"}})
_TEXT = {"text/plain": {"schema": {"type": "string"}, "example":
         "# HELP linpix_requests_running Requests with an image in a slot.\n"
         "# TYPE linpix_requests_running gauge\nlinpix_requests_running 1.0\n"}}

# what /v1/status takes from the metrics
_STEP, _ROWS, _REJECTED = ("linpix_engine_step_seconds", "linpix_engine_step_batch_size_sum",
                           "linpix_requests_rejected_total")
_WATCHED = (f"{_STEP}_sum", f"{_STEP}_count", _ROWS, _REJECTED, "linpix_images_completed_total",
            "linpix_pixels_generated_total", "linpix_requests_running", "linpix_requests_waiting",
            "linpix_state_slots", "linpix_state_slots_used", "linpix_kernel_info")


def card_of(name: str, batcher: Batcher) -> ModelCard:
    engine, config = batcher.engine, batcher.engine.config
    return ModelCard(
        id=name, created=int(engine.checkpoint.provenance.get("created", 0)), checkpoint=engine.checkpoint.digest,
        bits_per_dim=engine.checkpoint.provenance.get("bits_per_dim") or {}, engine=engine.name,
        precision=engine.precision, device=engine.device, state=engine.state_format, attention=config.attention,
        width=config.width, height=config.height,
        channels=config.channels, classes=list(engine.checkpoint.class_names), sizes=pictures.sizes(config),
        state_bytes=engine.checkpoint.net.attention.state_bytes, slots=engine.slots)


@router.get("/v1/models", tags=["models"], responses=answered("all that is", links={"model": {"model": "data/0/id"}}))
async def models(service: ServiceDep) -> ModelList:
    """What is loaded, the default model first."""
    return ModelList(data=[card_of(name, batcher) for name, batcher in service.worker.batchers.items()])


@router.get("/v1/models/{model}", tags=["models"], operation_id="model",
            responses=answered("what it is", links={"generate": {"model": "id"}})
            | documented(ModelNotFound("mnist-large", ["mnist-small"])))
async def model(model: fields.Name, service: ServiceDep) -> ModelCard:
    """One loaded model."""
    return card_of(*service.find(model))


@router.post("/v1/compare", tags=["compare"], status_code=202, response_model=Comparison,
             responses=answered("it has begun", 202, example={"progress": 0.0},
                                links={"comparison": {"id": "id"}, "cancel_comparison": {"id": "id"}})
             | documented(InvalidRequest("budget must be at most 120 seconds, got 600", param="budget"),
                          ModelNotFound("mnist-large", ["mnist-small"]), Conflict("cmp-1"), JustCancelled("cmp-1", 0.8),
                          NotJson("text/plain"), *BODY, *LEAVING))
async def begin_comparison(body: Annotated[CompareBody, Body(openapi_examples=COMPARE)], service: ServiceDep
                           ) -> dict[str, Any]:
    """Compare attention backends on this machine, between live requests; one comparison at a time."""
    name, batcher = service.find(body.model)
    if service.worker.draining:
        raise Draining()
    if service.worker.gone:
        raise EngineGone(service.worker.gone)
    if obstacle := not_compared(batcher.engine.checkpoint):
        raise InvalidRequest(obstacle, param="model")
    if body.budget > service.settings.compare_budget:
        raise InvalidRequest(f"budget must be at most {service.settings.compare_budget:g} seconds, "
                             f"got {body.budget:g}", param="budget")
    try:
        plan = compare.ComparisonPlan(backends=tuple(body.backends or BACKENDS), batches=tuple(body.batch),
                                      budget_s=body.budget)
    except ValueError as error:
        raise InvalidRequest(str(error), param="backends") from error
    return service.comparisons.begin(name, batcher.engine.checkpoint, plan).to_json()


@router.get("/v1/compare/{id}", tags=["compare"], response_model=Comparison, operation_id="comparison",
            responses=answered("how it stands", content=_EVENTS) | documented(ComparisonNotFound("cmp-2", ["cmp-1"])))
async def comparison(id: fields.ComparisonId, service: ServiceDep,
                     accept: Annotated[str, Header(include_in_schema=False)] = "") -> Any:
    """Progress and result; as server-sent events with `Accept: text/event-stream`."""
    job = service.comparisons.find(id)
    if images.preferred(accept) == "text/event-stream":
        return EventSourceResponse(_events(service.comparisons, job))
    return job.to_json()


async def _events(comparisons: Comparisons, job: Job) -> AsyncIterator[bytes]:
    async for state in comparisons.watch(job):
        kind = "progress" if state["status"] == "running" else state["status"]
        yield format_sse_event(event=f"comparison.{kind}", data_str=json.dumps(state))


@router.delete("/v1/compare/{id}", tags=["compare"], response_model=Comparison, operation_id="cancel_comparison",
               responses=answered("how it stands then", example=_CANCELLED)
               | documented(ComparisonNotFound("cmp-2", ["cmp-1"])))
async def cancel_comparison(id: fields.ComparisonId, service: ServiceDep) -> dict[str, Any]:
    """Stop a comparison, whoever began it; what it has measured stays readable."""
    return service.comparisons.cancel(id).to_json()


@probes.get("/metrics", response_class=Response, responses=answered("every metric", content=_TEXT))
async def metrics(service: ServiceDep) -> Response:
    """Prometheus text."""
    return Response(service.worker.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/status", tags=["operations"], responses=answered("how it goes"))
async def status(service: ServiceDep) -> Status:
    """Counters, queue, slots and the kernel in use, as /metrics has them, and what may be asked for."""
    worker, settings, latest = service.worker, service.settings, service.comparisons.latest
    values = worker.metrics.values(*_WATCHED)
    [(version, torch, kernel)] = [labels for name, *labels in values if name == "linpix_kernel_info"]
    return Status(
        status="gone" if worker.gone else "draining" if worker.draining else "ready" if worker.stepping else "starting",
        version=version, torch=torch, kernel=kernel, uptime=time.monotonic() - worker.began,
        requests_running=int(values["linpix_requests_running",]),
        requests_waiting=int(values["linpix_requests_waiting",]),
        requests_rejected={labels[0]: int(x) for (name, *labels), x in values.items() if name == _REJECTED},
        rows_sum=int(values[_ROWS,]), models=[_status_of(batcher, values) for batcher in worker.batchers.values()],
        comparison=latest and ComparisonStatus(id=latest.id, model=latest.model, status=latest.status),
        limits=Limits(max_n=service.most(*worker.batchers.values()), max_queue=settings.max_queue,
                      max_upload=settings.max_upload, compare_budget=settings.compare_budget))


def _status_of(batcher: Batcher, values: dict[tuple[str, ...], float]) -> ModelStatus:
    engine, (name, backend) = batcher.engine, batcher.labels
    return ModelStatus(
        id=name, backend=backend, engine=engine.name, precision=engine.precision, device=engine.device,
        slots=int(values["linpix_state_slots", name]), slots_used=int(values["linpix_state_slots_used", name]),
        images_waiting=batcher.queued(),
        images_completed=int(values["linpix_images_completed_total", name, backend, "completed"]),
        pixels_generated=int(values["linpix_pixels_generated_total", name, backend]),
        quanta=int(values[f"{_STEP}_count", name, backend]), step_seconds_sum=values[f"{_STEP}_sum", name, backend])


@probes.head("/healthz", include_in_schema=False)
@probes.get("/healthz", responses=answered("it is"))
async def healthz() -> Health:
    """The process is alive."""
    return Health(status="alive")


@probes.head("/readyz", include_in_schema=False)
@probes.get("/readyz", responses=answered("all of it", example={"status": "ready"}) | documented(*LEAVING, Starting()))
async def readyz(service: ServiceDep) -> Health:
    """Weights loaded, engine stepping, not draining."""
    if service.worker.draining:
        raise Draining()
    if service.worker.gone:
        raise EngineGone(service.worker.gone)
    if not service.worker.stepping:
        raise Starting()
    return Health(status="ready")


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def page(request: Request) -> FileResponse:
    _in_whole(request.scope)
    return FileResponse(STATIC / "index.html", headers=REVALIDATE)


def _in_whole(scope: Scope) -> None:
    scope["headers"] = [(name, value) for name, value in scope["headers"] if name not in (b"range", b"if-range")]


class Static(StaticFiles):
    """The page's files, asked about anew each time: their ETag answers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _in_whole(scope)
        await super().__call__(scope, receive, send)

    def file_response(self, *arguments: Any, **named: Any) -> Response:
        response = super().file_response(*arguments, **named)
        response.headers.update(REVALIDATE)
        return response


@router.head("/docs", include_in_schema=False)
@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    page = get_swagger_ui_html(openapi_url=str(request.app.openapi_url), title="LinPix",
                               swagger_js_url="/static/swagger-ui-bundle.js", swagger_css_url="/static/swagger-ui.css",
                               swagger_favicon_url="/static/favicon.svg")
    page.headers["content-security-policy"] = content_policy(bytes(page.body).decode(), style_attributes=True)
    return page
