"""A watchdog for a thread that has work but makes no progress: a native call that hangs can be noticed, not ended."""

import threading
import time
from collections.abc import Callable

TICKS = 20  # checks in a time-out: silence is noticed after 1 to 1.1 time-outs


class Watchdog:
    """A thread that calls `silent`, once, when there is work and no heartbeat for timeout_s.

    Time is counted in the watchdog's own checks, not by a clock: a process that is stopped, or that gets no CPU time,
    cannot beat meanwhile.
    """

    def __init__(self, timeout_s: float, busy: Callable[[], bool], silent: Callable[[float], None]) -> None:
        """silent is called on the watchdog's thread, with the seconds that a heartbeat was allowed to take."""
        self.timeout_s, self._busy, self._silent = timeout_s, busy, silent
        self._last = time.monotonic(), 1.0  # time of the last heartbeat, and time-outs that it is good for
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def beat(self, patience: float = 1.0) -> None:
        """Record a heartbeat; the next one may take `patience` time-outs."""
        self._last = time.monotonic(), patience

    @property
    def age_s(self) -> float:
        """Seconds since the last heartbeat while there is work; else 0."""
        return time.monotonic() - self._last[0] if self._busy() else 0.0

    def _watch(self) -> None:
        seen, looks = self._last, 0
        while not self._stopped.wait(self.timeout_s / TICKS):
            last = self._last
            looks = looks + 1 if last is seen and self._busy() else 0
            seen = last
            if looks > TICKS * last[1]:
                self._silent(self.timeout_s * last[1])
                return
