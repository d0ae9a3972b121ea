"""Error handlers: one envelope for every route and cause."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..errors import (
    EXHAUSTED,
    InvalidRequest,
    ModelNotFound,
    OptionError,
    ServiceError,
    exhausted,
    in_seconds,
    not_json,
    shown,
)
from ..metrics import ENDPOINTS, Metrics
from .schemas import ErrorEnvelope, ErrorFields

logger = logging.getLogger("linpix")
_MIN_RETRY_MS = 250  # smallest retry-after-ms: when a body gives back its place cannot be predicted


def envelope(error: ServiceError) -> ErrorEnvelope:
    """For an answer, or for an `error` event inside a stream."""
    return ErrorEnvelope(error=ErrorFields(message=sendable(str(error)), type=error.type, code=error.code,
                                           param=None if error.param is None else sendable(error.param)))


def sendable(text: str) -> str:
    """A client's text, as it can be sent back: JSON may hold lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def response_of(error: ServiceError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(in_seconds(error.retry_after_s))
        headers["retry-after-ms"] = str(max(_MIN_RETRY_MS, round(1000 * error.retry_after_s)))  # for OpenAI's SDKs
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(envelope(error).model_dump_json(), error.status, headers, "application/json")


def install(app: FastAPI, *, metrics: Metrics) -> None:
    """Make every failure of the app answer with the envelope; Gate answers unexpected exceptions."""

    async def service_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ServiceError)
        if error.status in (400, 413, 415) or (isinstance(error, ModelNotFound) and request.method == "POST"):
            metrics.refused(error)
        if error.code == EXHAUSTED and (endpoint := request.url.path.rpartition("/")[2]) in ENDPOINTS:
            metrics.requests.labels(endpoint, "failed").inc()
        return response_of(error)

    async def option_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, OptionError)
        return await service_error(request, ServiceError(str(error), error.status, param=error.param))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        if first["type"] == "model_attributes_type" and isinstance(first.get("input"), bytes):  # not parsed as JSON
            return await service_error(request, not_json(request.headers.get("content-type", "none")))
        # a field of several types, such as label, has an error for each, whose place ends with the type
        places = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "int", "str")]
        wanted = " or ".join(other["msg"].removeprefix("Input should be ") if index else other["msg"]
                             for index, other in enumerate(error.errors()) if other["loc"][:-1] == first["loc"][:-1]
                             and (not index or other["loc"][-1] in ("int", "str")))
        if first["type"] == "json_invalid":
            message, param = f"the body is not JSON: {first.get('ctx', {}).get('error', 'syntax error')}", None
        else:
            param = ".".join(places) or None
            message = (f"{param or 'the body'}: {wanted[:1].lower()}{wanted[1:]}, "
                       f"got {shown(first.get('input'))}")
        return await service_error(request, InvalidRequest(message, param=param))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        cause: BaseException | None = error
        while cause is not None:  # FastAPI wraps exceptions that it meets while it reads a body
            if isinstance(cause, ServiceError):
                return await service_error(request, cause)
            if isinstance(cause, MemoryError):
                logger.error("not enough memory to read the body", exc_info=cause)
                return await service_error(request, exhausted())
            if isinstance(cause, ClientDisconnect):
                return Response(status_code=499)  # not read: the client left before its upload was complete
            cause = cause.__cause__
        message = str(error.detail)
        if isinstance(error.__cause__, UnicodeDecodeError):
            message = "the body is not JSON: it must be text in UTF-8"
        if error.status_code == 404:
            message = f"there is no route {request.url.path[:80]}; /docs lists the routes"
        headers = dict(error.headers or {})
        if error.status_code == 405:
            documented_path = next((path for path in app.openapi()["paths"] if _fits(path, request.url.path)), None)
            if documented_path is not None:  # the router names only the methods of the first route that matches
                headers["Allow"] = ", ".join(sorted(map(str.upper, app.openapi()["paths"][documented_path])))
            message = f"{request.method} is not allowed at {request.url.path}; allowed: {headers.get('Allow', 'GET')}"
        if error.status_code == 400:
            metrics.requests_rejected.labels("invalid").inc()
        return Response(envelope(ServiceError(message, error.status_code)).model_dump_json(), error.status_code,
                        headers, "application/json")

    app.add_exception_handler(ServiceError, service_error)
    app.add_exception_handler(OptionError, option_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)


def _fits(template: str, path: str) -> bool:
    """Whether a path is an instance of a documented one, such as /v1/compare/{id}."""
    parts, wanted = path.split("/"), template.split("/")
    return len(parts) == len(wanted) and all(w == p or w.startswith("{") for w, p in zip(wanted, parts, strict=True))
