"""Attention kinds behind one interface: what a transformer, and a pool of per-image memory, need of each.

A kind is a module here, named like the kind in the configuration, with a subclass of Attention: LinearAttention,
SoftmaxAttention or LSHAttention.
Slot 0 of a pool is reserved for padding rows, which are computed and thrown away. A slot is cleared when it
is taken, never when it is given back: a crashed request gives back nothing clean.
"""

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from ..config import AttentionKind, ModelConfig

PADDING_SLOT = 0


class SlotPool(Protocol):
    """What an engine needs of a pool: to give its slots to images."""

    def clear(self, slot: int) -> None: ...

    def fill_with_nan(self, slot: int) -> None:
        """Fill a free slot with NaN, so that whoever reads it is seen."""

    def copy(self, source: int, targets: list[int]) -> None:
        """Give each target slot the memory of source: several completions of one picture prefill once."""


class State(SlotPool, Protocol):
    """What the transformer needs of a pool: both forms of attention over it, layer by layer."""

    last: Tensor  # (slots + 1, background_dim): what BackgroundHead knows of the last token; (slots + 1, 0) without one

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, held: int = 0) -> Tensor:
        """Attend over the next T tokens at once and keep what later steps need.

        q, k: (B, H, T, D) · v: (B, H, T, M) · held: tokens that the slots hold already; none: they are clear ·
        returns (B, H, T, M).
        """

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, t: Tensor, slots: Tensor) -> Tensor:
        """Attend from one new token a row. q, k: (B, H, D) · v: (B, H, M) · t, slots: (B,) · returns (B, H, M).

        A step goes through all layers in order, with the same t and slots: what they share is found at layer 0.
        """

    def keep(self, slots: Tensor) -> None:
        """Shadow what steps will change of these slots, (B,) int64, in place of what was kept before."""

    def restore(self, slots: Tensor) -> None:
        """Put some of the slots that were kept last back to how they were then."""


def side_by_side(slots: Tensor) -> slice | None:
    """Slots that follow each other, as a slice of their pool: a view, where an index would copy; else None."""
    first, *others = slots.tolist()
    return slice(first, first + len(slots)) if others == [*range(first + 1, first + len(slots))] else None


class Attention(ABC):
    """One kind of attention, as one configuration has it."""

    shared_qk = False               # queries serve as keys too: the projection makes no keys
    options: tuple[str, ...] = ()   # fields of the configuration that nobody else reads: how this kind computes
    exception = ""                  # why parallel is not strictly causal, in words; empty where it is
    steps_as = ""                   # what metrics and comparisons call the step-by-step form; empty if there is none

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @abstractmethod
    def parallel(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, training: bool = False) -> Tensor:
        """Attend causally over a whole sequence. q, k: (B, H, T, D) · v: (B, H, T, M) · returns (B, H, T, M)."""

    def packed(self, layer: int, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        """Attend causally over sequences packed one after the other, of models with ModelConfig.packed.

        q, k: (N, H, D) · v: (N, H, M) · offsets: (B + 1,) int64: tokens offsets[b] .. offsets[b + 1] - 1 are
        sequence b · returns (N, H, M). Raises ValueError where the kind does not go with such models.
        """
        raise ValueError(f"attention {self.config.attention} does not attend over packed sequences; linear does")

    @property
    def state_bytes(self) -> int:
        """Bytes that one image in flight keeps in float32."""
        return 0

    def memory_multiplications(self, t: int) -> int:
        """Of a row's step at t with what it remembers, where that grows; else they are few beside the weights'."""
        return 0

    @property
    def facts(self) -> dict[str, str]:
        """What the model card says of it."""
        return {}

    def new_state(self, slots: int, dtype: torch.dtype = torch.float32) -> State:
        """A pool for as many images in flight, and one slot more for padding.

        Raises ValueError where there is no step-by-step form, which draws images, but the parallel one alone.
        """
        raise ValueError(f"attention {self.config.attention} has no step-by-step form, so it draws no images here; "
                         "train one with linear or softmax")


_CLASSES: dict[AttentionKind, str] = {"linear": "LinearAttention", "softmax": "SoftmaxAttention",
                                      "lsh": "LSHAttention"}


def kind_of(name: AttentionKind) -> type[Attention]:
    """The class of a kind of attention."""
    kind: type[Attention] = getattr(import_module(f"linpix.model.attention.{name}"), _CLASSES[name])
    return kind


def attention_for(config: ModelConfig) -> Attention:
    """The attention that the configuration asks for."""
    return kind_of(config.attention)(config)
