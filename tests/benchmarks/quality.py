"""How good a model's digits are, asked for over HTTP and looked at by a CNN that is trained here on real MNIST.

    python -m tests.benchmarks.quality --data DIR [--models mnist-small,mnist-conditional] [--count 500]
                                       [--url http://127.0.0.1:8000] [--sheets docs/completions]

Labels: images of every class; how many the CNN gives the class that was asked for. Unconditional images: how many it
is sure of (a probability above 0.9). Completions of test images, by what is hidden: how many keep the class of the
original, how many do by the prefix only (everything after the first hole is hidden too), how many the CNN is sure of,
and over 16 completions of one picture the entropy of their classes in bits. --sheets writes a contact sheet for each
mask, of the last model. Without --url a server is started. The CNN is kept in build/, and trained again where that is
gone.
"""

import argparse
import base64
import contextlib
import io
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.nn import functional as F

from linpix.model.config import PRESETS
from linpix.training import datasets
from tests.server.conftest import ROOT, serving

SIDE, SURE, WAYS, IN_FLIGHT = 28, 0.9, 16, 64
HOLE = (64, 96, 176)         # the colour of what is hidden, on contact sheets
Images = NDArray[np.uint8]   # (N, 784)
Hidden = NDArray[np.bool_]   # (N, 784), or (784,)


class Judge(nn.Module):
    """Two convolutions and two layers: logits of the ten digits, (B, 10), of images (B, 1, 28, 28) in 0..1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1600, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def pictures(images: Images) -> Tensor:
    return torch.from_numpy(images).view(-1, 1, SIDE, SIDE) / 255


@torch.inference_mode()
def judged(judge: Judge, images: Images) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The class of each image, and its probability."""
    sure, classes = torch.cat([judge(part) for part in pictures(images).split(500)]).softmax(-1).max(-1)
    return classes.numpy(), sure.numpy()


def trained_judge(data: Path, epochs: int = 2) -> Judge:
    """From build/judge.pt, or trained in half a minute: images shifted by a pixel at most, one cycle of the rate."""
    kept, judge = ROOT / "build" / "judge.pt", Judge()
    if kept.is_file():
        judge.load_state_dict(torch.load(kept, weights_only=True))
        return judge.eval()
    train, batch, rate = datasets.load(data, "train", PRESETS["mnist-small"]), 128, 4e-3
    images, labels = pictures(train.images), torch.from_numpy(train.labels).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        judge = Judge()
        order = torch.cat([torch.randperm(len(images)) for _ in range(epochs)]).split(batch)
        optimizer = torch.optim.AdamW(judge.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=len(order))
        for chosen in order:
            y, x = torch.randint(3, (2,)).tolist()
            shifted = F.pad(images[chosen], (1, 1, 1, 1))[..., y:y + SIDE, x:x + SIDE]
            optimizer.zero_grad()
            F.cross_entropy(judge(shifted), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
    kept.parent.mkdir(exist_ok=True)
    torch.save(judge.state_dict(), new := kept.with_suffix(f".{os.getpid()}"))
    new.replace(kept)  # whole, whoever else trains one
    return judge.eval()


def masks(count: int) -> dict[str, Hidden]:
    """What is hidden of each image, (count, 784), by name."""
    random = np.random.default_rng(0)
    square = np.zeros((4, SIDE, SIDE), np.bool_)
    square[0, :14], square[1, :, :14], square[2, 7:21, 7:21], square[3, 14:] = True, True, True, True
    fixed = dict(zip(("upper half", "left half", "centre 14 x 14", "lower half"), square.reshape(4, 1, -1),
                     strict=True))
    return {name: mask.repeat(count, 0) for name, mask in fixed.items()} | {
        f"random {share:.0%}": random.random((count, SIDE**2)) < share for share in (0.5, 0.85)}


def from_first_hole_on(hidden: Hidden) -> Hidden:
    """The same, and everything after its first hole."""
    return np.maximum.accumulate(hidden, -1)


def upload(image: NDArray[np.uint8], hidden: Hidden) -> bytes:
    """A PNG of one picture (784,), transparent where it is hidden; what is beneath stays as it is."""
    alpha = np.where(hidden, 0, 255).astype(np.uint8)
    return png(Image.fromarray(np.stack([image, alpha], -1).reshape(SIDE, SIDE, 2), "LA"))


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def images_of(answer: httpx.Response) -> Images:
    answer.raise_for_status()
    return np.stack([np.asarray(Image.open(io.BytesIO(base64.b64decode(item["b64_json"])))).reshape(-1)
                     for item in answer.json()["data"]])


class Asked:
    """One model on a server, asked by many clients at once."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model

    def drawn(self, labels: list[int | None], seed: int = 0, candidates: int = 1) -> Images:
        """An image of each label, or of none; of more than one candidate each all, the best one first."""
        ranked = {"n": candidates, "candidates": candidates} if candidates > 1 else {}
        def one(http: httpx.Client, index: int) -> httpx.Response:
            label = {} if labels[index] is None else {"label": labels[index]}
            return http.post("/v1/images/generations",
                             json={"model": self.model, "seed": seed + candidates * index} | label | ranked)
        return self._all(one, len(labels), candidates)

    def completed(self, originals: Images, hidden: Hidden, n: int = 1, seed: int = 0, candidates: int | None = None,
                  particles: int = 0) -> Images:
        """n completions of each picture, (n * N, 784); of candidates, the best, the best one first; by so many
        particles each, by method smc."""
        chosen: dict[str, int | str] = {} if candidates is None else {"candidates": candidates}
        if particles:
            chosen = {"method": "smc", "particles": particles}
        def one(http: httpx.Client, index: int) -> httpx.Response:
            return http.post("/v1/images/edits", files={"image": upload(originals[index], hidden[index])},
                             data={"model": self.model, "n": n, "seed": seed + (candidates or n) * index} | chosen)
        return self._all(one, len(originals), candidates or n * max(1, particles))

    def _all(self, one: Callable[[httpx.Client, int], httpx.Response], count: int, n: int) -> Images:
        """n: images that each request has drawn."""
        clients = max(1, IN_FLIGHT // n)
        with httpx.Client(base_url=self.url, timeout=600, limits=httpx.Limits(max_connections=clients)) as http, \
                ThreadPoolExecutor(clients) as pool:
            return np.concatenate(list(pool.map(lambda index: images_of(one(http, index)), range(count))))


Figures = dict[str, dict[str, float]]  # by what was asked, and what was counted


def measured(asked: Asked, judge: Judge, originals: Images, labels: NDArray[np.int64]) -> Figures:
    """labels: (N,), the classes of the originals."""
    count, found = len(originals), Figures()
    classes = np.arange(count) % 10
    of, sure = judged(judge, asked.drawn(classes.tolist()))
    found["a class asked for"] = {"kept": float((of == classes).mean()), "sure": float((sure > SURE).mean())}
    _, sure = judged(judge, asked.drawn([None] * count, seed=10**6))
    found["no class asked for"] = {"sure": float((sure > SURE).mean())}
    few = max(1, count // 20)
    for name, hidden in masks(count).items():
        of, sure = judged(judge, asked.completed(originals, hidden))
        by_prefix, _ = judged(judge, asked.completed(originals, from_first_hole_on(hidden)))
        ways = judged(judge, asked.completed(originals[:few], hidden[:few], WAYS, 2 * 10**6))[0].reshape(-1, WAYS)
        share = np.stack([np.bincount(part, minlength=10) for part in ways]) / WAYS
        entropy = -(share * np.log2(np.where(share > 0, share, 1))).sum(-1).mean()
        found[f"completion, {name} hidden"] = {
            "kept": float((of == labels).mean()), "prefix kept": float((by_prefix == labels).mean()),
            "sure": float((sure > SURE).mean()), "entropy": float(entropy)}
    return found


def table(found: dict[str, Figures]) -> str:
    """Markdown: a line for each thing asked, a column for each count and model."""
    whats = {"kept": "class kept", "prefix kept": "by prefix only", "sure": "sure", "entropy": "entropy"}
    columns = [(what, model) for what in whats for model, figures in found.items()
               if any(what in line for line in figures.values())]
    rows = ["| | " + " | ".join(f"{whats[what]}: `{model}`" for what, model in columns) + " |",
            "|---" * (1 + len(columns)) + "|"]
    for name in next(iter(found.values())):
        cells = [found[model][name].get(what) for what, model in columns]
        rows.append(f"| {name} | " + " | ".join("" if cell is None else f"{cell:.2f}" for cell in cells) + " |")
    return "\n".join(rows)


def sheet(asked: Asked, originals: Images, hidden: Hidden) -> Image.Image:
    """Columns are pictures; rows the original, what is known of it (blue: hidden), and four completions of that; then
    what is known of it before the first hole, and four completions of that."""
    scale, gap, margin = 2, 4, 104
    rows: list[tuple[str, Images, Hidden]] = [("original", originals, np.zeros_like(hidden))]
    for known, holes in (("known", hidden), ("prefix only", from_first_hole_on(hidden))):
        ways = asked.completed(originals, holes, 4, 3 * 10**6).reshape(len(originals), 4, -1)
        rows += [(known, originals, holes), *((f"completion {way + 1}", ways[:, way], np.zeros_like(hidden))
                                              for way in range(4))]
    cell = SIDE * scale + gap
    whole = Image.new("RGB", (margin + cell * len(originals), cell * len(rows) + gap), "white")
    draw, font = ImageDraw.Draw(whole), ImageFont.load_default(14)
    for row, (name, images, holes) in enumerate(rows):
        top = gap + row * cell
        draw.text((gap, top + cell // 2), name, "black", font, "lm")
        for column, (image, hole) in enumerate(zip(images, holes, strict=True)):
            seen = np.where(hole[:, None], np.array(HOLE, np.uint8), image[:, None]).reshape(SIDE, SIDE, 3)
            whole.paste(Image.fromarray(seen.repeat(scale, 0).repeat(scale, 1)), (margin + column * cell, top))
    return whole.quantize(64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST")
    parser.add_argument("--models", default="mnist-small,mnist-conditional", help="names, comma-separated")
    parser.add_argument("--count", type=int, default=500, help="images for each figure")
    parser.add_argument("--url", help="of a server that has these models; default: one is started")
    parser.add_argument("--sheets", type=Path, help="folder for contact sheets of the last model's completions")
    given = parser.parse_args()
    models = given.models.split(",")
    judge, test = trained_judge(given.data), datasets.load(given.data, "test", PRESETS["mnist-small"])
    labels = test.labels.astype(np.int64)
    of, sure = judged(judge, test.images)
    print(f"the CNN: {(of == labels).mean():.2%} of the test set right, sure of {(sure > SURE).mean():.1%}", flush=True)
    with contextlib.ExitStack() as stack:
        url = given.url or stack.enter_context(serving(ROOT / "checkpoints", "--models", given.models)).url
        found = {name: measured(Asked(url, name), judge, test.images[:given.count], labels[:given.count])
                 for name in models}
        print(table(found))
        if given.sheets is not None:
            given.sheets.mkdir(parents=True, exist_ok=True)
            one_of_each = test.images[[int(np.argmax(labels == digit)) for digit in range(10)]]
            for name, hidden in masks(10).items():
                file = given.sheets / f"{re.sub(r'[^a-z0-9]+', '-', name).strip('-')}.png"
                sheet(Asked(url, models[-1]), one_of_each, hidden).save(file, optimize=True)


if __name__ == "__main__":
    main()
