"""Model pixels that are known in part: known from half of the area on, with the mean of the known
part.
"""

import numpy as np
import pytest

from linpix.server.pictures.coverage import bounds, half_known, means, reduced
from tests.fuzz.pictures import noise


def fine(values, factor: int):
    return values.repeat(factor, 0).repeat(factor, 1)


@pytest.mark.parametrize(
    ("height", "width"), [(8, 8), (9, 13), (16, 24), (29, 11), (101, 67), (5, 3)]
)
def test_a_pixel_is_known_if_half_of_its_area_is_and_has_the_mean_of_that(height, width):
    """As the definition says, on a picture so fine that every pixel is a whole number of parts: 8
    of each side.
    """
    kept, pixels = noise(height, width) < 120, noise(height, width, 1)
    shape = 8, height, 8, width
    areas = fine(kept, 8).reshape(shape).mean((1, 3))
    totals = fine(pixels[..., 0] * kept, 8).astype(float).reshape(shape).mean((1, 3))
    values, known = reduced(pixels, kept, 8, 8)
    clear = np.abs(areas - 0.5) > 0.02  # bounds are rounded to 1/256 pixel
    assert np.array_equal(known[clear], (areas >= 0.5)[clear]) and 10 < known.sum() < 60
    assert np.abs(values[..., 0] - totals / np.maximum(areas, 1e-9))[known].max() <= 1
    assert not values[~known].any()


def test_exactly_half_is_known_and_a_little_less_is_not():
    kept = np.zeros((16, 16), np.bool_)
    kept[::2] = True
    assert half_known(kept, 4, 4).all()
    kept[0, 0] = False
    assert np.flatnonzero(~half_known(kept, 4, 4)).tolist() == [0]


@pytest.mark.parametrize("side", [9, 13, 64])
def test_a_mask_finer_than_the_picture_knows_nothing_of_which_no_pixel_is_known(side):
    values, known = reduced(np.full((side, side, 1), 9, np.uint8), noise(72, 72) < 130, 8, 8)
    assert (values[known] == 9).all() and known.any()


def test_bounds_may_lie_within_one_pixel():
    values, known = means(
        np.array([[[10], [20]]], np.uint8),
        np.ones((1, 2), np.bool_),
        bounds(4, 0, 1),
        bounds(8, 0, 2),
    )
    assert known.all() and values[..., 0].tolist() == [[10] * 4 + [20] * 4] * 4
