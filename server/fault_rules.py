"""Rules for injected faults: the only way in which tests and soak runs break the engine. Off by default.

    --faults ITEM{,ITEM}    where ITEM is KIND:WHEN{:ms=N}, or seed=N

KIND    throw    every run with the chosen image raises, also when it is repeated, until the image's request has ended
        glitch   the quantum's first run raises; when it is run again, it succeeds
        broken   every run of the quantum raises, and so does the run of the test image after it
        nan      the state of the chosen image becomes NaN
        prefill  giving slots to a request's images raises
        hang     the quantum's first run never returns
        slow     the quantum's first run takes N ms longer
        die      the engine thread raises after the quantum, where no exception is expected
        lose     the device that decodes is lost
WHEN    at=N     the N-th quantum of the process, from 1; for prefill: the N-th request
        every=N  each N-th
        from=N   the N-th and all that follow
        image=N  those with the image of seed N, which is then the chosen image; for throw, nan and prefill only

Otherwise the chosen image is random. The item seed=N seeds this choice: the same quanta then have the same faults.
"""

from collections.abc import Collection
from dataclasses import dataclass

KINDS = ("throw", "glitch", "broken", "nan", "prefill", "hang", "slow", "die", "lose")
OF_IMAGES = ("throw", "nan", "prefill")
WHEN = ("at", "every", "from", "image")


@dataclass(frozen=True, slots=True)
class Rule:
    kind: str
    when: str
    number: int
    ms: int = 0

    def due(self, count: int, seeds: Collection[int]) -> bool:
        """Whether the fault occurs in the count-th quantum, or request for prefill, whose images have these seeds."""
        if self.when == "image":
            return self.number in seeds
        return {"at": count == self.number, "every": count % self.number == 0,
                "from": count >= self.number}[self.when]


def parse(text: str) -> tuple[list[Rule], int]:
    """Returns the rules and the seed. Raises ValueError that names the item."""
    rules, seed = [], 0
    for item in text.split(","):
        kind, *pairs = item.strip().split(":")
        values = dict(pair.partition("=")[::2] for pair in pairs)
        if kind.startswith("seed=") and not pairs:
            seed = _integer(item, kind.removeprefix("seed="), 0)
            continue
        if kind not in KINDS:
            raise ValueError(f"{item!r}: expected one of {', '.join(KINDS)}, such as throw:every=100, or seed=N")
        ms = values.pop("ms", None)
        if len(values) != 1 or len(pairs) != len(values) + (ms is not None) or next(iter(values)) not in WHEN:
            raise ValueError(f"{item!r}: give exactly one of {', '.join(f'{when}=N' for when in WHEN)}")
        [(when, number)] = values.items()
        if when == "image" and kind not in OF_IMAGES:
            raise ValueError(f"{item!r}: image works only with {', '.join(OF_IMAGES)}; use at, every or from")
        if (ms is not None) != (kind == "slow"):
            raise ValueError(f"{item!r}: ms works only with slow, and slow needs it, such as slow:every=10:ms=200")
        rules.append(Rule(kind, when, _integer(item, number, 0 if when == "image" else 1),
                          0 if ms is None else _integer(item, ms, 1)))
    return rules, seed


def _integer(item: str, text: str, least: int) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 16 or int(text) < least:
        raise ValueError(f"{item!r:.80}: expected an integer of at least {least}, got {text!r:.40}")
    return int(text)
