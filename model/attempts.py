"""Drawing an image again, until the model that drew it recognises its class.

A model that draws the class first reads the whole image once it is drawn, with the class head that otherwise tells the
class of an occluded picture. If the class that it drew has a probability below RECOGNISED, the image is drawn again
with other random numbers. The first attempt that is recognised is the answer, or the surest of all. This is rejection
by a classifier (Razavi et al., 2019), which here is the model's own. An image of nothing keeps its class, so classes
are as frequent as without it; a completion draws its class again too, since it may not have fitted what is known.

The random numbers of attempt k are those of the seed plus 2^53 (k - 1), which no request can name: what is drawn
depends on the seed that was asked for, and on no other image.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .philox import MAX_SEED

RECOGNISED = 0.9   # probability of its class from which on an image is taken
MAX_ATTEMPTS = 16  # of an image, and the seeds that are kept for them


class Recognised(NamedTuple):
    """How sure a model is of the class of an image, now that it has read all of it."""

    label: int         # the class that the image was drawn with
    log_prob: float    # of it, in nats
    attempts: int = 1  # of which this is the answer

    @property
    def confidence(self) -> float:
        """Probability of the class."""
        return math.exp(self.log_prob)


@dataclass(slots=True, eq=False)
class Attempts:
    """Of one image, from its first attempt to its answer."""

    seed: int  # that was asked for
    most: int  # attempts
    made: int = 0
    best: Recognised | None = None
    canvas: NDArray[np.uint8] | None = None  # (T,), of the best

    def judge(self, canvas: NDArray[np.uint8], found: Recognised) -> bool:
        """Keep an attempt if it is the best; returns whether another is to be drawn, with `next_seed`. canvas: (T,)."""
        self.made += 1
        if self.best is None or found.log_prob > self.best.log_prob:
            self.canvas, self.best = canvas, found
        self.best = self.best._replace(attempts=self.made)
        return found.log_prob < math.log(RECOGNISED) and self.made < self.most

    @property
    def next_seed(self) -> int:
        return self.seed + (MAX_SEED + 1) * self.made
