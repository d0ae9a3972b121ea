"""What sample and complete write: a folder with a PNG for each image, a grid of images, or an
animation of it.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from linpix.model.config import ModelConfig
from linpix.model.palette import pictures_of
from linpix.server.engine.image import Image as Drawn
from linpix.server.pictures import animation, encode
from linpix.server.pictures.overlay import Overlay

Kind = Literal["PNG", "GIF", "WEBP"]
_KINDS: dict[str, Kind] = {".png": "PNG", ".gif": "GIF", ".webp": "WEBP"}


def kind_of(out: str) -> Kind | None:
    """What --out names: one file of that kind, or a folder."""
    return None if out.endswith("/") else _KINDS.get(Path(out).suffix.lower())


def check_output(out: str) -> Kind | None:
    """The kind of --out; a folder is made. Raises ValueError before the work, not after it, if it
    cannot be written.
    """
    path, kind = Path(out), kind_of(out)
    possible = "NAME.png for a grid, NAME.gif or NAME.webp for an animation of it"
    if kind:
        if path.is_dir() or not path.parent.is_dir():
            wrong = "is a folder" if path.is_dir() else "its folder does not exist"
            raise ValueError(
                f"--out {out}: {wrong}; give a new folder for one PNG per image, or {possible} in"
                " an existing folder"
            )
        Image.init()
        if kind not in Image.SAVE_ALL:
            raise ValueError(
                f"--out {out}: this Pillow was built without {kind}; give NAME.gif, or install"
                " another Pillow"
            )
    elif path.is_file() or out in ("", "-"):  # "-" often means standard output
        wrong = "a file" if path.is_file() else "not a path"
        raise ValueError(
            f"--out {out!r} is {wrong}; give a folder for one PNG per image, or {possible}"
        )
    elif path.suffix[1:2].isalpha() and not path.is_dir() and not out.endswith("/"):
        raise ValueError(
            f"--out {out}: the format {path.suffix} is not supported; give {possible}, or a folder,"
            f" {out}/, for one PNG per image"
        )
    else:
        path.mkdir(parents=True, exist_ok=True)
    return kind


def scale_of(
    kind: Kind | None, count: int, config: ModelConfig, wanted: int | Literal["auto"] | None
) -> int:
    """By which factor to enlarge the images of --out. wanted: --scale."""
    given = None if wanted == "auto" else wanted
    if kind in ("GIF", "WEBP"):
        return animation.enlargement(count, config, given)
    # a grid is probably looked at, if a terminal is used
    if wanted == "auto" or (kind == "PNG" and wanted is None and sys.stdout.isatty()):
        together = count if kind else 1
        width, _ = animation.sheet_size(together, config)
        return max(1, animation.WIDEST // width)
    return given or 1


@dataclass(frozen=True, slots=True)
class Output:
    path: str
    kind: Kind | None  # of one file; None: a folder
    scale: int
    config: ModelConfig
    overlay: Overlay | None = None  # in which a completion is laid back

    def file(self, place: int, seed: int) -> str:
        """The file of one image: all are in one, unless the output is a folder."""
        return self.path if self.kind else str(Path(self.path) / f"{place:05}-{seed}.png")

    def write_one(self, place: int, image: Drawn) -> None:
        """Write an image that is done into the folder."""
        assert image.canvas is not None
        if self.overlay is None:
            png = encode.png(image.canvas, self.config, self.scale)
        else:
            png = self.overlay.encoded(pictures_of(image.canvas, self.config))
        _write(self.file(place, image.job.seed + image.index), png)

    def write_all(
        self,
        images: NDArray[np.uint8],
        moments: Iterable[NDArray[np.intp]],
        known: NDArray[np.bool_] | None,
    ) -> None:
        """Write a grid of images, or an animation of it.

        moments: finished image rows of each image, one array a frame · known: (T,) of a picture
                 that was completed.
        """
        if self.kind == "GIF" or self.kind == "WEBP":
            frames = [
                animation.grid(images, self.config, rows=rows, known=known) for rows in moments
            ]
            content = animation.animate(frames, self.kind, self.scale)
        elif len(images) == 1:  # without a frame: to be completed or scored
            content = encode.png(images[0], self.config, self.scale)
        else:
            sheet = animation.grid(images, self.config)
            sheet = sheet.repeat(self.scale, 0).repeat(self.scale, 1)
            content = encode.encoded(sheet.reshape(*sheet.shape[:2], -1))
        _write(self.path, content)


def _write(file: str, content: bytes) -> None:
    temporary = Path(file + ".new")
    temporary.write_bytes(content)
    temporary.replace(file)
