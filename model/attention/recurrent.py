"""Attention kinds that say how one token changes a state of fixed size; how images take slots, and
how known pixels are read, follows from that.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import ModelConfig
from . import Attention, State, side_by_side
from .pools import Pools

Memory = dict[str, Tensor]  # one layer's state of B images, by name: each (B, *shape)


class Recurrent(Attention):
    """A kind of attention with a state of fixed size: a subclass gives `parallel`, `state_shapes`
    and `step`.

    The two forms must agree: training uses `parallel`, drawing uses `step`. A kind has no weights
    of its own. What it has to learn, such as a gate, it reads from entries of q, k or v.
    """

    fixed_state = True

    @property
    @abstractmethod
    def state_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of each tensor of one layer's state, for one image; all are 0 at first."""

    @abstractmethod
    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, memory: Memory) -> Tensor:
        """Attend from one new token per row, which becomes part of memory first.

        q, k: (B, H, D) · v: (B, H, M) · memory: changed in place, or given new tensors by name ·
        returns (B, H, M).
        """

    @property
    def state_bytes(self) -> int:
        return 4 * self.config.layers * sum(map(math.prod, self.state_shapes.values()))

    def new_state(self, slots: int, dtype: torch.dtype = torch.float32) -> State:
        return RecurrentPool(self, self.config, slots, dtype)


class RecurrentPool(Pools):
    """The states of images in flight, layer by layer."""

    def __init__(
        self, attention: Recurrent, config: ModelConfig, slots: int, dtype: torch.dtype
    ) -> None:
        """slots: most images in flight; one more is for padding."""
        self.attention = attention
        self.memory: Memory = {}
        for name, shape in attention.state_shapes.items():
            self.memory[name] = torch.zeros(slots + 1, config.layers, *shape, dtype=dtype)
        self.last = torch.zeros(slots + 1, 0, dtype=dtype)
        self._row = (config.heads, config.value_dim)
        super().__init__(*self.memory.values())

    def prefill(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, held: int = 0
    ) -> Tensor:
        memory = {name: pool[slots, layer] for name, pool in self.memory.items()}
        steps = []
        for t in range(k.shape[2]):
            steps.append(self._step(layer, q[:, :, t], k[:, :, t], v[:, :, t], memory))
        for name, pool in self.memory.items():
            pool[slots, layer] = memory[name]
        return torch.stack(steps, 2)

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, t: Tensor, slots: Tensor) -> Tensor:
        if layer == 0:
            together = side_by_side(slots)  # a view, where an index would copy
            self._rows = slots if together is None else together
        memory = {name: pool[self._rows, layer] for name, pool in self.memory.items()}
        y = self._step(layer, q, k, v, memory)
        for name, pool in self.memory.items():
            pool[self._rows, layer] = memory[name]
        return y

    def _step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, memory: Memory) -> Tensor:
        y = self.attention.step(layer, q, k, v, memory)
        expected = (len(q), *self._row)
        if y.shape != expected:
            raise ValueError(
                f"step of {type(self.attention).__name__} must return (B, H, M), here {expected},"
                f" got {tuple(y.shape)}"
            )
        return y
