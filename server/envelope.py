"""One error envelope for every route and cause."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from server.errors import (
    BodyTimeout,
    ClientLimit,
    DeadlinePassed,
    DeadlineUnreachable,
    Draining,
    InvalidRequest,
    QueueFull,
    ServiceError,
    TooManyBodies,
    UnsupportedMedia,
    in_seconds,
)
from server.metrics import Metrics
from server.schemas import ErrorEnvelope

_EXAMPLES = (BodyTimeout(1_460, 60.0), QueueFull(254, 4, 256, 12.0), ClientLimit(256, 1, 256, 3.0),
             TooManyBodies(512), Draining(), DeadlineUnreachable(2.0, 7.25, 90), DeadlinePassed(30.0))  # for OpenAPI
_BY_STATUS = {400: "invalid_value", 404: "not_found", 405: "method_not_allowed", 413: "payload_too_large",
              415: "unsupported_media_type"}


def body_of(error: ServiceError) -> dict[str, Any]:
    """The envelope as JSON, for an answer or for an `error` event inside a stream."""
    return {"error": {"message": sendable(str(error)), "type": error.type,
                      "param": None if error.param is None else sendable(error.param), "code": error.code}}


def sendable(text: str) -> str:
    """What a client wrote, to be told it again: JSON lets lone surrogates in, and UTF-8 does not let them out."""
    return text.encode("utf-8", "backslashreplace").decode()


def response_of(error: ServiceError) -> JSONResponse:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(in_seconds(error.retry_after_s))
        headers["retry-after-ms"] = str(max(1, round(1000 * error.retry_after_s)))  # OpenAI's clients look at it first
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body_of(error), error.status, headers)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that can answer these errors, for OpenAPI."""
    return {status: _document(status) for status in statuses}


def _document(status: int) -> dict[str, Any]:
    examples = [error for error in _EXAMPLES if error.status == status]
    found: dict[str, Any] = {"model": ErrorEnvelope}
    if examples:
        found["content"] = {"application/json": {"examples": {error.code: {"value": body_of(error)}
                                                              for error in examples}}}
    if any(error.retry_after_s is not None for error in examples):
        found["headers"] = {"Retry-After": {
            "description": "seconds until it is worth another try, computed from the steps that remain",
            "schema": {"type": "integer", "minimum": 1}}}
    return found


def linked(status: int, **links: dict[str, str]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route whose answer holds what others are asked with, for OpenAPI.

    links: by the other route's operation id, where the answer has which of its parameters; for `generate`, which has
    none, of its body's fields.
    """
    return {status: {"links": {
        operation: {"operationId": operation, "requestBody" if operation == "generate" else "parameters": {
            name: f"$response.body#/{place}" for name, place in places.items()}}
        for operation, places in links.items()}}}


def event_stream(description: str) -> dict[str, Any]:
    """The `content` of a stream of server-sent events, for OpenAPI."""
    event = {"type": "object", "required": ["event", "data"], "properties": {
        "event": {"type": "string"},
        "data": {"type": "string", "contentMediaType": "application/json", "description": description}}}
    return {"text/event-stream": {"itemSchema": event}}


def install(app: FastAPI, *, metrics: Metrics) -> None:
    """Make every failure of the app answer the envelope; the guard sees to those that nobody expected."""

    async def service_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ServiceError)
        if error.status in (400, 413, 415):
            metrics.requests_rejected.labels("too_large" if error.status == 413 else "invalid").inc()
        return response_of(error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        if first["type"] == "model_attributes_type" and isinstance(first.get("input"), bytes):  # not parsed as JSON
            return await service_error(request, UnsupportedMedia(
                "the body must be JSON: send the header 'Content-Type: application/json', got "
                f"{request.headers.get('content-type', 'none')!r}"))
        places = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
        if first["type"] == "json_invalid":
            message, param = f"the body is not JSON: {first.get('ctx', {}).get('error', 'syntax error')}", None
        else:
            param = ".".join(places) or None
            got = repr(first.get("input"))
            got = got if len(got) <= 80 else got[:77] + "..."
            message = f"{param or 'the body'}: {first['msg'][:1].lower()}{first['msg'][1:]}, got {got}"
        return await service_error(request, InvalidRequest(message, param=param))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        cause: BaseException | None = error
        while cause is not None:  # FastAPI wraps what goes wrong while it reads a body
            if isinstance(cause, ServiceError):
                return await service_error(request, cause)
            if isinstance(cause, ClientDisconnect):
                return Response(status_code=499)  # nobody reads it: the client left before its upload was whole
            cause = cause.__cause__
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is nothing at {request.url.path}; /docs lists the routes"
        headers = dict(error.headers or {})
        if error.status_code == 405:
            documented_path = next((path for path in app.openapi()["paths"] if _fits(path, request.url.path)), None)
            if documented_path is not None:  # the router names the methods of the first route that matches only
                headers["Allow"] = ", ".join(sorted(map(str.upper, app.openapi()["paths"][documented_path])))
            message = f"{request.method} is not allowed at {request.url.path}; allowed: {headers.get('Allow', 'GET')}"
        answer = ServiceError(message)
        body = body_of(answer)["error"] | {"code": _BY_STATUS.get(error.status_code, "error"),
                                           "type": "invalid_request_error" if error.status_code < 500
                                           else "server_error"}
        if error.status_code == 400:
            metrics.requests_rejected.labels("invalid").inc()
        return JSONResponse({"error": body}, error.status_code, headers)

    app.add_exception_handler(ServiceError, service_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)


def _fits(template: str, path: str) -> bool:
    """Whether a path is an instance of a documented one, such as /v1/compare/{id}."""
    parts, wanted = path.split("/"), template.split("/")
    return len(parts) == len(wanted) and all(w == p or w.startswith("{") for w, p in zip(wanted, parts, strict=True))
