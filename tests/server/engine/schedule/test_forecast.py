"""Forecasts of room and of ends, against what a scheduler then does: no torch, no clock."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linpix.server.engine.schedule.forecast import Outlook, Remaining, Room, in_steps, latest_end, queue_order
from tests.server.engine.schedule.test_scheduler import arrive, crowds, join, room_left, scheduler, turn


def outlook(s):
    """What a scheduler has, as the forecast sees it."""
    def left(images):
        return [Remaining(image.request, s.length - image.position, image.bulk) for image in images]

    running = left(image for image in s.running.values() if not image.cancelled)
    waiting = queue_order(left(s.waiting.interactive), left(s.waiting.bulk), s.waiting.overtaken)
    return Outlook(s.slots, s.length, running, waiting)


@pytest.mark.parametrize(("positions", "images", "steps"), [
    ((0, 0), 1, 0),         # the queue of one has room
    ((0, 0), 2, 10),        # one must get a slot first: both slots are busy for 10 steps
    ((4, 0), 2, 6),
    ((4, 0), 3, 10),
])
def test_the_time_until_there_is_room_is_computed_from_the_remaining_steps(positions, images, steps):
    s = scheduler(slots=2)
    for index, position in enumerate(positions):
        arrive(s, f"r{index}", position=position)
    join(s)
    assert outlook(s).until_room(Room(2, 1), images) == steps


def test_bulk_that_fills_its_part_of_the_queue_leaves_room_for_others():
    s, room = scheduler(slots=1), Room(1, 8)
    arrive(s, "running", bulk=True)
    join(s)
    arrive(s, "waiting", 6, bulk=True)  # three quarters of eight
    assert room_left(s, room, bulk=True) == 0
    assert outlook(s).until_room(room, 1, bulk=True) == 10
    assert room_left(s, room) == 2


def test_a_forecast_uses_the_step_time_of_each_number_of_images():
    s = scheduler(slots=2)
    arrive(s, "a", position=4)
    arrive(s, "b")
    join(s)
    assert outlook(s).until_done("b", lambda images: images) == 6 * 2 + 4 * 1


def run_out(s, room, images, bulk=False):
    """Run all images to their ends: the step and request of each end, and the step at which there was room."""
    steps, ends, found = 0, [], None
    while True:
        join(s)
        if found is None and images <= room_left(s, room, bulk):
            found = steps
        if not s.running:
            return ends, found
        finished = s.advance(s.plan(1))
        steps += 1
        ends += [(steps, image.request) for image in finished]


@settings(max_examples=200, deadline=None)
@given(crowds(), st.integers(1, 3), st.integers(0, 6), st.integers(1, 8), st.booleans())
def test_forecasts_come_true_when_no_other_request_arrives(crowd, slots, max_queue, images, bulk):
    """In quanta of one step, ends and room are there in exactly the step that was foretold, whatever the mixture."""
    s, room = scheduler(slots=slots), Room(slots, max_queue)
    for number, (_, count, position, kind) in enumerate(crowd):
        if count <= room_left(s, room, kind):
            arrive(s, f"r{number}", count, position, kind)
        turn(s, 1)
    join(s)
    seen = outlook(s)
    foretold = [(end.at, end.image.request) for end in seen.ends(in_steps)]
    bound = latest_end(slots, s.length, sum(image.steps for image in seen.running), len(seen.waiting))
    for request in {request for _, request in foretold}:
        ended = max(end.at for end in seen.ends(math.sqrt) if end.image.request == request)
        assert seen.until_done(request, math.sqrt) == pytest.approx(ended)
    fits = images <= slots + room.queue_of(bulk)
    until_room = seen.until_room(room, images, bulk)
    ends, found = run_out(s, room, images, bulk)
    assert sorted(foretold) == sorted(ends)
    assert found == (until_room if fits else None)
    assert not foretold or max(foretold)[0] <= bound
