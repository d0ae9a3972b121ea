"""A data set of a few small pictures, and files of some."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from linpix.training.datasets import Dataset


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache, in which judges are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "linpix"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """40 pictures of 8 x 8 in 4 classes."""
    random = np.random.default_rng(0)
    for index in range(40):
        (tmp_path / "pictures" / str(index % 4)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 60 * (index % 4) + 20, (8, 8)).astype(np.uint8)).save(
            tmp_path / "pictures" / str(index % 4) / f"{index}.png"
        )
    return tmp_path / "pictures"


@pytest.fixture(scope="session")
def stripes() -> Dataset:
    """100 pictures of 8 x 8 with a horizontal edge at a height that is the class."""
    labels = np.arange(100) % 8
    images = np.where(np.arange(8)[None, :, None] < labels[:, None, None], 255, 0) * np.ones(
        (1, 1, 8)
    )
    return Dataset(
        "stripes",
        images.reshape(100, 64).astype(np.uint8),
        labels.astype(np.int64),
        tuple("01234567"),
    )


def shapes(count: int, size: int, colours: int = 1) -> Dataset:
    """Dark and bright pictures, classes 0 and 1."""
    random, labels = np.random.default_rng(0), np.arange(count) % 2
    images = (random.random((count, size * size * colours)) * 100 + 150 * labels[:, None]).astype(
        np.uint8
    )
    return Dataset("shapes", images, labels, ("dark", "bright"))


def lay(data: Dataset, folder: Path, train: int) -> Path:
    """Write pictures of 8 x 8 into folders; so many are for training, the others for testing."""
    for index, (values, label) in enumerate(zip(data.images, data.labels, strict=True)):
        place = folder / ("train" if index < train else "test") / data.classes[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values.reshape(8, 8)).save(place / f"{index}.png")
    return folder


def train_command(pictures: Path, batch: int) -> list[str]:
    """A real run of `tiny`, beside its pictures, that saves at every chance."""
    flags = f"--data {pictures} --out {pictures.parent}/run --no-compile --save-minutes 0.01"
    return [sys.executable, "-m", "linpix", "train", "tiny", *flags.split(), "--batch", str(batch)]
