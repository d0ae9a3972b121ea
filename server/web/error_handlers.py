"""Error handlers: one envelope for every route and cause."""

import logging
import sys
from typing import Any

from fastapi import Request as Http
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path

from .. import errors
from ..errors import (
    EXHAUSTED,
    MODEL_NOT_FOUND,
    UNEXPECTED,
    ClientLeft,
    DeadlinePassed,
    InvalidRequest,
    ServiceError,
    in_seconds,
    shown,
)
from ..metrics import ENDPOINTS, REJECTIONS, Metrics
from .schemas import ErrorEnvelope, ErrorFields

logger = logging.getLogger("linpix")
_MIN_RETRY_MS = 250  # smallest retry-after-ms: when a body gives back its place cannot be predicted
# of refusals: by status, or else by code, if it is not the code itself
_REASONS: dict[object, str] = {
    400: "invalid",
    401: "unauthorized",
    413: "too_large",
    415: "invalid",
    MODEL_NOT_FOUND: "invalid",
}


def envelope(error: ServiceError) -> ErrorEnvelope:
    """For an answer, or for an `error` event inside a stream."""
    return ErrorEnvelope(
        error=ErrorFields(
            message=sendable(str(error)),
            type=error.type,
            code=error.code,
            param=None if error.param is None else sendable(error.param),
        )
    )


def sendable(text: str) -> str:
    """A client's text, as it can be sent back: JSON may hold lone surrogates, which UTF-8 cannot
    encode.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def response_of(error: ServiceError, allow: str = "") -> Response:
    """allow: the methods of a path, for 405."""
    headers = {"allow": allow} if allow else {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(in_seconds(error.retry_after_s))
        # for OpenAI's SDKs
        headers["retry-after-ms"] = str(max(_MIN_RETRY_MS, round(1000 * error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(envelope(error).model_dump_json(), error.status, headers, "application/json")


async def handle(http: Http, failure: Exception) -> Response:
    """The answer to every request that fails before its answer begins. Gate calls it for what
    routes do not raise.
    """
    allow = ""
    if isinstance(failure, ServiceError):
        error = failure
    elif isinstance(failure, RequestValidationError):
        error = _of_fields(failure)
    else:
        assert isinstance(failure, HTTPException)
        if failure.status_code == 405:
            allow = _allowed(http)
            failure.detail = f"{http.method} is not allowed at {http.url.path}; allowed: {allow}"
        error = _of_http(http, failure)
    if not getattr(http.state, "counted", False):
        _count(http, error)
    return response_of(error, allow)


def _count(http: Http, error: ServiceError) -> None:
    """Count a request that was not admitted."""
    metrics: Metrics = http.app.state.service.requests.metrics
    reason = _REASONS.get(error.status) or _REASONS.get(error.code, error.code)
    if isinstance(error, DeadlinePassed):
        metrics.deadlines_passed.labels("reading").inc()
    elif (
        error.code in (EXHAUSTED, UNEXPECTED)
        and (endpoint := http.scope["path"].rpartition("/")[2]) in ENDPOINTS
    ):
        metrics.requests.labels(endpoint, "failed").inc()
    # else it asks how we are
    elif reason in REJECTIONS and (http.method == "POST" or error.status not in (404, 503)):
        metrics.requests_rejected.labels(reason).inc()


HANDLERS: dict[Any, Any] = dict.fromkeys(
    (ServiceError, RequestValidationError, HTTPException), handle
)


def _of_fields(failure: RequestValidationError) -> ServiceError:
    first = failure.errors()[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(
            f"the body is not JSON: {first.get('ctx', {}).get('error', 'syntax error')}"
        )
    if first["type"] == "string_unicode":
        return InvalidRequest(
            f"the body has a field named {shown(first['input'])}, which is half a surrogate pair"
            " and not text; leave it out, or write the whole character"
        )
    if first["loc"] == ("body",):
        return InvalidRequest(
            f"the body must be a JSON object, such as {{}}, got {shown(first['input'])}"
        )
    # a field of several types, such as label, has an error for each, whose place ends with the type
    places = ("body", "query", "path", "int", "str")
    param = ".".join(str(part) for part in first["loc"] if part not in places) or None
    wanted = " or ".join(
        other["msg"].removeprefix("Input should be ") if index else other["msg"]
        for index, other in enumerate(failure.errors())
        if other["loc"][:-1] == first["loc"][:-1]
        and (not index or other["loc"][-1] in ("int", "str"))
    )
    return InvalidRequest(
        f"{param}: {wanted[:1].lower()}{wanted[1:]}, got {shown(first.get('input'))}", param=param
    )


def _of_http(http: Http, failure: HTTPException) -> ServiceError:
    cause: BaseException | None = failure
    while cause is not None:  # FastAPI wraps exceptions that it meets while it reads a body
        if isinstance(cause, ServiceError):
            return cause
        if isinstance(cause, MemoryError):
            logger.error("not enough memory to read the body", exc_info=cause)
            return errors.exhausted()
        if isinstance(cause, ClientDisconnect):
            return ClientLeft("the client disconnected before its upload was complete")
        cause = cause.__cause__
    message = str(failure.detail)
    if isinstance(failure.__cause__, UnicodeDecodeError):
        message = "the body is not JSON: it must be text in UTF-8"
    elif isinstance(failure.__cause__, RecursionError):
        message = "the body is not JSON that can be read: it has too many levels"
    elif isinstance(failure.__cause__, ValueError):  # of Python's int
        message = (
            "the body is not JSON that can be read: a whole number in it may have up to"
            f" {sys.get_int_max_str_digits():,} digits"
        )
    elif failure.status_code == 404:
        path, routes = http.url.path[:80], http.app.openapi()["paths"]
        cure = next(
            (f"use {near}" for near in (f"/v1{path}", path.removeprefix("/v1")) if near in routes),
            "/docs lists the routes",
        )
        if path in ("/metrics", "/healthz", "/readyz"):
            cure = "it is on the port of --metrics-port"
        message = f"there is no route {path}; {cure}"
    return ServiceError(message, failure.status_code)


def _allowed(http: Http) -> str:
    """The methods of a path: the router names those of the first route that matches it, and HEAD is
    none of FastAPI's.
    """
    for template, operations in http.app.openapi()["paths"].items():
        if compile_path(template)[0].match(http.url.path):
            methods = {method.upper() for method in operations}
            if "GET" in methods:
                methods.add("HEAD")
            return ", ".join(sorted(methods))
    return "GET, HEAD"  # the page and its files
