"""The events that a stream gets about an image, which may be drawn more than once."""

import asyncio

import numpy as np
import pytest

from linpix.server.engine.ledger.ticket import Demand, RowsDone, Ticket
from linpix.server.engine.messages import ImageProgress
from linpix.server.errors import DeadlinePassed


def ticket(stream: bool = True, given: int = 0, images: int = 1) -> Ticket:
    return Ticket("a", "generations", "somebody", 60.0, demand=Demand(images, stream=stream), given=given,
                  rows=[given] * images)


def told(asked: Ticket, *rows: int, index: int = 0) -> tuple[list[int], list[bool]]:
    """The rows that a stream hears of when so many are finished, and whether the first was among each of them."""
    firsts = [asked.progressed(ImageProgress("a", index, 8 * finished, 0, np.zeros(64, np.uint8)), finished)
              for finished in rows]
    heard = []
    while not asked._events.empty():
        event = asked._events.get_nowait()
        assert isinstance(event, RowsDone) and event.index == index
        heard.append(event.rows)
    return heard, firsts


def test_each_row_is_sent_once_while_an_image_is_drawn_once():
    assert told(ticket(), 0, 1, 1, 4, 8, 8) == ([1, 2, 3, 4, 5, 6, 7, 8], [False, True, False, False, False, False])


@pytest.mark.parametrize(("given", "rows", "expected"), [
    (0, (3, 8, 0, 2, 8), [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8]),
    (0, (8, 8, 2, 1, 8), [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 1, 2, 3, 4, 5, 6, 7, 8]),
    (6, (7, 8, 6, 8), [7, 8, 7, 8]), (6, (8, 7, 8), [7, 8, 7, 8])])
def test_rows_of_an_image_that_is_drawn_again_are_sent_again_but_known_rows_are_not(given, rows, expected):
    assert told(ticket(given=given), *rows)[0] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_row_of_an_image_is_counted_once_however_often_it_is_drawn(stream):
    asked = ticket(stream, images=2)
    assert told(asked, 0, 2, 8, 0, 0, 1, 8, 0, 3, index=0)[1].count(True) == 1
    assert told(asked, 0, 8, 1, index=1)[1] == [False, True, False], "the other image has a first row of its own"


def test_an_error_is_the_last_event_of_a_batch_whatever_was_sent_after_it():
    asked = ticket()
    for event in (rows := RowsDone(0, 1, np.zeros(64, np.uint8))), (late := DeadlinePassed(1.0)), rows:
        asked.send(event)

    async def batches() -> list:
        return [batch async for batch in asked.batches()]

    assert asyncio.run(batches()) == [[rows, late]]
    assert asked.late


def test_without_a_stream_no_rows_are_sent():
    assert told(ticket(stream=False), 4, 8, 0, 8)[0] == []
