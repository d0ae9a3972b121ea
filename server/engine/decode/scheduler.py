"""The scheduler: which images wait, which run in which slot, and how many steps a quantum has.

Plain Python on purpose: no torch, no clock, no threads, so that its tests run in milliseconds.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator

from ..image import Image, State

BULK_EVERY = 4     # while bulk images wait, they get one in so many slots
QUANTUM_S = 0.050  # longest quantum, and longest prefill while no image decodes: cancellations act this late

Plan = list[tuple[Image, int]]  # each image of a quantum with its number of steps, most steps first


def bulk_is_next(interactive: int, bulk: int, overtaken: int) -> bool:
    """Whether the next slot is for a bulk image, with so many of each class waiting.

    overtaken: slots that interactive images got in a row while bulk images waited.
    """
    return bulk > 0 and (not interactive or overtaken >= BULK_EVERY - 1)


class Scheduler:
    """Slots 1..slots for the images of one model. Images wait first come, first served in each of two classes."""

    def __init__(self, slots: int, length: int) -> None:
        """length: tokens of an image."""
        self.slots, self.length = slots, length
        self.interactive: deque[Image] = deque()
        self.bulk: deque[Image] = deque()
        self.overtaken = 0                    # see bulk_is_next
        self.running: dict[int, Image] = {}   # by slot
        self._free = [*range(1, slots + 1)]   # a heap

    @property
    def waiting(self) -> Iterator[Image]:
        return itertools.chain(self.interactive, self.bulk)

    @property
    def free(self) -> list[int]:
        return sorted(self._free)

    def enqueue(self, images: Iterable[Image]) -> None:
        """Append images; further attempts at images that have had a slot come before all others."""
        for image in images:
            queue = self.bulk if image.job.bulk else self.interactive
            if image.attempt > 1:
                queue.appendleft(image)
            else:
                queue.append(image)

    def cancel(self, request: str) -> None:
        """Forget a request wherever it is. Its running images keep their slots until the current quantum ends."""
        self.interactive, self.bulk = (deque(image for image in images if image.request != request)
                                       for images in (self.interactive, self.bulk))
        for image in self.running.values():
            if image.request == request:
                image.state = State.CANCELLED

    def join(self) -> list[Image]:
        """Free the slots of cancelled images, then give free slots to the first waiting images that share a prefill.

        Returns these. Call it again for the next ones, until it returns none.
        """
        for image in [image for image in self.running.values() if image.state is State.CANCELLED]:
            self.release(image)
        joined: list[Image] = []
        while self._free:
            bulk = bulk_is_next(len(self.interactive), len(self.bulk), self.overtaken)
            queue = self.bulk if bulk else self.interactive
            if not queue or (joined and queue[0].key != joined[0].key):
                break
            image = queue.popleft()
            self.overtaken = 0 if bulk or not self.bulk else self.overtaken + 1
            image.slot = heapq.heappop(self._free)
            self.running[image.slot] = image
            joined.append(image)
        return joined

    def release(self, image: Image) -> None:
        """Free the slot of a running image."""
        del self.running[image.slot]
        heapq.heappush(self._free, image.slot)

    def clear(self) -> None:
        """Empty all slots."""
        for image in [*self.running.values()]:
            self.release(image)

    @property
    def drawing(self) -> list[Image]:
        """Running images that take steps."""
        return [image for image in self.running.values()
                if image.state is State.DRAWING and image.position < self.length]

    def plan(self, steps: int) -> Plan:
        """Each drawing image with its number of steps in a quantum of so many."""
        plan = [(image, min(steps, self.length - image.position)) for image in self.drawing]
        return sorted(plan, key=lambda part: (-part[1], part[0].slot))


class QuantumLength:
    """The length of a quantum: as many steps as fit in QUANTUM_S.

    It learns the seconds of a step, without prefill, for each number of images in powers of two.
    """

    def __init__(self, stride: int, max_steps: int) -> None:
        """stride: steps that the engine runs in one go; a quantum has a multiple of them · max_steps: of a quantum."""
        self._stride, self._max_steps = stride, max_steps
        self._seconds: dict[int, float] = {}  # smoothed

    def steps(self, images: int) -> int:
        seconds = self._seconds.get(images.bit_length())
        if seconds is None:  # from the next smaller size, as if each image cost the same
            known = [size for size in self._seconds if size < images.bit_length()]
            if not known:
                return self._stride
            seconds = self._seconds[max(known)] * 2 ** (images.bit_length() - max(known))
        return max(self._stride, min(self._max_steps, int(QUANTUM_S / seconds)) // self._stride * self._stride)

    def learn(self, images: int, seconds: float) -> None:
        """One step of so many images took so many seconds."""
        before = self._seconds.get(images.bit_length(), seconds)
        self._seconds[images.bit_length()] = 0.7 * before + 0.3 * seconds
