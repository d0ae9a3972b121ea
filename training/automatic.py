"""--preset auto: looks at a user's pictures, chooses preset and minutes, and brings
them to one size.
"""

import hashlib
import io
import math
import os
import shutil
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from linpix.model.config import PRESETS, ModelConfig
from linpix.model.pieces import VISIBLE

from .files import writing
from .folders import arrange, cure, reasons, walk
from .palette import COLOURS, SIDES, STEP, fitted, has_few_colours, is_coloured, size_of
from .readers import Unreadable, opened, upright, written

GREY, COLOUR, PALETTE = "mnist-conditional", "cifar10-conditional", "palette"
# used with options that GREY and COLOUR do not have
PLAIN = {GREY: "mnist-small", COLOUR: "cifar10-small"}
_LOOKED_AT = 64  # so many pictures, chosen at random, decide whether all are in colour
_WHITE = 250  # a picture of lighter pixels alone would look empty on white
_LONGEST_NAME = 255  # bytes, on most file systems
_EVEN = 0.9  # share of the pixels of two sides that are near their median where there is a ground
_SQUARE = 1.25  # pictures are square if one side is at most so much longer
_SHORT, _LONG = 5.0, 45.0  # minutes: for up to 300 pictures, and for 10,000 and more


@dataclass(frozen=True, slots=True)
class Choice:
    preset: str
    minutes: float
    pictures: int
    left_out: dict[str, list[str]]  # files, by the reason
    size: tuple[int, int]  # width and height
    colours: int  # most of a palette; 0: it has none
    cut: int  # pictures whose ends were cut off

    def __str__(self) -> str:
        size = f"{self.size[0]} x {self.size[1]}"
        colours = "colour" if PRESETS[self.preset].channels == 3 else "grey"
        if self.colours:
            colours = f"a palette of up to {self.colours} colours"
        text = (
            f"{self.pictures:,} pictures, converted to {size} in {colours}: preset {self.preset}, "
            f"{self.minutes:g} minute{'s' * (self.minutes != 1)}"
        )
        if self.cut:
            text += (
                f"; {self.cut:,} of them are cut at both ends of their longer side, since they have"
                " another shape and no even ground that could be extended"
            )
        if self.left_out:
            text += f"; left out: {written(reasons(self.left_out))}"
        return text


def choose(
    pictures: Path,
    target: Path,
    *,
    plain: bool = False,
    colours: int | None = None,
    size: tuple[int, int] | None = None,
) -> Choice:
    """Choose for a folder of pictures of any size, and write them into `target` at one size.

    plain: choose a preset that supports all options · colours: most of a palette, which is then
    chosen in any case; None: it is where most pictures have few colours · size: width and height;
    None: see _size_for. Sub-folders, which are classes, are kept.
    Raises ValueError if there are fewer than ten readable pictures, or they cannot be sorted into
    classes: the copies are not the place to sort them.
    """
    if not pictures.is_dir():
        raise ValueError(
            f"{pictures} is not a folder; give the folder with your pictures, with one sub-folder"
            " per class if there are classes"
        )
    files = [(path, reason) for path, reason in walk(pictures) if not path.is_relative_to(target)]
    seen = _looked_at(files, pictures)
    named = [path.relative_to(pictures).as_posix() for path, reason in files if not reason]
    if named:
        arrange(named, pictures, "train")
    few = np.mean([has_few_colours(picture) for picture in seen]) > 0.5
    on_white = [_laid_on(picture, "white") for picture in seen]
    coloured = np.mean([is_coloured(np.asarray(picture)) for picture in on_white]) > 0.5
    preset = COLOUR if coloured else GREY
    preset = PLAIN[preset] if plain else preset
    if colours or (few and not plain):
        preset, size = PALETTE, size or size_of(seen)
    size = size or _size_for(seen, PRESETS[preset])
    # perhaps white ink on nothing
    empty = np.mean([np.asarray(picture).min() >= _WHITE for picture in on_white])
    ground = "black" if empty > 0.5 else "white"
    mode = "RGB" if coloured else "L"
    left_out: dict[str, list[str]] = {}
    cut = 0
    shutil.rmtree(target, ignore_errors=True)
    for path, reason in tqdm(files, "reading", unit="picture", disable=None, leave=False):
        # one at a time: all of them together may not fit into memory
        picture = _picture(path, reason)
        if isinstance(picture, str):
            left_out.setdefault(picture, []).append(path.relative_to(pictures).as_posix())
            continue
        if preset == PALETTE:
            copy = fitted(picture, size)
        else:
            opaque = _laid_on(picture, ground).convert(mode)
            extended = _extended(opaque, size)
            cut += extended is None
            copy = ImageOps.fit(extended or opaque, size)
        place = target / path.relative_to(pictures).with_name(_name_of_copy(path.name))
        try:
            _write(copy, place)
        except OSError:
            shutil.rmtree(target, ignore_errors=True)  # a full disk has room again
            raise
    count = len(files) - sum(map(len, left_out.values()))
    minutes = min(_LONG, max(_SHORT, _SHORT * (count / 300) ** 0.63))
    most = (colours or COLOURS) if preset == PALETTE else 0
    return Choice(preset, round(minutes), count, left_out, size, most, cut)


def _size_for(seen: list[Image.Image], preset: ModelConfig) -> tuple[int, int]:
    """The width and height for pictures: the preset's if they are nearly square. Else their own if
    they have one and it is small, or some of their shape with about as many pixels as the preset.
    """
    sizes = np.array([picture.size for picture in seen])
    shape = float(np.median(sizes[:, 0] / sizes[:, 1]))
    if 1 / _SQUARE <= shape <= _SQUARE:
        return preset.width, preset.height
    area, (least, most) = preset.width * preset.height, SIDES
    width, height = sizes[0].tolist()
    small = least <= min(width, height) and max(width, height) <= most
    if small and width * height <= 2 * area and (sizes == sizes[0]).all():
        return width, height
    sides = range(least, most + 1, STEP)
    fitting: list[tuple[int, int]] = [
        each for each in product(sides, sides) if 0.75 * area <= each[0] * each[1] <= area
    ]
    return min(fitting, key=lambda each: abs(math.log(each[0] / each[1] / shape)))


def _looked_at(files: list[tuple[Path, str]], folder: Path) -> list[Image.Image]:
    """_LOOKED_AT readable pictures, chosen at random, or all there are. Raises ValueError if these
    are fewer than ten.
    """
    seen: list[Image.Image] = []
    left_out: dict[str, list[str]] = {}
    for index in np.random.default_rng(0).permutation(len(files)):
        path, reason = files[index]
        found = _picture(path, reason)
        if isinstance(found, str):
            left_out.setdefault(found, []).append(path.relative_to(folder).as_posix())
        else:
            seen.append(found)
        if len(seen) == _LOOKED_AT:
            break
    if len(seen) < 10:
        out = f"; left out: {written(reasons(left_out))}" if left_out else ""
        wanted = "add pictures" if seen else cure(left_out)
        raise ValueError(
            f"{folder} has {len(seen)} readable pictures, and at least ten are needed, better"
            f" some hundred per class{out}; {wanted}"
        )
    return seen


def _write(picture: Image.Image, place: Path) -> None:
    content = io.BytesIO()  # not the file: Pillow's own errors for a full disk name no cure
    picture.save(content, "PNG")
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.getvalue())


def _name_of_copy(name: str) -> str:
    """It keeps the suffix, since 1.jpg may be beside 1.gif; a name that would be too long for a
    file system is replaced.
    """
    raw = os.fsencode(name)
    if len(raw) > _LONGEST_NAME - 4:
        return hashlib.sha256(raw).hexdigest() + ".png"
    return name + ".png"


def _picture(path: Path, reason: str) -> Image.Image | str:
    """Read a picture: upright, with alpha, at most 256 pixels wide and high.

    Or why it is not a complete picture of 8 bits per sample. reason: what walk says of its name.
    """
    if not path.is_file():  # a folder, or what would block, such as a pipe
        return reason or "not a regular file"
    try:
        with opened(path, path) as picture:
            picture.draft(None, (256, 256))
            if picture.mode.startswith(("I", "F")):  # they would be clipped
                return "more than 8 bits a sample"
            turned = upright(picture).convert("RGBA")
    except Unreadable:
        return reason or "not a complete picture, or a huge one"
    turned.thumbnail((256, 256))
    return turned


def _laid_on(picture: Image.Image, ground: str) -> Image.Image:
    whole = Image.new("RGBA", picture.size, ground)
    whole.alpha_composite(picture)
    return whole.convert("RGB")


def _extended(picture: Image.Image, size: tuple[int, int]) -> Image.Image | None:
    """A picture of the same shape as one of this size (width, height), with more ground at both
    sides where there is too little. None if these sides are not even, so that it must be cut.
    """
    width = max(picture.width, round(picture.height * size[0] / size[1]))
    height = max(picture.height, round(picture.width * size[1] / size[0]))
    if (width, height) == picture.size:
        return picture
    values = np.asarray(picture)
    sides = values[:, [0, -1]] if width > picture.width else values[[0, -1]]
    colours = sides.reshape(-1, len(picture.getbands())).astype(np.int64)
    ground = np.median(colours, axis=0).astype(np.int64)
    near = np.abs(colours - ground).max(axis=1) < VISIBLE
    if near.mean() < _EVEN:
        return None
    extended = Image.new(picture.mode, (width, height), tuple(ground.tolist()))
    extended.paste(picture, ((width - picture.width) // 2, (height - picture.height) // 2))
    return extended
