"""The metrics for Prometheus. Label values come from finite sets, and every child exists from the
start.
"""

from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import Any

import torch
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

import linpix

ENDPOINTS = ("generations", "edits", "likelihoods")
FAULTS = ("not_finite", "threw")
OUTCOMES = ("completed", "cancelled", "failed")
RELOADS = ("added", "replaced", "removed", "refused", "unchanged")
PRIORITIES = ("interactive", "bulk")
REJECTIONS = (
    "queue_full",
    "client_limit",
    "too_many_bodies",
    "deadline_unreachable",
    "draining",
    "engine_gone",
    "invalid",
    "unauthorized",
    "rate_limited",
    "foreign_host",
    "foreign_origin",
    "too_large",
    "body_timeout",
)
STATES = ("reading", "waiting", "running")
OF_MODEL, OF_DECODER = ("model",), ("model", "backend")  # labels

disable_created_metrics()  # type: ignore[no-untyped-call]  # time stamps that no dashboard uses

_STEP_BUCKETS = (
    50e-6,
    100e-6,
    200e-6,
    500e-6,
    1e-3,
    2e-3,
    5e-3,
    10e-3,
    20e-3,
    50e-3,
    0.1,
    0.2,
    0.5,
    1.0,
)
_WAIT_BUCKETS = (
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.07,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.7,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    5.0,
    6.0,
    7.0,
    8.0,
    10.0,
    12.0,
    15.0,
    20.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
_PREFILL_BUCKETS = (
    0.5e-3,
    1e-3,
    2e-3,
    3e-3,
    5e-3,
    7e-3,
    10e-3,
    15e-3,
    20e-3,
    30e-3,
    50e-3,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
)
_ROW_BUCKETS = [2**power for power in range(13)]  # 1 to 4096


def _create(metric: Any, *labels: Iterable[str]) -> None:
    """Create the children of a metric, one for each combination of these values of its labels."""
    for values in product(*labels):
        metric.labels(*values)


class Metrics:
    """One registry per service. Dashboards and alerts rely on its names and labels."""

    def __init__(self, backends: Iterable[str], kernel: str) -> None:
        """backends: names that a comparison may report."""
        self.registry = registry = CollectorRegistry()
        self.kernel = kernel
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.images_completed = counter(
            "linpix_images_completed",
            "Images that ended, by outcome.",
            ("model", "backend", "outcome"),
        )
        self.images_drawn_again = counter(
            "linpix_images_drawn_again",
            "Images that were drawn again because the model "
            "did not recognise their class or they were torn.",
            OF_DECODER,
        )
        self.pixels_generated = counter(
            "linpix_pixels_generated",
            "Decoded sub-pixels, including known ones.",
            OF_DECODER,
        )
        self.requests = counter(
            "linpix_requests",
            "Requests that ended, admitted or by a fault before, by outcome.",
            ("endpoint", "outcome"),
        )
        self.requests_rejected = counter(
            "linpix_requests_rejected", "Requests that were refused, by reason.", ("reason",)
        )
        self.requests_running = gauge(
            "linpix_requests_running", "Requests of which an image has had a slot."
        )
        self.requests_waiting = gauge(
            "linpix_requests_waiting", "Requests of which no image has had a slot yet."
        )
        self.images_waiting = gauge(
            "linpix_images_waiting",
            "Images with no slot yet; a likelihood counts as one image until it is done.",
            ("model", "priority"),
        )
        self.bodies_reading = gauge(
            "linpix_request_bodies_reading",
            "Requests whose body is being read, or whose upload waits to be decoded.",
        )
        self.deadlines_passed = counter(
            "linpix_deadlines_passed",
            "Requests whose time limit passed, by the state that they were in.",
            ("state",),
        )
        self.state_slots = gauge("linpix_state_slots", "Slots of the state pool.", OF_MODEL)
        self.state_slots_used = gauge(
            "linpix_state_slots_used", "Slots that hold an image.", OF_MODEL
        )
        self.state_saturations = counter(
            "linpix_state_saturations",
            "Elements of the state that were too large for float16.",
            OF_MODEL,
        )
        self.faults_isolated = counter(
            "linpix_faults_isolated",
            "Requests that an engine fault ended, without ending the others of the batch.",
            ("model", "fault"),
        )
        self.quanta_retried = counter(
            "linpix_quanta_retried",
            "Quanta that raised an exception and were run again in parts.",
            OF_MODEL,
        )
        self.engine_restarts = counter("linpix_engine_restarts", "Restarts of the engine thread.")
        self.heartbeat_age = gauge(
            "linpix_engine_heartbeat_age_seconds",
            "Seconds since the engine's last heartbeat while it has work, else 0.",
        )
        self.request_duration = histogram(
            "linpix_request_duration_seconds",
            "Seconds from the head of a request to the last byte produced.",
            ("endpoint", "model"),
            buckets=_WAIT_BUCKETS,
        )
        self.queue_wait = histogram(
            "linpix_queue_wait_seconds",
            "Seconds from the head of a request until an image of it gets a slot.",
            OF_MODEL,
            buckets=_WAIT_BUCKETS,
        )
        self.first_row = histogram(
            "linpix_first_row_seconds",
            "Seconds from the head of a request to the first decoded row of an image of it.",
            OF_MODEL,
            buckets=_WAIT_BUCKETS,
        )
        self.engine_step = histogram(
            "linpix_engine_step_seconds",
            "Seconds of one step, which takes a token of every image through the layers.",
            OF_DECODER,
            buckets=_STEP_BUCKETS,
        )
        self.engine_step_batch_size = histogram(
            "linpix_engine_step_batch_size", "Images in a quantum.", buckets=_ROW_BUCKETS
        )
        self.prefill = histogram(
            "linpix_prefill_seconds",
            "Seconds to read or fold in the known part of a request's "
            "picture, once for all its images.",
            OF_MODEL,
            buckets=_PREFILL_BUCKETS,
        )
        self.reloads = counter(
            "linpix_checkpoint_reloads",
            "Checkpoints checked after SIGHUP, by outcome.",
            ("outcome",),
        )
        self.comparison = gauge(
            "linpix_comparison_images_per_second",
            "Highest images per second of each backend in the last comparison.",
            ("backend",),
        )
        kernel_info = gauge(
            "linpix_kernel_info",
            "Versions and kernel in use, as labels; always 1.",
            ("version", "torch", "kernel"),
        )
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)

        kernel_info.labels(linpix.__version__, torch.__version__, kernel).set(1)
        _create(self.reloads, RELOADS)
        _create(self.requests, ENDPOINTS, OUTCOMES)
        _create(self.requests_rejected, REJECTIONS)
        _create(self.deadlines_passed, STATES)
        _create(self.comparison, backends)

    def add_model(self, model: str, backend: str) -> None:
        """Create the children of a model. They stay when it is removed; only the gauges of its
        slots go.
        """
        for metric in (
            self.queue_wait,
            self.first_row,
            self.prefill,
            self.state_saturations,
            self.quanta_retried,
        ):
            metric.labels(model)
        for metric in (self.pixels_generated, self.engine_step, self.images_drawn_again):
            metric.labels(model, backend)
        _create(self.request_duration, ENDPOINTS, [model])
        _create(self.faults_isolated, [model], FAULTS)
        _create(self.images_completed, [model], [backend], OUTCOMES)

    def values(self, *names: str) -> dict[tuple[str, ...], float]:
        """Samples of these names, by name and label values; labels have the order in which the
        metric declares them.
        """
        found: dict[tuple[str, ...], float] = {}
        for family in self.registry.restricted_registry(names).collect():
            for sample in family.samples:
                if sample.name in names:
                    found[sample.name, *sample.labels.values()] = sample.value
        return found

    def text(self) -> bytes:
        """All metrics in Prometheus's exposition format."""
        return generate_latest(self.registry)
