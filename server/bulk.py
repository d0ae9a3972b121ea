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
    seconds: float                   # of decoding, prefills included


def produce(batcher: Batcher, specs: Sequence[ImageSpec],
            done: Callable[[int, NDArray[np.uint8]], object] = lambda index, image: None) -> Produced:
    """Make one image per spec, as many at a time as there are slots. done hears of each as it is finished.

    Specs may differ in seed and temperature only.
    """
    request = "bulk"
    batcher.admit(request, len(specs))
    batcher.enqueue(request, specs)
    images: dict[int, NDArray[np.uint8]] = {}
    seconds = 0.0
    while batcher.busy:
        began = time.perf_counter()
        turn = batcher.turn()
        seconds += time.perf_counter() - began
        for row in turn.finished:
            images[row.index] = batcher.engine.image(row.slot)
            done(row.index, images[row.index])
    return Produced([images[index] for index in range(len(specs))], seconds)
