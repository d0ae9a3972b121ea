"""`linpix score` gives the numbers of the service, and of `linpix evaluate`."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.training.evaluate import bits_of
from tests.linpix.test_main import inside, reported, succeeds
from tests.nets import saved
from tests.server.web.routes.test_images import PICTURE, encode, occluded
from tests.server.web.routes.test_likelihoods import ask, told


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(encode(PICTURE))
    return path


def test_a_picture_has_the_bits_per_dim_of_evaluate(tiny, picture):
    printed = succeeds(f"score {picture} --model {tiny} --json").stdout
    expected = float(bits_of(checkpoint.read(tiny).net, PICTURE.reshape(1, -1))[0])
    assert json.loads(printed)["bits_per_dim"] == pytest.approx(expected, abs=1e-4)
    printed = succeeds(f"score {picture} --model {tiny}").stdout
    assert (
        printed.startswith(f"{expected:.4f} bits/dim, log-likelihood -")
        and "without a class" in printed
    )


@pytest.mark.parametrize(
    "fields",
    [{}, {"label": "3"}, {"labels": "all"}, {"labels": "all", "label": "3", "keep_rows": "3"}],
)
def test_the_command_says_what_the_service_says(tiny, server, picture, fields):
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in fields.items()]
    found = reported(f"score {picture} --model {tiny}", *flags)
    with server.client() as client:
        answer = told(client, **fields)
    assert found == {name: answer[name] for name in found}
    assert found.keys() >= {
        "bits_per_dim",
        "log_likelihood",
        "counted",
        "known",
        "conditioning",
        "labels",
        "map",
    }


def test_the_map_is_the_services(tiny, server, tmp_path, picture):
    mask = tmp_path / "mask.png"
    mask.write_bytes(occluded(3))
    printed = succeeds(
        f"score {picture} --model {tiny} --mask {mask} --out {tmp_path}/map.png --scale 2",
    ).stdout
    assert "map in" in printed and "of 40 sub-pixels given 24 known ones" in printed
    with server.client() as client:
        answer = ask(client, mask=occluded(3), size="16x16", headers={"accept": "image/png"})
    assert np.array_equal(
        *(
            np.asarray(Image.open(source))
            for source in (tmp_path / "map.png", io.BytesIO(answer.content))
        )
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--label ten", "label must be a class of tiny"),
        ("--keep-rows 8", "keep_rows hides nothing"),
        ("--out map.gif", "give NAME.png"),
        ("--out nowhere/map.png", "in an existing folder"),
        ("--model MADE", "considers the value of the first sub-pixel impossible"),
    ],
)
def test_what_cannot_be_scored_is_one_line_that_says_why(tiny, tmp_path, picture, flags, words):
    made = saved(
        tmp_path / "made", replace(PRESETS["tiny"], classes=0, first_marginal=(1.0,) + (0.0,) * 255)
    )
    ended = inside(f"score {picture} --model {tiny}", flags.replace("MADE", str(made)))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert words in ended.stderr and len(ended.stderr.splitlines()) == 1
