"""Which images are returned: the best of several attempts at each (see model/attempts.py), or the best candidates.

The engine draws images, and checks whether the model recognises their classes. What follows from that is decided here,
by whoever receives the engine's reports.
"""

from collections import Counter
from collections.abc import Sequence

from linpix.model.attempts import NEXT_ATTEMPT, Recognised

from .image import Image


def again(image: Image) -> Image | None:
    """The next attempt at an image that is done; None if it is the last one, and `chosen` is to be returned."""
    job, checked = image.job, image.recognised
    if image.attempt >= job.attempts or checked is None or checked.accepted or (
            job.known is not None and job.known.all()):
        return None
    known = job.known is not None and job.known.any()
    # a completion draws its class again, since the last one may not have fitted what is known
    return Image(image.request, job, image.index, image.seed + NEXT_ATTEMPT, job.label if known else image.label,
                 attempt=image.attempt + 1, best=chosen(image))


def chosen(image: Image) -> Image:
    """The best attempt of this one and those before it."""
    best = image.best
    if best is None or image.recognised is None or best.recognised is None:
        return image
    return image if image.recognised.rank > best.recognised.rank else best


def best_of(images: Sequence[Recognised], count: int) -> list[int]:
    """Indices of `count` candidates: of accepted ones, and if they are too few, of the others, the surest first.

    To take the surest of all would be to take the plainest images of a class. So accepted ones are divided among the
    classes in proportion to their number, by the method of D'Hondt; within a class they come in the order of seeds.
    This is rejection by a classifier (Razavi et al., 2019), which here is the model's own.
    """
    able = [index for index, image in enumerate(images) if image.accepted]
    others = sorted(set(range(len(images))) - {*able}, key=lambda index: (-images[index].log_prob, index))
    votes, before = Counter(images[index].label for index in able), Counter[int]()
    quotients: dict[int, float] = {}
    for index in able:
        before[label := images[index].label] += 1
        quotients[index] = votes[label] / before[label]
    return (sorted(able, key=lambda index: (-quotients[index], index)) + others)[:count]
