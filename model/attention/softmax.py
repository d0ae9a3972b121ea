"""Softmax attention: recomputed over the whole prefix, or with all keys and values kept
(stateful-softmax).
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import ModelConfig
from . import Attention, State, present, side_by_side


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention (equation 2, masked), temperature 1 / sqrt(D). Shapes as in
    Attention.parallel.
    """
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class _Step(NamedTuple):
    """Values that all layers of a step share."""

    # of the pool. Consecutive slots are a view; copying others costs more than attention
    rows: slice | Tensor
    written: tuple[Any, ...]  # index of the new keys and values
    length: int  # tokens in the longest row, including the new one
    mask: Tensor | None  # which tokens each row may see; None: all

    @classmethod
    def of(cls, index: Tensor, slots: Tensor) -> Self:
        """index: (B,), position of each row's new token in its slot."""
        positions, together = index.tolist(), side_by_side(slots)
        rows, last = slots if together is None else together, max(positions)
        if min(positions) == last:
            return cls(rows, (rows, slice(None), last), last + 1, None)
        mask = (torch.arange(last + 1) <= index[:, None])[:, None, None]
        return cls(rows, (slots, slice(None), index), last + 1, mask)


class KeyValueState:
    """All keys and values of softmax attention: the paper's stateful-softmax (section C.1)."""

    def __init__(self, config: ModelConfig, slots: int, dtype: torch.dtype = torch.float32) -> None:
        shape = (slots + 1, config.layers, config.heads, config.length)
        self.keys = torch.zeros(*shape, config.key_dim, dtype=dtype)
        self.values = torch.zeros(*shape, config.value_dim, dtype=dtype)
        self.last = torch.zeros(slots + 1, 0, dtype=dtype)
        self.first = config.first  # position of the first token

    def prefill(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, held: int = 0
    ) -> Tensor:
        end = held + k.shape[2]
        self.keys[slots, layer, :, held:end] = k
        self.values[slots, layer, :, held:end] = v
        if not held:
            return softmax_attention(q, k, v)
        keys, values = self.keys[slots, layer, :, :end], self.values[slots, layer, :, :end]
        mask = torch.ones(end - held, end, dtype=torch.bool).tril(held)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, t: Tensor, slots: Tensor) -> Tensor:
        if layer == 0:
            # rows without a token (t = 0 without a start token) write to the padding slot
            self._step = _Step.of((t - self.first).clamp(min=0), slots)
        step = self._step
        keys, values = self.keys[:, layer], self.values[:, layer]
        keys[step.written] = k
        values[step.written] = v
        keys, values = keys[step.rows, :, : step.length], values[step.rows, :, : step.length]
        return F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=step.mask)[
            :, :, 0
        ]

    def clear(self, slot: int) -> None:
        self.keys[slot] = 0
        self.values[slot] = 0

    def fill_with_nan(self, slot: int) -> None:
        self.keys[slot] = torch.nan
        self.values[slot] = torch.nan

    def keep(self, slots: Tensor) -> None:
        """Does nothing: a step writes only at its own position, which is written again before it is
        read.
        """

    def restore(self, slots: Tensor) -> None:
        """Does nothing, for the same reason as keep."""

    def copy(self, source: int, targets: list[int]) -> None:
        self.keys[targets] = self.keys[source].clone()
        self.values[targets] = self.values[source].clone()


class SoftmaxAttention(Attention):
    """ "Transformers are RNNs", section 3.1."""

    has_weights = True
    steps_as = "stateful-softmax"

    def parallel(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lengths: Tensor | None = None,
        training: bool = False,
    ) -> Tensor:
        if lengths is None:
            return softmax_attention(q, k, v)
        mask = present(lengths, k.shape[2])[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """As Attention.weights (equation 2)."""
        products = q @ k.transpose(-1, -2) / self.config.key_dim**0.5
        later = torch.ones_like(products, dtype=torch.bool).triu(1)
        return products.masked_fill(later, -torch.inf).softmax(-1)

    @property
    def state_bytes(self) -> int:
        c = self.config
        return 4 * c.layers * c.heads * c.length * (c.key_dim + c.value_dim)

    def memory_multiplications(self, t: int) -> int:
        c = self.config
        return c.layers * c.heads * (t + 1) * (c.key_dim + c.value_dim)

    def new_state(self, slots: int, dtype: torch.dtype = torch.float32) -> State:
        return KeyValueState(self.config, slots, dtype)
