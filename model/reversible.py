"""A stack of reversible residuals (Reformer, section 3), trained without keeping what its layers
computed.

Two streams alternate: (a, b) becomes (a', b') = (b, a + f(b)), where f is attention in one residual
and feed-forward in the next; two residuals together are equation 9. The inputs follow from the
result, (a, b) = (b' - f(a'), a'), which is equation 8. The backward pass undoes the residuals this
way, from the last to the first, while it computes the gradient. So memory does not grow with the
number of layers, and each residual is computed twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class Residual:
    """f, from (B, T, d_model) to the same shape, and its trainable parameters."""

    function: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]
    # parts of the positions, computed in turn (equation 10), if f does not mix positions
    chunks: int = 1

    def __call__(self, x: Tensor) -> Tensor:
        if self.chunks == 1:
            return self.function(x)
        return torch.cat([self.function(part) for part in x.chunk(self.chunks, 1)], 1)

    def pull(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """f(x), and the gradients of x and of each parameter, given the gradient of f(x)."""
        results, inputs = [], []
        sums: list[Tensor] = []
        for part, given in zip(
            x.chunk(self.chunks, 1), gradient.chunk(self.chunks, 1), strict=True
        ):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                y = self.function(part)
            of_part, *found = torch.autograd.grad(y, (part, *self.parameters), given.to(y.dtype))
            results.append(y.detach())
            inputs.append(of_part)
            sums = (
                [total + more for total, more in zip(sums, found, strict=True)] if sums else found
            )
        if self.chunks == 1:
            return results[0], inputs[0], sums
        return torch.cat(results, 1), torch.cat(inputs, 1), sums


def run(residuals: list[Residual], streams: Tensor) -> Tensor:
    """Pass streams (2, B, T, d_model) through all residuals; the backward pass recomputes them in
    order to undo them.

    Functions may draw random numbers: the backward pass draws the same ones. Autocast applies in
    both passes. The streams keep their own precision, since rounding them would make undoing
    inexact.
    """
    parameters = [parameter for residual in residuals for parameter in residual.parameters]
    return _Stack.apply(residuals, streams, *parameters)


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residuals: list[Residual], streams: Tensor, *parameters: Tensor
    ) -> Tensor:
        device = streams.device.type
        ctx.residuals, ctx.random = residuals, []
        # without autocast's cache: casts made here have no graph, and later code that needs one
        # could get them
        ctx.autocast = {
            "device_type": device,
            "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device),
            "cache_enabled": False,
        }
        a, b = streams.detach()
        with torch.autocast(**ctx.autocast):
            for residual in residuals:
                ctx.random.append(_random_state(streams.device))
                a, b = b, a + residual(b)
        result = torch.stack([a, b])
        # parameters: torch then refuses backward if they have changed
        ctx.save_for_backward(result, *parameters)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), (da, db) = ctx.saved_tensors[0], gradient
        of_parameters: list[Tensor] = []
        gpus = [a.device] if a.is_cuda else []
        with torch.random.fork_rng(gpus), torch.autocast(**ctx.autocast):
            for residual, random in zip(reversed(ctx.residuals), reversed(ctx.random), strict=True):
                _draw_again(a.device, random)
                y, dx, found = residual.pull(a, db)
                of_parameters = found + of_parameters
                a, b = b - y, a
                da, db = db, da + dx
        return None, torch.stack([da, db]), *of_parameters


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), (
        torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    )


def _draw_again(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
