"""What is loaded, how it is doing, and comparisons of backends: every route but the images."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.sse import EventSourceResponse, format_sse_event

from server import compare, images, pictures
from server.backends import BACKENDS
from server.batcher import Batcher
from server.comparisons import Comparisons, Job
from server.envelope import documented, event_stream
from server.errors import Draining, EngineGone, InvalidRequest, Starting
from server.guard import content_policy
from server.schemas import CompareBody, Comparison, Health, ModelCard, ModelList
from server.service import ServiceDep
from server.twins import find_twins

router = APIRouter()
probes = APIRouter(tags=["operations"])  # on a port of their own, where there is one
STATIC = Path(__file__).parent / "static"
_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": event_stream("the comparison as the plain answer has it")}}


def card_of(name: str, batcher: Batcher) -> ModelCard:
    engine, config = batcher.engine, batcher.engine.config
    return ModelCard(
        id=name, created=int(engine.checkpoint.provenance.get("created", 0)), checkpoint=engine.checkpoint.digest,
        bits_per_dim=engine.checkpoint.provenance.get("bits_per_dim") or {}, engine=engine.name,
        precision=engine.precision, device=engine.device, state=engine.state_format, attention=config.attention,
        width=config.width, height=config.height,
        channels=config.channels, classes=list(engine.checkpoint.class_names), sizes=pictures.sizes(config),
        state_bytes=engine.checkpoint.net.attention.state_bytes, slots=engine.slots)


@router.get("/v1/models", tags=["models"], responses=documented(401))
async def models(service: ServiceDep) -> ModelList:
    """What is loaded, the default model first."""
    return ModelList(data=[card_of(name, batcher) for name, batcher in service.worker.batchers.items()])


@router.get("/v1/models/{model}", tags=["models"], responses=documented(400, 401, 404))
async def model(model: str, service: ServiceDep) -> ModelCard:
    """One loaded model."""
    return card_of(*service.find(model))


@router.post("/v1/compare", tags=["compare"], status_code=202, response_model=Comparison,
             responses=documented(400, 401, 403, 404, 409, 413, 503))
async def begin_comparison(body: CompareBody, service: ServiceDep) -> dict[str, Any]:
    """Compare attention backends on this machine, between live requests; one comparison at a time."""
    name, batcher = service.find(body.model)
    if service.worker.draining:
        raise Draining()
    if service.worker.gone:
        raise EngineGone(service.worker.gone)
    if body.budget > service.settings.compare_budget:
        raise InvalidRequest(f"budget must be at most {service.settings.compare_budget:g} seconds, "
                             f"got {body.budget:g}", param="budget")
    try:
        plan = compare.ComparisonPlan(backends=tuple(body.backends or BACKENDS), batches=tuple(body.batch),
                                      budget_s=body.budget)
    except ValueError as error:
        raise InvalidRequest(str(error), param="backends") from error
    checkpoint = batcher.engine.checkpoint

    def make() -> compare.Comparison:
        return compare.Comparison(checkpoint, find_twins(checkpoint, checkpoint.folder.parent), plan)

    return service.comparisons.begin(name, body.budget, make).to_json()


@router.get("/v1/compare/{id}", tags=["compare"], response_model=Comparison,
            responses=_EVENTS | documented(400, 401, 404))
async def comparison(id: str, service: ServiceDep, accept: Annotated[str, Header(include_in_schema=False)] = ""
                     ) -> Any:
    """Progress and result; as server-sent events with `Accept: text/event-stream`."""
    job = service.comparisons.find(id)
    if images.preferred(accept) == "text/event-stream":
        return EventSourceResponse(_events(service.comparisons, job))
    return job.to_json()


async def _events(comparisons: Comparisons, job: Job) -> AsyncIterator[bytes]:
    async for state in comparisons.watch(job):
        kind = "progress" if state["status"] == "running" else state["status"]
        yield format_sse_event(event=f"comparison.{kind}", data_str=json.dumps(state))


@router.delete("/v1/compare/{id}", tags=["compare"], response_model=Comparison,
               responses=documented(400, 401, 403, 404))
async def cancel_comparison(id: str, service: ServiceDep) -> dict[str, Any]:
    """Stop a comparison; what it has measured stays readable."""
    return service.comparisons.cancel(id).to_json()


@probes.get("/metrics", response_class=Response, responses=_TEXT)
async def metrics(service: ServiceDep) -> Response:
    """Prometheus text."""
    return Response(service.worker.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@probes.get("/healthz")
async def healthz() -> Health:
    """The process is alive."""
    return Health(status="alive")


@probes.get("/readyz", responses=documented(503))
async def readyz(service: ServiceDep) -> Health:
    """Weights loaded, engine stepping, not draining."""
    if service.worker.draining:
        raise Draining()
    if service.worker.gone:
        raise EngineGone(service.worker.gone)
    if not service.worker.stepping:
        raise Starting()
    return Health(status="ready")


@router.get("/", include_in_schema=False)
async def page() -> HTMLResponse:
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    return HTMLResponse(html, headers={"content-security-policy": content_policy(html)})


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    page = get_swagger_ui_html(openapi_url=str(request.app.openapi_url), title="LinPix",
                               swagger_js_url="/static/swagger-ui-bundle.js", swagger_css_url="/static/swagger-ui.css",
                               swagger_favicon_url="/static/favicon.svg")
    page.headers["content-security-policy"] = content_policy(bytes(page.body).decode(), style_attributes=True)
    return page
