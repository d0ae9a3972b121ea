"""Requests: how a request ends."""

import asyncio
import contextlib

import numpy as np
import pytest

from linpix.model.checkpoint import Checkpoint
from linpix.model.config import PRESETS
from linpix.model.nets import net_for
from linpix.server.engine.job import Job
from linpix.server.engine.request import Event, Request, Requests, ServedModel
from linpix.server.errors import (
    ClientLeft,
    ServiceError,
    deadline_passed,
    engine_failed,
    queue_full,
)
from linpix.server.metrics import Metrics
from tests.nets import CLASS_FIRST

MODEL = ServedModel(Checkpoint("tiny", net_for(PRESETS["tiny"]), {}, "", ()), {}, 4, 8)
CANVAS = np.zeros(64, np.uint8)


def request(given: int = 0, **options) -> Request:
    known = {} if not given else {"canvas": CANVAS, "known": np.arange(64) < 8 * given}
    return Request("a", "generations", "somebody", Job(**known, **options), MODEL, 60.0)


class Held:
    """A drawer with room for one request; notes what begins and ends."""

    gone = ""

    def __init__(self, fails: Exception | None = None) -> None:
        self.log, self.fails = [], fails
        self.requests = Requests(self, Metrics([], "eager"))

    def check(self, _):
        if self.requests.in_progress:
            raise queue_full(1, 1, 0, 2.0)

    def begin(self, request: Request) -> None:
        self.log.append("begins")
        if self.fails is not None:
            raise self.fails

    def end(self, request: Request) -> None:
        self.log.append(request.outcome)


def test_tokens_to_draw_and_rows_that_are_known():
    known = np.arange(64) < 20
    # only a model that reads what is known skips
    for config, scattered in ((PRESETS["tiny"], 44), (CLASS_FIRST, 43)):
        # what comes later
        model = ServedModel(Checkpoint("some", net_for(config), {}, "", ()), {}, 4, 8)
        for parts, tokens in ((known, 44), (known | (np.arange(64) == 40), scattered)):
            asked = Request("a", "edits", "somebody", Job(canvas=CANVAS, known=parts), model, 60.0)
            assert (asked.job.prefix, asked.given, asked.tokens) == (20, 2, tokens)
    assert (request().job.prefix, request().given, request().tokens) == (0, 0, 64)


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [
        (None, "cancelled"),
        (ClientLeft("left"), "cancelled"),
        (engine_failed("NaN"), "failed"),
        (RuntimeError(), "failed"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
def test_however_a_request_ends_it_is_released_once(raised, outcome):
    held = Held()
    with contextlib.suppress(BaseException), held.requests.admit(request()):
        if raised is not None:
            raise raised
    assert held.log == ["begins", outcome] and not held.requests.in_progress


def test_a_released_request_is_not_released_again():
    held = Held()
    with held.requests.admit(asked := request()):
        held.requests.release(asked, "completed")
        held.requests.release(asked, "failed")
    assert held.log == ["begins", "completed"]


def test_a_refused_request_holds_nothing_and_is_counted_as_refused():
    held = Held()
    with (
        held.requests.admit(request()),
        pytest.raises(ServiceError, match="already waiting"),
        held.requests.admit(request()),
    ):
        pass
    late = request()
    late.deadline = late.began
    with pytest.raises(ServiceError, match="cannot be finished within"), held.requests.admit(late):
        pass
    for gone, words in (("", "shutting down"), ("it hung", "it hung. The server is restarting")):
        held.requests.draining, held.gone = not gone, gone
        with pytest.raises(ServiceError, match=words), held.requests.admit(request()):
            pass
    assert held.log == ["begins", "cancelled"] and not held.requests.in_progress
    refused = held.requests.metrics.values(name := "linpix_requests_rejected_total")
    assert [refused[name, code] for code in ("queue_full", "draining", "engine_gone")] == [1, 1, 1]


def test_a_request_that_cannot_begin_is_released():
    held = Held(RuntimeError("a bug"))
    with pytest.raises(RuntimeError), held.requests.admit(request()):
        pass
    assert held.log == ["begins", "failed"] and not held.requests.in_progress


async def test_the_error_that_ends_a_request_is_raised_and_a_deadline_makes_it_late():
    asked = request()
    asked.send(Event(0, 1, CANVAS))
    asked.send(deadline_passed(1.0))
    assert (await asked.next_event()) == Event(0, 1, CANVAS)
    with pytest.raises(ServiceError, match="cannot be finished within"):
        await asked.next_event()
    assert asked.late
    assert await asked.next_event(0.01) is None
