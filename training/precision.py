"""bfloat16 in training, only where its products are fast; and the optimiser Muon, which consists of
products.
"""

import math
from typing import Any

import torch
from torch import Tensor


def has_bf16_products(device: torch.device) -> bool:
    """Whether torch has a fast product of bfloat16 matrices there; on other processors it adds
    number by number.
    """
    return device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Muon(torch.optim.Muon):
    """torch's Muon, with all matrices of one shape in one product, since launching products is most
    of its time on a GPU; and with products in float32 where those in bfloat16 are slow.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            matrices: list[Tensor] = []
            gradients: list[Tensor] = []
            averages: list[Tensor] = []
            self._init_group(group, matrices, gradients, averages)
            if not matrices:
                continue
            assert group["nesterov"] and group["adjust_lr_fn"] == "match_rms_adamw"
            torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
            steps = torch._foreach_lerp(gradients, averages, group["momentum"])
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            for shape in dict.fromkeys(matrix.shape for matrix in matrices):
                at = [index for index, matrix in enumerate(matrices) if matrix.shape == shape]
                directions = orthogonalised(torch.stack([steps[index] for index in at]), group)
                size = group["lr"] * 0.2 * math.sqrt(max(shape))
                torch._foreach_add_(
                    [matrices[index] for index in at],
                    list(directions.to(steps[0].dtype)),
                    alpha=-size,
                )


def orthogonalised(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """(n, rows, columns) -> the same singular vectors with singular values near 1, by Newton and
    Schulz's iteration.
    """
    x = matrices.bfloat16() if has_bf16_products(matrices.device) else matrices
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
