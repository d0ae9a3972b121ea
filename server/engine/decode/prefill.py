"""Prefill in pieces between quanta, so that other images go on decoding during a long one.

The known tokens before the first unknown one are folded into a slot, or a conditional model reads
all that is known. To check whether it recognises the class of an image that it has drawn, the model
reads all of that image once more.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from itertools import islice, takewhile

import numpy as np

from ... import logs
from ..image import Image, Report, State
from .decoder import Decoder
from .failures import EngineLost
from .slots import Numbers, slots_of

logger = logging.getLogger("linpix")


class Prefills:
    """Groups of images that have slots and take no steps yet: images of a request that share what
    is known, or one drawn image to be checked. Used by the engine thread only.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._position = decoder, decoder.slots.position
        # images in PREFILL or READING, or one in CHECKING
        self.waiting: deque[list[Image]] = deque()
        # seconds per token in the last piece, of so many groups; 0: none was run yet
        self._token_s, self._groups = 0.0, 1
        # seconds that pieces took beyond their share while other images decode
        self.overdrawn_s = 0.0

    def run(
        self, seconds: float, beat: Callable[[], None], report: Report, *, while_decoding: bool
    ) -> list[Image]:
        """Run pieces for so many seconds, and report requests that raised twice. Raises EngineLost.

        Returns the images that are done with it.

        while_decoding: other images decode. The time that a piece takes beyond its share is then
        taken off the next calls, so that these images get theirs even if a piece is longer than a
        quantum. beat is called before each piece.
        """
        if while_decoding:
            seconds -= self.overdrawn_s
        self.waiting = deque(
            group for group in self.waiting if group[0].state is not State.CANCELLED
        )
        left_s, end, done = seconds, time.perf_counter() + seconds, list[Image]()
        while self.waiting and left_s > 0:
            groups = self._next()
            checking = groups[0][0].state is State.CHECKING
            beat()
            began = time.perf_counter()
            try:
                ended = self._advance(groups, left_s)
            except EngineLost:
                raise
            except Exception as error:
                self._begin_again(groups, error, report)
                ended = []
            spent_s = (time.perf_counter() - began) / len(groups)
            if not checking:
                for group in groups:
                    group[0].prefill_s += spent_s
                report.prefill_s += [group[0].prefill_s for group in ended]
            for group in ended:
                self.waiting.remove(group)
                for image in group:
                    image.state = State.DONE if checking else State.DRAWING
                done += group
            left_s = end - time.perf_counter()
        self.overdrawn_s = max(0.0, -left_s)
        return done

    def _next(self) -> list[list[Image]]:
        """The first group, with those behind it in the same state that the decoder takes in one
        call: of prefills those with as many strides left, of others those before the next state.
        A group whose prefill raised before runs alone.
        """
        first, *others = self.waiting
        state, decoder = first[0].state, self._decoder
        if first[0].retried:
            return [first]

        def alike(group: list[Image]) -> bool:
            return group[0].state is state and not group[0].retried

        if state is State.PREFILL:
            groups = [first, *filter(alike, others)]
            strides = -(-self._tokens_left(groups) // decoder.prefill_stride)
            same = [groups[at] for at in np.flatnonzero(strides == strides[0])]
            return same[: decoder.prefills_together]
        return [first, *islice(takewhile(alike, others), decoder.reads_together - 1)]

    def _tokens_left(self, groups: list[list[Image]]) -> Numbers:
        """Of the prefix that each group shares."""
        prefixes = np.array([group[0].job.prefix for group in groups])
        positions = self._position[[group[0].slot for group in groups]]
        return prefixes // self._decoder.config.token_size - positions

    def _begin_again(self, groups: list[list[Image]], error: Exception, report: Report) -> None:
        """Begin again after an exception; after a second one the request fails."""
        for group in groups:
            first = group[0]
            what_next = " again" if first.retried else "; starting it again"
            logger.exception(
                "prefill of %s raised an exception%s",
                self._decoder.checkpoint.name,
                what_next,
                extra=logs.of(first.request),
            )
            if first.retried:
                report.failed[first.request] = error
                self.waiting.remove(group)
                continue
            first.retried = True
            if first.state is State.PREFILL:
                self._position[first.slot] = 0
            if first.state is not State.CHECKING:
                self._decoder.pool.clear(first.slot)

    def _advance(self, groups: list[list[Image]], left_s: float) -> list[list[Image]]:
        """Run one piece: as many strides of prefixes as fit in left_s, at least one; or read groups
        in another state.

        Returns the groups that are done.
        """
        first, decoder = groups[0][0], self._decoder
        if first.state is State.CHECKING:
            images = [image for [image] in groups]
            judged = decoder.judge(slots_of(images))
            for image, recognised in zip(images, judged, strict=True):
                image.recognised = recognised
            return groups
        if first.state is State.READING:
            decoder.read([slots_of(group) for group in groups])
            return groups
        stride = decoder.prefill_stride
        token_s = self._token_s * max(1.0, len(groups) / self._groups)  # at most
        most = int(left_s / token_s) // stride * stride if token_s else 0
        slots = np.array([group[0].slot for group in groups])
        left = self._tokens_left(groups)
        steps = np.minimum(max(stride, most), left)
        longest = int(steps.max())
        began = time.perf_counter()
        decoder.prefill(slots, self._position[slots], steps)
        if longest >= stride:  # a few tokens cost as much as a stride of them
            self._token_s = (time.perf_counter() - began) / longest
            self._groups = len(groups)
        self._position[slots] += steps
        ended = [groups[at] for at in np.flatnonzero(steps == left)]
        for group in ended:
            own = slots_of(group)
            if own[1:]:
                decoder.copy(own)
            self._position[own] = self._position[own[0]]
        return ended
