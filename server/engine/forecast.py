"""Forecasts: when each admitted image will be done, from one measured number. Plain Python, without a clock."""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .decode.scheduler import bulk_is_next

NEW = 0.2      # weight of one image in the smoothed pace
CONFIDENT = 2  # images that must have been measured
SAFETY = 1.25  # factor on predicted times: when the queue is as long as deadlines allow, a bare prediction would let
               # half of the admitted images be decoded nearly to their end for nothing


class Pace:
    """Seconds that an image spends in slots for each token that has to be drawn, by how many images are in slots.

    Measured from outside, for finished images: it contains prefill, steps that are skipped, checks and further
    attempts. Numbers of images are taken in powers of two.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self.measured = 0  # images

    def learn(self, batch: int, seconds: float) -> None:
        size = batch.bit_length()
        before = self._seconds.get(size, seconds)
        self._seconds[size] = before + NEW * (seconds - before)
        self.measured += 1

    def forget(self) -> None:
        self._seconds.clear()
        self.measured = 0

    def __call__(self, batch: int) -> float:
        """Seconds per token with so many images in slots; 0 when nothing is known.

        A size without measurements is estimated from the nearest one: twice the images take 1.4 times as long, half
        way between steps that cost the same for any number and steps that cost the same for each image.
        """
        size = batch.bit_length()
        nearest = min(self._seconds, key=lambda other: abs(other - size), default=size)
        return self._seconds.get(nearest, 0.0) * 2 ** ((size - nearest) / 2)


class Remaining(NamedTuple):
    """What is left to do for one image."""

    request: str
    tokens: float


def queue_order(interactive: Iterable[Remaining], bulk: Iterable[Remaining]) -> list[Remaining]:
    """Waiting images in the order in which they will get slots."""
    classes, order, overtaken = (deque(interactive), deque(bulk)), list[Remaining](), 0
    while classes[False] or classes[True]:
        kind = bulk_is_next(len(classes[False]), len(classes[True]), overtaken)
        order.append(classes[kind].popleft())
        overtaken = 0 if kind or not classes[True] else overtaken + 1
    return order


def ends(slots: int, running: Sequence[Remaining], waiting: Sequence[Remaining], pace: Callable[[int], float]
         ) -> list[tuple[float, str]]:
    """The seconds until each image will be done, and its request, in order of time, if no request arrives or leaves.

    running: in slots · waiting: in the order in which they will get slots.
    """
    in_tokens = [(image.tokens, image.request) for image in running]
    free = [0.0] * max(slots - len(running), 0) + [image.tokens for image in running]
    heapq.heapify(free)
    for image in waiting:
        end = free[0] + image.tokens
        heapq.heapreplace(free, end)
        in_tokens.append((end, image.request))
    found, now, at = list[tuple[float, str]](), 0.0, 0.0
    for ended, (end, request) in enumerate(sorted(in_tokens)):
        at, now = at + (end - now) * pace(min(len(in_tokens) - ended, slots)), end
        found.append((at, request))
    return found
