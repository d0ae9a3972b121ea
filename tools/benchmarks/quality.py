"""How good a model's images and completions are, over HTTP: digits by a CNN that is trained here on
real MNIST, other pictures by what needs no judge.

    python -m tools.benchmarks.quality --data DIR [--models mnist-small,mnist-conditional] [--count
    500]
                                       [--url http://127.0.0.1:8000] [--checkpoints DIR] [--sheets
                                       docs/completions]

Digits. Labels: images of every class; how many the CNN gives the class that was asked for.
Unconditional images: how many it is sure of (a probability above 0.9). Completions of test images,
by what is hidden: how many keep the class of the original, how many do by the prefix only
(everything after the first hole is hidden too), how many the CNN is sure of, and over 16
completions of one picture the entropy of their classes in bits. The same of digits that are drawn
with the page's pen (strokes.py), 8 completions each, as they are and moved to the middle. Of all
images, how many are in more than one piece, and how many have specks. And of few pictures the nats
of what is hidden, given all known pixels, and given only earlier pixels, hidden ones too. The CNN
is kept in build/, and trained again where that is gone.

Models of other pictures (cifar10-conditional), by what is hidden, in grey levels a sub-pixel: the
error of a completion, its mean distance from the original where that is hidden; the same by the
prefix only, and of two completions from each other; the seam, the mean step across the border of
the hole, beside that of the original. And bits/dim of what is hidden, of few pictures.

--sheets writes a contact sheet for each mask, of the last model. Without --url a server is started.
All models have pictures of one size.
"""

import contextlib
import os
from itertools import product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.model.likelihood import Scoring
from linpix.model.transformer import Transformer
from linpix.training import datasets
from linpix.training.look import look_of
from tools.benchmarks.occlusion import (
    DIGITS,
    Asked,
    Images,
    error,
    from_first_hole_on,
    masks,
    seam,
    write_sheets,
)
from tools.benchmarks.strokes import centred, pen_digits
from tools.harness.arguments import new_parser
from tools.harness.commands import ROOT
from tools.harness.servers import serving

SIDE, SURE, WAYS, FEW, EACH = 28, 0.9, 16, 50, 8


class Judge(nn.Module):
    """Two convolutions and two layers: logits of the ten digits, (B, 10), of images (B, 1, 28, 28)
    in 0..1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1600, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def pictures(images: Images) -> Tensor:
    return torch.from_numpy(images).view(-1, 1, SIDE, SIDE) / 255


@torch.inference_mode()
def judged(judge: Judge, images: Images) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The class of each image, and its probability."""
    logits = torch.cat([judge(part) for part in pictures(images).split(500)])
    sure, classes = logits.softmax(-1).max(-1)
    return classes.numpy(), sure.numpy()


def trained_judge(data: Path, epochs: int = 2) -> Judge:
    """From build/, or trained, in half a minute an epoch: images shifted by a pixel at most, one
    cycle of the rate.
    """
    kept, judge = ROOT / "build" / f"judge-{epochs}.pt", Judge()
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
            shifted = F.pad(images[chosen], (1, 1, 1, 1))[..., y : y + SIDE, x : x + SIDE]
            optimizer.zero_grad()
            F.cross_entropy(judge(shifted), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
    kept.parent.mkdir(exist_ok=True)
    new = kept.with_suffix(f".{os.getpid()}")
    torch.save(judge.state_dict(), new)
    new.replace(kept)  # whole, whoever else trains one
    return judge.eval()


Figures = dict[str, dict[str, float]]  # by what was asked, and what was counted


def seen(
    judge: Judge, images: Images, classes: NDArray[np.int64] | None = None
) -> dict[str, float]:
    """Shares of images: of these classes, and all others that need no more than the images."""
    of, sure = judged(judge, images)
    look = look_of(images, DIGITS, 0)
    kept = {} if classes is None else {"kept": float((of == classes).mean())}
    return kept | {
        "sure": float((sure > SURE).mean()),
        "pieces": look.pieces,
        "specks": look.specks,
    }


def measured(asked: Asked, judge: Judge, originals: Images, labels: NDArray[np.int64]) -> Figures:
    """labels: (N,), the classes of the originals."""
    count, found = len(originals), Figures()
    classes = np.arange(count) % 10
    found["a class asked for"] = seen(judge, asked.drawn(classes.tolist()), classes)
    found["no class asked for"] = seen(judge, asked.drawn([None] * count, seed=10**6))
    few = max(1, count // 20)
    for name, hidden in masks(count).items():
        by_prefix, _ = judged(judge, asked.completed(originals, from_first_hole_on(hidden)))
        drawn = asked.completed(originals[:few], hidden[:few], WAYS, 2 * 10**6)
        ways, _ = judged(judge, drawn)
        share = np.stack([np.bincount(of, minlength=10) for of in ways.reshape(-1, WAYS)]) / WAYS
        entropy = -(share * np.log2(np.where(share > 0, share, 1))).sum(-1).mean()
        found[f"completion, {name} hidden"] = seen(
            judge, asked.completed(originals, hidden), labels
        ) | {"prefix kept": float((by_prefix == labels).mean()), "entropy": float(entropy)}
    drawn, classes = pen_digits()
    lower = masks(len(drawn))["lower half"]
    for name, originals in (("pen strokes", drawn), ("pen strokes, centred", centred(drawn))):
        found[f"{name}, lower half hidden"] = seen(
            judge, asked.completed(originals, lower, EACH), classes.repeat(EACH)
        )
    return found


def nats(net: Transformer, originals: Images, hidden: NDArray[np.bool_]) -> dict[str, float]:
    """Of the hidden part of an image, of unknown class: the mean over images. hidden: (N, T)."""
    found: dict[str, list[float]] = {"earlier nats": [], "nats": []}
    for image, part in zip(originals, hidden, strict=True):
        found["earlier nats"].append(-Scoring(net, image).complete().mixed[part].sum())
        if net.config.patch:
            found["nats"].append(-Scoring(net, image, ~part).complete().mixed.sum())
    return {name: float(np.mean(each)) for name, each in found.items() if each}


def measured_without_judge(asked: Asked, originals: Images) -> dict[str, dict[str, float]]:
    """By what is hidden."""
    found, few = Figures(), max(1, len(originals) // 20)
    for name, hidden in masks(len(originals), asked.config).items():
        ways = asked.completed(originals, hidden, 2).reshape(len(originals), 2, -1)
        by_prefix = asked.completed(originals, from_first_hole_on(hidden))
        found[f"completion, {name} hidden"] = {
            "error": error(originals, ways[:, 0], hidden).mean(),
            "prefix error": error(originals, by_prefix, hidden).mean(),
            "apart": error(ways[:, 0], ways[:, 1], hidden).mean(),
            "seam": seam(ways[:, 0], hidden, asked.config).mean(),
            "own seam": seam(originals, hidden, asked.config).mean(),
            "bits": asked.bits_per_dim(originals[:few], hidden[:few]),
        }
    return found


def table(found: dict[str, Figures]) -> str:
    """Markdown: a line for each thing asked, a column for each count and model."""
    whats = {
        "kept": "class kept",
        "prefix kept": "by prefix only",
        "sure": "sure",
        "pieces": "in pieces",
        "specks": "with specks",
        "entropy": "entropy",
        "error": "error",
        "prefix error": "error by prefix only",
        "apart": "two completions apart",
        "seam": "seam",
        "own seam": "seam of the originals",
        "bits": "bits/dim",
        "nats": "nats",
        "earlier nats": "nats by earlier",
    }
    columns = []
    for what, (model, figures) in product(whats, found.items()):
        if any(what in line for line in figures.values()):
            columns.append((what, model))
    rows = [
        "| | " + " | ".join(f"{whats[what]}: `{model}`" for what, model in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for name in next(iter(found.values())):
        cells = [found[model][name].get(what) for what, model in columns]
        rows.append(f"| {name} | {' | '.join(map(printed, cells))} |")
    return "\n".join(rows)


def printed(cell: float | None) -> str:
    if cell is None:
        return ""
    return f"{cell:.2f}" if abs(cell) < 10 else f"{cell:.1f}"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the models' data set")
    parser.add_argument(
        "--models", default="mnist-small,mnist-conditional", help="names, comma-separated"
    )
    parser.add_argument("--count", type=int, default=500, help="images for each figure")
    parser.add_argument("--url", help="of a server that has these models; default: one is started")
    parser.add_argument(
        "--checkpoints", type=Path, default=ROOT / "checkpoints", help="folder of the models"
    )
    parser.add_argument(
        "--sheets", type=Path, help="folder for contact sheets of the last model's completions"
    )
    given = parser.parse_args()
    models = given.models.split(",")
    config = checkpoint.named(models[-1], given.checkpoints).net.config
    test = datasets.load(given.data, "test", config)
    images, labels, judge = test.images[: given.count], test.labels.astype(np.int64), None
    if (config.height, config.width, config.channels) == (SIDE, SIDE, 1):
        judge = trained_judge(given.data)
        of, sure = judged(judge, test.images)
        print(
            f"the CNN: {(of == labels).mean():.2%} of the test set right, sure of"
            f" {(sure > SURE).mean():.1%}",
            flush=True,
        )
    with contextlib.ExitStack() as stack:
        url = (
            given.url
            or stack.enter_context(serving(given.checkpoints, f"--models {given.models}")).url
        )
        found = {}
        for model in models:
            asked = Asked(url, model, config)
            if judge is None:
                found[model] = measured_without_judge(asked, images)
            else:
                found[model] = measured(asked, judge, images, labels[: given.count])
        for name, hidden in masks(len(images[:FEW])).items() if judge is not None else ():
            for model, figures in found.items():
                net = checkpoint.named(model, given.checkpoints).net
                figures[f"completion, {name} hidden"] |= nats(net, images[:FEW], hidden)
        print(table(found))
        if given.sheets is not None:
            write_sheets(asked, test.images, labels, given.sheets)


if __name__ == "__main__":
    main()
