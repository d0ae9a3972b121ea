"""The plan of --preset auto: looks at a user's pictures, chooses preset and minutes, and brings them to one size."""

import itertools
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from linpix.model.config import PRESETS

from ..folders import walk
from ..readers import PICTURE_FORMATS

GREY, COLOUR = "mnist-conditional", "cifar10-conditional"
PLAIN = {GREY: "mnist-small", COLOUR: "cifar10-small"}  # used with options that GREY and COLOUR do not have
_LOOKED_AT = 64            # so many pictures, chosen at random, decide whether all are in colour
_COLOURED = 12             # a picture is coloured if its channels differ by more on average, of 255
_SHORT, _LONG = 5.0, 45.0  # minutes: for up to 300 pictures, and for 10,000 and more


@dataclass(frozen=True, slots=True)
class Plan:
    preset: str
    minutes: float
    pictures: int
    left_out: list[str]  # files that are not pictures, or not complete

    def __str__(self) -> str:
        size = f"{PRESETS[self.preset].width} x {PRESETS[self.preset].height}"
        colours = "colour" if PRESETS[self.preset].channels == 3 else "grey"
        out = f"; left out: {', '.join(self.left_out[:5])}" + (", ..." if len(self.left_out) > 5 else "") \
            if self.left_out else ""
        return (f"{self.pictures:,} pictures, converted to {size} in {colours}: preset {self.preset}, "
                f"{self.minutes:g} minute{'' if self.minutes == 1 else 's'}{out}")


def plan(pictures: Path, target: Path, *, plain: bool = False) -> Plan:
    """Choose for a folder of pictures of any size, and write them into `target` at the preset's size.

    plain: choose a preset that supports all options. Sub-folders, which are classes, are kept. Raises ValueError if
    there are fewer than ten readable pictures.
    """
    if not pictures.is_dir():
        raise ValueError(f"{pictures} is not a folder; give the folder with your pictures, with one sub-folder per "
                         "class if there are classes")
    files = [path for path, _ in walk(pictures) if not path.is_relative_to(target)]
    at_random = (_picture(files[index]) for index in np.random.default_rng(0).permutation(len(files)))
    seen = list(itertools.islice(filter(None, at_random), _LOOKED_AT))
    if len(seen) < 10:
        raise ValueError(f"{pictures} has {len(seen)} readable pictures; at least ten are needed, and some hundred per "
                         "class are better")
    coloured = np.mean([_is_coloured(picture) for picture in seen]) > 0.5
    preset = COLOUR if coloured else GREY
    preset = PLAIN[preset] if plain else preset
    config = PRESETS[preset]
    shutil.rmtree(target, ignore_errors=True)
    left_out = []
    for path in tqdm(files, desc="reading", unit="picture", disable=not sys.stderr.isatty(), leave=False):
        if (picture := _picture(path)) is None:  # one at a time: all of them together may not fit into memory
            left_out.append(path.name)
            continue
        place = target / path.relative_to(pictures).with_name(path.name + ".png")
        place.parent.mkdir(parents=True, exist_ok=True)
        ImageOps.fit(picture.convert("RGB" if coloured else "L"), (config.width, config.height)).save(place)
    count = len(files) - len(left_out)
    minutes = min(_LONG, max(_SHORT, _SHORT * (count / 300) ** 0.63))
    return Plan(preset, round(minutes), count, left_out)


def _picture(path: Path) -> Image.Image | None:
    """Read a picture: upright, on white where transparent, at most 256 pixels wide and high.

    None if it is not a complete picture of 8 bits per sample.
    """
    if not path.is_file():  # a folder, or what would block, such as a pipe
        return None
    try:
        with Image.open(path, formats=PICTURE_FORMATS) as picture:
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
