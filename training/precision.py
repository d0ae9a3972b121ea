"""bfloat16 in training, only where its products are fast."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def has_bf16_products(device: torch.device) -> bool:
    """Whether torch has a fast product of bfloat16 matrices there; on other processors it adds number by number."""
    return device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Muon(torch.optim.Muon):
    """torch's Muon, whose products are in float32 where those in bfloat16 are slow."""

    def step(self, closure: Any = None) -> Any:
        device = self.param_groups[0]["params"][0].device
        with contextlib.nullcontext() if has_bf16_products(device) else _InFloat32():
            return super().step(closure)  # type: ignore[no-untyped-call]


class _InFloat32(TorchFunctionMode):
    """Within it, Tensor.bfloat16() returns a copy in float32: Muon has no option for the type of its products."""

    def __torch_function__(self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))
