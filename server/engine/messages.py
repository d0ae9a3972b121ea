"""Messages between the event loop and the engine thread: submissions to the thread, one report per quantum back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from linpix.model.attempts import Recognised

from .decode.image_spec import ImageSpec
from .decode.prefill import Prefilled
from .schedule.passes import Ratios


@dataclass(frozen=True, slots=True)
class Submission:
    """A request's images for the engine thread. The images may differ in seed and temperature only."""

    request: str
    specs: Sequence[ImageSpec]
    bulk: bool = False
    stream: bool = False  # whether image rows are reported as they are finished


@dataclass(frozen=True, slots=True)
class ImageProgress:
    """The progress of one image."""

    request: str
    index: int     # among the request's images
    position: int  # tokens done, known ones included
    left: int      # tokens still to be decoded
    canvas: NDArray[np.uint8] | None = None  # (T,): if it is finished, or streamed with a new image row
    label: int | None = None  # of a finished image: the class requested, or drawn first by the model
    recognised: Recognised | None = None  # of a finished image that the model has judged


@dataclass(frozen=True, slots=True)
class QuantumReport:
    """What one quantum of one model did, and where its images are after it."""

    joined: list[str]         # the request of each image that got a slot
    joined_at: float          # by time.monotonic
    running: list[ImageProgress]   # images in slots after the quantum
    finished: list[ImageProgress]
    failed: dict[str, Exception]  # requests that ended: NotFinite, or what the decoder raised
    overtaken: int            # of the queue, see bulk_is_next
    images: int               # decoded in the quantum
    passes: int               # the most passes through the layers of one image; at least 1 if images were decoded
    subpixels: int            # decoded, of all images together
    seconds: float            # of decoding, without prefill
    cycle_s: float            # since the end of the previous quantum, or since work came
    saturated: int            # elements of state that were clamped
    retries: int              # runs of the quantum after the first
    ratios: Ratios            # for expected_passes
    prefilled: list[Prefilled]  # requests whose images may decode from now on
    judged_s: list[float] = field(default_factory=list)  # seconds to judge each drawn image
    again: int = 0            # images among these that are drawn again
    repeats: float = 0.0      # mean number of times that an image is drawn again
