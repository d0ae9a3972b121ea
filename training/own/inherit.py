"""Weights of one architecture, converted for another that differs only in its classes or head, or
draws in negative.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from linpix.model.config import ModelConfig
from linpix.model.inputs import FOLLOWING_OUTSIDE, OUTSIDE, START

# Of Transformer.state_dict; the tables' blocks of rows are described in model/inputs.py and
# model/background.py.
_TABLE, _PATCHES, _SKIPPED = "inputs.table", "patches.linear.weight", "background.table"


def differences(there: ModelConfig, here: ModelConfig) -> list[str]:
    """Fields whose difference keeps weights from fitting, one text each.

    classes and twin_of may differ, and a categorical head may follow a mixture, whose weights it
    cannot use.
    """
    found = []
    anew = ("head", "mixtures") if here.head == "categorical" else ()
    for field in dataclasses.fields(ModelConfig):
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
    found = {
        name: (
            weight
            if name.startswith(anew) or name not in old or old[name].shape != weight.shape
            else old[name]
        )
        for name, weight in new.items()
    }
    if there.classes == here.classes and there.look_ups == here.look_ups:
        return found
    blocks, table = dict(_blocks(there)), new[_TABLE].clone()
    for name, (first, size) in _blocks(here):
        if name in blocks:
            at, length = blocks[name]
            rows = old[_TABLE][at : at + length]
            if size == length:
                table[first : first + size] = rows
            elif name == "class":  # row 0: no class
                table[first] = rows[0]
                table[first + 1 : first + size] = _of_classes(rows[1:], size - 1)
            else:
                table[first : first + size] = _of_classes(
                    rows if length else old[_TABLE][START : START + 1], size
                )
    found[_TABLE] = table
    # positions, no class, each class, what follows
    if _SKIPPED in found and there.classes != here.classes:
        rows, first = old[_SKIPPED], there.subpixels + 1
        classes = rows[first : first + there.classes] if there.classes else rows[first - 1 : first]
        found[_SKIPPED] = torch.cat(
            [rows[:first], _of_classes(classes, here.classes), rows[first + there.classes :]]
        )
    return found


def _of_classes(rows: Tensor, count: int) -> Tensor:
    """Rows for `count` classes: the given ones, then their mean."""
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
    for name, (first, _) in _blocks(config):
        if name == "values" or name.startswith(("neighbour", "following")):
            table[first : first + 256] = table[first : first + 256].flip(0)
    means = slice(config.mixtures, config.mixtures * (1 + config.token_size))
    heads = ("head", "background.head") if config.background is not None else ("head",)
    for name in (f"{head}.{part}" for head in heads for part in ("weight", "bias")):
        found[name] = weights[name].clone() if config.head == "mixture" else weights[name].flip(0)
        if config.head == "mixture":
            found[name][means] *= -1
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
        config
        if config.background is None
        else dataclasses.replace(config, background=255 - config.background)
    )


def _blocks(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name, first row and number of rows of each block of the table, in order."""
    sizes = {
        "position": config.length,
        "row": config.height,
        "column": config.width,
        "channel": config.channels,
        "class": config.classes + 1,
    }
    named = [
        ("values", START + 1),
        ("starts", config.classes),
        *((name, sizes[name]) for name in config.look_ups if name != "previous"),
        *((f"neighbour {each}", OUTSIDE + 1) for each in config.neighbours),
        *((f"following {each}", FOLLOWING_OUTSIDE + 1) for each in config.following),
    ]
    first = 0
    for name, size in named:
        yield name, (first, size)
        first += size


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
