"""Evaluation of a model on images: mean bits/dim, share of right classes, and their 95 %
intervals.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from linpix.model.attention.linear import RecurrentState
from linpix.model.config import bits_per_dim
from linpix.model.heads import log_likelihood
from linpix.model.inputs import START
from linpix.model.likelihood import uniform_prior
from linpix.model.packing import Packed, pools_of, rows_of
from linpix.model.transformer import Transformer

from .readers import Labels, Pixels


@dataclass(frozen=True, slots=True)
class Evaluation:
    bits_per_dim: float  # mean over images
    interval: float  # half the width of the mean's 95 % interval, if images are independent
    images: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    # share of images whose most probable class is right; classes are equally probable a priori
    accuracy: float
    interval: float  # half the width of its 95 % interval


def evaluate(net: Transformer, images: Pixels, **how: Any) -> Evaluation:
    """bits/dim of images (count, T). how: see bits_of."""
    began = time.perf_counter()
    return _evaluation(bits_of(net, images, **how), began)


def evaluate_classes(
    net: Transformer,
    images: Pixels,
    labels: Labels,
    *,
    packed: Packed | None = None,
    progress: bool = False,
) -> tuple[Evaluation, Accuracy]:
    """The result of evaluate without labels, and how often an image is most probable under its
    label, of (count,).
    """
    began = time.perf_counter()
    config = net.config
    starts = START + np.arange(int(config.class_first), config.classes + 1)
    nats = _nats(net, images, np.tile(starts[:, None], len(images)), packed, progress)
    under = nats[-config.classes :]
    without_label = under if config.class_first else nats[:1]
    found = _evaluation(_bits(net, without_label), began)
    return found, Accuracy(*_mean((under.argmin(0) == torch.from_numpy(labels)).double()))


def _evaluation(bits: Tensor, began: float) -> Evaluation:
    return Evaluation(*_mean(bits), len(bits), time.perf_counter() - began)


def _mean(values: Tensor) -> tuple[float, float]:
    """The mean of values (count,), and half the width of its 95 % interval."""
    interval = 1.96 * float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return float(values.mean()), interval


def bits_of(
    net: Transformer,
    images: Pixels,
    *,
    labels: Labels | None = None,
    packed: Packed | None = None,
    progress: bool = False,
) -> Tensor:
    """Bits/dim of each image over all its T sub-pixels: (count, T) uint8 -> (count,) float64.

    A model that draws the class first is evaluated under every class. labels: (count,), only under
    the class of each image. This gives the bits of image and class together. They are higher, by
    far less than 0.001 if the class is visible, and take a tenth of the time for ten classes.
    packed: use the compiled engine with every sub-pixel given, in its precision and step by step as
    when drawing, instead of the parallel form in float32.
    """
    if labels is not None:
        starts = START + 1 + labels[None]
    else:
        every = np.arange(net.config.classes) + 1 if net.config.class_first else np.zeros(1, int)
        starts = np.tile(START + every[:, None], len(images))
    return _bits(net, _nats(net, images, starts, packed, progress))


def _bits(net: Transformer, nats: Tensor) -> Tensor:
    """Bits/dim (count,) of images from their nats (n, count) under n possible starts."""
    starts = net.config.classes if net.config.class_first else 1
    prior = uniform_prior(starts)
    return -(prior - nats).logsumexp(0) * bits_per_dim(1.0, net.config)


def _nats(
    net: Transformer,
    images: Pixels,
    starts: Labels,
    packed: Packed | None,
    progress: bool,
) -> Tensor:
    """Nats of images under starts (n, count), n start indices per image; returns (n, count)
    float64, on the CPU.
    """
    parts, batch = [], 16 if packed is None else 64
    firsts = range(0, len(images), batch)
    for at in tqdm(firsts, disable=not progress, desc="evaluate", unit="batch"):
        part = torch.from_numpy(images[at : at + batch].copy())
        nats = []
        for start in torch.from_numpy(starts[:, at : at + batch].copy()):
            if packed is None:
                nats.append(_parallel_nats(net, part.to(net.device), start))
            else:
                nats.append(_stepped_nats(net, packed, part, start))
        parts.append(torch.stack(nats).cpu())
    return torch.cat(parts, 1)


@torch.inference_mode()
def _parallel_nats(net: Transformer, images: Tensor, start: Tensor) -> Tensor:
    """Nats of images (B, T) under start (B,), by the parallel form; returns (B,) float64."""
    config = net.config
    nats = -log_likelihood(config, net(images, start.to(net.device)), images)
    # no start token: sub-pixel 0 is coded by the training set's marginal
    if config.first_marginal:
        marginal = torch.tensor(config.first_marginal)
        nats[:, 0] = -torch.log(marginal[images[:, 0].long()])
    return nats.double().sum(1)


def _stepped_nats(net: Transformer, packed: Packed, images: Tensor, start: Tensor) -> Tensor:
    """The same as _parallel_nats, by the compiled engine."""
    canvas = torch.cat([images[:1], images])  # slot 0 is for padding
    known = torch.ones_like(canvas, dtype=torch.bool)
    temperature = torch.ones(len(start))
    log_probs = decoded(net, packed, canvas, known, temperature, start=start, log_probs=True)
    return -log_probs.double().sum(1)


def decoded(
    net: Transformer,
    packed: Packed,
    canvas: Tensor,
    known: Tensor,
    temperature: Tensor,
    *,
    log_probs: bool = False,
    **rows: Any,
) -> Tensor:
    """Draw what is not known of canvas, in place, with the compiled engine; returns the
    log-probabilities of all sub-pixels, if they are asked for.

    canvas, known: (1 + B, T), of which slot 0 is for padding · temperature: (B,) · rows: see
    rows_of. Raises FloatingPointError if the model's parameters are not finite.
    """
    count = len(canvas) - 1
    state = RecurrentState(net.config, count)
    found, finite, *_ = packed.decode(
        pools_of(canvas=canvas, known=known, S=state.S, z=state.z, last=state.last),
        rows_of(slot=range(1, count + 1), steps=[net.config.length] * count, **rows),
        temperature,
        log_probs=log_probs,
    )
    if not bool(finite.all()):
        raise FloatingPointError(
            "the model's parameters are not finite; evaluate another checkpoint"
        )
    return found
