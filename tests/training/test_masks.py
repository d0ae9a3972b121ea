import numpy as np
import pytest

from linpix.model.config import PRESETS, ModelConfig
from linpix.training.masks import SHARES, known_of

MNIST, CIFAR10 = PRESETS["mnist"], PRESETS["cifar10"]


@pytest.mark.parametrize("preset", ["mnist", "cifar10", "tiny"])
@pytest.mark.parametrize("kind", SHARES)
def test_a_mask_hides_something_and_tells_something(kind, preset):
    known = known_of(np.random.default_rng(0), PRESETS[preset], 100, kind)
    assert known.shape == (100, PRESETS[preset].subpixels) and known.dtype == np.bool_
    hidden = 1 - known.mean(1)
    assert (hidden > 0).mean() > 0.95 and (hidden < 1).mean() > 0.95
    assert hidden.std() > 0.05


@pytest.mark.parametrize(("height", "width"), [(1, 8), (8, 1), (1, 1), (2, 3)])
@pytest.mark.parametrize("kind", SHARES)
def test_pictures_may_be_as_small_as_they_like(kind, height, width):
    config = ModelConfig(height=height, width=width)
    assert known_of(np.random.default_rng(0), config, 50, kind).shape == (50, height * width)


def test_the_channels_of_a_pixel_are_known_together():
    known = known_of(np.random.default_rng(1), CIFAR10, 50).reshape(50, -1, 3)
    assert (known[..., 0] == known[..., 1]).all() and (known[..., 0] == known[..., 2]).all()


def test_masks_are_a_function_of_the_generator():
    first, again = (known_of(np.random.default_rng(4), MNIST, 64) for _ in range(2))
    assert (first == again).all()
