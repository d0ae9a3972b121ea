"""Uploads being decoded: clients take turns, and what waits is known to those who come."""

import asyncio
import threading
from typing import ClassVar

import pytest

from linpix.server.web.service import DECODERS, Turns
from tools.harness.servers import HANG_S


class Upload:
    """An upload whose decoding lasts until it is let go."""

    begun: ClassVar[list[str]] = []

    def __init__(self, turns: Turns, client: str) -> None:
        self.client, self._go = client, threading.Event()
        self.task = asyncio.ensure_future(turns.run(client, self._read))

    def _read(self) -> str:
        Upload.begun.append(self.client)
        self._go.wait(HANG_S)
        return self.client

    async def end(self) -> None:
        self._go.set()
        assert await self.task == self.client


@pytest.fixture(autouse=True)
def nothing_has_begun():
    Upload.begun = []


async def begun(count: int) -> list[str]:
    """Who has a place, once so many have had one."""
    async with asyncio.timeout(HANG_S):
        while len(Upload.begun) < count:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert len(Upload.begun) == count
    return Upload.begun


async def test_the_next_place_goes_to_a_client_without_one_however_many_uploads_wait():
    turns = Turns(DECODERS)
    many = [Upload(turns, "many") for _ in range(20)]
    assert await begun(DECODERS) == ["many"] * DECODERS
    late = [Upload(turns, "one"), Upload(turns, "other"), Upload(turns, "one")]
    await asyncio.sleep(0)
    for upload in (*many[:2], late[0], many[2]):
        await upload.end()
    assert (await begun(6))[2:] == ["one", "many", "other", "one"]
    for upload in [*many, *late]:
        upload._go.set()
    await asyncio.gather(*(upload.task for upload in [*many, *late]))


async def test_a_client_that_leaves_the_queue_takes_no_place_and_one_that_is_decoded_keeps_it():
    turns = Turns(DECODERS)
    uploads = [Upload(turns, "a") for _ in range(DECODERS + 3)]
    await begun(DECODERS)
    uploads[0].task.cancel()  # being decoded
    uploads[DECODERS].task.cancel()  # in line
    await asyncio.sleep(0.02)
    assert len(Upload.begun) == DECODERS
    uploads[0]._go.set()
    await begun(DECODERS + 1)
    for upload in uploads:
        upload._go.set()
    await asyncio.gather(*(upload.task for upload in uploads), return_exceptions=True)
    assert len(Upload.begun) == DECODERS + 2
    # every place is there again
    await asyncio.gather(*(turns.run("b", lambda: None) for _ in range(5)))
