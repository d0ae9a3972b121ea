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
from ..decode.particles import MAX_PARTICLES, particle_seed

PARTICLES = 16  # for each answer, by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`answers` images, chosen among more if there are candidates or particles."""

    answers: int
    seed: int                     # of the first; the next answer, or candidate, has one more
    temperature: float
    attempts: int                 # as in ImageSpec
    label: int | None = None
    candidates: int | None = None  # the best are the answers; None: all that are drawn
    particles: int = 0            # drawn for each answer, which is one of them; 0: the method is raster

    @property
    def images(self) -> int:
        """How many are drawn."""
        return (self.candidates or self.answers) * self.group

    @property
    def group(self) -> int:
        """How many images are drawn together: the particles of an answer, or one image alone."""
        return max(1, self.particles)

    @property
    def chooses(self) -> bool:
        """Whether only some of the images drawn are answers."""
        return self.candidates is not None or self.particles > 0

    def seed_of(self, index: int) -> int:
        """The seed, as it can be asked for, of an image that is drawn."""
        return self.seed + index // self.group

    def spec(self, index: int, canvas: NDArray[np.uint8] | None = None, known: NDArray[np.bool_] | None = None
             ) -> ImageSpec:
        """canvas, known: (T,), of an image to complete."""
        seed = self.seed_of(index)
        if self.particles:
            seed = particle_seed(seed, index % self.particles)
        return ImageSpec(seed=seed, temperature=self.temperature, label=self.label, attempts=self.attempts,
                         particles=self.particles, canvas=canvas, known=known)

    def specs(self, occluded: Occluded | None = None) -> list[ImageSpec]:
        """Of all images; occluded: the picture to complete."""
        given = () if occluded is None else (occluded.canvas, occluded.known)
        return [self.spec(index, *given) for index in range(self.images)]


def plan(checkpoint: Checkpoint, answers: int, *, completes: bool, label: int | None = None, seed: int | None = None,
         temperature: float | None = None, candidates: int | None = None, attempts: int | None = None,
         method: str | None = None, particles: int | None = None, limit: int | None = None,
         slots: int | None = None) -> Plan:
    """Check the options of images, and give those that are None their defaults. Raises OptionError.

    completes: whether they complete a picture · seed: None is a random one · limit: the most images that a request may
    draw · slots: the most images that can be drawn at the same time, as the particles of all answers must be.
    """
    if candidates is not None and not answers <= candidates <= (limit or candidates):
        allowed = f"at least {answers}" if limit is None else f"{answers}..{limit} here"
        raise OptionError(f"`candidates` must be {allowed}, got {shown(candidates)}; the best {answers} are "
                          "returned", "candidates")
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise OptionError(f"`temperature` must be a number of at least 0, got {temperature}", "temperature")
    if temperature is None:
        temperature = 1.0 if method == "smc" else checkpoint.temperature
    together = min((one for one in (limit, slots) if one is not None), default=None)
    count = _particles(method, particles, candidates=candidates, temperature=temperature, answers=answers,
                       limit=together)
    if candidates is not None and not completes and not checkpoint.net.config.class_first:
        raise OptionError("`candidates` of generations need a model that can recognise classes, and "
                          f"{checkpoint.name} cannot; leave out `candidates`, or use a model that draws the class "
                          "first, such as mnist-conditional", "candidates")
    return Plan(answers=answers, seed=_first_seed(seed, candidates or answers), temperature=temperature,
                attempts=_attempts(attempts, checkpoint, candidates=candidates, temperature=temperature), label=label,
                candidates=candidates, particles=count)


def _first_seed(seed: int | None, count: int) -> int:
    """The seed of the first of so many images; None: a random one. Raises OptionError, or TypeError."""
    largest = MAX_SEED - count + 1
    if seed is None:
        return secrets.randbelow(largest)
    seed = operator.index(seed)  # of numpy, too, whose integers would overflow
    if not 0 <= seed <= largest:
        images = "1 image" if count == 1 else f"{count} images"
        raise OptionError(f"image i uses `seed` + i, which must be at least 0 and below 2^53: with {images} the "
                          f"largest `seed` is {largest}, got {seed}", "seed")
    return seed


def class_of(label: int | str | None, checkpoint: Checkpoint) -> int | None:
    """The number of a class that is given by number or name. Raises OptionError, which lists the classes."""
    if label is None:
        return None
    names, found = checkpoint.class_names, checkpoint.class_of(str(label))
    if found is None:
        allowed = f"0..{len(names) - 1} or one of {', '.join(names)}" if names else "none: it has no classes"
        raise OptionError(f"`label` must be a class of {checkpoint.name}: {allowed}; got {shown(label)}", "label")
    return found


def _attempts(attempts: int | None, checkpoint: Checkpoint, *, candidates: int | None, temperature: float) -> int:
    """ImageSpec.attempts of the images; 0: drawn once, and not judged."""
    ranked = candidates is not None
    if attempts is None:
        attempts = 1 if ranked or temperature == 0 else checkpoint.attempts
    if attempts not in range(1, MAX_ATTEMPTS + 1):
        raise OptionError(f"`attempts` must be 1..{MAX_ATTEMPTS}, got {attempts}", "attempts")
    if attempts == 1:
        return int(ranked and checkpoint.net.config.class_first)  # these candidates are judged
    if not checkpoint.net.config.class_first:
        raise OptionError(f"`attempts` need a model that can recognise classes, and {checkpoint.name} cannot; leave "
                          "out `attempts`, or use a model that draws the class first, such as "
                          "mnist-conditional", "attempts")
    if ranked:
        raise OptionError(f"`candidates` and `attempts` do not work together, got {candidates} candidates and "
                          f"{attempts} attempts; leave out one of them", "attempts")
    if temperature == 0:
        raise OptionError(f"at temperature 0 all attempts are the same, got {attempts} attempts; leave out "
                          "`attempts`", "attempts")
    return attempts


def _particles(method: str | None, particles: int | None, *, candidates: int | None, temperature: float,
               answers: int, limit: int | None) -> int:
    """How many particles an answer gets, 0 if its method is raster. limit: the most particles of all answers."""
    if method not in (None, "raster", "smc"):
        raise OptionError(f"`method` must be raster or smc, got {method!r}", "method")
    if method is None and particles is not None:  # with raster they may be given: a form may send all its fields
        raise OptionError(f"`particles` work only with `method=smc`, got {particles} and no `method`; leave out "
                          "`particles`", "particles")
    if method != "smc":
        return 0
    if candidates is not None:
        raise OptionError(f"`method=smc` chooses among particles, not candidates, got {candidates}; leave out "
                          "`candidates`", "candidates")
    if temperature != 1:
        raise OptionError(f"`method=smc` always draws at temperature 1, got {temperature:g}; leave out "
                          "`temperature`", "temperature")
    count = particles if particles is not None else PARTICLES if limit is None else min(PARTICLES, limit // answers)
    if limit is not None and not 2 <= count <= limit // answers:
        raise OptionError(f"`particles` must be at least 2, and n times particles must be at most {limit} here, got "
                          f"{count} particles and n={answers}", "particles")
    if not 2 <= count <= MAX_PARTICLES:
        raise OptionError(f"`particles` must be 2..{MAX_PARTICLES}, got {count}", "particles")
    return count
