import dataclasses
import json

import numpy as np
import pytest
import torch

from linpix.model import checkpoint, ops
from linpix.model.config import PRESETS
from linpix.model.likelihood import Scoring
from linpix.model.nets import net_for
from linpix.model.packing import PRECISIONS, pack
from linpix.training.datasets import load
from linpix.training.evaluate import bits_of, evaluate, evaluate_classes
from tests.linpix.test_main import inside, succeeds
from tests.nets import CONDITIONAL, net_of


@pytest.mark.skipif(not ops.compiled, reason=ops.why())
@pytest.mark.parametrize(
    ("precision", "bound"),
    [
        ("bf16", 5e-3),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [("fp32", 1e-4), ("int8", 1e-2)]),
    ],
)
def test_the_compiled_engine_gives_the_shipped_model_its_bits_per_dim(data, precision, bound):
    """Against float64 by the parallel form, on the first 16 test images: each image, and more so
    their mean.
    """
    net = checkpoint.named("mnist-small").net
    images = load(data / "mnist", "test", net.config).images[:16]
    stepped = bits_of(net, images, packed=pack(net, PRECISIONS[precision]))
    exact = bits_of(net.double(), images)
    assert stepped.shape == exact.shape == (16,)
    assert float((stepped - exact).abs().max()) < 3 * bound
    assert float((stepped.mean() - exact.mean()).abs()) < bound
    assert stepped.dtype == torch.float64


@pytest.mark.skipif(not ops.compiled, reason=ops.why())
def test_a_model_that_draws_the_class_first_has_the_bits_of_all_classes_together():
    net = net_of(CONDITIONAL)
    net.inputs.table.data *= 4  # classes that differ
    images = torch.randint(0, 256, (3, 64), dtype=torch.uint8).numpy()
    # of image and class
    each = np.stack([bits_of(net, images, labels=np.full(3, label)) for label in range(10)])
    together = -np.log2(np.exp2(-64 * each).sum(0)) / 64
    assert np.ptp(each, axis=0).min() > 0.001
    assert bits_of(net, images).numpy() == pytest.approx(together, abs=1e-6)
    assert bits_of(net, images, packed=pack(net, torch.float32)).numpy() == pytest.approx(
        together, abs=1e-4
    )


@pytest.mark.parametrize(
    "config", [PRESETS["tiny"], CONDITIONAL], ids=["class optional", "class first"]
)
def test_accuracy_is_the_share_of_images_whose_most_probable_class_is_theirs(config):
    net = net_of(config)
    images = torch.randint(0, 256, (4, 64), dtype=torch.uint8).numpy()
    scored = [Scoring(net, image, labels=range(10)).complete() for image in images]
    likeliest = np.stack([scoring.log_probs.sum(1) for scoring in scored]).argmax(1)
    labels = np.where(np.arange(4) < 3, likeliest, (likeliest + 1) % 10)
    measured, named = evaluate_classes(net, images, labels)
    assert named.accuracy == 0.75
    assert named.interval == pytest.approx(1.96 * 0.25)
    alone = evaluate(net, images)
    assert measured.images == 4
    assert (measured.bits_per_dim, measured.interval) == pytest.approx(
        (alone.bits_per_dim, alone.interval)
    )


@pytest.mark.slow
def test_evaluate_prints_how_often_the_class_is_right(data):
    flags = ("--data", data / "mnist", "--limit", 10, "--labels", "all", "--json")
    measured = json.loads(succeeds("evaluate", "mnist-conditional", *flags).stdout)
    assert measured["labels"]["accuracy"] > 0.7 and measured["images"] == 10


@pytest.mark.slow
def test_a_model_that_knows_other_classes_is_refused(data, tmp_path):
    config = dataclasses.replace(
        PRESETS["mnist-small"], classes=0, look_ups=("previous", "row", "column")
    )
    checkpoint.save(tmp_path / "nameless", net_for(config), {"data": "mnist"}, "# nameless")
    flags = ("--data", data / "mnist", "--limit", 1, "--labels", "all")
    refused = inside("evaluate", tmp_path / "nameless", *flags)
    assert refused.returncode == 2 and "has 0 classes" in refused.stderr
