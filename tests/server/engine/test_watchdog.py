"""The watchdog notices silence while there is work, and only then. Its looks are counted: there is
no clock in it.
"""

from collections.abc import Callable

from linpix.server.engine.thread import TICKS, Watchdog


class Heart:
    """A watchdog of 0.2 s, which looks as often as it is told, and what it has noticed."""

    def __init__(self, busy: bool = True) -> None:
        self.busy, self.noticed, self.looks = busy, list[float](), 0
        self.watchdog = Watchdog(0.2, lambda: self.busy, self.noticed.append)

    def look(self, count: int, before_each: Callable[[], None] = lambda: None) -> None:
        """Let it look so many times, or until it notices something."""
        left = count

        def wait(seconds: float) -> bool:
            nonlocal left
            assert seconds == 0.2 / TICKS
            before_each()
            left, self.looks = left - 1, self.looks + 1
            return left < 0

        self.watchdog._stopped.wait = wait
        self.watchdog._watch()


def test_work_without_a_heartbeat_is_noticed_once():
    heart = Heart()
    heart.look(TICKS)
    assert not heart.noticed
    heart.look(1000)
    assert heart.noticed == [0.2]


def test_work_with_heartbeats_is_left_alone():
    heart = Heart()
    heart.look(1000, heart.watchdog.beat)
    assert not heart.noticed


def test_a_beat_may_ask_for_patience():
    heart = Heart()
    heart.watchdog.beat(5)
    heart.look(5 * TICKS)
    assert not heart.noticed
    heart.look(1000)
    assert heart.noticed == [1.0]


def test_silence_without_work_is_allowed_and_new_work_has_its_full_time():
    heart = Heart(busy=False)

    def work_comes() -> None:
        heart.busy = heart.looks >= 100

    assert heart.watchdog.age_s == 0
    heart.look(1000, work_comes)
    assert heart.noticed == [0.2] and heart.looks == 100 + TICKS + 1
    assert heart.watchdog.age_s > 0


def test_it_looks_by_itself_until_it_is_stopped():
    heart = Heart()
    heart.watchdog.start()
    heart.watchdog.stop()
    assert not heart.watchdog._thread.is_alive()
