"""Calibration: numbers that make a network less sure of what it predicts, fitted on images that it
has not seen.

A network that has seen every image dozens of times predicts them better than others, and is too
sure of others. One number multiplies the logits of values, or of a mixture's components (1 /
temperature in Guo et al. 2017, section 4.2). In a mixture, another one multiplies the scales of all
logistics. Both become part of the head, so they cost nothing when drawing.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from linpix.model.conditional import Conditional
from linpix.model.config import bits_per_dim
from linpix.model.heads import log_likelihood
from linpix.model.inputs import START
from linpix.model.transformer import Transformer

from .datasets import Dataset
from .masks import known_of

# with fewer, a factor can be anything; more need memory, some KB a token
MIN_IMAGES, MAX_IMAGES = 20, 1_000
BATCH = 50  # images
MAX_ITERATIONS = 30


@dataclass(frozen=True, slots=True)
class Calibration:
    images: int
    masked: bool  # whether half of the images had known pixels
    logit_factor: float  # of the logits
    scale_factor: float | None  # of the logistics' scales; None without logistics
    before: float  # bits/dim of the hidden tokens that go through the layers
    after: float

    def __str__(self) -> str:
        return (
            f"Its head was calibrated on {self.images:,} images that this training had held out"
            f"{', half of them with known pixels' if self.masked else ''}: logits times"
            f" {self.logit_factor:.3f}"
            f"{'' if self.scale_factor is None else f', scales times {self.scale_factor:.3f}'}."
        )


def calibrate(net: Transformer, data: Dataset, *, seed: int = 0) -> Calibration:
    """Fit these numbers to images with their labels, by L-BFGS, and change net's head accordingly.

    If net reads known pixels, half of the images have some, under masks as in training.
    """
    parameters, values = _predictions(net, data, seed)
    K, C = net.config.mixtures, net.config.token_size
    logits, scales = torch.zeros(2, parameters.shape[-1])
    if has_scales := net.config.head == "mixture":
        logits[:K], scales[K * (1 + C) : K * (1 + 2 * C)] = 1, 1
    else:
        logits[:] = 1
    log_logit_factor, log_scale_factor = fitted = (
        nn.Parameter(torch.zeros(())),
        nn.Parameter(torch.zeros(())),
    )

    def bits() -> Tensor:
        changed = (
            parameters * (1 + logits * (log_logit_factor.exp() - 1)) + scales * log_scale_factor
        )
        return (
            -log_likelihood(net.config, changed, values).sum()
            / len(data.images)
            * bits_per_dim(1.0, net.config)
        )

    def step() -> float:
        optimizer.zero_grad()
        loss = bits()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    optimizer = torch.optim.LBFGS(fitted, max_iter=MAX_ITERATIONS, line_search_fn="strong_wolfe")
    before = float(bits().detach())
    optimizer.step(step)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        factors = 1 + logits * (log_logit_factor.exp() - 1)
        net.head.weight.mul_(factors[:, None])
        net.head.bias.mul_(factors).add_(scales * log_scale_factor)
        return Calibration(
            len(data.images),
            bool(net.config.patch),
            float(log_logit_factor.exp()),
            float(log_scale_factor.exp()) if has_scales else None,
            before,
            float(bits()),
        )


@torch.no_grad()
def _predictions(net: Transformer, data: Dataset, seed: int) -> tuple[Tensor, Tensor]:
    """Parameters (1, n, P) and values (1, n * C) of hidden tokens that go through the layers."""
    config, generator, parts = net.config, np.random.default_rng(seed), []
    for at in range(0, len(data.images), BATCH):
        images = torch.from_numpy(data.images[at : at + BATCH].copy()).to(net.device)
        labels = torch.from_numpy(data.labels[at : at + BATCH].copy()).to(net.device)
        start = START + 1 + labels if config.classes else torch.full_like(labels, START)
        tokens = images.view(len(images), config.length, -1)
        if isinstance(net, Conditional):
            known = None
            if config.patch:
                masks = (
                    known_of(generator, config, len(images))
                    & (generator.random(len(images)) < 0.5)[:, None]
                )
                known = torch.from_numpy(masks).to(net.device)
            s = net.sequences(images, start, known)
            place = s.pixel_image, s.pixel_t
            parts.append((net.predict(s).parameters[place], tokens[place]))
        else:
            found, tokens = net(images, start)[:, config.first :], tokens[:, config.first :]
            parts.append((found.flatten(0, 1), tokens.flatten(0, 1)))
    parameters, values = (torch.cat(part) for part in zip(*parts, strict=True))
    return parameters[None], values.flatten()[None]
