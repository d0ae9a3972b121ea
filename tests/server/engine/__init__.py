"""Images given to an engine without a server, and what becomes of them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from linpix.model.attempts import Recognised
from linpix.server.engine.decode.decoder import Decoder
from linpix.server.engine.decode.engine import Engine
from linpix.server.engine.image import Image, Report, next_or_best
from linpix.server.engine.job import Job


class Drawn(NamedTuple):
    """An image as a request gets it."""

    request: str
    index: int
    canvas: NDArray[np.uint8]
    label: int | None
    recognised: Recognised | None


class Ran(NamedTuple):
    """A quantum: its report, images that need no further attempt, and how many do."""

    report: Report
    finished: list[Drawn]
    again: int


class Ended(NamedTuple):
    """Pixels by request and index, requests that failed, and how many quanta were run again."""

    images: dict[tuple[str, int], NDArray[np.uint8]]
    failed: dict[str, Exception]
    retried: int


def images(jobs: Sequence[Job], request: str = "a") -> list[Image]:
    """An image of each job: a request may have images that differ in more than their seeds here."""
    return [Image(request, job, index, job.seed, job.label) for index, job in enumerate(jobs)]


def take(decoder: Decoder, slot: int, job: Job) -> None:
    """Give a slot to an image, without a scheduler."""
    [image] = images([job])
    image.slot = slot
    decoder.take([image])


def submit(engine: Engine, request: str, jobs: Sequence[Job]) -> list[Image]:
    new = images(jobs, request)
    engine.scheduler.submit(new)
    return new


def finish(engine: Engine) -> Ended:
    """Run quanta until nothing is left to do."""
    images, failed, retried = {}, {}, 0
    while engine.busy:
        report = engine.run_quantum()
        failed |= report.failed
        retried += report.retries > 0
        images |= {(image.request, image.index): image.canvas for image in report.finished}
    return Ended(images, failed, retried)


def drawn(engine: Engine, *requests: Sequence[Job]) -> list[NDArray[np.uint8]]:
    """The images of requests that come together, (count, T) each."""
    for number, jobs in enumerate(requests):
        submit(engine, str(number), jobs)
    images, failed, _ = finish(engine)
    assert not failed
    return [
        np.stack([images[str(number), index] for index in range(len(jobs))])
        for number, jobs in enumerate(requests)
    ]


def run(engine: Engine) -> Ran:
    """Run a quantum, and begin further attempts as admission does."""
    report, finished, further = engine.run_quantum(), [], []
    for image in report.finished:
        best = next_or_best(image)
        if best.canvas is None:
            further.append(best)
            continue
        finished.append(Drawn(image.request, image.index, best.canvas, best.label, best.recognised))
    engine.scheduler.submit(further)
    return Ran(report, finished, len(further))
