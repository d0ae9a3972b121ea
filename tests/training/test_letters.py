"""Letters from a few real fonts: which are left out, what a picture keeps, which families are
where.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from linpix.__main__ import main
from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.training.datasets import load
from linpix.training.idx import LETTERS
from linpix.training.letters import draw, families, installed, write

ROOT = Path("/")
FONTS = (
    "fonts-bebas-neue",
    "fonts-gfs-olga",
    "fonts-junction",
    "fonts-kristi",
    "fonts-leckerli-one",
)
pytestmark = pytest.mark.skipif(
    not all((ROOT / "usr/share/doc" / name).is_dir() for name in FONTS),
    reason=f"needs open fonts: apt-get install {' '.join(FONTS)}",
)


def small(folder: Path, seed: int = 0) -> Path:
    write(folder, FONTS, train=208, validation=52, test=52, seed=seed)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return small(tmp_path_factory.mktemp("letters") / "data")


@pytest.fixture(scope="module")
def styles():
    return installed(FONTS, ROOT)[0]


def test_capitals_and_small_letters_are_classes_of_their_own(data):
    for split, count in (("train", 260), ("test", 52)):
        found = load(data, split, PRESETS["mnist"])
        assert (found.name, found.classes, found.images.shape) == ("letters", LETTERS, (count, 784))
        assert np.bincount(found.labels).tolist() == [count // 52] * 52
        assert found.images.max(1).tolist() == [255] * count
        assert len(np.unique(found.images, axis=0)) == count
        assert found.images.mean() < 60  # light on dark


def test_families_for_testing_and_validation_are_in_no_other_part(data):
    told = json.loads((data / "manifest.json").read_text())
    split = {
        part: [{style["package"] for style in family} for family in told[part]]
        for part in ("train", "test")
    }
    assert sorted(name for part in split.values() for family in part for name in family) == sorted(
        FONTS[2:]
    )
    assert len(split["train"]) == 2  # the second is for validation
    assert all(len(style["sha256"]) == 64 for family in told["train"] for style in family)
    assert {path.name for path in (data / "licences").iterdir()} == set(FONTS[2:])


def test_the_same_seed_gives_the_same_files(data, tmp_path):
    def contents(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    assert contents(small(tmp_path / "again")) == contents(data)
    name = "letters-train-images-idx3-ubyte.gz"
    assert contents(small(tmp_path / "other", seed=1))[name] != contents(data)[name]


def test_fonts_that_lack_letters_or_one_case_or_ink_are_left_out(data):
    left = json.loads((data / "manifest.json").read_text())["left_out"]
    reasons = {Path(name).stem: reason for name, reason in left.items()}
    assert reasons["GFSOlga"] == "it lacks letters"
    assert reasons["BebasNeue-Bold"] == "its capitals are like its small letters"
    assert reasons["BebasNeue-Thin"] == "it is too thin"


def test_a_letter_keeps_its_size_and_its_place_on_the_line(styles):
    def rows(letter: str) -> tuple[int, int]:
        inked = np.flatnonzero(draw(face, letter).max(1) > 127)
        return int(inked[0]), int(inked[-1])

    [face] = [style.face for style in styles if style.family == "Junction"]
    assert abs(rows("O")[1] - rows("o")[1]) <= 1 and rows("o")[0] - rows("O")[0] >= 4
    assert rows("p")[1] - rows("P")[1] >= 4


def test_no_letter_is_cut_however_it_is_moved(styles):
    for style in styles:
        for letter in LETTERS:
            picture = draw(style.face, letter, size=1.3, angle=0.3, shear=-0.3, move=(3, 3))
            edges = np.concatenate([picture[[0, -1]].ravel(), picture[:, [0, -1]].ravel()])
            assert edges.max() == 0 and picture.max() > 100, (style.family, letter)


def test_families_of_one_design_or_name_are_one(styles):
    a, b, c = styles
    assert families([a, b, c]) == [[a], [b], [c]]
    copy = dataclasses.replace(a, family="Another Name")
    assert families([a, b, copy]) == [[a, copy], [b]]
    light = dataclasses.replace(b, family=f"{a.family} Two")
    assert families([a, light, c]) == [[a, light], [c]]


def test_a_package_under_another_licence_is_refused():
    with pytest.raises(
        ValueError, match="fonts-dejavu-core is not under the SIL Open Font License; leave it out"
    ):
        installed(["fonts-dejavu-core"], ROOT)


def test_without_fonts_the_error_says_what_to_install(tmp_path):
    asked = f"-m linpix.training.letters {tmp_path}/out --root {tmp_path}"
    command = [sys.executable, *asked.split()]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1 and not (tmp_path / "out").exists()
    assert (
        "packages of fonts are not installed; run: apt-get install fonts-3270 fonts-allerta"
        in ended.stderr
    )


def test_linpix_train_takes_letters(data, tmp_path):
    model = "mnist-conditional --layers 1 --head categorical"
    run = f"--out {tmp_path}/run --images 8 --batch 4 --no-compile --processes 1"
    main(f"train {model} --data {data} {run}".split())
    run = checkpoint.read(tmp_path / "run")
    assert [run.class_of(name) for name in ("A", "a", "z")] == [0, 26, 51]
