"""What a look inside a model shows is what the model computes."""

import dataclasses

import numpy as np
import pytest
import torch

from linpix.model.attention import attention_for
from linpix.model.conditional import Conditional
from linpix.model.config import PRESETS
from linpix.model.inside import Inside, Token
from linpix.model.likelihood import Scoring
from tests.nets import CONDITIONAL, PALETTE, perturbed_net

TINY = PRESETS["tiny"]
MARGINAL = dataclasses.replace(TINY, classes=0, first_marginal=(0.25, *[0.75 / 255] * 255))
COLOUR = dataclasses.replace(TINY, channels=3, tokens="pixel", neighbours=((0, -1, 1),))
CONFIGS = {
    "linear": TINY,
    "softmax": dataclasses.replace(TINY, attention="softmax"),
    "marginal": MARGINAL,
    "pixels": COLOUR,
    "conditional": CONDITIONAL,
    "palette": PALETTE,
}
SOME = np.random.default_rng(2).random(64) < 0.3


def inside_of(name: str) -> Inside:
    """A random picture, of which a conditional model knows some pixels."""
    net = perturbed_net(CONFIGS[name])
    largest = len(net.config.palette) or 256
    picture = np.random.default_rng(0).integers(0, largest, net.config.subpixels, dtype=np.uint8)
    picture[np.arange(len(picture)) % 13 < 9] = 0  # most of it is background
    return Inside(net, picture, SOME if net.config.patch else None).complete()


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_sum_to_one_and_with_the_values_they_give_what_attention_gives(name):
    found = inside_of(name)
    for layer in range(found.net.config.layers):
        weights = torch.from_numpy(found.attention(layer, 1))
        assert weights.shape == (len(found.tokens),) * 2 and not weights.triu(1).any()
        torch.testing.assert_close(weights.sum(1), torch.ones(len(weights)), atol=1e-5, rtol=0)
        q, k, v = found._recorded(layer, 1)
        given = (x.expand(1, found.net.config.heads, -1, -1) for x in (q, k, v))
        y = found.net.attention.parallel(layer, *given)[0, 1]
        torch.testing.assert_close(weights @ v, y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["linear", "marginal", "pixels", "conditional", "palette"])
def test_states_are_those_of_decoding(name):
    found = inside_of(name)
    net, canvas, known = found.net, found._canvas[None], found._known[None]
    pool, slot = attention_for(net.config).new_state(1), torch.tensor([1])
    if isinstance(net, Conditional):
        net.read(canvas, known, pool, slot)
    start = torch.tensor([net.start_index(found.label)])
    for t in range(net.config.length):
        if not known[0, t * net.config.token_size]:
            net.step(canvas, torch.tensor([t]), start, pool, slot, known)
    for layer in range(net.config.layers):
        S, z = found.states(layer, 1)
        np.testing.assert_allclose(S[-1], pool.S[1, layer, 1], atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(z[-1], pool.z[1, layer, 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_distributions_hold_the_bits_of_each_sub_pixel(name):
    found = inside_of(name)
    config, canvas, known = found.net.config, found._canvas.numpy(), found._known.numpy()
    given = known if config.patch else None
    scored = Scoring(found.net, canvas, given, [found.label]).complete().log_probs[0].numpy()
    np.testing.assert_allclose(found.bits, -scored / np.log(2), atol=1e-4, rtol=1e-4)
    probabilities = found.distributions
    hidden = np.flatnonzero(~known)
    assert np.isnan(probabilities[known]).all()
    np.testing.assert_allclose(probabilities[hidden].sum(1), 1, atol=1e-5)
    drawn = probabilities[hidden, canvas[hidden]]
    np.testing.assert_allclose(-np.log2(drawn), found.bits[hidden], atol=1e-3, rtol=1e-4)


def test_known_squares_and_the_query_are_tokens_and_background_is_none():
    found = inside_of("conditional")
    kinds = [token.kind for token in found.tokens]
    first = kinds.index("drawn")
    assert set(kinds[: first - 1]) == {"patch"} and kinds[first - 1] == "query"
    skipped = [t for t in range(64) if not SOME[t] and Token("drawn", t) not in found.tokens]
    assert skipped and np.isfinite(found.bits[skipped]).all()


def test_what_is_not_there_is_refused_with_the_cure():
    with pytest.raises(ValueError, match="head must be"):
        inside_of("linear").attention(0, 9)
    with pytest.raises(ValueError, match="no state of S and z"):
        inside_of("softmax").states(0, 0)
    net = perturbed_net(dataclasses.replace(TINY, attention="lsh"))
    with pytest.raises(ValueError, match="linear or softmax attention"):
        Inside(net, np.zeros(64, np.uint8))
    broken = perturbed_net(TINY)
    broken.head.bias.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="NaN"):
        Inside(broken, np.zeros(64, np.uint8)).complete()
