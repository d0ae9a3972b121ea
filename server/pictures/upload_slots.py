"""The few slots in which uploads are decoded, shared among clients. Used on the event loop only."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

SLOTS = 2  # the largest upload takes 430 MB while it is decoded, 550 if it is to be laid back
T = TypeVar("T")


class UploadSlots:
    """A free slot goes to the client that has the fewest, and among equals to the one that has waited longest."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()                     # uploads being decoded, by client
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of the clients' last turns

    async def run(self, client: str, read: Callable[[], T]) -> T:
        """Run read in a thread; return its result. Once begun, it keeps its slot until it ends, even if cancelled."""
        if self._running.total() < SLOTS:
            self._running[client] += 1
        else:
            slot = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(client, deque()).append(slot)
            try:
                await slot
            except asyncio.CancelledError:
                if not slot.cancelled():  # this upload had just been given the slot
                    self._give_back(client)
                raise
        thread = asyncio.ensure_future(asyncio.to_thread(read))
        thread.add_done_callback(partial(self._give_back, client))
        return await asyncio.shield(thread)

    def _give_back(self, client: str, thread: asyncio.Future[T] | None = None) -> None:
        """Free a client's slot, and give it to the next upload."""
        if thread is not None and not thread.cancelled():
            thread.exception()  # read, so that asyncio does not log it if the client has disconnected
        self._running[client] -= 1
        self._running = +self._running  # drops clients that have none
        while self._waiting:
            after = min(self._waiting, key=lambda other: self._running[other])
            if queue := deque(slot for slot in self._waiting.pop(after) if not slot.cancelled()):
                self._running[after] += 1
                queue.popleft().set_result(None)
                if queue:
                    self._waiting[after] = queue  # behind the others
                return
