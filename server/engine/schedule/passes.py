"""How often an image still goes through the layers, in models where some of its tokens do not."""

from collections.abc import Sequence
from dataclasses import dataclass, field

BUCKETS = 16   # of what is left of an image, in parts of its tokens
FORGET = 0.05  # weight of one image, of which a bucket gets one or two measurements

Ratios = tuple[Sequence[float], Sequence[float]]  # passes a token: of images of which nothing was read, of others
UNKNOWN: Ratios = ((1.0,) * BUCKETS, (1.0,) * BUCKETS)  # until an image has finished, each token counts as a pass


def expected_passes(ratios: Ratios, left: int, length: int, told: bool) -> float:
    """Passes of an image of `length` tokens of which so many are still to be drawn. A mean: no bound."""
    return left * ratios[told][_bucket(left, length)]


def _bucket(left: int, length: int) -> int:
    return min(left * BUCKETS // length, BUCKETS - 1)


@dataclass(slots=True)
class PassesLearned:
    """Learns from each finished image how many passes it took from wherever a quantum began.

    What was not measured is as the nearest that was.
    """

    length: int  # T
    ratios: Ratios = UNKNOWN
    _measured: tuple[dict[int, float], dict[int, float]] = field(default_factory=lambda: ({}, {}))
    _quanta: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # of each slot: what was left, and passes

    def begin(self, slot: int) -> None:
        """A slot was given to another image."""
        self._quanta[slot] = []

    def add(self, slot: int, left: int, passes: int) -> None:
        """The image in a slot, of which so many tokens were left to be drawn, took so many passes."""
        self._quanta[slot].append((left, passes))

    def finish(self, slot: int, told: bool) -> None:
        """The image in a slot is done."""
        total, measured, quanta = 0, self._measured[told], self._quanta.pop(slot)
        if not quanta:  # all of it was known
            return
        for left, passes in reversed(quanta):
            total += passes
            bucket, ratio = _bucket(left, self.length), total / max(left, 1)
            measured[bucket] = ratio + (1 - FORGET) * (measured.get(bucket, ratio) - ratio)
        ratios = [*self.ratios]
        ratios[told] = [measured[min(measured, key=lambda other: abs(other - bucket))] for bucket in range(BUCKETS)]
        self.ratios = ratios[0], ratios[1]
