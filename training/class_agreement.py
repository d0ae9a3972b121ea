"""Class agreement: how often a small CNN, trained on the same pictures, recognises the class of a
drawn image.
"""

import hashlib
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from linpix.model.attempts import NEXT_ATTEMPT, Recognised
from linpix.model.config import ModelConfig
from linpix.model.likelihood import class_log_probs_of
from linpix.model.packing import Packed
from linpix.model.palette import pictures_of
from linpix.model.pieces import torn, whole
from linpix.model.transformer import Transformer

from .datasets import Dataset
from .export import drawn
from .files import put
from .look import Look, look_of
from .readers import Labels, Pixels

STEPS, BATCH, RATE = 940, 128, 4e-3  # two epochs of MNIST; half a minute on two cores
TOGETHER = 64  # images drawn at a time
VERSION = 1  # of the training: another one trains other judges
QUIET: Any = {"disable": None, "leave": False}  # bars are only for terminals
SURE = 0.9  # least probability of a class that the judge is sure of


@dataclass(frozen=True, slots=True)
class Agreement:
    # share of the drawn images that the judge assigns to the requested class
    class_agreement: float
    interval: float  # half the width of its 95 % interval
    drawn: int  # number of images, equally many per class to within one
    attempts: float  # mean number of attempts at an image
    judge: float  # share of the test images that the judge assigns to their class, its own accuracy
    worst_class: float  # the share that is right of the images of the class with the smallest one
    sure: float  # share of the drawn images of which the judge is sure
    judge_sure: float  # share of the test images of which it is
    look: Look | None  # of the drawn images; None in colour
    real_look: Look | None  # of the test images


class Judge(nn.Module):
    """A CNN of two convolutions and two linear layers, from images to logits of the classes, (B,
    classes).
    """

    def __init__(self, config: ModelConfig, classes: int) -> None:
        super().__init__()
        features = 64 * (config.height // 4) * (config.width // 4)
        channels = 4 if config.palette else config.channels
        self.config = config
        self.shape = config.height, config.width, config.channels
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(features, 128),
            nn.ReLU(),
            nn.Linear(128, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """images: (B, T) uint8."""
        shown = torch.from_numpy(pictures_of(images.numpy(), self.config))
        logits: Tensor = self.layers(shown.permute(0, 3, 1, 2) / 255)
        return logits

    @torch.inference_mode()
    def probabilities(self, images: Pixels) -> NDArray[np.float32]:
        """Of the classes, (count, classes)."""
        parts = torch.split(torch.from_numpy(images), 500)
        found: NDArray[np.float32] = torch.cat([self(part) for part in parts]).softmax(-1).numpy()
        return found


def trained(data: Dataset, config: ModelConfig, steps: int = STEPS) -> Judge:
    """Train a judge on labelled pictures, each batch shifted by at most one pixel, with one cycle
    of the learning rate.

    It is kept in the user's cache, for the same pictures. Does not change the state of torch's
    generator.
    """
    generator = np.random.default_rng(0)
    kept = _place(data, config, steps)
    with torch.random.fork_rng(), torch.device("cpu"):
        # of a missing or damaged file
        with suppress(OSError, RuntimeError, SafetensorError):
            judge = Judge(config, len(data.classes))
            judge.load_state_dict(load_file(kept))
            return judge.eval()
        torch.manual_seed(0)
        judge = Judge(config, len(data.classes))
        optimizer = torch.optim.AdamW(judge.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
        size, shape = min(BATCH, len(data.images)), judge.shape
        for _ in tqdm(range(steps), "training the CNN that judges", unit="step", **QUIET):
            chosen = generator.choice(len(data.images), size, replace=False)
            pictures, labels = data.images[chosen].reshape(-1, *shape), data.labels[chosen]
            y, x = generator.integers(-1, 2, 2)
            # pixels shifted out come in at the other side, where pictures seldom show their class
            shifted = np.roll(pictures, (y, x), (1, 2)).reshape(size, -1)
            optimizer.zero_grad()
            scores = judge(torch.from_numpy(shifted))
            F.cross_entropy(scores, torch.from_numpy(labels)).backward()
            optimizer.step()
            schedule.step()
    with suppress(OSError):  # a cache that cannot be written is no error
        kept.parent.mkdir(parents=True, exist_ok=True)
        put(kept, save(judge.state_dict()))
    return judge.eval()


def _place(data: Dataset, config: ModelConfig, steps: int) -> Path:
    """The file of the judge that is trained so on these pictures."""
    found = hashlib.sha256(repr((VERSION, steps, config.image_shape, data.classes)).encode())
    if config.palette:
        found.update(repr(config.palette).encode())
    for values in (data.images, data.labels):
        found.update(np.ascontiguousarray(values).data)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "linpix" / f"judge-{found.hexdigest()[:32]}.safetensors"


def agreement(
    net: Transformer,
    judge: Judge,
    test: Dataset,
    *,
    count: int,
    temperature: float,
    attempts: int = 1,
    recognised: float = 0,
    packed: Packed | None = None,
) -> Agreement:
    """Measure the agreement of `count` images with seeds 0, 1, ..., cycling through the classes.

    attempts, recognised: most attempts at an image, and the probability that is enough, as
                          model/attempts.py says · packed: draw with the compiled engine.
    """
    labels, config = np.arange(count) % net.config.classes, net.config
    ground = config.background
    if ground is None:
        ground = 255 if test.images.mean() > 127.5 else 0
    look = real = None
    if config.grey:
        real = look_of(test.images, config, ground, test.labels)
    images, made = _drawn(net, labels, temperature, attempts, recognised, packed, ground, real)
    if real is not None:
        look = look_of(images, config, ground, labels, real.divided)
    judged, of_tests = judge.probabilities(images), judge.probabilities(test.images)
    right = judged.argmax(1) == labels
    share = float(right.mean())
    return Agreement(
        round(share, 4),
        round(1.96 * math.sqrt(share * (1 - share) / count), 4),
        count,
        round(made / count, 2),
        _share(of_tests.argmax(1) == test.labels),
        min(_share(right[labels == label]) for label in np.unique(labels)),
        _share(judged.max(1) > SURE),
        _share(of_tests.max(1) > SURE),
        look,
        real,
    )


def _share(are: NDArray[np.bool_]) -> float:
    return round(float(are.mean()), 4)


def _drawn(
    net: Transformer,
    labels: Labels,
    temperature: float,
    attempts: int,
    recognised: float,
    packed: Packed | None,
    ground: int,
    real: Look | None,
) -> tuple[Pixels, int]:
    """Images of these labels, the best of all attempts at each, (count, T); and the number of all
    attempts.
    """
    seen = None if real is None else asdict(real)
    best: dict[int, tuple[Recognised, Pixels]] = {}
    todo, made = np.arange(len(labels)), 0
    for number in range(attempts):
        made += len(todo)
        firsts = range(0, len(todo), TOGETHER)
        for at in tqdm(firsts, "drawing", unit="image", unit_scale=TOGETHER, **QUIET):
            part = todo[at : at + TOGETHER]
            seeds = (part + NEXT_ATTEMPT * number).tolist()
            canvases = drawn(net, seeds, labels[part].tolist(), temperature, packed)
            several = np.zeros(len(part), np.bool_)
            if seen is not None:
                several = torn(canvases.reshape(-1, *net.config.image_shape[:2]), ground)
            for i, canvas, apart in zip(part.tolist(), canvases, several.tolist(), strict=True):
                label = int(labels[i])
                sure = class_log_probs_of(net, canvas)[label] if attempts > 1 else 0.0
                found = Recognised(label, sure, whole(seen, label) and apart, least=recognised)
                if i not in best or found.rank > best[i][0].rank:
                    best[i] = found, canvas
        todo = np.array([i for i in todo.tolist() if not best[i][0].accepted], np.int64)
    return np.stack([best[i][1] for i in range(len(labels))]), made
