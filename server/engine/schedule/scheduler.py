"""The scheduler: which images wait, and which run in which slot.

Plain Python on purpose: no torch, no clock, no threads, so that its tests run in milliseconds.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

BULK_EVERY = 4  # while bulk images wait, they get one in so many slots


@dataclass(slots=True, eq=False)
class ScheduledImage:
    """One image of one request, from the queue to its last token."""

    request: str
    index: int            # among the request's images
    position: int         # next token to predict
    slot: int = 0         # 0 while it waits
    cancelled: bool = False
    bulk: bool = False
    prefilled: bool = True  # false while the inputs before its position are being folded in: it does not decode yet
    held: bool = False    # keeps its slot once it is fully drawn, since it may have to be drawn again


def bulk_is_next(interactive: int, bulk: int, overtaken: int) -> bool:
    """Whether the next slot is for a bulk image, with so many of each class waiting.

    overtaken: slots that interactive images got in a row while bulk images waited.
    """
    return bulk > 0 and (not interactive or overtaken >= BULK_EVERY - 1)


class WaitQueue:
    """Images that wait for a slot: first come, first served in each of the two classes."""

    def __init__(self) -> None:
        self.interactive: deque[ScheduledImage] = deque()
        self.bulk: deque[ScheduledImage] = deque()
        self.overtaken = 0  # see bulk_is_next

    def __len__(self) -> int:
        return len(self.interactive) + len(self.bulk)

    def __iter__(self) -> Iterator[ScheduledImage]:
        return itertools.chain(self.interactive, self.bulk)

    def next_class(self) -> deque[ScheduledImage]:
        """The class whose first image gets the next slot; empty if no image waits."""
        return self.bulk if bulk_is_next(len(self.interactive), len(self.bulk), self.overtaken) else self.interactive

    def take(self, images: deque[ScheduledImage]) -> ScheduledImage:
        """Remove the first image of a class, which now gets a slot."""
        image = images.popleft()
        self.overtaken = 0 if image.bulk or not self.bulk else self.overtaken + 1
        return image

    def remove(self, request: str) -> None:
        """Remove the images of a request."""
        self.interactive, self.bulk = (deque(image for image in images if image.request != request)
                                       for images in (self.interactive, self.bulk))


@dataclass(slots=True)
class Scheduler:
    """Slots 1..slots for the images of one model."""

    slots: int
    length: int           # tokens
    waiting: WaitQueue = field(default_factory=WaitQueue)
    running: dict[int, ScheduledImage] = field(default_factory=dict)

    @property
    def free(self) -> list[int]:
        return [slot for slot in range(1, self.slots + 1) if slot not in self.running]

    def enqueue(self, request: str, images: int, position: int, bulk: bool = False) -> list[ScheduledImage]:
        """Append a request's images, which all begin at `position`; returns them in order."""
        queued = [ScheduledImage(request, index, position, bulk=bulk) for index in range(images)]
        (self.waiting.bulk if bulk else self.waiting.interactive).extend(queued)
        return queued

    def cancel(self, request: str) -> None:
        """Forget a request wherever it is. Its running images keep their slots until the current quantum ends."""
        self.waiting.remove(request)
        for image in self.running.values():
            image.cancelled |= image.request == request

    def join(self) -> list[ScheduledImage]:
        """Between quanta: free the slots of cancelled images, then give free slots to the next request.

        Returns its images that got a slot. Call it again for the next request, until it returns none.
        """
        self.running = {slot: image for slot, image in self.running.items() if not image.cancelled}
        joined: list[ScheduledImage] = []
        free = self.free if self.waiting else []
        while free and (images := self.waiting.next_class()):
            if joined and images[0].request != joined[0].request:
                break
            image = self.waiting.take(images)
            image.slot = free.pop(0)
            self.running[image.slot] = image
            joined.append(image)
        return joined

    @property
    def decoding(self) -> list[ScheduledImage]:
        """Running images that may take steps."""
        return [image for image in self.running.values() if image.prefilled and not image.cancelled]

    def plan(self, quantum: int) -> list[tuple[ScheduledImage, int]]:
        """Each decoding image with its number of steps in the next quantum, most steps first."""
        plan = [(image, min(quantum, self.length - image.position)) for image in self.decoding
                if image.position < self.length]
        return sorted(plan, key=lambda part: (-part[1], part[0].slot))

    def advance(self, plan: list[tuple[ScheduledImage, int]]) -> list[ScheduledImage]:
        """Record that a plan was carried out. Returns the drawn images that were not cancelled meanwhile.

        Of these, held ones keep their slots until they are judged.
        """
        for image, steps in plan:
            image.position += steps
        over = [image for image in self.running.values()
                if image.cancelled or (image.prefilled and image.position >= self.length)]
        for image in over:
            if image.cancelled or not image.held:
                del self.running[image.slot]
        return [image for image in over if not image.cancelled]
