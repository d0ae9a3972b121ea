"""What a step on a processor cannot be faster than: its arithmetic at the rate of the machine's
matrix products, and its bytes at the rate of its memory.
"""

import ctypes
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from linpix.model import ops
from linpix.model.checkpoint import read
from linpix.model.choice import choose
from linpix.model.config import ModelConfig
from linpix.model.heads import parameters_per_token
from linpix.model.packing import PRECISIONS
from linpix.model.provenance import config_of

from ..image import images_of
from ..job import Job
from .choice import new_decoder
from .compiled import CompiledDecoder
from .decoder import Decoder

Clock = Callable[[], float]  # seconds
IMAGES, STEPS, ROUNDS = 64, 16, 3  # of measured_share: what is in flight, steps of a round


@dataclass(frozen=True)
class Limit:
    """Of a step of some images."""

    operations: float  # of one whole image
    moved: int  # bytes: the packed weights once, and the state of every image twice
    seconds: float
    by: str  # what takes these seconds: "arithmetic" or "memory"


@dataclass(frozen=True)
class Share:
    """How near a checkpoint's passes come to their limit on this machine."""

    model: str
    images: int
    precision: str
    passes_per_second: float
    share: float
    limited_by: str


def seconds_of(work: Callable[[], object], clock: Clock) -> float:
    began = clock()
    work()
    return clock() - began


def matrix_product(dtype: torch.dtype, size: int = 4096, clock: Clock = time.perf_counter) -> float:
    """Operations a second of a product of two matrices of size x size, median of five; of bytes, as
    integers.
    """
    a, b = ((10 * torch.randn(size, size)).to(dtype) for _ in range(2))
    multiply = torch._int_mm if dtype == torch.int8 else torch.mm
    multiply(a, b)
    seconds = [seconds_of(lambda: multiply(a, b), clock) for _ in range(5)]
    return 2 * size**3 / statistics.median(seconds)


def read_rate(size: int, clock: Clock = time.perf_counter) -> float:
    """Bytes a second, by all threads, over a buffer of that size read before: memchr looks for what
    is not there.
    """
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    memchr.restype = ctypes.c_void_p
    threads, rounds = torch.get_num_threads(), 40
    buffer = np.ones(size, np.uint8)
    part = size // threads

    def look(index: int) -> None:
        for _ in range(rounds):
            memchr(buffer.ctypes.data + index * part, 0, part)

    with ThreadPoolExecutor(threads) as pool:
        seconds = statistics.median(
            seconds_of(lambda: list(pool.map(look, range(threads))), clock) for _ in range(7)
        )
    return part * threads * rounds / seconds


def arithmetic(config: ModelConfig, precision: str) -> dict[str, float]:
    """Operations of an image by the precision they are done in: two a weight and token, four a
    number of the state.

    Head and state are fp32 whatever the precision is, and are counted with the layers' widest
    products. int8 leaves out the feed-forwards of the first and last layer.
    """
    keys, values = config.heads * config.key_dim, config.heads * config.value_dim
    feed_forward = 2 * config.d_model * config.d_ff
    layers = config.layers * (config.d_model * (2 * keys + 2 * values) + feed_forward)
    rest = parameters_per_token(config) * config.d_model
    rest += 2 * config.layers * config.heads * config.key_dim * config.value_dim
    if precision != "int8":
        return {precision: 2.0 * config.length * (layers + rest)}
    outer = min(config.layers, 2) * feed_forward
    wider = "bf16" if ops.compiled and torch.ops.linpix.cpu_has_fast_bf16() else "fp32"
    return {
        "int8": 2.0 * config.length * (layers - outer),
        wider: 2.0 * config.length * (outer + rest),
    }


def limit_of(
    decoder: CompiledDecoder,
    images: int,
    rates: dict[str, float],
    clock: Clock = time.perf_counter,
) -> Limit:
    """Of a step of so many images. rates: of matrix_product, by precision."""
    config, weights = decoder.config, decoder.packed.step_bytes
    work = arithmetic(config, decoder.precision)
    states = images * decoder.net.attention.state_bytes
    moved = weights + 2 * states
    seconds = sum(amount / rates[name] for name, amount in work.items())
    product = images / config.length * seconds
    memory = moved / read_rate(weights + states, clock)
    by = "arithmetic" if product > memory else "memory"
    return Limit(sum(work.values()), moved, max(product, memory), by)


def fill(decoder: Decoder, images: int) -> None:
    """Put images that are to be drawn into the first slots."""
    drawn = images_of(Job(count=images), "all")
    for slot, image in enumerate(drawn, 1):
        image.slot = slot
    decoder.take(drawn)


def measured_share(folder: Path, clock: Clock = time.perf_counter) -> Share | None:
    """Of the checkpoint in a folder, from the beginning of its images on; None if csrc's kernels do
    not decode it on a processor. Inexact while other programs run. Raises ValueError.
    """
    if choose(config_of(folder), device="cpu").engine != "compiled":
        return None
    decoder = new_decoder(read(folder), IMAGES, device="cpu")
    assert isinstance(decoder, CompiledDecoder)
    fill(decoder, IMAGES)
    slots = np.arange(1, IMAGES + 1)
    steps = max(1, min(STEPS, decoder.config.length // (ROUNDS + 2)))
    plan = np.stack([slots, np.full(IMAGES, steps)], 1)
    decoder.slots.position[slots] = decoder.quantum(plan).positions
    rates, shares = [], []
    for _ in range(ROUNDS):
        began = clock()
        done = decoder.quantum(plan)
        rate = done.passes.sum() / (clock() - began)
        decoder.slots.position[slots] = done.positions
        products = {
            name: matrix_product(PRECISIONS[name], 2048, clock)
            for name in arithmetic(decoder.config, decoder.precision)
        }
        limit = limit_of(decoder, IMAGES, products, clock)
        rates.append(rate)
        shares.append(rate * limit.seconds / IMAGES)
    rate, share = statistics.median(rates), statistics.median(shares)
    return Share(decoder.checkpoint.name, IMAGES, decoder.precision, rate, share, limit.by)
