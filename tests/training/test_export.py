"""What is written into a checkpoint for shipping. tests/training/test_loop.py exports trained ones."""

import pytest

from linpix.model.config import PRESETS
from linpix.training.export import attempts_of


@pytest.mark.parametrize(("preset", "attempts"), [
    ("mnist-small", None), ("cifar10-small", None), ("mnist-conditional", 4), ("mnist-large", 4),
    ("cifar10-conditional", 4)])
def test_new_models_that_can_recognise_their_images_make_four_attempts(preset, attempts):
    assert attempts_of(PRESETS[preset]).get("attempts") == attempts
