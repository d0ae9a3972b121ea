"""What is known is folded in between quanta: for how long, what is paid back, and what is told of it."""

import time
from types import SimpleNamespace

import pytest

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
