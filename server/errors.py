"""Every way in which a request can end without its images, with its HTTP status and OpenAI's error fields."""

from collections.abc import Callable, Iterable
from typing import ClassVar


def in_seconds(retry_after_s: float) -> int:
    """For Retry-After: whole seconds, at least 1."""
    return max(1, round(retry_after_s))


def shown(value: object) -> str:
    """A value for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class ServiceError(Exception):
    """An error for the client; the message says what is wrong, what was given and what is allowed."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Callable[..., "ServiceError"], tuple[object, ...]]:
        """Pickle message and attributes: pickle's default is to call the class, which takes other arguments."""
        return _restored, (type(self), str(self), self.__dict__)


def _restored(kind: type[ServiceError], message: str, facts: dict[str, object]) -> ServiceError:
    error = kind.__new__(kind, message)
    error.__dict__.update(facts)
    return error


class InvalidRequest(ServiceError):
    status, type, code = 400, "invalid_request_error", "invalid_value"


class Impossible(InvalidRequest):
    """A likelihood of 0, whose logarithm JSON cannot hold."""

    def __init__(self, model: str) -> None:
        super().__init__(f"{model} considers the value of the first sub-pixel impossible: none of its training "
                         "pictures starts with it; send another picture, or keep the first pixel with a mask",
                         param="image")


class NotHTTP(InvalidRequest):
    code = "invalid_http"


class Unauthorized(ServiceError):
    status, type, code = 401, "authentication_error", "invalid_api_key"

    def __init__(self, *, presented: bool) -> None:
        super().__init__("this server does not know this API key" if presented else
                         "an API key is required: send the header 'Authorization: Bearer KEY'")


class ForeignOrigin(ServiceError):
    status, type, code = 403, "permission_error", "foreign_origin"

    def __init__(self, page: str, host: str) -> None:
        super().__init__(f"requests from pages of other sites are refused: {page[:120]} is neither {host[:80]} nor in "
                         "--allowed-origins")


class ForeignHost(ServiceError):
    status, type, code = 403, "permission_error", "foreign_host"

    def __init__(self, host: str) -> None:
        super().__init__(f"host {host[:80]!r} is not allowed; use localhost or the server's address, or add it with "
                         "--allowed-hosts")


class NotFound(ServiceError):
    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"

    def __init__(self, model: str, loaded: Iterable[str]) -> None:
        super().__init__(f"model {shown(model)} is not loaded; loaded: {', '.join(loaded)}. linpix serve --alias gives "
                         "a model another name", param="model")


class ComparisonNotFound(NotFound):
    def __init__(self, id: str, known: Iterable[str]) -> None:
        super().__init__(f"there is no comparison {shown(id)}; known: {', '.join(known) or 'none'}", param="id")


class Conflict(ServiceError):
    status, type, code = 409, "invalid_request_error", "conflict"

    def __init__(self, running: str) -> None:
        super().__init__(f"comparison {running} is still running; wait until it ends, or cancel it with DELETE "
                         f"/v1/compare/{running}")


class JustCancelled(Conflict):
    code = "just_cancelled"

    def __init__(self, cancelled: str, retry_after_s: float) -> None:
        message = f"comparison {cancelled} was just cancelled; start the next one in {retry_after_s:.1f} s"
        ServiceError.__init__(self, message, retry_after_s=retry_after_s)


class TooLarge(ServiceError):
    status, type, code = 413, "invalid_request_error", "payload_too_large"


class BodyTooLarge(TooLarge):
    def __init__(self, size: int, allowed: int) -> None:
        super().__init__(f"the body has {size:,} bytes or more; at most {allowed:,} are allowed")


class UnsupportedMedia(ServiceError):
    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class NotJson(UnsupportedMedia):
    def __init__(self, content_type: str) -> None:
        super().__init__(f"the body must be JSON: send the header 'Content-Type: application/json', got "
                         f"{shown(content_type)}")


class NotForm(UnsupportedMedia):
    def __init__(self, content_type: str) -> None:
        super().__init__("the body must be a form: send the header 'Content-Type: multipart/form-data; boundary=...', "
                         f"got {shown(content_type)}")


class NotUtf8(UnsupportedMedia):
    def __init__(self, charset: str) -> None:
        super().__init__(f"a form must be in UTF-8: send a Content-Type without charset, got {shown(charset)}")


class Encoded(UnsupportedMedia):
    def __init__(self, coding: str) -> None:
        super().__init__(f"the body must be sent uncompressed, without a Content-Encoding, got {shown(coding)}")


class BodyTimeout(ServiceError):
    status, type, code = 408, "invalid_request_error", "body_timeout"

    def __init__(self, received: int, timeout_s: float) -> None:
        super().__init__(f"the request body took longer than {timeout_s:g} s ({received:,} bytes received); send it "
                         "faster or make it smaller")


class ClientLeft(ServiceError):
    """The connection was closed before the answer, so this is never sent."""

    status, type, code = 499, "invalid_request_error", "client_left"


class TooManyBodies(ServiceError):
    status, type, code = 503, "server_error", "too_many_bodies"

    def __init__(self, allowed: int, unit: str = "requests") -> None:
        super().__init__(f"this server accepts at most {allowed:,} {unit} at once; try again in a moment",
                         retry_after_s=1.0)


class TooManyOfClient(ServiceError):
    status, type, code = 429, "rate_limit_error", "client_limit"

    def __init__(self, allowed: int, unit: str = "requests") -> None:
        super().__init__(f"one client may have {allowed:,} {unit} at once; try again when one of your other "
                         "requests is done", retry_after_s=1.0)


class Exhausted(ServiceError):
    """Memory, disk space, files or threads ran out: the client cannot do anything about it."""

    status, type, code = 503, "server_error", "resources_exhausted"

    def __init__(self) -> None:
        super().__init__("the server could not read the request: it is short of memory, disk space, files or threads; "
                         "send the request again in a moment", retry_after_s=5.0)


class ClientLimit(ServiceError):
    status, type, code = 429, "rate_limit_error", "client_limit"

    def __init__(self, here: int, images: int, allowed: int, retry_after_s: float) -> None:
        super().__init__(f"{here} of your images are waiting or being drawn, and {images} more would exceed the limit "
                         f"of {allowed} per client; try again in {in_seconds(retry_after_s)} s",
                         retry_after_s=retry_after_s)


class QueueFull(ServiceError):
    status, type, code = 429, "rate_limit_error", "queue_full"

    def __init__(self, waiting: int, images: int, allowed: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} images are already waiting, and {images} more would exceed the limit of "
                         f"{allowed}; try again in {in_seconds(retry_after_s)} s", retry_after_s=retry_after_s)


class RateLimited(ServiceError):
    status, type, code = 429, "rate_limit_error", "rate_limited"

    def __init__(self, key: str, rate: str, retry_after_s: int) -> None:
        super().__init__(f"API key {key!r} is over its limit of {rate}; try again in {retry_after_s} s",
                         retry_after_s=retry_after_s)


class DeadlinePassed(ServiceError):
    status, type, code = 504, "server_error", "deadline_passed"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the request cannot be finished within {timeout_s:g} s; allow more time, request less, or "
                         "try again when the service is less busy")


class DeadlineUnreachable(ServiceError):
    status, type, code = 504, "server_error", "deadline_unreachable"

    def __init__(self, within_s: float, needed_s: float, ahead: int) -> None:
        """ahead: images ahead of this request."""
        before = "1 image is ahead of it" if ahead == 1 else f"{ahead} images are ahead of it"
        why = f"{before}, and it needs" if ahead else "it needs"
        super().__init__(f"the request cannot be finished within {within_s:.3g} s: {why} about {needed_s:.3g} s; allow "
                         "more time, request less, or try again when the service is less busy")


class Unexpected(ServiceError):
    def __init__(self, request_id: str) -> None:
        super().__init__("an error occurred inside the server; the log of the server has the details under "
                         f"x-request-id {request_id}")


class EngineFailed(ServiceError):
    code = "engine_failed"


class BatchFailed(EngineFailed):
    def __init__(self, cause: str) -> None:
        super().__init__(f"the server failed on the batch of this request ({cause}); send it again, and it may "
                         "succeed")


class EngineGone(ServiceError):
    """Ends requests in flight, and refuses new ones, when this process can no longer decode."""

    status, type, code = 503, "server_error", "engine_gone"

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}. The server is restarting: send the request again in a few seconds", retry_after_s=5.0)


class Starting(ServiceError):
    status, type, code = 503, "server_error", "starting"

    def __init__(self) -> None:
        super().__init__("the engine has not started yet; try again in a moment", retry_after_s=1.0)


class Draining(ServiceError):
    status, type, code = 503, "server_error", "draining"

    def __init__(self, message: str = "the server is shutting down; send the request to another server, or try again "
                                      "after the restart") -> None:
        super().__init__(message, retry_after_s=5.0)


class OptionError(ValueError):
    """An option of a request or a command is invalid; the message has the option's name, such as keep_rows.

    param: the option · status: of HTTP.
    """

    def __init__(self, message: str, param: str, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status
