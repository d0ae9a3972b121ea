"""Attempts at an image: it is drawn again until the model that drew it recognises its class.

A model that draws the class first reads the whole image after drawing it, with the class head that otherwise predicts
the class of an occluded picture. If the drawn class has a probability below RECOGNISED, the image is drawn again with
other random numbers. The answer is the first attempt whose class is recognised, or else the attempt with the highest
probability. This is rejection by a classifier (Razavi et al., 2019); here the classifier is the model itself. An image
drawn from nothing keeps its class, so attempts do not change how frequent the classes are. A completion draws its class
again too, since the first class may not have fitted the known pixels.

Attempt k uses the random numbers of the seed plus 2^53 (k - 1), which no request can name. So an image depends on the
requested seed, and on no other image.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .philox import MAX_SEED

RECOGNISED = 0.9   # an image is accepted if its class has at least this probability
MAX_ATTEMPTS = 16  # at one image; each has a seed of its own


class Recognised(NamedTuple):
    """How sure a model is of the class of an image after reading the whole image."""

    label: int         # the class that the image was drawn with
    log_prob: float    # log-probability of the class, in nats
    attempts: int = 1  # attempts made so far

    @property
    def confidence(self) -> float:
        """Probability of the class."""
        return math.exp(self.log_prob)


@dataclass(slots=True, eq=False)
class Attempts:
    """The attempts at one image, from the first one to the answer."""

    seed: int  # the requested one
    max_attempts: int
    made: int = 0
    best: Recognised | None = None
    canvas: NDArray[np.uint8] | None = None  # (T,), the best attempt's image

    def add(self, canvas: NDArray[np.uint8], found: Recognised) -> bool:
        """Keep an attempt if it is the best; return whether to draw another one, with `next_seed`. canvas: (T,)."""
        self.made += 1
        if self.best is None or found.log_prob > self.best.log_prob:
            self.canvas, self.best = canvas, found
        self.best = self.best._replace(attempts=self.made)
        return found.log_prob < math.log(RECOGNISED) and self.made < self.max_attempts

    @property
    def next_seed(self) -> int:
        return self.seed + (MAX_SEED + 1) * self.made
