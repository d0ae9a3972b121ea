"""Faults on purpose: the one seam through which tests and soak runs break the engine. Off unless it is asked for.

    --faults ITEM{,ITEM}    where ITEM is KIND:WHEN{:ms=N}, or seed=N

KIND    throw    a run with the row chosen raises, however often it is run again, until its request is over
        glitch   the quantum's first run raises; when it is run again all is well
        broken   every run of the quantum raises, and that of the probe image after it
        nan      the state of the row chosen becomes NaN
        prefill  giving slots to a request's images raises
        hang     the quantum's first run never returns
        slow     the quantum's first run takes N ms longer
        die      the engine thread raises after the quantum, where nothing expects it
        lose     the device that decodes is gone
WHEN    at=N     the N-th quantum of the process, from 1; of prefill: the N-th request
        every=N  each N-th
        from=N   the N-th and all that follow
        image=N  those with the image of seed N, which is then the row chosen: of throw, nan and prefill

Which row is chosen else, the item seed=N decides. The same quanta then have the same faults.
"""

import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from server.errors import EngineLost
from server.scheduler import Row

KINDS = ("throw", "glitch", "broken", "nan", "prefill", "hang", "slow", "die", "lose")
OF_IMAGES = ("throw", "nan", "prefill")
WHEN = ("at", "every", "from", "image")


class InjectedFault(RuntimeError):
    """What an injected fault raises."""


@dataclass(frozen=True, slots=True)
class Rule:
    kind: str
    when: str
    number: int
    ms: int = 0

    def due(self, count: int, seeds: Collection[int]) -> bool:
        """Whether it strikes in the count-th quantum, which has the images of these seeds."""
        if self.when == "image":
            return self.number in seeds
        return {"at": count == self.number, "every": count % self.number == 0,
                "from": count >= self.number}[self.when]


def parse(text: str) -> tuple[list[Rule], int]:
    """The rules, and the seed. Raises ValueError that names the item."""
    rules, seed = [], 0
    for item in text.split(","):
        kind, *pairs = item.strip().split(":")
        values = dict(pair.partition("=")[::2] for pair in pairs)
        if kind.startswith("seed=") and not pairs:
            seed = _integer(item, kind.removeprefix("seed="), 0)
            continue
        if kind not in KINDS:
            raise ValueError(f"{item!r}: a fault is one of {', '.join(KINDS)}, such as throw:every=100, or seed=N")
        ms = values.pop("ms", None)
        if len(values) != 1 or len(pairs) != len(values) + (ms is not None) or next(iter(values)) not in WHEN:
            raise ValueError(f"{item!r}: say once when, as one of {', '.join(f'{when}=N' for when in WHEN)}")
        [(when, number)] = values.items()
        if when == "image" and kind not in OF_IMAGES:
            raise ValueError(f"{item!r}: image goes with {', '.join(OF_IMAGES)}; use at, every or from")
        if (ms is not None) != (kind == "slow"):
            raise ValueError(f"{item!r}: ms is what slow wants, and no other: slow:every=10:ms=200")
        rules.append(Rule(kind, when, _integer(item, number, 0 if when == "image" else 1),
                          0 if ms is None else _integer(item, ms, 1)))
    return rules, seed


def _integer(item: str, text: str, least: int) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 16 or int(text) < least:
        raise ValueError(f"{item!r:.80}: expected an integer of at least {least}, got {text!r:.40}")
    return int(text)


class Faults:
    """What is to go wrong in one process. Of the engine thread only."""

    def __init__(self, text: str) -> None:
        self._rules, seed = parse(text)
        self._random = random.Random(seed)  # nosec B311  # faults are to come again, not to be unforeseeable
        self._quanta = self._requests = 0
        self._due: list[Rule] = []         # in this quantum
        self._sick: set[Row] = set()       # rows that throw
        self._fresh = self._first = False  # no run of it has begun; the one under way is its first

    def take(self, seeds: Sequence[int]) -> None:
        """Before slots are given to a request's images."""
        self._requests += 1
        if any(rule.kind == "prefill" and rule.due(self._requests, seeds) for rule in self._rules):
            raise InjectedFault(f"injected: prefill of request {self._requests}")

    def begin(self, rows: Sequence[Row], seeds: Sequence[int], poison: Callable[[int], None]) -> None:
        """Before a quantum of these rows, with each one's seed; poison fills a slot's state with NaN."""
        self._quanta += 1
        self._due = [rule for rule in self._rules if rule.kind != "prefill" and rule.due(self._quanta, seeds)]
        self._sick, self._fresh = set(), True
        begun = [row for row in rows if row.position] or rows  # at position 0 a GPU finds an empty state
        for rule in self._due:
            if rule.kind in ("throw", "nan"):
                chosen = ([row for row, seed in zip(rows, seeds, strict=True) if seed == rule.number]
                          if rule.when == "image" else [self._random.choice(begun)])
                for row in chosen:
                    if rule.kind == "nan":
                        poison(row.slot)
                    else:
                        self._sick.add(row)

    def run(self) -> None:
        """Before a run of a quantum, its first or another."""
        self._first, self._fresh = self._fresh, False
        for rule in self._due:
            if rule.kind == "lose":
                raise EngineLost(f"injected: lose in quantum {self._quanta}")
            while self._first and rule.kind == "hang":
                time.sleep(3600)
            if self._first and rule.kind == "slow":
                time.sleep(rule.ms / 1e3)

    def ran(self, rows: Iterable[Row]) -> None:
        """After a run, which has changed state and bytes: so whoever runs it again needs them as they were."""
        kinds = {rule.kind for rule in self._due}
        if "broken" in kinds or ("glitch" in kinds and self._first):
            raise InjectedFault(f"injected: {'broken' if 'broken' in kinds else 'glitch'} in quantum {self._quanta}")
        for row in self._sick.intersection(rows):
            raise InjectedFault(f"injected: throw at slot {row.slot} in quantum {self._quanta}")

    def end(self) -> None:
        """After a quantum."""
        if any(rule.kind == "die" for rule in self._due):
            raise InjectedFault(f"injected: die after quantum {self._quanta}")
