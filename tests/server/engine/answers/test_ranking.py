"""Which candidates become the answer."""

import numpy as np

from linpix.model.attempts import Recognised
from linpix.server.engine.answers.ranking import best


def of(*classes: tuple[int, float]) -> list[Recognised]:
    return [Recognised(label, float(np.log(share))) for label, share in classes]


def test_recognised_images_come_in_their_order_and_then_the_surest_of_the_others():
    drawn = of((3, 0.5), (3, 0.95), (3, 0.7), (3, 0.999), (3, 0.91), (3, 0.6))
    assert best(drawn, 2) == [1, 3]
    assert best(drawn, 6) == [1, 3, 4, 2, 5, 0]
    assert best([Recognised(0, -np.inf), Recognised(1, -1.0)], 1) == [1]


def test_answers_are_divided_among_classes_in_proportion_to_their_recognised_candidates():
    drawn = of((7, 0.95), (1, 0.99), (1, 0.1), (7, 0.95), (1, 0.95), (7, 0.95), (7, 0.95), (2, 0.99))
    assert best(drawn, 1) == [0]                    # 4 of 7, 2 of 1, 1 of 2
    assert best(drawn, 4) == [0, 1, 3, 5]           # quotients 4, 2, 2, 4/3
    assert best(drawn, 8) == [0, 1, 3, 5, 4, 6, 7, 2]
