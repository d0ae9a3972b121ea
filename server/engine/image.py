"""An image on its way from the queue to its pixels, and the report of what a quantum did to images."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from linpix.model.attempts import Recognised

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
    """One image of a job, or one attempt at it. Only the engine's thread changes it until it is done."""

    request: str              # the id under which the engine can cancel it
    job: Job
    index: int                # among the job's images
    seed: int                 # of this attempt
    label: int | None         # the class: requested, or drawn by the model
    attempt: int = 1
    best: "Image | None" = None  # of the attempts before
    state: State = State.WAITING
    slot: int = 0
    canvas: NDArray[np.uint8] | None = None  # (T,), when it is done
    recognised: Recognised | None = None     # when it was checked
    retried: bool = False     # its prefill raised once
    prefill_s: float = 0.0    # seconds of prefill so far

    @property
    def key(self) -> tuple[str, int | None, int]:
        """Images with equal keys differ in their seeds only, so that they share their prefill."""
        return self.request, self.label, self.attempt


def images_of(job: Job, request: str) -> list[Image]:
    return [Image(request, job, index, job.seed + index, job.label) for index in range(job.count)]


@dataclass(slots=True)
class Report:
    """What one quantum of one model did."""

    joined: list[Image] = field(default_factory=list)    # that got a slot
    joined_at: float = 0.0   # by time.monotonic
    # images with newly finished image rows, counted from 1, and for streams the canvas, (T,); images that no stream
    # shows come once, with the first rows of their first attempt
    rows: list[tuple[Image, range, NDArray[np.uint8] | None]] = field(default_factory=list)
    finished: list[Image] = field(default_factory=list)
    failed: dict[str, Exception] = field(default_factory=dict)  # by request; FloatingPointError: NaN
    batch: int = 0           # images decoded in the quantum
    passes: int = 0          # the most passes through the layers of one image; at least 1 if images were decoded
    subpixels: int = 0       # decoded, of all images together
    seconds: float = 0.0     # of decoding, without prefill
    saturated: int = 0       # elements of state that were clamped
    retries: int = 0         # runs of the quantum after the first
    prefill_s: list[float] = field(default_factory=list)  # seconds of each prefill that ended
