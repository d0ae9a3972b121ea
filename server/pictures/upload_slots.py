"""The few slots in which uploads are decoded, shared among clients, and their predicted waits. Event loop only."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ..errors import DeadlineUnreachable

SLOTS = 2  # the largest upload takes 430 MB while it is decoded, 550 if it is to be laid back
T = TypeVar("T")


class UploadSlots:
    """A free slot goes to the client that has the fewest, and among equals to the one that has waited longest."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()                     # uploads being decoded, by client
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of the clients' last turns
        self._seconds = 0.0                                         # to decode an upload, smoothed; 0: none was decoded

    async def run(self, client: str, read: Callable[[], T]) -> T:
        """Run read in a thread; return its result. Once begun, it keeps its slot until it ends, even if cancelled."""
        await self._slot(client)
        thread = asyncio.ensure_future(asyncio.to_thread(read))
        thread.add_done_callback(partial(self._done, client, time.monotonic()))
        return await asyncio.shield(thread)

    def check(self, client: str, left_s: float) -> None:
        """Raise DeadlineUnreachable if an upload of this client would wait longer than left_s for its slot."""
        own = len(self._waiting.get(client, ()))
        turns = own + self._running[client] + 1  # each other client has at most so many uploads before it
        ahead = own + sum(min(len(queue), turns) for other, queue in self._waiting.items() if other != client)
        if (wait_s := self._seconds * ahead / SLOTS) > left_s:
            raise DeadlineUnreachable(left_s, wait_s, ahead, uploads=True)

    def until(self, uploads: int) -> float:
        """Predicted seconds until this many of the waiting and running uploads are done, or all if there are fewer."""
        there = self._running.total() + sum(map(len, self._waiting.values()))
        return self._seconds * min(uploads, there) / SLOTS

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

    def _done(self, client: str, began: float, thread: asyncio.Future[T]) -> None:
        if not thread.cancelled():
            thread.exception()  # read, so that asyncio does not log it if the client has disconnected
        took = time.monotonic() - began
        self._seconds = 0.7 * self._seconds + 0.3 * took if self._seconds else took
        self._give_back(client)
