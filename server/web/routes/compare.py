"""/v1/compare: comparisons of attention backends, one at a time."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header
from fastapi.sse import EventSourceResponse, format_sse_event

from ... import errors
from ...compare.backends import backends
from ...compare.checkpoints import check_comparable
from ...compare.comparison import ComparisonPlan
from ...compare.jobs import Comparisons, Run
from ...errors import InvalidRequest, ServiceError
from ..openapi import BODY, LEAVING, error_responses, event_stream, ok_response
from ..request_schemas import COMPARE, CompareBody
from ..schemas import Comparison, ComparisonId
from ..service import Service, ServiceDep, preferred

router = APIRouter(tags=["compare"])


@router.post(
    "/v1/compare",
    status_code=202,
    summary="Start a comparison",
    response_model=Comparison,
    responses=ok_response(
        "the comparison has started",
        202,
        links={"watch_comparison": {"id": "id"}, "cancel_comparison": {"id": "id"}},
    )
    | error_responses(
        InvalidRequest("budget must be at most 120 seconds, got 600", param="budget"),
        errors.model_not_found("mnist-large", ["mnist-small"]),
        errors.still_running("cmp-1"),
        errors.just_cancelled("cmp-1", 0.8),
        errors.not_json("text/plain"),
        *BODY,
        *LEAVING,
    ),
)
async def begin_comparison(
    body: Annotated[CompareBody, Body(openapi_examples=COMPARE)], service: ServiceDep
) -> Run:
    """Compare attention backends on this machine, between live requests; one comparison at a
    time.
    """
    comparable = (
        name for name, served in service.requests.drawer.models.items() if not served.config.packed
    )
    # the default model may not be comparable
    served = service.find(body.model or next(comparable, None))
    service.requests.check_open()
    check_comparable(served.checkpoint)
    if body.budget > service.settings.compare_budget:
        raise InvalidRequest(
            f"budget must be at most {service.settings.compare_budget:g} seconds, "
            f"got {body.budget:g}",
            param="budget",
        )
    plan = ComparisonPlan(
        backends=tuple(body.backends or backends()), batches=tuple(body.batch), budget_s=body.budget
    )
    return _comparisons(service).begin(served, plan)


def _comparisons(service: Service) -> Comparisons:
    """Raises ServiceError where images are drawn by replicas."""
    if service.comparisons is None:
        raise ServiceError(
            "comparisons run where one process serves alone: start linpix serve without --replicas,"
            " or run linpix compare",
            404,
        )
    return service.comparisons


@router.get(
    "/v1/compare/{id}",
    summary="Watch a comparison",
    response_model=Comparison,
    responses=ok_response(
        "progress and results so far",
        content=event_stream(
            "comparison.progress, and at the end comparison.completed, .cancelled or .failed",
            Comparison,
        ),
    )
    | error_responses(errors.comparison_not_found("cmp-2", ["cmp-1"])),
)
async def watch_comparison(
    id: ComparisonId,
    service: ServiceDep,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Any:
    """Progress and result; as server-sent events with `Accept: text/event-stream`."""
    comparisons = _comparisons(service)
    job = comparisons.find(id)
    if preferred(accept) == "text/event-stream":
        return EventSourceResponse(_events(comparisons, id))
    return job


async def _events(comparisons: Comparisons, id: str) -> AsyncIterator[bytes]:
    async for job in comparisons.watch(id):
        kind = "progress" if job.status == "running" else job.status
        sent = Comparison.model_validate(job, from_attributes=True)
        yield format_sse_event(
            event=f"comparison.{kind}", data_str=sent.model_dump_json(ensure_ascii=True)
        )


@router.delete(
    "/v1/compare/{id}",
    summary="Cancel a comparison",
    response_model=Comparison,
    responses=ok_response("the comparison after it was cancelled")
    | error_responses(errors.comparison_not_found("cmp-2", ["cmp-1"])),
)
async def cancel_comparison(id: ComparisonId, service: ServiceDep) -> Run:
    """Stop a comparison, whichever client began it; what it has measured stays readable."""
    return _comparisons(service).cancel(id)
