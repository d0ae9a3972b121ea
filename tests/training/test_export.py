"""What is written into a checkpoint for shipping. tests/training/test_loop.py exports trained ones."""

import os

import pytest

from linpix.model.config import PRESETS
from linpix.training.export import attempts_of, provenance


@pytest.mark.parametrize(("preset", "attempts"), [
    ("mnist-small", None), ("cifar10-small", None), ("mnist-conditional", 4), ("mnist-large", 4),
    ("cifar10-conditional", 4)])
def test_new_models_that_can_recognise_their_images_make_four_attempts(preset, attempts):
    assert attempts_of(PRESETS[preset]).get("attempts") == attempts


def test_a_command_with_bytes_that_are_not_utf8_is_kept_in_a_form_that_can_be_sent():
    assert provenance("mine", (), command=os.fsdecode(b"--data caf\xe9"))["command"] == "--data caf\\xe9"
