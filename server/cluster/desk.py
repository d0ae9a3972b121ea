"""The desk: what all fronts must agree on, which is images per client, rates of keys, live processes and when to drain.

It holds counts only. If it dies, another begins empty, and gets the counts again with the next beat of each front.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily

from ..web.keys import Bucket, bucket_of

Snapshot = list[Metric]  # the metrics of one process, as its registry collects them
SILENT_S = 10.0  # seconds without a beat after which a process counts as gone


@dataclass(slots=True)
class _Process:
    kind: str                    # front or engine
    seen: float
    clients: Mapping[str, int] = field(default_factory=dict)
    snapshot: Snapshot = field(default_factory=list)
    drained: bool = False


class Reply(NamedTuple):
    """The desk's answer to a beat."""

    draining: bool             # whether the front is to drain
    elsewhere: dict[str, int]  # images of each client at other fronts


class Desk:
    """Used on one event loop."""

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._draining = False
        self._lost: set[str] = set()  # processes that fell silent without having drained

    async def beat(self, name: str, kind: str, clients: Mapping[str, int], snapshot: Snapshot, drained: bool) -> Reply:
        """Record that a process is there, with its images of each client and its metrics."""
        process = self._seen(name, kind)
        process.clients, process.snapshot, process.drained = Counter(clients), snapshot, drained
        return Reply(self._draining, self._elsewhere(process) if kind == "front" else {})

    async def enter(self, front: str, client: str, here: int, images: int, limit: int) -> int | None:
        """Count more images of a client with `here` at this front; or return how many it has, if more are too many."""
        process = self._seen(front, "front")
        others = sum(other.clients.get(client, 0) for other in self._present().values() if other is not process)
        if others + here + images > limit:
            return others + here
        process.clients = Counter(process.clients) | Counter({client: here + images})
        return None

    async def take(self, key: str, rate: str) -> float:
        """Count a request against a key's rate; returns 0, or the seconds until one is allowed."""
        bucket = self._buckets.setdefault((key, rate), bucket_of(rate))
        return bucket.take(time.monotonic())

    async def collected(self) -> dict[str, Snapshot]:
        """The metrics of every process that is there, and of the desk."""
        present = self._present()
        lost = CounterMetricFamily("linpix_processes_lost", "Replicas and fronts that fell silent without having "
                                                            "drained.", value=len(self._lost))
        return {name: process.snapshot for name, process in present.items()} | {"desk": [lost]}

    async def drain(self) -> None:
        """Have every front drain, from its next beat on."""
        self._draining = True

    async def drained(self) -> bool:
        """Whether no front has anything left to do."""
        return all(process.drained for process in self._present().values() if process.kind == "front")

    async def fronts(self) -> int:
        return sum(process.kind == "front" for process in self._present().values())

    def _seen(self, name: str, kind: str) -> _Process:
        process = self._processes.setdefault(name, _Process(kind, -math.inf))
        process.seen = time.monotonic()
        return process

    def _elsewhere(self, process: _Process) -> dict[str, int]:
        """Images of each client at the other processes."""
        counts = Counter[str]()
        for other in self._present().values():
            if other is not process:
                counts.update(other.clients)
        return dict(counts)

    def _present(self) -> dict[str, _Process]:
        now = time.monotonic()
        for name, process in list(self._processes.items()):
            if now - process.seen >= SILENT_S:
                del self._processes[name]
                self._lost |= set() if process.drained else {name}
        return self._processes


# --- the metrics of all processes as one exposition ---

def merged(snapshots: Mapping[str, Snapshot]) -> list[Metric]:
    """Join families of the same name; each sample gets the name of its process as the label `replica`."""
    families: dict[str, Metric] = {}
    for replica, found in snapshots.items():
        for family in found:
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [sample._replace(labels={**sample.labels, "replica": replica})
                              for sample in family.samples]
    return list(families.values())


class Together:
    """The metrics of all processes, as Measured: `text` lists each process, `values` are sums."""

    def __init__(self, snapshots: Mapping[str, Snapshot]) -> None:
        self._snapshots = snapshots

    def values(self, *names: str) -> dict[tuple[str, ...], float]:
        sums: dict[tuple[str, ...], float] = defaultdict(float)
        for found in self._snapshots.values():
            for family in found:
                for sample in family.samples:
                    if sample.name in names:
                        sums[sample.name, *sample.labels.values()] += sample.value
        return sums

    def text(self) -> bytes:
        return generate_latest(_Families(merged(self._snapshots)))


class _Families:
    """As much of a registry as generate_latest needs."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)
