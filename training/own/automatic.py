"""Preset, minutes and a head start, chosen by looking at somebody's pictures; and the pictures made one size."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from linpix.model.config import PRESETS

GREY, COLOUR = "mnist-conditional", "cifar10-conditional"
PLAIN = {GREY: "mnist-small", COLOUR: "cifar10-small"}  # instead, with options that these do not have
_LOOKED_AT = 64            # pictures, to tell whether they are in colour
_COLOURED = 12             # mean distance between channels, of 255, from which a picture counts as coloured
_SHORT, _LONG = 5.0, 45.0  # minutes: for 300 pictures, and for 10,000 and more


@dataclass(frozen=True, slots=True)
class Plan:
    preset: str
    minutes: float
    pictures: int
    left_out: list[str]  # files that are no pictures, or not whole

    def __str__(self) -> str:
        size = f"{PRESETS[self.preset].width} x {PRESETS[self.preset].height}"
        colours = "colour" if PRESETS[self.preset].channels == 3 else "grey"
        out = f"; left out: {', '.join(self.left_out[:5])}" + (", ..." if len(self.left_out) > 5 else "") \
            if self.left_out else ""
        return (f"{self.pictures:,} pictures, made {size} in {colours}: preset {self.preset}, {self.minutes:.0f} "
                f"minutes{out}")


def plan(pictures: Path, target: Path, *, plain: bool = False) -> Plan:
    """Choose for a folder of pictures of any size, and write them into `target` at the preset's size.

    plain: whether to choose a preset that takes all options. Sub-folders, which are classes, stay. Raises ValueError
    if there are fewer than ten pictures.
    """
    if not pictures.is_dir():
        raise ValueError(f"{pictures} is not a folder; give the one with your pictures, in sub-folders by class")
    files = sorted(path for path in pictures.rglob("*") if path.is_file() and not path.name.startswith("."))
    read = {path: picture for path in files if (picture := _picture(path)) is not None}
    if len(read) < 10:
        raise ValueError(f"{pictures} holds {len(read)} pictures that can be read; ten are the least, and some "
                         "hundred a class are better")
    some = list(read)[::max(1, len(read) // _LOOKED_AT)]
    coloured = np.mean([_is_coloured(read[path]) for path in some]) > 0.5
    preset = COLOUR if coloured else GREY
    preset = PLAIN[preset] if plain else preset
    config = PRESETS[preset]
    shutil.rmtree(target, ignore_errors=True)
    for path, picture in read.items():
        place = target / path.relative_to(pictures).with_name(path.name + ".png")
        place.parent.mkdir(parents=True, exist_ok=True)
        fitted = ImageOps.fit(picture.convert("RGB" if coloured else "L"), (config.width, config.height))
        fitted.save(place)
    minutes = min(_LONG, max(_SHORT, _SHORT * (len(read) / 300) ** 0.63))
    return Plan(preset, round(minutes), len(read), [path.name for path in files if path not in read])


def _picture(path: Path) -> Image.Image | None:
    """On white where it is transparent, upright, and no larger than is needed; None for what is no whole picture."""
    try:
        with Image.open(path) as picture:
            picture.draft(None, (256, 256))
            if picture.mode.startswith(("I", "F")):  # more than 8 bits would be clipped
                return None
            upright = ImageOps.exif_transpose(picture).convert("RGBA")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    upright.thumbnail((256, 256))
    whole = Image.new("RGBA", upright.size, "white")
    whole.alpha_composite(upright)
    return whole.convert("RGB")


def _is_coloured(picture: Image.Image) -> bool:
    values = np.asarray(picture).astype(np.int64)
    return bool((values.max(-1) - values.min(-1)).mean() > _COLOURED)
