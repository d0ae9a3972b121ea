"""The choice of a request's answers among the candidates that it has drawn.

The answers are candidates in which the model recognises the class that it drew first, once it has read the whole image.
This is rejection by a classifier (Razavi et al., 2019), which here is the model's own. Answers are divided among the
classes in proportion to their recognised candidates, by the method of D'Hondt; within a class they come in the order of
seeds.
"""

import math
from collections import Counter
from collections.abc import Sequence

from linpix.model.attempts import RECOGNISED, Recognised


def best(images: Sequence[Recognised], count: int) -> list[int]:
    """Indices of `count` images: of recognised ones, and if they are too few, of the others, the surest first.

    To take the surest of all would be to take the plainest images of a class.
    """
    able = [index for index, image in enumerate(images) if image.log_prob >= math.log(RECOGNISED)]
    others = sorted(set(range(len(images))) - {*able}, key=lambda index: (-images[index].log_prob, index))
    votes, before = Counter(images[index].label for index in able), Counter[int]()
    quotients: dict[int, float] = {}
    for index in able:
        before[label := images[index].label] += 1
        quotients[index] = votes[label] / before[label]
    return (sorted(able, key=lambda index: (-quotients[index], index)) + others)[:count]
