"""Images that the model judges when they are drawn, and may draw again; see model/attempts.py."""

from dataclasses import replace

from linpix.model.attempts import Attempts

from ..schedule.scheduler import ScheduledImage
from .decoder import Decoder
from .image_spec import ImageSpec
from .prefill import Judged

FORGET = 0.05  # weight of one image in the mean number of redraws


class Judging:
    """The attempts at images that are judged. Used by the engine thread only."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.attempts: dict[int, Attempts] = {}  # by slot, from an image's first attempt to its answer
        self.repeats = 0.0                       # mean redraws of an image that may be drawn again

    def begin(self, image: ScheduledImage, spec: ImageSpec) -> None:
        """An image has got its slot."""
        self.attempts.pop(image.slot, None)  # of an image that was cancelled
        image.held = spec.attempts > 0
        if image.held:
            self.attempts[image.slot] = Attempts(spec.seed, spec.attempts)

    def next_attempt(self, judged: Judged, spec: ImageSpec, position: int) -> ImageSpec | None:
        """The next attempt, to be drawn in an image's slot; None if its answer is known, and it leaves.

        position: where an attempt begins; at the end of the image nothing is left to draw.
        """
        image = judged.image
        attempts = self.attempts[image.slot]
        again = attempts.add(self._decoder.image(image.slot), judged.found)
        if again and position < self._decoder.config.length:
            # a completion draws its class again: the last one may not have fitted what is known
            label = spec.label if self._decoder.conditioned[image.slot] else judged.found.label
            return replace(spec, seed=attempts.next_seed, label=label)
        image.held = False
        if spec.attempts > 1:
            self.repeats += FORGET * (attempts.made - 1 - self.repeats)
        return None
