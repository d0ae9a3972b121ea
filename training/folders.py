"""Folders and tar archives of pictures: which files are pictures, which split and class each has,
and what is left out.

readers.py reads the pictures.
"""

import hashlib
import logging
import math
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path, PurePosixPath

import numpy as np

from .readers import (
    DataError,
    Labels,
    Pixels,
    Shape,
    Split,
    Unreadable,
    contents,
    read_picture,
    tar_members,
    unpack,
    written,
)

_log = logging.getLogger(__name__)

PICTURE_SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".bmp",
    ".gif",
    ".webp",
    ".tif",
    ".tiff",
    ".pgm",
    ".ppm",
    ".jfif",
    ".jpe",
    ".jif",
    ".jfi",
    ".pjpeg",
    ".pjp",
    ".apng",
    ".dib",
    ".pbm",
    ".pnm",
)
LITTER = (
    "__MACOSX",
    "Thumbs.db",
    "ehthumbs.db",
    "desktop.ini",
    "@eaDir",
    "$RECYCLE.BIN",
    "lost+found",
    "Icon\r",
)
# what a training writes in FOLDER.training
_OF_A_RUN = re.compile(r"samples-\d{8}\.png|state\.pt|log\.csv|plan\.json")
_STARTS = re.compile(
    rb"\x89PNG|\xff\xd8\xff|BM|GIF8|RIFF....WEBP|II\*\0|MM\0\*|P[1-6]\s", re.DOTALL
)

# A word in a folder's name that makes it a split; a folder for validation is for testing only if
# there is no other.
_SPLIT = re.compile(
    r"(?<![^\W\d_])(?:(?P<train>train|training)|(?P<test>tests?|testing)|"
    r"(?P<validation>val|valid|validation|dev|eval))"
    r"(?=(?:set|data|images|pictures)?(?![^\W\d_]))",
    re.IGNORECASE,
)
_SHARD = re.compile(r"shard-\d{5,}")
_ARCHIVES = (".zip", ".7z", ".rar", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst")
_ARRAYS = (
    ".csv",
    ".tsv",
    ".npz",
    ".npy",
    ".parquet",
    ".arrow",
    ".feather",
    ".pkl",
    ".pickle",
    ".mat",
    ".h5",
    ".hdf5",
    ".tfrecord",
    ".pt",
    ".json",
    ".jsonl",
    ".bin",
)
# the folders of each picture below the split, and its file name, by its path
_Parts = dict[str, tuple[str, ...]]


def is_litter(name: str) -> bool:
    """Whether a file, or a folder around it, is hidden or made by a file manager."""
    return any(part.startswith(".") or part in LITTER for part in PurePosixPath(name).parts)


def is_picture(name: str) -> bool:
    """Whether a name is that of a picture. A picture without a suffix is recognised by its first
    bytes.
    """
    return PurePosixPath(name).suffix.lower() in PICTURE_SUFFIXES and not is_litter(name)


def holds_files(folder: Path) -> bool:
    """Whether there is anything in a folder but folders, litter, and what keeps an empty folder in
    a repository.
    """
    return any(
        path.is_symlink() or not path.is_dir()
        for path in folder.rglob("*")
        if path.name not in (*LITTER, ".DS_Store", ".gitkeep", ".gitignore", ".keep")
        and not path.name.startswith("._")
        and path.suffix != ".part"
    )


def walk(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[tuple[Path, str]]:
    """The files in a folder, in order, each with the reason why it is not a picture, or "". Links
    are followed.

    Folders that are empty, cannot be read, were written by a training, or link to a folder above
    them are there too. above: the real folders that this one is in.
    """
    try:
        with os.scandir(folder) as entries:
            inside = sorted(Path(entry) for entry in entries if not is_litter(entry.name))
    except OSError as error:
        yield folder, f"cannot be read: {error.strerror}"
        return
    above = (*above, folder.resolve())
    if not inside and len(above) > 1:
        yield folder, "an empty folder"
    for path in inside:
        if not path.is_dir():
            yield path, _reason(path.name, path)
        elif _is_written(path) or _is_written(path.with_name(path.name + ".training")):
            yield path, "written by LinPix"
        elif path.resolve() in above:
            yield path, "a link to a folder above it"
        else:
            yield from walk(path, above)


def _is_written(folder: Path) -> bool:
    """Whether a folder is a checkpoint, or FOLDER.training of a run: its grids of samples are not
    training pictures.
    """
    if not folder.name.endswith(".training"):
        return (folder / "config.json").is_file() and (folder / "SHA256SUMS").is_file()
    with suppress(OSError):  # there is none, or walk says that it cannot be read
        return any(map(_OF_A_RUN.fullmatch, os.listdir(folder)))
    return False


def _files(path: Path) -> Iterator[tuple[str, Path | bytes, str]]:
    """Like walk, for a folder or a tar archive: name, place or content, and the reason to leave it
    out.
    """
    if not path.is_file():
        for file, reason in walk(path):
            yield file.relative_to(path).as_posix(), file, reason
        return
    others: dict[str, str] = {}

    def wanted(name: str) -> bool:
        reason = PurePosixPath(name).suffix and _reason(name, b"")
        if reason:
            others[name] = reason
        return name not in others and not is_litter(name)

    for name, raw in tar_members(path, wanted, others):
        yield name, raw, _reason(name, raw)
    for name, reason in others.items():
        if not is_litter(name):
            yield name, b"", reason


def _reason(name: str, source: Path | bytes) -> str:
    """Why a file is left out, or "" for a picture; a file that has the name of one must be one."""
    suffix = PurePosixPath(name).suffix.lower()
    if suffix in PICTURE_SUFFIXES:
        return ""
    if suffix:
        return "not the suffix of a picture that can be read"
    if isinstance(source, Path):
        if not source.is_file():
            return "a broken link" if source.is_symlink() else "not a regular file"
        try:
            with source.open("rb") as file:
                source = file.read(16)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
    return "" if _STARTS.match(source) else "neither suffix nor content of a picture"


def read_pictures(path: Path, split: Split, shape: Shape) -> tuple[Pixels, Labels, tuple[str, ...]]:
    """One split of a folder or tar archive of pictures: images (count, T), labels (count,), class
    names.

    Pictures are flat, or in one sub-folder per class. Either may be inside folders for the splits.
    The order is that of the paths. A flat collection has labels of -1 and no class names.
    """
    found, left = _found(path)
    out = reasons(left)
    if not found:
        there = f"; it has {out}" if out else ""
        raise DataError(
            path,
            f"has no pictures ({', '.join(PICTURE_SUFFIXES)}), and no files with the names of MNIST"
            " (train-images-idx3-ubyte.gz, ...) or of CIFAR-10's binary version, not the one for"
            f" Python (data_batch_1.bin, ...){there}",
            cure(left),
        )
    if out:
        _warn(path, f"left out {out}")
    class_of, classes = arrange(found, path, split)
    tables = [name for name in chain(*left.values()) if name.lower().endswith((".csv", ".tsv"))]
    if tables and not classes:
        _warn(
            path,
            f"pictures have no classes, since {_listed(tables)} is not read; for classes, move the"
            " pictures into a folder for each",
        )
    images = np.empty((len(class_of), math.prod(shape)), np.uint8)
    labels = np.full(len(class_of), -1)
    count, unreadable = 0, list[DataError]()
    for name, folder in class_of.items():
        source, where = found[name], f"{path}/{name}"
        raw = contents(source) if isinstance(source, Path) else unpack(source, where)
        try:
            images[count] = read_picture(raw, where, shape)
        except Unreadable as error:
            unreadable.append(error)
            continue
        if classes:
            labels[count] = classes.index(folder)
        count += 1
    if not count:
        raise unreadable[0]
    if unreadable:
        more = f", and {len(unreadable) - 1:,} more of such" * (len(unreadable) > 1)
        _log.warning("left out %s%s", written(str(unreadable[0])), more)
    return images[:count], labels[:count], classes


def _found(path: Path) -> tuple[dict[str, Path | bytes], dict[str, list[str]]]:
    """The pictures in a folder or archive, by name; and the names of what is left out, by the
    reason.
    """
    found: dict[str, Path | bytes] = {}
    left: dict[str, list[str]] = {}
    for name, source, reason in _files(path):
        if reason:
            left.setdefault(reason, []).append(name)
        else:
            found[name] = source  # broken links too: reading one raises a clear error
    return found, left


def _warn(where: Path, text: str) -> None:
    _log.warning("%s: %s", written(str(where)), written(text))


def arrange(
    names: Iterable[str], where: Path, split: Split
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The sub-folder of each picture in the split, in order, and the class names (none if all
    pictures are flat).

    Classes are those of both splits, so that a label means the same in each. Without folders for
    the splits, the last tenth in the order of the MD5 of the paths is for testing. This order is
    shuffled but the same on every machine, and a picture added later moves few others to the other
    split.
    """
    inner, splits = _unwrapped({name: _without_shards(PurePosixPath(name).parts) for name in names})
    train, test = _divided(inner, splits, where)
    inner, chosen = train | test, train if split == "train" else test
    if not chosen:
        raise DataError(
            where,
            f"has no pictures for the {split} split, out of {len(inner)} in all",
            "add pictures, or sort them into train/ and test/",
        )
    deeper = sorted({parts[:-1] for parts in inner.values() if len(parts) > 2})
    if len(deeper) > len({folders[0] for folders in deeper}):  # more than one folder in a class
        listed = _listed(["/".join(folders) for folders in deeper])
        _warn(
            where,
            f"all below a folder is one class, so {listed} are not classes; name the folders of"
            " splits train and test",
        )
    flat = sorted(name for name, parts in inner.items() if len(parts) == 1)
    if 0 < len(flat) < len(inner):
        raise DataError(
            where,
            f"has pictures next to sub-folders of pictures ({flat[0]})",
            "put all pictures in sub-folders, one for each class, or none",
        )
    ordered = sorted(chosen, key=lambda name: PurePosixPath(name).parts)
    class_of = {} if flat else {name: _class_name(parts[0], where) for name, parts in inner.items()}
    classes = tuple(sorted(set(class_of.values()), key=_numbers_by_value))
    return {name: class_of.get(name, "") for name in ordered}, classes


def _unwrapped(inner: _Parts) -> tuple[_Parts, dict[Split, str]]:
    """The pictures without folders around all of them, and the folders of the splits, if there are
    any.
    """
    splits = _splits(inner)
    while splits.keys() == {"train"} or (not splits and _are_in_one(inner)):
        inner = {name: parts[1:] for name, parts in inner.items()}
        splits = _splits(inner)
    return inner, splits


def _are_in_one(inner: _Parts) -> bool:
    """Whether one folder has all pictures, in folders."""
    outer = {parts[0] for parts in inner.values()}
    return len(outer) == 1 and min(map(len, inner.values())) > 2


def _divided(inner: _Parts, splits: dict[Split, str], where: Path) -> tuple[_Parts, _Parts]:
    """The pictures for training and for testing."""
    if splits:
        others = sorted({parts[0] for parts in inner.values()} - set(splits.values()))
        if others:
            _warn(where, f"left out {_listed(others)}, beside {' and '.join(splits.values())}")
        test = _below(splits["test"], inner)
        if "train" not in splits:
            return {}, test
        train = _below(splits["train"], inner)
        if _alike(train, test):
            unseen = sorted(_classes(test) - _classes(train))
            if unseen:
                _warn(where, f"has no pictures in {splits['train']} for {_listed(unseen)}")
            return train, test
        _warn(where, f"left out {splits['test']}, which has no class of {splits['train']}")
        inner = train
    ordered = sorted(inner, key=lambda name: _digest("/".join(inner[name])))
    tenth = set(ordered[-max(1, len(ordered) // 10) :])
    train = {name: parts for name, parts in inner.items() if name not in tenth}
    return train, {name: inner[name] for name in tenth}


def _digest(path: str) -> bytes:
    return hashlib.md5(path.encode("utf-8", "surrogateescape"), usedforsecurity=False).digest()


def _splits(inner: _Parts) -> dict[Split, str]:
    """The folders of the splits: two whose letters differ only in the word for the split, or one of
    that word alone.

    So train/ and test/ are splits, as are seg_train/ and seg_test/, but a class may be called
    train. A folder for testing without the classes of train/, as competitions have it, is chosen
    only if no other fits.
    """
    folders = sorted({parts[0] for parts in inner.values() if len(parts) > 1})
    alike: dict[str, dict[str, str]] = {}  # by the rest of the name
    for folder in folders:
        spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", folder)  # as in TrainSet
        if word := _SPLIT.search(spaced):
            rest = re.sub(r"[\W\d_]+", "", spaced[: word.start()] + spaced[word.end() :]).casefold()
            alike.setdefault(rest, {}).setdefault(str(word.lastgroup), folder)
    for kinds in alike.values():
        if "train" in kinds and len(kinds) > 1:
            train = kinds["train"]
            tests = [kinds[kind] for kind in ("test", "validation") if kind in kinds]
            fit = (test for test in tests if _alike(_below(train, inner), _below(test, inner)))
            return {"train": train, "test": next(fit, tests[0])}
    if len(folders) == 1 and len(inner) == sum(len(parts) > 1 for parts in inner.values()):
        for kind, folder in alike.get("", {}).items():
            if kind == "train":
                return {"train": folder}
            return {"test": folder}
    return {}


def _without_shards(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a path without folders that `linpix sample --shards` made, which are not
    classes.
    """
    *folders, file = parts
    return (*(folder for folder in folders if not _SHARD.fullmatch(folder)), file)


def _classes(pictures: _Parts) -> set[str]:
    """The folders of the classes of a split."""
    return {unicodedata.normalize("NFC", parts[0]) for parts in pictures.values() if len(parts) > 1}


def _alike(train: _Parts, test: _Parts) -> bool:
    """Whether two splits have a class in common, or neither has classes: pictures of others can
    test nothing.
    """
    return bool(_classes(train) & _classes(test)) or not (_classes(train) or _classes(test))


def _below(folder: str, inner: _Parts) -> _Parts:
    """The pictures in a folder; one that has only a folder of its own name, as in train/train/, is
    that folder.
    """
    found = {name: parts[1:] for name, parts in inner.items() if parts[0] == folder}
    while all(parts[0] == folder and len(parts) > 1 for parts in found.values()):
        found = {name: parts[1:] for name, parts in found.items()}
    return found


def reasons(left: dict[str, list[str]]) -> str:
    """What is left out, for a message. left: names, by the reason."""
    return "; ".join(f"{_listed(names)} ({reason})" for reason, names in left.items())


def cure(left: dict[str, list[str]]) -> str:
    """What to do with a folder that has only such files, and no pictures."""
    names = [*chain(*left.values())]
    suffixes = {PurePosixPath(name).suffix.lower() for name in names}
    if suffixes.intersection(_ARRAYS):  # as Kaggle and Hugging Face have them
        return (
            "save each picture in it as a PNG file, in a folder for its class, such as 7/0001.png;"
            " in Python, PIL.Image.fromarray(pixels.reshape(28, 28).astype('uint8')).save(path)"
            " saves one"
        )
    if suffixes.intersection(_ARCHIVES) and not any("ubyte" in name for name in names):
        return "unpack the archive, and give the folder with its pictures"
    return "give the folder that holds such files or pictures itself"


def _listed(names: list[str]) -> str:
    """At most five names for a message, from as many folders as there are."""
    folders = {name.rpartition("/")[0]: name for name in reversed(names)}
    first = sorted(names, key=lambda name: folders[name.rpartition("/")[0]] != name)[:5]
    return ", ".join(first) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def _class_name(folder: str, where: Path) -> str:
    """The name of a class folder, in NFC: macOS writes an accent as a character of its own."""
    try:
        # a locale that is not UTF-8, such as C, has let each byte in as a character
        name = folder.encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        raise DataError(
            where,
            f"has a class folder whose name is not UTF-8 ({written(folder)})",
            "rename the folder",
        ) from None
    return unicodedata.normalize("NFC", name)


def _numbers_by_value(name: str) -> tuple[str, str]:
    return name.zfill(20) if name.isdecimal() else name, name  # class 10 comes after class 9
