"""A replica: the Core of the plain server, which gets orders from fronts instead of HTTP requests."""

import logging
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import torch

from linpix.model.likelihood import Scoring

from .. import logs
from ..compare.jobs import Job
from ..core import Core
from ..engine.ledger.ticket import Scored, Ticket
from ..engine.memory import collect
from ..errors import EngineFailed, EngineGone, ServiceError
from ..settings import Settings
from .desk import Snapshot
from .messages import Answer, Description, Likelihood, Load, Order, Took

logger = logging.getLogger("linpix")


class Replica:
    """Used on one event loop. Fronts limit clients: a replica sees only some of a client's images."""

    def __init__(self, settings: Settings) -> None:
        """Reads the models. Raises CheckpointError or ValueError with the cure."""
        sys.setswitchinterval(0.0005)  # as server/serve.py
        self._core = Core(settings.model_copy(update={"client_images": 0}), share=True)
        self._settings, self._since, self._reported = settings, time.time(), Load()
        self._core.ledger.start()
        collect()

    async def stop(self) -> None:
        """End the engine thread; orders still here end with Draining."""
        self._core.comparisons.stop()
        await self._core.ledger.stop()
        for served in self._core.ledger.models.values():
            served.decoder.close()

    @property
    def gone(self) -> str:
        """Why this process no longer decodes; empty while it does."""
        return self._core.ledger.gone

    def describe(self) -> tuple[Settings, str, dict[str, Description]]:
        """The settings, the kernel in use, and the models, the default one first."""
        return self._settings, self._core.kernel, {
            name: Description(facts=served.facts, backend=served.backend, slots=served.room.slots)
            for name, served in self._core.ledger.models.items()}

    def snapshot(self) -> Snapshot:
        return list(self._core.ledger.metrics.registry.collect())

    def load(self) -> Load:
        """The work left, and the pace: of the model with the fewest multiplications a second with full slots."""
        served = self._core.ledger.models.values()
        paces = [one.room.slots * one.checkpoint.net.multiplications / step_s for one in served
                 if (step_s := one.step_time(one.room.slots))]
        ahead = sum(one.passes_left * one.checkpoint.net.multiplications for one in served)
        load = Load(at=time.time(), ahead=ahead, pace=min(paces, default=0.0),
                    room=max(one.room_left() for one in served),
                    facts={one.name: one.facts for one in served}, since=self._since)
        # if nothing is new, Serve need not tell the fronts
        if ahead or replace(load, at=self._reported.at) != self._reported:
            self._reported = load
        return self._reported

    def fill(self) -> dict[str, float]:
        """Images that wait or are drawn, and the slots, of the model that has most images per slot."""
        fullest = max(self._core.ledger.models.values(),
                      key=lambda one: (one.waiting() + one.slots_used) / one.room.slots)
        return {"images": fullest.waiting() + fullest.slots_used, "slots": fullest.room.slots}

    async def draw(self, order: Order) -> list[Answer]:
        """The whole answer of an order, or the error that ended it; and how long that took."""
        began = time.monotonic()
        answers = [answer async for answers in self.stream(order) for answer in answers]
        return [*answers, Took(time.monotonic() - began)]

    async def stream(self, order: Order) -> AsyncIterator[list[Answer]]:
        """The answer as it comes: an empty list once it is admitted, then events. An error is the last of them."""
        logs.REQUEST_ID.set(order.id)
        try:
            async for answers in self._answers(order):
                yield answers
        except ServiceError as error:
            yield [error]
        except Exception as failure:
            logger.exception("a request from a front failed")
            yield [EngineFailed(f"the engine failed on this request ({type(failure).__name__})")]

    async def _answers(self, order: Order) -> AsyncIterator[list[Answer]]:
        ledger = self._core.ledger
        with ledger.holding(order.id, order.endpoint, order.client, order.timeout_s) as ticket:
            ticket.began -= order.spent_s
            served = ledger.models.get(order.model)
            if served is None or served.facts != order.facts:  # replicas are replaced one after the other
                raise EngineGone("this replica serves other models, weights or precisions than the front that sent the "
                                 "request")
            ledger.admit(ticket, served, order.demand)
            if order.hidden is not None:
                async for answers in self._scored(ticket, Scoring(served.checkpoint.net, order.hidden.canvas,
                                                                  order.hidden.known, order.hidden.labels)):
                    yield answers
            else:
                await ledger.submit(ticket, order.specs)
                yield []
                async for events in ticket.batches():
                    if isinstance(events[-1], ServiceError):
                        ledger.release(ticket, "failed")
                    yield list(events)
            ledger.release(ticket, "completed")

    async def _scored(self, ticket: Ticket, scoring: Scoring) -> AsyncIterator[list[Answer]]:
        await self._core.ledger.score(ticket, scoring)
        await ticket.scored()
        yield [Likelihood(scoring.log_probs.cpu().numpy(), scoring.priors), Scored()]

    async def compare(self, what: str, *about: Any) -> Job | ServiceError | None:
        """Call begin, find, cancel or latest of Comparisons; a ServiceError is returned, not raised."""
        try:
            found: Job | None = await getattr(self._core.comparisons, what)(*about)
        except ServiceError as error:
            return error
        return found


def take_cores(rank: int, threads: int) -> None:
    """Use so many threads; and, if there are enough, cores of the replica's own, by its rank on its machine.

    Called before there is any engine: threads that begin later have the same cores.
    """
    torch.set_num_threads(threads)
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        return
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[rank * threads:(rank + 1) * threads]
    if len(mine) == threads:
        os.sched_setaffinity(0, mine)
