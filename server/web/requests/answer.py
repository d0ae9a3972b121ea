"""What an answer has of the images drawn: the best of them, as pictures in the requested form, with their facts."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from linpix.model.config import ModelConfig

from ...engine.answers.plan import Plan
from ...engine.answers.ranking import best
from ...engine.ledger.ticket import ImageDone, RowsDone
from ...pictures import encode
from ...pictures.overlay import Overlay
from ...pictures.pictures import Occluded


@dataclass(slots=True, eq=False)
class Answer:
    plan: Plan
    config: ModelConfig
    frame: encode.Frame
    format: encode.Format
    array: bool                     # all pictures are the answer, as one array
    occluded: Occluded | None = None  # the picture to complete, as the model gets it
    kept: Occluded | None = None    # the one that the answer keeps, if more of it is known
    overlay: Overlay | None = None  # the upload, in whose holes the pictures are laid

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, channels) of a picture that is not laid back."""
        return self.frame.height, self.frame.width, self.config.channels

    @property
    def soon(self) -> bool:
        """Whether a picture is encoded in a moment."""
        return self.overlay is None and self.frame.soon

    def best(self, drawn: list[ImageDone]) -> list[ImageDone]:
        """The best of all candidates, the best first."""
        drawn = sorted(drawn, key=lambda image: image.index)
        classes = [image.recognised for image in drawn if image.recognised is not None]
        return [drawn[index] for index in best(classes, self.plan.answers)]

    def facts_of(self, image: RowsDone | ImageDone) -> dict[str, int | float]:
        found: dict[str, int | float] = {"seed": self.plan.seed + image.index}
        if isinstance(image, ImageDone) and (recognised := image.recognised) is not None:
            found |= {"label": recognised.label, "confidence": recognised.confidence}
            if self.plan.attempts > 1:
                found["attempts"] = recognised.attempts
        return found

    def encode(self, canvas: NDArray[np.uint8], rows: int | None) -> bytes:
        """In the requested format and size; for an array, its sub-pixels. `rows` has no effect if it is laid back."""
        canvas = self._with_kept(canvas)
        if self.overlay is None:
            pixels = encode.framed(canvas, self.config, self.frame, rows)
            return pixels.tobytes() if self.array else encode.encoded(pixels, self.format)
        shape = self.config.height, self.config.width, self.config.channels
        return self.overlay.encoded(canvas.reshape(shape), self.format)

    def _with_kept(self, canvas: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return canvas if self.kept is None else np.where(self.kept.known, self.kept.canvas, canvas)
