"""Which candidates become the answer."""

from itertools import combinations

import numpy as np
import pytest

from linpix.model.attempts import Recognised
from linpix.server.engine.answers.ranking import TEMPERATURE, best, likelihoods, recognised


def images(count: int, seed: int = 0) -> list[np.ndarray]:
    return [*np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)]


def expected_distance(drawn, scores, answers) -> float:
    """By the definition: of each candidate, by weight, to the nearest answer."""
    weights = np.exp((np.array(scores) - max(scores)) / TEMPERATURE)
    distances = np.array([[np.abs(a.astype(int) - b).sum() for b in drawn] for a in drawn])
    return float((weights * distances[:, list(answers)].min(1)).sum())


@pytest.mark.parametrize("seed", range(5))
def test_the_best_one_has_the_smallest_expected_distance_and_two_lower_it_most(seed):
    drawn, scores = images(7, seed), np.random.default_rng(seed).normal(0, 20, 7).tolist()
    first, second = best(drawn, scores, 2)
    assert expected_distance(drawn, scores, [first]) == min(expected_distance(drawn, scores, [i]) for i in range(7))
    pairs = [pair for pair in combinations(range(7), 2) if first in pair]
    assert expected_distance(drawn, scores, [first, second]) == pytest.approx(
        min(expected_distance(drawn, scores, pair) for pair in pairs))


def test_a_score_far_above_the_others_decides_and_equal_ones_leave_it_to_the_images():
    drawn = images(6)
    assert best(drawn, [0, 0, 0, 0, 200, 0], 1) == [4]
    assert best(drawn, [0] * 6, 1) == best(drawn, [-7.5] * 6, 1)
    far = [np.full(16, value, np.uint8) for value in (0, 100, 104, 110, 255)]
    assert best(far, [0] * 5, 1) == [2], "the median"


def test_more_answers_begin_with_fewer_and_a_copy_comes_after_all_others():
    one, other, third = images(3)
    drawn = [one, one, other, one, third]
    every = best(drawn, [0, 1, -1, 2, -2], 5)
    assert sorted(every) == [0, 1, 2, 3, 4]
    assert {drawn[index].tobytes() for index in every[:3]} == {image.tobytes() for image in (one, other, third)}
    assert all(best(drawn, [0, 1, -1, 2, -2], count) == every[:count] for count in range(1, 6))


def test_equal_images_come_in_their_order():
    assert best([images(1)[0]] * 3, [0.0, 0.0, 0.0], 3) == [0, 1, 2]


def test_what_precedes_the_first_hole_does_not_count():
    log_probs = np.array([-np.inf, -1, -2, -4, -8], np.float32)
    assert likelihoods(log_probs, np.array([True, True, False, True, False])) == (-14.0, -4.0)
    assert likelihoods(log_probs[1:], np.zeros(4, bool)) == (-15.0, 0.0)
    assert likelihoods(log_probs, np.ones(5, bool)) == (0.0, 0.0)


def of(*classes: tuple[int, float]) -> list[Recognised]:
    return [Recognised(label, float(np.log(share))) for label, share in classes]


def test_recognised_images_come_in_their_order_and_then_the_surest_of_the_others():
    drawn = of((3, 0.5), (3, 0.95), (3, 0.7), (3, 0.999), (3, 0.91), (3, 0.6))
    assert recognised(drawn, 2) == [1, 3]
    assert recognised(drawn, 6) == [1, 3, 4, 2, 5, 0]
    assert recognised([Recognised(0, -np.inf), Recognised(1, -1.0)], 1) == [1]


def test_answers_are_divided_among_classes_in_proportion_to_their_recognised_candidates():
    drawn = of((7, 0.95), (1, 0.99), (1, 0.1), (7, 0.95), (1, 0.95), (7, 0.95), (7, 0.95), (2, 0.99))
    assert recognised(drawn, 1) == [0]                    # 4 of 7, 2 of 1, 1 of 2
    assert recognised(drawn, 4) == [0, 1, 3, 5]           # quotients 4, 2, 2, 4/3
    assert recognised(drawn, 8) == [0, 1, 3, 5, 4, 6, 7, 2]
