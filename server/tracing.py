"""Spans of OpenTelemetry for the parts of a request. Its own tools record requests, if `opentelemetry-instrument` has
started the service (docs/operate.md); nothing is recorded else.
"""

import time

try:
    from opentelemetry import trace
except ModuleNotFoundError:
    ON = False
else:
    ON = not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def record(*parts: tuple[str, float, float]) -> None:
    """Record parts of the current request that are over: name, begin and end, by time.monotonic."""
    shift, tracer = time.time() - time.monotonic(), trace.get_tracer("linpix")
    for name, began, ended in parts:
        if ended > began:
            tracer.start_span(name, start_time=round((began + shift) * 1e9)).end(round((ended + shift) * 1e9))
