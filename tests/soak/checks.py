"""What is asked of every load, whatever it was.

Each request was answered exactly once and is accounted for in the service's own counters, each
image is bitwise what its seed gives alone, every gauge is back at 0, and memory and open files are
what they were when the process was warm.
"""

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator

import numpy as np

from tests.soak.loads import Result, Soak, images_per_second
from tests.soak.service import Oracle, Service
from tools.harness.client import Record

GROWTH = 1.10  # of resident memory since the process was warm, at most


@contextlib.asynccontextmanager
async def measured(
    soak: Soak, name: str, service: Service, oracles: list[Oracle]
) -> AsyncIterator[tuple[Result, list[Record]]]:
    """The caller puts the load's records into the list; what is wrong with them goes into the
    result.
    """
    result, records = Result(name), []
    before, began = service.samples(), time.monotonic()
    yield result, records
    result.failures += await service.settle()
    after = service.samples()
    change = {key: value - before.get(key, 0.0) for key, value in after.items()}
    result.outcomes = Counter(record.outcome for record in records)
    result.failures += accounted(result.outcomes, change) + unanswered(records)
    result.failures += otherwise(records, oracles)
    if not oracles[0].promised:
        result.notes.append("images not compared: the eager engine promises no bits")
    if service.memory_warm:
        result.growth = service.memory / service.memory_warm
        if result.growth > GROWTH:
            result.failures.append(f"memory is {result.growth:.2f} times what it was warm")
    if result.rate is None and records:
        result.rate = images_per_second(records, began, max(soak.plan.seconds, 1e-9))
    result.spans = {
        "queue": of_histogram(change, "linpix_queue_wait_seconds"),
        "first row": of_histogram(change, "linpix_first_row_seconds"),
        "whole": of_values([record.seconds for record in records if record.outcome == "completed"]),
    }


def otherwise(records: list[Record], oracles: list[Oracle]) -> list[str]:
    """Whether every image is what its seed gives alone, with the weights that its answer names."""
    known = {oracle.digest: oracle for oracle in oracles}
    unknown = {record.checkpoint for record in records if record.images} - known.keys()
    wrong = [
        seed
        for record in records
        if record.checkpoint in known and oracles[0].promised
        for seed in known[record.checkpoint].wrong(record)
    ]
    return [f"images of checkpoint {digest!r}, which nobody served" for digest in unknown] + (
        [
            f"{len(wrong)} images are not what their seed gives alone, such as that of seed"
            f" {wrong[0]}"
        ]
        if wrong
        else []
    )


def unanswered(records: list[Record]) -> list[str]:
    lost = [record for record in records if record.outcome == "lost"]
    return (
        [
            f"{len(lost)} requests were not answered, or not once, such as that of seed"
            f" {lost[0].ask.seed}: status {lost[0].status}, {len(lost[0].images)} of"
            f" {lost[0].ask.n} images, {lost[0].broken or 'no error'}"
        ]
        if lost
        else []
    )


def accounted(seen: Counter, change: dict[str, float]) -> list[str]:
    """Whether the service counted what its clients saw. Of those who left, nobody knows how far
    they came.
    """

    def counted(name: str, label: str) -> int:
        return round(
            sum(value for key, value in change.items() if key.startswith(name) and label in key)
        )

    completed, cancelled, failed = (
        counted("linpix_requests_total", f'outcome="{outcome}"')
        for outcome in ("completed", "cancelled", "failed")
    )
    refused = counted("linpix_requests_rejected_total", "")
    wrong = []
    for what, count, least in (
        ("completed", completed, seen["completed"]),
        ("failed", failed, seen["failed"]),
        ("refused", refused, seen["refused"]),
        ("cancelled", cancelled, 0),
    ):
        most = least + seen["left"]
        if not least <= count <= most:
            wrong.append(
                f"the service counted {count} requests as {what}, its clients saw "
                f"{least}{f' to {most}' if most > least else ''}"
            )
    ended, known = completed + cancelled + failed + refused, sum(seen.values()) - seen["lost"]
    if not known - seen["left"] <= ended <= known:
        wrong.append(f"the service ended {ended} requests of {known}")
    return wrong


def of_values(values: list[float]) -> list[float]:
    """p50, p95 and p99."""
    return [float(np.quantile(values, share)) for share in (0.5, 0.95, 0.99)] if values else []


def of_histogram(change: dict[str, float], name: str) -> list[float]:
    """The same of a histogram's buckets, as histogram_quantile has it: linear between two
    bounds.
    """
    sums: defaultdict[float, float] = defaultdict(float)  # of all models
    for key, value in change.items():
        if key.startswith(f"{name}_bucket"):
            sums[float(key.split('le="')[1].split('"')[0])] += value
    buckets = sorted(sums.items())
    if not buckets or not buckets[-1][1]:
        return []
    found = []
    for share in (0.5, 0.95, 0.99):
        wanted, low, below = share * buckets[-1][1], 0.0, 0.0
        for bound, count in buckets:
            if count >= wanted:
                found.append(
                    low
                    if bound == float("inf")
                    else low + (bound - low) * (wanted - below) / (count - below)
                )
                break
            low, below = bound, count
    return found
