import math

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from linpix.model.mixture import draw as draw_token
from linpix.model.mixture import log_likelihood
from linpix.model.philox import uniforms

DRAWS = 1_000_000
DIGITS = 1200  # of a reference that subtracts probabilities: 1 - e^-2000 must not be 1
# Mixtures as (logit_prob, mean, log_scale) each: smooth; narrow beside wide; on both edges and
# beyond;
# one value alone (log_scale is clamped at -7); flatter than an image is wide
MIXTURES = {
    "smooth": [(0.3, -0.4, -1.5), (-0.2, 0.5, -2.0), (1.1, 0.1, -2.5)],
    "narrow": [(2.0, -0.31, -6.0), (0.0, 0.2, -1.0)],
    "edges": [(0.0, -1.0, -4.0), (0.5, 1.0, -3.0), (-1.0, 1.7, -2.0)],
    "spike": [(0.0, 41 / 127.5 - 1 + 0.003, -30.0)],
    "flat": [(0.0, 0.2, 0.5), (-3.0, -0.8, -5.0)],
}


def draw(
    parameters: Tensor, u: Tensor, temperature: Tensor, scale_transform: str = "exp"
) -> Tensor:
    """Tokens of one sub-pixel: u (B, 2), returns (B,)."""
    return draw_token(parameters, u[:, None], temperature, scale_transform)[:, 0]


def parameters_of(mixture: list[tuple[float, ...]], dtype: torch.dtype = torch.float32) -> Tensor:
    """(3 * K,), or of pixels (10 * K,)"""
    return torch.tensor(mixture, dtype=dtype).T.flatten()


def exactly(mixture: list[tuple[float, float, float]], value: int) -> mpmath.mpf:
    """The probability of a value straight from its definition."""
    with mpmath.workdps(DIGITS):

        def below(x: mpmath.mpf) -> mpmath.mpf:
            total = sum(mpmath.exp(logit) for logit, _, _ in mixture)
            return sum(
                mpmath.exp(logit)
                / total
                / (1 + mpmath.exp((mean - x) / mpmath.exp(max(scale, -7.0))))
                for logit, mean, scale in mixture
            )

        def edge(v: int) -> mpmath.mpf:
            return mpmath.mpf(2 * v + 1) / 255 - 1

        if value == 255:  # what is above, by symmetry: 1 - below would round
            mirrored = [(logit, -mean, log_scale) for logit, mean, log_scale in mixture]
            return exactly(mirrored, 0)
        return below(edge(value)) - (below(edge(value - 1)) if value else 0)


def distribution(
    mixture: list[tuple[float, float, float]],
    temperature: float = 1.0,
    scale_transform: str = "exp",
) -> np.ndarray:
    """The 256 probabilities that draws should have, in float64, written apart from the code under
    test.
    """
    logits, means, log_scales = np.array(mixture).T
    weights = np.exp(logits - logits.max())
    scales = (
        np.exp(np.maximum(log_scales, -7))
        if scale_transform == "exp"
        else np.where(log_scales > 0, log_scales, np.expm1(log_scales)) + 1.0001
    ) * temperature
    edges = (2 * np.arange(255) + 1) / 255 - 1
    below = 0.5 * (1 + np.tanh((edges[:, None] - means) / scales / 2)) @ (weights / weights.sum())
    return np.diff(np.concatenate([[0], below, [1]]))


@pytest.mark.parametrize("log_scale", [-1e3, -20.0, -7.0, -3.0, 0.0, 10.0, 60.0, 1e3])
@pytest.mark.parametrize("mean", [-50.0, -1.0, 0.001, 1.0, 50.0])
def test_probabilities_sum_to_one_at_every_scale(mean, log_scale):
    parameters = parameters_of([(0.0, mean, log_scale)], torch.float64).expand(256, -1)
    assert float(log_likelihood(parameters, torch.arange(256)).exp().sum()) == pytest.approx(
        1, abs=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "mixture",
    [*MIXTURES.values(), [(0.0, 40.0, -7.0)], [(0.0, 0.1, 25.0)]],
    ids=[*MIXTURES, "far", "vast"],
)
def test_the_likelihood_equals_its_definition(mixture, dtype):
    values = [0, 1, 2, 40, 41, 42, 127, 128, 200, 253, 254, 255]
    parameters = parameters_of(mixture, dtype)
    # of the numbers that torch really has: a narrow logistic tells -0.31 from its float32 neighbour
    mixture = list(zip(*parameters.view(3, -1).tolist(), strict=True))
    found = log_likelihood(parameters.expand(len(values), -1), torch.tensor(values))
    with mpmath.workdps(DIGITS):
        expected = [float(mpmath.log(exactly(mixture, value))) for value in values]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=dtype), rtol=tolerance, atol=tolerance
    )


def test_gradients_are_finite_however_extreme_the_parameters():
    extremes = torch.cartesian_prod(
        torch.tensor([-1e4, 0.0, 1e4]),
        torch.tensor([-1e6, -1.0, 0.0, 1e6]),
        torch.tensor([-1e4, -7.0, 0.0, 80.0, 95.0, 1e4]),
    )
    # beside a second, tame logistic
    parameters = torch.cat([extremes, torch.zeros_like(extremes)], 1)
    parameters = parameters[:, [0, 3, 1, 4, 2, 5]].repeat_interleave(5, 0).requires_grad_()
    values = torch.tensor([0, 1, 127, 254, 255]).repeat(len(extremes))
    loss = log_likelihood(parameters, values)
    loss.sum().backward()
    assert bool(loss.isfinite().all())
    assert bool(parameters.grad.isfinite().all())
    assert bool((parameters.grad != 0).any(0).all())  # none is finite because nothing flows


@pytest.fixture(scope="module")
def noise() -> Tensor:
    """(DRAWS, 2): the words 0 and 1 of as many seeds."""
    return torch.from_numpy(uniforms(np.arange(DRAWS), np.array(7))[:, :2].copy())


def chi_square(values: Tensor, probabilities: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom; values expected fewer than 10 times count
    together.
    """
    found, expected = np.bincount(values.numpy(), minlength=256), probabilities * len(values)
    rare = expected < 10
    found = np.append(found[~rare], found[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    # at least 1: a flood of impossible values must show, a single unlikely one must not
    return float(((found - expected) ** 2 / expected.clip(1)).sum()), len(found) - 1


@pytest.mark.parametrize(
    ("name", "temperature", "scale_transform"),
    [
        *((name, 1.0, "exp") for name in MIXTURES),
        ("smooth", 0.6, "exp"),
        ("edges", 1.5, "exp"),
        ("smooth", 1.0, "elu"),
        ("edges", 0.8, "elu"),
    ],
)
def test_draws_have_the_discretised_distribution(name, temperature, scale_transform, noise):
    parameters = parameters_of(MIXTURES[name]).expand(DRAWS, -1)
    values = draw(parameters, noise, torch.full((DRAWS,), temperature), scale_transform)
    expected = distribution(MIXTURES[name], temperature, scale_transform)
    statistic, freedom = chi_square(values, expected)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)
    # a distribution one value off is noticed
    shifted, freedom = chi_square(values, np.roll(expected, 1))
    assert shifted > freedom + 50 * math.sqrt(2 * freedom)


def test_temperature_0_takes_the_mean_of_the_most_probable_mixture():
    parameters = parameters_of([(0.1, -0.4, -1.5), (1.1, 0.25, 3.0), (0.3, 0.9, -2.0)]).expand(
        100, -1
    )
    u = torch.rand(100, 2, generator=torch.Generator().manual_seed(0))
    assert draw(parameters, u, torch.zeros(100)).tolist() == [round((0.25 + 1) / 2 * 255)] * 100


def test_a_mean_outside_the_image_is_drawn_as_its_edge():
    parameters = torch.stack(
        [parameters_of([(0.0, -9.0, -7.0)]), parameters_of([(0.0, 9.0, -7.0)])]
    )
    for temperature in (0.0, 1.0):
        assert draw(
            parameters, torch.full((2, 2), 0.5), torch.full((2,), temperature)
        ).tolist() == [0, 255]


# A pixel's parameters by component: logit_prob | means of r, g, b | log_scales | coefficients: g
# from r, b from r, b from g. Smooth; green follows red and blue follows green; on the edges
PIXELS = {
    "smooth": [
        (0.3, -0.4, 0.1, 0.5, -1.5, -2.0, -2.5, 0.6, -0.3, 1.2),
        (-0.2, 0.5, 0.3, -0.2, -2.0, -1.0, -1.5, 0.1, 2.0, -0.7),
        (1.1, 0.1, -0.6, 0.0, -2.5, -2.5, -2.0, -1.0, 0.4, 0.2),
    ],
    "alike": [(0.0, -0.2, 0.0, 0.0, -1.0, -6.0, -6.0, 20.0, 0.0, 20.0)],
    "edges": [
        (0.0, -1.0, 1.0, 0.9, -4.0, -3.0, -2.0, 0.5, 0.5, 0.5),
        (0.4, 1.0, -1.0, 1.6, -3.0, -30.0, 0.5, -3.0, 0.0, 9.0),
    ],
}


def means_given(component: tuple[float, ...], pixel: list[int]) -> list[float]:
    """Means of one component's three logistics, from its parameters and the values of a pixel."""
    _, r, g, b, *_, g_from_r, b_from_r, b_from_g = component
    red, green = (value / 127.5 - 1 for value in pixel[:2])
    return [
        r,
        g + math.tanh(g_from_r) * red,
        b + math.tanh(b_from_r) * red + math.tanh(b_from_g) * green,
    ]


def pixel_exactly(
    components: list[tuple[float, ...]], pixel: list[int], channels: int
) -> mpmath.mpf:
    """The probability of a pixel's first channels straight from its definition."""
    with mpmath.workdps(DIGITS):
        total = sum(mpmath.exp(component[0]) for component in components)
        return sum(
            mpmath.exp(component[0])
            / total
            * mpmath.fprod(
                exactly([(0.0, mean, log_scale)], value)
                for mean, log_scale, value in zip(
                    means_given(component, pixel)[:channels], component[4:], pixel, strict=False
                )
            )
            for component in components
        )


@pytest.mark.parametrize("components", PIXELS.values(), ids=PIXELS)
def test_the_likelihood_of_a_pixel_equals_its_definition(components):
    pixels = [[0, 255, 255], [255, 0, 254], [100, 150, 60], [51, 50, 52], [127, 128, 1]]
    parameters = parameters_of(components, torch.float64).expand(len(pixels), -1)
    found = log_likelihood(parameters, torch.tensor(pixels).flatten())
    with mpmath.workdps(DIGITS):
        joint = [
            [mpmath.log(pixel_exactly(components, pixel, channels)) for channels in (1, 2, 3)]
            for pixel in pixels
        ]
        expected = [
            float(here - before)
            for each in joint
            for here, before in zip(each, [0, *each], strict=False)
        ]
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize(
    ("components", "count"),
    [(MIXTURES["edges"], 6), (PIXELS["smooth"], 2)],
    ids=["sub-pixels", "pixels"],
)
def test_the_gradient_is_that_of_finite_differences(components, count):
    parameters = torch.stack([parameters_of(components, torch.float64)] * count).requires_grad_()
    values = torch.tensor([0, 3, 250, 255, 120, 130])
    assert torch.autograd.gradcheck(lambda p: log_likelihood(p, values), parameters)
    assert bool(
        (torch.autograd.grad(log_likelihood(parameters, values).sum(), parameters)[0] != 0).all()
    )


@pytest.mark.parametrize("components", PIXELS.values(), ids=PIXELS)
def test_each_drawn_channel_has_the_distribution_that_is_trained_given_the_earlier_ones(components):
    """Where it falls in its cumulative distribution is uniform, whatever was drawn before it."""
    count = 2_000
    u = torch.from_numpy(uniforms(np.arange(count)[:, None], np.arange(3))[..., :2].copy())
    pixels = draw_token(parameters_of(components).expand(count, -1), u, torch.ones(count)).long()
    inside = np.random.default_rng(0).random(count)
    for channel in range(3):
        each = pixels[:, None].repeat(1, 256, 1)
        each[..., channel] = torch.arange(256)
        parameters = parameters_of(components, torch.float64).expand(count * 256, 1, -1)
        shares = (
            log_likelihood(parameters, each.flatten(0, 1))[:, channel]
            .exp()
            .view(count, 256)
            .numpy()
        )
        value = pixels[:, channel].numpy()
        below, here = shares.cumsum(1)[np.arange(count), value], shares[np.arange(count), value]
        found, _ = np.histogram(below - inside * here, bins=20, range=(0, 1))
        statistic = float(((found - count / 20) ** 2).sum() / (count / 20))
        assert statistic < 19 + 5 * math.sqrt(2 * 19), f"channel {channel}"
        shifted, _ = np.histogram(
            (below - inside * here + 0.05) * (value % 2), bins=20, range=(0, 1)
        )
        # not every set of values passes
        assert ((shifted - count / 20) ** 2).sum() / (count / 20) > 200


def test_a_pixel_is_drawn_from_one_component_by_the_rounded_values_before():
    components = [
        (0.2, -0.5, -0.4, 0.3, -3.0, -2.0, -2.5, 0.7, 0.2, -0.4),
        (0.0, 0.5, 0.6, -0.3, -3.0, -2.0, -2.5, -0.7, 0.9, 0.4),
    ]
    first = [(0.1, 0.3), (0.8, 0.9)]  # of red: which component, which value
    u = torch.tensor([[each, (0.99, 0.2), (0.01, 0.7)] for each in first])
    drawn = draw_token(
        parameters_of(components).expand(2, -1), u, torch.tensor([1.0, 0.7])
    ).tolist()
    for picked, temperature in ((0, 1.0), (1, 0.7)):
        pixel = [0, 0, 0]
        for channel in range(3):
            value = float(u[picked, channel, 1])
            x = means_given(components[picked], pixel)[channel] + math.exp(
                components[picked][4 + channel]
            ) * temperature * math.log(value / (1 - value))
            pixel[channel] = round(min(max((x + 1) / 2 * 255, 0), 255))
        assert drawn[picked] == pixel


def test_at_temperature_0_a_pixel_is_the_means_of_the_most_probable_component():
    components = PIXELS["smooth"]
    u = torch.rand(20, 3, 2, generator=torch.Generator().manual_seed(0))
    drawn = draw_token(parameters_of(components).expand(20, -1), u, torch.zeros(20)).tolist()
    pixel = [0, 0, 0]
    for channel in range(3):
        pixel[channel] = round((means_given(components[2], pixel)[channel] + 1) / 2 * 255)
    assert drawn == [pixel] * 20
