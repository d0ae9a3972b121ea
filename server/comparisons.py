"""One comparison at a time, run by the worker between quanta, watched and cancelled by its id."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from server.compare import Comparison
from server.errors import ComparisonNotFound, Conflict
from server.worker import Worker

Status = Literal["running", "completed", "cancelled", "failed"]


@dataclass(slots=True, eq=False)
class Job:
    """A comparison's state as clients see it; the engine thread writes, the event loop reads."""

    id: str
    model: str
    budget: float
    status: Status = "running"
    shared_device: bool = False
    error: str | None = None
    comparison: Comparison | None = None  # None until the engine thread has begun it

    def to_json(self) -> dict[str, Any]:
        running = self.comparison
        return {"id": self.id, "status": self.status, "model": self.model, "budget": self.budget,
                "shared_device": self.shared_device, "error": self.error,
                "progress": 1.0 if self.status == "completed" else running.progress if running else 0.0,
                "report": running.report if running else None}


class Comparisons:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._jobs: dict[str, Job] = {}
        self._ids = itertools.count(1)

    def begin(self, model: str, budget: float, make: Callable[[], Comparison]) -> Job:
        """Start a comparison, or raise Conflict. make loads what it needs, on the engine thread."""
        if running := next((job for job in self._jobs.values() if job.status == "running"), None):
            raise Conflict(running.id)
        job = Job(f"cmp-{next(self._ids)}", model, budget)
        self._jobs = dict(list(self._jobs.items())[-15:])  # the last ones stay readable
        self._jobs[job.id] = job
        self._worker.run_in_background(self._units(job, make))
        return job

    def find(self, id: str) -> Job:
        if id not in self._jobs:
            raise ComparisonNotFound(id, self._jobs)
        return self._looked_at(self._jobs[id])

    def _looked_at(self, job: Job) -> Job:
        if job.status == "running" and self._worker.gone:  # nobody is left to say so
            job.error, job.status = self._worker.gone, "failed"
        return job

    @property
    def latest(self) -> Job | None:
        """The comparison begun last, running or over."""
        return self._looked_at(next(reversed(self._jobs.values()))) if self._jobs else None

    def cancel(self, id: str) -> Job:
        job = self.find(id)
        if job.status == "running":
            job.status = "cancelled"
        return job

    def stop(self) -> None:
        """Cancel whatever runs: the service is ending."""
        for id in self._jobs:
            self.cancel(id)

    def _units(self, job: Job, make: Callable[[], Comparison]) -> Iterator[None]:
        """The comparison's units of work, one a `next`, on the engine thread."""
        try:
            job.comparison = make()
            for _ in job.comparison.run():
                job.shared_device |= bool(self._worker.requests)
                yield
                if job.status != "running":
                    return
            best: dict[str, float] = {}
            for result in job.comparison.report["results"]:
                best[result["backend"]] = max(best.get(result["backend"], 0.0), result["images_per_second"] or 0.0)
            for backend, rate in best.items():
                self._worker.metrics.comparison.labels(backend).set(rate)
            job.status = "completed"
        except Exception as failure:
            job.error, job.status = f"{type(failure).__name__}: {failure}", "failed"
            raise

    async def watch(self, job: Job, interval_s: float = 0.5) -> AsyncIterator[dict[str, Any]]:
        """Yield the job's JSON whenever time has passed, and once more when it is over."""
        while self._looked_at(job).status == "running":
            yield job.to_json()
            await asyncio.sleep(interval_s)
        yield job.to_json()
