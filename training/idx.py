"""IDX files of other data than MNIST: Fashion-MNIST's and KMNIST's have its names, EMNIST's begin
with the part.
"""

import logging
import os
import re
import string
from pathlib import Path

import numpy as np

from . import readers
from .readers import DataError, Labels, Pixels, Shape, Split

_log = logging.getLogger(__name__)

HOMES = (".", "raw", "FashionMNIST/raw", "KMNIST/raw", "EMNIST/raw", "gzip")  # where such files lie
_NAME = re.compile(
    r"(?P<data>.*?)-?(?P<split>train|t10k|test)-(?P<kind>images|labels)"
    r"[-.]idx[13]-ubyte(\.gz|\.xz)?"
)
LETTERS = (*string.ascii_uppercase, *string.ascii_lowercase)
_BALANCED = (*string.digits, *string.ascii_uppercase, *"abdefghnqrt")
_CLASSES = {
    "emnist-letters": tuple(string.ascii_uppercase),
    "emnist-balanced": _BALANCED,
    "emnist-bymerge": _BALANCED,
    "emnist-byclass": (*string.digits, *LETTERS),
    "letters": LETTERS,
}
_Files = dict[tuple[Split, str], Path]


def found(home: Path) -> dict[str, _Files]:
    """The IDX files in a folder, by what their names begin with ("" for MNIST's names), split and
    kind.
    """
    sets: dict[str, _Files] = {}
    for path in sorted(home.iterdir()) if home.is_dir() else ():
        # Kaggle unpacks each into a folder of its name
        path = path / path.name if path.is_dir() else path
        name = _NAME.fullmatch(path.name)
        if name and not path.is_dir() and os.path.lexists(path):
            split: Split = "train" if name["split"] == "train" else "test"
            sets.setdefault(name["data"], {}).setdefault((split, name["kind"]), path)
    return sets


def read(home: Path, split: Split, shape: Shape) -> tuple[str, Pixels, Labels, tuple[str, ...]]:
    """Name, images (count, T), labels (count,) and class names of one split. The names of most data
    are numbers.
    """
    sets = found(home)
    if len(sets) > 1:
        raise DataError(
            home,
            f"holds several data sets ({', '.join(name or 'train-images-...' for name in sets)})",
            "put the files of one of them into a folder of its own",
        )
    [(data, files)] = sets.items()
    missing = [kind for kind in ("images", "labels") if (split, kind) not in files]
    if missing:
        raise DataError(
            home,
            f"lacks the {' and '.join(missing)} of the {split} split, and its other files are not "
            "MNIST's",
            "add the missing files from the source of the others",
        )
    images = readers.read_idx(readers.contents(files[split, "images"]), files[split, "images"], 3)
    labels_of = {
        part: readers.read_idx(readers.contents(path), path, 1).astype(np.int64)
        for (part, kind), path in files.items()
        if kind == "labels"
    }
    labels, both = labels_of[split], np.concatenate([*labels_of.values()])
    least, most = int(both.min()), int(both.max())
    readers.check_shape(home, "images of", (images.shape[1], images.shape[2], 1), shape)
    if len(images) != len(labels):
        raise DataError(
            home,
            f"has {len(images):,} images and {len(labels):,} labels in the {split} split",
            "take both files from one source",
        )
    if data.startswith("emnist"):
        images = images.transpose(0, 2, 1)  # EMNIST stores its images column by column
    if data == "emnist-letters" and least > 0:
        labels, most = labels - 1, most - 1  # A is 1
    classes = _CLASSES.get(data, ())
    if most >= len(classes):
        classes = tuple(map(str, range(most + 1)))
    folder = home.resolve()
    name = data or (folder.parent if folder.name in ("raw", "gzip") else folder).name
    name = "images" if name.lower() in ("mnist", "cifar10") else name
    _log.warning(
        "%s: well-formed, but not MNIST as published, so damage cannot be detected; using it"
        " anyway, with the classes %s to %s",
        readers.written(str(files[split, "images"])),
        classes[0],
        classes[-1],
    )
    return (
        readers.written(name),
        np.ascontiguousarray(images).reshape(len(images), -1),
        labels,
        classes,
    )
