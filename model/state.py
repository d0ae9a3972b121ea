"""Pools of per-image memory, one slot an image: fixed size if linear, growing with T if softmax.

Slot 0 is reserved for padding rows, which are computed and thrown away. A slot is cleared when it
is taken, never when it is given back: a crashed request gives back nothing clean.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from model import ops
from model.attention import feature_map, linear_attention, recurrent_state, softmax_attention
from model.config import ModelConfig

PADDING_SLOT = 0


class SlotPool(Protocol):
    """What an engine needs of a pool: to give its slots to images."""

    def clear(self, slot: int) -> None: ...

    def poison(self, slot: int) -> None:
        """Fill a free slot with NaN, so that whoever reads it is seen."""

    def copy(self, source: int, targets: list[int]) -> None:
        """Give each target slot the memory of source: several completions of one picture prefill once."""


class State(SlotPool, Protocol):
    """What the transformer needs of a pool: both forms of attention over it, layer by layer."""

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        """Attend over the first T tokens at once and keep what later steps need.

        q, k: (B, H, T, D) · v: (B, H, T, M) · returns (B, H, T, M). Slots must be clear.
        """

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, t: Tensor, slots: Tensor) -> Tensor:
        """Attend from one new token a row. q, k: (B, H, D) · v: (B, H, M) · t, slots: (B,) · returns (B, H, M)."""


class RecurrentState:
    """S and z of linear attention: float32, changed in place, the same size at every position.

    The sum never decays, so S in bfloat16 would lose small increments; it is not offered.
    """

    def __init__(self, config: ModelConfig, slots: int, dtype: torch.dtype = torch.float32) -> None:
        """slots: images in flight at most; one more is kept for padding."""
        shape = (slots + 1, config.layers, config.heads, config.feature_dim)
        self.S = torch.zeros(*shape, config.value_dim, dtype=dtype)
        self.z = torch.zeros(shape, dtype=dtype)
        self.eps, self.phi = config.eps, feature_map(config)
        # the operator knows one feature map; on a GPU some sizes, in float32
        D, M, device = config.key_dim, config.value_dim, self.S.device.type
        self._operator = (config.feature_map == "elu+1" and dtype == torch.float32
                          and (device == "cpu" or (D == M and D in ops.GPU_HEADS)))

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        q, k = self.phi(q), self.phi(k)
        self.S[slots, layer], self.z[slots, layer] = recurrent_state(k, v)
        return linear_attention(q, k, v, self.eps)

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, t: Tensor, slots: Tensor) -> Tensor:
        given = q[:, None], k[:, None], v[:, None], self.S[:, layer], self.z[:, layer], slots, self.eps
        if self._operator:
            return torch.ops.linpix.recurrent_step(*given)[:, 0]
        return ops.recurrent_step_reference(*given, self.phi)[:, 0]

    def clear(self, slot: int) -> None:
        self.S[slot] = 0
        self.z[slot] = 0

    def poison(self, slot: int) -> None:
        self.S[slot] = torch.nan
        self.z[slot] = torch.nan

    def copy(self, source: int, targets: list[int]) -> None:
        self.S[targets] = self.S[source].clone()  # torch refuses to read from what it writes to
        self.z[targets] = self.z[source].clone()


class KeyValueState:
    """All keys and values of softmax attention: the paper's stateful-softmax (section C.1)."""

    def __init__(self, config: ModelConfig, slots: int, dtype: torch.dtype = torch.float32) -> None:
        shape = (slots + 1, config.layers, config.heads, config.subpixels)
        self.keys = torch.zeros(*shape, config.key_dim, dtype=dtype)
        self.values = torch.zeros(*shape, config.value_dim, dtype=dtype)
        self.first = 1 if config.first_marginal else 0  # position of the first token; no start token, none at 0

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        self.keys[slots, layer, :, : k.shape[2]] = k
        self.values[slots, layer, :, : v.shape[2]] = v
        return softmax_attention(q, k, v)

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

    def copy(self, source: int, targets: list[int]) -> None:
        self.keys[targets] = self.keys[source].clone()
        self.values[targets] = self.values[source].clone()


def new_state(config: ModelConfig, slots: int, dtype: torch.dtype = torch.float32) -> State:
    """The pool that this configuration's attention steps on."""
    pool: dict[str, type[RecurrentState] | type[KeyValueState]] = {"linear": RecurrentState, "softmax": KeyValueState}
    if config.attention not in pool:
        raise ValueError(f"attention {config.attention} has no step-by-step form, so it draws no images here; "
                         f"train one with {' or '.join(pool)}")
    return pool[config.attention](config, slots, dtype)
