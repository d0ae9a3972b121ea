"""Errors for clients, with their HTTP status and OpenAI's fields. Those of a field are made where
it is checked.
"""

import errno
from collections.abc import Iterable

# codes
EXHAUSTED, MODEL_NOT_FOUND, UNEXPECTED = "resources_exhausted", "model_not_found", "internal_error"
_CODES = {
    400: "invalid_value",
    404: "not_found",
    405: "method_not_allowed",
    413: "payload_too_large",
    415: "unsupported_media_type",
    499: "client_left",
    500: UNEXPECTED,
}
_RUN_OUT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def in_seconds(retry_after_s: float) -> int:
    """For Retry-After: whole seconds, at least 1."""
    return max(1, round(retry_after_s))


def shown(value: object) -> str:
    """A value for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class ServiceError(Exception):
    """An error for the client; the message says what is wrong, what was given and what is
    allowed.
    """

    def __init__(
        self,
        message: str,
        status: int = 500,
        code: str = "",
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """code: the default is that of the status."""
        super().__init__(message)
        self.status, self.code = status, code or _CODES.get(status, "error")
        self.param, self.retry_after_s = param, retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's kind of error."""
        other = "invalid_request_error" if self.status < 500 else "server_error"
        return _TYPES.get(self.status, other)


class InvalidRequest(ServiceError, ValueError):
    """A request, or an option of a command or a call from Python, is invalid; the message names the
    option.
    """

    def __init__(self, message: str, status: int = 400, *, param: str | None = None) -> None:
        super().__init__(message, status, param=param)


class ClientLeft(ServiceError):
    """The connection was closed before the answer, so this is never sent."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 499)


class DeadlinePassed(ServiceError):
    """The request was not finished in time."""


class Draining(ServiceError):
    """This process is about to end."""


class EngineGone(ServiceError):
    """This process can no longer decode."""


# --- errors, with their texts; nothing tells the others apart but their status and code ---


def model_not_found(model: str, loaded: Iterable[str]) -> ServiceError:
    return ServiceError(
        f"model {shown(model)} is not loaded; loaded: {', '.join(loaded)}. linpix serve --alias"
        " gives a model another name",
        404,
        MODEL_NOT_FOUND,
        param="model",
    )


def comparison_not_found(id: str, known: Iterable[str]) -> ServiceError:
    return ServiceError(
        f"there is no comparison {shown(id)}; known: {', '.join(known) or 'none'}", 404, param="id"
    )


def still_running(comparison: str) -> ServiceError:
    return ServiceError(
        f"comparison {comparison} is still running; wait until it ends, or cancel it with DELETE "
        f"/v1/compare/{comparison}",
        409,
        "conflict",
    )


def just_cancelled(comparison: str, retry_after_s: float) -> ServiceError:
    return ServiceError(
        f"comparison {comparison} was just cancelled; start the next one in {retry_after_s:.1f} s",
        409,
        "just_cancelled",
        retry_after_s=retry_after_s,
    )


def client_limit(undone: int, images: int, allowed: int, retry_after_s: float) -> ServiceError:
    return ServiceError(
        f"{undone} of your images are waiting or being drawn, and {images} more would exceed the"
        f" limit of {allowed} per client; try again in {in_seconds(retry_after_s)} s",
        429,
        "client_limit",
        retry_after_s=retry_after_s,
    )


def queue_full(waiting: int, images: int, allowed: int, retry_after_s: float) -> ServiceError:
    return ServiceError(
        f"{waiting} images are already waiting, and {images} more would exceed the limit of"
        f" {allowed}; try again in {in_seconds(retry_after_s)} s",
        429,
        "queue_full",
        retry_after_s=retry_after_s,
    )


def deadline_passed(timeout_s: float) -> DeadlinePassed:
    return DeadlinePassed(
        f"the request cannot be finished within {timeout_s:g} s; allow more time, request less, or"
        " try again when the service is less busy",
        504,
        "deadline_passed",
    )


def deadline_unreachable(within_s: float, needed_s: float | None, ahead: int) -> ServiceError:
    """needed_s: None if it has time enough, and others would not · ahead: images ahead of it."""
    why = "it would make others miss their deadlines"
    if needed_s:
        why = f"it needs about {needed_s:.3g} s"
        if ahead:
            images = "1 image is" if ahead == 1 else f"{ahead} images are"
            why = f"{images} ahead of it, and {why}"
    return ServiceError(
        f"the request cannot be finished within {within_s:.3g} s: {why}; allow more time, request "
        "less, or try again when the service is less busy",
        504,
        "deadline_unreachable",
    )


def engine_failed(message: str) -> ServiceError:
    return ServiceError(message, 500, "engine_failed")


def batch_failed(cause: str) -> ServiceError:
    return engine_failed(
        f"the server failed on the batch of this request ({cause}); send it again, and it may"
        " succeed"
    )


def engine_gone(why: str) -> EngineGone:
    """Ends requests in flight, and refuses new ones."""
    return EngineGone(
        f"{why}. The server is restarting: send the request again in a few seconds",
        503,
        "engine_gone",
        retry_after_s=5.0,
    )


def draining(
    message: str = (
        "the server is shutting down; send the request to another server, "
        "or try again after the restart"
    ),
) -> Draining:
    return Draining(message, 503, "draining", retry_after_s=5.0)


def unauthorized(*, presented: bool) -> ServiceError:
    message = "an API key is required: send the header 'Authorization: Bearer KEY'"
    if presented:
        message = "this server does not know this API key"
    return ServiceError(message, 401, "invalid_api_key")


def rate_limited(key: str, rate: str, retry_after_s: int) -> ServiceError:
    return ServiceError(
        f"API key {key!r} is over its limit of {rate}; try again in {retry_after_s} s",
        429,
        "rate_limited",
        retry_after_s=retry_after_s,
    )


def foreign_origin(page: str, host: str) -> ServiceError:
    return ServiceError(
        f"requests from pages of other sites are refused: {page[:120]} is neither {host[:80]} nor"
        " in --allowed-origins",
        403,
        "foreign_origin",
    )


def foreign_host(host: str) -> ServiceError:
    return ServiceError(
        f"host {host[:80]!r} is not allowed; use localhost or the server's address, or add it with "
        "--allowed-hosts",
        403,
        "foreign_host",
    )


def not_json(content_type: str) -> ServiceError:
    return ServiceError(
        "the body must be JSON: send the header 'Content-Type: application/json', got "
        f"{shown(content_type)}",
        415,
    )


def body_too_large(size: int, allowed: int) -> ServiceError:
    return ServiceError(
        f"the body has {size:,} bytes or more; at most {allowed:,} are allowed", 413
    )


def body_timeout(received: int, timeout_s: float) -> ServiceError:
    return ServiceError(
        f"the request body took longer than {timeout_s:g} s ({received:,} bytes received); send it "
        "faster or make it smaller",
        408,
        "body_timeout",
    )


def too_many_bodies(allowed: int, unit: str = "requests") -> ServiceError:
    return ServiceError(
        f"this server accepts at most {allowed:,} {unit} at once; try again in a moment",
        503,
        "too_many_bodies",
        retry_after_s=1.0,
    )


def too_many_of_client(allowed: int, unit: str = "requests") -> ServiceError:
    return ServiceError(
        f"one client may have {allowed:,} {unit} at once; try again when one of your other requests"
        " is done",
        429,
        "client_limit",
        retry_after_s=1.0,
    )


def exhausted() -> ServiceError:
    """Memory, disk space, files or threads ran out: the client cannot do anything about it."""
    return ServiceError(
        "the server could not serve the request: it is short of memory, disk space, files or"
        " threads; send the request again in a moment",
        503,
        EXHAUSTED,
        retry_after_s=5.0,
    )


def has_run_out(failure: Exception) -> bool:
    """Whether an exception says that memory, disk space, files or threads have run out."""
    number = failure.errno if isinstance(failure, OSError) else None
    threads = isinstance(failure, RuntimeError) and "start new thread" in str(failure)
    return number in _RUN_OUT or isinstance(failure, MemoryError) or threads


def unexpected(request_id: str) -> ServiceError:
    return ServiceError(
        "an error occurred inside the server; the log of the server has the details under "
        f"x-request-id {request_id}"
    )


def starting() -> ServiceError:
    return ServiceError(
        "the engine has not started yet; try again in a moment", 503, "starting", retry_after_s=1.0
    )
