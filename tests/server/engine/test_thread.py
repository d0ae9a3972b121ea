"""Background work of the engine thread, client by client, without a model."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from linpix.server.engine import thread
from linpix.server.engine.thread import EngineThread, Work
from tools.harness.servers import HANG_S


class Reports:
    def __init__(self) -> None:
        # work in the order in which it ends, and whether it failed
        self.ended: list[tuple[str, bool]] = []
        self.over = threading.Event()
        self.wanted = 0

    def work_done(self, id: str, error: Exception | None) -> None:
        self.ended.append((id, error is not None))
        if len(self.ended) == self.wanted:
            self.over.set()

    def quantum_done(self, engine: object, report: object) -> None:
        pass


@pytest.fixture
def reports() -> Reports:
    return Reports()


class Clock:
    """What time.perf_counter reads: it passes as a test says."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(thread, "time", clock)
    return clock


@pytest.fixture
def log() -> list[str]:
    return []


def pieces(
    name: str, count: int, log: list[str], *, fails: bool = False, clock: Clock | None = None
) -> Iterator[None]:
    """clock: on which each piece takes a second."""
    for piece in range(count):
        log.append(name)
        if clock is not None:
            clock.now += 1.0
        if fails:
            raise RuntimeError(name)
        if piece < count - 1:
            yield


def run(
    reports: Reports,
    *works: Work,
    engines: tuple = (),
    cancelled: tuple[str, ...] = (),
    ends: int | None = None,
) -> None:
    """Run work that was there before the thread began, until so many ended."""
    reports.wanted = len(works) if ends is None else ends
    running = EngineThread()
    running.serve(engines)
    for work in works:
        running.run_in_background(work)
    for id in cancelled:
        running.cancel(id)
    running.start(reports, lambda call, *about: call(*about))
    assert reports.over.wait(HANG_S)
    running.stop()


def test_clients_take_turns_and_each_finishes_one_piece_of_work_before_its_next(reports, log):
    run(
        reports,
        *(
            Work(id, client, pieces(id, count, log))
            for id, client, count in (
                ("a1", "a", 2),
                ("a2", "a", 1),
                ("a3", "a", 1),
                ("b1", "b", 2),
                ("c1", "c", 1),
            )
        ),
    )
    assert log == ["a1", "b1", "c1", "a1", "b1", "a2", "a3"]
    assert reports.ended == [
        ("c1", False),
        ("a1", False),
        ("b1", False),
        ("a2", False),
        ("a3", False),
    ]


def test_work_that_fails_ends_alone(reports, log):
    run(reports, *(Work(id, "a", pieces(id, 2, log, fails=id == "a1")) for id in ("a1", "a2")))
    assert reports.ended == [("a1", True), ("a2", False)]


def test_cancelled_work_is_done_no_further(reports, log):
    run(
        reports,
        *(
            Work(id, client, pieces(id, 2, log))
            for id, client in (("a1", "a"), ("a2", "a"), ("b1", "b"))
        ),
        cancelled=("a1", "b1", "unknown"),
        ends=1,
    )
    assert reports.ended == [("a2", False)] and log == ["a2", "a2"]


@pytest.mark.parametrize(("rest", "quanta"), [(0.0, 3), (1.0, 4), (3.0, 12)])
def test_beside_images_that_are_drawn_it_rests_as_many_times_as_long_as_a_piece_takes(
    reports, log, clock, rest, quanta
):
    done: list[float] = []  # pieces that were done before each quantum, which takes 0.25 s

    def quantum() -> None:
        done.append(len(log))
        clock.now += 0.25

    drawing = SimpleNamespace(busy=True, run_quantum=quantum, beat=None)
    run(reports, Work("a1", "a", pieces("a1", 5, log, clock=clock), rest=rest), engines=(drawing,))
    # a piece of a second is followed by quanta of as many seconds as it rests, and at least by
    # those that pay it back
    assert [done.count(piece) for piece in range(1, 5)] == [quanta] * 4


def test_beside_images_that_are_drawn_it_has_as_much_time_as_they(reports, log, clock):
    quanta: list[int] = []  # pieces that were done before each, which takes 2.5 s

    def quantum() -> None:
        quanta.append(len(log))
        clock.now += 2.5

    drawing = SimpleNamespace(busy=True, run_quantum=quantum, beat=None)
    run(reports, Work("a1", "a", pieces("a1", 8, log, clock=clock)), engines=(drawing,))
    assert quanta[:3] == [0, 3, 6]
