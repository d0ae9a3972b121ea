"""Reversible layers and chunked feed-forward: results, gradients, and the activations that they
keep.
"""

import dataclasses
import math
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linpix.model import mixture
from linpix.model.config import AttentionKind, ModelConfig
from linpix.model.experimental.reversible import Residual
from linpix.model.inputs import START
from linpix.model.nets import net_for
from linpix.model.transformer import Transformer
from tests.model.test_transformer import SMALL, changed_net
from tests.nets import noise

REVERSIBLE = dataclasses.replace(
    SMALL, residual="reversible", norm="pre", lsh_rounds=2, lsh_buckets=4, lsh_chunk=10
)
KINDS = get_args(AttentionKind)


def training_net(
    config: ModelConfig, chunks: int = 1, dtype: torch.dtype = torch.float64
) -> Transformer:
    torch.manual_seed(0)
    return net_for(config, feed_forward_chunks=chunks).to(dtype)


def loss_of(net: Transformer, *, bf16: bool = False, count: int = 2) -> Tensor:
    canvas = noise(count, net.config.subpixels)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        parameters = net(canvas, torch.tensor([START, START + 1] * (count // 2)))
    return -mixture.log_likelihood(parameters, canvas).mean()


def store_activations(net: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let autograd keep what the layers compute: the definition of a gradient."""

    def run(layers, x: Tensor, attend, *, compiled: bool) -> Tensor:
        for index, layer in enumerate(layers):
            x = layer(x, index, attend)
        return x

    monkeypatch.setattr(net, "_reversibly", run)


def gradients(net: Transformer, **how) -> dict[str, Tensor]:
    torch.manual_seed(5)  # lsh attention draws rotations
    net.zero_grad()
    loss_of(net, **how).backward()
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters()}


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of any parameter's gradient, relative to its norm."""
    return max(
        float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected
    )


def test_the_two_streams_are_those_of_equation_9():
    net = changed_net(REVERSIBLE, layers=2).double()
    canvas, start = noise(2, SMALL.subpixels), torch.tensor([START, START + 1])
    t = torch.arange(SMALL.subpixels).expand(2, -1)
    x1 = x2 = net.inputs(canvas, t, start)
    for index, layer in enumerate(net.layers):
        x1 = x1 + layer.attention(layer.norm1(x2), index, net.attention.parallel)
        x2 = x2 + layer.feed_forward(layer.norm2(x1))
    torch.testing.assert_close(net.head(net.norm((x1 + x2) / 2)), net(canvas, start))


@pytest.mark.parametrize("chunks", [1, 7])
@pytest.mark.parametrize("layers", [1, 12])
@pytest.mark.parametrize("attention", KINDS)
def test_gradients_are_those_of_stored_activations(attention, layers, chunks, monkeypatch):
    config = dataclasses.replace(REVERSIBLE, attention=attention, layers=layers)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        net = training_net(config, chunks, dtype)
        found = gradients(net)
        with monkeypatch.context() as patch:
            store_activations(net, patch)
            expected = gradients(net)
        assert 0 < largest_difference(found, expected) < tolerance  # 0: nothing was undone


@pytest.mark.parametrize("attention", KINDS)
def test_autocast_reaches_into_the_way_back(attention, monkeypatch):
    """Undone streams are off by float32's rounding, which tips some of bf16's; so gradients agree
    to bf16's.
    """
    net = training_net(dataclasses.replace(REVERSIBLE, attention=attention), dtype=torch.float32)
    results, learnt, pull = set(), set(), Residual.pull

    def watched(self: Residual, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        result = pull(self, x, gradient)
        results.add(result[0].dtype)
        learnt.update(one.dtype for one in result[2])
        return result

    monkeypatch.setattr(Residual, "pull", watched)
    found = gradients(net, bf16=True)
    assert results == {torch.bfloat16} and learnt == {torch.float32}
    store_activations(net, monkeypatch)
    assert largest_difference(found, gradients(net, bf16=True)) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "compiled"), [*((kind, False) for kind in KINDS), ("lsh", True)]
)
def test_on_the_way_back_a_residual_gives_again_what_it_gave(attention, compiled, monkeypatch):
    """So random rotations are the same ones; and drawing them again leaves the random numbers
    alone.
    """
    given, again = [], []
    call, pull = Residual.__call__, Residual.pull

    def recorded_call(self: Residual, x: Tensor) -> Tensor:
        given.append(call(self, x))
        return given[-1]

    def recorded_pull(
        self: Residual, x: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        result = pull(self, x, gradient)
        again.append(result[0])
        return result

    monkeypatch.setattr(Residual, "__call__", recorded_call)
    monkeypatch.setattr(Residual, "pull", recorded_pull)
    layers = 1 if compiled else 3  # each takes its time to be compiled
    net = training_net(
        dataclasses.replace(REVERSIBLE, attention=attention, layers=layers), dtype=torch.float32
    )
    canvas, start = noise(2, SMALL.subpixels), torch.tensor([START, START + 1])
    # not the likelihood, whose kernels would be compiled as well
    result = (torch.compile(net) if compiled else net)(canvas, start).square().mean()
    state = torch.get_rng_state()
    result.backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert len(given) == len(again) == 2 * layers
    for one, other in zip(given, reversed(again), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def kept(net: Transformer) -> int:
    """Bytes that a forward pass leaves behind for the way back, parameters aside; a storage counts
    once.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    storages = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = loss_of(net)
    # and so all that was packed is still there, and no address counts twice
    assert result.requires_grad
    return sum(size for address, size in storages.items() if address not in own)


@pytest.mark.parametrize("attention", KINDS)
def test_what_is_kept_for_the_way_back_does_not_grow_with_the_layers(attention):
    def sizes(residual: str) -> list[int]:
        config = dataclasses.replace(REVERSIBLE, attention=attention, residual=residual)
        return [
            kept(training_net(dataclasses.replace(config, layers=layers))) for layers in (1, 2, 8)
        ]

    one, two, eight = sizes("reversible")
    assert one == two == eight
    one, two, eight = sizes("plain")
    assert eight - two == 6 * (two - one) > 0


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("residual", ["plain", "reversible"])
def test_in_chunks_the_hidden_units_of_all_positions_never_exist_together(residual):
    config = dataclasses.replace(REVERSIBLE, residual=residual, d_ff=512)
    whole = 2 * config.subpixels * config.d_ff
    largest = []
    for chunks in (1, 5):
        net = training_net(config, chunks)
        with Largest() as seen:
            loss_of(net).backward()
        largest.append(seen.elements)
    assert largest[0] == whole
    assert largest[1] <= max(math.ceil(config.subpixels / 5) * 2 * config.d_ff, whole // 5)


@pytest.mark.parametrize("chunks", [2, 7, 60, 100])
@pytest.mark.parametrize(
    ("residual", "norm"), [("plain", "pre"), ("plain", "post"), ("reversible", "pre")]
)
def test_chunks_of_the_feed_forward_change_neither_loss_nor_gradients(residual, norm, chunks):
    config = dataclasses.replace(REVERSIBLE, residual=residual, norm=norm)
    whole, parts = training_net(config), training_net(config, chunks)
    torch.testing.assert_close(loss_of(whole), loss_of(parts), rtol=1e-12, atol=0)
    assert largest_difference(gradients(parts), gradients(whole)) < 1e-11
    canvas = noise(2, config.subpixels)
    with torch.no_grad():
        torch.testing.assert_close(whole(canvas), parts(canvas), rtol=1e-11, atol=1e-11)


def test_reversible_residuals_refuse_a_norm_after_the_sum():
    with pytest.raises(ValueError, match=r"reversible residuals need norm 'pre'.*got norm 'post'"):
        ModelConfig(residual="reversible")
    with pytest.raises(ValueError, match="residual must be one of plain, reversible, got 'both'"):
        ModelConfig(residual="both")
