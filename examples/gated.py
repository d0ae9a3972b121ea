"""Gated linear attention as a plugin: S_t = g_t S_{t-1} + k_t v_t, where the gate g_t forgets.

linpix train mnist-small --data data --plugin examples/gated.py --attention gated --out runs/gated
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from linpix.plugins import Memory, Recurrent, register_attention


@register_attention("gated")
class Gated(Recurrent):
    """The last entry of a key is its token's gate: the gate is learned with the keys."""

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        return {"S": (c.heads, c.key_dim, c.value_dim), "z": (c.heads, c.key_dim)}

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
        if lengths is not None:
            raise ValueError("gated attention is causal: it cannot look at later tokens")
        past = F.logsigmoid(k[..., -1].float() + 4).cumsum(-1)  # log of g_1 g_2 ... g_t
        decay = past[..., :, None] - past[..., None, :]
        later = torch.ones_like(decay, dtype=torch.bool).triu(1)
        decay = decay.masked_fill(later, -torch.inf).exp()
        weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT * decay
        return (weights @ v.to(weights)) / (weights.sum(-1, keepdim=True) + self.config.eps)

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, memory: Memory) -> Tensor:
        gate = torch.sigmoid(k[..., -1:] + 4)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        memory["S"] = gate[..., None] * memory["S"] + k[..., None] * v[..., None, :]
        memory["z"] = gate * memory["z"] + k
        read = (q[..., None] * memory["S"]).sum(-2)
        return read / ((q * memory["z"]).sum(-1, keepdim=True) + self.config.eps)
