"""A replica: the engine of the plain server, which is called by fronts instead of HTTP."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncIterator

import torch

from .. import app, logs
from ..engine.request import Request
from ..errors import ServiceError, draining, engine_failed, engine_gone
from ..memory import collect
from ..settings import Settings
from .front import scraped
from .remote import Call, News

logger = logging.getLogger("linpix")


class Replica:
    """Used on one event loop. Ray Serve calls `check_health` and `record_autoscaling_stats`."""

    def __init__(self, settings: Settings) -> None:
        """Reads the models. Raises CheckpointError or ValueError with the cure."""
        sys.setswitchinterval(0.0005)  # as server/serve.py
        service = app.service_of(settings, share=True)
        assert service.admission is not None
        self.requests, self.admission = service.requests, service.admission
        self.admission.start()
        # the settings, the kernel in use, and the models, the default one first
        self.description = (
            settings,
            self.requests.metrics.kernel,
            {name: (model.facts, model.slots) for name, model in self.admission.models.items()},
        )
        self._service, self._ends = service, contextlib.AsyncExitStack()
        collect()

    async def begin(self) -> None:
        await self._ends.enter_async_context(scraped(self._service, "engine"))

    async def stop(self) -> None:
        """End the engine thread; requests still here end with `draining`."""
        await self._ends.aclose()
        self.requests.fail_all(draining())
        await self.admission.stop()
        for model in self.admission.models.values():
            model.engine.decoder.close()

    async def check_health(self) -> None:
        if self.admission.gone:
            raise RuntimeError(self.admission.gone)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Images that wait or are drawn, and the slots, of the model that has most images per
        slot.
        """
        fullest = max(self.admission.models.values(), key=lambda model: model.undone / model.slots)
        return {"images": fullest.undone, "slots": fullest.slots}

    async def run(self, call: Call) -> AsyncIterator[News]:
        """The events of a call: for a stream as they come, first None when it is admitted; else all
        at once.
        """
        logs.REQUEST_ID.set(call.id)
        model, stream, left = (
            self.admission.models.get(call.job.model),
            call.job.stream,
            call.job.count,
        )
        if model is None or model.facts != call.facts:  # replicas are replaced one after the other
            self.requests.metrics.requests.labels(call.endpoint, "failed").inc()
            yield [
                engine_gone(
                    "this replica serves other models, weights or precisions than the front that"
                    " sent the request"
                )
            ]
            return
        request = Request(
            call.id,
            call.endpoint,
            call.client,
            call.job,
            model,
            call.timeout_s,
            time.monotonic() - call.spent_s,
        )
        try:
            with self.requests.admit(request):
                news: News = []
                while left:
                    if stream and request.events.empty():
                        yield news
                        news = []
                    event = await request.next_event()
                    news.append(event)
                    left -= event is not None and event.done
                self.requests.release(request, "completed")
                yield news
        except ServiceError as error:
            yield [error]
        except Exception as failure:
            logger.exception("a request from a front failed")
            yield [engine_failed(f"the engine failed on this request ({type(failure).__name__})")]


def take_cores(rank: int, threads: int) -> None:
    """Use so many threads; and, if there are enough, cores of the replica's own, by its rank on its
    machine.

    Called before there is any engine: threads that begin later have the same cores.
    """
    torch.set_num_threads(threads)
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        return
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[rank * threads : (rank + 1) * threads]
    if len(mine) == threads:
        os.sched_setaffinity(0, mine)
