"""The plain decode loop: a batch of images from start to end, which no image joins or leaves; and a
sheet of images.

Training and tests use this loop. server/engine/decode/decoder.py does the same for slots and
quanta.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .attention import attention_for
from .conditional import Conditional
from .config import ModelConfig
from .heads import draw
from .inputs import START, check_known
from .palette import pictures_of
from .philox import uniforms
from .transformer import Transformer

# of Philox, for the class of an image that was requested without one; stream 0 is for its tokens
CLASS_STREAM = 1
# multiplications in a step; below this, waking a second thread costs more than it saves
SMALL = 10**8
# a multiplication with keys and values, which rows do not share, takes this many times one with
# weights
READING = 5


@torch.inference_mode()
def generate(
    net: Transformer,
    seeds: list[int],
    *,
    labels: list[int | None] | None = None,
    known: Tensor | None = None,
    prefix: int = 0,
    given: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Draw one image per seed.

    labels: one per image; None for the unconditional start, or for a drawn class (`starts_of`) ·
    known: (B, T) uint8, of which the first `prefix` tokens are kept or, with a model with patches,
    the sub-pixels where `given`, (B, T) bool, is set · returns (B, T) uint8, on the CPU.
    """
    count, config = len(seeds), net.config
    start = torch.tensor([net.start_index(label) for label in labels or [None] * count])
    slots = torch.arange(1, count + 1)
    state = attention_for(config).new_state(count)
    canvas = torch.zeros(count, config.subpixels, dtype=torch.uint8)
    scores = torch.zeros(count, config.classes)
    if given is not None:
        assert known is not None
        check_known(config, given)
        canvas = torch.where(given, known, canvas)
        [conditioned] = given.any(1).nonzero(as_tuple=True)
        if len(conditioned):
            assert isinstance(net, Conditional)
            scores[conditioned] = net.read(
                canvas[conditioned], given[conditioned], state, slots[conditioned]
            )
    start = starts_of(net, scores, np.array(seeds), start)
    if prefix:
        assert known is not None
        canvas[:, : prefix * config.token_size] = known[:, : prefix * config.token_size]
        net.prefill(canvas, prefix, start, state, slots)
    noise = noise_of(config, np.array(seeds), np.arange(prefix, config.length))
    temperatures = torch.full((count,), temperature)
    for position in range(prefix, config.length):
        drawn = torch.arange(count)
        at = slice(position * config.token_size, (position + 1) * config.token_size)
        if given is not None:
            [drawn] = (~given[:, at]).any(1).nonzero(as_tuple=True)
        if not len(drawn):
            continue
        t, u = torch.full((len(drawn),), position), noise[drawn, position - prefix]
        with decode_threads(net, len(drawn), position):
            read = None if given is None else given[drawn]
            parameters = net.step(canvas[drawn], t, start[drawn], state, slots[drawn], read)
            canvas[drawn, at] = draw_token(net, parameters, t, u, temperatures[drawn])
    return canvas.cpu()


def starts_of(net: Transformer, scores: Tensor, seeds: NDArray[np.int64], start: Tensor) -> Tensor:
    """Start indices of images. If the model draws the class first, images without a class get one,
    drawn by scores.

    scores: (B, classes), from Transformer.read; 0 where nothing is known, so that all classes are
            equally probable ·
    seeds, start: (B,) · returns (B,) int64.
    """
    if not net.config.class_first:
        return start
    u = torch.from_numpy(uniforms(seeds, np.array(0), CLASS_STREAM)[:, 0].copy()).to(scores.device)
    return torch.where(start == START, START + 1 + draw_class(scores, u), start)


def draw_class(scores: Tensor, u: Tensor) -> Tensor:
    """Draw a class per image, (B,) int64. scores: (B, classes), unnormalised log-probabilities · u:
    (B,) in (0, 1).
    """
    cumulative = torch.exp(scores - scores.amax(-1, keepdim=True)).cumsum(-1)
    return (cumulative <= u[:, None] * cumulative[:, -1:]).sum(-1).clamp(max=scores.shape[1] - 1)


@contextmanager
def decode_threads(net: Transformer, rows: int, t: int) -> Iterator[None]:
    """Use one thread for a small step of this many rows, the furthest at t: 150 operations of
    microseconds each.

    Multiplications with kept keys and values count READING times, since each reads a number from
    memory. The choice depends only on rows and positions, so a batch is computed in the same way
    for any length of quanta.
    """
    threads = torch.get_num_threads()
    one = rows * (net.multiplications + READING * net.attention.memory_multiplications(t)) < SMALL
    if one and threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if one and threads > 1:
            torch.set_num_threads(threads)


def noise_of(config: ModelConfig, seeds: NDArray[np.int64], t: NDArray[np.int64]) -> Tensor:
    """Two uniforms per seed and sub-pixel of tokens t, (B, n, C, 2) float32. seeds: (B,) · t: (n,)
    or (B, n).
    """
    subpixels = t[..., None] * config.token_size + np.arange(config.token_size)
    return torch.from_numpy(uniforms(seeds[:, None, None], subpixels)[..., :2].copy()).to(
        torch.get_default_device()
    )


def draw_token(
    net: Transformer, parameters: Tensor, t: Tensor, u: Tensor, temperature: Tensor
) -> Tensor:
    """Draw the tokens at t. parameters: (B, P) · t, temperature: (B,) · u: (B, C, 2) · returns (B,
    C) uint8.
    """
    config = net.config
    values = draw(config, parameters, u, temperature)
    # no start token: sub-pixel 0 has its marginal
    if config.first_marginal and bool((t == 0).any()):
        cumulative = torch.tensor(config.first_marginal, dtype=torch.float64).cumsum(0)
        first = torch.searchsorted(
            cumulative, u[..., 0].double() * cumulative[-1], right=True
        ).clamp(max=255)
        values = torch.where((t == 0)[:, None], first.to(torch.uint8), values)
    return values


def tile(images: NDArray[np.uint8], config: ModelConfig, columns: int = 10) -> NDArray[np.uint8]:
    """Arrange images (count, T) in lines of `columns`, one grey pixel apart; returns (height,
    width[, channels]), of which there are four with a palette.
    """
    columns = min(columns, len(images))
    lines = -(-len(images) // columns)
    height, width = config.height + 1, config.width + 1
    pictures = pictures_of(images, config)
    size = (lines * height + 1, columns * width + 1, pictures.shape[-1])
    sheet = np.full(size, 96, np.uint8)
    sheet[..., 3:] = 255
    for index, picture in enumerate(pictures):
        y, x = index // columns * height + 1, index % columns * width + 1
        sheet[y : y + config.height, x : x + config.width] = picture
    return sheet[..., 0] if sheet.shape[-1] == 1 else sheet
