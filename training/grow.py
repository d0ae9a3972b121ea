"""Growth of a trained network, in depth or in width, that changes nothing at first.

The last matrices of a new layer's attention and feed-forward are zero, so it adds zero to its
input; the gradients of these matrices are not zero. All other weights are copied from the layer
before it. A new pre-norm layer is then the identity. A new post-norm layer normalises its input
again, so the weights of its norms are fitted on images, channel by channel, such that its output
equals its input. This needs inputs whose mean and spread hardly change from token to token. In the
models here, outputs of the first layers are like that and outputs of the last ones are not. So new
layers are added after layers of the first half.

A wider network has several copies of every feature, head and hidden unit. A LayerNorm's output does
not depend on the number of copies, and the weights of an input are divided among its copies
("Net2Net", Chen et al. 2016, section 2.3). They are divided at random: copies with equal weights
would get equal gradients, and so remain copies.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linpix.model.nets import net_for
from linpix.model.transformer import Layer, Transformer

# largest relative error of a new post-norm layer's output: norm of the error / norm of the input
TOLERANCE = 0.1


def grown(net: Transformer, layers: int, run: Callable[[Transformer], object]) -> Transformer:
    """A copy of net with this many layers and the same predictions, up to the fit of post-norm
    layers.

    run: applies net to some images; called once if norms must be fitted. Raises ValueError if
    layers is less than net has, if net is reversible, or if a new layer's output differs from its
    input by TOLERANCE or more.
    """
    config = net.config
    if layers < config.layers or config.residual != "plain":
        raise ValueError(
            f"weights of {config.layers} {config.residual} layers cannot start a network of"
            f" {layers} plain layers"
        )
    deeper = net_for(dataclasses.replace(config, layers=layers))
    hosts = max(1, config.layers // 2)  # new layers follow these
    copies = [
        1 + (layers - config.layers + hosts - 1 - i) // hosts if i < hosts else 1
        for i in range(config.layers)
    ]
    own = {
        name: value for name, value in net.state_dict().items() if not name.startswith("layers.")
    }
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


@torch.no_grad()
def widened(net: Transformer, times: int) -> Transformer:
    """A copy of net with `times` its heads, d_model and d_ff and, up to rounding, the same
    predictions.
    """
    config = net.config
    wider = net_for(
        dataclasses.replace(
            config,
            heads=times * config.heads,
            d_model=times * config.d_model,
            d_ff=times * config.d_ff,
        )
    )
    weights = net.state_dict()
    for name, weight in weights.items():
        module, kind = name.rsplit(".", 1)
        if name in ("inputs.table", "patches.place"):
            weight = weight.repeat(1, times)
        elif module.endswith(".qkv"):  # heads are repeated within q, k and v
            keys, values = config.heads * config.key_dim, config.heads * config.value_dim
            parts = weight.split([*[keys] * ((len(weight) - values) // keys), values])
            weight = torch.cat([part for part in parts for _ in range(times)])
        elif module in ("norm", "patches", "patches.linear") or module.startswith("layers."):
            weight = torch.cat([weight] * times)
        reads_features = module not in ("patches.linear", "background.head")
        if kind == "weight" and isinstance(net.get_submodule(module), nn.Linear) and reads_features:
            shares = 0.5 * weight.std() * torch.randn(times, *weight.shape, device=weight.device)
            weight = torch.cat([*(weight / times + shares - shares.mean(0))], 1)
        weights[name] = weight
    wider.load_state_dict(weights)
    return wider


def _outputs(net: Transformer, run: Callable[[Transformer], object]) -> list[Tensor]:
    """Each layer's outputs for the images to which `run` applies net: (tokens, d_model) each."""
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
    """Fit an empty layer's norms, by least squares per channel, to output x for input x; return the
    actual output.
    """
    given = x
    for norm in (layer.norm1, layer.norm2):
        normal = F.layer_norm(x, x.shape[-1:], eps=norm.eps)
        mean, mean_x = normal.mean(0), x.mean(0)
        slope = ((normal - mean) * (x - mean_x)).sum(0) / (normal - mean).square().sum(0).clamp(
            min=1e-12
        )
        norm.weight.copy_(slope)
        norm.bias.copy_(mean_x - slope * mean)
        x = F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    error = float((x - given).norm() / given.norm())
    if not error < TOLERANCE:
        raise ValueError(
            f"a new layer after layer {index} would change its input by {error:.0%}; start with a "
            "checkpoint that has pre-norm layers, or fewer steps between norms"
        )
    return x
