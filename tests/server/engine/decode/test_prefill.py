"""Prefill between quanta: how long it may take, how decoding catches up, and what is reported."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from linpix.model.attempts import Recognised
from linpix.server.engine.decode.prefill import Prefills
from linpix.server.engine.decode.slots import Slots
from linpix.server.engine.image import Image, Report, State
from linpix.server.engine.job import Job

STRIDE = 32


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def prefills(clock, token_s: float = 0.0, reading_s: float = 0.0) -> Prefills:
    """Of an engine whose prefills and readings take so long."""

    def fold(slots, positions, steps) -> None:
        clock[0] += token_s * int(steps[0])

    def read(requests) -> None:
        clock[0] += reading_s

    return Prefills(
        SimpleNamespace(
            prefill=fold,
            read=read,
            copy=lambda slots: None,
            prefill_stride=STRIDE,
            prefills_together=1,
            reads_together=1,
            config=SimpleNamespace(token_size=1),
            slots=Slots(9, 784),
        )
    )


def run(queue: Prefills, seconds: float, *, while_decoding: bool = False) -> Report:
    queue.run(seconds, lambda: None, report := Report(), while_decoding=while_decoding)
    return report


def group(count: int = 1, known: int = 1, state: State = State.READING) -> list[Image]:
    job = Job(known=np.arange(784) < known)
    return [
        Image("a", job, index, index, None, state=state, slot=index + 1) for index in range(count)
    ]


def test_images_may_decode_when_all_pieces_are_done(clock):
    queue, images = prefills(clock, token_s=1e-3), group(2, 3 * STRIDE, State.PREFILL)
    queue.waiting.append(images)
    seconds = []
    for _ in range(3):
        assert {image.state for image in images} == {State.PREFILL}
        report = run(queue, 0.01)  # less than a piece takes
        assert not report.failed
        seconds += report.prefill_s
    assert seconds == [pytest.approx(3 * STRIDE * 1e-3)]
    assert {image.state for image in images} == {State.DRAWING}
    assert queue._position[[image.slot for image in images]].tolist() == [3 * STRIDE] * 2


@pytest.mark.parametrize(
    ("reading_s", "quantum_s"), [(0.030, 0.003), (0.001, 0.003), (0.004, 0.003)]
)
def test_beside_images_that_are_drawn_it_gets_half_of_the_time_however_long_a_piece_is(
    clock, reading_s, quantum_s
):
    queue = prefills(clock, reading_s=reading_s)
    read = drawn = 0.0
    for _ in range(1000):
        for _ in range(4):  # so there is always more to do
            queue.waiting.append(group())
        before = clock[0]
        run(queue, quantum_s, while_decoding=True)
        read += clock[0] - before
        clock[0] += quantum_s
        drawn += quantum_s
    assert read == pytest.approx(drawn, rel=0.02)


def test_where_nothing_is_drawn_nothing_is_paid_back(clock):
    queue = prefills(clock, reading_s=1.0)
    for _ in range(3):
        queue.waiting.append(group())
        assert len(run(queue, 0.05).prefill_s) == 1


def test_what_was_not_used_is_not_saved(clock):
    queue = prefills(clock, reading_s=0.002)
    for _ in range(100):
        run(queue, 0.05, while_decoding=True)
    for _ in range(100):
        queue.waiting.append(group())
    assert len(run(queue, 0.010, while_decoding=True).prefill_s) == pytest.approx(5, abs=1)


# --- several in one call ---


def recorded(
    clock, together: int = 3, broken: frozenset[int] = frozenset()
) -> tuple[Prefills, list]:
    """Of an engine that notes its calls, each of which takes 6 ms. broken: slots that throw when
    read or judged.
    """
    calls = []

    def called(what: str, slots: list[int]) -> None:
        clock[0] += 0.006
        calls.append((what, slots))
        if broken.intersection(slots):
            raise RuntimeError(str(slots))

    def judge(slots: list[int]) -> list[Recognised]:
        called("judge", slots)
        return [Recognised(slot, -float(slot)) for slot in slots]

    return (
        Prefills(
            SimpleNamespace(
                prefill=lambda slots, positions, steps: called("prefill", slots.tolist()),
                judge=judge,
                read=lambda requests: called("read", [slots[0] for slots in requests]),
                copy=lambda slots: None,
                prefill_stride=STRIDE,
                prefills_together=together,
                reads_together=together,
                pool=SimpleNamespace(clear=lambda slot: None),
                checkpoint=SimpleNamespace(name="fake"),
                config=SimpleNamespace(token_size=1),
                slots=Slots(9, 784),
            )
        ),
        calls,
    )


def image(slot: int, state: State = State.READING, known: int = STRIDE) -> Image:
    return Image(
        f"request {slot}", Job(known=np.arange(784) < known), 0, 0, None, state=state, slot=slot
    )


def waiting_for(clock, *slots: int, state: State, broken: frozenset[int] = frozenset()):
    queue, calls = recorded(clock, broken=broken)
    images = [image(slot, state) for slot in slots]
    for one in images:
        queue.waiting.append([one])
    return queue, calls, images


def test_readings_and_checks_go_several_in_a_call_in_the_order_in_which_they_came(clock):
    queue, calls, _ = waiting_for(clock, 1, 2, 3, 4, state=State.READING)
    checked = [image(slot, State.CHECKING) for slot in (5, 6)]
    for one in (*checked, image(7), image(8, State.PREFILL), image(9)):
        queue.waiting.append([one])
    report = run(queue, 1.0)
    assert calls == [
        ("read", [1, 2, 3]),
        ("read", [4]),
        ("judge", [5, 6]),
        ("read", [7]),
        ("prefill", [8]),
        ("read", [9]),
    ]
    assert [one.recognised for one in checked] == [Recognised(5, -5.0), Recognised(6, -6.0)]
    assert {one.state for one in checked} == {State.DONE}
    assert len(report.prefill_s) == 7 and not report.failed


def test_the_time_of_a_call_is_divided_among_those_that_share_it(clock):
    queue, _, _ = waiting_for(clock, 1, 2, 3, 4, state=State.READING)
    assert run(queue, 1.0).prefill_s == pytest.approx([0.002] * 3 + [0.006])


def test_what_is_not_checked_yet_is_not_done(clock):
    queue, _, images = waiting_for(clock, 1, 2, 3, 4, state=State.CHECKING)
    run(queue, 0.001)
    assert [one.state for one in images] == [State.DONE] * 3 + [State.CHECKING]


def test_prefills_of_as_many_strides_go_several_in_a_call_whatever_waits_between(clock):
    queue, calls = recorded(clock)
    known = {1: 40, 2: 300, 3: 64, 4: 33, 5: 50}  # 2 strides but for the second
    images = [image(slot, State.PREFILL, tokens) for slot, tokens in known.items()]
    for one in images:
        queue.waiting.append([one])
    queue.waiting.insert(1, [image(6)])
    report = run(queue, 0.02)
    assert calls == [
        ("prefill", [1, 3, 4]),  # a stride each
        ("prefill", [1, 3, 4]),  # what is left of them
        ("read", [6]),
        ("prefill", [2]),
    ]
    assert queue._position[list(known)].tolist() == [40, 32, 64, 33, 0]
    assert report.prefill_s == pytest.approx([0.004] * 3 + [0.006])
    assert [one.state is State.DRAWING for one in images] == [True, False, True, True, False]


@pytest.mark.parametrize(
    ("kind", "state"),
    [("read", State.READING), ("judge", State.CHECKING), ("prefill", State.PREFILL)],
)
def test_what_threw_together_goes_alone_and_what_throws_again_fails_alone(clock, kind, state):
    queue, calls, images = waiting_for(clock, 1, 2, 3, 4, 5, state=state, broken=frozenset({2}))
    report = run(queue, 1.0)
    assert calls == [(kind, slots) for slots in ([1, 2, 3], [1], [2], [3], [4, 5])]
    assert report.failed.keys() == {"request 2"} and str(report.failed["request 2"]) == "[2]"
    assert [one.state is not state for one in images] == [True, False, True, True, True]
    assert not run(queue, 1.0).failed and len(calls) == 5


def test_what_was_cancelled_is_neither_read_nor_checked(clock):
    queue, calls, images = waiting_for(clock, 1, 2, 3, state=State.CHECKING)
    images[1].state = State.CANCELLED
    run(queue, 1.0)
    assert [one.recognised is not None for one in images] == [True, False, True]
    assert calls == [("judge", [1, 3])]
