"""Which data set a folder holds, whether it is intact, and how it gets there."""

import gzip
import hashlib
import lzma
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from linpix.model.config import PRESETS
from linpix.training import datasets
from linpix.training.datasets import load
from linpix.training.readers import DataError
from tests.training.test_readers import idx, tar
from tools.harness.servers import Quiet, listening

MNIST, CIFAR10, TINY = PRESETS["mnist"], PRESETS["cifar10"], PRESETS["tiny"]
PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


@pytest.fixture(autouse=True)
def no_foreign_mirrors(monkeypatch):
    """Whatever a test forgets, it does not leave this machine."""
    monkeypatch.delenv("LINPIX_MIRRORS", raising=False)
    monkeypatch.setattr(datasets, "MIRRORS", {"mnist": "", "cifar10": ""})
    monkeypatch.setenv("no_proxy", "127.0.0.1")


# The real files


def test_mnist_is_read_whole_and_as_published(data):
    train, test = load(data, "train", MNIST), load(data / "mnist", "test", MNIST)
    assert (train.name, train.classes) == ("mnist", tuple("0123456789"))
    assert (train.images.shape, test.images.shape) == ((60_000, 784), (10_000, 784))
    assert (train.images.dtype, train.labels.dtype) == (np.uint8, np.int64)
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert train.images.mean() / 255 == pytest.approx(0.1306604762738429)
    assert not train.images[:, 0].any()  # what the importer of start-less checkpoints relies on


def test_cifar10_is_read_as_published(data, caplog):
    test = load(data, "test", CIFAR10)
    assert (test.name, test.classes[0], test.classes[9]) == ("cifar10", "airplane", "truck")
    assert test.images.shape == (10_000, 3072)
    assert np.bincount(test.labels).tolist() == [1000] * 10
    assert test.images.reshape(-1, 3).mean(0) / 255 == pytest.approx(
        [0.49421428, 0.48513139, 0.45040909]
    )
    assert not caplog.records  # its sum is known


def test_data_of_another_shape_is_refused_with_both_shapes(data):
    with pytest.raises(DataError, match=r"MNIST, 28 x 28 x 1 .* the model is for 32 x 32 x 3"):
        load(data / "mnist", "test", CIFAR10)
    with pytest.raises(DataError, match="the model is for 8 x 8 x 1"):
        load(data, "test", TINY)


# Small stand-ins under the real names, with sums to match


def put(folder: Path, files: dict[str, bytes], end: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in files.items():
        (folder / (name + end)).write_bytes(PACK[end](raw))
    return folder


@pytest.fixture
def mnist(monkeypatch) -> dict[str, bytes]:
    files = {}
    for prefix, count in (("train", 3), ("t10k", 2)):
        images = np.random.default_rng(count).integers(0, 256, (count, 28, 28), np.uint8)
        files[f"{prefix}-images-idx3-ubyte"] = idx(images)
        files[f"{prefix}-labels-idx1-ubyte"] = idx(np.arange(count, dtype=np.uint8))
    monkeypatch.setattr(
        datasets, "MNIST_SUMS", {name: hashlib.md5(raw).hexdigest() for name, raw in files.items()}
    )
    return files


@pytest.fixture
def batches() -> dict[str, bytes]:
    """Two well-formed records a batch, of labels n and n + 1; no published sums."""
    return {
        name: b"".join(bytes([n + i]) + bytes(3072) for i in range(2))
        for n, name in enumerate(datasets.CIFAR10_SUMS)
    }


def pack_archive(path: Path, batches: dict[str, bytes], mode: str = "gz") -> Path:
    return tar(path, {f"cifar-10-batches-bin/{name}": raw for name, raw in batches.items()}, mode)


def test_the_parent_folder_stands_for_the_data_set_of_the_models_shape(mnist, batches, tmp_path):
    put(tmp_path / "mnist", mnist)
    put(tmp_path / "cifar10", batches)
    assert load(tmp_path, "test", MNIST).name == "mnist"
    assert load(tmp_path, "test", CIFAR10).name == "cifar10"


@pytest.mark.parametrize("end", PACK)
@pytest.mark.parametrize("home", [".", "mnist", "MNIST/raw"])
def test_mnist_may_be_compressed_and_lie_deeper(home, end, mnist, tmp_path):
    put(tmp_path / home, mnist, end)
    assert load(tmp_path, "train", MNIST).labels.tolist() == [0, 1, 2]
    assert load(tmp_path, "test", MNIST).labels.tolist() == [0, 1]


@pytest.mark.parametrize("twice", [False, True])
def test_idx_files_may_lie_in_folders_of_their_names_as_kaggle_unpacks_them(twice, mnist, tmp_path):
    for folder, files in (("mnist", mnist), ("fashion", of_others())):
        for name, raw in files.items():
            put(tmp_path / folder / name, {name: raw})
        if twice:  # Kaggle has both
            put(
                tmp_path / folder,
                {name.replace("-idx", ".idx"): raw for name, raw in files.items()},
            )
        found = load(tmp_path / folder, "train", MNIST)
        assert (found.name, found.labels.tolist()) == (folder, [0, 1, 2])


def test_mnist_with_another_sum_is_refused_with_both_sums_and_the_cure(mnist, tmp_path):
    name = "train-images-idx3-ubyte"
    changed = mnist[name][:-1] + bytes([mnist[name][-1] ^ 1])
    put(tmp_path, {**mnist, name: changed})
    with pytest.raises(DataError) as caught:
        load(tmp_path, "train", MNIST)
    for word in (
        str(tmp_path / name),
        f"expected MD5 {datasets.MNIST_SUMS[name]}",
        f"got {hashlib.md5(changed).hexdigest()}",
        "delete the file to download it again",
    ):
        assert word in str(caught.value)
    assert len(load(tmp_path, "test", MNIST).images) == 2  # whose files are whole


def of_others(
    prefix: str = "", first: int = 0, classes: int = 3, split: str = "t10k"
) -> dict[str, bytes]:
    """Well-formed files that are not MNIST's: a picture of each class in both splits, with a mark
    at the top right.
    """
    files = {}
    for part in ("train", split):
        images = np.full((classes, 28, 28), len(part), np.uint8)
        images[:, 0, 27] = 255
        files[f"{prefix}{part}-images-idx3-ubyte"] = idx(images)
        files[f"{prefix}{part}-labels-idx1-ubyte"] = idx(
            np.arange(first, first + classes, dtype=np.uint8)
        )
    return files


@pytest.mark.parametrize("end", PACK)
@pytest.mark.parametrize("home", [".", "raw", "FashionMNIST/raw", "gzip"])
def test_files_of_other_data_with_the_names_of_mnist_are_read_with_a_warning(
    home, end, tmp_path, caplog
):
    put(tmp_path / "fashion" / home, of_others(), end)
    found = load(tmp_path / "fashion", "train", MNIST)
    name = "FashionMNIST" if "F" in home else "fashion"
    assert (found.name, found.classes) == (name, ("0", "1", "2"))
    assert found.labels.tolist() == [0, 1, 2]
    assert found.images[0, [0, 27]].tolist() == [5, 255]
    assert "not MNIST as published" in caplog.text


@pytest.mark.parametrize(
    ("part", "first", "count", "ends"),
    [
        ("letters", 1, 26, "AZ"),
        ("balanced", 0, 47, "0t"),
        ("byclass", 0, 62, "0z"),
        ("digits", 0, 10, "09"),
    ],
)
def test_emnist_is_read_upright_with_the_names_of_its_classes(part, first, count, ends, tmp_path):
    put(tmp_path, of_others(f"emnist-{part}-", first, count, "test"), ".gz")
    found = load(tmp_path, "test", MNIST)
    assert (found.name, len(found.classes)) == (f"emnist-{part}", count)
    assert found.classes[0] + found.classes[-1] == ends
    assert found.labels.tolist() == list(range(count))
    assert found.images[0, [27, 27 * 28]].tolist() == [4, 255]  # EMNIST stores columns


def test_what_other_data_lack_is_not_downloaded_from_mnist(mirror, tmp_path):
    files = of_others()
    del files["t10k-images-idx3-ubyte"]
    put(tmp_path / "fashion", files)
    with pytest.raises(
        DataError, match=r"lacks the images of the test split.*from the source of the others"
    ):
        load(tmp_path / "fashion", "test", MNIST)
    assert not Mirror.asked


def test_other_data_that_do_not_fit_are_refused(tmp_path):
    files = of_others()
    several = put(
        tmp_path / "several", {**of_others("emnist-letters-"), **of_others("emnist-digits-")}
    )
    with pytest.raises(
        DataError, match=r"several data sets \(emnist-digits, emnist-letters\): put"
    ):
        load(several, "train", MNIST)
    with pytest.raises(DataError, match=r"28 x 28 x 1 .* the model is for 8 x 8 x 1"):
        load(put(tmp_path / "large", files), "train", TINY)
    files["train-labels-idx1-ubyte"] = idx(np.zeros(2, np.uint8))
    with pytest.raises(DataError, match="has 3 images and 2 labels"):
        load(put(tmp_path / "uneven", files), "train", MNIST)


@pytest.mark.parametrize("end", PACK)
@pytest.mark.parametrize("home", [".", "cifar10", "cifar-10-batches-bin"])
def test_cifar10_may_be_compressed_and_lie_deeper(home, end, batches, tmp_path):
    put(tmp_path / home, batches, end)
    assert load(tmp_path, "train", CIFAR10).labels.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert load(tmp_path, "test", CIFAR10).labels.tolist() == [5, 6]


@pytest.mark.parametrize("mode", ["", "gz", "xz"])
def test_cifar10_may_be_an_archive_in_the_folder_or_instead_of_it(mode, batches, tmp_path):
    path = pack_archive(tmp_path / f"cifar-10-binary.tar.{mode}".rstrip("."), batches, mode)
    for given in (tmp_path, path):
        assert load(given, "train", CIFAR10).labels.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


def test_cifar10_of_no_known_sum_is_read_with_a_warning_that_names_it(batches, tmp_path, caplog):
    load(put(tmp_path, batches), "test", CIFAR10)
    assert str(tmp_path / "test_batch.bin") in caplog.text
    assert hashlib.md5(batches["test_batch.bin"]).hexdigest() in caplog.text


def test_a_missing_batch_of_cifar10_is_named(batches, tmp_path):
    del batches["data_batch_3.bin"]
    with pytest.raises(DataError, match=r"lacks data_batch_3\.bin, which the train split needs"):
        load(put(tmp_path, batches), "train", CIFAR10)
    load(tmp_path, "test", CIFAR10)


def test_a_folder_of_pictures_is_named_after_itself(tmp_path):
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "pets" / split / name).mkdir(parents=True)
            Image.new("L", (8, 8), 9).save(tmp_path / "pets" / split / name / "1.png")
    pets = load(tmp_path / "pets", "train", TINY)
    assert (pets.name, pets.classes, pets.labels.tolist()) == ("pets", ("cat", "dog"), [0, 1])
    assert pets.images.tolist() == [[9] * 64] * 2
    with tarfile.open(tmp_path / "packed.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "pets", "pets")
    assert load(tmp_path / "packed.tar.gz", "test", TINY).name == "packed"


# Downloads


class Mirror(Quiet):
    """Serves the folder's files below /good/, and the ways in which a mirror fails elsewhere."""

    folder: Path
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        _, how, name = self.path.split("/")
        file = self.folder / name
        if how == "missing" or not file.is_file():
            self.send_error(404)
            return
        body = {
            "garbage": b"\x00\x01 garbage",
            "page": b"<!DOCTYPE html><html>Please log in</html>",
            "other": gzip.compress(b"other contents"),
        }.get(how, file.read_bytes())
        self.answer(body[: len(body) // 2] if how == "cut" else body, length=len(body))


@pytest.fixture
def mirror(mnist, tmp_path, monkeypatch) -> Iterator[str]:
    """The address of a mirror of the stand-ins, less how it behaves, which is its last part; a good
    one is asked.
    """
    Mirror.folder, Mirror.asked = put(tmp_path / "mirror", mnist, ".gz"), []
    with listening(Mirror) as url:
        monkeypatch.setenv("LINPIX_MIRRORS", f"{url}/good/")
        yield url


@pytest.mark.parametrize("exists", [False, True], ids=["missing", "empty"])
def test_a_missing_or_empty_folder_is_filled_from_a_mirror(exists, mirror, tmp_path, capsys):
    folder = tmp_path / "new" / "mnist"
    if exists:
        folder.mkdir(parents=True)
    assert load(folder, "train", MNIST).labels.tolist() == [0, 1, 2]
    assert f"downloading {mirror}/good/train-images-idx3-ubyte.gz" in capsys.readouterr().err
    assert sorted(file.name for file in folder.iterdir()) == [
        "train-images-idx3-ubyte.gz",
        "train-labels-idx1-ubyte.gz",
    ]
    load(folder, "train", MNIST)  # from there
    assert len(Mirror.asked) == 2


def test_when_every_mirror_fails_each_is_named_with_its_cause(mirror, tmp_path, monkeypatch):
    bases = [f"{mirror}/{how}" for how in ("missing", "garbage", "page", "other", "cut")]
    monkeypatch.setenv("LINPIX_MIRRORS", ",".join([*bases, "http://127.0.0.1:1", "nonsense"]))
    with pytest.raises(DataError) as caught:
        load(tmp_path / "new", "test", MNIST)
    message = str(caught.value)
    name = "t10k-images-idx3-ubyte.gz"
    assert "\n" not in message
    for part in (
        f"{mirror}/missing/{name} failed (HTTP Error 404",
        f"{mirror}/page/{name} is an HTML",
        f"{mirror}/garbage/{name} differs from the published file",
        f"{mirror}/other/{name} differs from the published file",
        f"{mirror}/cut/{name} ended after",
        f"http://127.0.0.1:1/{name} failed",
        "nonsense",
        f"put {name} there by hand",
        str(tmp_path / "new"),
        "LINPIX_MIRRORS",
    ):
        assert part in message
    assert not list((tmp_path / "new").iterdir())


def test_mirrors_are_asked_in_turn(mirror, tmp_path, monkeypatch):
    monkeypatch.setenv("LINPIX_MIRRORS", f"{mirror}/missing, {mirror}/good/,")
    assert load(tmp_path / "new", "test", MNIST).labels.tolist() == [0, 1]


def test_only_what_is_missing_is_downloaded(mirror, mnist, tmp_path):
    folder = put(tmp_path / "mine", mnist)
    (folder / "t10k-labels-idx1-ubyte").unlink()
    load(folder, "test", MNIST)
    assert Mirror.asked == ["/good/t10k-labels-idx1-ubyte.gz"]


def test_cifar10_is_downloaded_as_its_archive(mirror, batches, tmp_path, monkeypatch):
    path = pack_archive(Mirror.folder / "cifar-10-binary.tar.gz", batches)
    monkeypatch.setattr(datasets, "CIFAR10_ARCHIVE_SUM", hashlib.md5(path.read_bytes()).hexdigest())
    folder = tmp_path / "new"
    monkeypatch.setenv("LINPIX_MIRRORS", f"{mirror}/garbage,{mirror}/good")
    assert load(folder, "test", CIFAR10).labels.tolist() == [5, 6]
    assert [file.name for file in folder.iterdir()] == ["cifar-10-binary.tar.gz"]


def test_a_folder_that_cannot_be_made_is_a_data_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot be written to .* by hand"):
        load(tmp_path / "file" / "mnist", "train", MNIST)


@pytest.mark.parametrize("name", ["notes.txt", ".git/config", "mine"])
def test_nothing_is_downloaded_into_a_folder_that_holds_something(name, mirror, tmp_path):
    folder = tmp_path / "data"
    (folder / name).parent.mkdir(parents=True)
    if name == "mine":
        (folder / name).symlink_to(tmp_path / "elsewhere")
    else:
        (folder / name).write_text("")
    with pytest.raises(DataError, match="has no pictures"):
        load(folder, "train", MNIST)
    assert not Mirror.asked


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("absent", TINY, "absent does not exist: .*only MNIST and CIFAR-10 can be downloaded"),
        ("absent.tar.gz", MNIST, "does not exist"),
        (".", TINY, "is empty"),
    ],
)
def test_what_is_absent_and_cannot_be_downloaded_is_said_to_be(name, config, words, tmp_path):
    with pytest.raises(DataError, match=words):
        load(tmp_path / name, "train", config)
    assert not list(tmp_path.iterdir())
