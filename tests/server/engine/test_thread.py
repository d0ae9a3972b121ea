"""Background work of the engine thread, client by client, without a model."""

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest

from linpix.server.engine.thread import EngineThread, Work


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


@pytest.fixture
def log() -> list[str]:
    return []


def pieces(
    name: str, count: int, log: list[str], *, fails: bool = False, seconds: float = 0.0
) -> Iterator[None]:
    for piece in range(count):
        log.append(name)
        time.sleep(seconds)
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
    thread = EngineThread()
    thread.serve(engines)
    for work in works:
        thread.run_in_background(work)
    for id in cancelled:
        thread.cancel(id)
    thread.start(reports, lambda call, *about: call(*about))
    assert reports.over.wait(30)
    thread.stop()


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


@pytest.mark.parametrize(("rest", "factor"), [(1.0, 1), (3.0, 3)])
def test_beside_images_that_are_drawn_it_rests_as_many_times_as_long_as_a_piece_takes(
    reports, log, rest, factor
):
    drawing = SimpleNamespace(busy=True, run_quantum=lambda: time.sleep(0.002), beat=None)
    began = time.perf_counter()
    run(reports, Work("a1", "a", pieces("a1", 5, log, seconds=0.02), rest=rest), engines=(drawing,))
    assert time.perf_counter() - began >= 5 * 0.02 + 4 * 0.02 * factor
    assert len(log) == 5


def test_beside_images_that_are_drawn_it_has_as_much_time_as_they_and_pays_back_what_is_more(
    reports, log
):
    quanta: list[int] = []  # pieces that were done before each

    def quantum() -> None:
        quanta.append(len(log))
        time.sleep(0.2)  # so long that a busy machine adds less than a piece

    drawing = SimpleNamespace(busy=True, run_quantum=quantum, beat=None)
    run(reports, Work("a1", "a", pieces("a1", 8, log, seconds=0.08)), engines=(drawing,))
    assert quanta[:2] == [0, 3] and len(quanta) <= 4
    assert all(after - before <= 3 for before, after in pairwise(quanta))
