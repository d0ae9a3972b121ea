"""Comparisons, one at a time: made in a thread, run by the engine thread between quanta, watched by
id.
"""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from linpix.model.checkpoint import Checkpoint

from ..engine.admission import Admission
from ..engine.request import ServedModel
from ..engine.thread import EngineThread, Work
from ..errors import comparison_not_found, just_cancelled, still_running
from .checkpoints import find_twins
from .comparison import Comparison, ComparisonPlan

logger = logging.getLogger("linpix")
REST = 9.0  # times as long as a unit takes, while images are drawn
# before the next one after a cancelled one: beginning takes time from live requests, cancelling is
# free
PAUSE_S = 1.0

Status = Literal["running", "completed", "cancelled", "failed"]


@dataclass(slots=True, eq=False)
class Run:
    """A comparison's state as clients see it. Used on the event loop only; it holds no network."""

    id: str
    model: str
    budget: float
    status: Status = "running"
    shared_device: bool = False
    error: str | None = None
    progress: float = 0.0
    report: dict[str, Any] | None = None  # replaced, never changed; None until it has been made


class Comparisons:
    """The comparisons of this process. Used on the event loop, except for what says otherwise."""

    def __init__(self, admission: Admission, thread: EngineThread) -> None:
        self._admission, self._thread = admission, thread
        self._jobs: dict[str, Run] = {}
        self._ids = itertools.count(1)
        self._making: asyncio.Task[None] | None = None
        self._quiet_until = 0.0

    def begin(self, model: ServedModel, plan: ComparisonPlan) -> Run:
        """Start a comparison. Raises ServiceError."""
        last = self.latest()
        if last and last.status == "running":
            raise still_running(last.id)
        left_s = self._quiet_until - time.monotonic()
        if left_s > 0 or (self._making and not self._making.done()):
            raise just_cancelled(next(reversed(self._jobs)), max(left_s, 0.1))
        job = Run(f"cmp-{next(self._ids)}", model.name, plan.budget_s)
        self._jobs = dict(list(self._jobs.items())[-15:])  # the last 16 stay readable
        self._jobs[job.id] = job
        self._making = asyncio.create_task(self._prepare(job, model.checkpoint, plan))
        return job

    def find(self, id: str) -> Run:
        """Raises ServiceError."""
        if id not in self._jobs:
            raise comparison_not_found(id, self._jobs)
        job = self._jobs[id]
        # without an engine nothing else ends it
        if job.status == "running" and self._admission.gone:
            job.error, job.status = self._admission.gone, "failed"
        return job

    def cancel(self, id: str) -> Run:
        """Raises ServiceError."""
        job = self.find(id)
        if job.status == "running":
            job.status = "cancelled"
            self._thread.cancel(f"comparison {job.id}")
            self._quiet_until = time.monotonic() + PAUSE_S
        return job

    def latest(self) -> Run | None:
        """The last comparison that was begun, running or over."""
        return self.find(next(reversed(self._jobs))) if self._jobs else None

    async def watch(self, id: str, interval_s: float = 0.5) -> AsyncIterator[Run]:
        """Yield a job every interval_s while it runs, and once more when it is over."""
        job = self.find(id)
        while job.status == "running":
            yield job
            await asyncio.sleep(interval_s)
            job = self.find(id)
        yield job

    def stop(self) -> None:
        """Cancel the running comparison: the process is ending."""
        for id in self._jobs:
            self.cancel(id)

    async def _prepare(self, job: Run, checkpoint: Checkpoint, plan: ComparisonPlan) -> None:
        """Find the checkpoint's twins and build their networks, in a thread of their own; then have
        the engine thread compare them.
        """
        try:
            twins = await asyncio.to_thread(find_twins, checkpoint)
            if job.status == "running":
                comparison = await asyncio.to_thread(Comparison, checkpoint, twins, plan)
        except Exception as failure:
            logger.exception("%s could not be started", job.id)
            self._fail(job, failure, checkpoint)
            return
        if job.status == "running":
            self._thread.run_in_background(
                Work(
                    # no request's id
                    f"comparison {job.id}",
                    "",  # the client: comparisons and clients' likelihoods take turns
                    self._units(job, comparison, checkpoint),
                    rest=REST,
                )
            )

    def _units(self, job: Run, comparison: Comparison, checkpoint: Checkpoint) -> Iterator[None]:
        """The comparison's units of work, one a `next`, on the engine thread, which reports each to
        the event loop.
        """
        try:
            for _ in comparison.run():
                self._thread.report(
                    self._advance,
                    job,
                    comparison.progress,
                    comparison.report,
                    self._thread.load > 1,
                )
                yield
            self._thread.report(self._complete, job, comparison.report)
        except Exception as failure:
            self._thread.report(self._fail, job, failure, checkpoint)
            raise

    def _advance(self, job: Run, progress: float, report: dict[str, Any], shared: bool) -> None:
        if job.status == "running":
            job.progress, job.report = progress, report
            job.shared_device |= shared

    def _complete(self, job: Run, report: dict[str, Any]) -> None:
        if job.status != "running":  # it was cancelled during the last unit
            return
        job.report, job.status, job.progress = report, "completed", 1.0
        # of each backend, the last one is the highest
        for backend, rate in sorted(
            (one["backend"], one["images_per_second"] or 0.0) for one in report["results"]
        ):
            self._admission.metrics.comparison.labels(backend).set(rate)

    def _fail(self, job: Run, failure: Exception, checkpoint: Checkpoint) -> None:
        """End a job with an error. Clients see paths below the folder of checkpoints; the log has
        the whole path.
        """
        if job.status == "running":
            reason = str(failure).replace(f"{checkpoint.folder.parent}{os.sep}", "")
            job.error, job.status = f"{type(failure).__name__}: {reason}", "failed"
