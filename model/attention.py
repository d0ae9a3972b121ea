"""Causal attention over a whole sequence at once: the parallel forms, for training and prefill.

Their step-by-step forms live with the state that they carry, in state.py.
Shapes: q, k are (B, H, T, D) and v is (B, H, T, M); the result is (B, H, T, M).
"""

import math

from torch import Tensor
from torch.nn import functional as F

CHUNK = 32  # tokens; quadratic inside a chunk, recurrent between chunks: memory is linear in T


def phi(x: Tensor) -> Tensor:
    """The feature map elu(x) + 1 ("Transformers are RNNs", equation 7)."""
    return F.elu(x) + 1


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
