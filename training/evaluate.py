"""bits/dim of a model on images: the mean, and how sure it is."""

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from linpix.model import mixture
from linpix.model.attention.linear import RecurrentState
from linpix.model.config import bits_per_dim
from linpix.model.inputs import START
from linpix.model.likelihood import Scoring
from linpix.model.packing import Packed
from linpix.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Evaluation:
    bits_per_dim: float  # mean over images
    interval: float      # half the width of the mean's 95 % interval, images taken as independent
    images: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    accuracy: float  # share of images whose most probable class is the right one, all equally probable before
    interval: float  # half the width of its 95 % interval
    images: int
    seconds: float


def evaluate(net: Transformer, images: NDArray[np.uint8], *, labels: NDArray[np.int64] | None = None,
             packed: Packed | None = None, progress: bool = False) -> Evaluation:
    """bits/dim of images (count, T): in float32 by the parallel form, or step by step as packed.

    labels: see bits_of.
    """
    began = time.perf_counter()
    bits = (bits_of(net, images, labels=labels, progress=progress) if packed is None else
            stepped_bits_of(net, packed, images, progress=progress))
    return summary(bits, time.perf_counter() - began)


def accuracy(net: Transformer, images: NDArray[np.uint8], labels: NDArray[np.int64], *, progress: bool = False
             ) -> Accuracy:
    """How often the class under which an image (count, T) is most probable is its own."""
    began = time.perf_counter()
    classes = range(net.config.classes)
    right = [Scoring(net, image, labels=classes).complete().totals.argmax() == label
             for image, label in zip(tqdm(images, disable=not progress, desc="classes", unit="image"), labels,
                                     strict=True)]
    mean, interval = _mean(torch.tensor(right, dtype=torch.float64))
    return Accuracy(mean, interval, len(right), time.perf_counter() - began)


def summary(bits: Tensor, seconds: float) -> Evaluation:
    """Mean and interval of images' bits/dim (count,)."""
    return Evaluation(*_mean(bits), len(bits), seconds)


def _mean(values: Tensor) -> tuple[float, float]:
    """Of values (count,), and half the width of its 95 % interval."""
    interval = 1.96 * float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return float(values.mean()), interval


def bits_of(net: Transformer, images: NDArray[np.uint8], *, labels: NDArray[np.int64] | None = None, batch: int = 16,
            progress: bool = False) -> Tensor:
    """Bits/dim of each image over all its T sub-pixels: (count, T) uint8 -> (count,) float64.

    A model that draws the class first is asked under each class. labels: (count,), its image's class alone: the bits of
    image and class together, which are more, by far less than 0.001 where the class can be seen, for a tenth of the
    time.
    """
    parts = []
    for at in tqdm(range(0, len(images), batch), disable=not progress, desc="evaluate", unit="batch"):
        part = torch.from_numpy(images[at:at + batch].copy()).to(net.device)
        starts = _starts(net, len(part)) if labels is None else [START + 1 + torch.from_numpy(labels[at:at + batch])]
        parts.append(_mixed(net, [_nats(net, part, start) for start in starts]))
    return torch.cat(parts).cpu() * bits_per_dim(1.0, net.config)


def _starts(net: Transformer, count: int) -> list[Tensor]:
    """The start indices (count,) that images may have whose class is unknown."""
    every = range(START + 1, START + 1 + net.config.classes) if net.config.class_first else [START]
    return [torch.full((count,), start) for start in every]


def _mixed(net: Transformer, nats: list[Tensor]) -> Tensor:
    """Nats (B,) of images from those under the starts that they may have, all being equally probable."""
    classes = net.config.classes if net.config.class_first else 1
    return math.log(classes) - torch.stack(nats).neg().logsumexp(0)


@torch.inference_mode()
def _nats(net: Transformer, images: Tensor, start: Tensor) -> Tensor:
    nats = -mixture.log_likelihood(net(images, start.to(net.device)), images)
    if net.config.first_marginal:  # no start token: sub-pixel 0 is coded by the training set's marginal
        marginal = torch.tensor(net.config.first_marginal)
        nats[:, 0] = -torch.log(marginal[images[:, 0].long()])
    return nats.double().sum(1)


def stepped_bits_of(net: Transformer, packed: Packed, images: NDArray[np.uint8], *, batch: int = 64,
                    progress: bool = False) -> Tensor:
    """The same by the compiled engine, with every sub-pixel given: what it would have cost to draw these images."""
    parts = []
    for at in tqdm(range(0, len(images), batch), disable=not progress, desc="evaluate", unit="batch"):
        canvas = torch.from_numpy(np.concatenate([images[:1], images[at:at + batch]]))  # slot 0 is for padding
        starts = _starts(net, len(canvas) - 1)
        parts.append(_mixed(net, [_stepped_nats(net, packed, canvas, start) for start in starts]))
    return torch.cat(parts) * bits_per_dim(1.0, net.config)


def _stepped_nats(net: Transformer, packed: Packed, canvas: Tensor, start: Tensor) -> Tensor:
    """canvas: (1 + B, T), of slot 0 and those of the images · start: (B,) · returns (B,) float64."""
    rows, state = len(start), RecurrentState(net.config, len(start))
    nothing = torch.zeros(rows, dtype=torch.int64)
    log_probs, finite, *_ = packed.decode(
        canvas, torch.ones_like(canvas, dtype=torch.bool), state.S, state.z, torch.arange(1, rows + 1), nothing,
        torch.full_like(nothing, net.config.length), start, nothing, torch.ones(rows), last=state.last)
    if not bool(finite.all()):
        raise FloatingPointError("the model's parameters are not finite; evaluate another checkpoint")
    return -log_probs.double().sum(1)
