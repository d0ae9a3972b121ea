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
        await self._slot(client)
        thread = asyncio.ensure_future(asyncio.to_thread(read))
        thread.add_done_callback(partial(self._done, client))
        return await asyncio.shield(thread)

    async def _slot(self, client: str) -> None:
        if self._running.total() < SLOTS:
            self._running[client] += 1
            return
        slot = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # this upload had just been given the slot
                self._give_back(client)
            elif slot in (queue := self._waiting.get(client, deque())):
                queue.remove(slot)
                if not queue:
                    del self._waiting[client]
            raise

    def _give_back(self, client: str) -> None:
        """Free a client's slot, and give it to the next upload."""
        self._running[client] -= 1
        self._running = +self._running  # drops clients that have none
        while self._waiting:
            after = min(self._waiting, key=lambda other: self._running[other])
            queue = self._waiting.pop(after)
            slot = queue.popleft()
            if queue:
                self._waiting[after] = queue  # behind the others
            if not slot.cancelled():
                self._running[after] += 1
                slot.set_result(None)
                return

    def _done(self, client: str, thread: asyncio.Future[T]) -> None:
        if not thread.cancelled():
            thread.exception()  # read, so that asyncio does not log it if the client has disconnected
        self._give_back(client)
