"""Sees that whoever has work goes on with it. A native call that hangs cannot be ended, but it can be noticed."""

import threading
import time
from collections.abc import Callable

TICKS = 20  # looks in a time-out: silence is noticed after 1 to 1.05 of it


class Watchdog:
    """A thread that calls `silent`, once, when there is work and no heartbeat for timeout_s.

    Time is counted in looks of its own, not by a clock: a process that was stopped, or that the machine gave no time,
    had none to beat in.
    """

    def __init__(self, timeout_s: float, busy: Callable[[], bool], silent: Callable[[float], None]) -> None:
        """silent is called on the watchdog's thread, with the seconds it waited."""
        self.timeout_s, self._busy, self._silent = timeout_s, busy, silent
        self._last = time.monotonic(), 1.0  # when the heart last beat, and for how many time-outs that is to do
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def beat(self, patience: float = 1.0) -> None:
        """Work goes on, and the next beat may take `patience` time-outs."""
        self._last = time.monotonic(), patience

    @property
    def age_s(self) -> float:
        """Since the last heartbeat, if there is work; else 0."""
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
