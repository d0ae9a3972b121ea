"""A categorical distribution over the 256 values of a sub-pixel: its exact likelihood, and exact
draws from it.

The parameters of a sub-pixel are 256 logits, one for each value. Grey values of MNIST are not a
smooth quantity: a digit has some sixty different ones, echoes of how its bilevel scan was scaled
down. Logistics hardly hold such a set, and their means have to be right to a tenth of a grey level,
so logits learn several times as fast.

One value is the ground, which nearly all sub-pixels of a picture have. It is drawn first: whether a
sub-pixel is ground is one choice, and which other value it has is another.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VALUES = 256
_STD = 0.02  # of initial weights
_NEVER = -1e4  # a logit whose exponential is 0 in any precision, as it stays when trained


def linear(features: int, ground: int, logit: float, values: int) -> nn.Linear:
    """A layer that gives 256 logits; at first all values are equally probable, but the ground's
    logit is `logit`, and those from `values` on are impossible.
    """
    layer = nn.Linear(features, VALUES)
    nn.init.normal_(layer.weight, std=_STD)
    nn.init.zeros_(layer.bias)
    layer.bias.detach()[ground] = logit
    layer.weight.detach()[values:] = 0
    layer.bias.detach()[values:] = _NEVER
    return layer


def log_likelihood(parameters: Tensor, values: Tensor) -> Tensor:
    """Log-probability in nats of each value. parameters: (..., 256) · values: (...) integers 0..255
    · returns (...).
    """
    losses = F.cross_entropy(parameters.flatten(0, -2), values.flatten().long(), reduction="none")
    return -losses.view(values.shape)


def from_two_stages(parameters: Tensor, ground: int) -> Tensor:
    """Log-probabilities (..., 256), which are logits too, from the numbers that predict a sub-pixel
    amid background.

    The ground's number z decides alone whether the value is ground, with sigmoid(z); the others are
    logits of the other values, if it is not. So decoding computes them only where it is not, for 1
    of 250 such sub-pixels of MNIST.
    """
    z = parameters[..., ground : ground + 1]
    is_ground = torch.arange(VALUES) == ground
    others = F.log_softmax(parameters.masked_fill(is_ground, -torch.inf), -1)
    return torch.where(is_ground, F.logsigmoid(z), F.logsigmoid(-z) + others)


def draw(parameters: Tensor, u: Tensor, temperature: Tensor, ground: int) -> Tensor:
    """One value per row: u[:, 0, 0] decides whether it is the ground, u[:, 0, 1] which other one it
    is.

    parameters: (B, 256) · u: (B, 1, 2) float32 in (0, 1) · temperature: (B,), divides the logits of
    the other values. The ground keeps its probability: if that were sharpened too, images would
    collapse into background. Temperature 0 takes the ground if its probability is more than a half,
    else the most probable other value · returns (B, 1) uint8.
    """
    others = parameters.masked_fill(torch.arange(VALUES) == ground, -torch.inf)
    odds = parameters[:, ground] - others.logsumexp(-1)
    is_ground = torch.where(temperature == 0, 0.5, u[:, 0, 0]) * (1 + torch.exp(-odds)) < 1
    most, likeliest = others.max(-1, keepdim=True)
    sharpened = (others - most) / torch.where(temperature == 0, 1.0, temperature)[:, None]
    cumulative = torch.exp(sharpened).cumsum(-1)
    drawn = (cumulative > u[:, 0, 1:] * cumulative[:, -1:]).int().argmax(-1)
    value = torch.where(is_ground, ground, torch.where(temperature == 0, likeliest[:, 0], drawn))
    return value[:, None].to(torch.uint8)
