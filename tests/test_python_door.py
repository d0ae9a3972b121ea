"""`import linpix`: load, sample and complete from Python; and what is said where other modules have our names."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import linpix
from model.transformer import Transformer
from tests.server.conftest import ROOT, Process, serving
from tests.server.web.test_images import images_of, occluded

GENERATE = "/v1/images/generations"


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Process]:
    with serving(tiny.parent) as process:
        yield process


def test_load_gives_the_transformer_of_a_folder(tiny):
    net = linpix.load(tiny)
    assert isinstance(net, Transformer) and not net.training
    images = torch.zeros(2, net.config.subpixels, dtype=torch.uint8)
    assert net.parameters_of(images).shape == (2, net.config.subpixels, 3 * net.config.mixtures)


def test_sample_gives_the_images_that_a_server_gives_for_the_same_seed(tiny, server):
    drawn = linpix.sample(str(tiny), 3, seed=7, label=4, temperature=0.8, batch=2)
    assert drawn.shape == (3, 8, 8) and drawn.dtype == np.uint8
    answer = server.client().post(GENERATE, json={"n": 3, "seed": 7, "label": 4, "temperature": 0.8})
    assert np.array_equal(drawn, images_of(answer))


def test_complete_keeps_known_pixels_and_gives_what_a_server_gives(tiny, server):
    picture = np.arange(64, dtype=np.uint8).reshape(8, 8)
    known = np.arange(8)[:, None].repeat(8, axis=1) < 3
    drawn = linpix.complete(str(tiny), picture, known, 2, seed=7)
    assert drawn.shape == (2, 8, 8) and not np.array_equal(*drawn)
    assert (drawn[:, known] == picture[known]).all()
    answer = server.client().post("/v1/images/edits", files={"image": ("a.png", occluded(3, picture))},
                                  data={"n": "2", "seed": "7"})
    assert np.array_equal(drawn, images_of(answer))


def test_seeds_are_drawn_where_none_is_given(tiny):
    assert not np.array_equal(linpix.sample(str(tiny)), linpix.sample(str(tiny)))


@pytest.mark.parametrize(("options", "words"), [
    ({"count": 0}, "count must be at least 1"), ({"batch": 0}, "batch must be at least 1"),
    ({"temperature": -1}, "temperature must be a number"), ({"label": "ten"}, "label must be a class of tiny: 0, 1"),
    ({"seed": 2**53}, "seed: image i uses seed"), ({"model": "none"}, "there is no model 'none'")])
def test_what_cannot_be_drawn_is_a_value_error_that_says_why(tiny, options, words):
    with pytest.raises(ValueError, match=words):
        linpix.sample(**{"model": str(tiny)} | options)


@pytest.mark.parametrize(("image", "known", "words"), [
    (np.zeros((8, 9), np.uint8), np.ones((8, 8), bool), "image must be uint8 of shape"),
    (np.zeros((8, 8)), np.ones((8, 8), bool), "got float64"),
    (np.zeros((8, 8), np.uint8), np.ones((8, 8)), "known must be bool of shape")])
def test_arrays_of_another_shape_or_kind_are_refused(tiny, image, known, words):
    with pytest.raises(ValueError, match=words):
        linpix.complete(str(tiny), image, known)


def said(folder: Path, *words: str) -> tuple[int, str]:
    """What a command says that is run in a folder whose modules come first, as those of python -m do."""
    ended = subprocess.run([sys.executable, "-m", "linpix", *words], cwd=folder, capture_output=True, text=True,
                           timeout=60, env={"PYTHONPATH": str(ROOT)})
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(("place", "words"), [
    ("server.py", ("key", "bob")), ("server.py", ("serve",)), ("model/__init__.py", ("doctor",)),
    ("training.py", ("train", "tiny", "--data", "x", "--out", "y"))])
def test_a_module_that_stands_in_place_of_ours_is_named(tmp_path, place, words):
    file = tmp_path / place
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    status, message = said(tmp_path, *words)
    assert status == 2
    assert f"{file} is imported as '{place.split('.')[0].split('/')[0]}', where LinPix needs" in message
    assert "run it in another folder, or rename" in message and "Traceback" not in message
