"""The interface of attention kinds: what a transformer, and a pool of per-image memory, need from
each kind.

Each built-in kind is a module here, named as in the configuration, with a subclass of Attention:
LinearAttention, SoftmaxAttention or LSHAttention. Plugins register others (../plugins.py).
Slot 0 of a pool is reserved for padding rows, whose results are thrown away. A slot is cleared when
it is taken, not when it is given back: a crashed request does not give back a clean slot.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from inspect import isabstract
from typing import Protocol, TypeVar, get_args

import torch
from torch import Tensor

from .. import plugins
from ..config import AttentionKind, ModelConfig

PADDING_SLOT = 0


class SlotPool(Protocol):
    """What a decoder needs from a pool in order to give its slots to images."""

    def clear(self, slot: int) -> None: ...

    def fill_with_nan(self, slot: int) -> None:
        """Fill a free slot with NaN, so that any read of it shows up."""

    def copy(self, source: int, targets: list[int]) -> None:
        """Copy the memory of source to each target slot, so that several completions of one picture
        prefill once.
        """


class State(SlotPool, Protocol):
    """What the transformer needs from a pool: both forms of attention over it, layer by layer."""

    # (slots + 1, background_dim): BackgroundHead.project of the last token; (slots + 1, 0) without
    # a head
    last: Tensor

    def prefill(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, held: int = 0
    ) -> Tensor:
        """Attend over the next T tokens at once and keep what later steps need.

        q, k: (B, H, T, D) · v: (B, H, T, M) · held: number of tokens already in the slots; 0: the
        slots are clear · returns (B, H, T, M).
        """

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, t: Tensor, slots: Tensor) -> Tensor:
        """Attend from one new token per row. q, k: (B, H, D) · v: (B, H, M) · t, slots: (B,) ·
        returns (B, H, M).

        A step goes through all layers in order, with the same t and slots. Layer 0 computes what
        all layers share.
        """

    def keep(self, slots: Tensor) -> None:
        """Save the parts of these slots, (B,) int64, that steps change. This replaces the previous
        copy.
        """

    def restore(self, slots: Tensor) -> None:
        """Restore these slots, a subset of those in the last `keep`, to the saved copy."""


def side_by_side(slots: Tensor) -> slice | None:
    """Consecutive slots as a slice of their pool, which is a view, where an index would copy; else
    None.
    """
    listed = slots.tolist()
    first, after = listed[0], listed[0] + len(listed)
    return slice(first, after) if listed == [*range(first, after)] else None


def present(lengths: Tensor, longest: int) -> Tensor:
    """Which tokens are not padding, (B, longest) bool. lengths: (B,) int64."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


class Attention(ABC):
    """One kind of attention with one configuration."""

    has_weights = False  # it can say how much a token looks at each earlier one: see `weights`
    has_states = False  # the memory of an image is S and z: see `states`
    fixed_state = False  # the memory of an image has the same size after each token
    shared_qk = False  # queries serve as keys too: the projection makes no keys
    options: tuple[str, ...] = ()  # configuration fields that only this kind reads
    exception = ""  # why parallel is not strictly causal, in words; empty if it is causal
    # name of the step-by-step form in metrics and comparisons; empty if there is none
    steps_as = ""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @abstractmethod
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
        """Attend causally over a whole sequence. q, k: (B, H, T, D) · v: (B, H, T, M) · returns (B,
        H, T, M).

        lengths: (B,) int64, tokens of each sequence, at least 1; with them, tokens attend to later
        ones too (equations 2 to 6). The tokens after them are padding: they must be finite, no
        token attends to them, and their results mean nothing.
        """

    def packed(self, layer: int, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        """Attend causally over sequences packed one after the other, for models with
        ModelConfig.packed.

        q, k: (N, H, D) · v: (N, H, M) · offsets: (B + 1,) int64: tokens offsets[b] .. offsets[b +
        1] - 1 are sequence b · returns (N, H, M). Raises ValueError if the kind does not support
        packed sequences.
        """
        raise ValueError(
            f"attention {self.config.attention} cannot process packed sequences; use linear"
        )

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """How much each of n tokens looks at each of them, (..., n, n): 0 for later ones, and the
        sum of a row is 1. q, k: (..., n, D).

        Raises ValueError unless `has_weights`.
        """
        raise ValueError(
            f"attention {self.config.attention} cannot say where a token looks; use a model with"
            " linear or softmax attention"
        )

    def states(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """S (..., n, D, M) and z (..., n, D) after each of n tokens. k: (..., n, D) · v: (..., n,
        M).

        Raises ValueError unless `has_states`.
        """
        raise ValueError(
            f"attention {self.config.attention} has no state of S and z; use a model with linear"
            " attention"
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of attention memory for one image in flight, in float32."""
        return 0

    def memory_multiplications(self, t: int) -> int:
        """Multiplications of one row's step at t with its memory, if that grows with t.

        0 otherwise: there are few compared with those of the weights.
        """
        return 0

    @property
    def facts(self) -> dict[str, str]:
        """Names and values of rows for the model card."""
        return {}

    def new_state(self, slots: int, dtype: torch.dtype = torch.float32) -> State:
        """A pool for this many images in flight, and one more slot for padding.

        Raises ValueError if the kind has only the parallel form: drawing images needs the
        step-by-step form.
        """
        raise ValueError(
            f"attention {self.config.attention} has no step-by-step form, so it cannot draw images;"
            " train a model with linear or softmax attention"
        )


_CLASSES: dict[str, str] = {
    "linear": "LinearAttention",
    "softmax": "SoftmaxAttention",
    "lsh": "LSHAttention",
}


def kinds() -> tuple[str, ...]:
    """The names of all kinds, built in and registered."""
    return (*_CLASSES, *plugins.names_of("attention"))


def kind_of(name: str) -> type[Attention]:
    """The class of a kind of attention. Raises ValueError, with the cure, if there is none."""
    kind: type[Attention]
    if name in get_args(AttentionKind):
        module = import_module(f"linpix.model.attention.{name}")
        kind = getattr(module, _CLASSES[name])
    else:
        kind = plugins.look_up("attention", name, get_args(AttentionKind))
    return kind


def attention_for(config: ModelConfig) -> Attention:
    """The attention that the configuration names."""
    return kind_of(config.attention)(config)


Kind = TypeVar("Kind", bound=type[Attention])


def register_attention(name: str) -> Callable[[Kind], Kind]:
    """Decorate a subclass of Attention, or of Recurrent, to register it as a kind of attention.

    Raises ValueError if the class lacks a method, or the name is taken.
    """

    def registered(kind: Kind) -> Kind:
        if not (isinstance(kind, type) and issubclass(kind, Attention)):
            raise ValueError(
                f"attention {name!r} must be a subclass of Attention or Recurrent, got {kind!r:.80}"
            )
        if isabstract(kind):
            missing = ", ".join(sorted(kind.__abstractmethods__))
            raise ValueError(f"attention {name!r}: {kind.__name__} must define {missing}")
        if kind.fixed_state and not kind.steps_as:
            kind.steps_as = name
        return plugins.register("attention", name, kind, tuple(_CLASSES))

    return registered
