"""/openapi.json: every field has a description and an example, and every example agrees with the
service.
"""

import json
import re
from functools import partial

import numpy as np
import pytest

from linpix.server.web import schemas
from tests.server.web.routes.test_images import encode, events_of, occluded
from tools.harness.commands import ROOT
from tools.harness.servers import here, when_possible

BAND = np.full((28, 28), 255, np.uint8)
BAND[10:18] = 0
FILES = {
    "seven.png": encode(np.full((28, 28), 7, np.uint8)),
    "mask.png": occluded(14, np.zeros((28, 28), np.uint8)),
    "band.png": encode(np.stack([BAND, BAND], -1)),
}
GENERATE, EDIT, COMPARE = "/v1/images/generations", "/v1/images/edits", "/v1/compare"
LIKELIHOODS = "/v1/images/likelihoods"
OF_THE_SERVER = {
    "created",
    "checkpoint",
    "bits_per_dim",
    "engine",
    "precision",
    "device",
    "sizes",
    "class_agreement",
}  # or of a training


@pytest.fixture(scope="module")
def shipped():
    with here(ROOT / "checkpoints", models="mnist-small") as process:
        yield process


@pytest.fixture(scope="module")
def openapi(shipped):
    return shipped.get("/openapi.json").json()


def operations(openapi):
    return {
        f"{method.upper()} {path}": operation
        for path, methods in openapi["paths"].items()
        for method, operation in methods.items()
    }


def examples(content):
    """By name, of a body or an answer of one media type."""
    if "example" in content:
        return {"": content["example"]}
    return {name: example["value"] for name, example in content.get("examples", {}).items()}


def resolved(openapi, schema):
    return (
        openapi["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        if "$ref" in schema
        else schema
    )


# --- nothing is left out ---


def parts(schema):
    """The schemas inside a schema, references aside."""
    return [*schema.get("anyOf", []), *([schema["items"]] if "items" in schema else [])]


def exemplified(schema):
    """Whether a field has an example, is one of few values, or is made of fields that are looked at
    themselves.
    """
    return bool({"examples", "const", "enum", "$ref", "properties"} & schema.keys()) or any(
        map(exemplified, parts(schema))
    )


def unexplained_fields(name, schema):
    for field, inner in schema.get("properties", {}).items():
        if not inner.get("description"):
            yield f"{name}.{field}: description"
        if not exemplified(inner):
            yield f"{name}.{field}: example"
        yield from unexplained_fields(f"{name}.{field}", inner)
    for part in parts(schema):
        yield from unexplained_fields(name, part)


def unexplained_contents(name, contents):
    for media, content in contents.items():
        if not (examples(content) or exemplified(content["schema"])):
            yield f"{name} {media}: example"
        yield from unexplained_fields(f"{name} {media}", content["schema"])


def unexplained(openapi):
    for name, schema in openapi["components"]["schemas"].items():
        yield from unexplained_fields(name, schema)
    for name, operation in operations(openapi).items():
        if not (operation.get("summary") and operation.get("description")):
            yield f"{name}: summary or description"
        for parameter in operation.get("parameters", []):
            for word in {"description", "example"} - parameter.keys():
                yield f"{name}, parameter {parameter['name']}: {word}"
        body = operation.get("requestBody", {"content": {}, "description": "none"})
        for content in body["content"].values():
            if not body.get("description") and not resolved(openapi, content["schema"]).get(
                "description"
            ):
                yield f"{name}, body: description"
        yield from unexplained_contents(f"{name}, body", body["content"])
        for status, answer in operation["responses"].items():
            # FastAPI's word, where there is none
            if answer["description"] == "Successful Response":
                yield f"{name} {status}: description"
            for header, facts in answer.get("headers", {}).items():
                if not (
                    facts.get("description")
                    and ("example" in facts or exemplified(facts["schema"]))
                ):
                    yield f"{name} {status}, header {header}: description or example"
            yield from unexplained_contents(f"{name} {status}", answer["content"])


def test_every_field_parameter_body_and_answer_has_a_description_and_an_example(openapi):
    assert list(unexplained(openapi)) == []


def test_every_example_of_an_error_is_one(openapi):
    seen = 0
    for operation in operations(openapi).values():
        for status, answer in operation["responses"].items():
            found = (
                examples(answer["content"].get("application/json", {}))
                if int(status) >= 400
                else {}
            )
            for code, example in found.items():
                assert (
                    schemas.ErrorEnvelope.model_validate(example).error.code == code.split(",")[0]
                )
            assert int(status) < 400 or found
            seen += len(found)
    assert seen > 80


def test_what_generated_clients_are_made_of_is_there(openapi):
    """References lead somewhere, names of operations are words, and all words are of the OpenAPI
    that it says.
    """
    text = json.dumps(openapi)
    for reference in re.findall(r'"\$ref": "#/components/schemas/(\w+)"', text):
        assert reference in openapi["components"]["schemas"]
    assert text.count('"$ref": "#/components/schemas/') == text.count('"$ref"')
    assert openapi["openapi"] == "3.1.0" and "itemSchema" not in text
    assert [operation["operationId"] for operation in operations(openapi).values()] == [
        "generate",
        "edit",
        "score",
        "look_inside",
        "list_models",
        "describe_model",
        "begin_comparison",
        "watch_comparison",
        "cancel_comparison",
        "show_status",
        "show_metrics",
        "check_alive",
        "check_ready",
    ]
    assert {tag["name"] for tag in openapi["tags"]} == {
        tag for operation in operations(openapi).values() for tag in operation["tags"]
    }


# --- requests ---


def form_of(fields):
    """A body of form fields as httpx takes it; names of files stand for the files."""
    parts = {}
    for name, value in fields.items():
        file = FILES.get(str(value))
        parts[name] = (None, str(value)) if file is None else (value, file)
    return {"files": parts}


def bodies(openapi):
    """Every body that the documentation shows: examples as they are, and, as /docs fills in a form,
    all fields'.
    """
    for name, operation in operations(openapi).items():
        for media, content in operation.get("requestBody", {"content": {}})["content"].items():
            properties = resolved(openapi, content["schema"])["properties"]
            every = {field: schema["examples"][0] for field, schema in properties.items()}
            if media != "application/json":
                every |= {"mask": ""}  # /docs leaves it to people to choose files
            every.pop("candidates", None)  # the model served here does not draw the class first
            headers = {
                parameter["name"]: str(parameter["example"])
                for parameter in operation.get("parameters", [])
            }
            for title, body in (examples(content) | {"all fields": every}).items():
                yield f"{name}, {title}", operation, media, headers, body


def events_as_documented(openapi, operation):
    """The schema of an event's data."""
    return resolved(
        openapi, operation["responses"]["200"]["content"]["text/event-stream"]["schema"]["anyOf"][0]
    )


def test_every_body_that_is_shown_gets_what_is_documented(shipped, openapi):
    tried = []
    with shipped.client() as client:
        for name, operation, media, headers, body in bodies(openapi):
            path = name.split(",")[0].removeprefix("POST ")
            sent = {"json": body} if media == "application/json" else form_of(body)
            ask = partial(client.post, path, headers=headers, **sent)
            answer = when_possible(ask)
            assert answer.is_success, f"{name}: {answer.text}"
            if isinstance(body, dict) and body.get("stream") is True:
                known = events_as_documented(openapi, operation)
                kinds = {event["type"] for event in events_of(answer.text)}
                assert kinds == set(known["properties"]["type"]["enum"])
                for event in events_of(answer.text):
                    assert set(known["required"]) <= event.keys() <= known["properties"].keys(), (
                        name
                    )
            else:
                schema = operation["responses"][str(answer.status_code)]["content"][
                    "application/json"
                ]["schema"]
                assert answer.json().keys() == resolved(openapi, schema)["properties"].keys(), name
                assert not answer.json().get("warnings"), name
            if path == COMPARE:
                client.delete(f"{COMPARE}/{answer.json()['id']}")
            tried.append(name)
    assert len(tried) >= 8


def test_what_only_attempts_and_partial_images_have_may_be_absent_and_is_never_null(openapi):
    answer = openapi["components"]["schemas"]["ImageData"]
    event = events_as_documented(openapi, openapi["paths"][EDIT]["post"])
    for schema, names in (
        (answer, {"confidence": "number", "attempts": "integer"}),
        (
            event,
            {
                "confidence": "number",
                "attempts": "integer",
                "rows": "integer",
                "partial_image_index": "integer",
            },
        ),
    ):
        for name, kind in names.items():
            field = schema["properties"][name]
            assert name not in schema["required"] and field["type"] == kind and field["description"]
            assert not {"anyOf", "default"} & field.keys()


def test_every_route_answers_at_the_examples_of_its_parameters(shipped, openapi):
    with shipped.client() as client:
        body = {"budget": 1, "batch": [1], "backends": ["linear"]}
        begun = when_possible(lambda: client.post(COMPARE, json=body)).json()["id"]
        client.delete(f"{COMPARE}/{begun}")
        for name, operation in operations(openapi).items():
            method, path = name.split()
            if method != "POST":
                named = {
                    parameter["name"]: parameter["example"]
                    for parameter in operation.get("parameters", [])
                }
                answer = client.request(method, path.format(**named))
                assert answer.status_code == 200, f"{name}: {answer.text}"
        [card] = client.get("/v1/models").json()["data"]
        shown = openapi["components"]["schemas"]["ModelCard"]["properties"]
        for field in (
            card.keys()
            & {key for key, facts in shown.items() if "examples" in facts} - OF_THE_SERVER
        ):
            assert shown[field]["examples"] == [card[field]]
        assert set(shown["sizes"]["examples"][0]) <= set(card["sizes"])
        metrics = openapi["paths"]["/metrics"]["get"]["responses"]["200"]["content"]["text/plain"][
            "example"
        ]
        assert set(metrics.splitlines()[:2]) <= set(client.get("/metrics").text.splitlines())


# --- errors ---


@pytest.mark.parametrize(
    ("method", "path", "request_of", "code"),
    [
        ("POST", GENERATE, {"json": {"n": 17}}, "invalid_value"),
        ("POST", GENERATE, {"json": {"model": "mnist-large"}}, "model_not_found"),
        (
            "POST",
            GENERATE,
            {"content": "n=1", "headers": {"content-type": "text/plain"}},
            "unsupported_media_type",
        ),
        (
            "POST",
            GENERATE,
            {"content": b" " * 1_500_000, "headers": {"content-type": "application/json"}},
            "payload_too_large",
        ),
        ("POST", GENERATE, {"json": {}, "headers": {"host": "rebound.example"}}, "foreign_host"),
        (
            "POST",
            GENERATE,
            {
                "json": {},
                "headers": {"host": "localhost:8000", "origin": "https://elsewhere.example"},
            },
            "foreign_origin",
        ),
        ("POST", EDIT, {"files": {"image": FILES["seven.png"]}}, "invalid_value"),
        (
            "POST",
            EDIT,
            {"files": {"image": b"hello"}, "data": {"keep_rows": 14}},
            "unsupported_media_type",
        ),
        (
            "POST",
            LIKELIHOODS,
            {"files": {"image": FILES["seven.png"]}, "data": {"keep_rows": 28}},
            "invalid_value",
        ),
        ("GET", "/v1/models/{model}", {"model": "mnist-large"}, "model_not_found"),
        ("POST", COMPARE, {"json": {"budget": 600}}, "invalid_value"),
        ("POST", COMPARE, {"json": {}}, "conflict"),
        ("GET", COMPARE + "/{id}", {"id": "cmp-2"}, "not_found"),
        ("DELETE", COMPARE + "/{id}", {"id": "cmp-2"}, "not_found"),
    ],
)
def test_examples_of_errors_are_what_the_service_says(
    fresh, openapi, method, path, request_of, code
):
    named = {name: request_of[name] for name in ("model", "id") if name in request_of}
    answer = fresh.request(
        method,
        path.format(**named),
        **{key: value for key, value in request_of.items() if key not in named},
    )
    documented = openapi["paths"][path][method.lower()]["responses"][str(answer.status_code)]
    assert answer.json() == documented["content"]["application/json"]["examples"][code]["value"]


@pytest.fixture(scope="module")
def fresh():
    """A server whose first comparison is under way."""
    with here(ROOT / "checkpoints", models="mnist-small") as process, process.client() as client:
        client.post(COMPARE, json={"budget": 120, "batch": [1]}).raise_for_status()
        yield client
