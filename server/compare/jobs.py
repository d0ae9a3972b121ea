"""Comparisons, one at a time: made in a thread, run by the engine thread between quanta, watched by id."""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from linpix.model.checkpoint import Checkpoint

from ..engine.ledger import Ledger
from ..engine.thread import EngineThread
from ..errors import ComparisonNotFound, Conflict, JustCancelled, ModelNotFound
from .checkpoints import find_twins
from .comparison import Comparison, ComparisonPlan

logger = logging.getLogger("linpix")
PAUSE_S = 1.0  # before the next one after a cancelled one: beginning takes time from live requests, cancelling is free

Status = Literal["running", "completed", "cancelled", "failed"]


@dataclass(slots=True, eq=False)
class Job:
    """A comparison's state as clients see it; the engine thread writes, the event loop reads. It holds no network."""

    id: str
    model: str
    budget: float
    status: Status = "running"
    shared_device: bool = False
    error: str | None = None
    progress: float = 0.0
    report: dict[str, Any] | None = None  # replaced, never changed; None until it has been made

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "status": self.status, "model": self.model, "budget": self.budget,
                "shared_device": self.shared_device, "error": self.error,
                "progress": 1.0 if self.status == "completed" else self.progress, "report": self.report}


class Comparisons:
    def __init__(self, ledger: Ledger, thread: EngineThread) -> None:
        self._ledger, self._thread = ledger, thread
        self._jobs: dict[str, Job] = {}
        self._ids = itertools.count(1)
        self._twins: list[Checkpoint] = []  # of the last model compared, if not served: likely needed again
        self._making: asyncio.Task[None] | None = None
        self._quiet_until = 0.0

    def begin(self, model: str, checkpoint: Checkpoint, plan: ComparisonPlan) -> Job:
        """Start a comparison, or raise Conflict. Called on the event loop."""
        if running := next((job for job in self._jobs.values() if job.status == "running"), None):
            raise Conflict(running.id)
        left_s = self._quiet_until - time.monotonic()
        if left_s > 0 or (self._making and not self._making.done()):
            raise JustCancelled(next(reversed(self._jobs)), max(left_s, 0.1))
        job = Job(f"cmp-{next(self._ids)}", model, plan.budget_s)
        self._jobs = dict(list(self._jobs.items())[-15:])  # the last 16 stay readable
        self._jobs[job.id] = job
        self._making = asyncio.get_running_loop().create_task(self._make(job, checkpoint, plan))
        return job

    def find(self, id: str) -> Job:
        if id not in self._jobs:
            raise ComparisonNotFound(id, self._jobs)
        return self._looked_at(self._jobs[id])

    def _looked_at(self, job: Job) -> Job:
        if job.status == "running" and self._ledger.gone:  # without an engine nothing else ends it
            job.error, job.status = self._ledger.gone, "failed"
        return job

    @property
    def latest(self) -> Job | None:
        """The last comparison that was begun, running or over."""
        return self._looked_at(next(reversed(self._jobs.values()))) if self._jobs else None

    def cancel(self, id: str) -> Job:
        job = self.find(id)
        if job.status == "running":
            job.status = "cancelled"
            self._quiet_until = time.monotonic() + PAUSE_S
        return job

    def stop(self) -> None:
        """Cancel the running comparison: the service is ending."""
        for id in self._jobs:
            self.cancel(id)

    async def _make(self, job: Job, checkpoint: Checkpoint, plan: ComparisonPlan) -> None:
        try:
            comparison = await asyncio.to_thread(self._made, job, checkpoint, plan)
        except Exception as failure:
            logger.exception("%s could not be started", job.id)
            self._fail(job, failure, checkpoint)
            return
        if comparison is not None and job.status == "running":
            self._thread.run_in_background(self._units(job, comparison, checkpoint))

    def _made(self, job: Job, checkpoint: Checkpoint, plan: ComparisonPlan) -> Comparison | None:
        """Read and hash twins, and build networks, in a thread. None for a job that has been cancelled."""
        if job.status != "running":
            return None
        served = [served.decoder.checkpoint for served in self._ledger.models.values()]
        twins = find_twins(checkpoint, checkpoint.folder.parent, [*served, *self._twins])
        self._twins = [twin for twin in twins if not any(twin is one for one in served)]
        return Comparison(checkpoint, twins, plan) if job.status == "running" else None

    def _units(self, job: Job, comparison: Comparison, checkpoint: Checkpoint) -> Iterator[None]:
        """The comparison's units of work, one a `next`, on the engine thread."""
        if job.status != "running":
            return
        try:
            for _ in comparison.run():
                job.shared_device |= self._thread.decoding
                job.progress, job.report = comparison.progress, comparison.report
                yield
                if job.status != "running":
                    return
            best: dict[str, float] = {}
            for result in comparison.report["results"]:
                best[result["backend"]] = max(best.get(result["backend"], 0.0), result["images_per_second"] or 0.0)
            for backend, rate in best.items():
                self._ledger.metrics.comparison.labels(backend).set(rate)
            if job.status == "running":  # else it was cancelled during the last unit
                job.report, job.status = comparison.report, "completed"
        except Exception as failure:
            self._fail(job, failure, checkpoint)
            raise

    def _fail(self, job: Job, failure: Exception, checkpoint: Checkpoint) -> None:
        """End a job with an error. Clients see paths below the folder of checkpoints; the log has the whole path."""
        if job.status == "running":
            reason = str(failure).replace(f"{checkpoint.folder.parent}{os.sep}", "")
            job.error, job.status = f"{type(failure).__name__}: {reason}", "failed"


class Jobs:
    """What routes call: comparisons in this process, or in another one (FarJobs in server/cluster/serving.py)."""

    def __init__(self, comparisons: Comparisons, ledger: Ledger) -> None:
        self._comparisons, self._ledger = comparisons, ledger

    async def begin(self, model: str, plan: ComparisonPlan) -> Job:
        """Start a comparison of a model that is served. Raises ModelNotFound, Conflict or JustCancelled."""
        if (served := self._ledger.models.get(model)) is None:
            raise ModelNotFound(model, self._ledger.models)
        return self._comparisons.begin(model, served.decoder.checkpoint, plan)

    async def find(self, id: str) -> Job:
        """Raises ComparisonNotFound."""
        return self._comparisons.find(id)

    async def cancel(self, id: str) -> Job:
        """Raises ComparisonNotFound."""
        return self._comparisons.cancel(id)

    async def latest(self) -> Job | None:
        return self._comparisons.latest

    def stop(self) -> None:
        """Cancel the running comparison: the service is ending."""
        self._comparisons.stop()

    async def watch(self, id: str, interval_s: float = 0.5) -> AsyncIterator[dict[str, Any]]:
        """Yield a job's JSON every interval_s while it runs, and once more when it is over."""
        while (job := await self.find(id)).status == "running":
            yield job.to_json()
            await asyncio.sleep(interval_s)
        yield job.to_json()
