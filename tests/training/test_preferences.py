"""Preferences: which images a model would accept, and that it learns to draw more of them."""

import dataclasses
import shutil
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from linpix.__main__ import main
from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.model.heads import log_likelihood
from linpix.model.inputs import START
from linpix.model.likelihood import class_log_probs_of
from linpix.model.transformer import Transformer
from linpix.training import preferences
from linpix.training.batches import Batches, Parts
from linpix.training.loop import loss_function
from linpix.training.preferences import Preferred, draw, read, write
from linpix.training.run import Run, TrainConfig
from linpix.training.workers import Workers
from tools.harness.commands import ran

pytestmark = pytest.mark.kernels


def nats_of(net: Transformer, images: Tensor, labels: Tensor) -> Tensor:
    """Log-likelihood of each image given its class."""
    with torch.inference_mode():
        parameters = net(images, START + 1 + labels)
    return log_likelihood(net.config, parameters, images).sum(1)


@pytest.fixture
def found(class_first, tmp_path):
    """A checkpoint with random weights, to which a class is recognised if it is likelier than
    others.
    """
    folder = shutil.copytree(class_first, tmp_path / "first")
    checkpoint.describe(folder, {"recognised": 0.1})
    return checkpoint.read(folder)


@pytest.fixture
def file(found, tmp_path):
    write(tmp_path / "drawn", draw(found, 40))
    return tmp_path / "drawn"


def test_images_are_accepted_as_attempts_would_accept_them(found, file):
    drawn = read(file, found.net.config)
    assert drawn.labels.tolist() == [*range(10)] * 4
    sure = [
        class_log_probs_of(found.net, image)[label]
        for image, label in zip(drawn.images.numpy(), drawn.labels.tolist(), strict=True)
    ]
    assert drawn.accepted.tolist() == [log_prob >= np.log(0.1) for log_prob in sure]
    assert 0 < int(drawn.accepted.sum()) < 40
    assert abs(float(drawn.weights.sum())) < 1e-4
    assert ((drawn.weights > 0) == drawn.accepted).all()
    expected = nats_of(found.net, drawn.images, drawn.labels)
    torch.testing.assert_close(drawn.nats, expected, rtol=1e-4, atol=1e-3)


def test_the_loss_pushes_an_image_by_its_weight_and_less_when_it_has_moved():
    weights = torch.tensor([0.0, 0.5, -1.5, -1.5])
    before = torch.tensor([0.0, -30.0, -30.0, -30.0])
    likelihood = torch.tensor([-20.0, -30.0, -30.0, -30.0], requires_grad=True)
    preferences.loss(likelihood, Preferred(before, weights)).backward()
    torch.testing.assert_close(likelihood.grad, torch.tensor([-1.0, -0.5, 1.5, 1.5]))
    # accepted by 20 nats more probable, refused by as much less, but one
    moved = torch.tensor([-20.0, -10.0, -50.0, -30.0], requires_grad=True)
    preferences.loss(moved, Preferred(before, weights)).backward()
    real, accepted, refused, still = moved.grad.tolist()
    assert real == -1 and -0.01 < accepted < 0 and 0 < refused < 0.01
    assert still == pytest.approx(1.5)


def test_half_of_a_batch_are_drawn_images_and_their_classes_are_not_learnt(found, file, stripes):
    config = found.net.config
    settings = TrainConfig(batch=8, preferences=str(file), readings=2, conditional=1, seed=3)
    batches = Batches(stripes, settings, config)
    images, start, known = batches[7]
    drawn = {bytes(image): label for image, label in zip(*read(file, config)[:2], strict=True)}
    for image, given in zip(images[4:], start[4:].tolist(), strict=True):
        assert given == START + 1 + int(drawn[bytes(image)])
    assert known[:4].any(1).all() and not known[4:].any()
    real = Batches(stripes, dataclasses.replace(settings, preferences=""), config)[7][0]
    assert torch.equal(images[:4], real[:4])
    for part in Parts(batches, found.net, Workers(1, 2))[7]:
        assert (part.preferred.weights != 0).tolist() == [False, False, True, True]
        assert (part.readings.start == START).tolist() == [False] * 4 + [True] * 4
    assert all(map(torch.equal, batches[7], Batches(stripes, settings, config)[7]))


def test_training_makes_accepted_images_more_probable_than_others(found, file, stripes):
    settings = TrainConfig(batch=32, preferences=str(file), compile=False, bf16=False)
    run = Run(found.net.config, settings)
    run.start_from(found)
    parts = Parts(Batches(stripes, settings, found.net.config), run.net, Workers())
    loss_of = loss_function(run.net, settings)
    optimizer = torch.optim.AdamW(run.net.parameters(), lr=3e-3)
    drawn = read(file, found.net.config)
    for step in range(30):
        optimizer.zero_grad()
        [part] = parts[step]
        loss_of(part).backward()
        optimizer.step()
    change = nats_of(run.net, drawn.images, drawn.labels) - drawn.nats
    assert float(change[drawn.accepted].mean()) > float(change[~drawn.accepted].mean()) + 3


def test_a_run_learns_from_them_and_goes_on(pictures, tmp_path, capsys):
    first, second, file = tmp_path / "first", tmp_path / "second", tmp_path / "drawn"
    flags = "--layers 1 --size 8x8 --batch 4 --no-compile"
    train = f"train mnist-conditional --data {pictures} {flags}"
    assert main(f"{train} --images 8 --out {first}".split()) == 0
    checkpoint.describe(first, {"recognised": 0.25})
    made = ran(f"{sys.executable} -m linpix.training.preferences {first} {file} --images 40")
    assert made.returncode == 0, made.stderr
    accepted = int(read(file, checkpoint.read(first).net.config).accepted.sum())
    assert made.stdout == f"{accepted} of 40 images accepted\n"
    more = f"{train} --images 16 --max-images 8 --out {second}"
    assert main(f"{more} --init {first} --preferences {file}".split()) == 0
    assert f"--preferences {file}" in checkpoint.read(second).provenance["command"]
    assert main(f"{more} --resume".split()) == 0
    assert "the schedule is complete" in capsys.readouterr().err


def test_what_does_not_fit_is_refused(found, file, tiny, tmp_path):
    config = found.net.config
    with pytest.raises(ValueError, match="give a model that draws the class"):
        draw(checkpoint.read(tiny), 2)
    with pytest.raises(ValueError, match="of a model that draws the class first; train one"):
        Run(PRESETS["tiny"], TrainConfig(preferences=str(file)))
    with pytest.raises(ValueError, match="64 sub-pixels and 10 classes"):
        read(file, dataclasses.replace(config, classes=9))
    good = read(file, config)
    write(file, good._replace(accepted=torch.ones(40, dtype=torch.bool)))
    with pytest.raises(ValueError, match="all of its images were accepted, or none"):
        read(file, config)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="make it again with python -m"):
        read(file, config)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        read(file, config)
