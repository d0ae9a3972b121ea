"""Sequential Monte Carlo: how a model that draws in raster order completes a picture from all that is known of it.

A particle is an image that is drawn like any other. Its weight is the probability that the model gave to the known
sub-pixels that it has passed since the first hole. At the end of an image row, if the weights have become too uneven,
the particles are resampled by weight: unlikely ones end, likely ones go on as several, and all weights are equal again.
The answer is one of the particles at the end, drawn by weight. The more particles there are, the closer is its
distribution to that of the hidden sub-pixels given all known ones.

This is the bootstrap filter with systematic resampling by need (Doucet and Johansen, "A tutorial on particle filtering
and smoothing: fifteen years later", 2009). It resamples only at the ends of image rows, so that an answer depends
on its seed, and not on the length of quanta.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from linpix.model.checkpoint import Checkpoint
from linpix.model.generate import RESAMPLING_STREAM
from linpix.model.inputs import first_hole
from linpix.model.philox import MAX_SEED, uniforms

from ...errors import OptionError
from ..schedule.scheduler import ScheduledImage
from .decoder import Decoder
from .image_spec import ImageSpec

MAX_PARTICLES = 2**10 - 1  # a particle's number is in the ten bits of its seed above the 53 of its answer's
UNEVEN = 0.5               # particles are resampled if the effective sample size is below this share of them


class Estimate(NamedTuple):
    """What a filter reports about its answer."""

    effective_sample_size: float  # the least at the end of an image row; from 1 to the number of particles
    log_evidence: float           # nats: of the known sub-pixels after the first hole, given those before it


def particle_seed(seed: int, number: int) -> int:
    """The seed of an answer's particle: its lowest 53 bits are the answer's. number: 0, 1 and so on."""
    return seed + (MAX_SEED + 1) * (number + 1)


def answer_seed(image: ImageSpec) -> int:
    """The seed that was requested for the answer."""
    return image.seed & MAX_SEED


def check_filter(checkpoint: Checkpoint, device: str, known: NDArray[np.bool_]) -> None:
    """Raise OptionError if a model cannot complete a picture by particles on a device, or need not. known: (T,)."""
    name = checkpoint.name
    if checkpoint.net.patches is not None:
        raise OptionError(f"{name} reads all known pixels before it draws, so it does not need `method=smc`; leave out "
                          "`method`", "method")
    if checkpoint.net.config.background is not None:
        raise OptionError(f"`method=smc` needs a model that computes every sub-pixel, but {name} skips the "
                          "background; leave out `method`, or choose another model", "method")
    if device == "cuda":
        raise OptionError(f"`method=smc` needs a model that decodes on a CPU, but {name} decodes on a GPU; leave out "
                          "`method`, or use --device cpu", "method")
    if not known[first_hole(known):].any():
        raise OptionError("`method=smc` is for known pixels after the first hole, but there are none; leave out "
                          "`method`, and all known pixels are still used", "method")


class ParticleFilter:
    """The particles of one answer, from the first hole to the last sub-pixel."""

    def __init__(self, images: Sequence[ScheduledImage], seed: int) -> None:
        """images: one group of the scheduler, in slots · seed: of the answer."""
        self._images, self._seed = images, seed
        self._weighed = self.position               # tokens counted in the weights
        self._log_weights = np.zeros(len(images))   # since all were equal
        self._log_evidence, self._least = 0.0, float(len(images))

    @property
    def position(self) -> int:
        """The position of all its particles."""
        return self._images[0].position

    @property
    def cancelled(self) -> bool:
        return self._images[0].cancelled

    def advance(self, decoder: Decoder) -> None:
        """Weigh the particles if an image row has ended, and resample them if too uneven. Changes their slots."""
        position, config = self.position, decoder.config
        if position == self._weighed or position % config.row_length:
            return
        slots = [image.slot for image in self._images]
        passed = slice(self._weighed * config.token_size, position * config.token_size)
        passed_known = decoder.log_probs[slots, passed][:, decoder.known[slots[0], passed]]
        self._log_weights += passed_known.sum(1, dtype=np.float64)
        self._weighed = position
        weights = normalised(self._log_weights)
        size = effective_sample_size(weights)
        self._least = min(self._least, size)
        if position < config.length and size < UNEVEN * len(slots):
            self._log_evidence += log_mean(self._log_weights)
            self._log_weights[:] = 0
            branch(decoder, slots, resampled(weights, self._uniform(), len(slots)))

    def answer(self) -> tuple[ScheduledImage, Estimate]:
        """One of the particles, which have reached the end, drawn by weight."""
        [chosen] = resampled(normalised(self._log_weights), self._uniform(), 1)
        return self._images[chosen], Estimate(self._least, self._log_evidence + log_mean(self._log_weights))

    def _uniform(self) -> float:
        return float(uniforms(np.array(self._seed), np.array(self._weighed), RESAMPLING_STREAM)[0])


def filters_of(images: Sequence[ScheduledImage], specs: Sequence[ImageSpec]) -> list[ParticleFilter]:
    """A filter for each group of particles among a request's images, which have just got their slots."""
    group = specs[0].particles
    return [ParticleFilter(images[first:first + group], answer_seed(specs[images[first].index]))
            for first in range(0, len(images), group)]


def reweighed(filters: Sequence[ParticleFilter], decoder: Decoder) -> tuple[list[ParticleFilter], dict[int, Estimate]]:
    """Weigh and resample particles whose image row has ended.

    Returns the filters that go on, and estimates of the answers by slot.
    """
    going_on, answers = [], {}
    for particles in filters:
        if particles.cancelled:
            continue
        particles.advance(decoder)
        if particles.position < decoder.config.length:
            going_on.append(particles)
        else:
            image, estimate = particles.answer()
            answers[image.slot] = estimate
    return going_on, answers


def branch(decoder: Decoder, slots: Sequence[int], parents: NDArray[np.int64]) -> None:
    """Give each parent as many slots as it has children: its own, and those of particles without any.

    parents: (P,), indices of slots.
    """
    children = np.bincount(parents, minlength=len(slots))
    free = [slot for slot, count in zip(slots, children, strict=True) if not count]
    for slot, count in zip(slots, children, strict=True):
        if count > 1:
            decoder.branch(slot, free[:count - 1])
            del free[:count - 1]


def resampled(weights: NDArray[np.float64], u: float, count: int) -> NDArray[np.int64]:
    """Systematic resampling: returns `count` indices, in order, each floor(count * weight) times or once more.

    weights: (P,), of sum 1 · u: uniform in (0, 1) · the expected number of each is count * weight.
    """
    cumulative = weights.cumsum()
    return np.searchsorted(cumulative / cumulative[-1], (np.arange(count) + u) / count, side="right")


def normalised(log_weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights of sum 1."""
    weights = np.exp(log_weights - log_weights.max())
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def effective_sample_size(weights: NDArray[np.float64]) -> float:
    """The number of draws of equal weight that would be worth as much. weights: of sum 1."""
    return float(1 / np.square(weights).sum())


def log_mean(log_weights: NDArray[np.float64]) -> float:
    """The logarithm of the mean weight."""
    return float(np.logaddexp.reduce(log_weights)) - math.log(len(log_weights))
