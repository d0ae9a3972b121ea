"""Five minutes of training on 300 drawn pictures, from mnist-conditional's digits: do its samples
show the shapes?

    python -m tools.benchmarks.own [--minutes 5] [--out build/own] [--plain]

300 pictures of circles, squares and stars are drawn, thick and thin, anywhere and of any size;
`linpix train --preset auto` trains on them, or with --plain without the head start. A CNN that is
trained on the same 300 looks at 60 samples, 20 a class, of one attempt and of up to four: how many
are of the class asked for (one in three would be by chance). A grid of samples is kept beside.
"""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from linpix.model import checkpoint
from linpix.model.packing import PRECISIONS, choose, pack
from linpix.training.datasets import load
from linpix.training.export import sample_grid
from linpix.training.own import judge
from tools.harness.arguments import new_parser
from tools.harness.servers import ROOT

SHAPES, EACH, SIDE = ("circle", "square", "star"), 100, 112


def draw(shape: str, random: np.random.Generator) -> Image.Image:
    """Dark ink on white, 112 x 112."""
    picture = Image.new("L", (SIDE, SIDE), 255)
    pen, width = ImageDraw.Draw(picture), int(random.integers(6, 13))
    radius, turn = random.uniform(26, 44), random.uniform(0, 2 * math.pi)
    x, y = random.uniform(radius + 6, SIDE - radius - 6, 2)
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), outline=0, width=width)
        return picture
    corners = 4 if shape == "square" else 10
    reach = [
        radius * (0.42 if shape == "star" and corner % 2 else 1.0) for corner in range(corners)
    ]
    points = [
        (
            x + r * math.cos(turn + 2 * math.pi * at / corners),
            y + r * math.sin(turn + 2 * math.pi * at / corners),
        )
        for at, r in enumerate(reach)
    ]
    pen.line([*points, points[0], points[1]], fill=0, width=width, joint="curve")
    return picture


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--minutes", default="5")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "own")
    parser.add_argument("--plain", action="store_true", help="without the head start")
    given = parser.parse_args()
    pictures, run = given.out / "pictures", given.out / "run"
    shutil.rmtree(given.out, ignore_errors=True)
    random = np.random.default_rng(0)
    for shape in SHAPES:
        (pictures / shape).mkdir(parents=True)
        for index in range(EACH):
            draw(shape, random).save(pictures / shape / f"{index:03}.png")
    train = [
        sys.executable,
        "-m",
        "linpix",
        "train",
        "--preset",
        "auto",
        str(pictures),
        "--minutes",
        given.minutes,
        "--out",
        str(run),
        "--no-compile",
    ]
    subprocess.run([*train, *(["--init", ""] if given.plain else [])], check=True)
    found = checkpoint.read(run)
    made = run.with_name("run.training") / "pictures"
    kept, test = load(made, "train", found.net.config), load(made, "test", found.net.config)
    looked_at = judge.trained(kept, found.net.config)
    packed = (
        pack(found.net, PRECISIONS["fp32"])
        if choose(found.net.config).engine == "compiled"
        else None
    )
    (given.out / "samples.png").write_bytes(sample_grid(found.net, 60))
    for attempts in (1, 4):
        measured = judge.agreement(
            found.net, looked_at, test, count=60, temperature=1.0, attempts=attempts, packed=packed
        )
        print(
            f"attempts {attempts}: {measured.class_agreement:.2f} +- {measured.interval:.2f} of"
            f" {measured.drawn} samples are of the class asked for",
            flush=True,
        )
    print(
        f"to a CNN that is right for {measured.judge:.2f} of {len(test.images)} pictures; after"
        f" {found.provenance['images']:,} images, those before it included;"
        f" {given.out / 'samples.png'}"
    )


if __name__ == "__main__":
    main()
