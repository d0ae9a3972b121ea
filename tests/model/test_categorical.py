"""256 logits: the likelihood and the draws of both ways of predicting a sub-pixel, eager and
compiled.
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from linpix.model import categorical
from linpix.model.attention.linear import RecurrentState
from linpix.model.config import PRESETS, ModelConfig
from linpix.model.inputs import START
from linpix.model.packing import pack, pools_of, rows_of
from linpix.model.philox import uniforms
from linpix.model.transformer import Transformer
from tests.nets import net_of

DRAWS = 40_000
GROUND = 3


def logits_of(name: str) -> Tensor:
    """(256,) float64, of a sub-pixel of each sort."""
    values = torch.arange(256, dtype=torch.float64)
    smooth = -(((values - 120) / 60) ** 2)
    return {
        "smooth": smooth,
        "spikes": torch.where(values % 40 == 3, 5.0, -3.0) + 0.01 * values,
        "ground": torch.where(values == GROUND, 9.0, smooth),
        "impossible": torch.where(values > 9, -200.0, smooth),
        "no ground": torch.where(values == GROUND, -90.0, smooth),
    }[name]


SORTS = ("smooth", "spikes", "ground", "impossible", "no ground")


def distribution(logits: Tensor, temperature: float, ground: int = GROUND) -> np.ndarray:
    """The probabilities that draws should have, in float64, written apart from the code under
    test.
    """
    p = np.exp(logits.numpy() - logits.numpy().max())
    p /= p.sum()
    others = np.where(np.arange(256) == ground, 0, p)
    others = (others / others.max()) ** (1 / temperature)
    sharpened = (1 - p[ground]) * others / others.sum()
    sharpened[ground] = p[ground]
    return sharpened


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations by which the statistic exceeds its mean. Values expected fewer than 5
    times count as one.
    """
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    assert observed[wanted == 0].sum() == 0
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    return float(
        (((observed - wanted) ** 2 / wanted).sum() - (len(wanted) - 1)) / np.sqrt(2 * len(wanted))
    )


@pytest.mark.parametrize("sort", SORTS)
def test_probabilities_sum_to_one(sort):
    logits = logits_of(sort)
    found = categorical.log_likelihood(logits.expand(256, -1), torch.arange(256))
    assert float(found.exp().sum()) == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(found.exp(), distribution(logits, 1.0), rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("sort", SORTS)
def test_both_stages_sum_to_one_and_the_ground_s_number_decides_alone(sort):
    logits = logits_of(sort)
    parameters = categorical.from_two_stages(logits, GROUND)
    assert float(parameters.exp().sum()) == pytest.approx(1, abs=1e-12)
    assert float(parameters[GROUND].exp()) == pytest.approx(
        float(torch.sigmoid(logits[GROUND])), rel=1e-12
    )
    others = torch.arange(256) != GROUND
    torch.testing.assert_close(parameters[others].log_softmax(0), logits[others].log_softmax(0))
    torch.testing.assert_close(
        categorical.log_likelihood(parameters.expand(256, -1), torch.arange(256)), parameters
    )


@pytest.mark.parametrize(
    ("sort", "temperature"), [*((sort, 1.0) for sort in SORTS), ("spikes", 0.5), ("ground", 1.5)]
)
def test_draws_have_the_probabilities_and_ground_is_as_frequent_at_any_temperature(
    sort, temperature
):
    logits = logits_of(sort)
    u = torch.from_numpy(uniforms(np.arange(DRAWS), np.array(5))[:, None, :2].copy())
    drawn = categorical.draw(
        logits.float().expand(DRAWS, -1), u, torch.full((DRAWS,), temperature), GROUND
    )
    counts = np.bincount(drawn[:, 0], minlength=256)
    assert abs(chi_square(counts, DRAWS * distribution(logits, temperature))) < 5
    at_1 = categorical.draw(logits.float().expand(DRAWS, -1), u, torch.ones(DRAWS), GROUND)
    assert torch.equal(drawn == GROUND, at_1 == GROUND)


@pytest.mark.parametrize(("ground", "expected"), [(7.0, GROUND), (3.0, 120)])
def test_temperature_0_takes_the_ground_if_it_is_probable_and_else_the_likeliest_other_value(
    ground, expected
):
    logits = logits_of("smooth").float()  # the others sum to about e^4.7
    logits[GROUND] = ground
    drawn = categorical.draw(logits.expand(9, -1), torch.rand(9, 1, 2), torch.zeros(9), GROUND)
    assert drawn.tolist() == [[expected]] * 9


TINY = dataclasses.replace(PRESETS["tiny"], head="categorical")
BACKGROUND = dataclasses.replace(TINY, background=GROUND, background_dim=16, norm="post")
OTHER_GROUND = dataclasses.replace(BACKGROUND, background=200)


def one_step(
    config: ModelConfig, rows: int, temperature: float, *, forced: Tensor | None = None
) -> tuple[Transformer, Tensor, Tensor]:
    """The network, the first sub-pixels that the compiled engine draws for seeds 0, 1, ..., and
    their nats.
    """
    net = net_of(config, spread=0.3)
    if config.background is not None:
        net.background.head.bias[config.ground] = 0.5
    state = RecurrentState(config, rows)
    canvas = torch.zeros(rows + 1, config.subpixels, dtype=torch.uint8)
    known = torch.zeros_like(canvas, dtype=torch.bool)
    if forced is not None:
        canvas[1:, 0], known[1:, 0] = forced, True
    log_probs, finite, *_ = pack(net, torch.float32).decode(
        pools_of(canvas=canvas, known=known, S=state.S, z=state.z, last=state.last),
        rows_of(slot=range(1, rows + 1), steps=1, start=START, seed=range(rows)),
        torch.full((rows,), temperature),
        log_probs=True,
    )
    assert bool(finite.all())
    return net, canvas[1:, 0], log_probs[:, 0]


@pytest.mark.kernels
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(
    "config", [TINY, BACKGROUND, OTHER_GROUND], ids=["layers", "background", "another ground"]
)
def test_the_compiled_engine_s_draws_have_the_probabilities(config, temperature):
    net, drawn, _ = one_step(config, DRAWS, temperature)
    logits = net(torch.zeros(1, config.subpixels, dtype=torch.uint8))[0, 0].double()
    expected = DRAWS * distribution(logits, temperature, config.ground)
    assert abs(chi_square(np.bincount(drawn, minlength=256), expected)) < 5


@pytest.mark.kernels
@pytest.mark.parametrize("config", [TINY, BACKGROUND], ids=["layers", "background"])
def test_the_compiled_engine_s_log_probabilities_sum_to_one(config):
    net, _, log_probs = one_step(config, 256, 1.0, forced=torch.arange(256, dtype=torch.uint8))
    assert float(log_probs.double().exp().sum()) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(
        log_probs,
        net(torch.zeros(1, 64, dtype=torch.uint8))[0, 0].log_softmax(0),
        atol=1e-4,
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 3, "neighbours": ()}, "needs 1 channel and a start token; got channels=3"),
        (
            {"classes": 0, "first_marginal": (1.0,) + (0.0,) * 255},
            "got channels=1 and no start token",
        ),
        ({"head": "logistic"}, "head must be one of mixture, categorical, got 'logistic'"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)
