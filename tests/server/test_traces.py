"""Traces, as OpenTelemetry's own tools send them from a real server to a collector."""

import gzip
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.server.web.routes.test_images import encode
from tools.harness.servers import Quiet, listening, serving

pytest.importorskip("opentelemetry.instrumentation.fastapi", reason="pip install '.[otel]'")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

pytestmark = pytest.mark.slow

PICTURE = encode(np.zeros((8, 8), np.uint8))
PARTS = {
    "/v1/images/generations": ["queue", "decode", "encode"],
    "/v1/images/edits": ["queue", "prefill", "decode", "encode"],
}


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Span]]]:
    """Where a collector listens, and the spans that it got."""
    spans: list[Span] = []

    class Collect(Quiet):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.answer()

    with listening(Collect) as url:
        yield url, spans


def test_the_parts_of_a_request_are_spans_where_opentelemetry_starts_the_service(tiny, collector):
    url, spans = collector
    wanted = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
    }
    command = [
        "env",
        *(f"{name}={value}" for name, value in wanted.items()),
        str(Path(sys.executable).with_name("opentelemetry-instrument")),
    ]
    with serving(tiny.parent, before=command) as server:
        with server.client() as client:
            for path, asked in zip(
                PARTS,
                ({"json": {"n": 2}}, {"data": {"keep_rows": 4}, "files": {"image": PICTURE}}),
                strict=True,
            ):
                assert client.post(path, **asked).status_code == 200
        assert server.stop() == 0
    for path, parts in PARTS.items():
        [request] = [span for span in spans if span.name == f"POST {path}"]
        within = [
            span
            for span in spans
            if span.parent_span_id == request.span_id and " " not in span.name
        ]
        within.sort(key=lambda span: span.start_time_unix_nano)
        assert [span.name for span in within] == parts
        times = [
            time
            for span in within[:2]
            for time in (span.start_time_unix_nano, span.end_time_unix_nano)
        ]
        assert times == sorted(times), "one after the other"
        assert request.start_time_unix_nano <= times[0] and times[-1] <= request.end_time_unix_nano
