"""How long a step takes, by the number of rows that take it together, and how far what is foreseen can be trusted."""

import math

WINDOW_S = 5.0  # of running, over which what was seen is forgotten: long enough for a machine's hiccups to average out
LEAST_S, MOST_S = 0.25, 4.0  # of running, seen before anybody is refused for it (the window holds some 5), and
SEEN = 0.1               # in between this part of the time looked ahead: a crowd that comes at once is slow at first
BROKEN = 0.005  # of promises: so many may be
STEP = 0.05     # of the logarithm of the margin: seven broken promises in a row take it from its least to its most
LEAST_MARGIN = 1.25  # hiccups come without notice, and a shorter queue costs nothing while slots are full
MOST_MARGIN = 1.75   # none foresees a machine that is so much slower than a moment ago, and a large one empties slots
                     # where deadlines are short


class Pace:
    """Seconds a step has taken of late, all that comes between two steps included.

    That is a mean, for what is foreseen is a sum: what delays one step in a hundred delays what one waits for as well.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}  # steps and seconds, by the number of rows in powers of two
        self._told: dict[int, float] = {}                # what follows from them, by the same

    def learn(self, rows: int, steps: int, seconds: float) -> None:
        """That so many rows took steps. The first time of each size is left out: caches warm up in it."""
        size, kept = rows.bit_length(), math.exp(-seconds / WINDOW_S)
        seen = size in self._sums
        for other, (some, took) in self._sums.items():  # of a size that has not run for long nothing is known any more
            recent = other == size or some * kept >= 1 or took * kept >= LEAST_S
            self._sums[other] = (some * kept, took * kept) if recent else (0.0, 0.0)
        before = self._sums.setdefault(size, (0.0, 0.0))
        if seen:
            self._sums[size] = before[0] + steps, before[1] + seconds
        self._told.clear()

    def forget(self) -> None:
        """What was seen tells nothing any more."""
        self._sums.clear()
        self._told.clear()

    def __call__(self, rows: int) -> float:
        """Seconds a step of so many rows; 0 when nothing is known.

        A size not seen yet is told from the nearest one: twice the rows as 1.4 times the time, half way between a
        step that costs the same for all and rows that each cost the same. No size is told to take longer than a
        larger one: a size that ran for a moment, when the machine was held up, would be wrong by far.
        """
        size = rows.bit_length()
        if size not in self._told:
            known = {other: seconds / steps for other, (steps, seconds) in self._sums.items() if steps}
            nearest = min(known, key=lambda other: abs(other - size), default=size)
            guess = known.get(nearest, 0.0) * 2 ** ((size - nearest) / 2)
            self._told[size] = min([guess, *(pace for other, pace in known.items() if other > size)])
        return self._told[size]

    def sure(self, rows: int, ahead_s: float) -> bool:
        """Whether enough was seen to tell what comes in so long while so many rows run; 0: while none do yet.

        What was seen of twice or half as many rows counts a quarter, of four times as many a sixteenth.
        """
        size = rows.bit_length()
        seen_s = sum(seconds * 0.25 ** (abs(other - size) if rows else 0) for other, (_, seconds) in self._sums.items())
        return seen_s >= min(max(LEAST_S, SEEN * ahead_s), MOST_S)

    def slowest(self, rows: int) -> float:
        """Seconds a step of up to so many rows, at most; 0 when nothing is known."""
        return max(self(2**size) for size in range(rows.bit_length()))


class Margin:
    """What a foreseen time is multiplied by before it is promised.

    What is foreseen is as often too early as too late. Where the queue is as long as deadlines allow, half of those
    admitted would then be decoded nearly to their end for nothing. This is the quantile of 1 - BROKEN, by stochastic
    approximation (Robbins and Monro, 1951): it follows the machine, and no distribution is assumed.
    """

    def __init__(self) -> None:
        self.factor = LEAST_MARGIN

    def learn(self, broken: bool) -> None:
        """Whether a promise was; a request refused for the margin alone counts as one that was kept."""
        self.factor = min(max(LEAST_MARGIN, self.factor * math.exp(STEP * (broken - BROKEN))), MOST_MARGIN)
