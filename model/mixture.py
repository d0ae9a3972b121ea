"""A discretised mixture of K logistics: its exact likelihood, and exact draws from it.

Parameters of one sub-pixel are 3 * K numbers: logit_probs, means, log_scales (Salimans et al., 2017,
for one channel). Values 0..255 stand at v / 127.5 - 1, so each owns an interval of width 2 / 255.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_LOG_SCALE = -7.0
_HALF_BIN = 1 / 255


def log_likelihood(parameters: Tensor, values: Tensor) -> Tensor:
    """Log-probability in nats of each value.

    parameters: (..., 3 * K) · values: (...) integers 0..255 · returns (...).
    The interval's mass sigma(a) - sigma(b) is log sigma(a) + log sigma(-b) + log(-expm1(b - a)),
    exact at every scale; 0 and 255 own everything beyond them.
    """
    logit_probs, means, log_scales = parameters.chunk(3, -1)
    log_scales = log_scales.clamp(min=MIN_LOG_SCALE)
    inverse_scales = torch.exp(-log_scales)
    centred = (values.to(parameters.dtype) / 127.5 - 1)[..., None] - means
    a = (centred + _HALF_BIN) * inverse_scales
    b = (centred - _HALF_BIN) * inverse_scales
    below = torch.where((values == 255)[..., None], 0.0, F.logsigmoid(a))
    above = torch.where((values == 0)[..., None], 0.0, F.logsigmoid(-b))
    edge = ((values == 0) | (values == 255))[..., None]
    # the width in units of the scale, not b - a, which cancels; above 0 even where a huge scale underflows
    span = (2 * _HALF_BIN * inverse_scales).clamp(min=torch.finfo(inverse_scales.dtype).tiny)
    width = torch.where(edge, 0.0, torch.log(-torch.expm1(-span)))
    return torch.logsumexp(F.log_softmax(logit_probs, -1) + below + above + width, -1)


def draw(parameters: Tensor, u: Tensor, temperature: Tensor, scale_transform: str = "exp") -> Tensor:
    """One value per row from two uniforms: the first picks the mixture, the second the value.

    parameters: (B, 3 * K) · u: (B, 2) float32 in (0, 1) · temperature: (B,); 0 takes the most probable
    mixture's mean · returns (B,) uint8.
    """
    logit_probs, means, log_scales = parameters.chunk(3, -1)
    cold = temperature == 0
    divisor = torch.where(cold, 1.0, temperature)[:, None]
    weights = torch.exp((logit_probs - logit_probs.amax(-1, keepdim=True)) / divisor)
    cumulative = weights.cumsum(-1)
    passed = cumulative > u[:, :1] * cumulative[:, -1:]
    last = passed.shape[1] - 1
    picked = torch.where(passed.any(-1), passed.int().argmax(-1), last)
    picked = torch.where(cold, logit_probs.argmax(-1), picked)[:, None]
    mean = means.gather(1, picked)[:, 0]
    log_scale = log_scales.gather(1, picked)[:, 0]
    scale = torch.exp(log_scale.clamp(min=MIN_LOG_SCALE)) if scale_transform == "exp" else F.elu(log_scale) + 1.0001
    logistic = torch.log(u[:, 1]) - torch.log(1 - u[:, 1])
    x = mean + scale * temperature * logistic
    return ((x + 1) / 2 * 255).clamp(0, 255).round().to(torch.uint8)
