"""Draw and complete images without a server: for `linpix sample` and `complete`, and for Python."""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tqdm import tqdm

from linpix.model.attempts import Recognised
from linpix.model.checkpoint import find, read
from linpix.model.config import ModelConfig
from linpix.model.team import limit_threads
from linpix.server.engine.attempts import again, best_of, chosen
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.engine import Engine
from linpix.server.engine.decode.failures import NotFinite
from linpix.server.engine.image import Image, Report, images_of
from linpix.server.engine.job import Job, class_of, new_job
from linpix.server.pictures.uploads import Preparation, check_preparable, reduce_and_prepare


@dataclass(frozen=True, slots=True)
class Produced:
    images: list[NDArray[np.uint8]]    # (T,) each, in the order asked for
    seconds: float                     # of decoding, prefills included
    recognised: dict[int, Recognised]  # of images whose class was checked, by index


def produce(engine: Engine, job: Job,
            done: Callable[[int, NDArray[np.uint8]], object] = lambda index, image: None,
            advanced: Callable[[Report], object] = lambda report: None) -> Produced:
    """Draw a job's images, as many at a time as there are slots.

    done is called with each image that is finished, and then advanced with the quantum's report.
    """
    engine.submit(images_of(job, "all"))
    images: dict[int, NDArray[np.uint8]] = {}
    recognised: dict[int, Recognised] = {}
    seconds = 0.0
    while engine.busy:
        began = time.perf_counter()
        report, finished = quantum_of(engine)
        seconds += time.perf_counter() - began
        for image in finished:
            best = chosen(image)
            assert best.canvas is not None
            images[image.index] = best.canvas
            if best.recognised is not None:
                recognised[image.index] = best.recognised._replace(attempts=image.attempt)
            done(image.index, best.canvas)
        advanced(report)
    return Produced([images[index] for index in range(job.images)], seconds, dict(sorted(recognised.items())))


def quantum_of(engine: Engine) -> tuple[Report, list[Image]]:
    """Run one quantum, and draw images again that need it; returns its report, and the images that do not.

    Raises the error that ended an image in it; for NotFinite, with what to do.
    """
    report = engine.run_quantum()
    for error in report.failed.values():
        if isinstance(error, NotFinite):
            raise NotFinite(f"{engine.name} produced NaN or infinite values; try --engine eager or --precision fp32, "
                            "and if that does not help, restore the checkpoint") from error
        raise error
    following = {image: again(image) for image in report.finished}
    engine.submit([image for image in following.values() if image is not None])
    return report, [image for image, further in following.items() if further is None]


def warn(command: str, warnings: Iterable[str]) -> None:
    for warning in warnings:
        print(f"linpix {command}: {warning}", file=sys.stderr)


def _prepared(image: NDArray[np.generic], known: NDArray[np.generic]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Bring a grey picture of any size to MNIST's form; returns it and what of it is known. Raises ValueError."""
    if image.dtype != np.uint8 or image.ndim != 2:
        raise ValueError(f"image must be uint8 of shape (height, width), got {image.dtype} of shape {image.shape}")
    if known.dtype != np.bool_ or known.shape != image.shape:
        raise ValueError(f"known must be bool of shape {image.shape}, true for pixels to keep, got {known.dtype} of "
                         f"shape {known.shape}")
    found = reduce_and_prepare(image.astype(np.uint8), known.astype(np.bool_))
    return found.canvas, found.known


def draw(model: str | Path, count: int, given: tuple[ArrayLike, ArrayLike] | None, prepare: Preparation = "none", *,
         label: int | str | None, batch: int, checkpoints: str | Path | None, progress: bool | None, **options: Any
         ) -> NDArray[np.uint8]:
    """`linpix.sample`, `linpix.complete`. given: an image to complete, and which pixels are known · options: plan's."""
    for name, value in (("count", count), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if prepare not in get_args(Preparation):
        raise ValueError(f"prepare must be none or mnist, got {prepare!r}")
    limit_threads()
    checkpoint = read(find(str(model), None if checkpoints is None else Path(checkpoints)))
    config = checkpoint.net.config
    job = new_job(checkpoint, count, label=class_of(label, checkpoint), **options)
    if given is not None:
        image, known = np.asarray(given[0]), np.asarray(given[1])
        if prepare == "mnist":
            check_preparable(config)
            image, known = _prepared(image, known)
        values, flat = flattened(image, known, config)
        job = replace(job, canvas=np.where(flat, values, np.uint8(0)), known=flat)
    with tqdm(total=job.images, unit="image", disable=None if progress is None else not progress,
              file=sys.stderr) as bar:
        produced = produce(Engine(new_decoder(checkpoint, min(job.images, batch))), job,
                           lambda index, image: bar.update())
    images = produced.images
    if job.candidates:
        images = [images[index] for index in best_of([*produced.recognised.values()], count)]
    return np.stack(images).reshape(count, *config.image_shape)


def flattened(image: NDArray[np.generic], known: NDArray[np.generic], config: ModelConfig
              ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Sub-pixels (T,) of an image of the model's size, and which are known. Raises ValueError."""
    shape = config.image_shape
    if image.dtype != np.uint8 or image.shape != shape:
        raise ValueError(f"image must be uint8 of shape {shape}, the model's, got {image.dtype} of shape {image.shape}")
    if known.dtype != np.bool_ or known.shape != shape[:2]:
        raise ValueError(f"known must be bool of shape {shape[:2]}, true for pixels to keep, got {known.dtype} of "
                         f"shape {known.shape}")
    return image.astype(np.uint8).flatten(), np.repeat(known.astype(np.bool_).flatten(), config.channels)
