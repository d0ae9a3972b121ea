"""Schemathesis over the served OpenAPI: every answer is documented, and none is a 5xx."""

import os
import time
from collections import Counter

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.web.routes.test_images import events_of
from tools.harness.servers import HANG_S

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("LINPIX_TEST_EXAMPLES", "50"))  # a route


def not_a_failure_of_ours(context, response, case):
    """No 5xx, but for the 504 of a request that says itself by when it is to be done."""
    timed = "X-Request-Timeout" in (case.headers or {}) or (
        isinstance(case.body, dict) and "timeout" in case.body
    )
    return (
        None
        if timed and response.status_code == 504
        else not_a_server_error(context, response, case)
    )


def as_its_schema_says(context, response, case):
    """The fields of an answer; of a stream, whose schema is that of one event's data, those of each
    event.
    """
    if not response.headers["content-type"][0].startswith("text/event-stream"):
        return response_schema_conformance(context, response, case)
    schema = case.operation.definition.raw["responses"]["200"]["content"]["text/event-stream"][
        "schema"
    ]
    for event in events_of(response.text):
        jsonschema.validate(
            event, schema | {"components": case.operation.schema.raw_schema["components"]}
        )
    return None


CHECKS = [
    not_a_failure_of_ours,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    as_its_schema_says,
]

ROUTES = [
    "GET /v1/models",
    "GET /v1/models/{model}",
    "POST /v1/images/generations",
    "POST /v1/images/edits",
    "POST /v1/images/likelihoods",
    "POST /v1/images/inside",
    "POST /v1/compare",
    "GET /v1/compare/{id}",
    "DELETE /v1/compare/{id}",
    "GET /v1/status",
    "GET /metrics",
    "GET /healthz",
    "GET /readyz",
]


@pytest.fixture(scope="module")
def api(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_documented_route_is_tried(api):
    operations = [found.ok() for found in api.get_all_operations()]
    assert sorted(
        f"{operation.method.upper()} {operation.path}" for operation in operations
    ) == sorted(ROUTES)


@pytest.mark.parametrize(
    ("route", "mode"),
    [
        *((route, GenerationMode.POSITIVE) for route in ROUTES),
        # only they have a body
        *((route, GenerationMode.NEGATIVE) for route in ROUTES if route.startswith("POST")),
    ],
    ids=str,
)
def test_every_answer_is_documented_and_none_is_a_failure_of_ours(api, route, mode):
    method, path = route.split()
    operation = api[path][method]

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers_as_documented(case):
        case.call_and_validate(checks=CHECKS, timeout=HANG_S)

    answers_as_documented()


def test_every_sequence_of_requests_is_answered_as_documented(api, server):
    """By the OpenAPI's links: comparisons are watched and cancelled, models described."""
    answers: Counter[tuple[str, int]] = Counter()
    begun: list[str] = []

    class Sequences(api.as_state_machine()):
        def setup(self):
            # one runs at a time: perhaps another
            latest = server.get("/v1/status").json()["comparison"]
            if latest and latest["status"] == "running":  # test's
                server.delete(f"/v1/compare/{latest['id']}").raise_for_status()

        def call(self, case, **kwargs):
            """Of the same sequence the same answers: after a cancelled comparison the next waits
            until it may begin.
            """
            while (
                answer := case.call(**kwargs)
            ).status_code == 409 and "retry-after-ms" in answer.headers:
                time.sleep(int(answer.headers["retry-after-ms"][0]) / 1000)
            return answer

        def get_call_kwargs(self, case):
            return {"timeout": HANG_S}

        def after_call(self, response, case):
            answers[f"{case.method.upper()} {case.path}", response.status_code] += 1
            if response.status_code == 202:
                begun.append(response.json()["id"])

        def validate_response(self, response, case, **_):
            case.validate_response(response, checks=CHECKS)

        def teardown(self):
            while begun:  # leave none behind
                server.delete(f"/v1/compare/{begun.pop()}").raise_for_status()

    Sequences.run(
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=8,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
    )
    for linked in (
        ("GET /v1/compare/{id}", 200),
        ("DELETE /v1/compare/{id}", 200),
        ("GET /v1/models/{model}", 200),
    ):
        assert answers[linked], f"nothing led to {linked}: {answers}"
