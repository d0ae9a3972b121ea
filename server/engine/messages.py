"""What the event loop and the engine thread tell each other: submissions down, one report a quantum up."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from linpix.model.attempts import Recognised

from .decode.decoder import ImageSpec
from .decode.particles import Estimate
from .decode.prefill import Prefilled
from .schedule.passes import Ratios


@dataclass(frozen=True, slots=True)
class Submission:
    """A request's images for the engine thread. They may differ in seed and temperature only."""

    request: str
    specs: Sequence[ImageSpec]
    bulk: bool = False
    stream: bool = False  # whether its image rows are wanted as they are finished


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one image is."""

    request: str
    index: int     # among the request's images
    position: int  # tokens done, known ones included
    left: float    # passes through the layers that it still needs, as far as one can tell
    canvas: NDArray[np.uint8] | None = None  # (T,): of a finished image, or of a stream's with a new image row
    label: int | None = None  # of a finished image: the class that was asked for, or that the model drew first
    estimate: Estimate | None = None  # of a finished particle: it is the answer
    recognised: Recognised | None = None  # of a finished image that was looked at


@dataclass(frozen=True, slots=True)
class QuantumReport:
    """What one quantum of one model did, and what it left."""

    joined: list[str]         # a request for each image that got a slot
    joined_at: float          # of time.monotonic
    running: list[Progress]   # images in slots after it
    finished: list[Progress]
    failed: dict[str, Exception]  # requests that are over: NotFinite, or what the decoder raised
    overtaken: int            # of the queue, as for bulk_is_next
    images: int               # in the quantum
    steps: int                # passes through the layers, of the image with most of them; at least 1 if there are any
    subpixels: int            # of all images
    seconds: float            # of decoding, without prefill
    cycle_s: float            # from the end of the quantum before, or from waking up
    saturated: int            # elements of state that were clamped
    retries: int              # runs of the quantum after the first
    ratios: Ratios            # for expected_passes
    prefilled: list[Prefilled]  # requests whose images may decode from now on
    looks: list[float] = field(default_factory=list)  # seconds of each look at a drawn image
    again: int = 0            # images of these that are drawn again
    repeats: float = 0.0      # times that an image is drawn again, on average
