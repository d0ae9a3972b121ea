"""A discretised mixture of K logistics: its exact likelihood, and exact draws from it.

A token has C sub-pixels: 1, or the 3 channels of a pixel. Its parameters are groups of K numbers
(Salimans et al., 2017, section 2.2): logit_probs, C groups of means, C of log_scales, and C * (C -
1) / 2 of coefficients (green from red, blue from red, blue from green). That is 3 * K numbers for
one channel and 10 * K for three. All channels of a pixel come from one component, and
tanh(coefficient) * (an earlier channel's value) is added to the mean of a later one. Value v of
0..255 lies at v / 127.5 - 1 and has an interval of width 2 / 255.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_LOG_SCALE = -7.0
_HALF_BIN = 1 / 255


def groups(token_size: int) -> int:
    """Number of groups of K parameters for a token of C = token_size sub-pixels."""
    return 1 + 2 * token_size + token_size * (token_size - 1) // 2


def _parts(parameters: Tensor, token_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logit_probs (..., K), means and log_scales (..., C, K), coefficients (..., C * (C - 1) / 2,
    K).
    """
    every = parameters.unflatten(-1, (groups(token_size), -1))
    one, *others = every.split(
        [1, token_size, token_size, groups(token_size) - 1 - 2 * token_size], -2
    )
    return one.squeeze(-2), *others


def _shifted(
    means: Sequence[Tensor], coefficients: Sequence[Tensor], channel: int, x: Sequence[Tensor]
) -> Tensor:
    """The means of one channel given the values x of the earlier ones."""
    first, mean = channel * (channel - 1) // 2, means[channel]
    for earlier in range(channel):
        mean = mean + torch.tanh(coefficients[first + earlier]) * x[earlier]
    return mean


def log_likelihood(parameters: Tensor, values: Tensor) -> Tensor:
    """Log-probability in nats of each sub-pixel's value, given the earlier channels of its pixel.

    parameters: (..., n, groups * K) of n tokens · values: (..., n * C) integers 0..255 · returns
                (..., n * C).
    """
    token_size = values.shape[-1] // parameters.shape[-2]
    values = values.unflatten(-1, (-1, token_size))
    logit_probs, means, log_scales, coefficients = _parts(parameters, token_size)
    x = (values.to(parameters.dtype) / 127.5 - 1)[..., None]
    if token_size > 1:
        by_channel, each = means.unbind(-2), coefficients.unbind(-2)
        means = torch.stack(
            [_shifted(by_channel, each, channel, x.unbind(-2)) for channel in range(token_size)], -2
        )
    of_component = _log_masses(values, x - means, log_scales)
    joint = torch.logsumexp(
        F.log_softmax(logit_probs, -1)[..., None, :] + of_component.cumsum(-2), -1
    )
    return torch.cat([joint[..., :1], joint.diff(dim=-1)], -1).flatten(-2)


def _log_masses(values: Tensor, centred: Tensor, log_scales: Tensor) -> Tensor:
    """Log-probability of each value under each logistic: values (...) · centred on means,
    log_scales: (..., K).

    The interval's mass sigma(a) - sigma(b) is log sigma(a) + log sigma(-b) + log(-expm1(b - a)),
    exact at every scale. The intervals of 0 and 255 extend to infinity.
    """
    inverse_scales = torch.exp(-log_scales.clamp(min=MIN_LOG_SCALE))
    a = (centred + _HALF_BIN) * inverse_scales
    b = (centred - _HALF_BIN) * inverse_scales
    below = torch.where((values == 255)[..., None], 0.0, F.logsigmoid(a))
    above = torch.where((values == 0)[..., None], 0.0, F.logsigmoid(-b))
    edge = ((values == 0) | (values == 255))[..., None]
    # the width in units of the scale, not b - a, which cancels; kept above 0 in case a huge scale
    # makes it underflow
    span = (2 * _HALF_BIN * inverse_scales).clamp(min=torch.finfo(inverse_scales.dtype).tiny)
    return below + above + torch.where(edge, 0.0, torch.log(-torch.expm1(-span)))


def draw(
    parameters: Tensor, u: Tensor, temperature: Tensor, scale_transform: str = "exp"
) -> Tensor:
    """One token per row: u[:, 0, 0] picks the component, u[:, c, 1] draws channel c.

    parameters: (B, groups * K) · u: (B, C, 2) float32 in (0, 1) · temperature: (B,), multiplies the
    scales. The component is drawn with its own probability: if that were sharpened too, images
    would collapse into background. Temperature 0 takes the most probable component's means ·
    returns (B, C) uint8.
    """
    logit_probs, means, log_scales, coefficients = _parts(parameters, u.shape[1])
    weights = torch.exp(logit_probs - logit_probs.amax(-1, keepdim=True))
    cumulative = weights.cumsum(-1)
    passed = cumulative > u[:, 0, :1] * cumulative[:, -1:]
    last = passed.shape[1] - 1
    picked = torch.where(passed.any(-1), passed.int().argmax(-1), last)
    picked = torch.where(temperature == 0, logit_probs.argmax(-1), picked)

    def of_picked(group: Tensor) -> tuple[Tensor, ...]:
        """(B, n, K) -> n of (B,)."""
        return group.take_along_dim(picked[:, None, None], -1)[..., 0].unbind(1)

    log_scale = torch.stack(of_picked(log_scales), 1)
    scale = (
        torch.exp(log_scale.clamp(min=MIN_LOG_SCALE))
        if scale_transform == "exp"
        else F.elu(log_scale) + 1.0001
    )
    spread = scale * temperature[:, None] * (torch.log(u[..., 1]) - torch.log(1 - u[..., 1]))
    mean_of, coefficients_of = of_picked(means), of_picked(coefficients)
    drawn: list[Tensor] = []
    for channel in range(u.shape[1]):
        x = (
            _shifted(mean_of, coefficients_of, channel, [value / 127.5 - 1 for value in drawn])
            + spread[:, channel]
        )
        drawn.append(((x + 1) / 2 * 255).clamp(0, 255).round())
    return torch.stack(drawn, 1).to(torch.uint8)
