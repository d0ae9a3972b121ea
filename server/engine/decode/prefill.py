"""Prefill by pieces of a quantum, so that nobody's decoding stands still while a long one goes on."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ... import logs
from ...errors import EngineLost
from ..schedule.scheduler import ScheduledImage
from .decoder import Decoder

logger = logging.getLogger("linpix")


@dataclass(slots=True, eq=False)
class Prefill:
    """What the rows of a request that joined together share: `length` inputs, of which `position` are folded in.

    read: or all that is known of their image, as one input, for a conditional model to read.
    """

    rows: list[ScheduledImage]
    length: int
    position: int = 0
    read: bool = False
    threw: bool = False  # once, and was begun again
    seconds: float = 0.0  # that its pieces took so far


class Prefilled(NamedTuple):
    """A request whose rows may decode from now on."""

    tokens: int     # that were folded in; 1 for all that a conditional model read
    seconds: float  # that it took


class Prefills:
    """Rows that have slots and may not decode yet, one request after the other. Of the engine thread only."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._waiting: deque[Prefill] = deque()
        self._token_s = 0.0  # of the last piece; 0: none was run yet
        self._overdrawn_s = 0.0  # that pieces took beyond what they were given, beside images that are decoded

    def append(self, rows: list[ScheduledImage], length: int, *, read: bool = False) -> None:
        for row in rows:
            row.prefilled = False
        self._waiting.append(Prefill(rows, 1 if read else length, read=read))

    def clear(self) -> None:
        self._waiting.clear()

    def run(self, seconds: float, beat: Callable[[], None], *, beside: bool
            ) -> tuple[list[Prefilled], dict[str, Exception]]:
        """Go on for so long. Returns requests that are done, and those whose prefill threw, and again from the
        beginning.

        beside: other images are decoded. A piece that takes longer than it was given is then paid back by the next
        quanta, so that they get their share also where a piece is longer than a quantum.
        beat is called before each piece. Raises EngineLost.
        """
        done: list[Prefilled] = []
        failed: dict[str, Exception] = {}
        seconds -= self._overdrawn_s if beside else 0.0
        self._waiting = deque(prefill for prefill in self._waiting if not prefill.rows[0].cancelled)
        left_s, end = seconds, time.perf_counter() + seconds
        while self._waiting and left_s > 0:
            prefill = self._waiting[0]
            first = prefill.rows[0]
            beat()
            began = time.perf_counter()
            try:
                self._advance(prefill, left_s)
            except EngineLost:
                raise
            except Exception as error:
                logger.exception("prefill of %s threw%s", self._decoder.checkpoint.name,
                                 " again" if prefill.threw else ", and is begun again", extra=logs.of(first.request))
                if prefill.threw:
                    failed[first.request] = error
                    self._waiting.popleft()
                else:
                    prefill.position, prefill.threw = 0, True
                    self._decoder.pool.clear(first.slot)
            prefill.seconds += time.perf_counter() - began
            if prefill.position == prefill.length:
                done.append(Prefilled(prefill.length, prefill.seconds))
                self._waiting.popleft()
                for row in prefill.rows:
                    row.prefilled = True
            left_s = end - time.perf_counter()
        self._overdrawn_s = max(0.0, -left_s)
        return done, failed

    def _advance(self, prefill: Prefill, left_s: float) -> None:
        """One piece: as many tokens as fit in so long, in the decoder's own measure."""
        if prefill.read:
            self._decoder.read([row.slot for row in prefill.rows])
            prefill.position = 1
            return
        stride = self._decoder.prefill_stride
        most = int(left_s / self._token_s) // stride * stride if self._token_s else 0
        steps = min(max(stride, most), prefill.length - prefill.position)
        began = time.perf_counter()
        self._decoder.prefill(np.array([prefill.rows[0].slot]), np.array([prefill.position]), np.array([steps]))
        if steps >= stride:  # a few tokens cost as much as a stride of them
            self._token_s = (time.perf_counter() - began) / steps
        if prefill.position + steps == prefill.length:
            self._decoder.copy([row.slot for row in prefill.rows])
        prefill.position += steps
