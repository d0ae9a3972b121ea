"""Which engine, precision and device run a model, and the sentences about those that cannot."""

import dataclasses
import re

import pytest
import torch

from linpix.model import ops
from linpix.model.choice import Choice, choose, gpu_obstacle
from linpix.model.config import PRESETS

pytestmark = pytest.mark.kernels

TINY = PRESETS["tiny"]


def test_auto_is_the_compiled_engine_for_what_it_can_run_and_the_eager_one_else():
    fastest = "bf16" if torch.ops.linpix.cpu_has_fast_bf16() else "fp32"
    assert choose(TINY) == Choice("compiled", fastest)
    assert choose(TINY, precision="fp32").precision == "fp32"
    assert choose(TINY, "eager").engine == "eager"
    assert choose(dataclasses.replace(TINY, attention="softmax")).engine == "eager"
    assert choose(dataclasses.replace(TINY, d_model=24)).engine == "eager"
    other = choose(dataclasses.replace(TINY, feature_map="relu"))
    assert (other.engine, other.warning) == (
        "eager",
        (
            "decoding slowly in the eager engine: it has kernels only for "
            "the feature map elu+1, but this model has relu"
        ),
    )


@pytest.mark.parametrize(
    ("change", "engine", "precision", "message"),
    [
        ({"attention": "softmax"}, "compiled", "auto", "only linear attention"),
        (
            {"feature_map": "relu"},
            "compiled",
            "auto",
            r"elu\+1, but this model has relu; or use --engine eager",
        ),
        (
            {"residual": "reversible"},
            "compiled",
            "auto",
            "only plain residuals, but this model has reversible; or use",
        ),
        ({"d_model": 24}, "compiled", "auto", "multiple of 16, but this model's is 24"),
        ({"attention": "softmax"}, "auto", "bf16", "--precision fp32"),
        ({}, "eager", "bf16", "--engine compiled"),
        ({"attention": "softmax"}, "auto", "int8", "--precision fp32"),
        ({}, "eager", "int8", "--engine compiled"),
        ({}, "complied", "auto", "engine must be auto, eager or compiled, got 'complied'"),
        ({}, "auto", "fp16", "precision must be auto, fp32, bf16 or int8, got 'fp16'"),
    ],
)
def test_what_cannot_be_chosen_says_why_and_what_to_do(change, engine, precision, message):
    with pytest.raises(ValueError, match=message):
        choose(dataclasses.replace(TINY, **change), engine, precision)


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        ({}, ""),
        ({"background": 0, "patch": 4}, ""),
        ({"key_dim": 64, "value_dim": 64}, "heads of 8, 16, 32, for keys and values alike"),
        ({"attention": "softmax"}, "only linear attention"),
        ({"key_dim": 24}, "this model has 24 and 8"),
        ({"mixtures": 600}, "at most 512 mixtures"),
        ({"feature_map": "random"}, "feature map elu+1"),
        ({"residual": "reversible"}, "only plain residuals, but this model has reversible"),
        ({"d_model": 20}, "multiple of 8 and at most 512, but this model's is 20"),
        ({"d_ff": 4096}, "this model has 4096"),
    ],
)
def test_auto_is_the_gpu_for_what_it_can_run_and_the_processor_else(monkeypatch, change, obstacle):
    config = dataclasses.replace(TINY, **change)
    assert choose(config, device="auto").device == ("cuda" if ops.gpu and not obstacle else "cpu")
    monkeypatch.setattr(ops, "gpu", True)
    assert obstacle in gpu_obstacle(config) and bool(obstacle) == bool(gpu_obstacle(config))
    assert choose(config, device="auto").device == ("cpu" if obstacle else "cuda")
    assert choose(config, "eager", device="auto").device == "cpu"
    if obstacle:
        with pytest.raises(ValueError, match=re.escape(obstacle)):
            choose(config, device="cuda")
    else:
        assert choose(config, device="cuda") == Choice("compiled", "bf16", device="cuda")
        with pytest.raises(ValueError, match="the eager engine runs only on a CPU"):
            choose(config, "eager", device="cuda")


def test_a_gpu_refuses_int8_and_auto_is_the_processor_then(monkeypatch):
    monkeypatch.setattr(ops, "gpu", True)
    with pytest.raises(
        ValueError,
        match="multiply in fp32 or bf16, not in int8; use --precision bf16; or use --dev",
    ):
        choose(TINY, precision="int8", device="cuda")
    assert choose(TINY, precision="int8", device="auto") == Choice("compiled", "int8")
