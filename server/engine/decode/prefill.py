"""Prefill in pieces between quanta, so that other images go on decoding during a long one.

To judge an image, and draw it again if the model does not recognise its class, the model reads all of it once more.
This waits in the same queue.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from linpix.model.attempts import Recognised

from ... import logs
from ..schedule.scheduler import ScheduledImage
from .decoder import Decoder
from .failures import EngineLost

logger = logging.getLogger("linpix")


@dataclass(slots=True, eq=False)
class Prefill:
    """Work done once for all images of a request that got their slots together: `length` inputs, `position` done.

    Of kind "prefix" they are the known tokens before the first unknown one. All that a conditional model reads is one
    input, "known", and so is a whole drawn image whose class it is to recognise, "drawn".
    """

    images: list[ScheduledImage]
    length: int
    kind: Literal["prefix", "known", "drawn"] = "prefix"
    position: int = 0
    threw: bool = False  # it raised once, and was begun again
    seconds: float = 0.0  # that its pieces took so far
    found: Recognised | None = None  # when judged


class Prefilled(NamedTuple):
    """A request whose images may decode from now on."""

    tokens: int     # that were folded in; 1 for all that a conditional model read
    seconds: float  # that it took


class Judged(NamedTuple):
    """An image that is drawn, how sure the model is of its class, and the seconds that this took."""

    image: ScheduledImage
    found: Recognised
    seconds: float


@dataclass(slots=True)
class PrefillsRun:
    """What was done in the time of one quantum."""

    done: list[Prefilled] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    failed: dict[str, Exception] = field(default_factory=dict)  # requests that raised, and again when begun again


class Prefills:
    """Images that have slots and may not decode yet, one request after the other. Used by the engine thread only."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._waiting: deque[Prefill] = deque()
        self._token_s = 0.0  # seconds per token in the last piece; 0: none was run yet
        self._overdrawn_s = 0.0  # seconds that pieces took beyond their share while other images decode

    def append(self, images: list[ScheduledImage], length: int, *, read: bool = False) -> None:
        """length: tokens of the prefix · read: the model reads all that is known instead."""
        for image in images:
            image.prefilled = False
        self._waiting.append(Prefill(images, 1, "known") if read else Prefill(images, length))

    def judge(self, image: ScheduledImage) -> None:
        """Have the model judge a drawn image, which takes no steps until then."""
        image.prefilled = False
        self._waiting.append(Prefill([image], 1, "drawn"))

    def clear(self) -> None:
        self._waiting.clear()

    def run(self, seconds: float, beat: Callable[[], None], *, beside: bool) -> PrefillsRun:
        """Run pieces for so many seconds.

        beside: other images decode. The time that a piece takes beyond its share is then taken off the next calls, so
        that these images get theirs even if a piece is longer than a quantum.
        beat is called before each piece. Raises EngineLost.
        """
        result = PrefillsRun()
        seconds -= self._overdrawn_s if beside else 0.0
        self._waiting = deque(prefill for prefill in self._waiting if not prefill.images[0].cancelled)
        left_s, end = seconds, time.perf_counter() + seconds
        while self._waiting and left_s > 0:
            some = self._next()
            beat()
            began = time.perf_counter()
            try:
                self._advance(some, left_s)
            except EngineLost:
                raise
            except Exception as error:
                self._begin_again(some, error, result)
            spent_s = (time.perf_counter() - began) / len(some)
            for prefill in some:
                prefill.seconds += spent_s
                if prefill.position == prefill.length:
                    self._end(prefill, result)
            left_s = end - time.perf_counter()
        self._overdrawn_s = max(0.0, -left_s)
        return result

    def _next(self) -> list[Prefill]:
        """The first prefill; if it is not a prefix, with those behind it that the decoder takes in one call.

        A prefill that raised before runs alone.
        """
        first, *others = self._waiting
        some, most = [first], 1 if first.threw or first.kind == "prefix" else self._decoder.reads_together
        for other in others:
            if len(some) == most or other.threw or other.kind != first.kind:
                break
            some.append(other)
        return some

    def _end(self, prefill: Prefill, result: PrefillsRun) -> None:
        self._waiting.remove(prefill)
        for image in prefill.images:
            image.prefilled = True
        if prefill.found is None:
            result.done.append(Prefilled(prefill.length, prefill.seconds))
        else:
            result.judged.append(Judged(prefill.images[0], prefill.found, prefill.seconds))

    def _begin_again(self, some: list[Prefill], error: Exception, result: PrefillsRun) -> None:
        """Begin again after an exception; after a second one the request fails."""
        for prefill in some:
            request = prefill.images[0].request
            logger.exception("prefill of %s raised an exception%s", self._decoder.checkpoint.name,
                             " again" if prefill.threw else "; starting it again", extra=logs.of(request))
            if prefill.threw:
                result.failed[request] = error
                self._waiting.remove(prefill)
            else:
                prefill.position, prefill.threw = 0, True
                self._decoder.pool.clear(prefill.images[0].slot)

    def _advance(self, some: list[Prefill], left_s: float) -> None:
        """Run one piece: as many strides of a prefix as fit in left_s, at least one; or several of another kind."""
        prefill = some[0]
        if prefill.kind == "drawn":
            for one, found in zip(some, self._decoder.judge([one.images[0].slot for one in some]), strict=True):
                one.found, one.position = found, 1
            return
        if prefill.kind == "known":
            self._decoder.read([[image.slot for image in one.images] for one in some])
            for one in some:
                one.position = 1
            return
        stride = self._decoder.prefill_stride
        most = int(left_s / self._token_s) // stride * stride if self._token_s else 0
        steps = min(max(stride, most), prefill.length - prefill.position)
        began = time.perf_counter()
        self._decoder.prefill(np.array([prefill.images[0].slot]), np.array([prefill.position]), np.array([steps]))
        if steps >= stride:  # a few tokens cost as much as a stride of them
            self._token_s = (time.perf_counter() - began) / steps
        if prefill.position + steps == prefill.length:
            self._decoder.copy([image.slot for image in prefill.images])
        prefill.position += steps
