"""Any folder of data is read, or refused by name; no file outside it is written."""

import gzip
import io
import lzma
import shutil
import struct
import tarfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from linpix.training.folders import read_pictures
from linpix.training.readers import (
    CIFAR10_RECORD,
    DataError,
    contents,
    read_cifar10,
    read_idx,
    tar_members,
)
from tests.fuzz.harness import Target, lay, member
from tests.fuzz.pictures import encode, pictures

SHAPE = (8, 8, 1)
WHERE = r".*/fuzzed(/\S*)? "
KINDS = {
    "IDX": (
        WHERE + r"(begins with .*, expected 00 00 08 0[13]|is truncated: expected|has no data: its"
        r" header|"
        r"has [\d,]+ bytes too many).*"
    ),
    "CIFAR-10": (
        WHERE + r"(has [\d,]+ bytes, expected a multiple of|gives image [\d,]+ the label).*"
    ),
    "damaged": (
        WHERE + r"(is damaged or truncated|is truncated: it ends in|is empty, expected data).*"
    ),
    "memory": WHERE + r"is damaged, or needs more memory to unpack.*",
    "archive": WHERE + r"is not a tar archive, or is damaged \(.*\): give a folder.*",
    "no file": (
        WHERE
        + r"(is not a regular file|is a link to .*, where no file is|cannot be read \(.*\)): .*"
    ),
    "not data": WHERE + r"is (a Git LFS pointer|an HTML or XML page).*",
    "picture": (
        WHERE
        + r"(is not a readable picture \(.*\)|is \d+ x \d+ \(width x height\)|has more than 8 bits|"
        r"is animated or has|is partly transparent).*"
    ),
    "folder": (
        WHERE + r"(has no pictures \(|has pictures next to|has no pictures for|has train/ and).*"
    ),
}
NAMES = [
    "a.png",
    "train/cat/a.png",
    "test/dog/b.jpg",
    "../a.png",
    "/etc/a.png",
    "x/../../a.png",
    "a.png/",
    "\udcff.png",
    "-" * 300 + ".png",
    "./train/./a.png",
    "C:\\a.png",
    "a\n.png",
    "test_batch.bin",
    "",
]
TYPES = [tarfile.REGTYPE] * 5 + [
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.FIFOTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.GNUTYPE_SPARSE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.CONTTYPE,
    b"V",
    b"\xff",
]
PAX = [
    b"",
    b"20 size=-1\n",
    b"9 path=..\n",
    b"x",
    b"30 GNU.sparse.map=1,a,2,3,4,5\n",
    b"9" * 5000 + b" a=b\n",
]


BLACK = encode(np.zeros((8, 8), np.uint8))


@dataclass(frozen=True)
class File:
    how: str  # idx, labels, cifar10, contents, tar, folder
    raw: bytes
    instead: str = ""  # of a file: folder, pipe, endless, itself, nothing
    name: str = "a.png"  # in a folder


@st.composite
def tars(draw: st.DrawFn) -> bytes:
    """Archives whose headers lie: about names, kinds, sizes, sparse maps; some cut short or changed
    in a byte.
    """
    out = io.BytesIO()
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3, 3, 3, 2000]))):
        kind = draw(st.sampled_from(TYPES))
        body = draw(
            st.sampled_from(PAX)
            if kind in (tarfile.XHDTYPE, tarfile.XGLTYPE)
            else st.one_of(st.binary(max_size=20), st.sampled_from([bytes(512), BLACK]))
        )
        out.write(
            member(
                draw(
                    st.sampled_from(
                        [len(body)] * 8 + [-1, -512, -1024, 0, 1, 8**11 - 1, 2**62, 2**70]
                    )
                ),
                kind,
                draw(st.sampled_from(NAMES)),
            )
        )
        out.write(body + bytes(-len(body) % 512))
        if out.tell() > 10_000:  # many members are many of the same
            out.write(out.getvalue() * draw(st.sampled_from([0, 0, 100])))
            break
    raw = bytearray(out.getvalue() + bytes(draw(st.sampled_from([1024, 1024, 512, 0]))))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        if raw:
            raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.integers(0, len(raw)))] if draw(st.integers(0, 7)) == 0 else raw)


@st.composite
def idx(draw: st.DrawFn) -> bytes:
    sizes = st.sampled_from([0, 1, 2, 3, 28, 2**16, 2**31, 2**32 - 1])
    shape = draw(st.lists(sizes, max_size=4))
    count = draw(st.sampled_from([len(shape), len(shape), 0, 1, 3, 255]))
    return (
        bytes([0, 0, draw(st.sampled_from([8, 8, 8, 13])), count])
        + b"".join(struct.pack(">I", size) for size in shape)
        + draw(st.binary(max_size=40))
    )


@st.composite
def cifar10(draw: st.DrawFn) -> bytes:
    records = bytes([draw(st.integers(0, 11))]) + bytes(CIFAR10_RECORD - 1)
    return (records * draw(st.integers(0, 3)))[draw(st.sampled_from([0, 0, 0, 1])) :]


@st.composite
def other_pictures(draw: st.DrawFn) -> bytes:
    """Kinds that no upload may be, and programs that call themselves pictures."""
    frames = [Image.new("L", (8, 8), shade) for shade in (1, 2)]
    kind = draw(st.sampled_from(["GIF", "BMP", "TIFF", "PPM", "EPS", "PCX", "TGA", "ICO"]))
    more: dict[str, Any] = (
        {"save_all": True, "append_images": frames[1:]} if kind in ("GIF", "TIFF") else {}
    )
    data = bytearray(encode(frames[0], kind, **(more if draw(st.booleans()) else {})))
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 3)) == 0 else data)


@st.composite
def packed(draw: st.DrawFn, plain: st.SearchStrategy[bytes]) -> bytes:
    raw = draw(plain)
    how = draw(st.sampled_from(["plain"] * 5 + ["gzip", "gzip", "xz", "xz", "twice"]))
    if how == "plain":
        return raw
    data = bytearray(lzma.compress(raw, preset=0) if how == "xz" else gzip.compress(raw, 1))
    if how == "twice":
        data *= 2
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 5)) == 0 else data)


any_bytes = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [  # pointers, pages, magic numbers
            b"",
            b"version https://git-lfs.github.com/spec/v1\n",
            b"<!DOCTYPE html>",
            b"\x1f\x8b",
            b"\xfd7zXZ\0",
        ]
    ),
)
any_picture = st.one_of(pictures, other_pictures(), any_bytes)
odd = st.sampled_from(["folder", "pipe", "endless", "itself"])
FILES = st.one_of(
    st.builds(File, st.sampled_from(["idx", "labels"]), packed(idx() | any_bytes)),
    st.builds(File, st.just("cifar10"), packed(cifar10() | any_bytes)),
    st.builds(File, st.just("tar"), packed(tars() | any_bytes)),
    st.builds(
        File,
        st.just("folder"),
        packed(any_picture),
        st.just("") | st.just("") | odd,
        st.sampled_from(
            ["a.png", "train/a.png", "train/x/a.gif", "test/x/a.tif", ".png", "train/\udcff.png"]
        ),
    ),
    st.builds(File, st.just("contents"), packed(any_bytes), odd | st.just("nothing")),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Target[File]:
    at = tmp_path_factory.mktemp("fuzz") / "fuzzed"

    def read(file: File) -> None:
        if at.is_dir():
            shutil.rmtree(at)  # of a pipe it would wait for a writer
        else:
            at.unlink(missing_ok=True)
        path = at / file.name if file.how == "folder" else at
        if file.how == "folder":  # another is there that is whole
            for other in ("train/x/b.png", "test/x/c.png"):
                (at / other).parent.mkdir(parents=True, exist_ok=True)
                (at / other).write_bytes(BLACK)
            path.parent.mkdir(parents=True, exist_ok=True)
        if file.instead:
            lay(path, file.instead)
        else:
            path.write_bytes(file.raw)
        match file.how:
            case "idx":
                assert read_idx(contents(path), path, 3).ndim == 3
            case "labels":
                assert read_idx(contents(path), path, 1).ndim == 1
            case "cifar10":
                images, labels = read_cifar10(contents(path), path)
                assert images.shape == (len(labels), 3072)
            case "contents":
                contents(path)
            case "tar":
                for name, _ in tar_members(path, lambda name: True):
                    assert not name.startswith("/") and ".." not in name.split("/")
                read_pictures(path, "train", SHAPE)
            case "folder":
                images, labels, _ = read_pictures(at, "train", SHAPE)
                assert images.shape == (len(labels), 64)
        assert sorted(at.parent.iterdir()) == [at], "something was written beside it"

    return Target("files of data", FILES, read, (DataError,), KINDS, share=10)


@pytest.mark.slow
def test_any_file_of_data_is_read_or_refused_by_its_name(run, files):
    run(files)
