"""Softmax attention: recomputed over the whole prefix, or with all keys and values kept (stateful-softmax)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention import Attention, State
from model.config import ModelConfig


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention (equation 2, masked), temperature 1 / sqrt(D). Shapes as in Attention.parallel."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class KeyValueState:
    """All keys and values of softmax attention: the paper's stateful-softmax (section C.1)."""

    def __init__(self, config: ModelConfig, slots: int, dtype: torch.dtype = torch.float32) -> None:
        shape = (slots + 1, config.layers, config.heads, config.subpixels)
        self.keys = torch.zeros(*shape, config.key_dim, dtype=dtype)
        self.values = torch.zeros(*shape, config.value_dim, dtype=dtype)
        self.first = 1 if config.first_marginal else 0  # position of the first token; no start token, none at 0

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, held: int = 0) -> Tensor:
        end = held + k.shape[2]
        self.keys[slots, layer, :, held:end] = k
        self.values[slots, layer, :, held:end] = v
        if not held:
            return softmax_attention(q, k, v)
        keys, values = self.keys[slots, layer, :, :end], self.values[slots, layer, :, :end]
        mask = torch.ones(end - held, end, dtype=torch.bool).tril(held)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, t: Tensor, slots: Tensor) -> Tensor:
        index = (t - self.first).clamp(min=0)  # rows without a token write to the padding slot
        self.keys[slots, layer, :, index] = k
        self.values[slots, layer, :, index] = v
        length, first = int(index.max()) + 1, int(slots[0])
        # Slots side by side are a view; gathering others copies what they keep, which costs more than to attend.
        side_by_side = slots.tolist() == list(range(first, first + len(slots)))
        rows = slice(first, first + len(slots)) if side_by_side else slots
        keys, values = self.keys[rows, layer, :, :length], self.values[rows, layer, :, :length]
        together = int(index.min()) + 1 == length
        mask = None if together else (torch.arange(length) <= index[:, None])[:, None, None]
        return F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask)[:, :, 0]

    def clear(self, slot: int) -> None:
        self.keys[slot] = 0
        self.values[slot] = 0

    def poison(self, slot: int) -> None:
        self.keys[slot] = torch.nan
        self.values[slot] = torch.nan

    def keep(self, slots: Tensor) -> None:
        """Nothing: a step writes at its own position, and is written again before anybody reads it."""

    def restore(self, slots: Tensor) -> None:
        """Nothing, as keep."""

    def copy(self, source: int, targets: list[int]) -> None:
        self.keys[targets] = self.keys[source].clone()
        self.values[targets] = self.values[source].clone()


class Kind(Attention):
    """"Transformers are RNNs", section 3.1."""

    steps_as = "stateful-softmax"

    def parallel(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, training: bool = False) -> Tensor:
        return softmax_attention(q, k, v)

    @property
    def state_bytes(self) -> int:
        c = self.config
        return 4 * c.layers * c.heads * c.subpixels * (c.key_dim + c.value_dim)

    def new_state(self, slots: int, dtype: torch.dtype = torch.float32) -> State:
        return KeyValueState(self.config, slots, dtype)
