"""Data formats, and the errors for files that are not what they should be."""

import gzip
import io
import lzma
import os
import re
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from linpix.training.automatic import choose
from linpix.training.folders import read_pictures
from linpix.training.readers import (
    CIFAR10_RECORD,
    DataError,
    contents,
    read_cifar10,
    read_idx,
    read_picture,
    tar_members,
    unpack,
)
from tests.fuzz.harness import member
from tests.fuzz.pictures import encode

PACK = {"plain": bytes, "gzip": gzip.compress, "xz": lzma.compress}
GREY, COLOUR = (4, 4, 1), (4, 4, 3)


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """The block raises a DataError of one line that holds all the words."""
    with pytest.raises(DataError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def idx(array: np.ndarray) -> bytes:
    return (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def png(value: int | tuple[int, ...] = 0, size: tuple[int, int] = (4, 4), mode: str = "L") -> bytes:
    return encode(Image.new(mode, size, value))


def tar(path: Path, files: dict[str, bytes], mode: str = "") -> Path:
    """An archive of these files."""
    with tarfile.open(path, f"w:{mode}") as archive:
        for name, raw in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return path


def fill(folder: Path, *names: str) -> Path:
    """A folder of grey pictures, the n-th of which has the value n everywhere."""
    for value, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(value))
    return folder


def paths(count: int, *folders: Sequence[str], suffix: str = ".png") -> list[str]:
    """Names of so many pictures in each folder: `paths(2, ("train", "test"), "ab")`."""
    places = ["/".join(parts) for parts in product(*folders)]
    return [f"{place}/{number}{suffix}" for place, number in product(places, range(count))]


def values(folder: Path, split: str) -> list[int]:
    return [int(image[0]) for image in read_pictures(folder, split, GREY)[0]]


# Compression, and files that are something else


@pytest.mark.parametrize("pack", PACK.values(), ids=PACK)
def test_compression_is_recognised_by_the_first_bytes_and_not_by_the_name(pack, tmp_path):
    for name in ("data", "data.gz", "data.xz"):
        (tmp_path / name).write_bytes(pack(b"the contents"))
        assert contents(tmp_path / name) == b"the contents"


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress], ids=["gzip", "xz"])
def test_a_compressed_file_that_ends_early_is_called_truncated(pack, tmp_path):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(pack(np.random.default_rng(0).bytes(5000))[:-200])
    with refused(str(path), "is truncated", "download it again"):
        contents(path)


def test_a_damaged_compressed_file_is_called_damaged():
    packed = bytearray(gzip.compress(b"some text " * 100))
    packed[-8] ^= 1  # its check sum
    with refused("data.gz", "damaged"):
        unpack(bytes(packed), "data.gz")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            ["data.gz is a Git LFS pointer, not the data: run git lfs pull"],
        ),
        (b"\n <!DOCTYPE html><html>404", ["data.gz", "HTML", "download it again"]),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", ["data.gz", "XML"]),
        (gzip.compress(b"<html>404"), ["data.gz", "HTML"]),
        (b"", ["data.gz", "empty"]),
        (
            b"PK\x03\x04rest",
            [
                "data.gz is a ZIP, 7z or RAR archive, which is not read: unpack it, and give the"
                " folder"
            ],
        ),
    ],
    ids=["lfs", "html", "xml", "html in gzip", "empty", "zip"],
)
def test_what_stands_where_data_should_is_named_for_what_it_is(raw, words):
    with refused(*words):
        unpack(raw, "data.gz")


def test_a_picture_that_is_a_broken_link_is_named_as_one(tmp_path):
    fill(tmp_path, *paths(10, "a"))
    (tmp_path / "a/x.png").symlink_to("gone.png")
    with refused("a/x.png is a link to gone.png, where no file is: remove the link"):
        read_pictures(tmp_path, "train", GREY)


@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
def test_a_file_that_is_not_regular_is_refused_without_waiting(what, tmp_path):
    path = tmp_path / "a.png"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with refused(str(path), "is not a regular file"):
        contents(path)


# IDX and CIFAR-10

WHOLE = idx(np.zeros((3, 2, 2), np.uint8))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (WHOLE[:-1], ["truncated", "expected 3 images", "got 2"]),
        (WHOLE + b"more", ["4 bytes too many", "3 images"]),
        (WHOLE[:10], ["truncated", "header of 16 bytes", "got 10"]),
        (idx(np.zeros(3, np.uint8)), ["begins with 00 00 08 01", "expected 00 00 08 03"]),
        (idx(np.zeros((0, 2, 2), np.uint8)), ["has no data"]),
        (b"", ["begins with nothing"]),
    ],
    ids=["fewer", "trailing bytes", "half a header", "labels for images", "no images", "empty"],
)
def test_an_idx_file_that_breaks_its_promise_is_refused(raw, words):
    with refused("train-images", *words):
        read_idx(raw, "train-images", 3)


def record(label: int, red: int, green: int, blue: int) -> bytes:
    return bytes([label]) + b"".join(bytes([value]) * 1024 for value in (red, green, blue))


def test_the_colour_planes_of_cifar10_become_neighbouring_sub_pixels():
    first = np.arange(3072) % 251
    raw = bytes([9]) + bytes(first.tolist()) + record(0, 1, 2, 3)
    images, labels = read_cifar10(raw, "batch")
    np.testing.assert_array_equal(images[0].reshape(1024, 3), first.reshape(3, 1024).T)
    assert images[1, :6].tolist() == [1, 2, 3, 1, 2, 3]
    assert labels.tolist() == [9, 0]
    assert (images.dtype, labels.dtype) == (np.uint8, np.int64)


def test_a_cifar10_file_of_broken_records_is_refused():
    with refused("batch", "6,145 bytes", "a multiple of 3,073"):
        read_cifar10(bytes(2 * CIFAR10_RECORD - 1), "batch")


def test_a_cifar10_label_out_of_range_is_refused():
    with refused("batch", "image 1", "label 10", "expected 0..9"):
        read_cifar10(record(3, 0, 0, 0) + record(10, 0, 0, 0), "batch")


# Pictures


def test_a_picture_keeps_its_sub_pixels_in_raster_order():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    np.testing.assert_array_equal(read_picture(encode(pixels), "a.png", COLOUR), pixels.reshape(-1))
    grey = np.array(Image.fromarray(pixels).convert("L")).reshape(-1)
    np.testing.assert_array_equal(read_picture(encode(pixels), "a.png", GREY), grey)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (png(size=(5, 4)), ["is 5 x 4", "expected 4 x 4", "resize it first"]),
        (png()[:40], ["not a readable picture"]),
        (b"not a picture", ["not a readable picture", "format is not recognised"]),
        (png(300, mode="I;16"), ["more than 8 bits"]),
        (png((1, 2, 3, 200), mode="RGBA"), ["partly transparent", "background"]),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n",
            ["format is not recognised"],
        ),
    ],
    ids=["other size", "truncated", "text", "16 bits", "transparent", "a program"],
)
def test_a_picture_that_cannot_be_used_as_it_is_is_refused(raw, words):
    with refused("a.png", *words):
        read_picture(raw, "a.png", GREY)


def test_a_picture_that_pillow_cannot_read_costs_only_that_picture(tmp_path, caplog):
    fill(tmp_path, *paths(4, ["train"], "ab"), "test/a/1.png", "test/b/1.png")
    for name in ("train/a/0.png", "train/b/2.png"):
        (tmp_path / name).write_bytes(png()[:40])
    images, labels, classes = read_pictures(tmp_path, "train", GREY)
    assert classes == ("a", "b") and labels.tolist() == [0, 0, 0, 1, 1, 1] and len(images) == 6
    assert "train/a/0.png is not a readable picture" in caplog.text
    assert ", and 1 more of such" in caplog.text
    for name in ("a", "b"):
        (tmp_path / f"test/{name}/1.png").write_bytes(b"no picture")
    with refused("test/a/1.png is not a readable picture"):
        read_pictures(tmp_path, "test", GREY)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize(
    ("orientation", "lay"),
    [
        (1, lambda held: held),
        (2, np.fliplr),
        (3, lambda held: np.rot90(held, 2)),
        (4, np.flipud),
        (5, np.transpose),
        (6, np.rot90),
        (7, lambda held: np.rot90(held, 2).T),
        (8, lambda held: np.rot90(held, 3)),
    ],
)
def test_a_picture_is_read_as_its_exif_data_says_that_it_is_held(orientation, lay, kind):
    held = np.zeros((16, 24), np.uint8)
    held[:8, :8], held[8:, 8:16] = 255, 128
    exif = Image.Exif()
    exif[0x0112] = orientation
    raw = encode(lay(held), kind, exif=exif, quality=100, lossless=True)
    read = read_picture(raw, "a.jpg", (16, 24, 1)).reshape(16, 24)
    assert abs(read.astype(int) - held).max() < 12
    with refused("a.jpg is 24 x 16 (width x height), expected 16 x 24", "-auto-orient"):
        read_picture(raw, "a.jpg", (24, 16, 1))


def test_sub_folders_are_classes_in_order_of_their_names(tmp_path):
    fill(tmp_path, *paths(2, ("train", "test"), ("10", "9", "8")))
    images, labels, classes = read_pictures(tmp_path, "train", GREY)
    assert classes == ("8", "9", "10")
    assert labels.tolist() == [2, 2, 0, 0, 1, 1]  # in order of paths, where 10 is before 8
    assert images[:, 0].tolist() == [0, 1, 4, 5, 2, 3]


def test_pictures_that_lie_flat_have_no_classes(tmp_path):
    _, labels, classes = read_pictures(fill(tmp_path, "train/a.png", "test/b.png"), "train", GREY)
    assert (labels.tolist(), classes) == ([-1], ())


def test_without_a_split_a_shuffled_tenth_is_for_testing(tmp_path):
    fill(tmp_path, *(f"{i:02}.png" for i in range(40)))
    train, test = values(tmp_path, "train"), values(tmp_path, "test")
    assert sorted(train + test) == list(range(40))
    assert len(test) == 4
    assert test != list(range(36, 40))
    assert test == values(tmp_path, "test")
    assert (train, test) == (sorted(train), sorted(test))


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("training", "testing"),
        ("Train", "Test"),
        ("TRAIN", "valid"),
        ("train", "val"),
        ("train_set", "test_set"),
        ("TrainSet", "TestSet"),
        ("seg_train/seg_train", "seg_test/seg_test"),
        ("train2017", "val2017"),
        ("train", "test1"),
        ("training_data", "validation_data"),
        ("digits/training", "digits/testing"),
    ],
)
def test_splits_are_recognised_by_any_common_name(train, test, tmp_path):
    fill(tmp_path, *paths(4, [train], "ab"), *paths(1, [test], "ab"))
    assert values(tmp_path, "train") == list(range(8))
    assert values(tmp_path, "test") == [8, 9]
    assert read_pictures(tmp_path, "test", GREY)[2] == ("a", "b")


@pytest.mark.parametrize(
    ("test", "validation", "kept"),
    [
        ("test/{i}.png", None, ""),
        ("test/images/{i}.png", None, ""),
        ("test/test/{i}.png", "val/b/{i}.png", "val"),
        ("test/c/{i}.png", "valid/a/{i}.png", "valid"),
        ("test/B/{i}.png", None, ""),
    ],
)
def test_a_folder_for_testing_without_the_classes_of_train_is_left_out_and_named(
    test, validation, kept, tmp_path, caplog
):
    fill(
        tmp_path,
        *paths(10, ["train"], "ab"),
        *(form.format(i=i) for form in (test, validation) if form for i in range(3)),
    )
    train, tested = values(tmp_path, "train"), values(tmp_path, "test")
    assert len(tested) == (3 if kept else 2) and len(train) == (20 if kept else 18)
    assert read_pictures(tmp_path, "test", GREY)[2] == ("a", "b")
    why = f"beside train and {kept}" if kept else "which has no class of train"
    assert {*caplog.messages} == {f"{tmp_path}: left out test, {why}"}


def test_a_table_of_labels_beside_pictures_without_classes_is_said_not_to_be_read(tmp_path, caplog):
    fill(tmp_path, *paths(3, ["train"]), *paths(2, ["test"]))
    (tmp_path / "train.csv").write_text("id,label\n0,cat\n")
    assert read_pictures(tmp_path, "train", GREY)[2] == ()
    assert (
        caplog.messages[-1]
        == f"{tmp_path}: pictures have no classes, since train.csv is not read; for classes, "
        "move the pictures into a folder for each"
    )


def test_classes_without_pictures_to_train_on_are_named(tmp_path, caplog):
    fill(tmp_path, *paths(3, ["train"], "a"), "test/a/0.png", "test/b/0.png")
    assert read_pictures(tmp_path, "train", GREY)[2] == ("a", "b")
    assert caplog.messages == [f"{tmp_path}: has no pictures in train for b"]


def test_folders_below_a_class_that_may_be_meant_as_classes_are_named(tmp_path, caplog):
    fill(tmp_path, *paths(5, ("train", "holdout"), "ab"))
    assert read_pictures(tmp_path, "train", GREY)[2] == ("holdout", "train")
    [message] = caplog.messages
    assert (
        "so holdout/a, train/a, holdout/b, train/b are not classes; name the folders of splits"
        in message
    )
    caplog.clear()
    fill(tmp_path / "imagenet", *paths(5, "ab", ["images"]))
    assert read_pictures(tmp_path / "imagenet", "train", GREY)[2] == ("a", "b")
    assert not caplog.messages


@pytest.mark.parametrize(
    "names", [("bullet train", "test tube"), ("plane", "training"), ("restraint", "contest")]
)
def test_classes_may_have_the_word_for_a_split_in_their_names(names, tmp_path):
    fill(tmp_path, *paths(10, names))
    assert read_pictures(tmp_path, "train", GREY)[2] == tuple(sorted(names))


def test_an_archive_reads_as_the_folder_that_was_packed(tmp_path):
    folder = fill(tmp_path / "photos", *paths(10, "ab"))
    for mode in ("", "gz", "xz"):
        path = tmp_path / f"photos.tar.{mode}".rstrip(".")
        with tarfile.open(path, f"w:{mode}") as archive:
            archive.add(folder, "photos")  # wrapped, as archives usually are
        for split in ("train", "test"):
            for read, packed in zip(
                read_pictures(folder, split, GREY), read_pictures(path, split, GREY), strict=True
            ):
                np.testing.assert_array_equal(read, packed)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], ["has no pictures", ".png", "train-images-idx3-ubyte.gz", "data_batch_1.bin"]),
        (["notes.txt", ".hidden.png", "__MACOSX/a.png"], ["has no pictures"]),
        (["a.png"], ["no pictures for the train split"]),
        (["test/a.png"], ["no pictures for the train split"]),
        (["a.png", "cat/b.png"], ["a.png", "next to sub-folders"]),
    ],
    ids=["empty", "no pictures", "one picture", "test alone", "mixed"],
)
def test_a_folder_that_says_no_clear_thing_is_refused(names, words, tmp_path):
    with refused(str(tmp_path), *words):
        read_pictures(fill(tmp_path, *names), "train", GREY)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("train.csv", "save each picture in it as a PNG file"),
        ("mnist.npz", "save each picture in it as a PNG file"),
        ("train-00000-of-00001.parquet", "save each picture in it as a PNG file"),
        ("photos.zip", "unpack the archive"),
        ("photos.tar.gz", "unpack the archive"),
        ("raw/train-images-idx3-ubyte.gz", "give the folder that holds"),
        ("cifar-10-batches-py/data_batch_1", "give the folder that holds"),
    ],
)
def test_a_folder_of_other_data_gets_a_cure_for_these(name, remedy, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\x80\x02}")
    for read in (
        lambda: read_pictures(tmp_path, "train", GREY),
        lambda: choose(tmp_path, tmp_path / "made"),
    ):
        with pytest.raises(ValueError, match=remedy) as error:
            read()
        assert name in str(error.value)


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
def test_a_class_whose_name_is_not_utf8_is_refused_by_name(packed, tmp_path):
    data = tmp_path / "data"
    fill(data, *paths(5, (os.fsdecode(b"caf\xe9"), "tea")))
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        archive.add(data, "data")
    with refused("has a class folder whose name is not UTF-8 (caf\\xe9)", "rename the folder"):
        read_pictures(tmp_path / "data.tar" if packed else data, "train", GREY)


def test_the_name_of_a_class_is_utf8_whatever_the_locale_is(tmp_path):
    fill(tmp_path, *paths(10, ("caf\u00e9", "tea")))
    asked = (
        "import sys; from pathlib import Path; from linpix.training.folders import read_pictures;"
        "print(ascii(read_pictures(Path(sys.argv[1]), 'train', (4, 4, 1))[2]))"
    )
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", asked, str(tmp_path)]
    printed = subprocess.check_output(command, env=os.environ | plain, text=True)
    assert printed == "('caf\\xe9', 'tea')\n"


def test_shards_of_sampled_images_are_not_classes(tmp_path):
    names = [f"{i:06}-{i}.png" for i in range(20)]
    fill(tmp_path / "drawn", *(f"shard-{i % 2:05}/{name}" for i, name in enumerate(names)))
    images, labels, classes = read_pictures(tmp_path / "drawn", "train", GREY)
    assert len(images) == 18 and classes == () and (labels == -1).all()
    fill(tmp_path / "sorted", *(f"{i % 2}/shard-00000/{name}" for i, name in enumerate(names)))
    assert read_pictures(tmp_path / "sorted", "train", GREY)[2] == ("0", "1")


def test_a_class_has_one_name_however_its_accents_are_written(tmp_path):
    whole, apart = "caf\u00e9", "cafe\u0301"
    fill(
        tmp_path, f"train/{apart}/0.png", "train/tea/1.png", f"test/{whole}/2.png", "test/tea/3.png"
    )
    assert read_pictures(tmp_path, "train", GREY)[2] == (whole, "tea")
    assert read_pictures(tmp_path, "test", GREY)[1].tolist() == [0, 1]


@pytest.mark.parametrize("suffix", [".jfif", ".JPG", ".JPEG", ".jpe", ".Png", ""])
def test_pictures_are_read_by_any_suffix_or_none(suffix, tmp_path):
    fill(tmp_path, *paths(10, "a"), *paths(10, "b", suffix=suffix))
    with tarfile.open(tmp_path / "ab.tar", "w") as archive:
        archive.add(tmp_path / "a", "a")
        archive.add(tmp_path / "b", "b")
    assert read_pictures(tmp_path / "ab.tar", "train", GREY)[2] == ("a", "b")
    (tmp_path / "ab.tar").unlink()
    assert read_pictures(tmp_path, "train", GREY)[2] == ("a", "b")


def test_whatever_is_left_out_of_a_folder_is_named_with_the_reason_in_one_line(tmp_path, caplog):
    fill(
        tmp_path,
        *paths(10, "a"),
        *paths(7, "b", suffix=".heic"),
        "a/.DS_Store",
        "a/Thumbs.db",
        "__MACOSX/a/0.png",
        ".git/0.png",
        "a/._0.png",
    )
    (tmp_path / "a/notes").write_text("not a picture")
    (tmp_path / "a/labels.csv").write_text("0,1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a/up").symlink_to(tmp_path)
    (tmp_path / "c").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    assert read_pictures(tmp_path, "train", GREY)[2] == ("a",)
    [record] = caplog.records
    assert (
        record.getMessage()
        == f"{tmp_path}: left out a/labels.csv, b/0.heic, b/1.heic, b/2.heic, b/3.heic and 3 more"
        " (not the suffix of a picture that can be read); a/notes (neither suffix nor content"
        " of a picture); a/up (a link to a folder above it); c (a broken link); empty (an empty"
        " folder); pipe (not a regular file)"
    )


# Archives


def test_links_and_path_tricks_in_an_archive_are_passed_over(tmp_path):
    names = ("/etc/a.png", "../b.png", "x/../../c.png", "good.png")
    path = tar(tmp_path / "tricks.tar", dict.fromkeys(names, png()))
    with tarfile.open(path, "a") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo("link.png")
            info.type, info.linkname = kind, "good.png"
            archive.addfile(info)
    assert [name for name, _ in tar_members(path, lambda name: True)] == ["good.png"]
    assert [file.name for file in tmp_path.iterdir()] == ["tricks.tar"]  # nothing was extracted


@pytest.mark.parametrize(
    "header",
    [
        member(-1024),
        member(2**62),
        member(2**70),
    ],
    ids=["negative", "huge", "beyond 64 bits"],
)
def test_sizes_that_no_file_has_are_refused(header, tmp_path):
    """tarfile alone goes round and round a negative size, and slips on others."""
    (tmp_path / "photos.tar").write_bytes(header + bytes(10_240))
    with refused("photos.tar", "is damaged"):
        list(tar_members(tmp_path / "photos.tar", lambda name: True))


def test_a_damaged_header_in_the_middle_is_not_taken_for_the_end(tmp_path):
    path = tar(tmp_path / "photos.tar", dict.fromkeys(("a.png", "b.png"), png()))
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"b.png")] ^= 1
    path.write_bytes(raw)
    with refused("photos.tar", "the header at byte 1,024 is damaged"):
        list(tar_members(path, lambda name: True))


@pytest.mark.parametrize("mode", ["", "gz", "xz"])
def test_an_archive_that_ends_early_is_refused(mode, tmp_path):
    path = tar(tmp_path / "photos.tar", {"a.png": np.random.default_rng(0).bytes(50_000)}, mode)
    path.write_bytes(path.read_bytes()[:30_000])
    with pytest.raises(DataError, match=re.escape(str(path)) + r".*(truncated|damaged)"):
        list(tar_members(path, lambda name: True))


def test_a_file_that_is_not_an_archive_is_refused(tmp_path):
    (tmp_path / "data.tar").write_bytes(b"neither this nor that" * 100)
    with refused("data.tar", "not a tar archive", "give a folder"):
        list(tar_members(tmp_path / "data.tar", lambda name: True))
