"""The choice of a request's answers among the candidates that it has drawn.

With a model that draws the class first, the answers are candidates in which it recognises that class once it has read
the whole image. This is rejection by a classifier (Razavi et al., 2019), which here is the model's own. Answers are
divided among the classes in proportion to their recognised candidates, by the method of D'Hondt; within a class they
come in the order of seeds.

With other models' completions, the answers represent the candidates best. Each candidate i has a weight w_i,
proportional to exp(s_i / TEMPERATURE). Its score s_i is the log-likelihood of the known sub-pixels given what was drawn
before them. A model that draws in raster order did not look at them; weighted, its candidates are draws given all that
is known (importance sampling). The answer is the candidate whose weighted mean distance to all is smallest: a decision
of minimum Bayes risk (Kumar and Byrne, 2004). Further answers are chosen one after the other, each as the candidate
that most lowers the sum of w_i min_j d_ij over the answers j: they differ, and none is chosen twice. d_ij is the sum of
|x_i - x_j|.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from linpix.model.attempts import RECOGNISED, Recognised
from linpix.model.inputs import first_hole

TEMPERATURE = 10.0  # nats; at 1 one weight would be nearly the whole sum, since errors of a model add up over an image


class Likelihoods(NamedTuple):
    """Of a candidate from the first hole on, in nats; what precedes it is the same in all candidates."""

    log_likelihood: float  # of all sub-pixels there
    score: float           # of the known ones


def likelihoods(log_probs: NDArray[np.float32], known: NDArray[np.bool_]) -> Likelihoods:
    """log_probs: (T,), each given all earlier sub-pixels and nothing else · known: (T,)."""
    first = first_hole(known)
    counted, given = log_probs[first:].astype(np.float64), known[first:]
    return Likelihoods(float(counted.sum()), float(counted[given].sum()))


def recognised(images: Sequence[Recognised], count: int) -> list[int]:
    """Indices of `count` images: of recognised ones, and if they are too few, of the others, the surest first.

    To take the surest of all would be to take the plainest images of a class.
    """
    able = [index for index, image in enumerate(images) if image.log_prob >= math.log(RECOGNISED)]
    others = sorted(set(range(len(images))) - {*able}, key=lambda index: (-images[index].log_prob, index))
    votes, given = Counter(images[index].label for index in able), Counter[int]()
    chosen: list[int] = []
    while able and len(chosen) < count:
        index = max(able, key=lambda index: votes[images[index].label] / (1 + given[images[index].label]))
        able.remove(index)
        given[images[index].label] += 1
        chosen.append(index)
    return chosen + others[:count - len(chosen)]


def best(images: Sequence[NDArray[np.uint8]], scores: Sequence[float], count: int) -> list[int]:
    """Indices of `count` of the images, (T,) each, the best first; among equals the first."""
    x, s = np.stack(images), np.array(scores)
    weights = np.exp((s - s.max()) / TEMPERATURE)
    distances = np.zeros((len(x), len(x)))
    for i, one in enumerate(x):  # in bytes: 30 times as fast as in int64, and the sums are exact
        rest = x[i + 1:]
        distances[i, i + 1:] = distances[i + 1:, i] = (np.maximum(rest, one) - np.minimum(rest, one)).sum(1)
    nearest = np.full(len(x), distances.max() + 1)  # from each image to an answer
    chosen: list[int] = []
    for _ in range(count):
        left = (np.minimum(distances, nearest) * weights).sum(1)
        left[chosen] = np.inf
        chosen.append(int(left.argmin()))
        nearest = np.minimum(nearest, distances[chosen[-1]])
    return chosen
