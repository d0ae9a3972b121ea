"""Prefill between quanta: how long it may take, how decoding catches up, and what is reported."""

import time
from types import SimpleNamespace

import pytest

from linpix.model.attempts import Recognised
from linpix.server.engine.decode.prefill import Prefills
from linpix.server.engine.schedule.scheduler import ScheduledImage

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

    return Prefills(SimpleNamespace(prefill=fold, read=read, copy=lambda slots: None, prefill_stride=STRIDE,
                                    reads_together=1))


def rows(count: int = 1) -> list[ScheduledImage]:
    return [ScheduledImage("a", index, 0, index + 1) for index in range(count)]


def test_a_request_is_told_when_it_is_done_with_all_its_pieces(clock):
    waiting, images = prefills(clock, token_s=1e-3), rows(2)
    waiting.append(images, 3 * STRIDE)
    told = []
    for _ in range(3):
        assert not any(image.prefilled for image in images)
        ran = waiting.run(0.01, lambda: None, beside=False)  # less than a piece takes
        assert not ran.failed
        told += ran.done
    assert [(one.tokens, pytest.approx(one.seconds)) for one in told] == [(3 * STRIDE, 3 * STRIDE * 1e-3)]
    assert all(image.prefilled for image in images)


@pytest.mark.parametrize(("reading_s", "quantum_s"), [(0.030, 0.003), (0.001, 0.003), (0.004, 0.003)])
def test_beside_images_that_are_drawn_it_gets_half_of_the_time_however_long_a_piece_is(clock, reading_s, quantum_s):
    waiting = prefills(clock, reading_s=reading_s)
    read = drawn = 0.0
    for _ in range(1000):
        for _ in range(4):  # so there is always more to do
            waiting.append(rows(), 1, read=True)
        before = clock[0]
        waiting.run(quantum_s, lambda: None, beside=True)
        read += clock[0] - before
        clock[0] += quantum_s
        drawn += quantum_s
    assert read == pytest.approx(drawn, rel=0.02)


def test_where_nothing_is_drawn_nothing_is_paid_back(clock):
    waiting = prefills(clock, reading_s=1.0)
    for _ in range(3):
        waiting.append(rows(), 1, read=True)
        assert len(waiting.run(0.05, lambda: None, beside=False).done) == 1


def test_what_was_not_used_is_not_saved(clock):
    waiting = prefills(clock, reading_s=0.002)
    for _ in range(100):
        waiting.run(0.05, lambda: None, beside=True)
    for _ in range(100):
        waiting.append(rows(), 1, read=True)
    assert len(waiting.run(0.010, lambda: None, beside=True).done) == pytest.approx(5, abs=1)


# --- several in one call ---

def recorded(clock, together: int = 3, broken: frozenset[int] = frozenset()) -> tuple[Prefills, list]:
    """Of an engine that notes its calls, each of which takes 6 ms. broken: slots that throw when read or judged."""
    calls = []

    def called(what: str, slots: list[int]) -> None:
        clock[0] += 0.006
        calls.append((what, slots))
        if broken.intersection(slots):
            raise RuntimeError(str(slots))

    def judge(slots: list[int]) -> list[Recognised]:
        called("judge", slots)
        return [Recognised(slot, -float(slot)) for slot in slots]

    return Prefills(SimpleNamespace(
        prefill=lambda slots, positions, steps: called("prefill", slots.tolist()), judge=judge,
        read=lambda requests: called("read", [slots[0] for slots in requests]), copy=lambda slots: None,
        prefill_stride=STRIDE, reads_together=together, pool=SimpleNamespace(clear=lambda slot: None),
        checkpoint=SimpleNamespace(name="fake"))), calls


def at(slot: int) -> ScheduledImage:
    return ScheduledImage(f"request {slot}", 0, 0, slot)


def test_readings_and_judging_go_several_in_a_call_in_the_order_in_which_they_came(clock):
    waiting, calls = recorded(clock)
    for slot in (1, 2, 3, 4):
        waiting.append([at(slot)], 1, read=True)
    for slot in (5, 6):
        waiting.judge(at(slot))
    waiting.append([at(7)], 1, read=True)
    waiting.append([at(8)], STRIDE)
    waiting.append([at(9)], 1, read=True)
    ran = waiting.run(1.0, lambda: None, beside=False)
    assert calls == [("read", [1, 2, 3]), ("read", [4]), ("judge", [5, 6]), ("read", [7]), ("prefill", [8]),
                     ("read", [9])]
    assert [one.image.slot for one in ran.judged] == [5, 6]
    assert [one.found for one in ran.judged] == [Recognised(5, -5.0), Recognised(6, -6.0)]
    assert [one.tokens for one in ran.done] == [1, 1, 1, 1, 1, STRIDE, 1]
    assert not ran.failed


def test_the_time_of_a_call_is_divided_among_those_that_share_it(clock):
    waiting, _ = recorded(clock)
    for slot in (1, 2, 3, 4):
        waiting.judge(at(slot))
    assert [one.seconds for one in waiting.run(1.0, lambda: None, beside=False).judged] \
        == pytest.approx([0.002] * 3 + [0.006])


def test_what_is_not_judged_yet_decodes_nothing(clock):
    waiting, _ = recorded(clock)
    images = [at(slot) for slot in range(1, 5)]
    for image in images:
        waiting.judge(image)
    waiting.run(0.001, lambda: None, beside=False)
    assert [image.prefilled for image in images] == [True, True, True, False]


@pytest.mark.parametrize("kind", ["read", "judge"])
def test_what_threw_together_goes_alone_and_what_throws_again_fails_alone(clock, kind):
    waiting, calls = recorded(clock, broken=frozenset({2}))
    for slot in (1, 2, 3, 4, 5):
        if kind == "judge":
            waiting.judge(at(slot))
        else:
            waiting.append([at(slot)], 1, read=True)
    ran = waiting.run(1.0, lambda: None, beside=False)
    assert calls == [(kind, slots) for slots in ([1, 2, 3], [1], [2], [3], [4, 5])]
    assert ran.failed.keys() == {"request 2"} and str(ran.failed["request 2"]) == "[2]"
    assert len(ran.judged if kind == "judge" else ran.done) == 4
    assert not waiting.run(1.0, lambda: None, beside=False).failed and len(calls) == 5


def test_what_was_cancelled_is_neither_read_nor_judged(clock):
    waiting, calls = recorded(clock)
    images = [at(slot) for slot in (1, 2, 3)]
    for image in images:
        waiting.judge(image)
    images[1].cancelled = True
    assert [one.image.slot for one in waiting.run(1.0, lambda: None, beside=False).judged] == [1, 3]
    assert calls == [("judge", [1, 3])]
