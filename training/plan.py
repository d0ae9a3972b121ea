"""What the flags of `linpix train`, a preset, the pictures and a checkpoint amount to. Nothing here
reads a file.
"""

import dataclasses
from argparse import Namespace
from typing import Any

from linpix.model import toml
from linpix.model.attention import kind_of
from linpix.model.checkpoint import Checkpoint
from linpix.model.config import PRESETS, ModelConfig

from . import flags
from .automatic import COLOUR, GREY, PALETTE
from .datasets import Dataset
from .init import negative
from .run import TrainConfig

SHORT_WARMUP = 1_000  # images, for --preset auto, whose runs are short


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a training begins with."""

    model: ModelConfig
    changes: dict[str, Any]  # fields of TrainConfig that are not its defaults, or the resumed run's
    invert: bool  # whether the weights of --init are converted to draw in negative


def refuse(*cases: tuple[object, str]) -> None:
    """Raise ValueError with the text of the first case that is so."""
    for is_so, text in cases:
        if is_so:
            raise ValueError(text)


def preset_and_data(given: Namespace) -> tuple[str, str]:
    """PRESET and DIR, from PRESET --data DIR or --preset PRESET DIR."""
    preset, data, chosen = given.preset, given.data, given.chosen
    if given.config and preset in (*PRESETS, "auto"):
        chosen = None  # what the command line says wins over the file
    elif given.config and preset is not None:
        data = None
    if chosen is not None:
        refuse(
            (
                data is not None and preset is not None,
                "with --preset, the other argument is the folder of pictures; leave out --data",
            )
        )
        preset, data = chosen, data or preset
    refuse(
        (
            preset is None or data is None,
            "give an architecture and a folder: linpix train mnist-small --data DIR --out FOLDER,"
            " or linpix train --preset auto DIR --out FOLDER",
        ),
        (
            preset not in (*PRESETS, "auto"),
            f"there is no preset {preset!r}; choose one of auto, {', '.join(sorted(PRESETS))}",
        ),
    )
    return preset, data


def file_of(given: Namespace) -> str:
    """The flags as a file of --config, which begins the same run again in another --out."""
    lines = []
    for name in flags.actions_of("train"):
        value = getattr(given, name)
        if name == "colours":
            value = value or None  # --preset auto says 0 where there is no palette
        if name not in ("config", "out", "resume"):
            lines.append(toml.line(name, value))
    return "".join(lines)


def is_plain(given: Namespace) -> bool:
    """Whether --preset auto must choose a preset that supports all options."""
    found = given.attention, given.feature_map, given.reversible, given.unconditional
    return found != ("linear", "elu+1", False, None)


def filled_in(given: Namespace, chosen: dict[str, Any], shipped: ModelConfig | None) -> Namespace:
    """The flags of --preset auto, with what was chosen for the pictures where they say nothing.

    chosen: preset, minutes and perhaps colours and size · shipped: the architecture of the
    checkpoint of that preset, for a run that begins; None if there is none, or the run is resumed.
    """
    preset = chosen["preset"]
    values: dict[str, Any] = {"minutes": float(chosen["minutes"])}
    if PRESETS[preset].packed:
        values["compile"] = False  # the lengths of its sequences vary
    if not given.resume and preset in (GREY, COLOUR, PALETTE):
        values["warmup_images"] = SHORT_WARMUP
    if shipped is not None:
        if (given.layers or shipped.layers) >= shipped.layers:
            values["init"] = preset  # digits are a better start than noise
        if (given.init or values.get("init")) == preset:
            values["layers"] = shipped.layers
    missing = {name: value for name, value in values.items() if getattr(given, name) is None}
    # plans of older runs have neither
    pictures = {name: chosen.get(name, getattr(given, name)) for name in ("colours", "size")}
    return Namespace(**vars(given) | missing | pictures | {"preset": preset})


def check_options(given: Namespace, preset: ModelConfig) -> None:
    """Raise ValueError if a flag is not an option of the preset or the attention."""
    refuse(
        (
            given.colours and not preset.palette,
            f"--colours {given.colours}: {given.preset} has no palette; leave it out, or give the"
            " preset palette or auto",
        )
    )
    for name in ("feature_map", "lsh_rounds"):
        changed = getattr(given, name) != getattr(preset, name)
        refuse(
            (
                changed and name not in kind_of(given.attention).options,
                f"--{name.replace('_', '-')} is not an option of {given.attention} attention; leave"
                " it out",
            )
        )


def settings_of(
    given: Namespace, preset: ModelConfig, data: Dataset, start: Checkpoint | None
) -> Plan:
    """What a training begins with, or goes on with. Raises ValueError if flags do not fit.

    preset: with the size and the palette of the pictures, if it has one · start: the model of
    --init, for a run that begins.
    """
    head = given.head or preset.head
    if start is not None and given.head is None and preset.channels == 1:
        head = start.net.config.head
    model = dataclasses.replace(
        preset,
        attention=given.attention,
        twin_of=given.twin_of,
        feature_map=given.feature_map,
        lsh_rounds=given.lsh_rounds,
        layers=given.layers or preset.layers,
        head=head,
        classes=len(data.classes),
        look_ups=tuple(name for name in preset.look_ups if data.classes or name != "class"),
    )
    # dark ink on paper; digits are light on dark
    light = not preset.palette and bool(data.images.mean() > 127.5)
    if light:
        model = negative(model)
    if given.reversible:
        model = dataclasses.replace(model, residual="reversible", norm="pre")
    refuse(
        (
            model.class_first and given.unconditional is not None,
            f"--unconditional is not an option of {given.preset}, which draws the class of every"
            " image first; leave it out",
        ),
        (
            given.readings and not model.class_first,
            f"--readings {given.readings}: this model predicts no classes from known pixels; leave"
            " it out, or train mnist-conditional on pictures with classes",
        ),
    )
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    changes = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    if "betas" in changes:
        changes["betas"] = tuple(changes["betas"])
    if model.head == "categorical" and not given.resume and given.fall_from is None:
        changes.setdefault("head_share", 1.0)  # a smaller rate is for means, which oscillate
    return Plan(model, changes, start is not None and _is_negative(start, model, light))


def _is_negative(start: Checkpoint, model: ModelConfig, light: bool) -> bool:
    """Whether a checkpoint draws the negative of what the model draws."""
    ground = start.net.config.background
    if ground is None or model.background is None:
        return light and start.provenance.get("data") == "mnist"
    return ground != model.background
