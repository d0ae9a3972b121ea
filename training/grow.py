"""A deeper network that begins where a trained one stands: new layers that at first change nothing.

What a new layer adds to its input is zero, since the last matrices of its attention and of its feed-forward are; their
gradients are not. All else it has from the layer before it. Pre-norm layers are then the identity. Post-norm ones
normalise their input once more, so the weights of their norms are fitted to give it back, channel by channel, on
images. That needs inputs whose mean and spread hardly change from token to token, which is what the first layers of the
models here give to the next ones and the last layers do not: so new layers follow the first half.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linpix.model.transformer import Layer, Transformer

TOLERANCE = 0.1  # of what a post-norm layer gives back: the norm of its error, relative


def grown(net: Transformer, layers: int, run: Callable[[Transformer], object]) -> Transformer:
    """A copy of net with so many layers, of the same predictions, up to the fit of post-norm layers.

    run: called once with net, applies it to some images. Raises ValueError where layers is less than net has, where it
    has reversible ones, or where a norm does not give back what comes in.
    """
    config = net.config
    if layers < config.layers or config.residual != "plain":
        raise ValueError(f"{config.layers} {config.residual} layers cannot begin a network of {layers} plain ones")
    deeper = Transformer(dataclasses.replace(config, layers=layers))
    hosts = max(1, config.layers // 2)  # new layers follow these
    copies = [1 + (layers - config.layers + hosts - 1 - i) // hosts if i < hosts else 1 for i in range(config.layers)]
    own = {name: value for name, value in net.state_dict().items() if not name.startswith("layers.")}
    deeper.load_state_dict(own, strict=False)
    outputs = _outputs(net, run) if config.norm == "post" and layers > config.layers else []
    at = 0
    for index, count in enumerate(copies):
        for copy in range(count):
            layer = deeper.layers[at]
            assert isinstance(layer, Layer)
            layer.load_state_dict(net.layers[index].state_dict())
            if copy:
                _empty(layer)
                if outputs:
                    outputs[index] = _give_back(layer, outputs[index], index)
            at += 1
    return deeper


def _outputs(net: Transformer, run: Callable[[Transformer], object]) -> list[Tensor]:
    """What each layer gives for what `run` applies net to: (tokens, d_model) each."""
    found: list[Tensor] = []

    def keep(_: nn.Module, __: object, output: Tensor) -> None:
        found.append(output.detach().flatten(0, -2))

    hooks = [layer.register_forward_hook(keep) for layer in net.layers]
    try:
        with torch.no_grad():
            run(net)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.no_grad()
def _empty(layer: Layer) -> None:
    for linear in (layer.out, layer.down):
        linear.weight.zero_()
        linear.bias.zero_()


@torch.no_grad()
def _give_back(layer: Layer, x: Tensor, index: int) -> Tensor:
    """Fit an empty layer's norms, by least squares for each channel, so that x comes out; returns what does."""
    given = x
    for norm in (layer.norm1, layer.norm2):
        normal = F.layer_norm(x, x.shape[-1:], eps=norm.eps)
        mean, mean_x = normal.mean(0), x.mean(0)
        slope = ((normal - mean) * (x - mean_x)).sum(0) / (normal - mean).square().sum(0).clamp(min=1e-12)
        norm.weight.copy_(slope)
        norm.bias.copy_(mean_x - slope * mean)
        x = F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    error = float((x - given).norm() / given.norm())
    if not error < TOLERANCE:
        raise ValueError(f"a new layer after layer {index} would change what it is given by {error:.0%}; begin with "
                         "a checkpoint of pre-norm layers, or of fewer steps between norms")
    return x
