"""Models with random weights, checkpoints of them, and random images."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linpix.model import checkpoint
from linpix.model.config import PRESETS, ModelConfig
from linpix.model.nets import net_for
from linpix.model.transformer import Transformer

# a small model that uses all that is known, draws the class first, and skips the layers amid
# background
CONDITIONAL = dataclasses.replace(
    PRESETS["tiny"],
    background=0,
    background_dim=16,
    patch=4,
    following=((0, 1, 0), (1, 0, 0)),
    look_ups=("previous", "row", "column", "class"),
)
CLASS_FIRST = dataclasses.replace(CONDITIONAL, background=None)
# the same with a palette, whose ground is transparent
COLOURS = ((254, 254, 254, 0), (200, 30, 20, 255), (20, 160, 60, 255), (30, 40, 220, 255))
PALETTE = dataclasses.replace(CONDITIONAL, head="categorical", palette=COLOURS)


def net_of(config: ModelConfig, *, seed: int = 0, spread: float = 0.0) -> Transformer:
    """A model with random weights that are not to be trained.

    spread: of what is added to every parameter; without it, norms and biases are ones and zeros.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = net_for(config).eval().requires_grad_(False)
        for parameter in net.parameters():
            parameter += spread * torch.randn_like(parameter)
    return net


def perturbed_net(config: ModelConfig) -> Transformer:
    """One in which every parameter matters."""
    return net_of(config, spread=0.1)


def noise(count: int, subpixels: int = 64) -> Tensor:
    """(count, subpixels) uint8, the same each time."""
    random = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, subpixels), generator=random, dtype=torch.uint8)


def saved(folder: Path, net: Transformer | ModelConfig, **provenance: Any) -> Path:
    """A checkpoint folder of a model, or of one with random weights."""
    net = net if isinstance(net, Transformer) else net_of(net)
    names = [str(label) for label in range(net.config.classes)]
    checkpoint.save(
        folder,
        net,
        {"data": "random weights", "class_names": names, **provenance},
        f"# {folder.name}\n",
    )
    return folder
