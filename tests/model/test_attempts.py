"""Which attempt at an image is accepted, and the random numbers of each attempt."""

import math

import numpy as np
import pytest

from linpix.model.attempts import MAX_ATTEMPTS, NEXT_ATTEMPT, RECOGNISED, Recognised
from linpix.model.philox import MAX_SEED, uniforms


def of(probability: float, torn: bool = False) -> Recognised:
    return Recognised(3, math.log(probability), torn)


def test_a_probability_of_99_in_100_is_enough_for_an_image_in_one_piece():
    assert RECOGNISED == 0.99
    assert of(0.99).accepted and not of(0.9899).accepted and not of(0.999, torn=True).accepted
    assert of(0.7).confidence == pytest.approx(0.7)
    assert of(0.9)._replace(least=0.9).accepted and not of(0.89)._replace(least=0.9).accepted


def test_the_best_attempt_is_accepted_or_else_recognised_or_else_in_one_piece():
    worst_first = [
        of(0.6, torn=True),
        of(0.98, torn=True),
        of(0.2),
        of(0.7),
        of(0.999, torn=True),
        of(0.99),
    ]
    assert sorted([*worst_first[::2], *worst_first[1::2]], key=lambda one: one.rank) == worst_first


@pytest.mark.parametrize("asked", [0, 41, MAX_SEED])
def test_only_the_first_attempt_has_a_seed_that_a_request_can_name(asked):
    seeds = [asked + NEXT_ATTEMPT * number for number in range(MAX_ATTEMPTS)]
    assert seeds == [asked + 2**53 * number for number in range(MAX_ATTEMPTS)]
    assert min(seeds[1:]) > MAX_SEED and max(seeds) < 2**63, "decoders keep them as int64"
    noise = uniforms(np.array(seeds), np.zeros(MAX_ATTEMPTS, np.int64))
    assert len(np.unique(noise.reshape(MAX_ATTEMPTS, -1), axis=0)) == MAX_ATTEMPTS
