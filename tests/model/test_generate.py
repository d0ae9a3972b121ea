import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from linpix.model.config import PRESETS
from linpix.model.generate import decode_threads, generate, noise_of, starts_of
from linpix.model.inputs import START
from linpix.model.mixture import log_likelihood
from linpix.model.nets import net_for
from linpix.model.philox import uniforms
from linpix.model.transformer import Transformer
from tests.nets import net_of

ATTENTIONS = ["linear", "softmax"]
SEEDS = [5, 6, 2**40 + 7, 2**53 - 1]


def uneven_net(**changes) -> Transformer:
    """Parameters far from those of another random network, so that a wrong one shows in the
    draws.
    """
    net = net_of(dataclasses.replace(PRESETS["tiny"], **changes))
    net.head.weight *= 3
    # narrow: values depend on what came before, not on u alone
    net.head.bias[2 * net.config.mixtures :] -= 2
    return net


def share_equal(ours: Tensor, theirs: Tensor) -> float:
    return float((ours == theirs).float().mean())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_an_images_own_seed_reproduces_it_alone_as_far_as_rounding_allows(attention):
    """The same bytes are promised for the same batch only: another batch size is another matrix
    product. It
    may round otherwise, and one value that lands on the other side of .5 changes all that follow
    it."""
    net = uneven_net(attention=attention)
    seeds = list(range(16))
    together = generate(net, seeds)
    alone = torch.cat([generate(net, [seed]) for seed in seeds])
    assert share_equal(together, alone) > 0.95  # 0.3 and less for other seeds
    assert share_equal(together, alone.roll(1, 0)) < 0.5


def test_the_noise_of_an_image_depends_on_nothing_but_its_seed_and_position():
    t = np.arange(10, 64)
    for config in (PRESETS["tiny"], PRESETS["cifar10-conditional"]):
        C = config.token_size
        together = noise_of(config, np.array(SEEDS), t)
        assert together.shape == (4, 54, C, 2)
        for row, seed in enumerate(SEEDS):
            assert torch.equal(together[row], noise_of(config, np.array([seed]), t)[0])
            assert (
                together[row, 3].tolist()
                == uniforms(np.array(seed), 13 * C + np.arange(C))[:, :2].tolist()
            )


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("prefix", [1, 20, 63, 64])
def test_known_sub_pixels_are_kept_and_steer_what_follows(prefix, attention):
    net = uneven_net(attention=attention)
    random = torch.Generator().manual_seed(prefix)
    known = torch.randint(0, 256, (2, 64), generator=random, dtype=torch.uint8)
    drawn = generate(net, [5, 6], known=known, prefix=prefix)
    assert torch.equal(drawn[:, :prefix], known[:, :prefix])
    if prefix < 63:  # what is not known is drawn, and not as it would be after other pixels
        assert share_equal(drawn[:, prefix:], known[:, prefix:]) < 0.5
        assert share_equal(drawn[:, prefix:], generate(net, [5, 6])[:, prefix:]) < 0.9


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("prefix", [1, 20, 63])
def test_completing_a_drawn_image_with_its_own_seed_draws_it_again(prefix, attention):
    """Noise belongs to positions; prefill rounds unlike steps, so nearly always, not always."""
    net = uneven_net(attention=attention)
    seeds = list(range(16))
    drawn = generate(net, seeds)
    assert share_equal(generate(net, seeds, known=drawn, prefix=prefix), drawn) > 0.95


def test_keys_and_values_count_in_how_many_threads_a_step_is_worth():
    """64 images of mnist-small: what linear attention keeps is small all along, what softmax keeps
    is not.
    """

    def threads_of(attention: str, rows: int, t: int) -> int:
        with torch.device("meta"):
            net = net_for(dataclasses.replace(PRESETS["mnist-small"], attention=attention))
        with decode_threads(net, rows, t):
            return torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert [threads_of("linear", 64, t) for t in (0, 783)] == [1, 1]
        assert [threads_of("softmax", 64, t) for t in (0, 49, 196, 783)] == [1, 1, 2, 2]
        assert [threads_of("softmax", rows, 783) for rows in (1, 4, 16)] == [1, 1, 1]
        assert threads_of("linear", 256, 0) == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_conditional_model_draws_a_class_first_and_each_as_often():
    config = dataclasses.replace(PRESETS["tiny"], patch=4, background=0, background_dim=16)
    net = net_for(config).eval()
    seeds = np.arange(10_000)
    drawn = (
        starts_of(net, torch.zeros(len(seeds), 10), seeds, torch.full((len(seeds),), START))
        - START
        - 1
    )
    assert int((drawn.bincount(minlength=10) - 1_000).abs().max()) < 4 * 30
    asked = starts_of(net, torch.zeros(2, 10), seeds[:2], torch.tensor([START + 4, START]))
    assert asked.tolist() == [START + 4, START + 1 + int(drawn[1])]
    assert torch.equal(
        generate(net, [0, 1, 2]), generate(net, [0, 1, 2], labels=drawn[:3].tolist())
    )
    with pytest.raises(ValueError, match="give a label, 0 to 9"):
        net.parameters_of(np.zeros((1, 64), np.uint8))


def test_temperature_0_needs_no_seed():
    net = uneven_net()
    coldest = generate(net, SEEDS, temperature=0.0)
    assert torch.equal(coldest, coldest[:1].expand(4, -1))
    assert not torch.equal(coldest, generate(net, SEEDS))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_drawn_images_are_as_surprising_as_the_model_says(attention):
    """The mean of -log p over draws is the entropy, position by position: the loop feeds what it
    should.
    """
    net = uneven_net(attention=attention)
    drawn = generate(net, list(range(200)))
    parameters = net.parameters_of(drawn)
    surprise = -log_likelihood(parameters, drawn)
    log_p = log_likelihood(
        parameters[..., None, :].expand(200, 64, 256, -1), torch.arange(256).expand(200, 64, 256)
    )
    excess = surprise + (log_p.exp() * log_p).sum(-1)  # of mean 0, whatever came before
    assert abs(float(excess.mean())) < 5 * float(excess.std()) / math.sqrt(excess.numel())
    # and images that were not drawn here are noticed
    strange = -log_likelihood(parameters, drawn.roll(1, 0))
    assert float((strange - surprise).mean()) > 0.5


def test_without_a_start_token_sub_pixel_0_is_drawn_from_its_marginal():
    marginal = [0.0] * 256
    marginal[3], marginal[200], marginal[255] = 0.25, 0.25, 0.5
    net = uneven_net(classes=0, first_marginal=tuple(marginal))
    seeds = list(range(200))
    drawn = generate(net, seeds)
    u = uniforms(np.array(seeds), np.array(0))[:, 0]
    assert drawn[:, 0].tolist() == [3 if x < 0.25 else 200 if x < 0.5 else 255 for x in u]
    assert set(drawn[:, 0].tolist()) == {3, 200, 255}
    assert len(drawn[:, 1].unique()) > 3


def test_the_published_samplers_scale_is_used_where_the_configuration_says_so():
    """elu(log_scale) + 1.0001 and exp(log_scale) differ above 0; below, by the 0.0001 and the clamp
    at -7.
    """
    ours, published = (
        generate(uneven_net(scale_transform=transform), SEEDS) for transform in ("exp", "elu")
    )
    assert share_equal(ours, published) < 0.5
