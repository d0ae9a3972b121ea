"""How --init fills the weights of a new model with those of a checkpoint.

The checkpoint may have other classes, another head, another size of images, fewer layers, or a
fraction of the heads, d_model and d_ff; it may draw light on dark where the new model draws ink on
paper.

New layers change nothing at first. The last matrices of a new layer's attention and feed-forward
are zero, so it adds zero to its input; the gradients of these matrices are not zero. All other
weights are copied from the layer before it. A new pre-norm layer is then the identity. A new
post-norm layer normalises its input again, so the weights of its norms are fitted on images,
channel by channel, such that its output equals its input. This needs inputs whose mean and spread
hardly change from token to token. In the models here, outputs of the first layers are like that and
outputs of the last ones are not. So new layers are added after layers of the first half.

A wider network has several copies of every feature, head and hidden unit. A LayerNorm's output does
not depend on the number of copies, and the weights of an input are divided among its copies
("Net2Net", Chen et al. 2016, section 2.3). They are divided at random: copies with equal weights
would get equal gradients, and so remain copies.
"""

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linpix.model.checkpoint import Checkpoint
from linpix.model.config import PRESETS, ModelConfig
from linpix.model.inputs import START, blocks
from linpix.model.nets import net_for
from linpix.model.transformer import Layer, Transformer

Batch = tuple[Tensor, Tensor, Tensor | None]  # images (B, T), start indices (B,), known (B, T)
# largest relative error of a new post-norm layer's output: norm of the error / norm of the input
TOLERANCE = 0.1
# Of Transformer.state_dict; the tables' blocks of rows are described in model/inputs.py and
# model/background.py.
_TABLE, _SKIPPED = "inputs.table", "background.table"
_PATCHES, _PLACES = "patches.linear.weight", "patches.place"


def weights_for(
    net: Transformer, other: Checkpoint, batch: Batch | None, *, invert: bool
) -> dict[str, Tensor]:
    """The weights of a checkpoint as a state_dict of net; net's own where these do not fit.

    batch: images on which the norms of new layers are fitted; without it no layers are added ·
    invert: convert the weights to draw in negative. Raises ValueError if the architectures differ
    in what cannot be converted.
    """
    model = net.config
    old = _as_wide_as(model, stretched(other.net, model))
    if batch is not None and old.config.layers < model.layers:
        old = grown(old, model.layers, lambda old: _run_layers(old, batch))
    config = negative(old.config) if invert else old.config
    found = differences(config, model)
    if found:
        raise ValueError(
            f"--init needs a checkpoint of the same architecture, but {other.name} differs in "
            f"{'; '.join(found)}{_preset_for(config)}"
        )
    weights = inverted(old.state_dict(), old.config) if invert else old.state_dict()
    return inherited(weights, config, net.state_dict(), model)


def _as_wide_as(model: ModelConfig, net: Transformer) -> Transformer:
    """net, widened if its heads, d_model and d_ff are all the same fraction of the model's."""
    names = ("heads", "d_model", "d_ff")
    times = {getattr(model, name) / getattr(net.config, name) for name in names}
    factor = times.pop()
    return widened(net, int(factor)) if not times and factor > 1 and factor.is_integer() else net


def stretched(net: Transformer, model: ModelConfig) -> Transformer:
    """net for pictures of the model's size: what it knows of places is stretched over them. Patches
    of another side begin anew.
    """
    config = net.config
    patch = model.patch if config.patch else 0
    sized = replace(config, height=model.height, width=model.width, patch=patch)
    if sized == config or bool(model.patch) != bool(config.patch):
        return net
    other = net_for(sized)
    weights = net.state_dict()
    table = rows_of_blocks(weights[_TABLE], config)
    sizes = config.height, config.width, sized.height, sized.width
    places = {
        "row": (config.height, 1, sized.height, 1),
        "column": (1, config.width, 1, sized.width),
        "position": sizes,
    }
    for name, grids in places.items():
        if name in table:
            table[name] = _resized(table[name], *grids)
    weights[_TABLE] = torch.cat([*table.values()])
    if _SKIPPED in weights:
        positions, rest = weights[_SKIPPED].tensor_split([config.subpixels])
        positions = _resized(positions, *sizes)
        weights[_SKIPPED] = torch.cat([positions, rest])
    if config.patch:
        sides = config.patch, config.patch, sized.patch, sized.patch
        patches = [size // side for size, side in zip(sizes, sides, strict=True)]
        weights[_PLACES] = _resized(weights[_PLACES], *patches)
    if sized.patch != config.patch:
        weights[_PATCHES] = other.state_dict()[_PATCHES]
    other.load_state_dict(weights)
    return other


def _resized(rows: Tensor, height: int, width: int, taller: int, wider: int) -> Tensor:
    """Rows for places of an image, (height * width * n, d) in raster order, for an image of another
    size, by bilinear interpolation.
    """
    grid = rows.view(height, width, -1).movedim(2, 0)[None]
    found = F.interpolate(grid, (taller, wider), mode="bilinear", align_corners=False)
    return found[0].movedim(0, 2).reshape(-1, rows.shape[1])


def _run_layers(net: Transformer, batch: Batch) -> None:
    """Pass all tokens of a batch through the layers."""
    images, start, known = (None if each is None else each.to(net.device) for each in batch)
    assert images is not None and start is not None
    start = start.clamp(max=START + net.config.classes)  # for missing classes, any will do
    if net.config.packed:
        net(images, start, known)
    else:
        net(images, start)


def _preset_for(config: ModelConfig) -> str:
    """The preset that weights of a config fit, as the end of an error."""
    for name, preset in PRESETS.items():
        if not differences(config, replace(preset, layers=config.layers)):
            return f"; its weights fit the preset {name} with --layers {config.layers}"
    return ""


def differences(there: ModelConfig, here: ModelConfig) -> list[str]:
    """Fields whose difference keeps weights from fitting, one text each.

    classes and twin_of may differ, and a categorical head may follow a mixture, whose weights it
    cannot use.
    """
    found = []
    anew = ("head", "mixtures") if here.head == "categorical" else ()
    for field in fields(ModelConfig):
        old, new = getattr(there, field.name), getattr(here, field.name)
        if field.name == "look_ups":
            old, new = (tuple(name for name in names if name != "class") for names in (old, new))
        if field.name not in ("classes", "twin_of", *anew) and old != new:
            found.append(f"{field.name}: {_short(old)} in the checkpoint, {_short(new)} here")
    return found


def inherited(
    old: dict[str, Tensor], there: ModelConfig, new: dict[str, Tensor], here: ModelConfig
) -> dict[str, Tensor]:
    """The old weights where they fit, new ones elsewhere. old, new: state_dicts of configs `there`
    and `here`.

    If the numbers of classes differ, class c begins as the old class c, whatever that was, because
    the network can already distinguish the old classes. Additional classes begin as their mean, and
    the class head as in `new`. So does a head of another kind.
    """
    anew = ("head.", "background.head.") if there.head != here.head else ()
    found = dict(new)
    for name, weight in old.items():
        if name in new and weight.shape == new[name].shape and not name.startswith(anew):
            found[name] = weight
    if there.classes == here.classes and there.look_ups == here.look_ups:
        return found
    had = rows_of_blocks(old[_TABLE], there)
    had["starts"] = _of_classes(had["starts"], here.classes, had["values"][START:])
    if "class" in had:
        none, classes = had["class"].tensor_split([1])
        had["class"] = torch.cat([none, _of_classes(classes, here.classes, none)])
    own = rows_of_blocks(new[_TABLE], here)
    found[_TABLE] = torch.cat([had.get(name, own[name]) for name in own])
    # positions, no class, each class, what follows
    if _SKIPPED in found and there.classes != here.classes:
        first = there.subpixels + 1
        before, classes, after = old[_SKIPPED].tensor_split([first, first + there.classes])
        rows = _of_classes(classes, here.classes, before[-1:])
        found[_SKIPPED] = torch.cat([before, rows, after])
    return found


def rows_of_blocks(table: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """The rows of each block of a table, in order, by the block's name."""
    sizes = dict(blocks(config))
    return dict(zip(sizes, table.split_with_sizes([*sizes.values()]), strict=True))


def _of_classes(rows: Tensor, count: int, none: Tensor) -> Tensor:
    """Rows for `count` classes: the given ones, then their mean. none: the row without a class,
    for all if no row is given.
    """
    rows = rows if len(rows) else none
    return torch.cat([rows[:count], rows.mean(0).expand(max(0, count - len(rows)), -1)])


def inverted(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Weights that give 255 - v the probability that these give v: for ink on paper instead of
    light on dark.

    The conversion is exact. Look-ups of values, and logits, are in reverse order, and means change
    their sign. In a patch, the input v / 255 of a known sub-pixel becomes 1 - v / 255, where 1 is
    its known flag: so weights of values change their sign, and are added to those of the flags. The
    result is for the config that `negative` gives.
    """
    if config.first_marginal:
        raise ValueError("only models without first marginal can be inverted")
    table, found = weights[_TABLE].clone(), dict(weights)
    for name, rows in rows_of_blocks(table, config).items():
        if name.startswith(("values", "neighbour", "following")):
            rows[:256] = rows[:256].flip(0)
    means = slice(config.mixtures, config.mixtures * (1 + config.token_size))
    for name, weight in weights.items():
        if name.removeprefix("background.") not in ("head.weight", "head.bias"):
            continue
        if config.head == "mixture":
            found[name] = weight.clone()
            found[name][means] *= -1
        else:
            found[name] = weight.flip(0)
    if config.patch:
        values, known = weights[_PATCHES].chunk(2, 1)
        found[_PATCHES] = torch.cat([-values, known + values], 1)
    return found | {_TABLE: table}


def negative(config: ModelConfig) -> ModelConfig:
    """The config of a model that draws the images of `config` in negative, 255 - v for v. Raises
    ValueError.
    """
    if config.head == "categorical" and config.background is None:  # its ground is black
        raise ValueError(
            "head categorical without a background needs pictures that are light on dark; give"
            " --head mixture, or a preset with a background, such as mnist-conditional"
        )
    return (
        config if config.background is None else replace(config, background=255 - config.background)
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


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
    deeper = net_for(replace(config, layers=layers))
    more, hosts = layers - config.layers, max(1, config.layers // 2)  # new layers follow hosts
    own = net.state_dict()
    deeper.load_state_dict(
        {name: own[name] for name in own if not name.startswith("layers.")}, strict=False
    )
    outputs = _outputs(net, run) if config.norm == "post" and more else []
    rest = iter(deeper.layers)
    for index, old in enumerate(net.layers):
        next(rest).load_state_dict(old.state_dict())
        if index >= hosts:
            continue
        for _ in range(index, more, hosts):
            layer = next(rest)
            assert isinstance(layer, Layer)
            layer.load_state_dict(old.state_dict())
            _empty(layer)
            if outputs:
                outputs[index] = _give_back(layer, outputs[index], index)
    return deeper


@torch.no_grad()
def widened(net: Transformer, times: int) -> Transformer:
    """A copy of net with `times` its heads, d_model and d_ff and, up to rounding, the same
    predictions.
    """
    config = net.config
    wider = net_for(
        replace(
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
            weight = torch.cat([torch.cat([part] * times) for part in parts])
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
        x = norm(x)
    error = float((x - given).norm() / given.norm())
    if not error < TOLERANCE:
        raise ValueError(
            f"a new layer after layer {index} would change its input by {error:.0%}; start with a "
            "checkpoint that has pre-norm layers, or fewer steps between norms"
        )
    return x
