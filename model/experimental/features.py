"""Feature maps of linear attention other than elu(x) + 1: phi(q) . phi(k) >= 0 is the similarity of
a query and a key.
"""

import math
from functools import partial
from typing import get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .. import plugins
from ..config import FeatureMap as BuiltIn
from ..config import ModelConfig
from ..ops import FeatureMap, phi
from ..philox import uniforms

NAMES = get_args(BuiltIn)


def feature_map(config: ModelConfig) -> FeatureMap:
    """The feature map that the configuration names: (..., D) -> (..., feature_dim), phi(q) . phi(k)
    >= 0.
    """
    if config.feature_map == "random":
        return partial(
            random_features, directions=directions(config.random_features, config.key_dim)
        )
    built_in = {"elu+1": phi, "relu": relu_features, "polynomial": polynomial_features}
    if config.feature_map in built_in:
        return built_in[config.feature_map]
    found: FeatureMap = plugins.look_up("feature_map", config.feature_map, NAMES)
    return found


def register_feature_map(name: str, feature_map: FeatureMap) -> None:
    """Register a feature map of linear attention: (..., D) -> (..., F), of any float dtype.

    phi(q) . phi(k) must not be negative, and not all 0. Raises ValueError if the name is taken.
    """
    if not callable(feature_map):
        raise ValueError(f"feature_map {name!r} must be a function, got {feature_map!r:.80}")
    plugins.register("feature_map", name, feature_map, NAMES)


def relu_features(x: Tensor) -> Tensor:
    """relu(x) + 0.001: without the constant, a query without positive entries would attend to
    nothing.
    """
    return F.relu(x) + 1e-3


def polynomial_features(x: Tensor) -> Tensor:
    """All products of two entries, D (D + 1) / 2, so that phi(q) . phi(k) = (q . k)^2 / D (section
    3.2.1).
    """
    D = x.shape[-1]
    i, j = torch.triu_indices(D, D, device=x.device)
    one = torch.eye(D, dtype=x.dtype, device=x.device)
    weight = torch.where(i == j, 1.0, math.sqrt(2)) / math.sqrt(D)
    # entries are picked by products with ones and zeros: the compiled gradient of x[..., i] wrote
    # beyond its buffer
    return (x @ one[:, i]) * (x @ one[:, j]) * weight.to(x.dtype)


def random_features(x: Tensor, directions: Tensor) -> Tensor:
    """Positive random features: in expectation phi(q) . phi(k) = exp(q . k / sqrt(D)), the softmax
    kernel.

    FAVOR+ ("Rethinking Attention with Performers", lemma 1 and section 2.4): exp(w . x - |x|^2 / 2)
    for directions w that are orthogonal in blocks of D and the same for every model. Computed in
    float32: exponents rounded to bfloat16 would give errors of several per cent.
    """
    with torch.autocast(x.device.type, enabled=False):
        wide = x if x.dtype == torch.float64 else x.float()
        scaled = wide / x.shape[-1] ** 0.25
        exponents = scaled @ directions.to(scaled).T - scaled.square().sum(-1, keepdim=True) / 2
        # as the authors do: features are never all zero
        return (exponents.exp() + 1e-6) / math.sqrt(len(directions))


def directions(count: int, dim: int) -> Tensor:
    """(count, dim) float64, with lengths of normal vectors; drawn by Philox, so that no library
    update changes them.
    """
    blocks = []
    for first in range(0, count, dim):
        # (dim, dim, 4)
        u = uniforms(np.arange(first, first + dim)[:, None], np.arange(dim)).astype(np.float64)
        found = np.sqrt(-2 * np.log(u[..., 0])) * np.cos(2 * np.pi * u[..., 1])  # Box and Muller
        lengths = np.linalg.norm(
            np.sqrt(-2 * np.log(u[..., 2])) * np.cos(2 * np.pi * u[..., 3]), axis=1
        )
        for row in range(dim):  # Gram and Schmidt
            for _ in range(2):  # twice is enough
                found[row] -= found[:row].T @ (found[:row] @ found[row])
            found[row] /= np.linalg.norm(found[row])
        blocks.append(found * lengths[:, None])
    return torch.from_numpy(np.concatenate(blocks)[:count])
