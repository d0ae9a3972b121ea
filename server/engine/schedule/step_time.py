"""How long a step takes, by the number of images that take it together, and how far such an estimate can be trusted."""

import math

WINDOW_S = 5.0  # seconds of decoding over which measurements fade: long enough for short delays to average out
MIN_S, MAX_S = 0.25, 4.0  # seconds of decoding that must have been measured before a refusal (the window holds 5)
MEASURED = 0.1     # between these bounds, this share of the time looked ahead: a sudden crowd is slow at first
BROKEN = 0.005     # share of the predictions that may turn out too early
LEARNING_RATE = 0.05  # of the factor's logarithm: seven broken predictions in a row raise it from least to most
MIN_FACTOR = 1.25  # delays come without warning, and a shorter queue costs nothing while slots are full
MAX_FACTOR = 1.75  # nothing predicts a machine that is suddenly much slower, and a large factor empties slots when
                   # deadlines are short


class StepTimeEstimate:
    """Seconds a step has taken recently, including everything that happens between two steps.

    The estimate is a mean, because predictions are sums: a delay of one step in a hundred delays the whole image.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}  # steps and seconds, by the number of images in powers of two
        self._estimates: dict[int, float] = {}           # computed from these, by the same

    def learn(self, images: int, steps: int, seconds: float) -> None:
        """Add a measurement. The first one of each size is left out, because caches warm up in it."""
        size, kept = images.bit_length(), math.exp(-seconds / WINDOW_S)
        seen = size in self._sums
        for other, (some, took) in self._sums.items():  # a size that has not run for a long time is forgotten
            recent = other == size or some * kept >= 1 or took * kept >= MIN_S
            self._sums[other] = (some * kept, took * kept) if recent else (0.0, 0.0)
        before = self._sums.setdefault(size, (0.0, 0.0))
        if seen:
            self._sums[size] = before[0] + steps, before[1] + seconds
        self._estimates.clear()

    def forget(self) -> None:
        self._sums.clear()
        self._estimates.clear()

    def __call__(self, images: int) -> float:
        """Seconds a step of so many images takes; 0 when nothing is known.

        A size without measurements is estimated from the nearest one: twice the images take 1.4 times as long, half
        way between a step that costs the same for any number and one that costs the same for each image. No size is
        estimated to be slower than a larger one: one that ran only while the machine was held up would be far off.
        """
        size = images.bit_length()
        if size not in self._estimates:
            known = {other: seconds / steps for other, (steps, seconds) in self._sums.items() if steps}
            nearest = min(known, key=lambda other: abs(other - size), default=size)
            guess = known.get(nearest, 0.0) * 2 ** ((size - nearest) / 2)
            self._estimates[size] = min([guess, *(pace for other, pace in known.items() if other > size)])
        return self._estimates[size]

    def confident(self, images: int, ahead_s: float) -> bool:
        """Whether enough was measured to predict that far ahead for so many images.

        images: 0 if none is being decoded yet. Measurements of twice or half as many images count a quarter, of four
        times as many a sixteenth.
        """
        size = images.bit_length()
        seen_s = sum(seconds * 0.25 ** (abs(other - size) if images else 0)
                     for other, (_, seconds) in self._sums.items())
        return seen_s >= min(max(MIN_S, MEASURED * ahead_s), MAX_S)

    def slowest(self, images: int) -> float:
        """The longest estimate for any number up to this one; 0 when nothing is known."""
        return max(self(2**size) for size in range(images.bit_length()))


class SafetyFactor:
    """The factor on a predicted time, before a request is admitted by it.

    A bare prediction is too early as often as too late. When the queue is as long as deadlines allow, half of the
    admitted images would then be decoded nearly to their end for nothing. The factor is the quantile of 1 - BROKEN by
    stochastic approximation (Robbins and Monro, 1951): it follows the machine, and assumes no distribution.
    """

    def __init__(self) -> None:
        self.value = MIN_FACTOR

    def learn(self, broken: bool) -> None:
        """broken: the prediction was too early. A request refused only because of the factor counts as not broken."""
        self.value = min(max(MIN_FACTOR, self.value * math.exp(LEARNING_RATE * (broken - BROKEN))), MAX_FACTOR)
