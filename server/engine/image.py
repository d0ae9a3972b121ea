"""An image on its way from the queue to its pixels; whether it is drawn again, and which images are
returned; and the report of what a quantum did to images.

The engine draws images, and checks whether the model recognises their classes. What follows from
that (see model/attempts.py) is not its business: admission, or the command line, calls
`next_or_best` for each image of a report, and the answer, or the command line, `best_of` when all
candidates are drawn.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from linpix.model.attempts import NEXT_ATTEMPT, Recognised

from .job import Job


class State(Enum):
    WAITING = "has no slot yet"
    PREFILL = "in a slot: known tokens before the first unknown one are folded in"
    READING = "in a slot: a conditional model reads all that is known"
    DRAWING = "in a slot: takes steps"
    CHECKING = "in a slot, drawn: the model reads it to see whether it recognises the class"
    DONE = "has left its slot"
    CANCELLED = "was cancelled in its slot, which it has left"


@dataclass(slots=True, eq=False)
class Image:
    """One image of a job, or one attempt at it. Only the engine's thread changes it until it is
    done.
    """

    # fmt: off
    request: str                            # the id under which the engine can cancel it
    job: Job
    index: int                              # among the job's images
    seed: int                               # of this attempt
    label: int | None                       # the class: requested, or drawn by the model
    attempt: int = 1
    best: "Image | None" = None             # of the attempts before
    state: State = State.WAITING
    slot: int = 0
    canvas: NDArray[np.uint8] | None = None  # (T,), when it is done
    recognised: Recognised | None = None    # when it was checked
    retried: bool = False                   # its prefill raised once
    prefill_s: float = 0.0                  # seconds of prefill so far
    # fmt: on

    @property
    def key(self) -> tuple[str, int | None, int]:
        """Images with equal keys differ in their seeds only, so that they share their prefill."""
        return self.request, self.label, self.attempt


def images_of(job: Job, request: str) -> list[Image]:
    return [Image(request, job, index, job.seed + index, job.label) for index in range(job.count)]


def next_or_best(image: Image) -> Image:
    """What follows once an image is done: its next attempt, which has no canvas yet; or the best of
    its attempts, which is returned: if there were several, as a copy that knows how many.
    """
    job, checked, best = image.job, image.recognised, image
    before = None if image.best is None else image.best.recognised
    if image.best is not None and before is not None and checked is not None:
        recognised = checked
        if before.rank >= checked.rank:
            best, recognised = image.best, before
        best = replace(best, recognised=recognised._replace(attempts=image.attempt))
    if (
        image.attempt >= job.attempts
        or checked is None
        or checked.accepted
        or (job.known is not None and job.known.all())
    ):
        return best
    known = job.known is not None and job.known.any()
    # a completion draws its class again, since the last one may not have fitted what is known
    return Image(
        image.request,
        job,
        image.index,
        image.seed + NEXT_ATTEMPT,
        job.label if known else image.label,
        attempt=image.attempt + 1,
        best=best,
    )


def best_of(images: Sequence[Recognised], count: int) -> list[int]:
    """Indices of `count` candidates: of accepted ones, and if they are too few, of the others,
    those of highest rank.

    To take the surest of all would be to take the plainest images of a class. So accepted ones are
    divided among the classes in proportion to their number, by the method of D'Hondt; within a
    class they come in the order of seeds. This is rejection by a classifier (Razavi et al., 2019),
    which here is the model's own.
    """
    able = [index for index, image in enumerate(images) if image.accepted]
    others = sorted(
        set(range(len(images))) - {*able}, key=lambda index: images[index].rank, reverse=True
    )
    votes, before = Counter(images[index].label for index in able), Counter[int]()
    quotients: dict[int, float] = {}
    for index in able:
        before[label := images[index].label] += 1
        quotients[index] = votes[label] / before[label]
    return (sorted(able, key=lambda index: (-quotients[index], index)) + others)[:count]


@dataclass(slots=True)
class Report:
    """What one quantum of one model did."""

    joined: list[Image] = field(default_factory=list)  # that got a slot
    joined_at: float = 0.0  # by time.monotonic
    running: int = 0  # images in slots then
    # images with newly finished image rows, counted from 1, and for streams the canvas, (T,);
    # images that no stream shows come once, with the first rows of their first attempt
    rows: list[tuple[Image, range, NDArray[np.uint8] | None]] = field(default_factory=list)
    finished: list[Image] = field(default_factory=list)
    # by request; FloatingPointError: NaN
    failed: dict[str, Exception] = field(default_factory=dict)
    batch: int = 0  # images decoded in the quantum
    # the most passes through the layers of one image; at least 1 if images were decoded
    passes: int = 0
    subpixels: int = 0  # decoded, of all images together
    seconds: float = 0.0  # of decoding, without prefill
    saturated: int = 0  # elements of state that were clamped
    retries: int = 0  # runs of the quantum after the first
    prefill_s: list[float] = field(default_factory=list)  # seconds of each prefill that ended
