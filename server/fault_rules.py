"""Rules for injected faults: the only way in which tests and soak runs break the engine. Off by
default.

    --faults ITEM{,ITEM}    where ITEM is KIND:WHEN{:ms=N}, or seed=N

KIND    throw    every run with the chosen image raises, also when it is repeated, until the
                 image's request has ended
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
        image=N  those with the image of seed N, which is then the chosen image; for throw, nan
                 and prefill only

Otherwise the chosen image is random. The item seed=N seeds this choice: the same quanta then have
the same faults.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

KINDS = "throw", "glitch", "broken", "nan", "prefill", "hang", "slow", "die", "lose"
OF_IMAGES = "throw", "nan", "prefill"
_RULE = re.compile(
    rf"({'|'.join(KINDS)}):(at|every|from|image)=([0-9]{{1,16}})(?::ms=([1-9][0-9]{{0,15}}))?"
)


@dataclass(frozen=True, slots=True)
class Rule:
    kind: str
    when: str
    number: int
    ms: int = 0

    def due(self, count: int, seeds: Collection[int]) -> bool:
        """Whether the fault occurs in the count-th quantum, or request for prefill, whose images
        have these seeds.
        """
        if self.when == "image":
            return self.number in seeds
        return {
            "at": count == self.number,
            "every": count % self.number == 0,
            "from": count >= self.number,
        }[self.when]


def parse(text: str) -> tuple[list[Rule], int]:
    """Returns the rules and the seed. Raises ValueError that names the item."""
    rules, seed = [], 0
    for item in map(str.strip, text.split(",")):
        if found := re.fullmatch("seed=([0-9]{1,16})", item):
            seed = int(found[1])
            continue
        if found := _RULE.fullmatch(item):
            kind, when, number, ms = found.groups()
            rule = Rule(kind, when, int(number), int(ms or 0))
            if (kind == "slow") == (ms is not None) and (
                kind in OF_IMAGES if when == "image" else rule.number
            ):
                rules.append(rule)
                continue
        raise ValueError(
            f"{item!r:.80}: expected KIND:WHEN=N, such as throw:every=100, or seed=N; KIND is one"
            f" of {', '.join(KINDS)}; WHEN is at, every or from, with N of at least 1, or image,"
            f" only with {', '.join(OF_IMAGES)}; slow, and nothing else, also needs ms, such as"
            " slow:every=10:ms=200"
        )
    return rules, seed
