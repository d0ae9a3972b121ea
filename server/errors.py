"""Every way a request can end without its images, each with its HTTP status and OpenAI's error fields."""

from typing import ClassVar


def in_seconds(retry_after_s: float) -> int:
    """As Retry-After has it: whole seconds, and not now."""
    return max(1, round(retry_after_s))


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


class Unauthorized(ServiceError):
    status, type, code = 401, "authentication_error", "invalid_api_key"


class ForeignOrigin(ServiceError):
    status, type, code = 403, "permission_error", "foreign_origin"


class ForeignHost(ServiceError):
    status, type, code = 403, "permission_error", "foreign_host"


class NotFound(ServiceError):
    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class Conflict(ServiceError):
    status, type, code = 409, "invalid_request_error", "conflict"


class TooLarge(ServiceError):
    status, type, code = 413, "invalid_request_error", "payload_too_large"


class UnsupportedMedia(ServiceError):
    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class BodyTimeout(ServiceError):
    status, type, code = 408, "invalid_request_error", "body_timeout"

    def __init__(self, received: int, timeout_s: float) -> None:
        super().__init__(f"the body was not there within {timeout_s:g} s, only {received:,} bytes of it; send it "
                         "faster, or less of it")


class ClientLeft(ServiceError):
    """The connection ended before the body did: nobody hears of it."""

    status, type, code = 499, "invalid_request_error", "client_left"


class TooManyBodies(ServiceError):
    status, type, code = 503, "server_error", "too_many_bodies"

    def __init__(self, allowed: int) -> None:
        super().__init__(f"{allowed} requests are being read already, which is the limit; try again in a moment",
                         retry_after_s=1.0)


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


class DeadlinePassed(ServiceError):
    status, type, code = 504, "server_error", "deadline_passed"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the request cannot be finished within {timeout_s:g} s; ask for fewer images, or try again "
                         "when the service is less busy")


class DeadlineUnreachable(ServiceError):
    status, type, code = 504, "server_error", "deadline_unreachable"

    def __init__(self, within_s: float, needed_s: float, ahead: int) -> None:
        super().__init__(f"the request cannot be done within {within_s:.3g} s: with {ahead} images ahead of it that "
                         f"would take about {needed_s:.3g} s; allow more, ask for fewer images, or try again when the "
                         "service is less busy")


class EngineFailed(ServiceError):
    code = "engine_failed"


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
