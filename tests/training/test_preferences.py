"""Preferences: what a model accepts of what it draws, and that it learns to draw more of it."""

import os
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from linpix.model import checkpoint
from linpix.model.heads import log_likelihood
from linpix.model.inputs import START
from linpix.model.likelihood import class_log_probs_of
from linpix.model.transformer import Transformer
from linpix.training import preferences
from linpix.training.datasets import Dataset
from linpix.training.evaluate import evaluate
from linpix.training.preferences import Drawn, check, draw, judged_of, learn
from linpix.training.run import Run, TrainConfig
from linpix.training.workers import Workers
from tests.nets import perturbed_net, saved
from tools.harness.commands import ran

pytestmark = pytest.mark.kernels


def nats_of(net: Transformer, drawn: Drawn) -> Tensor:
    """Log-likelihood of each image given its class."""
    with torch.inference_mode():
        parameters = net.eval()(drawn.images, START + 1 + drawn.labels)
    return log_likelihood(net.config, parameters, drawn.images).sum(1)


@pytest.fixture
def found(class_first, tmp_path):
    """A checkpoint with random weights, to which a class is recognised if it is likelier than
    others.
    """
    folder = shutil.copytree(class_first, tmp_path / "first")
    checkpoint.describe(folder, {"recognised": 0.1})
    return checkpoint.read(folder)


def of(**settings) -> TrainConfig:
    return TrainConfig(compile=False, warmup_images=0, **settings)


def test_images_are_accepted_as_attempts_would_accept_them(found):
    drawn = draw(found, 40)
    assert drawn.labels.tolist() == [*range(10)] * 4
    sure = [
        class_log_probs_of(found.net, image)[label]
        for image, label in zip(drawn.images.numpy(), drawn.labels.tolist(), strict=True)
    ]
    assert drawn.accepted.tolist() == [log_prob >= np.log(0.1) for log_prob in sure]
    assert 0 < int(drawn.accepted.sum()) < 40
    torch.testing.assert_close(drawn.nats, nats_of(found.net, drawn), rtol=1e-4, atol=1e-3)
    assert torch.equal(draw(found, 10, 20).images, drawn.images[20:30])


def test_an_image_in_pieces_is_not_accepted(found):
    whole = {"pieces": 0.0, "full_ink": 0.0, "greys": 2.0, "specks": 0.0, "divided": []}
    checkpoint.describe(found.folder, {"recognised": 1e-9, "real_look": whole})
    strict = checkpoint.read(found.folder)
    drawn = draw(strict, 20)
    torn = strict.torn(
        drawn.images.numpy(), np.zeros(drawn.images.shape, np.bool_), drawn.labels.tolist()
    )
    assert any(torn) and drawn.accepted.tolist() == [not apart for apart in torn]


@pytest.mark.parametrize("accepted", [0, 1, 7, 10])
def test_accepted_images_weigh_as_much_as_refused_ones(accepted):
    many = torch.arange(10) < accepted
    weights = Drawn(torch.zeros(10, 4), torch.zeros(10), torch.zeros(10), many).weights
    assert (weights[~many] == -preferences.WEIGHT).all() and (weights[many] >= 0).all()
    if accepted:
        assert abs(float(weights.sum())) < 1e-5


def test_the_loss_pushes_an_image_by_its_weight_and_less_when_it_has_moved():
    weights, before = torch.tensor([0.5, -1.5, -1.5]), torch.full((3,), -30.0)
    still = torch.full((3,), -30.0, requires_grad=True)
    preferences.loss(still, before, weights).backward()
    torch.testing.assert_close(still.grad, -weights)
    # accepted by 20 nats more probable, refused by as much less, refused but more probable
    moved = torch.tensor([-10.0, -50.0, -10.0], requires_grad=True)
    preferences.loss(moved, before, weights).backward()
    accepted, refused, worse = moved.grad.tolist()
    assert -0.01 < accepted < 0 < refused < 0.01 and worse == pytest.approx(3, abs=0.02)


def are_bright(images: Tensor) -> Tensor:
    return images.float().mean(1) > 127


@pytest.fixture(scope="module")
def halves() -> Dataset:
    """100 pictures that are black or white, whatever their class."""
    random = np.random.default_rng(0)
    white = random.random((100, 1)) < 0.5
    images = np.where(white, 255, np.zeros((1, 64))).astype(np.uint8)
    return Dataset("halves", images, random.integers(0, 10, 100), tuple("0123456789"))


def test_a_model_draws_more_of_what_is_accepted_and_goes_on_learning(found, halves, monkeypatch):
    monkeypatch.setattr(preferences, "ROUND", 10)
    bright = {}
    for wanted in (True, False):
        monkeypatch.setattr(  # a rule that is soon learnt
            preferences,
            "accepted_of",
            lambda _, images, __, wanted=wanted: (are_bright(images) == wanted).tolist(),
        )
        settings = of(images=1_600, learning_rate=2e-3, head_share=1.0, ema=0.9)
        run = learn(Workers(), found, settings, halves)
        learnt = replace(found, net=run.exported.eval())
        bright[wanted] = float(are_bright(draw(learnt, 200).images).double().mean())
        before, after = (
            evaluate(net, halves.images, labels=halves.labels).bits_per_dim
            for net in (found.net, learnt.net)
        )
        assert after < before - 1
    assert bright[True] > bright[False] + 0.2, bright


@pytest.mark.parametrize("seed", [0, 1])
def test_each_image_is_drawn_once_by_one_process(found, monkeypatch, seed):
    monkeypatch.setattr(preferences, "ROUND", 3)
    firsts, drawn = [], preferences.draw

    def noted(given, count, first):
        firsts.append((first, count))
        return drawn(given, count, first)

    monkeypatch.setattr(preferences, "draw", noted)
    run = Run(found.net.config, of(batch=4, images=16, seed=seed))
    for rank in range(2):
        assert len([*judged_of(run, found, Workers(rank, 2))]) == 4
    numbers = [number for first, count in firsts for number in range(first, first + count)]
    assert sorted(numbers) == [*range(16 * seed, 16 * seed + 16)]


def test_the_command_writes_a_checkpoint_that_says_how_it_was_made(found, pictures, tmp_path):
    first, out = tmp_path / "four", tmp_path / "second"
    old = {"weights": "bfloat16", "class_agreement": 0.5, "recognised": 0.3, "attempts": 5}
    told = {"command": "linpix train old", "history": "It was once young."}
    saved(first, perturbed_net(replace(found.net.config, classes=4)), **old, **told)
    command = f"{sys.executable} -m linpix.training.preferences {first} --data {pictures}"
    made = ran(f"{command} --out {out} --images 40", env=os.environ | {"OMP_NUM_THREADS": "2"})
    assert made.returncode == 0, made.stderr
    assert "bits/dim of images held out before" in made.stdout
    assert "0 images: accepts 0." in made.stderr
    kept, new = checkpoint.read(first), checkpoint.read(out)
    assert not torch.equal(*(next(each.net.parameters()) for each in (kept, new)))
    facts = new.provenance
    assert (new.recognised, new.attempts, facts["images"]) == (0.3, 5, 32)
    assert "real_look" in facts and not {"weights", "class_agreement"} & facts.keys()
    assert f"--out {out}" in facts["command"]
    assert facts["history"] == (
        "It began with weights of `linpix train old`. It was once young. In the last 32 images it"
        " also drew as many itself, and learnt which of them it would accept."
    )
    again = ran(f"{command} --out {out}")
    assert again.returncode == 1
    assert again.stderr == f"preferences: {out} exists; give another --out\n"


def test_photographs_without_a_ground_are_learnt_from_too(found, halves, tmp_path):
    found = replace(found, board={"ground": None, "ink": None, "prepare": None})
    preferences.train(found, halves, tmp_path / "new", of(batch=4, images=8), command="")
    assert "real_look" not in checkpoint.read(tmp_path / "new").provenance


def test_what_does_not_fit_is_refused(found, tiny, halves, tmp_path):
    out = tmp_path / "new"
    with pytest.raises(ValueError, match="give a model that draws the class first"):
        check(checkpoint.read(tiny), out)
    with pytest.raises(ValueError, match="images must be at least 16, got 0"):
        preferences.settings_of(found, 0, "none", 0)
    few = replace(halves.part(slice(9)), name="few")
    with pytest.raises(ValueError, match="10 classes, and few has 10 in 9 pictures; give"):
        preferences.train(found, few, out, of(), command="")
    more = replace(halves, classes=(*halves.classes, "10"))
    with pytest.raises(ValueError, match="has 10 classes, and halves has 11"):
        preferences.train(found, more, out, of(), command="")
    found.net.config = replace(found.net.config, d_model=40, heads=2)
    with pytest.raises(ValueError, match="cannot be drawn from with the compiled engine"):
        check(found, out)
