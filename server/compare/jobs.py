"""Comparisons, one at a time: made in a thread, run by the engine thread between quanta, watched by id."""

import asyncio
import itertools
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from linpix.model.checkpoint import Checkpoint

from ..engine.ledger.local_ledger import LocalLedger
from ..engine.thread import EngineThread
from ..errors import ComparisonNotFound, Conflict, JustCancelled, ModelNotFound
from .checkpoints import find_twins
from .comparison import Comparison, ComparisonPlan

logger = logging.getLogger("linpix")
PAUSE_S = 1.0  # before the next one after a cancelled one: beginning takes time from live requests, cancelling is free

Status = Literal["running", "completed", "cancelled", "failed"]


@dataclass(slots=True, eq=False)
class Job:
    """A comparison's state as clients see it. Used on the event loop only; it holds no network."""

    id: str
    model: str
    budget: float
    status: Status = "running"
    shared_device: bool = False
    error: str | None = None
    progress: float = 0.0
    report: dict[str, Any] | None = None  # replaced, never changed; None until it has been made


class Comparisons(ABC):
    """What routes call. FarComparisons, of a front, are in server/cluster/serving.py."""

    @abstractmethod
    async def begin(self, model: str, plan: ComparisonPlan) -> Job:
        """Start a comparison of a model that is served. Raises ModelNotFound, Conflict or JustCancelled."""

    @abstractmethod
    async def find(self, id: str) -> Job:
        """Raises ComparisonNotFound."""

    @abstractmethod
    async def cancel(self, id: str) -> Job:
        """Raises ComparisonNotFound."""

    @abstractmethod
    async def latest(self) -> Job | None:
        """The last comparison that was begun, running or over."""

    @abstractmethod
    def stop(self) -> None:
        """Cancel the running comparison, if it is this process's: the process is ending."""

    async def watch(self, id: str, interval_s: float = 0.5) -> AsyncIterator[Job]:
        """Yield a job every interval_s while it runs, and once more when it is over."""
        while (job := await self.find(id)).status == "running":
            yield job
            await asyncio.sleep(interval_s)
        yield job


class LocalComparisons(Comparisons):
    """Comparisons in this process. Used on the event loop, except for what says otherwise."""

    def __init__(self, ledger: LocalLedger, thread: EngineThread) -> None:
        self._ledger, self._thread = ledger, thread
        self._jobs: dict[str, Job] = {}
        self._ids = itertools.count(1)
        self._twins: list[Checkpoint] = []  # of the last model compared, if not served: likely needed again
        self._making: asyncio.Task[None] | None = None
        self._quiet_until = 0.0

    async def begin(self, model: str, plan: ComparisonPlan) -> Job:
        if (served := self._ledger.models.get(model)) is None:
            raise ModelNotFound(model, self._ledger.models)
        if running := next((job for job in self._jobs.values() if job.status == "running"), None):
            raise Conflict(running.id)
        left_s = self._quiet_until - time.monotonic()
        if left_s > 0 or (self._making and not self._making.done()):
            raise JustCancelled(next(reversed(self._jobs)), max(left_s, 0.1))
        job = Job(f"cmp-{next(self._ids)}", model, plan.budget_s)
        self._jobs = dict(list(self._jobs.items())[-15:])  # the last 16 stay readable
        self._jobs[job.id] = job
        self._making = asyncio.get_running_loop().create_task(self._make(job, served.checkpoint, plan))
        return job

    async def find(self, id: str) -> Job:
        return self._checked(self._known(id))

    async def cancel(self, id: str) -> Job:
        job = self._checked(self._known(id))
        self._cancel(job)
        return job

    async def latest(self) -> Job | None:
        return self._checked(next(reversed(self._jobs.values()))) if self._jobs else None

    def stop(self) -> None:
        for job in self._jobs.values():
            self._cancel(self._checked(job))

    def _known(self, id: str) -> Job:
        if id not in self._jobs:
            raise ComparisonNotFound(id, self._jobs)
        return self._jobs[id]

    def _checked(self, job: Job) -> Job:
        if job.status == "running" and self._ledger.gone:  # without an engine nothing else ends it
            job.error, job.status = self._ledger.gone, "failed"
        return job

    def _cancel(self, job: Job) -> None:
        if job.status == "running":
            job.status = "cancelled"
            self._thread.run_in_background(None)
            self._quiet_until = time.monotonic() + PAUSE_S

    async def _make(self, job: Job, checkpoint: Checkpoint, plan: ComparisonPlan) -> None:
        """Read and hash twins, and build networks, both in a thread; then have the engine thread compare them."""
        served = [served.checkpoint for served in self._ledger.models.values()]
        try:
            twins = await asyncio.to_thread(find_twins, checkpoint, checkpoint.folder.parent, [*served, *self._twins])
            self._twins = [twin for twin in twins if not any(twin is one for one in served)]
            if job.status == "running":
                comparison = await asyncio.to_thread(Comparison, checkpoint, twins, plan)
        except Exception as failure:
            logger.exception("%s could not be started", job.id)
            self._fail(job, failure, checkpoint)
            return
        if job.status == "running":
            self._thread.run_in_background(self._units(job, comparison, checkpoint))

    def _units(self, job: Job, comparison: Comparison, checkpoint: Checkpoint) -> Iterator[None]:
        """The comparison's units of work, one a `next`, on the engine thread, which reports each to the event loop."""
        try:
            for _ in comparison.run():
                self._thread.report(self._advance, job, comparison.progress, comparison.report, self._thread.busy)
                yield
            self._thread.report(self._complete, job, comparison.report)
        except Exception as failure:
            self._thread.report(self._fail, job, failure, checkpoint)
            raise

    def _advance(self, job: Job, progress: float, report: dict[str, Any], shared: bool) -> None:
        if job.status == "running":
            job.progress, job.report = progress, report
            job.shared_device |= shared

    def _complete(self, job: Job, report: dict[str, Any]) -> None:
        if job.status != "running":  # it was cancelled during the last unit
            return
        job.report, job.status, job.progress = report, "completed", 1.0
        best: dict[str, float] = {}
        for result in report["results"]:
            best[result["backend"]] = max(best.get(result["backend"], 0.0), result["images_per_second"] or 0.0)
        for backend, rate in best.items():
            self._ledger.metrics.comparison.labels(backend).set(rate)

    def _fail(self, job: Job, failure: Exception, checkpoint: Checkpoint) -> None:
        """End a job with an error. Clients see paths below the folder of checkpoints; the log has the whole path."""
        if job.status == "running":
            reason = str(failure).replace(f"{checkpoint.folder.parent}{os.sep}", "")
            job.error, job.status = f"{type(failure).__name__}: {reason}", "failed"
