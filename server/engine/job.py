"""A job: what a request or a command asks for, checked. It decides every pixel, and can be sent to
another process.
"""

import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linpix.model.attempts import MAX_ATTEMPTS
from linpix.model.checkpoint import Checkpoint, folded
from linpix.model.inputs import first_hole
from linpix.model.philox import MAX_SEED
from linpix.model.provenance import MAX_TEMPERATURE

from ..errors import InvalidRequest, shown

# Other words for classes of MNIST and CIFAR-10. A model whose classes have other names understands
# only these names.
SYNONYMS = {
    "0": "zero nought",
    "1": "one",
    "2": "two",
    "3": "three",
    "4": "four",
    "5": "five",
    "6": "six",
    "7": "seven",
    "8": "eight",
    "9": "nine",
    "airplane": "aeroplane plane aircraft jet airliner",
    "automobile": "car auto sedan",
    "bird": "birdie sparrow",
    "cat": "kitten kitty tomcat",
    "deer": "stag doe fawn reindeer",
    "dog": "puppy hound doggy",
    "frog": "toad treefrog",
    "horse": "pony foal mare stallion",
    "ship": "boat vessel ferry steamer yacht",
    "truck": "lorry",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """Images of one model to be drawn, which differ in their seeds only; or a picture to be
    scored.
    """

    # fmt: off
    model: str = ""
    count: int = 1                          # images to draw; image i has the seed `seed` + i
    answers: int = 1                        # images to return: all, or the best of `count`
    candidates: bool = False
    seed: int = 0
    temperature: float = 1.0
    label: int | None = None                # None: unconditional, or drawn by the model
    attempts: int = 1                       # largest number of attempts at an image
    canvas: NDArray[np.uint8] | None = None  # (T,), with `known` if it is to be completed or scored
    known: NDArray[np.bool_] | None = None  # (T,)
    labels: Sequence[int | None] | None = None  # to score under; None: Scoring's default
    plausible: bool = False                 # score it under plausible classes only
    scored: bool = False                    # the picture is scored, and nothing is drawn
    look: tuple[int, int] | None = None     # layer and head to look into: not scored, but looked at
    bulk: bool = False                      # it gets one slot in four while others wait
    stream: bool = False                    # each finished image row is sent
    # fmt: on

    @property
    def prefix(self) -> int:
        """Known sub-pixels before the first unknown one: they are prefilled or read, not
        decoded.
        """
        return 0 if self.known is None else first_hole(self.known)


def checked_options(
    checkpoint: Checkpoint,
    answers: int,
    *,
    label: int | None = None,
    seed: int | None = None,
    temperature: float | None = None,
    candidates: int | None = None,
    attempts: int | None = None,
    limit: int | None = None,
    able: str | None = "mnist-conditional",
) -> dict[str, Any]:
    """Check the options of images, and give those that are None their defaults: arguments of Job.
    Raises InvalidRequest, or TypeError.

    seed: None is a random one · candidates: draw so many, and return the best · limit: the most
    images that a request may draw · able: the name of a model that draws the class first, if there
    is one to name.
    """
    if candidates is not None and not answers <= candidates <= (limit or candidates):
        allowed = f"at least {answers}" if limit is None else f"{answers}..{limit} here"
        raise InvalidRequest(
            f"candidates must be {allowed}, got {shown(candidates)}; the best {answers} are "
            "returned",
            param="candidates",
        )
    if temperature is not None and not 0 <= temperature <= MAX_TEMPERATURE:
        raise InvalidRequest(
            f"temperature must be a number from 0 to {MAX_TEMPERATURE:g}, got {temperature}",
            param="temperature",
        )
    if temperature is None:
        temperature = checkpoint.temperature
    option = (
        "candidates"
        if candidates is not None
        else "attempts"
        if attempts not in (None, 0, 1)
        else None
    )
    if option and not checkpoint.net.config.class_first:
        example = f", such as {able}" if able else ""
        raise InvalidRequest(
            f"{option} need a model that can recognise classes, and {checkpoint.name} cannot; leave"
            f" out {option}, or use a model that draws the class first{example}",
            param=option,
        )
    count = candidates or answers
    largest = MAX_SEED - count + 1
    # numpy's integers would overflow
    seed = secrets.randbelow(largest) if seed is None else operator.index(seed)
    if not 0 <= seed <= largest:
        images = "1 image" if count == 1 else f"{count} images"
        raise InvalidRequest(
            f"image i uses seed + i, which must be at least 0 and below 2^53: with {images} the "
            f"largest seed is {largest}, got {seed}",
            param="seed",
        )
    if attempts is None:
        attempts = 1 if candidates is not None or temperature == 0 else checkpoint.attempts
    if attempts not in range(1, MAX_ATTEMPTS + 1):
        raise InvalidRequest(
            f"attempts must be 1..{MAX_ATTEMPTS}, got {attempts}", param="attempts"
        )
    if attempts > 1 and candidates is not None:
        raise InvalidRequest(
            f"candidates and attempts do not work together, got {candidates} candidates and "
            f"{attempts} attempts; leave out one of them",
            param="attempts",
        )
    if attempts > 1 and temperature == 0:
        raise InvalidRequest(
            f"at temperature 0 further attempts draw the same image of a class, got {attempts} "
            "attempts; leave out attempts",
            param="attempts",
        )
    return {
        "model": checkpoint.name,
        "count": count,
        "answers": answers,
        "candidates": candidates is not None,
        "seed": seed,
        "temperature": temperature,
        "label": label,
        "attempts": attempts,
    }


def class_of(label: int | str | None, checkpoint: Checkpoint) -> int | None:
    """The number of a class that is given by number, name or synonym. Raises InvalidRequest, which
    lists the classes.
    """
    if label is None:
        return None
    names, number = checkpoint.class_names, checkpoint.class_of(str(label))
    if number is None:
        word = folded(str(label))
        known = [name for name in names if word in SYNONYMS.get(name, "").split()]
        number = names.index(known[0]) if known else None
    if number is None:
        allowed = (
            f"0..{len(names) - 1} or one of {', '.join(names)}"
            if names
            else "none: it has no classes"
        )
        raise InvalidRequest(
            f"label must be a class of {checkpoint.name}: {allowed}; got {shown(label)}",
            param="label",
        )
    return number


def label_of(number: int, checkpoint: Checkpoint) -> int | str:
    """What names a class to `class_of`: its number, or its name if that number is another class's
    name.
    """
    return number if checkpoint.class_of(str(number)) == number else checkpoint.class_names[number]
