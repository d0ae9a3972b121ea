"""Causal attention over a whole sequence at once: the parallel forms, for training and prefill.

Their step-by-step forms live with the state that they carry, in state.py.
Shapes: q, k are (B, H, T, D) and v is (B, H, T, M); the result is (B, H, T, M).
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from model.config import ModelConfig
from model.philox import uniforms

CHUNK = 32  # tokens; quadratic inside a chunk, recurrent between chunks: memory is linear in T


def phi(x: Tensor) -> Tensor:
    """The feature map elu(x) + 1 ("Transformers are RNNs", equation 7)."""
    return F.elu(x) + 1


def feature_map(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """What the configuration applies to queries and keys: (..., D) -> (..., feature_dim), phi(q) . phi(k) >= 0."""
    maps: dict[str, Callable[[Tensor], Tensor]] = {
        "elu+1": phi, "relu": relu_features, "polynomial": polynomial_features,
        "random": partial(random_features, directions=directions(config.random_features, config.key_dim))}
    return maps[config.feature_map]


def relu_features(x: Tensor) -> Tensor:
    """relu(x) + 0.001: without the constant, a query that is nowhere positive would attend to nothing."""
    return F.relu(x) + 1e-3


def polynomial_features(x: Tensor) -> Tensor:
    """All products of two entries, D (D + 1) / 2, so that phi(q) . phi(k) = (q . k)^2 / D (section 3.2.1)."""
    D = x.shape[-1]
    i, j = torch.triu_indices(D, D, device=x.device)
    weight = torch.where(i == j, 1.0, math.sqrt(2)) / math.sqrt(D)
    return x[..., i] * x[..., j] * weight.to(x.dtype)


def random_features(x: Tensor, directions: Tensor) -> Tensor:
    """Positive random features: in expectation phi(q) . phi(k) = exp(q . k / sqrt(D)), the softmax kernel.

    FAVOR+ ("Rethinking Attention with Performers", lemma 1 and section 2.4): exp(w . x - |x|^2 / 2) for directions w
    that are orthogonal in blocks of D, the same for every model. In float32: rounded to bfloat16, exponents are off by
    percents.
    """
    with torch.autocast(x.device.type, enabled=False):
        wide = x if x.dtype == torch.float64 else x.float()
        scaled = wide / x.shape[-1] ** 0.25
        exponents = scaled @ directions.to(scaled).T - scaled.square().sum(-1, keepdim=True) / 2
        return (exponents.exp() + 1e-6) / math.sqrt(len(directions))  # as in the authors' code: never all zero


def directions(count: int, dim: int) -> Tensor:
    """(count, dim) float64, as long as normal vectors are, drawn by Philox: no library's generator may change them."""
    blocks = []
    for first in range(0, count, dim):
        u = uniforms(np.arange(first, first + dim)[:, None], np.arange(dim)).astype(np.float64)  # (dim, dim, 4)
        found = np.sqrt(-2 * np.log(u[..., 0])) * np.cos(2 * np.pi * u[..., 1])                  # Box and Muller
        lengths = np.linalg.norm(np.sqrt(-2 * np.log(u[..., 2])) * np.cos(2 * np.pi * u[..., 3]), axis=1)
        for row in range(dim):  # Gram and Schmidt
            for _ in range(2):  # twice is enough
                found[row] -= found[:row].T @ (found[:row] @ found[row])
            found[row] /= np.linalg.norm(found[row])
        blocks.append(found * lengths[:, None])
    return torch.from_numpy(np.concatenate(blocks)[:count])


def linear_attention(q: Tensor, k: Tensor, v: Tensor, eps: float) -> Tensor:
    """Causal linear attention (equations 8-12), q and k after the feature map.

    y_i = sum_{j<=i} (q_i . k_j) v_j / (sum_{j<=i} q_i . k_j + eps), computed chunk by chunk: what
    came before a chunk through its state (S, z), what is inside through a masked C x C product.
    """
    length = q.shape[2]
    chunks = math.ceil(length / CHUNK)
    padding = chunks * CHUNK - length  # zero keys add nothing, and padded queries are cut off again
    q, k, v = (F.pad(x, (0, 0, 0, padding)).unflatten(2, (chunks, CHUNK)) for x in (q, k, v))
    memory = k.transpose(-1, -2) @ v
    normaliser = k.sum(3)
    # Of all chunks before this one, by shifting: subtracting this one's own share from the sum would leave
    # its rounding behind, and with it a trace of later tokens.
    S = F.pad(memory.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))  # (B, H, chunks, D, M)
    z = F.pad(normaliser.cumsum(2)[:, :, :-1], (0, 0, 1, 0))    # (B, H, chunks, D)
    scores = (q @ k.transpose(-1, -2)).tril()
    numerator = scores @ v + q @ S
    denominator = scores.sum(-1) + (q @ z[..., None])[..., 0] + eps
    return (numerator / denominator[..., None]).flatten(2, 3)[:, :, :length]


def recurrent_state(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """S (B, H, D, M) and z (B, H, D) after all T tokens (equations 18 and 19)."""
    return k.transpose(-1, -2) @ v, k.sum(2)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention (equation 2, masked), temperature 1 / sqrt(D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
