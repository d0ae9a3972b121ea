"""The sub-pixels that seeds give: digests of images by shipped models, recorded once, and compared
ever since.

A seed gives the same image with the same checkpoint, engine and precision (docs/how-it-works.md).
They are recorded for the compiled engine in fp32, which draws the same ones with every instruction
set. bf16 rounds as the processor does, int8 has some products in bf16 where a processor can, and
torch's products are its library's, so these are not recorded. `python -m tests.test_digests` says
what differs, and `--write` records anew: then users' seeds draw other images.
"""

import argparse
import base64
import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from linpix.__main__ import main
from linpix.model import ops
from tools.harness.commands import ROOT
from tools.harness.servers import here

RECORD = Path(__file__).with_name("digests.json")
needs_kernels = pytest.mark.skipif(
    not ops.compiled, reason="the eager engine does not promise bytes; needs a compiler"
)

# Commands by name; PICTURE and MASK are files of `pictures`.
COMMANDS = {
    "one image": "sample --model mnist-small --seed 1",
    "a class": "sample --model mnist-small --seed 2020 --label 7 --count 4",
    "a large seed": "sample --model mnist-small --seed 9007199254740989 --count 3",
    "calm": "sample --model mnist-small --seed 5 --temperature 0.5 --count 2",
    "no randomness": "sample --model mnist-small --seed 5 --temperature 0",
    "wild": "sample --model mnist-small --seed 5 --temperature 1.7",
    "colours": "sample --model cifar10-small --seed 3 --label frog",
    "the class first": "sample --model mnist-conditional --seed 1 --count 4",
    "one attempt": "sample --model mnist-conditional --seed 40 --label 4 --count 8 --attempts 1",
    "attempts": "sample --model mnist-conditional --seed 40 --label 4 --count 8 --attempts 4",
    "candidates": "sample --model mnist-conditional --seed 7 --label 2 --count 2 --candidates 6",
    "a large model": "sample --model mnist-large --seed 1 --label 8 --count 2",
    "pixels": "sample --model cifar10-conditional --seed 3 --label ship",
    "a prefix": "complete PICTURE --model mnist-small --keep-rows 14 --seed 1 --count 2",
    "between holes": "complete PICTURE --model mnist-small --mask MASK --seed 1 --count 2",
    "all known pixels": "complete PICTURE --model mnist-conditional --mask MASK --seed 1 --count 3",
    "all known pixels, as a class": (
        "complete PICTURE --model mnist-conditional --mask MASK --seed 1 --label 9"
    ),
    "completions to choose from": (
        "complete PICTURE --model mnist-conditional --mask MASK --seed 1 --candidates 4"
    ),
    "a large model completes": "complete PICTURE --model mnist-large --keep-rows 9 --seed 1",
    "a photograph": (
        "complete PICTURE --model mnist-conditional --keep-rows 16 --prepare mnist --seed 1"
    ),
    "colours, completed": "complete PICTURE --model cifar10-conditional --mask MASK --seed 1",
}


def pictures(folder: Path) -> dict[str, str]:
    """Files by their names in COMMANDS: a picture that looks like a seven, and a mask with two
    holes.
    """
    y, x = np.mgrid[:28, :28]
    seven = ((y > 5) & (y < 9) & (x > 7) & (x < 21)) | (
        (abs(x + y // 2 - 23) < 2) & (y > 7) & (y < 23)
    )
    alpha = np.where(((y > 3) & (y < 10)) | ((y > 15) & (x > 12)), 0, 255)
    Image.fromarray((230 * seven).astype(np.uint8)).resize((32, 32), Image.Resampling.NEAREST).save(
        folder / "large.png"
    )
    Image.fromarray((230 * seven).astype(np.uint8)).save(folder / "seven.png")
    Image.fromarray(np.dstack([alpha, alpha]).astype(np.uint8)).save(folder / "mask.png")
    return {
        "PICTURE": str(folder / "seven.png"),
        "LARGE": str(folder / "large.png"),
        "MASK": str(folder / "mask.png"),
    }


def digest(picture: bytes) -> str:
    """Of the sub-pixels alone: files differ with the libraries that write them."""
    pixels = np.asarray(Image.open(io.BytesIO(picture)))
    return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()


def drawn(command: str, files: dict[str, str], out: Path) -> list[str]:
    """The digests of a command's images, in the order of its answer."""
    colours = "cifar10" in command
    words = [
        files["LARGE" if colours and word == "PICTURE" else word] if word in files else word
        for word in command.split()
    ]
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert (
            main(
                [
                    *words,
                    "--engine",
                    "compiled",
                    "--device",
                    "cpu",
                    "--precision",
                    "fp32",
                    "--checkpoints",
                    str(ROOT / "checkpoints"),
                    "--out",
                    f"{out}/",
                    "--json",
                ]
            )
            == 0
        )
    return [digest(Path(file).read_bytes()) for file in json.loads(told.getvalue())["files"]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(RECORD.read_text())
    return found


@needs_kernels
@pytest.mark.parametrize("name", COMMANDS)
def test_a_seed_still_gives_the_same_image(name, recorded, files, tmp_path):
    assert drawn(COMMANDS[name], files, tmp_path) == recorded[name]


def test_all_images_that_are_recorded_are_drawn(recorded):
    assert recorded.keys() == COMMANDS.keys()
    several = [one for images in recorded.values() for one in images]
    assert len({*several}) > 0.8 * len(several), "different seeds give different images"


@pytest.fixture(scope="module")
def server() -> Iterator:
    with here(
        ROOT / "checkpoints",
        models="mnist-conditional,mnist-small",
        precision="fp32",
        engine="compiled",
        device="cpu",
    ) as server:
        yield server


@needs_kernels
@pytest.mark.parametrize(
    ("name", "sent", "fields"),
    [
        ("a class", "", {"model": "mnist-small", "seed": 2020, "label": 7, "n": 4}),
        ("attempts", "", {"seed": 40, "label": 4, "n": 8, "attempts": 4}),
        ("candidates", "", {"seed": 7, "label": 2, "n": 2, "candidates": 6}),
        ("a prefix", "PICTURE", {"model": "mnist-small", "seed": 1, "keep_rows": 14, "n": 2}),
        ("between holes", "PICTURE MASK", {"model": "mnist-small", "seed": 1, "n": 2}),
        ("all known pixels", "PICTURE MASK", {"seed": 1, "n": 3}),
        ("completions to choose from", "PICTURE MASK", {"seed": 1, "candidates": 4}),
        ("a photograph", "PICTURE", {"seed": 1, "keep_rows": 16, "prepare": "mnist"}),
    ],
)
def test_the_service_gives_the_same_image(name, sent, fields, client, recorded, files):
    uploads = {
        field: Path(files[file]).read_bytes()
        for field, file in (("image", "PICTURE"), ("mask", "MASK"))
        if file in sent
    }
    answer = (
        client.post("/v1/images/edits", files=uploads, data=fields)
        if uploads
        else client.post("/v1/images/generations", json=fields)
    )
    assert [
        digest(base64.b64decode(item["b64_json"])) for item in answer.json()["data"]
    ] == recorded[name]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Draw the recorded images again, and say which differ."
    )
    parser.add_argument("--write", action="store_true", help="record the digests anew")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = pictures(Path(folder))
        now = {
            name: drawn(command, sources, Path(folder) / str(place))
            for place, (name, command) in enumerate(COMMANDS.items())
        }
    if wanted.write:
        RECORD.write_text(json.dumps(now, indent=1) + "\n")
    before = json.loads(RECORD.read_text())
    changed = [name for name in COMMANDS if now[name] != before.get(name)]
    print(
        f"{os.environ.get('LINPIX_KERNEL', ops.kernel())}: {len(changed)} of {len(now)} differ:"
        f" {changed}"
    )
    sys.exit(bool(changed))
