"""What flags, a preset and pictures amount to, without a file."""

import argparse

import numpy as np
import pytest

from linpix.model.config import PRESETS
from linpix.training import flags, plan
from linpix.training.datasets import Dataset


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    flags.train(parser)
    return parser.parse_args([*words, "--out", "x"])


def of(preset: str, value: int, classes: tuple[str, ...], *words: str) -> plan.Plan:
    images = np.full((4, 784), value, np.uint8)
    data = Dataset("mine", images, np.zeros(4, np.int64), classes)
    return plan.settings_of(given(preset, *words), PRESETS[preset], data, None)


def test_pictures_decide_about_classes_and_about_the_ground():
    dark, light = (of("mnist-conditional", value, ("a", "b")).model for value in (9, 240))
    assert (dark.classes, dark.background, light.background) == (2, 0, 255)
    plain = of("mnist-conditional", 9, ()).model
    assert plain.classes == 0 and "class" not in plain.look_ups


def test_only_what_is_given_changes_settings():
    assert of("mnist-small", 9, (), "--betas", "0.8", "0.9").changes == {"betas": (0.8, 0.9)}
    head = ("--head", "categorical")
    assert of("mnist-conditional", 9, (), *head).changes == {"head_share": 1.0}
    assert of("mnist-conditional", 9, (), *head, "--resume").changes == {}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("mnist-conditional", "--unconditional", "0.5"), "draws the class of every image first"),
        (("mnist-small", "--readings", "2"), "--readings 2: this model predicts no classes"),
    ],
)
def test_a_flag_that_does_not_fit_is_refused(words, text):
    with pytest.raises(ValueError, match=text):
        of(words[0], 9, ("a", "b"), *words[1:])


def test_a_plan_for_pictures_fills_in_what_no_flag_says():
    chosen = {"preset": "mnist-conditional", "minutes": 7, "colours": 0}
    shipped = PRESETS["mnist-conditional"]
    filled = plan.filled_in(given("--preset", "auto", "x"), chosen, shipped)
    assert (filled.init, filled.layers, filled.minutes) == (filled.preset, shipped.layers, 7)
    fewer = plan.filled_in(given("--layers", "1", "--minutes", "3"), chosen, shipped)
    assert (fewer.init, fewer.layers, fewer.minutes) == (None, 1, 3.0)
    resumed = plan.filled_in(given("--resume"), chosen, None)
    assert resumed.warmup_images is None
