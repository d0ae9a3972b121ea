"""Linear attention: a feature map replaces the softmax, so the whole past fits in one matrix S and
one vector z.
"""

import torch
from torch import Tensor

from .. import ops
from ..config import ModelConfig
from ..experimental.features import feature_map
from ..ops import FeatureMap, phi
from . import Attention, State, present, side_by_side
from .pools import Pools


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    eps: float,
    mapped: FeatureMap = phi,
) -> Tensor:
    """Causal linear attention (equations 8-12), q and k before the feature map. Shapes as in
    Attention.packed.

    Uses the compiled operator if it has a kernel, else its reference, which torch can
    differentiate.
    """
    if not _has_kernel(q, v, mapped):
        return ops.causal_attention_reference(q, k, v, offsets, eps, mapped)[0]
    q, k, v = (_read_in_order(x) for x in (q, k, v))
    y, _ = torch.ops.linpix.causal_attention(q, k, v, offsets, eps)
    return y


def _read_in_order(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def of_one_length(q: Tensor, k: Tensor, v: Tensor, eps: float, mapped: FeatureMap = phi) -> Tensor:
    """linear_attention over sequences of equal length. Shapes as in Attention.parallel."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if not _has_kernel(q, v, mapped):
        return ops.attention_of_one_length(q, k, v, eps, mapped)[0].transpose(1, 2)
    B, T = q.shape[:2]
    offsets = torch.arange(B + 1, device=q.device) * T
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return linear_attention(q, k, v, offsets, eps, mapped).unflatten(0, (B, T)).transpose(1, 2)


def _has_kernel(q: Tensor, v: Tensor, mapped: FeatureMap) -> bool:
    fits = (
        ops.compiled
        if q.device.type == "cpu"
        else ops.gpu and max(q.shape[-1], v.shape[-1]) <= ops.GPU_MAX_HEAD
    )
    return mapped is phi and fits and q.dtype in ops.SEQUENCE_DTYPES


def recurrent_state(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """S (B, H, D, M) and z (B, H, D) after all T tokens (equations 18 and 19)."""
    return k.transpose(-1, -2) @ v, k.sum(2)


def whole_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    eps: float,
    mapped: FeatureMap = phi,
) -> Tensor:
    """Linear attention over whole sequences, without a causal mask (equations 5 and 6): φ(Q) (φ(K)ᵀ
    V), normalised.

    q and k before the feature map. Shapes as in Attention.parallel. Time and memory are linear in
    the length.
    """
    S, z = recurrent_state(mapped(k) * present(lengths, k.shape[2])[:, None, :, None], v)
    q = mapped(q)
    return q @ S / (q @ z[..., None] + eps)


class RecurrentState(Pools):
    """S and z of linear attention: float32, changed in place, the same size at every position.

    bfloat16 is not offered: the sum S never decays, so small increments would be lost.
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        dtype: torch.dtype = torch.float32,
        *,
        operator: bool = True,
    ) -> None:
        """slots: most images in flight; one more is for padding · operator: step with csrc's
        operator, if it can.
        """
        shape = (slots + 1, config.layers, config.heads, config.feature_dim)
        self.S = torch.zeros(*shape, config.value_dim, dtype=dtype)
        self.z = torch.zeros(shape, dtype=dtype)
        self.last = torch.zeros(slots + 1, config.skipped_dim, dtype=dtype)
        self.eps, self.phi = config.eps, feature_map(config)
        super().__init__(self.S, self.z, self.last)
        # the operator has one feature map, float32 only, and on a GPU certain sizes only
        D, M = config.key_dim, config.value_dim
        compiled = (
            ops.compiled
            if self.S.device.type == "cpu"
            else ops.gpu and D == M and D in ops.GPU_HEADS
        )
        self.operator = (
            operator and compiled and config.feature_map == "elu+1" and dtype == torch.float32
        )

    def prefill(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, held: int = 0
    ) -> Tensor:
        mapped = self.phi(k)
        S, z = recurrent_state(mapped, v)
        y = of_one_length(q, k, v, self.eps, self.phi)
        if held:
            queries, S_held, z_held = self.phi(q), self.S[slots, layer], self.z[slots, layer]
            # the divisor of y so far
            own = (queries * mapped.cumsum(2)).sum(-1, keepdim=True) + self.eps
            y = (y * own + queries @ S_held) / (own + queries @ z_held[..., None])
            S, z = S + S_held, z + z_held
        self.S[slots, layer], self.z[slots, layer] = S, z
        return y

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, t: Tensor, slots: Tensor) -> Tensor:
        if layer == 0 and not self.operator:
            self._rows = side_by_side(slots)
        if self.operator or self._rows is None:
            given = (
                q[:, None],
                k[:, None],
                v[:, None],
                self.S[:, layer],
                self.z[:, layer],
                slots,
                self.eps,
            )
            if self.operator:
                return torch.ops.linpix.recurrent_step(*given)[:, 0]
            return ops.recurrent_step_reference(*given, self.phi)[:, 0]
        S, z = self.S[self._rows, layer], self.z[self._rows, layer]  # views
        q, k, v = self.phi(q.to(S.dtype)), self.phi(k.to(S.dtype)), v.to(S.dtype)
        S.addcmul_(k[..., None], v[..., None, :])
        z += k
        return (S * q[..., None]).sum(-2) / ((q * z).sum(-1, keepdim=True) + self.eps)


class LinearAttention(Attention):
    """ "Transformers are RNNs", section 3.2."""

    has_weights = has_states = fixed_state = True
    options = ("feature_map", "random_features")
    steps_as = "linear"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.phi = feature_map(config)

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
            return of_one_length(q, k, v, self.config.eps, self.phi)
        return whole_attention(q, k, v, lengths, self.config.eps, self.phi)

    def packed(self, layer: int, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        return linear_attention(q, k, v, offsets, self.config.eps, self.phi)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """As Attention.weights: the share of each value in the paper's equation 9. A row sums to
        slightly less than 1, because eps is in the divisor.
        """
        products = (self.phi(q) @ self.phi(k).transpose(-1, -2)).tril()
        return products / (products.sum(-1, keepdim=True) + self.config.eps)

    def states(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As Attention.states (equations 18 and 19)."""
        k = self.phi(k)
        return (k[..., None] * v[..., None, :]).cumsum(-3), k.cumsum(-2)

    @property
    def state_bytes(self) -> int:
        c = self.config
        return 4 * c.layers * c.heads * c.feature_dim * (c.value_dim + 1)

    @property
    def facts(self) -> dict[str, str]:
        return {
            "feature map": f"{self.config.feature_map}, {self.config.feature_dim} features a head"
        }

    def new_state(self, slots: int, dtype: torch.dtype = torch.float32) -> State:
        return RecurrentState(self.config, slots, dtype)
