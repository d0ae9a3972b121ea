"""Attempts at an image: it is drawn again until the model that drew it recognises its class, and it
is not torn.

A model that draws the class first reads the whole image after drawing it, with the class head that
otherwise predicts the class of an occluded picture. If the drawn class has a probability below
RECOGNISED, or below what the checkpoint says is enough, the image is drawn again with other random
numbers. This is rejection by a classifier (Razavi et al., 2019); here the classifier is the model
itself. An almost blank image is drawn again too, and one in several pieces where pictures like it
hardly ever are in several (pieces.py). The answer is the first attempt that is accepted. If there
is none, recognised ones come first, then those in one piece, then the one with the highest
probability. An image drawn from nothing keeps its class, so attempts do not change how frequent the
classes are. A completion draws its class again too, since the first class may not have fitted the
known pixels.

Attempt k uses the random numbers of the seed plus NEXT_ATTEMPT (k - 1), which no request can name.
So an image depends on the requested seed, and on no other image.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .philox import MAX_SEED

RECOGNISED = 0.99  # an image is accepted if its class has at least this probability
MAX_ATTEMPTS = 16  # at one image; each has a seed of its own
NEXT_ATTEMPT = MAX_SEED + 1  # what a further attempt adds to the seed


class Recognised(NamedTuple):
    """What is known of an image after the model has read the whole of it."""

    label: int  # the class that the image was drawn with
    log_prob: float  # log-probability of the class, in nats
    torn: bool = False  # into several pieces
    attempts: int = 1  # attempts made so far
    least: float = 0.0  # of its probability, to be recognised; 0: RECOGNISED

    @property
    def confidence(self) -> float:
        """Probability of the class."""
        return math.exp(self.log_prob)

    @property
    def accepted(self) -> bool:
        """Whether no further attempt is needed."""
        return self.rank[:2] == (True, True)

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Of several attempts the one with the highest rank is the answer."""
        least = math.log(self.least or RECOGNISED)
        return self.log_prob >= least, not self.torn, self.log_prob


def unsure(images: Iterable[Mapping[str, Any]]) -> list[str]:
    """A warning about images of which no attempt was accepted; empty if there are none.

    images: their facts; those that are not confident are named by their seed.
    """
    seeds = [str(facts["seed"]) for facts in images if facts.get("confident") is False]
    if not seeds:
        return []
    return [
        f"unsure of seed {', '.join(seeds)}: the model does not recognise what it drew, or it is"
        " not in one piece; try another seed, or hide less of a completion"
    ]
