"""The specification of one image."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from linpix.model.config import ModelConfig
from linpix.model.inputs import first_hole


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """Everything that decides an image's sub-pixels."""

    seed: int
    temperature: float = 1.0
    label: int | None = None               # None: the unconditional start
    canvas: NDArray[np.uint8] | None = None  # (T,), with `known` if an image is to be completed
    known: NDArray[np.bool_] | None = None   # (T,)
    attempts: int = 0                      # the most, until the model recognises its class; 0: it is not judged

    @property
    def prefix(self) -> int:
        """Known sub-pixels before the first unknown one: they are prefilled or read, not decoded."""
        return 0 if self.known is None else first_hole(self.known)

    def known_tokens(self, config: ModelConfig) -> int:
        """Tokens that need no step: all known ones, if the model reads them first; else those before the first hole."""
        read = int(self.known.sum()) if self.known is not None and config.patch else self.prefix
        return read // config.token_size

    def known_rows(self, config: ModelConfig) -> int:
        """Whole image rows that are known from the start."""
        return self.prefix // (config.width * config.channels)
