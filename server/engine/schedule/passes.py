"""Predicts how many passes through the layers an image still needs, in models where some tokens need none."""

from collections.abc import Sequence
from dataclasses import dataclass, field

BUCKETS = 16   # equal parts of an image's tokens; ratios are kept by how many are left
FORGET = 0.05  # weight of one measurement; a bucket gets one or two of each image

# passes per token, by bucket: of images of which nothing was read, and of the others
Ratios = tuple[Sequence[float], Sequence[float]]
UNKNOWN: Ratios = ((1.0,) * BUCKETS, (1.0,) * BUCKETS)  # until an image has finished, each token counts as a pass


def expected_passes(ratios: Ratios, left: int, length: int, conditioned: bool) -> float:
    """Passes of an image of `length` tokens of which `left` are still to be drawn: a mean, not a bound."""
    return left * ratios[conditioned][_bucket(left, length)]


def _bucket(left: int, length: int) -> int:
    return min(left * BUCKETS // length, BUCKETS - 1)


@dataclass(slots=True)
class PassesLearned:
    """Learns from each finished image how many passes it took from the start of each quantum to its end.

    A bucket without measurements has the ratio of the nearest bucket that has some.
    """

    length: int  # tokens
    ratios: Ratios = UNKNOWN
    _measured: tuple[dict[int, float], dict[int, float]] = field(default_factory=lambda: ({}, {}))
    _quanta: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by slot and quantum: tokens left, passes

    def begin(self, slot: int) -> None:
        """A slot was given to another image."""
        self._quanta[slot] = []

    def add(self, slot: int, left: int, passes: int) -> None:
        """The image in a slot took `passes` passes in a quantum that began with `left` of its tokens to be drawn."""
        self._quanta[slot].append((left, passes))

    def finish(self, slot: int, conditioned: bool) -> None:
        """The image in a slot is done: learn from its quanta."""
        total, measured, quanta = 0, self._measured[conditioned], self._quanta.pop(slot)
        if not quanta:  # all of it was known
            return
        for left, passes in reversed(quanta):
            total += passes
            bucket, ratio = _bucket(left, self.length), total / max(left, 1)
            measured[bucket] = ratio + (1 - FORGET) * (measured.get(bucket, ratio) - ratio)
        ratios = [*self.ratios]
        ratios[conditioned] = [measured[min(measured, key=lambda other: abs(other - bucket))]
                               for bucket in range(BUCKETS)]
        self.ratios = ratios[0], ratios[1]
