"""How long a step takes, by the number of rows that take it together."""

import math

WINDOW_S = 5.0  # of running, over which what was seen is forgotten: long enough for a machine's hiccups to average out


class Pace:
    """Seconds a step has taken of late, all that comes between two steps included.

    That is a mean, for what is foreseen is a sum: what delays one step in a hundred delays what one waits for as well.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}  # steps and seconds, by the number of rows in powers of two

    def learn(self, rows: int, steps: int, seconds: float) -> None:
        """That so many rows took steps. The first time of each size is left out: caches warm up in it."""
        size = rows.bit_length()
        before = self._sums.get(size)
        if before is None:
            self._sums[size] = 0.0, 0.0
            return
        kept = math.exp(-seconds / WINDOW_S)
        self._sums[size] = before[0] * kept + steps, before[1] * kept + seconds

    def forget(self) -> None:
        """What was seen tells nothing any more."""
        self._sums.clear()

    def __call__(self, rows: int) -> float:
        """Seconds a step of so many rows; 0 when nothing is known.

        A size not seen yet is told from the nearest one: twice the rows as 1.4 times the time, half way between a
        step that costs the same for all and rows that each cost the same.
        """
        sizes = [size for size, (steps, _) in self._sums.items() if steps]
        if not sizes:
            return 0.0
        wanted = rows.bit_length()
        nearest = min(sizes, key=lambda size: abs(size - wanted))
        steps, seconds = self._sums[nearest]
        return float(seconds / steps * 2 ** ((wanted - nearest) / 2))

    def slowest(self, rows: int) -> float:
        """Seconds a step of up to so many rows, at most; 0 when nothing is known."""
        return max(self(2**size) for size in range(rows.bit_length()))
