"""The scheduler: which images wait, which run in which slot, and how many steps a quantum has.

No torch, no clock, no threads on purpose, so that its tests run in milliseconds. What changes with
every quantum is kept in arrays: thousands of images may be decoded at once.
"""

from collections import deque
from collections.abc import Iterable, Sized

import numpy as np

from ..image import Image, State
from .slots import Plan, Slots

BULK_EVERY = 4  # while bulk images wait, they get one in so many slots
# longest quantum, and longest prefill while no image decodes: cancellations act this late
QUANTUM_S = 0.050


def bulk_is_next(interactive: Sized, bulk: Sized, overtaken: int) -> bool:
    """Whether the next slot is for a bulk image, with these of each class waiting.

    overtaken: slots that interactive images got in a row while bulk images waited.
    """
    return bool(bulk) and (not interactive or overtaken >= BULK_EVERY - 1)


class Scheduler:
    """Slots for the images of one model. Images wait first come, first served in each of two
    classes.
    """

    def __init__(self, slots: Slots, stride: int) -> None:
        """stride: steps that the decoder runs in one go; a quantum has a multiple of them."""
        self.slots, self._stride = slots, stride
        self.interactive: deque[Image] = deque()
        self.bulk: deque[Image] = deque()
        self.overtaken = 0  # see bulk_is_next
        # of a step, smoothed, by the number of images in powers of two
        self._seconds: dict[int, float] = {}

    def submit(self, images: Iterable[Image]) -> None:
        """Have images wait; further attempts at images that have had a slot come before all
        others.
        """
        for image in images:
            queue = self.bulk if image.job.bulk else self.interactive
            if image.attempt > 1:
                queue.appendleft(image)
            else:
                queue.append(image)

    def cancel(self, request: str) -> None:
        """Forget a request, wherever it is, or do nothing if it is not here. Its slots are free at
        once.
        """
        interactive = [image for image in self.interactive if image.request != request]
        bulk = [image for image in self.bulk if image.request != request]
        self.interactive, self.bulk = deque(interactive), deque(bulk)
        for image in [*self.slots.running.values()]:
            if image.request == request:
                image.state = State.CANCELLED
                self.slots.release(image)

    def join(self) -> list[Image]:
        """Give free slots to the first waiting images that share a prefill.

        Returns these. Call it again for the next ones, until it returns none.
        """
        joined: list[Image] = []
        while self.slots.free:
            bulk = bulk_is_next(self.interactive, self.bulk, self.overtaken)
            queue = self.bulk if bulk else self.interactive
            if not queue or (joined and queue[0].key != joined[0].key):
                break
            image = queue.popleft()
            self.overtaken = 0 if bulk or not self.bulk else self.overtaken + 1
            self.slots.assign(image)
            joined.append(image)
        return joined

    def plan(self, most: int) -> Plan:
        """Each drawing image with its steps in the next quantum: as many as fit in QUANTUM_S, at
        most `most`.
        """
        length, position = self.slots.length, self.slots.position
        slots, steps = np.flatnonzero(self.slots.drawing & (position < length)), self._stride
        size = len(slots).bit_length()
        if known := [measured for measured in self._seconds if measured <= size]:
            # a size that is not known is taken from the next smaller one, as if each image cost the
            # same
            seconds = self._seconds[max(known)] * 2 ** (size - max(known))
            steps = max(steps, min(most, int(QUANTUM_S / seconds)) // steps * steps)
        left = np.minimum(steps, length - position[slots])
        return np.stack([slots, left], 1)[np.argsort(-left, kind="stable")]

    def learn(self, batch: int, seconds: float) -> None:
        """One step of so many images took so many seconds, without prefill."""
        before = self._seconds.get(batch.bit_length(), seconds)
        self._seconds[batch.bit_length()] = 0.7 * before + 0.3 * seconds
