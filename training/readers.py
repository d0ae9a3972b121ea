"""Readers of file formats: IDX, CIFAR-10's records, pictures, tar archives; each plain, gzip or xz
by its first bytes.

Names may be wrong and downloads may break, so every reader checks its input. Its error says in one
line which file is wrong, why, and what to do. Nothing is extracted to disk, and pipes and devices
are refused. folders.py sorts pictures into splits and classes; datasets.py knows which data a
folder holds.
"""

import gzip
import io
import lzma
import math
import os
import struct
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from linpix.model.orientation import TURNS, orientation

Split = Literal["train", "test"]
Shape = tuple[int, int, int]  # height, width, channels
Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]

CIFAR10_RECORD = 1 + 3 * 32 * 32

# some of Pillow's other formats run programs
PICTURE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")

warnings.filterwarnings("ignore", module=r"PIL\.")  # an odd picture is read, or raises DataError

_COMPRESSED: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"\xfd7zXZ\0": lzma.open,
}
_FETCH_AGAIN = "delete it and download it again"
_PAGE_STARTS = (b"<!doctype", b"<html", b"<head", b"<?xml")


class DataError(ValueError):
    """Data that cannot be used. The message names the file or folder, the problem and the
    remedy.
    """

    def __init__(self, where: object, problem: str, remedy: str) -> None:
        self.problem = problem
        super().__init__(f"{where} {problem}: {remedy}")


class Unreadable(DataError):
    """A picture that Pillow cannot read, which costs only this picture."""


def check_shape(where: Path, what: str, theirs: Shape, wanted: Shape) -> None:
    """Raise DataError if a data set has pictures of another shape than a model."""
    if theirs != wanted:
        data, model = (" x ".join(map(str, sizes)) for sizes in (theirs, wanted))
        raise DataError(
            where,
            f"holds {what} {data} (height x width x channels), but the model is for {model}",
            "give data of the model's shape, or a model of the data's shape",
        )


def written(name: str) -> str:
    """A name in which each byte that is not UTF-8 is written as in \\xe9, so that files and answers
    can have it.
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def contents(path: Path) -> bytes:
    """The whole content of a file, decompressed."""
    with _open(path) as file, _decompressed(file, path) as stream:
        return stream.read()


def unpack(raw: bytes, name: object) -> bytes:
    """Like contents, for bytes already read. name is for messages, here and in all readers
    below.
    """
    with _decompressed(io.BytesIO(raw), name) as stream:
        return stream.read()


def tar_members(
    path: Path, wanted: Callable[[str], bool], others: dict[str, str] | None = None
) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of the wanted regular files in a tar archive, in its order, each read when it
    is asked for.

    Links, devices, sparse files, absolute names and names with '..' are skipped, and added to
    others with the reason.
    """
    try:
        with _open(path) as file, _decompressed(file, path) as stream:
            yield from _members(stream, wanted, others)
    except DataError:
        raise
    except Exception as error:  # tarfile raises many types for unexpected headers
        raise DataError(
            path,
            f"is not a tar archive, or is damaged ({error})",
            "give a folder, or a tar archive (plain, gzip or xz), or " + _FETCH_AGAIN,
        ) from error


def _members(
    stream: Any, wanted: Callable[[str], bool], others: dict[str, str] | None
) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for member in archive:
            if member.size < 0:  # tarfile would read the same headers for ever
                raise tarfile.ReadError(f"{member.name} has a negative size")
            name = PurePosixPath(member.name)
            plain = member.isreg() and not member.issparse()  # a sparse file may claim any size
            if not plain or name.is_absolute() or ".." in name.parts:
                if others is not None and not member.isdir():
                    others[str(name)] = "not a plain file below the archive's top"
            elif wanted(str(name)):
                body = archive.extractfile(member)
                assert body is not None
                raw = body.read()
                if len(raw) < member.size:
                    raise tarfile.ReadError(f"{name} is truncated")
                yield str(name), raw
        # tarfile takes an unreadable header, except the first, for the end
        stream.seek(archive.offset)
        if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError(f"the header at byte {archive.offset:,} is damaged")


def read_idx(raw: bytes, name: object, dimensions: int) -> Pixels:
    """The array in an IDX file of unsigned bytes: images (count, height, width) for 3 dimensions,
    labels for 1.
    """
    noun = "images" if dimensions == 3 else "labels"
    magic = bytes((0, 0, 8, dimensions))
    if raw[:4] != magic:
        raise DataError(
            name,
            f"begins with {raw[:4].hex(' ') or 'nothing'}, expected {magic.hex(' ')} (IDX, {noun})",
            "check that the file is what its name says, else " + _FETCH_AGAIN,
        )
    start = 4 + 4 * dimensions
    if len(raw) < start:
        raise DataError(
            name, f"is truncated: expected a header of {start} bytes, got {len(raw)}", _FETCH_AGAIN
        )
    shape = struct.unpack(f">{dimensions}I", raw[4:start])
    expected, got = math.prod(shape), len(raw) - start
    if not expected:
        raise DataError(name, f"has no data: its header gives the shape {shape}", _FETCH_AGAIN)
    if got < expected:
        raise DataError(
            name,
            f"is truncated: expected {shape[0]:,} {noun} according to its header, got "
            f"{got // math.prod(shape[1:]):,}",
            _FETCH_AGAIN,
        )
    if got > expected:
        raise DataError(
            name,
            f"has {got - expected:,} bytes too many: expected {shape[0]:,} {noun} according to its "
            "header, and nothing after them",
            _FETCH_AGAIN,
        )
    # torch needs a writable array
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()


def read_cifar10(raw: bytes, name: object) -> tuple[Pixels, Labels]:
    """Images (count, 3072), converted from planes to r, g, b, r, g, b, ..., and labels (count,)."""
    if not raw or len(raw) % CIFAR10_RECORD:
        raise DataError(
            name,
            f"has {len(raw):,} bytes, expected a multiple of {CIFAR10_RECORD:,} "
            "(CIFAR-10's binary version)",
            _FETCH_AGAIN,
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, CIFAR10_RECORD)
    labels = records[:, 0].astype(np.int64)
    wrong = np.flatnonzero(labels > 9)
    if wrong.size:
        raise DataError(
            name,
            f"gives image {wrong[0]:,} the label {labels[wrong[0]]}, expected 0..9",
            _FETCH_AGAIN,
        )
    return (
        records[:, 1:].reshape(-1, 3, 32 * 32).transpose(0, 2, 1).reshape(-1, 3 * 32 * 32),
        labels,
    )


def read_picture(raw: bytes, name: object, shape: Shape) -> Pixels:
    """The sub-pixels (T,) of one picture, turned upright, which must have exactly the height and
    width in shape.
    """
    height, width, channels = shape
    with opened(io.BytesIO(raw), name) as image:
        # in the header: a huge picture is never decoded
        fits = image.size in ((width, height), (height, width))
        turned = upright(image) if fits else image
        if turned.size != (width, height):
            raise DataError(
                name,
                f"is {turned.width} x {turned.height} (width x height), expected "
                f"{width} x {height} as the model",
                f"resize it first, as in: magick IN -auto-orient -resize '{width}x{height}!' OUT; "
                "if --preset auto converted it, it is in FOLDER.training/pictures",
            )
        if image.mode.startswith(("I", "F")):  # Pillow would clip, not scale
            raise DataError(
                name, f"has more than 8 bits a sample (mode {image.mode})", "save it with 8"
            )
        if getattr(image, "is_animated", False):
            raise DataError(
                name, "is animated or has several pages", "save each as a picture of its own"
            )
        alpha = turned.convert("RGBA").getchannel("A") if image.has_transparency_data else None
        if channels < 4 and alpha and alpha.getextrema() != (255, 255):
            raise DataError(  # hidden colours are arbitrary
                name,
                "is partly transparent",
                "put it on a background first, as in: magick IN -background white -flatten OUT",
            )
        mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
        return np.array(turned.convert(mode)).reshape(-1)


@contextmanager
def opened(source: Path | IO[bytes], name: object) -> Iterator[Image.Image]:
    """A picture. Whatever goes wrong with it in the block becomes Unreadable, but a DataError."""
    try:
        with Image.open(source, formats=PICTURE_FORMATS) as image:
            yield image
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise many types on broken files
        known = not isinstance(error, UnidentifiedImageError)
        reason = " ".join(str(error).split()) if known else "its format is not recognised"
        raise Unreadable(
            name, f"is not a readable picture ({reason})", "remove or replace it"
        ) from error


def upright(image: Image.Image) -> Image.Image:
    """The picture as its EXIF data says that it is held, by the same reading as an upload's; as it
    lies where these data are damaged.
    """
    image.load()  # a PNG may have its EXIF data at the end; a TIFF is turned by Pillow
    turn = TURNS.get(orientation(image.info.get("exif", b"")))
    return image.transpose(Image.Transpose[turn]) if turn else image


def _open(path: Path) -> IO[bytes]:
    try:
        if path.exists() and not path.is_file():
            raise DataError(path, "is not a regular file", "give a file, or a folder of files")
        return path.open("rb")
    except OSError as error:
        if path.is_symlink() and not path.exists():
            raise DataError(
                path,
                f"is a link to {os.readlink(path)}, where no file is",
                "remove the link, or bring back what it links to",
            ) from None
        raise DataError(
            path, f"cannot be read ({error.strerror})", "check the path and its permissions"
        ) from None


@contextmanager
def _decompressed(file: IO[bytes], name: object) -> Iterator[IO[bytes]]:
    """A stream of the file's content, decompressed. Every error in reading it becomes a
    DataError.
    """
    try:
        stream: Any = file
        head = file.read(512)
        file.seek(0)
        _refuse_what_is_no_data(head, name)
        for magic, decompress in _COMPRESSED.items():
            if head.startswith(magic):
                stream = decompress(file)
                _refuse_what_is_no_data(stream.peek(512), name)
        yield stream
    except EOFError:
        raise DataError(
            name, "is truncated: it ends in the middle of its compressed data", _FETCH_AGAIN
        ) from None
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise DataError(name, f"is damaged or truncated ({error})", _FETCH_AGAIN) from error
    except MemoryError:  # a header may ask for any amount
        raise DataError(
            name,
            "is damaged, or needs more memory to unpack than this machine has",
            f"{_FETCH_AGAIN}, or unpack it yourself",
        ) from None
    except OSError as error:
        raise DataError(
            name,
            f"cannot be read ({error.strerror or error})",
            "check the path and its permissions",
        ) from error


def _refuse_what_is_no_data(head: bytes, name: object) -> None:
    """Raise DataError if a file is empty, or begins like a pointer or a web page that stands in for
    data.
    """
    if not head:
        raise DataError(name, "is empty, expected data", _FETCH_AGAIN)
    if head.startswith((b"PK\x03\x04", b"7z\xbc\xaf", b"Rar!")):
        raise DataError(
            name, "is a ZIP, 7z or RAR archive, which is not read", "unpack it, and give the folder"
        )
    if head.startswith(b"version https://git-lfs"):
        raise DataError(name, "is a Git LFS pointer, not the data", "run git lfs pull")
    if head.startswith(b"/annex/objects/"):
        raise DataError(name, "is a git-annex pointer, not the data", "run git annex get")
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(_PAGE_STARTS):
        raise DataError(
            name,
            "is an HTML or XML page, such as servers send with an error, not the data",
            _FETCH_AGAIN,
        )
