"""The scheduler alone: no torch, no clock."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linpix.model.packing import ROWS
from linpix.server.engine.decode.scheduler import BULK_EVERY, QUANTUM_S, Scheduler
from linpix.server.engine.decode.slots import Slots
from linpix.server.engine.image import Image, State
from linpix.server.engine.job import Job


def scheduler(slots=2, length=10):
    s = Scheduler(Slots(slots, length), 1)
    s.learn(1, 1e-9)  # seconds of a step: no plan is bounded by time
    s.begins_at = {}  # the position of each image that joins
    return s


def arrive(s, request, count=1, position=0, bulk=False):
    images = [Image(request, Job(bulk=bulk), index, index, None) for index in range(count)]
    s.begins_at |= dict.fromkeys(images, position)
    s.submit(images)
    return images


def left(s, image):
    return s.slots.length - int(s.slots.position[image.slot] if image.slot else s.begins_at[image])


def waiting(s):
    return len(s.interactive) + len(s.bulk)


def join(s):
    """As the engine does for images of which nothing is known."""
    joined = []
    while images := s.join():
        for image in images:
            image.state = State.DRAWING
            s.slots.drawing[image.slot] = True
            s.slots.position[image.slot] = s.begins_at[image]
        joined += images
    return joined


def advance(s, plan):
    for slot, steps in plan:
        s.slots.position[slot] += steps
    over = [
        image
        for slot, image in s.slots.running.items()
        if s.slots.drawing[slot] and s.slots.position[slot] >= s.slots.length
    ]
    for image in over:
        s.slots.release(image)
    return over


def turn(s, quantum=5):
    return join(s), advance(s, s.plan(quantum))


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
    join(s)
    assert s.plan(5).tolist() == [[row.slot, 2]]
    assert advance(s, s.plan(5)) == [row]
    assert sorted(s.slots.free) == [1, 2]


def test_a_plan_has_the_longest_rows_first():
    s = scheduler(slots=3)
    for name, position in (("a", 9), ("b", 0), ("c", 7)):
        arrive(s, name, position=position)
    join(s)
    assert s.plan(5).tolist() == [[2, 5], [3, 3], [1, 1]]


def test_a_newcomer_joins_between_quanta_while_others_run():
    s = scheduler()
    arrive(s, "a")
    turn(s)
    [late] = arrive(s, "b")
    joined, _ = turn(s)
    assert joined == [late]
    assert s.slots.position[[*s.slots.running]].tolist() == [5]


def test_an_image_without_a_hole_finishes_without_a_step():
    s = scheduler()
    [row] = arrive(s, "a", position=10)
    joined, finished = turn(s)
    assert joined == finished == [row]


def test_cancelling_a_waiting_request_frees_its_room_at_once():
    s = scheduler(slots=1)
    arrive(s, "a")
    turn(s)
    arrive(s, "b")
    s.cancel("b")
    assert not waiting(s)


def test_cancelling_a_running_request_frees_its_slot_at_once():
    s = scheduler()
    arrive(s, "a")
    join(s)
    s.cancel("a")
    assert sorted(s.slots.free) == [1, 2] and not s.plan(5).size


def test_cancelling_takes_no_other_request_with_it():
    s = scheduler(slots=2)
    arrive(s, "a", 2)
    others = arrive(s, "ab", 2)
    join(s)
    s.cancel("a")
    assert join(s) == others


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 10), st.booleans(), st.booleans()), max_size=30
    ),
    st.integers(1, 4),
)
def test_every_image_is_answered_once_or_cancelled_and_no_slot_is_lost(arrivals, slots):
    s = scheduler(slots=slots)
    expected, finished = set(), []
    for number, (images, position, leaves, bulk) in enumerate(arrivals):
        name = f"r{number}"
        rows = arrive(s, name, images, position, bulk)
        expected |= {(name, row.index) for row in rows}
        finished += turn(s, 3)[1]
        used = [row.slot for row in s.slots.running.values()]
        assert len(used) == len(set(used))
        assert 0 not in used
        if leaves:
            s.cancel(name)
            expected -= {(name, index) for index in range(images)} - {
                (r.request, r.index) for r in finished
            }
    while waiting(s) or s.slots.running:
        finished += turn(s, 3)[1]
    assert sorted((row.request, row.index) for row in finished) == sorted(expected)
    assert len(s.slots.free) == slots


def test_interactive_images_go_first_and_one_slot_of_four_is_for_bulk():
    s = scheduler(slots=1)
    for number in range(3):
        arrive(s, f"bulk{number}", bulk=True)
    for number in range(8):
        arrive(s, f"interactive{number}")
    order = []
    while waiting(s) or s.slots.running:
        order += [row.request for row in turn(s, 10)[0]]
    assert order == [
        "interactive0",
        "interactive1",
        "interactive2",
        "bulk0",
        "interactive3",
        "interactive4",
        "interactive5",
        "bulk1",
        "interactive6",
        "interactive7",
        "bulk2",
    ]


def test_bulk_images_get_every_slot_when_no_others_wait():
    s = scheduler(slots=3)
    assert join(s) == []
    rows = arrive(s, "bulk", 5, bulk=True)
    assert join(s) == rows[:3]


@st.composite
def crowds(draw):
    """Requests with their turn of arrival: (turn, images, position, bulk)."""
    request = st.tuples(st.integers(0, 12), st.integers(1, 3), st.integers(0, 9), st.booleans())
    return sorted(draw(st.lists(request, max_size=25)))


@settings(max_examples=200, deadline=None)
@given(crowds(), st.integers(1, 3), st.integers(1, 10))
def test_no_class_starves_and_each_is_served_in_its_order(crowd, slots, quantum):
    """Every slot given is looked at: who got it, and who waited for one of which class."""
    s = scheduler(slots=slots)
    given_, arrived = [], {False: [], True: []}
    overtaken = {False: 0, True: 0}
    time, pending = 0, list(enumerate(crowd))
    while pending or waiting(s) or s.slots.running:
        while pending and pending[0][1][0] <= time:
            number, (_, images, position, bulk) = pending.pop(0)
            arrived[bulk] += [(f"r{number}", index) for index in range(images)]
            arrive(s, f"r{number}", images, position, bulk)
        behind = {False: len(s.interactive), True: len(s.bulk)}
        joined = join(s)
        for row in joined:
            other = not row.job.bulk
            overtaken[row.job.bulk] = 0
            behind[row.job.bulk] -= 1
            overtaken[other] = overtaken[other] + 1 if behind[other] else 0
            assert overtaken[True] < BULK_EVERY  # of so many slots in a row one was for bulk
            assert overtaken[False] <= 1  # and bulk never took two in a row while others waited
        given_ += joined
        assert not (waiting(s) and s.slots.free), "a slot was left free while somebody waited"
        advance(s, s.plan(quantum))
        time += 1
    for bulk in (False, True):
        assert [(row.request, row.index) for row in given_ if row.job.bulk == bulk] == arrived[bulk]
    assert len(s.slots.free) == slots


def test_a_further_attempt_comes_before_all_that_wait_and_shares_no_prefill():
    s = scheduler(slots=1)
    [first], others = arrive(s, "a"), arrive(s, "a", 2)
    join(s)
    s.slots.release(first)
    again = Image("a", first.job, 0, 1, None, attempt=2)
    s.submit([again])
    assert s.join() == [again]
    s.slots.release(again)
    assert s.join() == others[:1]


def test_the_kernels_get_the_lines_of_rows_in_their_order():
    slots = Slots(3, 10)
    slots.start[2], slots.seed[2], slots.conditioned[2] = 256, 77, True
    rows = slots.rows(*np.array([[2], [4], [5]]))
    assert ROWS == ("slot", "position", "steps", "start", "seed", "conditioned")
    assert rows[:, 0].tolist() == [2, 4, 5, 256, 77, 1]


# --- the length of a quantum ---


def steps(s, images, most=1000):
    """Of a quantum of so many images."""
    s.slots.drawing[1:] = [True] * images + [False] * (s.slots.count - images)
    return int(s.plan(most)[0, 1])


def test_a_quantum_is_one_stride_until_a_step_was_measured():
    assert steps(Scheduler(Slots(16, 1000), 4), 16) == 4


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [(QUANTUM_S / 10, 8), (QUANTUM_S / 100, 100), (QUANTUM_S / 1000, 256), (2 * QUANTUM_S, 4)],
)
def test_it_has_as_many_whole_strides_as_fit_in_its_time_and_at_least_one(step_s, expected):
    s = Scheduler(Slots(16, 1000), 4)
    s.learn(16, step_s)
    assert steps(s, 16, 256) == expected


def test_a_size_that_was_not_measured_is_taken_from_the_next_smaller_one():
    s = Scheduler(Slots(16, 1000), 1)
    s.learn(1, QUANTUM_S / 800)
    s.learn(4, QUANTUM_S / 400)
    assert steps(s, 5) == 400, "sizes are powers of two"
    assert steps(s, 16) == 100, "as if each image cost the same"
    assert steps(s, 2) == 400


def test_a_step_s_time_is_smoothed():
    s = Scheduler(Slots(16, 1000), 1)
    s.learn(8, QUANTUM_S / 100)
    s.learn(8, QUANTUM_S / 50)
    assert steps(s, 8) == int(100 / 1.3)
