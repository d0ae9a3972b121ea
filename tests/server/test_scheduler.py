"""The scheduler alone: no torch, no clock."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.scheduler import Full, Scheduler


def scheduler(slots=2, max_queue=4, length=10):
    return Scheduler(slots, max_queue, length)


def arrive(s, request, images=1, position=0):
    s.admit(request, images)
    return s.enqueue(request, position)


def join(s):
    joined = []
    while rows := s.join():
        joined += rows
    return joined


def turn(s, quantum=5):
    return join(s), s.advance(s.plan(quantum))


def test_images_take_slots_in_the_order_they_came():
    s = scheduler()
    a, b = arrive(s, "a"), arrive(s, "b", 2)
    assert s.join() == a
    assert s.join() == [b[0]]
    assert s.join() == []
    assert [row.slot for row in (a[0], b[0], b[1])] == [1, 2, 0]


def test_slot_zero_is_never_given():
    s = scheduler(slots=5)
    arrive(s, "a", 5)
    assert sorted(row.slot for row in s.join()) == [1, 2, 3, 4, 5]


def test_a_row_ends_inside_a_quantum_and_its_slot_is_free_afterwards():
    s = scheduler()
    [row] = arrive(s, "a", position=8)
    s.join()
    assert s.plan(5) == [(row, 2)]
    assert s.advance(s.plan(5)) == [row]
    assert s.free == [1, 2]


def test_a_plan_has_the_longest_rows_first():
    s = scheduler(slots=3)
    for name, position in (("a", 9), ("b", 0), ("c", 7)):
        arrive(s, name, position=position)
    join(s)
    assert [steps for _, steps in s.plan(5)] == [5, 3, 1]


def test_a_newcomer_joins_between_quanta_while_others_run():
    s = scheduler()
    arrive(s, "a")
    turn(s)
    [late] = arrive(s, "b")
    joined, _ = turn(s)
    assert joined == [late]
    assert sorted(row.position for row in s.running.values()) == [5]


def test_an_image_without_a_hole_finishes_without_a_step():
    s = scheduler()
    [row] = arrive(s, "a", position=10)
    joined, finished = turn(s)
    assert joined == finished == [row]


def test_the_queue_is_counted_in_images_and_free_slots_do_not_count():
    s = scheduler(slots=2, max_queue=4)
    s.admit("a", 6)
    with pytest.raises(Full):
        s.admit("b", 1)


def test_a_reservation_holds_its_room_until_it_is_cancelled():
    s = scheduler(slots=1, max_queue=0)
    s.admit("upload", 1)
    with pytest.raises(Full):
        s.admit("other", 1)
    s.cancel("upload")
    s.admit("other", 1)


def test_cancelling_a_waiting_request_frees_its_room_at_once():
    s = scheduler(slots=1, max_queue=1)
    arrive(s, "a")
    turn(s)
    arrive(s, "b")
    s.cancel("b")
    assert not s.waiting
    arrive(s, "c")


def test_cancelling_a_running_request_frees_its_slot_at_the_next_join_and_not_under_the_engine():
    s = scheduler()
    arrive(s, "a")
    s.join()
    plan = s.plan(5)
    s.cancel("a")
    assert 1 in s.running
    assert s.advance(plan) == []
    assert s.free == [1, 2]


def test_cancelling_takes_no_other_request_with_it():
    s = scheduler(slots=2, max_queue=4)
    arrive(s, "a", 2)
    others = arrive(s, "ab", 2)
    join(s)
    s.cancel("a")
    assert join(s) == others


@pytest.mark.parametrize(("positions", "images", "steps"), [
    ((0, 0), 1, 0),         # the queue of one has room
    ((0, 0), 2, 10),        # one must get a slot first: both slots are busy for 10 steps
    ((4, 0), 2, 6),
    ((4, 0), 3, 10),
])
def test_the_time_until_there_is_room_is_computed_from_the_remaining_steps(positions, images, steps):
    s = scheduler(slots=2, max_queue=1)
    for index, position in enumerate(positions):
        arrive(s, f"r{index}", position=position)
    join(s)
    assert s.steps_until_room(images) == steps


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 10), st.booleans()), max_size=30), st.integers(1, 4))
def test_every_image_is_answered_once_or_cancelled_and_no_slot_is_lost(arrivals, slots):
    s = scheduler(slots=slots, max_queue=6)
    expected, finished = set(), []
    for number, (images, position, leaves) in enumerate(arrivals):
        name = f"r{number}"
        try:
            rows = arrive(s, name, images, position)
        except Full as full:
            assert full.steps >= 0
            continue
        expected |= {(name, row.index) for row in rows}
        finished += turn(s, 3)[1]
        used = [row.slot for row in s.running.values()]
        assert len(used) == len(set(used))
        assert 0 not in used
        if leaves:
            s.cancel(name)
            expected -= {(name, index) for index in range(images)} - {(r.request, r.index) for r in finished}
    while s.waiting or s.running:
        finished += turn(s, 3)[1]
    assert sorted((row.request, row.index) for row in finished) == sorted(expected)
    assert len(s.free) == slots
