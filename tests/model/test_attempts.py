"""Which attempt at an image becomes its answer, and the random numbers of each attempt."""

import math

import numpy as np
import pytest

from linpix.model.attempts import MAX_ATTEMPTS, RECOGNISED, Attempts, Recognised
from linpix.model.philox import MAX_SEED, uniforms


def canvas(number: int) -> np.ndarray:
    return np.full(4, number, np.uint8)


def judged(most: int, *probabilities: float) -> tuple[Attempts, list[bool]]:
    """Attempts of these probabilities, whose canvases are numbered from 1; and whether each asked for another."""
    attempts = Attempts(7, most)
    return attempts, [attempts.add(canvas(number), Recognised(3, math.log(one)))
                      for number, one in enumerate(probabilities, 1)]


@pytest.mark.parametrize(("most", "probabilities", "answer"), [
    (1, [0.1], 1), (3, [0.95], 1), (4, [0.2, 0.91], 2), (3, [0.2, 0.6, 0.4], 2), (3, [0.6, 0.2, 0.4], 1),
    (3, [0.2, 0.4, 0.6], 3), (2, [0.5, 0.5], 1), (3, [0.89, 0.2, 0.9], 3)])
def test_the_first_that_is_recognised_is_the_answer_and_else_the_surest(most, probabilities, answer):
    attempts, again = judged(most, *probabilities)
    assert again == [True] * (len(probabilities) - 1) + [False]
    assert np.array_equal(attempts.canvas, canvas(answer))
    assert attempts.best.confidence == pytest.approx(probabilities[answer - 1])
    assert (attempts.best.label, attempts.best.attempts, attempts.made) == (3, *[len(probabilities)] * 2)


def test_a_probability_of_nine_in_ten_is_enough():
    assert RECOGNISED == 0.9
    assert judged(2, 0.8999)[1] == [True] and judged(2, 0.9)[1] == [False]


def test_the_label_is_that_of_the_attempt_that_is_the_answer():
    attempts = Attempts(0, 3)
    for label, log_prob in ((4, -3.0), (5, -1.0), (6, -2.0)):
        attempts.add(canvas(label), Recognised(label, log_prob))
    assert (attempts.best.label, attempts.best.attempts) == (5, 3) and np.array_equal(attempts.canvas, canvas(5))


@pytest.mark.parametrize("asked", [0, 41, MAX_SEED])
def test_only_the_first_attempt_has_a_seed_that_a_request_can_name(asked):
    attempts, seeds = Attempts(asked, MAX_ATTEMPTS), []
    for _ in range(MAX_ATTEMPTS):
        seeds.append(attempts.next_seed)
        attempts.add(canvas(0), Recognised(0, -1.0))
    assert seeds == [asked + 2**53 * number for number in range(MAX_ATTEMPTS)]
    assert max(seeds) < 2**63, "decoders keep them as int64"
    noise = uniforms(np.array(seeds), np.zeros(MAX_ATTEMPTS, np.int64))
    assert len(np.unique(noise.reshape(MAX_ATTEMPTS, -1), axis=0)) == MAX_ATTEMPTS


def test_attempts_at_neighbouring_seeds_share_no_random_numbers():
    seeds = [Attempts(asked, MAX_ATTEMPTS, made=made).next_seed for asked in range(64) for made in range(MAX_ATTEMPTS)]
    assert len(set(seeds)) == 64 * MAX_ATTEMPTS
