"""Avatars: 16 x 16 pictures of faces in pixel art, made from the parts of DiceBear's Pixel Art.

    npm install @dicebear/pixel-art
    python -m linpix.training.avatars node_modules/@dicebear/pixel-art OUT

The design is under CC0 1.0, as the package's LICENSE says, which is copied to OUT. A face has one
of five classes: it wears a hat, glasses or a beard, or none of them, with short or long hair. One
pair in ten of a hair style and clothes is never in the training pictures; the test pictures are of
such pairs. The same package and seed give the same files.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree  # nosec B405: of a package that its user has chosen

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor

SIDE = 16
CLASSES = ("beard", "glasses", "hat", "long hair", "short hair")
ORDER = ("accessories", "clothing", "eyes", "glasses", "beard", "mouth", "hair", "hat")
EARRINGS = 0.1  # share of the faces that have them

_COLOUR = re.compile(r"\$\{escape\.xml\(`\$\{colors\.(\w+)\}`\)\}")
_PART = re.compile(r"(\w+): \(components, colors\) => `(.*?)`")
_CHOICES = re.compile(r"(\w+)Color: \{.*?default: \[(.*?)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Layer:
    """Pixels that are painted with one colour."""

    mask: NDArray[np.bool_]  # (16, 16)
    fill: str  # #rgb, #rrggbb, or what has a colour of its own, such as hair
    opacity: float


@dataclass(frozen=True, slots=True)
class Style:
    """The parts of the package."""

    head: list[Layer]
    parts: dict[str, dict[str, list[Layer]]]  # by kind and name
    colours: dict[str, list[str]]  # that a kind may have, rrggbb


def filled(path: str, *, evenodd: bool = False) -> NDArray[np.bool_]:
    """The pixels inside an SVG path of horizontal and vertical lines between whole pixels."""
    turns = np.zeros((SIDE, SIDE + 1), np.int64)  # how often the path goes round each pixel
    x = y = begin_x = begin_y = 0
    for command, text in re.findall("([MmHhVvZz])([^A-Za-z]*)", path):
        numbers = [int(number) for number in re.findall("-?[0-9]+", text)]
        before = y
        if command.islower():  # relative to where the path is
            from_x, from_y = x, y
        else:
            from_x, from_y = 0, 0
        if command in "Zz":
            x, y = begin_x, begin_y
        elif command in "Mm":
            x, y = from_x + numbers[0], from_y + numbers[1]
            before, begin_x, begin_y = y, x, y
        elif command in "Hh":
            x = from_x + numbers[0]
        else:
            y = from_y + numbers[0]
        turns[min(before, y) : max(before, y), x:] += 1 if y > before else -1
    inside = turns[:, :SIDE]
    if evenodd:
        inside = inside % 2
    return np.asarray(inside != 0)


def layers(svg: str) -> list[Layer]:
    """The layers of a fragment of SVG.

    A mask, which beards have, counts as a shape that is there or not. Taken by its luminance, as
    it is drawn by the package, it makes dark beards invisible.
    """
    return list(_layers(ElementTree.fromstring(f"<svg>{svg}</svg>"), {}))  # nosec B314


def _layers(element: ElementTree.Element, inherited: dict[str, str]) -> Iterator[Layer]:
    shape: NDArray[np.bool_] | None = None
    for child in element:
        style = inherited | child.attrib
        if child.tag == "mask":
            shape = np.any([layer.mask for layer in _layers(child, {})], 0)
        elif child.tag == "path":
            mask = filled(style["d"], evenodd=style.get("fill-rule") == "evenodd")
            yield Layer(mask, style["fill"], float(style.get("fill-opacity", 1)))
        else:
            for layer in _layers(child, style):
                mask = layer.mask if shape is None else layer.mask & shape
                yield Layer(mask, layer.fill, layer.opacity)


def read(package: Path) -> Style:
    """The style in the folder of the package. Raises ValueError if it is not the expected one."""
    if "CC0 1.0" not in (package / "LICENSE").read_text():
        raise ValueError(f"the LICENSE of {package} does not say CC0 1.0; expected the pixel-art")

    def source(name: str) -> str:
        return _COLOUR.sub(r"\1", (package / "lib" / f"{name}.js").read_text())

    head = re.search(r"body: `(.*?)\$", source("index"))
    parts, colours = {}, {}
    for kind in ORDER:
        found = _PART.findall(source(f"components/{kind}"))
        parts[kind] = {name: layers(svg) for name, svg in found}
    for kind, choices in _CHOICES.findall(source("schema")):
        colours[kind] = re.findall("'([0-9a-fA-F]{6})'", choices)
    if head is None or not all(parts.values()) or not {"skin", "hair", "hat"} <= colours.keys():
        raise ValueError(f"{package} has other parts than expected; give @dicebear/pixel-art 9")
    return Style(layers(head[1]), parts, colours)


def painted(style: Style, chosen: dict[str, str], colours: dict[str, str]) -> NDArray[np.uint8]:
    """A face, (16, 16, 4), whose pixels are opaque or transparent. chosen: a part of each kind ·
    colours: rrggbb of each kind.
    """
    found = np.zeros((SIDE, SIDE, 4))  # colours are multiplied by alpha
    drawn = [style.head, *(style.parts[kind][chosen[kind]] for kind in ORDER if kind in chosen)]
    for layer in chain(*drawn):
        colour = ImageColor.getrgb("#" + colours.get(layer.fill, layer.fill.removeprefix("#")))
        found[layer.mask] *= 1 - layer.opacity
        found[layer.mask] += layer.opacity * np.array([*colour, 255])
    there = found[..., 3:] >= 128
    shown = np.where(there, found * 255 / np.maximum(found[..., 3:], 1), 0)
    return np.round(shown).astype(np.uint8)


def faces(style: Style, seed: int, *, held_out: bool) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Classes and pictures without end, the classes in turn; their pairs of hair and clothes are
    held out, or not.
    """
    generator = np.random.default_rng((seed, held_out))
    pairs = [*product(style.parts["hair"], style.parts["clothing"])]
    unseen = np.random.default_rng(seed).random(len(pairs)) < 0.1
    allowed = [pair for pair, out in zip(pairs, unseen, strict=True) if out == held_out]

    def one_of(choices: Iterable[Any]) -> Any:
        found = [*choices]
        return found[generator.integers(len(found))]

    while True:
        for label in CLASSES:
            hair, dress = one_of(pair for pair in allowed if fits(label, pair[0]))
            chosen = {"hair": hair, "clothing": dress}
            kinds = ["eyes", "mouth"] + [label] * (label in ORDER)
            for kind in kinds:
                chosen[kind] = one_of(style.parts[kind])
            if generator.random() < EARRINGS:
                chosen["accessories"] = one_of(style.parts["accessories"])
            colours = {kind: one_of(choices) for kind, choices in style.colours.items()}
            yield label, painted(style, chosen, colours)


def fits(label: str, hair: str) -> bool:
    """Whether a face of this class may have this hair: a beard comes with short hair."""
    wanted = {"beard": "short", "short hair": "short", "long hair": "long"}.get(label, "")
    return hair.startswith(wanted)


def write(
    package: Path, out: Path, *, train: int = 60_000, test: int = 3_000, seed: int = 0
) -> None:
    """Write the data set: PNG files in a folder per split and class, with the package's licence.
    Raises ValueError.
    """
    style = read(package)
    for split, count in (("train", train), ("test", test)):
        for label in CLASSES:
            (out / split / label).mkdir(parents=True)
        pictures = faces(style, seed, held_out=split == "test")
        for index in range(count):
            label, picture = next(pictures)
            Image.fromarray(picture).save(out / split / label / f"{index:06}.png")
    shutil.copyfile(package / "LICENSE", out / "LICENSE")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a data set of faces in pixel art.")
    parser.add_argument("package", type=Path, help="folder of the npm package @dicebear/pixel-art")
    parser.add_argument("out", type=Path, help="new folder for the data set")
    given = parser.parse_args()
    try:
        write(given.package, given.out)
    except (ValueError, OSError) as error:
        sys.exit(f"avatars: {error}")
