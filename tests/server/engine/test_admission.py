"""Admission with a real engine thread: limits of clients, and models that are replaced
meanwhile.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from linpix.model import checkpoint
from linpix.server.engine.admission import Admission
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.engine import Engine
from linpix.server.engine.job import Job
from linpix.server.engine.model import Model
from linpix.server.engine.request import Request, Requests
from linpix.server.engine.thread import EngineThread
from linpix.server.errors import ServiceError
from linpix.server.metrics import Metrics


@contextlib.asynccontextmanager
async def serving(
    tiny, slots: int = 4, max_queue: int = 8, **limits: Any
) -> AsyncIterator[tuple[Admission, Requests]]:
    engine = Engine(new_decoder(checkpoint.read(tiny), slots, "eager"))
    admission = Admission(
        {"tiny": engine}, Metrics([], "eager"), EngineThread(), max_queue=max_queue, **limits
    )
    admission.start()
    try:
        yield admission, Requests(admission, admission.metrics)
    finally:
        await admission.stop()


def request(id: str, model: Model, images: int = 1, **options: Any) -> Request:
    return Request(id, "generations", "somebody", Job(count=images, **options), model, 30.0)


async def test_a_client_with_too_many_images_is_refused(tiny):
    async with serving(tiny, client_images=6) as (admission, requests):
        model = admission.models["tiny"]
        with requests.admit(request("a", model, 4)):
            admission.check_room("somebody")
            with (
                pytest.raises(ServiceError, match="per client"),
                requests.admit(request("b", model, 4)),
            ):
                pass
        assert not model.requests


async def test_a_model_that_was_replaced_while_an_upload_was_decoded_still_draws_for_it(tiny):
    async with serving(tiny) as (admission, requests):
        late = request("late", admission.models["tiny"])  # made before, admitted after
        admission.serve({"tiny": Engine(new_decoder(checkpoint.read(tiny), 2, "eager"))})
        assert len(admission._all) == 1
        with requests.admit(late):
            event = await late.next_event(10.0)
            assert event is not None and event.done
            slots = admission.metrics.values("linpix_state_slots")["linpix_state_slots", "tiny"]
            assert slots == 4 + 2
        assert len(admission._all) == 1, "and is forgotten afterwards"


async def test_room_that_is_held_by_likelihoods_alone_is_full_too(tiny):
    async with serving(tiny, slots=1, max_queue=0) as (admission, requests):
        scored = request(
            "scored",
            admission.models["tiny"],
            scored=True,
            canvas=np.zeros(64, np.uint8),
            known=np.zeros(64, np.bool_),
        )
        with requests.admit(scored), pytest.raises(ServiceError, match="already waiting"):
            admission.check_room("somebody")


@pytest.mark.parametrize("stream", [False, True])
async def test_streams_hear_of_each_image_row_and_the_first_of_every_image_is_counted(tiny, stream):
    async with serving(tiny) as (admission, requests):
        heard: dict[int, list[int]] = {0: [], 1: []}
        with requests.admit(drawn := request("a", admission.models["tiny"], 2, stream=stream)):
            if stream:
                assert await drawn.next_event() is None
            while drawn.undone or not drawn.events.empty():
                event = await drawn.next_event(10.0)
                assert event is not None
                heard[event.image] += [] if event.done else [event.rows]
        assert heard == dict.fromkeys((0, 1), [*range(1, 9)] if stream else [])
        counted = admission.metrics.registry.get_sample_value(
            "linpix_first_row_seconds_count", {"model": "tiny"}
        )
        assert counted == 2
