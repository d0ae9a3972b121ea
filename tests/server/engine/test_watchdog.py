"""The watchdog notices silence while there is work, and only then."""

import threading
import time
from collections.abc import Callable

import pytest

from linpix.server.engine.thread import Watchdog


class Heart:
    """A watchdog of 0.2 s, and what it has noticed."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self.noticed: list[float] = []
        self.silent = threading.Event()
        self.watchdog = Watchdog(0.2, busy, self.notice)
        self.watchdog.start()

    def notice(self, seconds: float) -> None:
        self.noticed.append(seconds)
        self.silent.set()


@pytest.fixture
def working():
    heart = Heart(lambda: True)
    yield heart
    heart.watchdog.stop()


def test_work_without_a_heartbeat_is_noticed_once(working):
    assert working.silent.wait(10)
    time.sleep(0.6)
    assert working.noticed == [0.2]


def test_work_with_heartbeats_is_left_alone(working):
    for _ in range(50):
        working.watchdog.beat()
        time.sleep(0.02)
    assert not working.noticed


def test_a_beat_may_ask_for_patience(working):
    working.watchdog.beat(5)
    assert not working.silent.wait(0.6)
    assert working.silent.wait(10)
    assert working.noticed == [1.0]


def test_silence_without_work_is_allowed_and_new_work_has_its_full_time():
    busy = threading.Event()
    heart = Heart(busy.is_set)
    assert not heart.silent.wait(0.6)
    assert heart.watchdog.age_s == 0
    busy.set()
    assert not heart.silent.wait(0.1)
    assert heart.watchdog.age_s > 0
    assert heart.silent.wait(10)
    heart.watchdog.stop()
