"""Which images are returned: the best of several attempts, and of several candidates."""

import numpy as np

from linpix.model.attempts import NEXT_ATTEMPT, Recognised
from linpix.server.engine.image import Image, best_of, next_or_best
from linpix.server.engine.job import Job


def of(*classes: tuple[int, float]) -> list[Recognised]:
    return [Recognised(label, float(np.log(share))) for label, share in classes]


def test_of_candidates_that_are_not_accepted_recognised_ones_come_first_then_whole_ones():
    drawn = [
        one._replace(torn=index < 3)
        for index, one in enumerate(of((3, 0.99), (3, 0.98), (3, 0.999), (3, 0.7)))
    ]
    assert best_of(drawn, 1) == [2] and best_of(drawn, 4) == [2, 0, 3, 1]


def test_recognised_images_come_in_their_order_and_then_the_surest_of_the_others():
    drawn = of((3, 0.5), (3, 0.995), (3, 0.7), (3, 0.999), (3, 0.99), (3, 0.6))
    assert best_of(drawn, 2) == [1, 3]
    assert best_of(drawn, 6) == [1, 3, 4, 2, 5, 0]
    assert best_of([Recognised(0, -np.inf), Recognised(1, -1.0)], 1) == [1]


def test_answers_are_divided_among_classes_in_proportion_to_their_recognised_candidates():
    drawn = of((7, 0.99), (1, 1.0), (1, 0.1), (7, 0.99), (1, 0.99), (7, 0.99), (7, 0.99), (2, 1.0))
    assert best_of(drawn, 1) == [0]  # 4 of 7, 2 of 1, 1 of 2
    assert best_of(drawn, 4) == [0, 1, 3, 5]  # quotients 4, 2, 2, 4/3
    assert best_of(drawn, 8) == [0, 1, 3, 5, 4, 6, 7, 2]


def attempt(
    job: Job,
    probability: float | None,
    before: Image | None = None,
    label: int = 3,
    torn: bool = False,
) -> Image:
    """The next attempt after one, done and checked with this probability of its class."""
    image = Image("a", job, 2, job.seed + 2, job.label) if before is None else next_or_best(before)
    assert image.canvas is None
    image.label, image.canvas = label, np.full(64, image.attempt, np.uint8)
    if probability is not None:
        image.recognised = Recognised(label, float(np.log(probability)), torn)
    return image


def test_an_image_is_drawn_again_until_it_is_recognised_or_there_were_enough_attempts():
    job = Job(seed=5, attempts=3)
    assert next_or_best(only := attempt(job, 0.99)) is only
    first = attempt(job, 0.5)
    second = attempt(job, 0.7, first)
    third = attempt(job, 0.6, second)
    best = next_or_best(third)
    assert best.canvas is not None and best.seed == second.seed
    assert [image.seed for image in (first, second, third)] == [
        7,
        7 + NEXT_ATTEMPT,
        7 + 2 * NEXT_ATTEMPT,
    ]
    assert next_or_best(unchecked := attempt(Job(), None)) is unchecked
    assert next_or_best(candidate := attempt(Job(candidates=True), 0.1)) is candidate


def test_a_torn_image_is_drawn_again_and_the_one_that_is_accepted_is_the_answer():
    job = Job(seed=5, attempts=4)
    first = attempt(job, 0.99, torn=True)
    second = attempt(job, 0.99, attempt(job, 0.7, first))
    assert next_or_best(second).seed == second.seed
    job = Job(seed=5, attempts=2)
    last = attempt(job, 0.8, attempt(job, 0.98, torn=True))
    assert next_or_best(last).seed == last.seed, (
        "of two that are not recognised, the one in one piece"
    )
    torn = attempt(job, 0.99, torn=True)
    assert next_or_best(attempt(job, 0.8, torn)).seed == torn.seed, (
        "of two that are not accepted, the one that is recognised"
    )


def test_a_further_attempt_keeps_the_drawn_class_but_a_completion_draws_another():
    canvas, known = np.zeros(64, np.uint8), np.arange(64) < 8
    for job, label in (
        (Job(attempts=2), 3),
        (Job(attempts=2, canvas=canvas, known=known), None),
        (Job(attempts=2, canvas=canvas, known=known, label=4), 4),
        (Job(attempts=2, canvas=canvas, known=np.zeros(64, np.bool_)), 3),
    ):
        following = next_or_best(attempt(job, 0.5))
        assert following.canvas is None and following.label == label
    whole = attempt(Job(attempts=2, canvas=canvas, known=np.ones(64, np.bool_)), 0.5)
    assert next_or_best(whole) is whole
