"""The images that a request or a command draws: its options, checked, and the specification of each image."""

import operator
import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from linpix.model.attempts import MAX_ATTEMPTS
from linpix.model.checkpoint import Checkpoint
from linpix.model.philox import MAX_SEED

from ...errors import OptionError, shown
from ...pictures.pictures import Occluded
from ..decode.image_spec import ImageSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`answers` images, chosen among more if there are candidates."""

    answers: int
    seed: int                     # of the first; the next answer, or candidate, has one more
    temperature: float
    attempts: int                 # as in ImageSpec
    label: int | None = None
    candidates: int | None = None  # the best are the answers; None: all that are drawn

    @property
    def images(self) -> int:
        """How many are drawn."""
        return self.candidates or self.answers

    def spec(self, index: int, canvas: NDArray[np.uint8] | None = None, known: NDArray[np.bool_] | None = None
             ) -> ImageSpec:
        """canvas, known: (T,), of an image to complete."""
        return ImageSpec(seed=self.seed + index, temperature=self.temperature, label=self.label,
                         attempts=self.attempts, canvas=canvas, known=known)

    def specs(self, occluded: Occluded | None = None) -> list[ImageSpec]:
        """Of all images; occluded: the picture to complete."""
        given = () if occluded is None else (occluded.canvas, occluded.known)
        return [self.spec(index, *given) for index in range(self.images)]


def plan(checkpoint: Checkpoint, answers: int, *, label: int | None = None, seed: int | None = None,
         temperature: float | None = None, candidates: int | None = None, attempts: int | None = None,
         limit: int | None = None, able: str | None = "mnist-conditional") -> Plan:
    """Check the options of images, and give those that are None their defaults. Raises OptionError.

    seed: None is a random one · limit: the most images that a request may draw · able: the name of a model that draws
    the class first, if there is one to name.
    """
    if candidates is not None and not answers <= candidates <= (limit or candidates):
        allowed = f"at least {answers}" if limit is None else f"{answers}..{limit} here"
        raise OptionError(f"candidates must be {allowed}, got {shown(candidates)}; the best {answers} are "
                          "returned", "candidates")
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise OptionError(f"temperature must be a number of at least 0, got {temperature}", "temperature")
    if temperature is None:
        temperature = checkpoint.temperature
    if candidates is not None:
        _check_recognises(checkpoint, "candidates", able)
    elif attempts not in (None, 0, 1):
        _check_recognises(checkpoint, "attempts", able)
    return Plan(answers=answers, seed=_first_seed(seed, candidates or answers), temperature=temperature,
                attempts=_attempts(attempts, checkpoint, candidates=candidates, temperature=temperature), label=label,
                candidates=candidates)


def _check_recognises(checkpoint: Checkpoint, option: str, able: str | None) -> None:
    if not checkpoint.net.config.class_first:
        example = f", such as {able}" if able else ""
        raise OptionError(f"{option} need a model that can recognise classes, and {checkpoint.name} cannot; leave "
                          f"out {option}, or use a model that draws the class first{example}", option)


def _first_seed(seed: int | None, count: int) -> int:
    """The seed of the first of so many images; None: a random one. Raises OptionError, or TypeError."""
    largest = MAX_SEED - count + 1
    if seed is None:
        return secrets.randbelow(largest)
    seed = operator.index(seed)  # of numpy, too, whose integers would overflow
    if not 0 <= seed <= largest:
        images = "1 image" if count == 1 else f"{count} images"
        raise OptionError(f"image i uses seed + i, which must be at least 0 and below 2^53: with {images} the "
                          f"largest seed is {largest}, got {seed}", "seed")
    return seed


def class_of(label: int | str | None, checkpoint: Checkpoint) -> int | None:
    """The number of a class that is given by number or name. Raises OptionError, which lists the classes."""
    if label is None:
        return None
    names, found = checkpoint.class_names, checkpoint.class_of(str(label))
    if found is None:
        allowed = f"0..{len(names) - 1} or one of {', '.join(names)}" if names else "none: it has no classes"
        raise OptionError(f"label must be a class of {checkpoint.name}: {allowed}; got {shown(label)}", "label")
    return found


def _attempts(attempts: int | None, checkpoint: Checkpoint, *, candidates: int | None, temperature: float) -> int:
    """ImageSpec.attempts of the images; 0: drawn once, and not judged. Candidates are drawn once, and judged."""
    ranked = candidates is not None
    if attempts is None:
        attempts = 1 if ranked or temperature == 0 else checkpoint.attempts
    if attempts not in range(1, MAX_ATTEMPTS + 1):
        raise OptionError(f"attempts must be 1..{MAX_ATTEMPTS}, got {attempts}", "attempts")
    if attempts == 1:
        return int(ranked)
    if ranked:
        raise OptionError(f"candidates and attempts do not work together, got {candidates} candidates and "
                          f"{attempts} attempts; leave out one of them", "attempts")
    if temperature == 0:
        raise OptionError(f"at temperature 0 all attempts are the same, got {attempts} attempts; leave out "
                          "attempts", "attempts")
    return attempts
