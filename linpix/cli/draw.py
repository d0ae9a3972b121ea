"""Draw and complete images without a server: for `linpix sample` and `complete`, and for Python."""

import contextlib
import numbers
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from linpix.model.attempts import unsure
from linpix.model.checkpoint import Checkpoint, named
from linpix.model.palette import pictures_of
from linpix.model.team import limit_threads
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.engine import Engine
from linpix.server.engine.image import Image, Report, best_of, images_of, next_or_best
from linpix.server.engine.job import Job, checked_options, class_of
from linpix.server.pictures import uploads
from linpix.server.pictures.uploads import Preparation

from .pictures import Images, read_given


def produce(
    engine: Engine,
    job: Job,
    done: Callable[[Image], object] = lambda image: None,
    advanced: Callable[[Report], object] = lambda report: None,
    labels: Sequence[int | None] = (),
) -> tuple[list[Image], float]:
    """Draw a job's images, as many at a time as there are slots.

    Returns them, or the best of candidates, and the seconds of decoding, prefills included. done is
    called with each image that is finished, and then advanced with the quantum's report. labels: of
    each image; none: the job's.
    """
    waiting = images_of(job, "all")
    for image, label in zip(waiting, labels, strict=False):
        image.job, image.label = replace(job, label=label), label
    engine.scheduler.submit(waiting)
    images: dict[int, Image] = {}
    seconds = 0.0
    while engine.busy:
        began = time.perf_counter()
        report, finished = quantum_of(engine)
        seconds += time.perf_counter() - began
        for image in finished:
            images[image.index] = image
            done(image)
        advanced(report)
    drawn = [images[index] for index in range(job.count)]
    if job.candidates:
        checked = [image.recognised for image in drawn if image.recognised is not None]
        drawn = [drawn[index] for index in best_of(checked, job.answers)]
    return drawn, seconds


def pixels_of(images: Iterable[Image]) -> NDArray[np.uint8]:
    """(count, T), of images that are done."""
    return np.stack([image.canvas for image in images if image.canvas is not None])


def quantum_of(engine: Engine) -> tuple[Report, list[Image]]:
    """Run one quantum, and draw images again that need it; returns its report, and of each other
    image that is done the best attempt.

    Raises the error that ended an image in it; for FloatingPointError, with what to do.
    """
    report = engine.run_quantum()
    for error in report.failed.values():
        if isinstance(error, FloatingPointError):
            raise FloatingPointError(
                f"{engine.name} produced NaN or infinite values; try --engine eager or "
                "--precision fp32, and if that does not help, restore the checkpoint"
            ) from error
        raise error
    finished = []
    for image in report.finished:
        following = next_or_best(image)
        if following.canvas is None:
            engine.scheduler.submit([following])
        else:
            finished.append(following)
    return report, finished


def unsure_of(images: Iterable[Image]) -> list[str]:
    """The warning about images of which no attempt was accepted."""
    return unsure(
        {"seed": image.job.seed + image.index, "confident": image.recognised.accepted}
        for image in images
        if image.recognised is not None
    )


def warn(command: str, sentences: Iterable[str]) -> None:
    for warning in sentences:
        print(f"linpix {command}: {warning}", file=sys.stderr)


def warn_caller(sentences: Iterable[str]) -> None:
    """Warn the program that calls a function of linpix, which calls one in `torch_defaults`."""
    for warning in sentences:
        warnings.warn(warning, stacklevel=5)


@contextlib.contextmanager
def torch_defaults() -> Iterator[None]:
    """For calls from a program with settings of its own: float32, no autocast, and torch's random
    numbers stay.
    """
    limit_threads()
    theirs = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        # a mode of torch costs time in each operator
        elsewhere = torch.get_default_device().type != "cpu"
        with (
            torch.random.fork_rng(devices=[]),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
            torch.device("cpu") if elsewhere else contextlib.nullcontext(),
        ):
            yield
    finally:
        torch.set_default_dtype(theirs)


@torch_defaults()
def draw(
    model: str | Path,
    given: tuple[object, object] | None,
    prepare: Preparation = "none",
    *,
    label: Any,
    checkpoints: str | Path | None,
    progress: bool | None,
    **options: Any,
) -> Images:
    """What `linpix.sample` and `linpix.complete` do.

    given: the image to complete, and which of its pixels are known · options: count, batch, and the
    options of checked_options
    """
    _check_numbers(options)
    count, batch = options.pop("count"), options.pop("batch")
    if prepare not in get_args(Preparation):
        raise ValueError(f"prepare must be none or mnist, got {prepare!r}")
    checkpoint = named(model, checkpoints)
    config = checkpoint.net.config
    labels: list[int | None] = []
    if np.ndim(label) == 1:
        labels = [class_of(each, checkpoint) for each in np.asarray(label).tolist()]
        label = None
        if count == 1:
            count = max(1, len(labels))
        if len(labels) != count or options["candidates"] is not None:
            raise ValueError(
                f"a list of labels has one for each image, and goes without candidates; got"
                f" {len(labels)} labels for {count} images"
            )
    options = checked_options(checkpoint, count, label=class_of(label, checkpoint), **options)
    warn_caller(checkpoint.temperature_warnings(options["temperature"]))
    if given is not None:
        upload = read_given(*given, config, preparation=prepare)
        options |= {"canvas": upload.canvas, "known": upload.known}
        warn_caller(uploads.warnings_of(upload, checkpoint))
    job = Job(**options)
    hidden = None if progress is None else not progress  # None: unless on a terminal
    with tqdm(total=job.count, unit="image", disable=hidden, file=sys.stderr) as bar:
        engine = Engine(new_decoder(checkpoint, min(job.count, batch)))
        images, _ = produce(engine, job, lambda image: bar.update(), labels=labels)
    warn_caller(unsure_of(images))
    pictures = pictures_of(pixels_of(images), config)
    if pictures.shape[-1] == 1:
        pictures = pictures[..., 0]
    return Images(
        pictures,
        config,
        [job.seed + image.index for image in images],
        [class_name(image, checkpoint) for image in images],
        [image.recognised and round(image.recognised.confidence, 4) for image in images],
    )


def _check_numbers(options: dict[str, Any]) -> None:
    """Make whole numbers int in place: numpy's have no bit_length. Raises ValueError."""
    for name, value in options.items():
        if value is None:
            continue
        if isinstance(value, numbers.Integral):
            options[name] = int(value)
        elif name == "temperature":
            if not isinstance(value, numbers.Real):
                raise ValueError(f"{name} must be a number, got {value!r}")
        elif name != "attempts":  # which checked_options checks
            raise ValueError(f"{name} must be a whole number, got {value!r}")
    for name in ("count", "batch"):
        if options[name] < 1:
            raise ValueError(f"{name} must be at least 1, got {options[name]}")


def class_name(image: Image, checkpoint: Checkpoint) -> str | None:
    """The name of an image's class; None if it has no class, or the class no name."""
    names = checkpoint.class_names
    if image.label is None or image.label >= len(names):
        return None
    return names[image.label]
