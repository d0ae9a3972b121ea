"""Every way a request can end without its images, each with its HTTP status and OpenAI's error fields."""

from collections.abc import Iterable
from typing import ClassVar


def in_seconds(retry_after_s: float) -> int:
    """As Retry-After has it: whole seconds, and not now."""
    return max(1, round(retry_after_s))


def shown(value: object) -> str:
    """A value for a message: as it was given, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class ServiceError(Exception):
    """Something to tell the client; the message says what was wrong, what was got and what is allowed."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(ServiceError):
    status, type, code = 400, "invalid_request_error", "invalid_value"


class NotHTTP(InvalidRequest):
    code = "invalid_http"


class Unauthorized(ServiceError):
    status, type, code = 401, "authentication_error", "invalid_api_key"

    def __init__(self, *, presented: bool) -> None:
        super().__init__("the API key is not one of this server's" if presented else
                         "this server asks for a key: send the header 'Authorization: Bearer KEY'")


class ForeignOrigin(ServiceError):
    status, type, code = 403, "permission_error", "foreign_origin"

    def __init__(self, page: str, host: str) -> None:
        super().__init__(f"requests of pages of other sites are refused: {page[:120]} is not {host[:80]}, and not one "
                         "of --allowed-origins")


class ForeignHost(ServiceError):
    status, type, code = 403, "permission_error", "foreign_host"

    def __init__(self, host: str) -> None:
        super().__init__(f"this server does not go by the name {host[:80]!r}; ask for it by localhost or its address, "
                         "or start it with --allowed-hosts")


class NotFound(ServiceError):
    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"

    def __init__(self, model: str, loaded: Iterable[str]) -> None:
        super().__init__(f"model {shown(model)} is not loaded; loaded: {', '.join(loaded)}", param="model")


class ComparisonNotFound(NotFound):
    def __init__(self, id: str, known: Iterable[str]) -> None:
        super().__init__(f"there is no comparison {shown(id)}; known: {', '.join(known) or 'none'}", param="id")


class Conflict(ServiceError):
    status, type, code = 409, "invalid_request_error", "conflict"

    def __init__(self, running: str) -> None:
        super().__init__(f"comparison {running} is still running; wait for it or DELETE /v1/compare/{running}")


class JustCancelled(Conflict):
    code = "just_cancelled"

    def __init__(self, cancelled: str, retry_after_s: float) -> None:
        message = f"comparison {cancelled} has just been cancelled; begin another in {retry_after_s:.1f} s"
        ServiceError.__init__(self, message, retry_after_s=retry_after_s)


class TooLarge(ServiceError):
    status, type, code = 413, "invalid_request_error", "payload_too_large"


class BodyTooLarge(TooLarge):
    def __init__(self, size: int, allowed: int) -> None:
        super().__init__(f"the body holds {size:,} bytes or more; at most {allowed:,} are allowed")


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
        super().__init__(f"a form must be in UTF-8: leave the charset out of the Content-Type, got {shown(charset)}")


class Encoded(UnsupportedMedia):
    def __init__(self, coding: str) -> None:
        super().__init__(f"the body must be sent as it is, without a Content-Encoding, got {shown(coding)}")


class BodyTimeout(ServiceError):
    status, type, code = 408, "invalid_request_error", "body_timeout"

    def __init__(self, received: int, timeout_s: float, *, stalled: bool = False) -> None:
        super().__init__(f"nothing of the body came for {timeout_s:g} s, after {received:,} bytes of it; send it "
                         "without pauses" if stalled else
                         f"the body was not there within {timeout_s:g} s, only {received:,} bytes of it; send it "
                         "faster, or less of it")


class ClientLeft(ServiceError):
    """The connection ended before the body did: nobody hears of it."""

    status, type, code = 499, "invalid_request_error", "client_left"


class TooManyBodies(ServiceError):
    status, type, code = 503, "server_error", "too_many_bodies"

    def __init__(self, allowed: int, unit: str = "requests") -> None:
        super().__init__(f"{allowed:,} {unit} at once are the limit of this server; try again in a moment",
                         retry_after_s=1.0)


class TooManyOfClient(ServiceError):
    status, type, code = 429, "rate_limit_error", "client_limit"

    def __init__(self, allowed: int, unit: str = "requests") -> None:
        super().__init__(f"one client may have {allowed:,} {unit} at once; try again when another request of yours "
                         "is done", retry_after_s=1.0)


class Exhausted(ServiceError):
    """Memory, disk space, files or threads ran out: nothing that the client can mend."""

    status, type, code = 503, "server_error", "resources_exhausted"

    def __init__(self) -> None:
        super().__init__("the server could not read the request: it is short of memory, disk space, files or threads; "
                         "send the request again in a moment", retry_after_s=5.0)


class ClientLimit(ServiceError):
    status, type, code = 429, "rate_limit_error", "client_limit"

    def __init__(self, here: int, images: int, allowed: int, retry_after_s: float) -> None:
        super().__init__(f"{here} images of yours are waiting or being drawn, and {images} more would pass the limit "
                         f"of {allowed} a client; try again in {in_seconds(retry_after_s)} s",
                         retry_after_s=retry_after_s)


class QueueFull(ServiceError):
    status, type, code = 429, "rate_limit_error", "queue_full"

    def __init__(self, waiting: int, images: int, allowed: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} images are already waiting, and {images} more would pass the limit of {allowed}; "
                         f"try again in {in_seconds(retry_after_s)} s", retry_after_s=retry_after_s)


class RateLimited(ServiceError):
    status, type, code = 429, "rate_limit_error", "rate_limited"

    def __init__(self, key: str, rate: str, retry_after_s: int) -> None:
        super().__init__(f"the API key {key} may make {rate} requests, and has made them; try again in "
                         f"{retry_after_s} s", retry_after_s=retry_after_s)


class DeadlinePassed(ServiceError):
    status, type, code = 504, "server_error", "deadline_passed"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the request cannot be finished within {timeout_s:g} s; ask for fewer images, or try again "
                         "when the service is less busy")


class DeadlineUnreachable(ServiceError):
    status, type, code = 504, "server_error", "deadline_unreachable"

    def __init__(self, within_s: float, needed_s: float, ahead: int, *, uploads: bool = False) -> None:
        """ahead: images before this request, or uploads that are to be decoded before its own."""
        why = (f"{ahead} uploads are to be decoded before it, which takes about {needed_s:.3g} s" if uploads else
               f"with {ahead} images ahead of it that would take about {needed_s:.3g} s")
        super().__init__(f"the request cannot be done within {within_s:.3g} s: {why}; allow more, ask for fewer "
                         "images, or try again when the service is less busy")


class Unexpected(ServiceError):
    def __init__(self, request_id: str) -> None:
        super().__init__("something failed inside the server; the log has the details under x-request-id "
                         f"{request_id}")


class EngineFailed(ServiceError):
    code = "engine_failed"


class BatchFailed(EngineFailed):
    def __init__(self, cause: str) -> None:
        super().__init__(f"the server failed on the batch of this request ({cause}); the same request may succeed if "
                         "it is sent again")


class NotFinite(FloatingPointError):
    """An image's parameters were not finite: it is rubbish, and no other is."""


class EngineLost(OSError):
    """What decodes is gone for good, and with it every image in flight: only a new process helps."""


class EngineGone(ServiceError):
    """What is in flight, or comes, when this process will decode nothing more."""

    status, type, code = 503, "server_error", "engine_gone"

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; this process ends, for its supervisor to start it again: send the request again in a "
                         "moment", retry_after_s=5.0)


class Starting(ServiceError):
    status, type, code = 503, "server_error", "starting"

    def __init__(self) -> None:
        super().__init__("the engine has not started yet; try again in a moment", retry_after_s=1.0)


class Draining(ServiceError):
    status, type, code = 503, "server_error", "draining"

    def __init__(self, message: str = "the server is shutting down; send the request to another one or try again "
                                      "after its restart") -> None:
        super().__init__(message, retry_after_s=5.0)
