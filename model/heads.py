"""What the parameters of a token mean: a mixture of logistics (mixture.py) or 256 logits
(categorical.py).
"""

import math

from torch import Tensor, nn

from . import categorical, mixture
from .config import ModelConfig


def parameters_per_token(config: ModelConfig) -> int:
    """P."""
    return (
        categorical.VALUES
        if config.head == "categorical"
        else mixture.groups(config.token_size) * config.mixtures
    )


def head_of(config: ModelConfig) -> nn.Linear:
    """The layer that gives the parameters of a token from its final features."""
    if config.head == "categorical":  # the ground begins with a probability of one half
        return categorical.linear(
            config.d_model, config.ground, math.log(max(1, config.values - 1)), config.values
        )
    return nn.Linear(config.d_model, parameters_per_token(config))


def log_likelihood(config: ModelConfig, parameters: Tensor, values: Tensor) -> Tensor:
    """Log-probability in nats of each sub-pixel's value, given the earlier channels of its pixel.

    parameters: (..., n, P) of n tokens · values: (..., n * C) integers 0..255 · returns (..., n *
                C).
    """
    if config.head == "categorical":
        return categorical.log_likelihood(parameters, values)
    return mixture.log_likelihood(parameters, values)


def draw(config: ModelConfig, parameters: Tensor, u: Tensor, temperature: Tensor) -> Tensor:
    """One token per row, (B, C) uint8. parameters: (B, P) · u: (B, C, 2) float32 in (0, 1) ·
    temperature: (B,).
    """
    if config.head == "categorical":
        return categorical.draw(parameters, u, temperature, config.ground)
    return mixture.draw(parameters, u, temperature, config.scale_transform)
