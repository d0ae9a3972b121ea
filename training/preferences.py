"""Preferences: images that a model has drawn, and which of them it would accept.

A model that draws the class first draws an image again until it recognises it and it is in one
piece (model/attempts.py). Trained on preferences it needs fewer attempts: what it would accept
becomes more probable, and what it would refuse less, while real images are learnt as before. The
loss is that of binary classifier optimisation (Jung et al., 2024, arXiv 2404.04656), a form of
direct preference optimisation for single images instead of pairs. Its gradient fades as an image
moves, so refused images cannot lower it without end.

    python -m linpix.training.preferences MODEL FILE --images 40000

draws the images, each once; `linpix train --preferences FILE` then makes them half of each batch.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from linpix.model.attempts import Recognised
from linpix.model.checkpoint import Checkpoint, named
from linpix.model.config import ModelConfig
from linpix.model.likelihood import class_log_probs_of
from linpix.model.packing import pack

from .evaluate import decoded
from .files import put, undamaged
from .readers import Pixels

SHARPNESS = 0.3  # a change of so many nats, inverted, halves an image's gradient and more
WEIGHT = 1.5  # of a refused image, relative to a real one; all accepted ones weigh as much together
TOGETHER = 60  # images drawn at a time
FIRST_SEED = 5_000_000_000  # of the images; no request is likely to draw the same


class Preferences(NamedTuple):
    """Images of a model, each drawn with a class."""

    images: Tensor  # (N, T) uint8
    labels: Tensor  # (N,) int64
    nats: Tensor  # (N,): log-likelihood of each, given its class, when it was drawn
    accepted: Tensor  # (N,) bool

    @property
    def weights(self) -> Tensor:
        """(N,): of the accepted ones above 0, of the others below; both have the same sum."""
        share = float(self.accepted.double().mean())
        return torch.where(self.accepted, WEIGHT * (1 - share) / share, -WEIGHT).float()


class Preferred(NamedTuple):
    """What the loss needs to know of a batch that has images of preferences."""

    nats: Tensor  # (B,), as in Preferences
    weights: Tensor  # (B,), 0 for a real image

    def part(self, where: slice) -> "Preferred":
        """Of some of the images."""
        return Preferred(self.nats[where], self.weights[where])


def loss(log_likelihood: Tensor, preferred: Preferred) -> Tensor:
    """The loss of all images in nats, (): of real ones, their negative log-likelihood.

    log_likelihood: (B,) · Of others it is the loss of a classifier whose score is how much more
    probable an image is than when it was drawn, relative to their mean in the batch.
    """
    drawn = preferred.weights != 0
    change = torch.where(drawn, log_likelihood - preferred.nats, 0)
    shift = change.detach().sum() / drawn.sum().clamp(min=1)
    score = SHARPNESS * preferred.weights.sign() * (change - shift)
    # so scaled that the gradient of an image that has not moved is its weight
    classified = 2 / SHARPNESS * preferred.weights.abs() * F.softplus(-score)
    return torch.where(drawn, classified, -log_likelihood).sum()


def draw(found: Checkpoint, count: int) -> Preferences:
    """Draw so many images, once each, of all classes in turn. Raises ValueError if the model does
    not draw the class first.
    """
    net, parts = found.net, []
    if not net.config.class_first:
        raise ValueError(
            f"{found.name} does not recognise what it draws; give a model that draws the class"
            " first, such as mnist-conditional"
        )
    packed = pack(net, torch.float32)
    for first in tqdm(range(0, count, TOGETHER), "drawing", disable=None, unit_scale=TOGETHER):
        seeds = np.arange(first, min(first + TOGETHER, count))
        labels = seeds % net.config.classes
        canvas = torch.zeros(1 + len(seeds), net.config.subpixels, dtype=torch.uint8)
        nats = decoded(
            net,
            packed,
            canvas,
            torch.zeros_like(canvas, dtype=torch.bool),
            torch.ones(len(seeds)),
            log_probs=True,
            start=torch.tensor([net.start_index(label) for label in labels.tolist()]),
            seed=(FIRST_SEED + seeds).tolist(),
        ).sum(1)
        accepted = torch.tensor(_accepted(found, canvas[1:].numpy(), labels))
        parts.append(Preferences(canvas[1:], torch.from_numpy(labels), nats, accepted))
    return Preferences(*map(torch.cat, zip(*parts, strict=True)))


def _accepted(found: Checkpoint, images: Pixels, labels: NDArray[np.int64]) -> list[bool]:
    """Which of the images, (B, T), the model would not draw again."""
    torn = found.torn(images, np.zeros(images.shape, np.bool_), labels.tolist())
    accepted = []
    for image, label, apart in zip(images, labels.tolist(), torn, strict=True):
        log_prob = float(class_log_probs_of(found.net, image)[label])
        accepted.append(Recognised(label, log_prob, apart, least=found.recognised).accepted)
    return accepted


def write(path: Path, given: Preferences) -> None:
    put(path, save(given._asdict()))


def read(path: Path, config: ModelConfig) -> Preferences:
    """Raises ValueError if the file is damaged, has images of another kind of model, or has only
    accepted or only refused ones; OSError if it is not there.
    """
    raw = path.read_bytes()
    with undamaged(path, "make it again with python -m linpix.training.preferences"):
        found = Preferences(**load(raw))
    if found.images.shape[1] != config.subpixels or int(found.labels.max()) >= config.classes:
        raise ValueError(
            f"--preferences {path}: its images have {found.images.shape[1]} sub-pixels and"
            f" {int(found.labels.max()) + 1} classes, and those of this model"
            f" {config.subpixels} and {config.classes}; draw them with the model of --init"
        )
    if int(found.accepted.sum()) in (0, len(found.accepted)):
        raise ValueError(
            f"--preferences {path}: all of its images were accepted, or none; draw more of them"
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Draw images with a model and write which of them it would accept."
    )
    parser.add_argument("model", help="name of a model, or its checkpoint folder")
    parser.add_argument("file", type=Path, help="file to write")
    parser.add_argument("--images", type=int, default=40_000, help="default: 40000")
    parser.add_argument("--checkpoints", type=Path, help="folder of the models")
    given = parser.parse_args()
    try:
        made = draw(named(given.model, given.checkpoints), given.images)
        write(given.file, made)
    except (ValueError, OSError) as error:
        sys.exit(f"preferences: {error}")
    print(f"{int(made.accepted.sum()):,} of {len(made.accepted):,} images accepted")
