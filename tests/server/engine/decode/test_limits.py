"""What a step cannot be faster than, and how near decode comes to it on this machine."""

import dataclasses
import itertools

import pytest
import torch

from linpix.model import checkpoint, ops
from linpix.model.config import PRESETS
from linpix.model.folders import find
from linpix.server.engine.decode import limits
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.limits import arithmetic, limit_of, measured_share


@pytest.mark.parametrize(("head", "parameters"), [("mixture", 30), ("categorical", 256)])
def test_arithmetic_counts_two_operations_a_weight_and_four_a_number_of_the_state(head, parameters):
    config = dataclasses.replace(PRESETS["mnist-small"], head=head)
    d = config.d_model
    weights = config.layers * 12 * d**2 + parameters * d  # qkv and out 4, feed-forward 8
    state = config.layers * d * config.value_dim
    assert arithmetic(config, "fp32") == {"fp32": config.length * (2 * weights + 4 * state)}
    assert sum(arithmetic(config, "int8").values()) == arithmetic(config, "fp32")["fp32"]


@pytest.mark.skipif(not ops.compiled, reason="limits are those of csrc's kernels")
@pytest.mark.parametrize(("flops", "by"), [(1e6, "arithmetic"), (1e15, "memory")])
def test_a_step_is_limited_by_what_takes_longer(flops, by):
    decoder = new_decoder(checkpoint.named("mnist-small"), 4, precision="fp32")
    limit = limit_of(decoder, 4, {"fp32": flops})
    assert limit.by == by
    of_products = 4 * limit.operations / decoder.config.length / flops
    assert limit.seconds == pytest.approx(of_products) if by == "arithmetic" else limit.seconds < 1
    assert limit.moved == decoder.packed.step_bytes + 8 * decoder.net.attention.state_bytes


def test_a_rate_is_the_work_over_the_median_of_seconds():
    ticks = itertools.accumulate([0, 1, 0, 2, 0, 9, 0, 4, 0, 4])  # five products
    assert limits.matrix_product(torch.float32, 8, lambda: next(ticks)) == 2 * 8**3 / 4
    seconds = itertools.count(0, 0.5)
    threads = torch.get_num_threads()
    read = 1000 // threads * threads * 40
    assert limits.read_rate(1000, lambda: next(seconds)) == read / 0.5


@pytest.mark.skipif(not ops.compiled, reason="limits are those of csrc's kernels")
def test_a_share_is_passes_a_second_over_those_of_the_limit(monkeypatch):
    monkeypatch.setattr(limits, "matrix_product", lambda *_: 1e9)
    seconds = itertools.count()  # a quantum takes one, and so does a reading of memory
    found = measured_share(find("mnist-small"), lambda: next(seconds))
    assert found and found.limited_by == "arithmetic"
    assert found.passes_per_second == limits.IMAGES * limits.STEPS
    config = PRESETS["mnist-small"]
    [operations] = arithmetic(config, "fp32").values()
    assert found.share == pytest.approx(found.passes_per_second * operations / config.length / 1e9)


def test_what_the_kernels_do_not_decode_has_no_share(monkeypatch):
    monkeypatch.setattr(ops, "compiled", False)
    assert measured_share(find("mnist-small")) is None
