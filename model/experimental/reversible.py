"""A stack of reversible residuals (Reformer, section 3), trained without keeping what its layers
computed.

Two streams alternate: (a, b) becomes (a', b') = (b, a + f(b)), where f is attention in one residual
and feed-forward in the next; two residuals together are equation 9. The inputs follow from the
result, (a, b) = (b' - f(a'), a'), which is equation 8. The backward pass undoes the residuals this
way, from the last to the first, while it computes the gradient. So memory does not grow with the
number of layers, and each residual is computed twice.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..config import ModelConfig
from ..transformer import Attend, Layer, Transformer
from .pre_norm import PreNormLayer


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
            if sums:
                found = [total + more for total, more in zip(sums, found, strict=True)]
            sums = found
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
    parameters: list[Tensor] = []
    for residual in residuals:
        parameters += residual.parameters
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
    of_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), of_gpu


def _draw_again(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


class ReversibleLayer(PreNormLayer):
    def forward(self, x: Tensor, index: int, attend: Attend) -> Tensor:
        """x: two streams, (2, B, d_model) or (2, B, T, d_model). Keeps the shape."""
        x1, x2 = x
        y1 = x1 + self.normed_attention(x2, index, attend)
        return torch.stack([y1, x2 + self.in_chunks(self.normed_feed_forward, y1)])

    def residuals(self, index: int, attend: Attend, *, compiled: bool) -> list[Residual]:
        """The two residuals of the layer, for run."""
        wrap: Callable[[Any], Any] = _compiled if compiled else lambda function: function
        attention = partial(wrap(PreNormLayer.normed_attention), self, index=index, attend=attend)
        feed_forward = partial(wrap(PreNormLayer.normed_feed_forward), self)
        return [
            Residual(attention, _trainable_of(self.norm1, self.qkv, self.out)),
            Residual(
                feed_forward,
                _trainable_of(self.norm2, self.up, self.down),
                chunks=self.chunks,
            ),
        ]


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """function, compiled once for all layers, which are alike; it draws the same random numbers as
    eager code.
    """
    return torch.compile(function, options={"fallback_random": True})


def _trainable_of(*modules: nn.Module) -> tuple[Tensor, ...]:
    return tuple(p for p in nn.ModuleList(modules).parameters() if p.requires_grad)


def _run_reversibly(layers: Iterable[Any], x: Tensor, attend: Attend, *, compiled: bool) -> Tensor:
    residuals: list[Residual] = []
    for index, layer in enumerate(layers):
        residuals += layer.residuals(index, attend, compiled=compiled)
    return run(residuals, x)


class Reversible(Transformer):
    """A transformer whose layers pass two streams on."""

    def __init__(
        self, config: ModelConfig, make_layer: Callable[[], Layer], dropout: float = 0.0
    ) -> None:
        if dropout:
            raise ValueError(
                "dropout must be 0 with reversible residuals, which are computed twice; got"
                f" {dropout}"
            )
        super().__init__(config, make_layer)
        # The undoing of a stack cannot be traced, but the functions in it can be compiled. Only for
        # reversible models, since importing the compiler takes as long as the rest of torch.
        self._reversibly = torch.compiler.disable(_run_reversibly)

    def embed(self, canvas: Tensor, t: Tensor, start: Tensor) -> Tensor:
        """Two streams of embedded inputs, (2, B, n, d_model)."""
        x = super().embed(canvas, t, start)
        return torch.stack([x, x])

    def run(self, x: Tensor, attend: Attend) -> Tensor:
        if not torch.is_grad_enabled():
            return super().run(x, attend)
        compiled = torch.compiler.is_compiling()
        return self.output_head(self._reversibly(self.layers, x, attend, compiled=compiled))

    def output_head(self, x: Tensor) -> Tensor:
        """Parameters from the mean of the two streams."""
        return super().output_head(x.mean(0))
