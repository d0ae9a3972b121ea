"""Errors in the command line's words, and pictures enlarged to a visible size."""

import numpy as np
import pytest
from PIL import Image

from linpix.__main__ import main
from linpix.model.config import PRESETS
from linpix.server.pictures import animation


@pytest.fixture
def picture(tmp_path):
    Image.fromarray(np.full((8, 8), 9, np.uint8)).save(tmp_path / "picture.png")
    alpha = np.full((8, 8), 255, np.uint8)
    alpha[4:] = 0
    Image.fromarray(np.stack([alpha, alpha], -1)).save(tmp_path / "holes.png")
    return tmp_path / "picture.png"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "",
            (
                "it is not clear what to fill in: erase that part of the picture (save it as a PNG"
                " with transparent pixels), or use a mask or keep_rows"
            ),
        ),
        (
            "--mask PICTURE --keep-rows 3",
            "mask and keep_rows both say what to fill in; use one of them",
        ),
        ("--mask PICTURE", "mask has no alpha channel; it must be a PNG"),
        ("--keep-rows 9", "keep_rows must be from 0 to 8"),
        (
            "--prepare mnist --keep-rows 3",
            "prepare=mnist works only with models of 28x28 grey pixels",
        ),
    ],
)
def test_errors_about_a_picture_name_options(tiny, picture, capsys, arguments, words):
    given = arguments.replace("PICTURE", str(picture))
    command = f"complete {picture} --model {tiny} --out {picture.parent}/out {given}"
    assert main(command.split()) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "send" not in told and "`" not in told


@pytest.mark.parametrize(
    ("scale", "terminal", "factor"),
    [("", False, 1), ("", True, 29), ("--scale auto", False, 29), ("--scale 2", True, 2)],
)
def test_a_grid_is_enlarged_where_it_is_to_be_seen(
    tiny, tmp_path, capsys, monkeypatch, scale, terminal, factor
):
    monkeypatch.setattr("linpix.cli.commands.sys.stdout.isatty", lambda: terminal, raising=False)
    command = f"sample --model {tiny} --count 2 --seed 1 --out {tmp_path}/grid.png {scale}"
    assert main(command.split()) == 0
    capsys.readouterr()
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.width == factor * animation.sheet_size(2, PRESETS["tiny"])[0]


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("linpix 0.")


def test_help_names_the_choices_of_a_setting_and_no_default_of_none(capsys):
    for command in ("serve", "evaluate"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        told = capsys.readouterr().out
        assert "None" not in told
        assert command != "serve" or "--engine auto|eager|compiled" in told
