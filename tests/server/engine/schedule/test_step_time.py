"""Estimates of a step's time, and the factor by which predictions are stretched."""

import numpy as np
import pytest

from linpix.server.engine.schedule.step_time import BROKEN, MAX_FACTOR, MIN_FACTOR, SafetyFactor, StepTimeEstimate


def test_the_estimate_leaves_out_the_first_turn_of_a_size_and_forgets_slowly():
    estimate = StepTimeEstimate()
    assert estimate(4) == estimate.slowest(64) == 0
    estimate.learn(4, 1, 10.0)  # everything warms up in it
    assert estimate(4) == 0
    for _ in range(100):
        estimate.learn(4, 10, 0.05)
    assert estimate(4) == pytest.approx(0.005)
    assert estimate.confident(4, 30.0) and estimate.confident(0, 30.0) and estimate.confident(8, 7.0)
    assert not estimate.confident(64, 0.1)
    assert estimate(7) == estimate(4)
    assert estimate(16) == pytest.approx(0.01)  # not seen yet: between the same and four times as long
    assert estimate(1) == pytest.approx(0.0025)
    assert estimate.slowest(64) == pytest.approx(0.02)
    estimate.learn(4, 10, 0.5)  # a hiccup
    assert estimate(4) < 2 * 0.005
    for _ in range(200):
        estimate.learn(4, 10, 0.1)
    assert estimate(4) == pytest.approx(0.01, rel=0.05)


def test_the_estimate_of_a_size_that_ran_for_a_moment_is_no_slower_than_that_of_a_larger_one_and_is_forgotten():
    estimate = StepTimeEstimate()
    for _ in range(20):
        estimate.learn(64, 28, 0.028)
    assert estimate(64) == pytest.approx(0.001)
    estimate.learn(32, 28, 0.01)
    estimate.learn(32, 28, 1.0)  # held up
    assert estimate(32) == pytest.approx(0.001)
    assert estimate(2) == pytest.approx(0.001)
    estimate.learn(128, 28, 0.01)
    estimate.learn(128, 28, 1.0)
    assert estimate(128) > 0.03  # nobody knows better
    for _ in range(1000):
        estimate.learn(64, 28, 0.028)
    assert estimate(128) == pytest.approx(0.001 * 2**0.5)


def test_the_estimate_of_turns_of_one_step_is_a_mean_too():
    estimate = StepTimeEstimate()
    for seconds in (9.0, 0.1, 0.3, 0.1, 0.3):
        estimate.learn(1, 1, seconds)
    assert estimate(1) == pytest.approx(0.2, rel=0.1)


def test_a_estimate_is_trusted_for_ten_times_as_long_as_it_was_seen():
    estimate = StepTimeEstimate()
    for _ in range(2):
        estimate.learn(64, 28, 0.2)
    assert not estimate.confident(64, 0.5), "the first turn does not count, and the second is short"
    estimate.learn(64, 28, 0.2)
    assert estimate.confident(64, 3.5) and not estimate.confident(64, 4.5)
    assert not estimate.confident(32, 0.5), "twice as many rows tell a quarter"
    for _ in range(100):
        estimate.learn(64, 28, 0.2)
    assert estimate.confident(64, 600.0) and estimate.confident(64, float("inf"))


def test_as_few_predictions_are_broken_with_the_safety_factor_as_it_is_set_to():
    random, factor, broken = np.random.default_rng(0), SafetyFactor(), []
    for scale in (0.12, 0.2):  # how far what was foreseen is off: the factor follows
        for taken in np.exp(scale * random.standard_normal(10_000)):
            broken.append(taken > factor.value)
            factor.learn(broken[-1])
        assert BROKEN / 2 < np.mean(broken[-8000:]) < 2 * BROKEN
    for _ in range(2000):
        factor.learn(broken=False)
    assert factor.value == MIN_FACTOR
    for _ in range(200):
        factor.learn(broken=True)
    assert factor.value == MAX_FACTOR
