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
        masked = ", half of them with known pixels" * self.masked
        text = (
            f"Its head was calibrated on {self.images:,} images that this training had held"
            f" out{masked}: logits times {self.logit_factor:.3f}"
        )
        if self.scale_factor is not None:
            text += f", scales times {self.scale_factor:.3f}"
        return f"{text}."


def calibrate(net: Transformer, data: Dataset, *, seed: int = 0) -> Calibration:
    """Fit these numbers to images with their labels, by L-BFGS, and change net's head accordingly.

    If net reads known pixels, half of the images have some, under masks as in training.
    """
    parameters, values = _predictions(net, data, seed)
    K, C = net.config.mixtures, net.config.token_size
    logits, scales = torch.zeros(2, parameters.shape[-1])
    has_scales = net.config.head == "mixture"
    if has_scales:
        logits[:K], scales[K * (1 + C) : K * (1 + 2 * C)] = 1, 1
    else:
        logits[:] = 1
    fitted = nn.Parameter(torch.zeros(2))  # logarithms of both factors

    def bits() -> Tensor:
        changed = parameters * (1 + logits * (fitted[0].exp() - 1)) + scales * fitted[1]
        nats = -log_likelihood(net.config, changed, values).sum() / len(data.images)
        return nats * bits_per_dim(1.0, net.config)

    def step() -> float:
        optimizer.zero_grad()
        loss = bits()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    optimizer = torch.optim.LBFGS([fitted], max_iter=MAX_ITERATIONS, line_search_fn="strong_wolfe")
    before = float(bits().detach())
    optimizer.step(step)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        logit_factor, scale_factor = fitted.exp().tolist()
        factors = 1 + logits * (logit_factor - 1)
        net.head.weight.mul_(factors[:, None])
        net.head.bias.mul_(factors).add_(scales * fitted[1])
        masked, after = bool(net.config.patch), float(bits())
    if not has_scales:
        scale_factor = None
    return Calibration(len(data.images), masked, logit_factor, scale_factor, before, after)


@torch.no_grad()
def _predictions(net: Transformer, data: Dataset, seed: int) -> tuple[Tensor, Tensor]:
    """Parameters (1, n, P) and values (1, n * C) of hidden tokens that go through the layers."""
    config, generator = net.config, np.random.default_rng(seed)
    parameters, values = [], []
    for at in range(0, len(data.images), BATCH):
        images = torch.from_numpy(data.images[at : at + BATCH].copy()).to(net.device)
        labels = torch.from_numpy(data.labels[at : at + BATCH].copy()).to(net.device)
        start = START + 1 + labels if config.classes else torch.full_like(labels, START)
        tokens = images.view(len(images), config.length, -1)
        if not isinstance(net, Conditional):
            parameters.append(net(images, start)[:, config.first :].flatten(0, 1))
            values.append(tokens[:, config.first :].flatten(0, 1))
            continue
        known = None
        if config.patch:
            masks = known_of(generator, config, len(images))
            masks &= (generator.random(len(images)) < 0.5)[:, None]
            known = torch.from_numpy(masks).to(net.device)
        s = net.sequences(images, start, known)
        parameters.append(net.predict(s).parameters[s.pixel_image, s.pixel_t])
        values.append(tokens[s.pixel_image, s.pixel_t])
    return torch.cat(parameters)[None], torch.cat(values).flatten()[None]
