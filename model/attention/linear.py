"""Linear attention: a feature map for a softmax, so that all of the past is one matrix S and one vector z."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from model import ops
from model.attention import Attention, State
from model.config import ModelConfig
from model.features import feature_map

CHUNK = 32  # tokens; quadratic inside a chunk, recurrent between chunks: memory is linear in T


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


class Kind(Attention):
    """"Transformers are RNNs", section 3.2."""

    steps_as = "linear"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.phi = feature_map(config)

    def parallel(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, training: bool = False) -> Tensor:
        return linear_attention(self.phi(q), self.phi(k), v, self.config.eps)

    @property
    def state_bytes(self) -> int:
        c = self.config
        return 4 * c.layers * c.heads * c.feature_dim * (c.value_dim + 1)

    @property
    def facts(self) -> dict[str, str]:
        return {"feature map": f"{self.config.feature_map}, {self.config.feature_dim} features a head"}

    def new_state(self, slots: int, dtype: torch.dtype = torch.float32) -> State:
        return RecurrentState(self.config, slots, dtype)
