"""How good a model's digits are, as a CNN sees them that is trained here on real MNIST.

    python -m tests.benchmarks.quality --data ../shared/data/mnist [--models mnist-small,...] [--out FILE.json]

Labels: images of every class; how many the CNN gives the class that was asked for. Unconditional images: how many it
is sure of (a probability above 0.9), beside real test images. Completions of test images, by what is hidden: how many
keep the class of the original, and how many it is sure of; and over 16 completions of one image, the entropy of
their classes in bits. The CNN is kept in build/ with its accuracy, and trained again where that is gone.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.server.engine.batch import Batcher
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.decoder import ImageSpec
from linpix.server.engine.messages import Submission
from linpix.training import datasets
from tests.server.conftest import ROOT

SIDE, SURE, WAYS = 28, 0.9, 16
Images = NDArray[np.uint8]  # (N, 784)


class Judge(nn.Module):
    """Two convolutions and two layers: logits of the ten digits, (B, 10), of images (B, 1, 28, 28) in 0..1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Dropout(0.25), nn.Flatten(), nn.Linear(1600, 128), nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, 10))

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


def trained_judge(data: Path, epochs: int = 6) -> Judge:
    """From build/judge.pt, or trained in some minutes: images shifted by up to two pixels, a falling learning rate."""
    kept, judge = ROOT / "build" / "judge.pt", Judge()
    if kept.is_file():
        judge.load_state_dict(torch.load(kept, weights_only=True))
        return judge.eval()
    torch.manual_seed(0)
    train = datasets.load(data, "train", PRESETS["mnist-small"])
    images, labels = pictures(train.images), torch.from_numpy(train.labels).long()
    steps, batch = epochs * len(images) // 128, 128
    optimizer = torch.optim.AdamW(judge.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in tqdm(range(steps), unit="step", desc="judge"):
        chosen = torch.randint(len(images), (batch,))
        y, x = (int(shift) for shift in torch.randint(5, (2,)))
        shifted = F.pad(images[chosen], (2, 2, 2, 2))[..., y:y + SIDE, x:x + SIDE]
        optimizer.zero_grad()
        F.cross_entropy(judge(shifted), labels[chosen]).backward()
        optimizer.step()
        schedule.step()
    kept.parent.mkdir(exist_ok=True)
    torch.save(judge.state_dict(), kept)
    return judge.eval()


def hidden(count: int) -> dict[str, NDArray[np.bool_]]:
    """What is hidden of each image, (count, 784), by name."""
    random = np.random.default_rng(0)
    square = np.zeros((5, SIDE, SIDE), np.bool_)
    square[0, :14], square[1, :, :14], square[2, 7:21, 7:21], square[3, 14:] = True, True, True, True
    fixed = dict(zip(("upper half", "left half", "centre 14 x 14", "lower half"), square[:4].reshape(4, 1, -1),
                     strict=True))
    return {name: mask.repeat(count, 0) for name, mask in fixed.items()} | {
        f"random {share:.0%}": random.random((count, SIDE**2)) < share for share in (0.5, 0.85)}


def drawn(source: checkpoint.Checkpoint, specs: list[ImageSpec]) -> Images:
    """One image per spec, each as its own request."""
    batcher, images = Batcher(new_decoder(source, 64)), {}
    for index, spec in enumerate(specs):
        batcher.submit(Submission(str(index), [spec]))
    with tqdm(total=len(specs), unit="image") as bar:
        while batcher.busy:
            report = batcher.run_quantum()
            images |= {int(image.request): image.canvas for image in report.finished}
            bar.update(len(report.finished))
    return np.stack([images[index] for index in range(len(specs))])


def measured(source: checkpoint.Checkpoint, judge: Judge, originals: Images, labels: NDArray[np.int64]
             ) -> dict[str, dict[str, float]]:
    count, found = len(originals), {}
    asked = np.arange(count) % 10
    of, sure = judged(judge, drawn(source, [ImageSpec(seed=i, label=int(c)) for i, c in enumerate(asked)]))
    found["labels"] = {"kept": float((of == asked).mean()), "sure": float((sure > SURE).mean()),
                       "worst class": float(min((of == asked)[asked == c].mean() for c in range(10)))}
    _, sure = judged(judge, drawn(source, [ImageSpec(seed=10**6 + i) for i in range(count)]))
    found["unconditional"] = {"sure": float((sure > SURE).mean())}
    for name, masks in hidden(count).items():
        specs = [ImageSpec(seed=i, canvas=np.where(mask, 0, image).astype(np.uint8), known=~mask)
                 for i, (mask, image) in enumerate(zip(masks, originals, strict=True))]
        of, sure = judged(judge, drawn(source, specs))
        ways = [ImageSpec(seed=2 * 10**6 + way, canvas=spec.canvas, known=spec.known)
                for spec in specs[:count // 20] for way in range(WAYS)]
        classes = np.stack([np.bincount(part, minlength=10) for part in
                            judged(judge, drawn(source, ways))[0].reshape(-1, WAYS)]) / WAYS
        entropy = -(classes * np.log2(np.where(classes > 0, classes, 1))).sum(-1).mean()
        found[name] = {"kept": float((of == labels).mean()), "sure": float((sure > SURE).mean()),
                       "entropy": float(entropy)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST")
    parser.add_argument("--models", default="mnist-small", help="names or folders of checkpoints, comma-separated")
    parser.add_argument("--count", type=int, default=1000, help="images for each line")
    parser.add_argument("--out", type=Path, help="a file for the figures, JSON")
    given = parser.parse_args()
    judge, test = trained_judge(given.data), datasets.load(given.data, "test", PRESETS["mnist-small"])
    of, sure = judged(judge, test.images)
    result: dict[str, object] = {"judge": {"accuracy": float((of == test.labels).mean()),
                                           "sure of test images": float((sure > SURE).mean())}}
    print(json.dumps(result["judge"]))
    for name in given.models.split(","):
        source = checkpoint.read(checkpoint.find(name, None))
        found = measured(source, judge, test.images[:given.count], test.labels[:given.count].astype(np.int64))
        result[name] = found
        print(f"\n{name}\n" + "\n".join(
            f"{line:16}" + "".join(f"  {what} {value:.3f}" for what, value in figures.items())
            for line, figures in found.items()))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
