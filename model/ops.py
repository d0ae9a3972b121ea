"""The one door to csrc: each operator's schema and its reference in torch.

The reference is definition, fallback and test oracle. A compiled library that is present adds
its implementation of the same schema, and everything that calls the operator gets faster.
"""

import torch
from torch import Tensor

_library = torch.library.Library("linpix", "DEF")
_library.define("recurrent_step(Tensor q, Tensor k, Tensor v, Tensor(a!) S, Tensor(b!) z,"
                " Tensor slots, float eps) -> Tensor")


def recurrent_step_reference(q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor,
                             slots: Tensor, eps: float) -> Tensor:
    """Fold one token per row into its slot's state and read the state out (equations 18-20).

    q, k: (B, H, D) after the feature map · v: (B, H, M) · S: (N, H, D, M) · z: (N, H, D), both
    changed in place at slots · slots: (B,) int64, no slot twice except 0 · returns (B, H, M).
    """
    S_new = S[slots] + k[..., None] * v[..., None, :]
    z_new = z[slots] + k
    S[slots] = S_new
    z[slots] = z_new
    numerator = (q[..., None, :] @ S_new)[..., 0, :]
    return numerator / ((q * z_new).sum(-1, keepdim=True) + eps)


_library.impl("recurrent_step", recurrent_step_reference, "CompositeExplicitAutograd")
