"""Photographs tried as a new user would: five of handwritten digits and three in colour, with
holes, over HTTP.

    python -m tools.benchmarks.photographs --digits DIR --colours DIR [--out build/photographs]
                                           [--models mnist-conditional,cifar10-conditional]
                                           [--checkpoints DIR] [--pictures FILE,FILE,FILE]
                                           [--no-judge]

The digits are MNIST's test digits as ink on paper, in perspective, uneven light, grain and JPEG: on
a plain sheet, on lined paper in a shadow, with thin pencil on squared paper, on a sheet on a dark
table, in chalk on a board. Colours are test images of CIFAR-10 enlarged: a landscape, a portrait
with the hole at its foot, a panorama with the hole at its end; or --pictures, of which a third in
both directions is hidden. Each is uploaded as JPEG with a mask, and the best 4 of 8 are laid back.

In the folder --out are afterwards, for each: the JPEG and its mask, what the model saw, four
completions laid back, and digits.png and colours.png with all of it side by side. The output says
what came back, and of digits, how many of the four a CNN (tools/benchmarks/quality.py) takes for
the class that was written; --no-judge does without.
"""

import base64
import io
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.training import datasets
from tools.benchmarks.occlusion import HOLE
from tools.benchmarks.quality import judged, trained_judge
from tools.harness.arguments import new_parser
from tools.harness.servers import ROOT, serving

WAYS, CANDIDATES = 4, 8
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, slots=True)
class Photograph:
    name: str
    picture: Image.Image
    hole: Box
    label: int | None = None  # of a digit


@dataclass(frozen=True, slots=True)
class Scene:
    """How a digit is photographed. Colours are of 0 to 255."""

    name: str
    size: tuple[int, int]
    paper: tuple[int, int, int]
    ink: tuple[int, int, int]
    at: tuple[float, float, float]  # left, top and side of the digit, in parts of the shorter side
    hole: Box  # in parts of the digit's side
    ruled: tuple[int, bool] | None = None  # pixels between lines, and whether they are squares
    table: bool = False  # a sheet on something dark
    shade: float = 0.3  # how much darker one corner is
    thin: bool = False
    tilt: float = 0.0  # radians


SCENES = (
    Scene(
        "sheet",
        (960, 720),
        (228, 222, 205),
        (32, 38, 92),
        (0.3, 0.2, 0.5),
        (-0.1, 0.5, 1.1, 1.1),
        tilt=0.05,
    ),
    Scene(
        "lined",
        (720, 1280),
        (240, 240, 236),
        (24, 24, 30),
        (0.25, 0.6, 0.45),
        (0.45, -0.1, 1.1, 1.1),
        (52, False),
        shade=0.55,
        tilt=-0.12,
    ),
    Scene(
        "squared",
        (1200, 900),
        (236, 238, 240),
        (96, 96, 104),
        (0.5, 0.3, 0.42),
        (-0.1, 0.35, 1.1, 0.62),
        (40, True),
        thin=True,
    ),
    Scene(
        "table",
        (1024, 1024),
        (232, 228, 220),
        (20, 60, 30),
        (0.36, 0.32, 0.34),
        (-0.1, -0.1, 1.1, 0.45),
        table=True,
        tilt=0.15,
    ),
    Scene(
        "chalk",
        (1100, 800),
        (38, 62, 48),
        (226, 228, 214),
        (0.5, 0.15, 0.6),
        (-0.1, 0.55, 0.6, 1.1),
        shade=0.2,
    ),
)


def photographed(
    scene: Scene, digit: NDArray[np.uint8], label: int, random: np.random.Generator
) -> Photograph:
    """digit: (784,), white on black."""
    width, height = scene.size
    side = round(min(width, height) * scene.at[2])
    left, top = (round(min(width, height) * place) for place in scene.at[:2])
    stroke = Image.fromarray(digit.reshape(28, 28)).resize((side, side), Image.Resampling.BICUBIC)
    faintest = 120 if scene.thin else 70
    ink = np.clip((np.asarray(stroke, np.float64) - faintest) / 60, 0, 1)
    ink = np.asarray(
        Image.fromarray((255 * ink).astype(np.uint8)).filter(ImageFilter.GaussianBlur(side / 200))
    )
    sheet = Image.new("RGB", scene.size, scene.paper)
    draw = ImageDraw.Draw(sheet)
    if scene.ruled is not None:
        gap, squares = scene.ruled
        for y in range(gap, height, gap):
            draw.line((0, y, width, y), (170, 190, 222), 2)
        if squares:
            for x in range(gap, width, gap):
                draw.line((x, 0, x, height), (170, 190, 222), 2)
    grain = np.clip(ink / 255 * random.normal(0.95, 0.06, ink.shape), 0, 1)
    sheet.paste(scene.ink, (left, top), Image.fromarray((255 * grain).astype(np.uint8)))
    picture = _seen(sheet, scene)
    light = 1 - scene.shade * (
        np.arange(width)[None] / width * 0.7 + np.arange(height)[:, None] / height * 0.3
    )
    values = np.asarray(picture, np.float64) * light[..., None] + random.normal(
        0, 4, (height, width, 1)
    )
    picture = Image.fromarray(np.clip(values, 0, 255).astype(np.uint8)).filter(
        ImageFilter.GaussianBlur(0.8)
    )
    hole = tuple(
        corner + side * part
        for corner, part in zip((left, top, left, top), scene.hole, strict=True)
    )
    return Photograph(f"digit-{scene.name}", picture, hole, label)  # type: ignore[arg-type]


def _seen(sheet: Image.Image, scene: Scene) -> Image.Image:
    """A sheet turned and in perspective, on a dark table where the scene has one."""
    width, height = sheet.size
    if scene.table:
        table = Image.new("RGB", sheet.size, (58, 40, 30))
        inner = (int(0.14 * width), int(0.1 * height), int(0.88 * width), int(0.9 * height))
        table.paste(sheet.crop(inner), inner)
        sheet = table
    cos, sin, far = np.cos(scene.tilt), np.sin(scene.tilt), 0.08 / height
    x, y = width / 2, height / 2
    # where each point of the photograph is on the sheet: turned about the middle, the upper end
    # farther away
    seen = (cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y, 0.0, far)
    beside = (58, 40, 30) if scene.table else scene.paper
    return sheet.transform(
        sheet.size, Image.Transform.PERSPECTIVE, seen, Image.Resampling.BICUBIC, fillcolor=beside
    )


def given_pictures(files: list[Path]) -> list[Photograph]:
    """Pictures with a hole in the middle."""
    found = []
    for file in files:
        picture = Image.open(file).convert("RGB")
        x, y = picture.width / 3, picture.height / 3
        found.append(Photograph(file.stem, picture, (x, y, 2 * x, 2 * y)))
    return found


def in_colour(images: NDArray[np.uint8]) -> list[Photograph]:
    """images: (3, 3072)."""
    found = []
    frames = (
        ("landscape", (512, 384), (0.4, 0.3, 0.6, 0.6)),
        ("portrait", (384, 640), (0.2, 0.85, 0.7, 1.0)),
        ("panorama", (1200, 400), (0.88, 0.25, 1.0, 0.75)),
    )
    for image, (name, size, hole) in zip(images, frames, strict=True):
        middle = Image.fromarray(image.reshape(32, 32, 3)).resize(
            (min(size),) * 2, Image.Resampling.LANCZOS
        )
        margin = (size[0] - min(size)) // 2, (size[1] - min(size)) // 2
        around = (
            (margin[1], size[1] - min(size) - margin[1]),
            (margin[0], size[0] - min(size) - margin[0]),
            (0, 0),
        )
        picture = Image.fromarray(np.pad(np.asarray(middle), around, mode="symmetric"))
        box = tuple(part * length for part, length in zip(hole, size + size, strict=True))
        found.append(Photograph(f"colour-{name}", picture, box))  # type: ignore[arg-type]
    return found


def masked(photograph: Photograph) -> bytes:
    """A PNG, transparent where something is to be drawn."""
    alpha = Image.new("L", photograph.picture.size, 255)
    ImageDraw.Draw(alpha).rectangle(tuple(round(side) for side in photograph.hole), fill=0)  # type: ignore[arg-type]
    buffer = io.BytesIO()
    Image.merge("LA", (Image.new("L", alpha.size), alpha)).save(buffer, "PNG")
    return buffer.getvalue()


def tried(
    http: httpx.Client, model: str, photograph: Photograph, out: Path
) -> tuple[list[Image.Image], list[bytes]]:
    """Ask for completions, keep and tell what came back: the pictures of one line, and the model's
    own completions.
    """
    buffer = io.BytesIO()
    photograph.picture.save(buffer, "JPEG", quality=82)
    files = {
        "image": (f"{photograph.name}.jpg", buffer.getvalue()),
        "mask": ("mask.png", masked(photograph)),
    }
    fields = {"model": model, "n": WAYS, "candidates": CANDIDATES, "seed": 1}
    if photograph.label is not None:
        fields["prepare"] = "mnist"
    (out / f"{photograph.name}.jpg").write_bytes(files["image"][1])
    (out / f"{photograph.name}-mask.png").write_bytes(files["mask"][1])
    answers = [
        http.post("/v1/images/edits", data=fields | more, files=files)
        for more in ({}, {"lay_back": "true"})
    ]
    if answers[0].status_code != 200:
        print(
            f"{photograph.name}: {answers[0].status_code} {answers[0].json()['error']['message']}",
            flush=True,
        )
        return [photograph.picture], []
    own, laid = map(pictures_of, answers)
    told, seen, inverted = answers[0].json(), own[0], ""
    if told["prepared"]:
        seen = base64.b64decode(told["prepared"]["b64_json"])
        inverted = f", inverted {told['prepared']['inverted']}"
    (out / f"{photograph.name}-seen.png").write_bytes(seen)
    for way, png in enumerate(laid, 1):
        (out / f"{photograph.name}-laid-{way}.png").write_bytes(png)
    facts = ["conditioning", "known", "crop", "warnings"]
    sure = " ".join(f"{item['confidence']:.2f}" for item in told["data"] if "confidence" in item)
    print(
        f"{photograph.name}: "
        + ", ".join(f"{fact} {told[fact]}" for fact in facts)
        + f"{inverted}, confidence {sure}",
        flush=True,
    )
    holed = opened(files["image"][1]).convert("RGB")
    known = opened(files["mask"][1]).getchannel("A")
    holed.paste(HOLE, mask=known.point(lambda value: 255 - value))
    model_view = opened(seen).convert("RGB")
    if told["prepared"]:
        model_view = Image.new("RGB", (28, 28), HOLE)
        model_view.paste(opened(seen).convert("RGB"), mask=opened(seen).getchannel("A"))
    whole = [opened(png).convert("RGB") for png in laid]
    return [photograph.picture, holed, model_view, *whole], own


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


def pictures_of(answer: httpx.Response) -> list[bytes]:
    return [base64.b64decode(item["b64_json"]) for item in answer.json()["data"]]


def sheet(lines: list[list[Image.Image]], side: int = 220) -> Image.Image:
    whole = Image.new("RGB", ((side + 4) * max(map(len, lines)), (side + 4) * len(lines)), "white")
    for row, pictures in enumerate(lines):
        for column, picture in enumerate(pictures):
            scale = side / max(picture.size)
            size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
            way = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
            small = picture.resize(size, way)
            whole.paste(small, (column * (side + 4), row * (side + 4)))
    return whole


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--digits", type=Path, required=True, help="folder of MNIST")
    parser.add_argument(
        "--colours", type=Path, help="folder of CIFAR-10; not needed with --pictures"
    )
    parser.add_argument(
        "--models",
        default="mnist-conditional,cifar10-conditional",
        help="of digits, and of colours",
    )
    parser.add_argument(
        "--checkpoints", type=Path, default=ROOT / "checkpoints", help="folder of the models"
    )
    parser.add_argument(
        "--pictures", default="", help="files to use instead of CIFAR-10's, comma-separated"
    )
    parser.add_argument("--no-judge", action="store_true", help="do not train the CNN")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "photographs")
    given = parser.parse_args()
    of_digits, of_colours = given.models.split(",")
    test = datasets.load(given.digits, "test", PRESETS["mnist-small"])
    judge = None if given.no_judge else trained_judge(given.digits)
    random, photographs = np.random.default_rng(7), []
    for place, (scene, label) in enumerate(zip(SCENES, (2, 5, 8, 3, 4), strict=True)):
        index = np.flatnonzero(test.labels == label)[place]
        photographs.append(photographed(scene, test.images[index], label, random))
    files = [Path(name) for name in given.pictures.split(",") if name]
    config = checkpoint.named(of_colours, given.checkpoints).net.config
    if files:
        in_colours = given_pictures(files)
    else:
        in_colours = in_colour(datasets.load(given.colours, "test", config).images[[1, 7, 13]])
    given.out.mkdir(parents=True, exist_ok=True)
    with serving(given.checkpoints, "--models", given.models) as server, server.client() as http:
        lines = []
        for photograph in photographs:
            pictures, own = tried(http, of_digits, photograph, given.out)
            lines.append(pictures)
            if own and judge is not None:
                flat = [np.asarray(opened(png)).reshape(-1) for png in own]
                classes, _ = judged(judge, np.stack(flat))
                print(f"    a {photograph.label}; the CNN sees {classes.tolist()}", flush=True)
        sheet(lines).save(given.out / "digits.png")
        lines = [tried(http, of_colours, photograph, given.out)[0] for photograph in in_colours]
        sheet(lines).save(given.out / "colours.png")


if __name__ == "__main__":
    main()
