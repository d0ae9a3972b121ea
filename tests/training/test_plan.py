"""What flags, a preset and pictures amount to; and files of flags."""

import argparse

import numpy as np
import pytest

from linpix.__main__ import main
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


# --- files of flags ---

SETTINGS = """
preset = "tiny"
batch = 8
max-images = 40
compile = false
betas = [0.8, 0.9]
processes = 1
"""


def test_a_run_begins_again_from_the_file_that_it_writes(pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(f'{SETTINGS}data = "{pictures.name}"\nseed = 1\n')
    # flags win
    assert main(["train", "--config", "mine.toml", "--seed", "3", "--out", "one"]) == 0
    assert main(["train", "--config", "one.training/run.toml", "--out", "two"]) == 0
    assert main(["train", "--config", "one.training/run.toml", "--seed", "1", "--out", "b"]) == 0
    weights = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("one", "two")]
    other = (tmp_path / "b/model.safetensors").read_bytes()
    assert weights[0] == weights[1] != other
    plans = [(tmp_path / f"{run}.training/run.toml").read_text() for run in ("one", "two")]
    assert plans[0] == plans[1] and "seed = 3\n" in plans[0] and "betas = [0.8, 0.9]" in plans[0]


def test_architecture_and_folder_of_the_command_line_win_over_those_of_the_file():
    def chosen(*words: str) -> tuple[str, str]:
        file = ["--preset=tiny", "--data=theirs", "--config=x.toml"]
        return plan.preset_and_data(given(*file, *words))

    assert chosen() == ("tiny", "theirs")
    assert chosen("mnist") == ("mnist", "theirs")
    assert chosen("mine") == chosen("--data", "mine") == ("tiny", "mine")
    assert chosen("--preset", "mnist", "mine") == ("mnist", "mine")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bach = 8", "bach is not a setting; did you mean batch?"),
        ("batch = true", "--batch must be a text, a number, or a list of them, got True"),
        ("compile = 3", "--compile must be true or false, got 3"),
        ("batch: 8", "x.toml is not TOML"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(text, words, tmp_path, capsys):
    (tmp_path / "x.toml").write_text(text)
    assert main(["train", "--config", str(tmp_path / "x.toml"), "--out", str(tmp_path / "y")]) == 2
    assert words in capsys.readouterr().err


def test_values_become_the_words_of_a_command_line():
    values = {"preset": "tiny", "compile": False, "resume": False, "betas": (1, 2), "init": None}
    assert flags.words_of("train", values) == [
        "--preset=tiny",
        "--no-compile",
        "--betas",
        "1",
        "2",
    ]
    assert flags.words_of("evaluate", {"temperature_range": [0.5, 1.2]}) == [
        "--temperature-range=0.5,1.2"
    ]


def test_a_size_is_read_as_it_is_typed_and_as_a_file_has_it():
    [word] = flags.words_of("train", {"size": (9, 23)})
    for words in (("--size", "9x23"), (word,)):
        assert given("mnist-small", *words).size == (9, 23)
    for wrong in ("9", "9x23x3", "7x23", "9x65", "axb"):
        with pytest.raises(SystemExit):
            given("mnist-small", "--size", wrong)
