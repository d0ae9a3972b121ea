"""Uploads being decoded: clients take turns, and what waits is known to those who come."""

import asyncio
import threading
from typing import ClassVar

import pytest

from linpix.server.errors import DeadlineUnreachable
from linpix.server.pictures.turns import PLACES, Decoders


class Upload:
    """An upload whose decoding lasts until it is let go."""

    begun: ClassVar[list[str]] = []

    def __init__(self, decoders: Decoders, client: str) -> None:
        self.client, self._go = client, threading.Event()
        self.task = asyncio.ensure_future(decoders.run(client, self._read))

    def _read(self) -> str:
        Upload.begun.append(self.client)
        self._go.wait(10)
        return self.client

    async def end(self) -> None:
        self._go.set()
        assert await self.task == self.client


@pytest.fixture(autouse=True)
def nothing_has_begun():
    Upload.begun = []


async def begun(count: int) -> list[str]:
    """Who has a place, once so many have had one."""
    async with asyncio.timeout(10):
        while len(Upload.begun) < count:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert len(Upload.begun) == count
    return Upload.begun


def test_the_next_place_goes_to_a_client_that_has_none_however_many_uploads_another_sent_before():
    async def crowd() -> None:
        decoders = Decoders()
        many = [Upload(decoders, "many") for _ in range(20)]
        assert await begun(PLACES) == ["many"] * PLACES
        late = [Upload(decoders, "one"), Upload(decoders, "other"), Upload(decoders, "one")]
        await asyncio.sleep(0)
        for upload in (*many[:2], late[0], many[2]):
            await upload.end()
        assert (await begun(6))[2:] == ["one", "many", "other", "one"]
        for upload in [*many, *late]:
            upload._go.set()
        await asyncio.gather(*(upload.task for upload in [*many, *late]))

    asyncio.run(crowd())


def test_who_leaves_the_line_takes_no_place_and_who_leaves_while_it_is_decoded_keeps_it_until_the_end():
    async def leaving() -> None:
        decoders = Decoders()
        uploads = [Upload(decoders, "a") for _ in range(PLACES + 3)]
        await begun(PLACES)
        uploads[0].task.cancel()     # being decoded
        uploads[PLACES].task.cancel()  # in line
        await asyncio.sleep(0.02)
        assert len(Upload.begun) == PLACES
        uploads[0]._go.set()
        await begun(PLACES + 1)
        for upload in uploads:
            upload._go.set()
        await asyncio.gather(*(upload.task for upload in uploads), return_exceptions=True)
        assert len(Upload.begun) == PLACES + 2
        assert decoders.until(100) == 0
        await asyncio.gather(*(decoders.run("b", lambda: None) for _ in range(5)))  # every place is there again

    asyncio.run(leaving())


def test_a_picture_that_fails_after_its_client_left_is_no_line_of_the_log(caplog):
    async def leave() -> None:
        go = threading.Event()

        def damaged() -> None:
            go.wait(10)
            raise ValueError("truncated")

        task = asyncio.ensure_future(Decoders().run("a", damaged))
        await asyncio.sleep(0.02)
        task.cancel()
        go.set()
        await asyncio.sleep(0.1)

    asyncio.run(leave())
    assert caplog.records == []


def test_a_wait_for_a_place_beyond_the_deadline_is_refused_and_told():
    async def line() -> None:
        decoders = Decoders()
        assert decoders.until(1) == 0
        slow = Upload(decoders, "many")
        await begun(1)
        await asyncio.sleep(0.1)
        await slow.end()
        assert decoders.until(1) == 0 < decoders._seconds
        decoders._seconds = 0.1  # as on a machine that is not busy
        decoders.check("one", 0.01)
        uploads = [Upload(decoders, "many") for _ in range(PLACES + 20)]
        await begun(1 + PLACES)
        for _ in range(2):
            decoders.check("one", 0.1)  # only one is taken before it
            with pytest.raises(DeadlineUnreachable, match="decoding the 20 uploads before this one takes"):
                decoders.check("many", 0.5)
        assert 0.05 * 10 <= decoders.until(10) < decoders.until(1000) == decoders.until(PLACES + 20)
        for upload in uploads:
            upload._go.set()
        await asyncio.gather(*(upload.task for upload in uploads))

    asyncio.run(line())
