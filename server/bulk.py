"""Images without HTTP: the same scheduler and engine, turned in this thread."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from server.batcher import Batcher
from server.engine import ImageSpec


@dataclass(frozen=True, slots=True)
class Produced:
    images: list[NDArray[np.uint8]]  # (T,) each, in the order asked for
    seconds: float                   # of decoding, from the first slot taken to the last image done


def produce(batcher: Batcher, specs: Sequence[ImageSpec],
            progress: Callable[[int], object] = lambda _: None) -> Produced:
    """Make one image per spec, as many at a time as there are slots. progress hears of each finished image.

    Specs may differ in seed and temperature only.
    """
    request = "bulk"
    batcher.admit(request, len(specs))
    batcher.enqueue(request, specs)
    images: dict[int, NDArray[np.uint8]] = {}
    began = time.perf_counter()
    while batcher.busy:
        for row in batcher.turn().finished:
            images[row.index] = batcher.engine.image(row.slot)
            progress(1)
    return Produced([images[index] for index in range(len(specs))], time.perf_counter() - began)
