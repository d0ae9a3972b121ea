"""Faults injected into one process, by the rules of server/fault_rules.py: a decoder that wraps
another.
"""

import random
import time
from collections.abc import Sequence
from typing import Any, cast

from ...fault_rules import Rule, parse
from ..image import Image
from .decoder import Advance, Decoder
from .failures import EngineLost
from .slots import Plan


class InjectedFault(RuntimeError):
    """What an injected fault raises."""


class Faults:
    """The faults of one process, counted over all its models. Used by the engine thread only."""

    def __init__(self, text: str) -> None:
        self._rules, seed = parse(text)
        self.random = random.Random(seed)  # nosec B311  # faults must be repeatable, not unpredictable
        self.quanta = self.requests = 0

    def due(self, seeds: Sequence[int]) -> list[Rule]:
        """The rules that strike in the next quantum, which has the images of these seeds."""
        self.quanta += 1
        return [
            rule for rule in self._rules if rule.kind != "prefill" and rule.due(self.quanta, seeds)
        ]

    def take(self, seeds: Sequence[int]) -> None:
        """Called before slots are given to a request's images. Raises InjectedFault if prefill is
        to fail.
        """
        self.requests += 1
        if any(rule.kind == "prefill" and rule.due(self.requests, seeds) for rule in self._rules):
            raise InjectedFault(f"injected: prefill of request {self.requests}")


def with_faults(decoder: Decoder, faults: Faults) -> Decoder:
    """This decoder, with faults by the rules."""
    return cast(Decoder, _Breaking(decoder, faults))


class _Breaking:
    """Passes everything on to its decoder, and raises faults in between."""

    def __init__(self, decoder: Decoder, faults: Faults) -> None:
        self._decoder, self._faults = decoder, faults
        self._due: list[Rule] = []  # in this quantum
        self._fresh = False  # no run of the quantum has begun
        self._failing: set[int] = set()  # slots at which every run of the quantum raises

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def take(self, images: list[Image]) -> None:
        self._faults.take([image.seed for image in images])
        self._failing.difference_update(image.slot for image in images)
        self._decoder.take(images)

    def keep(self, slots: Sequence[int]) -> None:
        """Called once before each quantum, however often that is run."""
        self._due = self._faults.due(self._decoder.slots.seed[slots].tolist())
        self._fresh, self._failing = True, set()
        self._decoder.keep(slots)

    def quantum(self, plan: Plan) -> Advance:
        slots = plan[:, 0].tolist()
        first, self._fresh = self._fresh, False
        if first:
            self._strike_images(slots)
        kinds, name = {rule.kind for rule in self._due}, f"in quantum {self._faults.quanta}"
        if "lose" in kinds:
            raise EngineLost(f"injected: lose {name}")
        for rule in self._due if first else []:
            while rule.kind == "hang":
                time.sleep(3600)
            if rule.kind == "slow":
                time.sleep(rule.ms / 1e3)
        done = self._decoder.quantum(plan)
        # after the run, which has changed state and sub-pixels: they must be restored before it is
        # run again
        if "broken" in kinds:
            raise InjectedFault(f"injected: broken {name}")
        if "glitch" in kinds and first:
            raise InjectedFault(f"injected: glitch {name}")
        for slot in self._failing.intersection(slots):
            raise InjectedFault(f"injected: throw at slot {slot} {name}")
        return done

    def _strike_images(self, slots: list[int]) -> None:
        """Choose the images of throw and nan. At position 0 a GPU does not read the state, so it
        would not see NaN.
        """
        table = self._decoder.slots
        begun = [slot for slot in slots if table.position[slot]] or slots
        for rule in self._due:
            if rule.kind not in ("throw", "nan"):
                continue
            if rule.when == "image":
                chosen = [slot for slot in slots if table.seed[slot] == rule.number]
            else:
                chosen = [self._faults.random.choice(begun)]
            if rule.kind == "throw":
                self._failing.update(chosen)
                continue
            for slot in chosen:
                self._decoder.pool.fill_with_nan(slot)

    @property
    def saturated(self) -> int:
        """Read after each quantum, where no exception is expected: `die` raises here."""
        if any(rule.kind == "die" for rule in self._due):
            self._due = []
            raise InjectedFault(f"injected: die after quantum {self._faults.quanta}")
        return self._decoder.saturated
