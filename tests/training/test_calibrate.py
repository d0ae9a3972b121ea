"""Calibration finds what a head was multiplied by, from images that the network drew before."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from linpix.__main__ import main
from linpix.model import checkpoint
from linpix.model.config import PRESETS, ModelConfig
from linpix.model.generate import generate
from linpix.model.nets import net_for
from linpix.model.transformer import Transformer
from linpix.training import calibrate as calibration
from linpix.training import export as export_module
from linpix.training.calibrate import calibrate
from linpix.training.datasets import Dataset, load
from linpix.training.evaluate import evaluate

TINY = PRESETS["tiny"]
CONFIGS = {
    "sub-pixels": TINY,
    "no start": replace(
        TINY, classes=0, first_marginal=tuple([1 / 256] * 256), look_ups=("previous",)
    ),
    "known pixels": replace(
        TINY,
        look_ups=("previous", "row", "column", "class"),
        patch=4,
        background=0,
        following=((0, 1, 0), (1, 0, 0)),
    ),
    "pixels": replace(
        TINY,
        channels=3,
        tokens="pixel",
        look_ups=("previous", "row", "column"),
        neighbours=((-1, 0, 0), (-1, 0, 1), (-1, 0, 2)),
        patch=4,
        classes=0,
    ),
}


def drawing(config: ModelConfig) -> Transformer:
    """A network with random weights whose mixtures differ from token to token."""
    torch.manual_seed(0)
    net = net_for(config).eval().requires_grad_(False)
    net.head.weight *= 4
    if config.head == "mixture":
        net.head.bias[
            config.mixtures * (1 + config.token_size) : config.mixtures
            * (1 + 2 * config.token_size)
        ] = -2
    else:
        net.head.weight *= 20  # which begin near 0
    return net


def drawn_by(net: Transformer) -> Dataset:
    classes = net.config.classes
    labels = np.arange(300) % classes if classes else np.full(300, -1)
    images = generate(
        net, list(range(300)), labels=[int(label) if label >= 0 else None for label in labels]
    )
    return Dataset("drawn", images.numpy(), labels, ())


@pytest.mark.parametrize(
    "config",
    [
        (
            config
            if name in ("sub-pixels", "known pixels")
            else pytest.param(config, marks=pytest.mark.slow)
        )
        for name, config in CONFIGS.items()
    ],
    ids=CONFIGS,
)
def test_calibration_takes_back_what_made_a_head_too_sure(config, monkeypatch):
    def none_known(generator, config, count):
        # a random network cannot predict what it did not draw
        return np.zeros((count, config.subpixels), np.bool_)

    monkeypatch.setattr(calibration, "known_of", none_known)
    net = drawing(config)
    data, K, C = drawn_by(net), config.mixtures, config.token_size
    well = evaluate(net, data.images[:50]).bits_per_dim
    net.head.weight[:K] *= 2
    net.head.bias[:K] *= 2
    net.head.bias[K * (1 + C) : K * (1 + 2 * C)] -= np.log(2.0)
    sure = evaluate(net, data.images[:50]).bits_per_dim
    found = calibrate(net, data)
    assert found.images == 300
    assert (found.logit_factor, found.scale_factor) == (
        pytest.approx(0.5, rel=0.1),
        pytest.approx(2, rel=0.1),
    )
    assert found.after < found.before
    assert evaluate(net, data.images[:50]).bits_per_dim - well < 0.05 * (sure - well)


def test_logits_of_values_have_one_factor():
    net = drawing(replace(TINY, head="categorical"))
    data = drawn_by(net)
    net.head.weight *= 2
    net.head.bias *= 2
    found = calibrate(net, data)
    assert found.logit_factor == pytest.approx(0.5, rel=0.1) and found.scale_factor is None
    assert str(found).endswith(f"logits times {found.logit_factor:.3f}.")


@pytest.mark.slow
def test_an_export_is_calibrated_on_what_the_run_held_out_and_says_so(
    tmp_path, capsys, monkeypatch
):
    random = np.random.default_rng(0)
    for i in range(240):
        (tmp_path / "data" / str(i % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (8, 8), np.uint8)).save(
            tmp_path / "data" / str(i % 2) / f"{i}.png"
        )
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    train = f"train tiny --data {tmp_path}/data --images 16 --batch 8 --no-compile --device cpu"
    for name, wanted in (("run", 21), ("few", 3)):
        assert main(f"{train} --out {tmp_path}/{name} --validation {wanted}".split()) == 0
    export = ["export", "--out", str(tmp_path / "shipped"), "--calibrate", "--data"]
    for folder, name, error in (
        ("data", "few", "--validation held out 3; leave out --calibrate"),
        ("other", "run", "was trained on, data, to know .* but --data holds other"),
    ):
        assert main([*export, str(tmp_path / folder), str(tmp_path / name)]) == 2
        assert re.search(error, capsys.readouterr().err)
    given = []
    monkeypatch.setattr(
        export_module, "calibrate", lambda net, data: given.append(data) or calibrate(net, data)
    )
    assert main([*export, str(tmp_path / "data"), str(tmp_path / "run")]) == 0
    assert re.search(
        r"calibrated on 21 images .* bits/dim before, .* after", capsys.readouterr().err
    )
    trained_on = load(tmp_path / "data", "train", TINY)
    assert np.array_equal(given[0].images, trained_on.images[-21:])
    assert np.array_equal(given[0].labels, trained_on.labels[-21:])
    history = json.loads((tmp_path / "shipped/config.json").read_text())["provenance"]["history"]
    assert history.startswith(
        "Its head was calibrated on 21 images that this training had held out: logits times "
    )
    assert history in (tmp_path / "shipped/README.md").read_text()
    heads = [checkpoint.load(tmp_path / name).head for name in ("run", "shipped")]
    K = TINY.mixtures
    assert torch.equal(heads[0].weight[K:], heads[1].weight[K:])
    assert not torch.equal(heads[0].weight[:K], heads[1].weight[:K])
