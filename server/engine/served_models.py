"""The served models, which can be replaced and removed while requests run. Used on the event loop only."""

import asyncio
import weakref
from collections.abc import Callable
from functools import partial

from ..metrics import PRIORITIES, Metrics
from .batch import Batcher
from .memory import collect
from .messages import QuantumReport
from .served_model import ServedModel
from .thread import EngineThread
from .ticket import Ticket

COLLECT_S = 1.0  # seconds from the last request of a model that is no longer served until its memory is freed
AGAIN_S = 6.0    # seconds until the next attempt if something still held it: uvicorn's keep-alive, and a second


class ServedModels:
    """The models that requests may ask for, and those that still run for earlier requests."""

    def __init__(self, batchers: dict[str, Batcher], metrics: Metrics, thread: EngineThread, max_queue: int,
                 uploads_s: Callable[[int], float]) -> None:
        """max_queue: images of one model that may wait · uploads_s: as for ServedModel."""
        self._metrics, self._thread, self._max_queue, self._uploads_s = metrics, thread, max_queue, uploads_s
        self.models: dict[str, ServedModel] = {}
        self._leaving: list[ServedModel] = []  # no longer served, and decoded until their last request is over
        self.serve(batchers)

    def serve(self, batchers: dict[str, Batcher]) -> None:
        """Admit requests to these models from now on. Requests admitted to other models go on until they end."""
        before = {served.batcher: served for served in self.models.values()}
        self.models = {name: before.pop(batcher) if batcher in before else self._entry(batcher)
                       for name, batcher in batchers.items()}
        self._leaving += before.values()
        for name, served in self.models.items():
            self._metrics.add_model(name, served.backend)
            for bulk, priority in enumerate(PRIORITIES):
                self._metrics.images_waiting.labels(name, priority).set_function(
                    partial(self._images_waiting, name, bool(bulk)))
        for name in {served.name for served in self.all()}:
            self.count_slots(name)
        self._thread.serve([served.batcher for served in self.all()])
        self.forget_idle()

    def _entry(self, batcher: Batcher) -> ServedModel:
        return ServedModel(batcher, self._max_queue, self._uploads_s)

    def all(self) -> list[ServedModel]:
        return [*self.models.values(), *self._leaving]

    def of(self, batcher: Batcher) -> ServedModel | None:
        """The entry of a batcher, if it still has one."""
        return next((served for served in self.all() if served.batcher is batcher), None)

    def until_drawn(self, images: int, tickets: list[Ticket]) -> float:
        """Seconds until so many images of these tickets are drawn, or all if there are fewer; 0 if there are none."""
        ends = sorted(end for served in self.all() for end in served.ends(tickets))
        return ends[min(images, len(ends)) - 1] if ends else 0.0

    def forget_idle(self) -> None:
        """Free the memory of models that are no longer served and have no requests."""
        over = [served for served in self._leaving if served.idle]
        if not over:
            return
        self._leaving = [served for served in self._leaving if not served.idle]
        self._thread.serve([served.batcher for served in self.all()])
        for served in over:
            self.count_slots(served.name)
        gone = [weakref.ref(served.batcher) for served in over]
        asyncio.get_running_loop().call_later(COLLECT_S, self._give_back, gone, AGAIN_S)

    def _give_back(self, gone: list["weakref.ref[Batcher]"], again_s: float) -> None:
        """Collect garbage until the batchers are freed: cycles and idle connections still hold their last requests."""
        collect()
        if left := [batcher for batcher in gone if batcher() is not None]:
            asyncio.get_running_loop().call_later(again_s, self._give_back, left, 2 * again_s)

    def _images_waiting(self, name: str, bulk: bool) -> int:
        return sum(served.waiting(bulk) for served in self.all() if served.name == name)

    def count(self, served: ServedModel, report: QuantumReport) -> None:
        """Count in the metrics what a quantum did."""
        metrics, model = self._metrics, (served.name, served.backend)
        if report.passes:
            metrics.pixels_generated.labels(*model).inc(report.subpixels)
            metrics.state_saturations.labels(served.name).inc(report.saturated)
        for _, seconds in report.prefilled:
            metrics.prefill.labels(served.name).observe(seconds)
        metrics.images_drawn_again.labels(*model).inc(report.again)
        if report.retries:
            metrics.quanta_retried.labels(served.name).inc()
        elif report.passes:
            metrics.engine_step.labels(*model).observe(report.seconds / report.passes)
            metrics.engine_step_batch_size.observe(report.images)
        self.count_slots(served.name)

    def count_slots(self, name: str) -> None:
        """Set the slot gauges of a model's name, which a model and the one that replaces it may share."""
        alike = [served for served in self.all() if served.name == name]
        self._metrics.set_slots(name, sum(served.room.slots for served in alike),
                                sum(served.slots_used for served in alike))
