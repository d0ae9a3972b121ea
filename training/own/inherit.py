"""Weights of one architecture for another that differs in its classes alone."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from linpix.model.config import ModelConfig
from linpix.model.inputs import FOLLOWING_OUTSIDE, OUTSIDE, START

# Of Transformer.state_dict; the tables' blocks of rows are described in model/inputs.py and model/background.py.
_TABLE, _PATCHES, _SKIPPED = "inputs.table", "patches.linear.weight", "background.table"


def differences(there: ModelConfig, here: ModelConfig) -> list[str]:
    """What keeps weights from fitting, one field each: all but the classes, and the name of a twin."""
    found = []
    for field in dataclasses.fields(ModelConfig):
        old, new = getattr(there, field.name), getattr(here, field.name)
        if field.name == "look_ups":
            old, new = (tuple(name for name in names if name != "class") for names in (old, new))
        if field.name not in ("classes", "twin_of") and old != new:
            found.append(f"{field.name} {_short(old)} there and {_short(new)} here")
    return found


def inherited(old: dict[str, Tensor], there: ModelConfig, new: dict[str, Tensor], here: ModelConfig
              ) -> dict[str, Tensor]:
    """The old weights where they fit, new ones elsewhere. old, new: state_dicts of configs `there` and `here`.

    Where the numbers of classes differ, class c begins as the old class c, whatever that was: the network knows already
    how to tell these apart. Classes beyond the old ones begin as their mean, and the class head as it is in `new`.
    """
    found = {name: old[name] if name in old and old[name].shape == weight.shape else weight
             for name, weight in new.items()}
    if there.classes == here.classes and there.look_ups == here.look_ups:
        return found
    blocks, table = dict(_blocks(there)), new[_TABLE].clone()
    for name, (first, size) in _blocks(here):
        if name in blocks:
            at, length = blocks[name]
            rows = old[_TABLE][at:at + length]
            if size == length:
                table[first:first + size] = rows
            elif name == "class":  # row 0 stands for none
                table[first] = rows[0]
                table[first + 1:first + size] = _of_classes(rows[1:], size - 1)
            else:
                table[first:first + size] = _of_classes(rows if length else old[_TABLE][START:START + 1], size)
    found[_TABLE] = table
    if _SKIPPED in found and there.classes != here.classes:  # positions, no class, each class, what follows
        rows, first = old[_SKIPPED], there.subpixels + 1
        classes = rows[first:first + there.classes] if there.classes else rows[first - 1:first]
        found[_SKIPPED] = torch.cat([rows[:first], _of_classes(classes, here.classes), rows[first + there.classes:]])
    return found


def _of_classes(rows: Tensor, count: int) -> Tensor:
    """Rows of so many classes: the given ones, then their mean."""
    return torch.cat([rows[:count], rows.mean(0).expand(max(0, count - len(rows)), -1)])


def inverted(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Weights that give 255 - v the probability that these give v: for ink on paper instead of light on dark.

    Exact: values are looked up in the other order, means change their sign, and of a patch's sub-pixels, v / 255 where
    known, the weights do: 1 - v / 255 is what is known less that. They are for the config that `negative` gives.
    """
    if config.first_marginal:
        raise ValueError("only models without first marginal can be inverted")
    table, found = weights[_TABLE].clone(), dict(weights)
    for name, (first, _) in _blocks(config):
        if name == "values" or name.startswith(("neighbour", "following")):
            table[first:first + 256] = table[first:first + 256].flip(0)
    means = slice(config.mixtures, config.mixtures * (1 + config.token_size))
    heads = ("head", "background.head") if config.background is not None else ("head",)
    for name in (f"{head}.{part}" for head in heads for part in ("weight", "bias")):
        found[name] = weights[name].clone()
        found[name][means] *= -1
    if config.patch:
        values, known = weights[_PATCHES].chunk(2, 1)
        found[_PATCHES] = torch.cat([-values, known + values], 1)
    return found | {_TABLE: table}


def negative(config: ModelConfig) -> ModelConfig:
    """Of a model that draws what another draws, 255 - v for v."""
    return config if config.background is None else dataclasses.replace(config, background=255 - config.background)


def _blocks(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """The names of the table's blocks, in order, with first row and number of rows."""
    sizes = {"position": config.length, "row": config.height, "column": config.width, "channel": config.channels,
             "class": config.classes + 1}
    named = [("values", START + 1), ("starts", config.classes),
             *((name, sizes[name]) for name in config.look_ups if name != "previous"),
             *((f"neighbour {each}", OUTSIDE + 1) for each in config.neighbours),
             *((f"following {each}", FOLLOWING_OUTSIDE + 1) for each in config.following)]
    first = 0
    for name, size in named:
        yield name, (first, size)
        first += size


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
