"""What pictures look like, in numbers."""

import dataclasses

import numpy as np

from linpix.model.config import PRESETS
from linpix.training.look import Look, board_of, look_of

TINY = PRESETS["tiny"]


def test_pieces_specks_greys_and_full_ink_are_counted_on_either_ground():
    config = dataclasses.replace(TINY, height=6, width=6)
    one, corner, speck, two = np.zeros((4, 6, 6), np.uint8)
    one[1:4, 2] = 255
    # corners connect, and what is hardly seen is nothing
    corner[0, 0], corner[1, 1], corner[5, 5] = 40, 253, 31
    speck[1:4, 1:4], speck[5, 5] = 100, 60
    two[0:2, 0:3], two[4:6, 0:3] = 200, 210
    pictures = np.stack([one, corner, speck, two]).reshape(4, 36)
    found = look_of(pictures, config, 0)
    assert found == Look(greys=round((2 + 4 + 3 + 3) / 4, 1), full_ink=1.0, pieces=0.5, specks=0.25)
    assert look_of(255 - pictures, config, 255) == found
    labels = np.array([0, 0, 1, 2])
    found = look_of(pictures, config, 0, labels)
    assert (found.divided, found.pieces, found.specks) == ([1, 2], 0, 0), "of the others, none is"
    assert look_of(pictures, config, 0, labels, [2]) == Look(
        3.0, 1.0, round(1 / 3, 4), round(1 / 3, 4), [2]
    )
    assert look_of(pictures, config, 0, np.array([1, 1, 2, 2]), [1, 2]).pieces == 1, (
        "nothing is left"
    )
    assert look_of(pictures.repeat(3, 0), config, 0, np.repeat([0, 1], [7, 5])).divided == [1], (
        "0: one of seven"
    )


def test_the_board_has_the_ground_and_ink_of_the_pictures_and_prepares_only_what_looks_like_mnist():
    rng, config = np.random.default_rng(0), PRESETS["mnist-small"]
    digits = np.zeros((20, 28, 28), np.uint8)
    digits[:, 4:24, 9:19] = 250
    assert board_of(digits.reshape(20, -1), config) == {
        "ground": [0],
        "ink": [250],
        "prepare": "mnist",
    }
    paper = 235 - (digits > 0) * 175 + rng.integers(-9, 9, digits.shape)
    assert board_of(paper.astype(np.uint8).reshape(20, -1), config) == {
        "ground": [235],
        "ink": [60],
        "prepare": None,
    }
    corner = np.roll(digits, 5, axis=2)
    assert board_of(corner.reshape(20, -1), config)["prepare"] is None
    photographs = rng.integers(0, 256, (20, 32 * 32 * 3)).astype(np.uint8)
    assert board_of(photographs, PRESETS["cifar10-small"]) == {
        "ground": None,
        "ink": None,
        "prepare": None,
    }
    sheets = np.full((20, 32, 32, 3), (250, 240, 220), np.uint8)
    sheets[:, 10:20, 10:20] = (200, 20, 30)
    assert board_of(sheets.reshape(20, -1), PRESETS["cifar10-small"]) == {
        "ground": [250, 240, 220],
        "ink": [200, 20, 30],
        "prepare": None,
    }
