import dataclasses

import pytest
import torch

from linpix.model.config import PRESETS, ModelConfig
from linpix.model.inputs import START
from linpix.model.nets import net_for
from linpix.model.transformer import Transformer
from linpix.training.grow import grown, widened

TINY = PRESETS["tiny"]
CONFIGS = [
    TINY,
    dataclasses.replace(TINY, attention="softmax"),
    dataclasses.replace(TINY, norm="post"),
    dataclasses.replace(
        TINY,
        norm="post",
        look_ups=("previous", "row", "column", "class"),
        patch=4,
        background=0,
        following=((0, 1, 0), (1, 0, 0)),
    ),
]


def case(config: ModelConfig) -> tuple[Transformer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    net = net_for(config).eval()
    images = torch.randint(0, 256, (6, config.subpixels)).to(torch.uint8)
    return net, images, START + 1 + torch.arange(6)


@pytest.mark.parametrize("config", CONFIGS, ids=["pre", "softmax", "post", "conditional"])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_a_deeper_network_begins_with_the_same_predictions(config, more):
    net, images, start = case(config)
    deeper = grown(net, config.layers + more, lambda net: net(images, start))
    assert deeper.config == dataclasses.replace(config, layers=config.layers + more)
    with torch.no_grad():
        before, after = net(images, start), deeper(images, start)
    difference = float((after - before).norm() / before.norm())
    assert difference < (1e-6 if config.norm == "pre" or not more else 0.05)


def test_layers_are_not_taken_away_and_reversible_ones_do_not_grow():
    net, images, start = case(TINY)
    with pytest.raises(ValueError, match="2 plain layers cannot start a network of 1"):
        grown(net, 1, lambda net: net(images, start))
    reversible, *_ = case(dataclasses.replace(TINY, residual="reversible"))
    with pytest.raises(ValueError, match="2 reversible layers"):
        grown(reversible, 4, lambda net: net(images, start))


def test_a_norm_that_cannot_give_back_what_comes_in_is_an_error():
    net, images, start = case(CONFIGS[2])
    with torch.no_grad():
        net.layers[0].norm2.weight[0] = 100  # of this channel a norm leaves the sign
    with pytest.raises(ValueError, match="after layer 0 would change its input by"):
        grown(net, 3, lambda net: net(images, start))


@pytest.mark.parametrize(
    "config",
    [
        *CONFIGS,
        dataclasses.replace(TINY, attention="lsh", lsh_buckets=4, lsh_chunk=16),
        dataclasses.replace(TINY, residual="reversible"),
    ],
    ids=["pre", "softmax", "post", "conditional", "lsh", "reversible"],
)
@pytest.mark.parametrize("times", [2, 3])
def test_a_wider_network_begins_with_the_same_predictions(config, times):
    net, images, start = case(config)
    wider = widened(net, times).eval()
    assert (wider.config.heads, wider.config.d_model, wider.config.d_ff) == (
        2 * times,
        16 * times,
        32 * times,
    )
    assert wider.config.key_dim == config.key_dim
    found = []
    for each in (net, wider):
        torch.manual_seed(0)  # lsh hashes all heads with the same random directions
        with torch.no_grad():
            found.append(each(images, start))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS[2:], ids=["post", "conditional"])
def test_the_copies_of_a_wider_network_learn_different_things(config):
    net, images, start = case(config)
    wider = widened(net, 2)
    wider(images, start).square().mean().backward()
    for layer in wider.layers:
        for linear in (layer.out, layer.up, layer.down):
            one, other = linear.weight.grad.chunk(2)
            assert float((one - other).norm()) > 0.05 * float(one.norm())
