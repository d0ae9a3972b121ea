"""The parts of the OpenAPI that FastAPI does not derive: errors with their real texts, links,
streams and examples.

Fields have their descriptions and examples in schemas.py and request_schemas.py; /docs builds
examples of answers from them.
"""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .. import errors
from ..errors import ServiceError
from ..pictures.encode import NPY
from .error_handlers import envelope
from .middleware.bodies import PLAIN_BYTES
from .request_schemas import EditBody
from .schemas import EditEvent, ErrorEnvelope, GenerationEvent

Responses = dict[int | str, dict[str, Any]]  # a FastAPI route's `responses`
Links = dict[str, dict[str, str]]

# Errors that routes can answer, besides those that they raise themselves, by what the routes do
LEAVING = (errors.draining(), errors.engine_gone("the engine made no progress for 60 s"))
BODY = (
    errors.body_timeout(1_460, 60.0),
    errors.body_too_large(1_500_000, PLAIN_BYTES),
    errors.too_many_bodies(512),
    errors.too_many_of_client(128),
)
DRAWING = (
    errors.queue_full(254, 4, 256, 12.0),
    errors.client_limit(256, 1, 256, 3.0),
    errors.unexpected("4eaca4dc47d7a5db"),
    errors.batch_failed("RuntimeError"),
    errors.exhausted(),
    *LEAVING,
    errors.deadline_unreachable(2.0, 7.25, 90),
    errors.deadline_passed(30.0),
)
UPLOADING = (
    errors.model_not_found("mnist-large", ["mnist-small"]),
    errors.body_too_large(20_000_000, 2**24),
    ServiceError(
        "image must be a PNG, JPEG or WebP picture, got 5 bytes that begin with b'hello'",
        415,
        param="image",
    ),
)
_HOST = errors.foreign_host("rebound.example")  # of every route
# of those under /v1/
_CLIENTS = (
    errors.unauthorized(presented=False),
    errors.rate_limited("alice", "600/min", 1),
    errors.foreign_origin("origin https://elsewhere.example", "localhost:8000"),
)

PICTURES: dict[str, Any] = {
    kind: {
        "schema": {"type": "string", "contentMediaType": kind},
        "examples": {"the picture itself": {"value": begins}},
    }
    for kind, begins in (
        ("image/png", r"\x89PNG\r\n\x1a\n..."),
        ("image/webp", "RIFF....WEBPVP8L..."),
        ("image/jpeg", r"\xff\xd8\xff\xe0..."),
        ("image/gif", "GIF89a..."),
    )
}
ARRAY = {
    NPY: {
        "schema": {
            "type": "string",
            "contentMediaType": NPY,
            "description": (
                "uint8, (n, height, width), or (n, height, width, 3) in colours: numpy.load reads"
                " it. Commas separate the values of several images in the X-LinPix headers"
            ),
        },
        "examples": {"all pictures in one array": {"value": r"\x93NUMPY..."}},
    }
}
PNG = {"image/png": PICTURES["image/png"]}

TAGS = [
    {
        "name": "images",
        "description": "draw pictures, complete them, and say how probable they are",
    },
    {"name": "models", "description": "what is loaded"},
    {"name": "compare", "description": "measure kinds of attention side by side"},
    {"name": "operations", "description": "how the service is doing"},
]
_MEANING = {
    400: "invalid input: the message says what was given and what is allowed",
    401: "no API key, or one that this server does not know",
    403: "a host or origin that is not allowed",
    404: "nothing here has this name",
    408: "the request body did not arrive in time",
    409: "another comparison is running, or was cancelled a moment ago",
    413: "more bytes or pixels than are allowed",
    415: "a format that is not supported",
    429: "the queue is full, or a limit of this client or key is reached; try again later",
    500: "an error inside the server",
    503: "not available at the moment; try again, or use another server",
    504: "not possible within the time limit of the request",
}
_PLACE = "#/components/schemas/{model}"


def schema_of(model: type[BaseModel]) -> dict[str, str]:
    """The place of a model's schema, for what FastAPI does not know."""
    return {"$ref": _PLACE.format(model=model.__name__)}


_RETRY = {
    "Retry-After": {
        "description": "seconds to wait before another try, computed from the remaining steps",
        "schema": {"type": "integer", "minimum": 1},
        "example": 12,
    }
}


def error_responses(*errors: ServiceError) -> Responses:
    """The `responses` of a route that can answer these errors; `describe` adds those that every
    route can answer.
    """
    found: Responses = {}
    for error in errors:
        answer = found.setdefault(
            error.status,
            {
                "description": _MEANING[error.status],
                "content": {
                    "application/json": {"schema": schema_of(ErrorEnvelope), "examples": {}}
                },
            },
        )
        examples = answer["content"]["application/json"]["examples"]
        name = error.code if error.code not in examples else f"{error.code}, {len(examples) + 1}"
        examples[name] = {"value": envelope(error).model_dump()}
        if error.retry_after_s is not None:
            answer["headers"] = _RETRY
    return found


def ok_response(
    description: str,
    status: int = 200,
    *,
    content: dict[str, Any] | None = None,
    links: Links | None = None,
) -> Responses:
    """The `responses` of a route for an answer without an error.

    content: by media type, besides what FastAPI knows of the JSON ·
    links: by operation id of a route that can be called with parts of this answer, the place of
    each of its parameters here.
    """
    found: dict[str, Any] = {"description": description, "content": dict(content or {})}
    if links:
        found["links"] = {
            operation: {
                "operationId": operation,
                "parameters": {name: f"$response.body#/{place}" for name, place in places.items()},
            }
            for operation, places in links.items()
        }
    return {status: found}


def event_stream(events: str, *data: type[BaseModel]) -> dict[str, Any]:
    """The `content` of a stream of server-sent events. Its schema is that of the data of one event,
    as in OpenAI's.
    """
    kinds = [schema_of(kind) for kind in data]
    return {
        "text/event-stream": {
            "schema": (
                {"description": f"server-sent events: {events}"}
                | ({"anyOf": kinds} if kinds[1:] else kinds[0])
            )
        }
    }


def image_responses(event: type[GenerationEvent], *errors: ServiceError) -> Responses:
    """The `responses` of an images route. errors: besides those of both routes."""
    found = ok_response(
        "the images, in the form that stream and Accept request",
        content={
            **PICTURES,
            **ARRAY,
            **event_stream(
                f"{event.kind}.partial_image and {event.kind}.completed; or error, with the fields"
                " of an error response, at the end",
                event,
                ErrorEnvelope,
            ),
        },
    )
    found[200]["headers"] = png_headers(event) | {
        "X-LinPix-Warnings": {
            "description": "only in answers that are not JSON: the warnings, if there are any",
            "schema": {"type": "string"},
            "example": "prompt: these words have no effect: green",
        }
    }
    return found | error_responses(*BODY, *DRAWING, *errors)


def png_headers(answer: type[BaseModel]) -> dict[str, Any]:
    """Headers of an answer that is a picture or an array, for the fields that it has if it is
    JSON.
    """
    fields = answer.model_json_schema(mode="serialization")["properties"]
    return {
        f"X-LinPix-{name.title().replace('_', '-')}": {
            "description": f"only in answers that are not JSON: {fields[name]['description']}",
            "schema": fields[name],
        }
        for name in (
            "seed",
            "label",
            "confidence",
            "confident",
            "attempts",
            "model",
            "checkpoint",
            "engine",
            "precision",
            "device",
            "state",
            "bits_per_dim",
            "log_likelihood",
        )
        if name in fields
    }


def describe(app: FastAPI, *, keys: bool) -> None:
    """Complete the OpenAPI of an app that has all its routes: FastAPI keeps what it makes at the
    first call.

    Add keys, if this server requires them, errors that every route can answer, and events. Remove
    422: bad input is
    400. Move examples to where readers look for them.
    """
    schema = app.openapi()
    if keys:
        schema["components"].setdefault("securitySchemes", {})["key"] = {
            "type": "http",
            "scheme": "bearer",
            "description": "A key from the file of --api-keys.",
        }
    schemas = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= models_json_schema(
        [
            (EditBody, "validation"),
            *((model, "serialization") for model in (ErrorEnvelope, GenerationEvent, EditEvent)),
        ],
        ref_template=_PLACE,
    )[1]["$defs"]
    for path, operations in schema["paths"].items():
        v1 = path.startswith("/v1/")
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            operation["security"] = [{"key": []}] if keys and v1 else []
            for status, answer in error_responses(_HOST, *(_CLIENTS if v1 else ())).items():
                there = responses.setdefault(str(status), answer)["content"]["application/json"]
                there["examples"] |= answer["content"]["application/json"]["examples"]
            operation["responses"] = dict(sorted(responses.items()))
            for parameter in operation.get("parameters", []):
                parameter.setdefault("example", *parameter["schema"].get("examples", []))
            for answer in responses.values():
                for example in (
                    answer["content"].get("application/json", {}).get("examples", {}).values()
                ):
                    # FastAPI takes nulls out of examples
                    example["value"]["error"].setdefault("param", None)
