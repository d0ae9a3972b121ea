"""Data sets: finds out which one a folder holds, checks that it is intact, and downloads it if it
is missing.

    load(Path("data"), "train", PRESETS["mnist"])

MNIST and CIFAR-10 are recognised by their file names and checked by MD5; idx.py reads other data in
MNIST's format, such as Fashion-MNIST. Anything else is a folder or tar archive of pictures, which
folders.py reads. readers.py reads the file formats.
"""

import hashlib
import http.client
import logging
import os
import shutil
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
from tqdm import tqdm

from linpix.model.config import ModelConfig
from linpix.model.palette import nearest

from . import folders, idx, readers
from .readers import DataError, Labels, Pixels, Shape, Split

_log = logging.getLogger(__name__)

# Base addresses, tried in order. LINPIX_MIRRORS replaces them, for both data sets.
MIRRORS = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/,"
        "https://storage.googleapis.com/cvdf-datasets/mnist/,"
        "http://yann.lecun.com/exdb/mnist/"
    ),
    "cifar10": "https://www.cs.toronto.edu/~kriz/",
}

# MD5 of uncompressed contents: some mirrors compressed the files again.
MNIST_SUMS = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
# For the original, only the sum of the archive is published. The sums of the batches are those of a
# lossless copy, rebuilt from PNG, whose records are in another order.
CIFAR10_ARCHIVE = "cifar-10-binary.tar"
CIFAR10_ARCHIVE_SUM = "c32a1d4ab5d03f1284b67883e8d87530"  # of the .tar.gz, compressed
CIFAR10_SUMS = {
    "data_batch_1.bin": "7a963363d451b70544b2bba8072434c4",
    "data_batch_2.bin": "bf4e8d95d4456847adaaa7763892658b",
    "data_batch_3.bin": "1b4382757d2be9677200e1254ffdb2ae",
    "data_batch_4.bin": "e4a39b853549a7d26999317ffc672dc8",
    "data_batch_5.bin": "3ea1a1e616c513dea170f9d708e13ac7",
    "test_batch.bin": "6ef7baec61baf5337c78bcd4253ca287",
}

_COMPRESSIONS = ("", ".gz", ".xz")  # possible endings of a name; the first bytes decide the format
_TIMEOUT_S = 30.0  # longest time without data from a mirror
_Arrays = tuple[Pixels, Labels]


@dataclass(frozen=True, slots=True)
class Dataset:
    """One split. Images are in raster order, the channels of a pixel side by side: r, g, b, r, g,
    b, ...
    """

    name: str  # mnist, cifar10, or the folder's name
    images: Pixels  # (count, T)
    # (count,); -1 if unlabelled, which makes START + 1 + label unconditional
    labels: Labels
    classes: tuple[str, ...]  # names, by label; () if unlabelled

    def part(self, where: slice) -> "Dataset":
        """Some of the images, with their labels."""
        return replace(self, images=self.images[where], labels=self.labels[where])


def load(folder: Path, split: Split, config: ModelConfig) -> Dataset:
    """Read the data in folder, which must have the model's shape. If folder is missing or empty,
    download it. For a model with a palette, pixels get its nearest colours.

    folder may be a tar archive, or the parent of mnist/ or cifar10/. Only MNIST and CIFAR-10 can be
    downloaded; the model's shape chooses between them. Raises DataError.
    """
    shape = (config.height, config.width, 4 if config.palette else config.channels)
    known, home = _recognise(folder, shape)
    if known is None:
        images, labels, classes = folders.read_pictures(home, split, shape)
        if config.palette:
            images = nearest(images.reshape(-1, 4), config).reshape(len(images), -1)
            # a part of them, such as the last ones, then has pictures of every class
            order = np.random.default_rng(0).permutation(len(images))
            images, labels = images[order], labels[order]
        name = home.resolve().name.partition(".tar")[0]
        return Dataset(readers.written(name), images, labels, classes)
    if known is _MNIST and not _is_mnist(home, split):
        return Dataset(*idx.read(home, split, shape))
    readers.check_shape(home, known.title + ",", known.shape, shape)
    images, labels = known.read(home, split)
    return Dataset(known.name, images, labels, known.classes)


def load_existing(folder: str, split: Split, config: ModelConfig) -> Dataset:
    """The images in a folder, which must exist: a misspelt folder is not created and filled by a
    download. Raises ValueError.
    """
    if not Path(folder).exists():
        raise ValueError(
            f"--data {folder} does not exist; check the path, or create an empty folder, and MNIST"
            " or CIFAR-10 will be downloaded into it"
        )
    return load(Path(folder), split, config)


def check_classes(data: Dataset, names: tuple[str, ...], model: str) -> None:
    """Raise DataError if as many classes as a model has have other names: a label is a place in the
    order of these.
    """
    if len(data.classes) == len(names) and data.classes != names:
        ours = ", ".join(name for name in names if name not in data.classes)
        theirs = ", ".join(name for name in data.classes if name not in names)
        same = "the same in another order"
        raise DataError(
            data.name,
            f"has the classes {theirs or same}, where {model} has {ours or same}",
            "give the data that the model was trained on, or give the folders the names of its"
            " classes",
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """A data set that is recognised by the names of its files."""

    name: str
    title: str
    shape: Shape
    classes: tuple[str, ...]
    homes: tuple[str, ...]  # where its files may be, relative to the folder that was given
    stems: tuple[str, ...]  # names of its files without compression endings; one is enough
    read: Callable[[Path, Split], _Arrays]


def _recognise(folder: Path, shape: Shape) -> tuple[_Known | None, Path]:
    """The data set in folder, or the one to download into it, and its place; None stands for
    pictures.
    """
    if folder.is_file():
        members = readers.tar_members(
            folder, lambda name: _is_batch(name) or folders.is_picture(name)
        )
        name, _ = next(members, ("", b""))
        return (_CIFAR10 if _is_batch(name) else None), folder
    # if both are here, take the one that fits
    for known in sorted(_KNOWN, key=lambda known: known.shape != shape):
        for home in known.homes:
            if any(_find(folder / home, stem) for stem in known.stems):
                return known, folder / home
    for home in idx.HOMES:
        if idx.found(folder / home):
            return _MNIST, folder / home
    if folders.holds_files(folder):
        return None, folder
    for known in _KNOWN:
        if known.shape == shape and ".tar" not in folder.suffixes:
            inside = folder / known.name
            return known, inside if inside.is_dir() else folder
    problem = "is empty, expected data" if folder.exists() else "does not exist"
    raise DataError(
        folder,
        problem,
        "check the path (only MNIST and CIFAR-10 can be downloaded, into a folder, for a model "
        "of 28 x 28 x 1 or 32 x 32 x 3)",
    )


def _is_mnist(home: Path, split: Split) -> bool:
    """Whether files with MNIST's names are MNIST's: one file of images decides, as other data may
    have its labels.
    """
    files = idx.found(home)
    there = sorted(files.get("", {}).items(), key=lambda item: item[0][0] != split)
    images = [path for (_, kind), path in there if kind == "images"] or [path for _, path in there]
    return not files or any(_md5(readers.contents(path)) in MNIST_SUMS.values() for path in images)


def _read_mnist(home: Path, split: Split) -> _Arrays:
    beginning = "train" if split == "train" else "t10k"

    def read(kind: str, dimensions: int) -> Pixels:
        stem = f"{beginning}-{kind}-idx{dimensions}-ubyte"

        def check(file: Path, name: object) -> None:
            _check_sum(readers.unpack(file.read_bytes(), name), name, MNIST_SUMS[stem])

        path = _find(home, stem) or _find(home, stem.replace("-idx", ".idx"))
        path = path or _fetch(f"{stem}.gz", home, "mnist", check)
        raw = readers.contents(path)
        # before the sum: the error "truncated" says more
        array = readers.read_idx(raw, path, dimensions)
        _check_sum(raw, path, MNIST_SUMS[stem])
        return array

    images, labels = read("images", 3), read("labels", 1).astype(np.int64)
    return images.reshape(len(images), -1), labels


def _read_cifar10(home: Path, split: Split) -> _Arrays:
    def check(file: Path, name: object) -> None:
        _check_sum(file.read_bytes(), name, CIFAR10_ARCHIVE_SUM)

    beginning = "data" if split == "train" else "test"
    stems = [stem for stem in CIFAR10_SUMS if stem.startswith(beginning)]
    there = {stem: _find(home, stem) for stem in CIFAR10_SUMS}
    where = {stem: path for stem, path in there.items() if path and stem in stems}
    archive = home if home.is_file() else _find(home, CIFAR10_ARCHIVE)
    if not archive and not any(there.values()):
        archive = _fetch(f"{CIFAR10_ARCHIVE}.gz", home, "cifar10", check)
    original = False
    if archive and len(where) < len(stems):
        members = readers.tar_members(archive, lambda name: PurePosixPath(name).name in stems)
        batches = {PurePosixPath(name).name: raw for name, raw in members}
        where = {stem: archive / stem for stem in batches}
        original = _md5(archive.read_bytes()) == CIFAR10_ARCHIVE_SUM
    else:
        batches = {stem: readers.contents(path) for stem, path in where.items()}
    missing = [stem for stem in stems if stem not in batches]
    if missing:
        raise DataError(
            archive or home,
            f"lacks {', '.join(missing)}, which the {split} split needs",
            "add the missing files from the source of the others, or give an empty folder to"
            " download everything",
        )
    images, labels = [], []
    for stem in stems:
        of_batch = readers.read_cifar10(batches[stem], where[stem])
        images.append(of_batch[0])
        labels.append(of_batch[1])
        got = _md5(batches[stem])
        if not original and got != CIFAR10_SUMS[stem]:
            _log.warning(
                "%s has well-formed records, but an unknown MD5, %s, so damage cannot be detected;"
                " using it anyway",
                readers.written(str(where[stem])),
                got,
            )
    return np.concatenate(images), np.concatenate(labels)


_MNIST = _Known(
    "mnist",
    "MNIST",
    (28, 28, 1),
    tuple("0123456789"),
    (".", "mnist", "MNIST/raw"),
    (*MNIST_SUMS, *(stem.replace("-idx", ".idx") for stem in MNIST_SUMS)),
    _read_mnist,
)
_CIFAR10 = _Known(
    "cifar10",
    "CIFAR-10",
    (32, 32, 3),
    ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    (".", "cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"),
    (*CIFAR10_SUMS, CIFAR10_ARCHIVE),
    _read_cifar10,
)
_KNOWN = (_MNIST, _CIFAR10)


def _find(home: Path, stem: str) -> Path | None:
    """The file of that name, compressed or not; it may be in a folder of its own name, as Kaggle
    unpacks it.

    A broken link is found too: reading it raises a clear error.
    """
    for end in _COMPRESSIONS:
        path = home / (stem + end)
        if path.is_dir():
            path = path / path.name
        if os.path.lexists(path):
            return path
    return None


def _is_batch(name: str) -> bool:
    return PurePosixPath(name).name in CIFAR10_SUMS


def _md5(raw: bytes) -> str:
    return hashlib.md5(raw, usedforsecurity=False).hexdigest()


def _check_sum(raw: bytes, name: object, expected: str) -> None:
    got = _md5(raw)
    if got != expected:
        raise DataError(
            name,
            f"differs from the published file: expected MD5 {expected}, got {got}",
            "delete the file to download it again",
        )


def _fetch(name: str, home: Path, known: str, check: Callable[[Path, object], None]) -> Path:
    """Download a file of a known data set into home from the first mirror whose copy passes
    check(file, address) without DataError.

    The file appears under its name only when it is complete.
    """
    partial = home / f".{name}.{os.getpid()}.part"
    try:
        home.mkdir(parents=True, exist_ok=True)
        partial.touch()
    except OSError as error:
        raise DataError(
            home,
            f"lacks {name} and cannot be written to ({error.strerror})",
            "put the file there by hand, or give a folder that can be written to",
        ) from None
    causes = []
    mirrors = os.environ.get("LINPIX_MIRRORS") or MIRRORS[known]
    try:
        for base in filter(None, map(str.strip, mirrors.split(","))):
            url = f"{base.rstrip('/')}/{name}"
            try:
                _download(url, partial)
                check(partial, url)
            except DataError as error:
                causes.append(f"{url} {error.problem}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                text = " ".join(str(error).split()) or type(error).__name__
                causes.append(f"{url} failed ({text})")
            else:
                for cause in causes:  # if all mirrors fail, the error lists the causes instead
                    print(cause, file=sys.stderr)
                partial.replace(home / name)
                return home / name
    finally:
        partial.unlink(missing_ok=True)
    raise DataError(
        home,
        f"lacks {name}, and no mirror gave it ({'; '.join(causes) or 'no mirror is set'})",
        f"put {name} there by hand, or list other mirrors in LINPIX_MIRRORS",
    )


def _download(url: str, target: Path) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "linpix"})
    with (
        urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer,  # nosec B310
        target.open("wb") as file,
    ):
        size = int(answer.headers.get("Content-Length") or 0)
        print(f"downloading {url} to {target.parent} ({size / 1e6:.1f} MB)", file=sys.stderr)
        with tqdm.wrapattr(answer, "read", size, desc=target.name, disable=None) as reading:
            shutil.copyfileobj(reading, file)
        done = file.tell()
    if size and done != size:
        raise DataError(url, f"ended after {done:,} of {size:,} bytes", "try later")
