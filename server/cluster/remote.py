"""The Drawer of a front, which has no engine: replicas draw the images of its requests."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from ..engine.job import Job
from ..engine.request import Event, Request, ServedModel
from ..errors import Draining, EngineGone, ServiceError, deadline_passed, engine_gone
from ..metrics import Metrics

logger = logging.getLogger("linpix")
# of a call: one whose replica died runs only once more, since it may be what kills replicas
RUNS = 2
# seconds from a deadline until the front ends the request; the replica, which counts it, does so
# before
LATE_S = 0.5
ELSEWHERE = EngineGone, Draining  # errors of a replica that ends: another can draw the same
News = list[Event | ServiceError | None]  # None: a stream is admitted; an error is the last
# of each model of a replica: facts of its decoder, and slots
Described = dict[str, tuple[dict[str, str], int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request, as a front sends it to a replica."""

    id: str
    endpoint: str
    client: str
    job: Job
    # of the model's decoder, with weights and precision, as the answer will report them
    facts: dict[str, str]
    timeout_s: float  # from when its head was read
    spent_s: float  # the part of it that has passed


class ReplicaLost(Exception):
    """The replica of a call died, or was ended, before it had answered all of it."""


class Remote:
    """A front counts requests that it refuses itself, or that died with their replica; replicas
    count all others, and know what there is room and time for.
    """

    gone = ""  # calls wait while a replica is replaced

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        metrics: Metrics,
        run: Callable[[Call], AsyncIterator[News]],
    ) -> None:
        """run: news of a call from some replica, first None when a stream is admitted. Raises
        ReplicaLost.
        """
        self.models, self.metrics, self._run_call = models, metrics, run
        for model in models.values():
            metrics.add_model(model.name, model.backend)
        self._calls: dict[str, asyncio.Task[None]] = {}

    def check_room(self, *_: object, **__: object) -> None: ...

    def check(self, request: Request) -> None: ...

    def begin(self, request: Request) -> None:
        loop = asyncio.get_running_loop()
        request.expiry = loop.call_at(request.deadline + LATE_S, self._expire, request)
        self._calls[request.id] = loop.create_task(self._run(request))

    def end(self, request: Request) -> None:
        if (call := self._calls.pop(request.id, None)) is not None:
            call.cancel()

    def _expire(self, request: Request) -> None:
        self.metrics.deadlines_passed.labels("waiting").inc()
        self._fail(request, deadline_passed(request.timeout_s))

    def _fail(self, request: Request, error: ServiceError) -> None:
        """End a request that no replica counts."""
        self.metrics.requests.labels(request.endpoint, "failed").inc()
        request.send(error)

    async def _run(self, request: Request) -> None:
        """Pass on what replicas answer. A call whose replica dies runs again, if nothing was passed
        on.
        """
        for run in range(RUNS):
            # an id of its own: other fronts may have the same, and if the same replica gets this
            # call again, late answers to its first run do not belong to it
            call = Call(
                id=f"{request.id}.{secrets.token_hex(4)}",
                endpoint=request.endpoint,
                client=request.client,
                job=request.job,
                facts=request.model.facts,
                timeout_s=request.timeout_s,
                spent_s=time.monotonic() - request.began,
            )
            final = run + 1 == RUNS  # whether no other run follows
            try:
                async for news in self._run_call(call):
                    gone = [event for event in news if isinstance(event, ELSEWHERE)]
                    if gone and not final:  # else it is the answer, which the replica has counted
                        raise ReplicaLost(str(gone[0]))
                    for event in news:
                        request.send(event)
                    final |= news != [None]
                return
            except ReplicaLost as lost:
                logger.warning(
                    "%s; request %s %s",
                    lost,
                    call.id,
                    "ends" if final else "runs again on another replica",
                )
                if final:
                    break
            except Exception as failure:  # a bug, of ours or of the transport
                logger.exception("request %s was lost", call.id)
                self._fail(
                    request,
                    engine_gone(
                        f"the request was lost on its way to a replica ({type(failure).__name__})"
                    ),
                )
                return
        self._fail(request, engine_gone("the replicas for this request have ended"))
