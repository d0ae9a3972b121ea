"""The table of one model's slots: which image is in each, what it is made of, and where it is.

Scheduler, engine and decoder look at this one table. It is numpy, which releases the GIL only for
large arrays: each of torch's operators would release it, between quanta too, and get it back only
when the event loop has run.
"""

import heapq
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ..image import Image

Numbers = NDArray[np.int64]  # (B,)
# (B, 2): the slots of a quantum, with their numbers of steps; most steps first
Plan = NDArray[np.int64]
NEVER = 2**62  # an image row that no image has


def slots_of(images: Iterable[Image]) -> list[int]:
    return [image.slot for image in images]


class Slots:
    """Slots 1..count. Slot 0 is for padding rows. Arrays are indexed by slot; only the engine's
    thread changes them.
    """

    def __init__(self, count: int, length: int, token_size: int = 1) -> None:
        """length: tokens of an image · token_size: sub-pixels of a token"""
        rows, subpixels = count + 1, length * token_size
        self.count, self.length, self.token_size = count, length, token_size
        # who is there
        self.running: dict[int, Image] = {}
        self.free = [*range(1, rows)]  # a heap
        # what the image is made of
        self.canvas = np.zeros((rows, subpixels), np.uint8)
        self.known = np.zeros((rows, subpixels), np.bool_)
        self.start, self.seed = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.temperature = np.ones(rows, np.float32)
        # whether the model reads all that is known before it draws
        self.conditioned = np.zeros(rows, np.bool_)
        # tokens to be drawn from each position on: all but known ones that were read
        self.left_from = np.zeros((rows, length + 1), np.min_scalar_type(length))
        # where it is: the next token to draw or, in PREFILL, to fold in
        self.position = np.zeros(rows, np.int64)
        self.left = np.zeros(rows, np.int64)  # tokens still to be drawn; 0 in free slots
        self.drawing = np.zeros(rows, np.bool_)  # whether it takes steps
        self.streams = np.zeros(rows, np.bool_)  # whether each image row is reported
        self.next_row = np.full(rows, NEVER)  # the next one to be reported, counted from 1

    def assign(self, image: Image) -> None:
        """Give an image a free slot."""
        image.slot = heapq.heappop(self.free)
        self.running[image.slot] = image

    def release(self, image: Image) -> None:
        """Free the slot of an image."""
        del self.running[image.slot]
        self.left[image.slot], self.drawing[image.slot] = 0, False
        heapq.heappush(self.free, image.slot)
        image.slot = 0

    def fill(self, images: list[Image], slots: Numbers, start: int, *, reads: bool) -> None:
        """Write down what images are made of, which differ in their seeds only.

        start: their start index · reads: whether the model reads known pixels before it draws
        """
        job = images[0].job
        self.seed[slots] = [image.seed for image in images]
        self.start[slots], self.temperature[slots] = start, job.temperature
        self.canvas[slots] = 0 if job.canvas is None else job.canvas
        self.known[slots] = False if job.known is None else job.known
        known = self.known[slots[0]]
        conditioned = reads and bool(known.any())
        self.conditioned[slots] = conditioned
        unread = ~(known[:: self.token_size] & conditioned)
        self.left_from[slots, :-1] = unread[::-1].cumsum()[::-1]

    def rows(self, slots: Numbers, positions: Numbers, steps: Numbers) -> Numbers:
        """(6, B), as the kernels take them: the lines of ROWS in model/packing.py."""
        return np.stack(
            [slots, positions, steps, self.start[slots], self.seed[slots], self.conditioned[slots]]
        )
