"""What the routes share: the settings, the requests that are served, which model is the default,
and the threads that decode uploads and encode answers. Used on the event loop only.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, TypeVar

from fastapi import Depends
from fastapi import Request as Http

from linpix.model.config import ModelConfig
from linpix.model.machine import usable_cores

from ..compare.jobs import Comparisons
from ..engine.admission import Admission
from ..engine.request import Requests, ServedModel
from ..errors import model_not_found
from ..settings import Settings
from .keys import Keys
from .middleware.bodies import Bodies

# the largest upload takes 430 MB while it is decoded, 550 if it is to be laid back
DECODERS = 2
ENCODERS = max(1, usable_cores() // 2)  # the other cores draw meanwhile
T = TypeVar("T")


class Turns:
    """Threads for one kind of work, which clients use in turns. A free thread goes to the client
    that has the fewest; of equals, to the one waiting longest.
    """

    def __init__(self, threads: int) -> None:
        self._free, self._pool = threads, ThreadPoolExecutor(threads)
        self._running = Counter[str]()  # threads in use, by client
        # in the order of the clients' last turns
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Do work in a thread; return its result. Once begun, it keeps its thread until it ends,
        even if cancelled.
        """
        loop = asyncio.get_running_loop()
        if self._free:
            self._free -= 1
            self._running[client] += 1
        else:
            turn = loop.create_future()
            self._waiting.append((client, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # this work had just been given the thread
                    self._give_back(client)
                raise
        try:
            thread = loop.run_in_executor(self._pool, copy_context().run, work)
        except RuntimeError:  # the system has no more threads
            self._give_back(client)
            raise
        thread.add_done_callback(partial(self._give_back, client))
        return await asyncio.shield(thread)

    def _give_back(self, client: str, thread: asyncio.Future[T] | None = None) -> None:
        """Free a client's thread, and give it to the next work."""
        if thread is not None and not thread.cancelled():
            # read, so that asyncio does not log it if the client has disconnected
            thread.exception()
        self._running[client] -= 1
        self._running = +self._running  # drops clients that have none
        if waiting := [(other, turn) for other, turn in self._waiting if not turn.cancelled()]:
            after, turn = min(waiting, key=lambda each: self._running[each[0]])
            waiting.remove((after, turn))
            waiting.sort(key=lambda each: each[0] == after)  # behind the others
            self._running[after] += 1
            turn.set_result(None)
        else:
            self._free += 1
        self._waiting = waiting


@dataclass(frozen=True, slots=True)
class Service:
    settings: Settings
    requests: Requests
    comparisons: Comparisons | None  # None: replicas draw, and none of them can be measured alone
    # on SIGHUP; None: this process has no models of its own
    reload_models: Callable[[], Awaitable[None]] | None
    bodies: Bodies
    keys: Keys | None = None  # None: no key is required
    admission: Admission | None = None  # None: replicas draw
    decoders: Turns = field(default_factory=partial(Turns, DECODERS))  # of uploads
    encoders: Turns = field(default_factory=partial(Turns, ENCODERS))  # of answers

    @property
    def ready(self) -> bool:
        """Whether images can be drawn. A front starts once a replica does."""
        return self.admission is None or self.admission.ready

    def find(self, model: str | None) -> ServedModel:
        """The loaded model with this name or alias (--alias); None means the default. Raises
        ServiceError.
        """
        models = self.requests.drawer.models
        name = next(iter(models)) if model is None else model
        if name not in models:
            name = self.settings.aliases.get(name, name)
        if name not in models:
            raise model_not_found(name, models)
        return models[name]

    def instead_of(self, served: ServedModel, able: Callable[[ModelConfig], bool]) -> str | None:
        """A loaded model that can do what `served` cannot, with pictures of the same shape; None if
        there is none.
        """
        return next(
            (
                name
                for name, other in self.requests.drawer.models.items()
                if able(other.config) and other.config.image_shape == served.config.image_shape
            ),
            None,
        )

    def max_images(self, *models: ServedModel, bulk: bool = False) -> int:
        """Images that one request may ask for, for any of these models."""
        return min(
            self.settings.max_n,
            self.settings.client_images or self.settings.max_n,
            *(served.slots + served.queue[bulk] for served in models),
        )


async def _service(http: Http) -> Service:
    """Async, since FastAPI calls plain functions in threads: each request would wait for one."""
    service: Service = http.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]


def weights(accept: str) -> dict[str, float]:
    """The weight of each value in an Accept header, or in Accept-Encoding."""
    found: dict[str, float] = {}
    for part in accept.split(","):
        value, *parameters = (text.strip().lower() for text in part.split(";"))
        try:
            found[value] = float(
                next((text[2:] for text in parameters if text.startswith("q=")), 1)
            )
        except ValueError:
            found[value] = 0.0
    return found


def preferred(accept: str) -> str:
    """The media type that an Accept header weighs most; of equal ones the first."""
    found = weights(accept)
    best = max(found, key=lambda media: found[media])
    return best if found[best] > 0 else ""
