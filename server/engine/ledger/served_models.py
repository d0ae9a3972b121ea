"""The served models, which can be replaced and removed while requests run. Used on the event loop only."""

import asyncio
import weakref
from collections.abc import Callable
from functools import partial

from ...metrics import PRIORITIES, Metrics
from ..batch import Batcher
from ..memory import collect
from ..messages import QuantumReport
from ..thread import EngineThread
from .local_model import LocalModel
from .ticket import Ticket

COLLECT_S = 1.0  # seconds from the last request of a model that is no longer served until its memory is freed
AGAIN_S = 6.0    # seconds until the next attempt if something still held it: uvicorn's keep-alive, and a second


class ServedModels:
    """The models that requests may ask for, and those that still run for earlier requests."""

    def __init__(self, batchers: dict[str, Batcher], metrics: Metrics, thread: EngineThread, max_queue: int,
                 uploads_s: Callable[[int], float]) -> None:
        """max_queue: images of one model that may wait · uploads_s: as for LocalModel."""
        self._metrics, self._thread, self._max_queue, self._uploads_s = metrics, thread, max_queue, uploads_s
        self.models: dict[str, LocalModel] = {}       # by name; updated in place
        self.entries: dict[Batcher, LocalModel] = {}  # these, and those that are decoded until their last request ends
        self.serve(batchers)

    def serve(self, batchers: dict[str, Batcher]) -> None:
        """Admit requests to these models from now on. Requests admitted to other models go on until they end."""
        for batcher in batchers.values():
            if batcher not in self.entries:
                self.entries[batcher] = LocalModel(batcher, self._max_queue, self._uploads_s)
        self.models.clear()
        self.models.update((name, self.entries[batcher]) for name, batcher in batchers.items())
        for name, served in self.models.items():
            self._metrics.add_model(name, served.backend)
            self._metrics.follow_slots(name, partial(self._slots, name), partial(self._slots_used, name))
            for bulk, priority in enumerate(PRIORITIES):
                self._metrics.images_waiting.labels(name, priority).set_function(
                    partial(self._images_waiting, name, bool(bulk)))
        self._thread.serve([*self.entries])
        self.forget_idle()

    def until_drawn(self, images: int, tickets: list[Ticket]) -> float:
        """Seconds until so many images of these tickets are drawn, or all if there are fewer; 0 if there are none."""
        ends = sorted(end for served in self.entries.values() for end in served.ends(tickets))
        return ends[min(images, len(ends)) - 1] if ends else 0.0

    def forget_idle(self) -> None:
        """Free the memory of models that are no longer served and have no requests."""
        serving = [*self.models.values()]
        over = [served for served in self.entries.values() if served.idle and served not in serving]
        if not over:
            return
        for served in over:
            del self.entries[served.batcher]
        self._thread.serve([*self.entries])
        for name in {served.name for served in over} - {served.name for served in self.entries.values()}:
            self._metrics.forget_slots(name)
        gone = [weakref.ref(served.batcher) for served in over]
        asyncio.get_running_loop().call_later(COLLECT_S, self._give_back, gone, AGAIN_S)

    def _give_back(self, gone: list["weakref.ref[Batcher]"], again_s: float) -> None:
        """Collect garbage until the batchers are freed: cycles and idle connections still hold their last requests."""
        collect()
        if left := [batcher for batcher in gone if batcher() is not None]:
            asyncio.get_running_loop().call_later(again_s, self._give_back, left, 2 * again_s)

    # a model and the one that replaces it have the same name, and are counted together

    def _slots(self, name: str) -> int:
        return sum(served.room.slots for served in self.entries.values() if served.name == name)

    def _slots_used(self, name: str) -> int:
        return sum(served.slots_used for served in self.entries.values() if served.name == name)

    def _images_waiting(self, name: str, bulk: bool) -> int:
        return sum(served.waiting(bulk) for served in self.entries.values() if served.name == name)

    def count(self, served: LocalModel, report: QuantumReport) -> None:
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
