"""Decoders: images in slots, advanced together a quantum at a time. Torch begins here.

EagerDecoder does it in torch, step by step, where one can read it; CompiledDecoder has csrc do a quantum in one call,
and CudaDecoder replays a few recorded calls.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from model.attention import SlotPool, attention_for
from model.attention.linear import RecurrentState
from model.checkpoint import Checkpoint
from model.cuda import GpuPool, StateFormat
from model.generate import decode_threads, draw_subpixel, noise_of
from model.packing import PRECISIONS, choose, gpu_obstacle, pack
from model.transformer import PREFILL_TOKENS
from server.errors import EngineLost

logger = logging.getLogger(__name__)

Numbers = NDArray[np.int64]  # (B,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """What one image is to be: everything that decides its sub-pixels."""

    seed: int
    temperature: float = 1.0
    label: int | None = None               # None: the unconditional start
    canvas: NDArray[np.uint8] | None = None  # (T,), with `known` where an image is to be completed
    known: NDArray[np.bool_] | None = None   # (T,)

    @property
    def prefix(self) -> int:
        """Known sub-pixels before the first unknown one: they are prefilled, not decoded."""
        return 0 if self.known is None else int(np.argmin(np.append(self.known, False)))


class Decoder(ABC):
    """One model's weights, its pool of slots, and what each slot's image is made of."""

    precision, device, state_format = "fp32", "cpu", "fp32"
    stride = 1     # a quantum of so many steps costs no more than one step
    prefill_stride = PREFILL_TOKENS  # and prefill of so many tokens little more than of one
    saturated = 0  # elements of state so far that float16 could not hold

    def __init__(self, checkpoint: Checkpoint, slots: int, *, fill_freed_with_nan: bool = False,
                 pool: SlotPool | None = None) -> None:
        """fill_freed_with_nan: for debugging, so that reading a freed slot shows · pool: if not in this memory."""
        self.fill_freed_with_nan = fill_freed_with_nan
        self.checkpoint, self.net, self.config = checkpoint, checkpoint.net, checkpoint.net.config
        self.slots = slots
        if pool is None:
            self.state = pool = attention_for(self.config).new_state(slots)
        self.pool = pool
        # In numpy, which gives up the GIL only for what is large: each of torch's operators would, between quanta too,
        # and get it back when the event loop has had its turn.
        rows = slots + 1
        self.canvas = np.zeros((rows, self.config.subpixels), np.uint8)
        self.known = np.zeros((rows, self.config.subpixels), np.bool_)
        self.start, self.seed = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.temperature = np.ones(rows, np.float32)

    @property
    def facts(self) -> dict[str, str]:
        """What answers say of how their images were made."""
        return {"model": self.checkpoint.name, "checkpoint": self.checkpoint.digest, "engine": self.name,
                "precision": self.precision, "device": self.device, "state": self.state_format}

    def take(self, slots: Sequence[int], specs: Sequence[ImageSpec]) -> None:
        """Give clear slots to images that differ in seed and temperature only.

        What they share is then to be prefilled in the first slot, piece by piece, and copied.
        """
        first, at = specs[0], np.array(slots)
        for slot, spec in zip(slots, specs, strict=True):
            self.pool.clear(slot)  # on taking, not on giving back: a crashed request gives back nothing clean
            self.seed[slot] = spec.seed
            self.temperature[slot] = spec.temperature
        self.start[at] = self.net.start_index(first.label)
        self.canvas[at] = 0 if first.canvas is None else first.canvas
        self.known[at] = False if first.known is None else first.known

    def copy(self, slots: Sequence[int]) -> None:
        """Give the others of these slots what was prefilled in the first."""
        self.pool.copy(slots[0], list(slots[1:]))

    def image(self, slot: int) -> NDArray[np.uint8]:
        """The sub-pixels of a slot's image, (T,); those not decoded yet are 0, or as they were given."""
        canvas: NDArray[np.uint8] = self.canvas[slot].copy()
        return canvas

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the engine, as --engine and answers have it."""

    @abstractmethod
    def prefill(self, slots: Numbers, positions: Numbers, steps: Numbers) -> None:
        """Fold the next inputs of each image into its slot, from its position on: start token, x_0, x_1 and so on.

        Here all from one position, a multiple of prefill_stride, and by as many steps.
        """

    @abstractmethod
    def keep(self, slots: Sequence[int]) -> None:
        """Shadow the state of these slots before a quantum, for the case that it throws."""

    @abstractmethod
    def restore(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Put some of the slots kept last back to their positions, where a quantum that threw found them.

        Bytes need no shadow: those before a position are not written, and those after it are before they are read.
        """

    @abstractmethod
    def quantum(self, slots: Sequence[int], positions: Sequence[int], steps: Sequence[int]) -> list[int]:
        """Advance each slot's image from its position by its number of steps; steps must not increase.

        Returns the slots whose mixture parameters were not all finite: their images are rubbish, and no other is.
        """


class EagerDecoder(Decoder):
    """Torch alone, or with our operator for the step of linear attention."""

    @property
    def name(self) -> str:
        return "eager+operator" if isinstance(self.state, RecurrentState) and self.state.operator else "eager"

    def prefill(self, slots: Numbers, positions: Numbers, steps: Numbers) -> None:
        begin = int(positions[0])
        self.net.prefill(from_numpy(self.canvas[slots]), begin + int(steps[0]), from_numpy(self.start[slots]),
                         self.state, from_numpy(slots), begin)

    def keep(self, slots: Sequence[int]) -> None:
        self.state.keep(torch.tensor(slots))

    def restore(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        self.state.restore(torch.tensor(slots))

    @torch.inference_mode()
    def quantum(self, slots: Sequence[int], positions: Sequence[int], steps: Sequence[int]) -> list[int]:
        """As Decoder.quantum. Rows that end earlier stand last: those still running are always the first `rows`."""
        index = np.array(slots)
        noise = noise_of(self.seed[index], np.array(positions)[:, None] + np.arange(steps[0]))
        at, t = from_numpy(index), torch.tensor(positions)
        canvas, known, start, temperature = (from_numpy(pool[index]) for pool in (
            self.canvas, self.known, self.start, self.temperature))
        finite = torch.ones(len(slots), dtype=torch.bool)
        for step in range(steps[0]):
            rows = sum(step < wanted for wanted in steps)
            with decode_threads(self.net, rows, max(positions[:rows]) + step):
                finite[:rows] &= self.step(canvas[:rows], known[:rows], start[:rows], temperature[:rows],
                                           noise[:rows, step], t[:rows] + step, at[:rows])
        self.canvas[index] = canvas.numpy()
        return [slot for slot, well in zip(slots, finite.tolist(), strict=True) if not well]

    def step(self, canvas: Tensor, known: Tensor, start: Tensor, temperature: Tensor,
             noise: Tensor, t: Tensor, slots: Tensor) -> Tensor:
        """One sub-pixel for every row: predict it, draw it, and keep the given one where it is known.

        canvas, known: (B, T), canvas changed in place · start, temperature, t, slots: (B,) · noise: (B, 2) ·
        returns (B,) bool, whether the row's parameters were finite.
        """
        parameters = self.net.step(canvas, t, start, self.state, slots)
        drawn = draw_subpixel(self.net, parameters, t, noise, temperature)
        here = t[:, None]
        given = torch.where(known.gather(1, here), canvas.gather(1, here), drawn[:, None])
        canvas.scatter_(1, here, given)
        unpredicted = t < (1 if self.config.first_marginal else 0)  # sub-pixel 0 without a start token: NaN by design
        return parameters.isfinite().all(-1) | unpredicted


class BitwiseDecoder(Decoder):
    """Prefills what it would have decoded, bit for bit: an image up to its position is all the shadow it needs."""

    def keep(self, slots: Sequence[int]) -> None:
        """Nothing."""

    def restore(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        for slot in slots:
            self.pool.clear(slot)
        at, lengths = np.array(slots), np.array(positions)
        if (begun := lengths > 0).any():
            self.prefill(at[begun], np.zeros_like(lengths[begun]), lengths[begun])


class CompiledDecoder(BitwiseDecoder):
    """csrc's kernels on a processor. An image does not depend on what else is in the batch, bit for bit."""

    name = "compiled"

    def __init__(self, checkpoint: Checkpoint, slots: int, *, precision: str = "fp32",
                 fill_freed_with_nan: bool = False) -> None:
        super().__init__(checkpoint, slots, fill_freed_with_nan=fill_freed_with_nan)
        assert isinstance(self.state, RecurrentState)
        self.precision = precision
        self.packed, self.S, self.z = pack(self.net, PRECISIONS[precision]), self.state.S, self.state.z

    def prefill(self, slots: Numbers, positions: Numbers, steps: Numbers) -> None:
        self.packed.prefill(from_numpy(self.canvas), self.S, self.z, from_numpy(slots), from_numpy(positions),
                            from_numpy(steps), from_numpy(self.start[slots]), last=self.state.last)

    @torch.inference_mode()
    def quantum(self, slots: Sequence[int], positions: Sequence[int], steps: Sequence[int]) -> list[int]:
        """As Decoder.quantum, in any order of steps; one call without the GIL."""
        at = np.array(slots)
        rows = (at, np.array(positions), np.array(steps), self.start[at], self.seed[at], self.temperature[at])
        _, finite = self.packed.decode(from_numpy(self.canvas), from_numpy(self.known), self.S, self.z,
                                       *map(from_numpy, rows), last=self.state.last)
        return [slot for slot, well in zip(slots, finite.numpy(), strict=True) if not well]


class CudaDecoder(BitwiseDecoder):
    """csrc's kernels on a GPU: state, known sub-pixels and weights are there; images come back after every quantum."""

    name, device = "compiled", "cuda"
    prefill_stride = 128
    pool: GpuPool

    def __init__(self, checkpoint: Checkpoint, slots: int, pool: GpuPool, *, precision: str = "bf16",
                 fill_freed_with_nan: bool = False) -> None:
        super().__init__(checkpoint, slots, fill_freed_with_nan=fill_freed_with_nan, pool=pool)
        self.precision, self.stride, self.state_format = precision, pool.stride, str(pool.format)

    def take(self, slots: Sequence[int], specs: Sequence[ImageSpec]) -> None:
        with _on_gpu():
            self.pool.put(slots, *(None if given is None else from_numpy(given)
                                   for given in (specs[0].canvas, specs[0].known)))
            super().take(slots, specs)

    def prefill(self, slots: Numbers, positions: Numbers, steps: Numbers) -> None:
        with _on_gpu():
            self.pool.prefill(slots, positions, steps, self.start[slots])

    def copy(self, slots: Sequence[int]) -> None:
        with _on_gpu():
            super().copy(slots)

    def quantum(self, slots: Sequence[int], positions: Sequence[int], steps: Sequence[int]) -> list[int]:
        """As CompiledDecoder.quantum. Raises EngineLost where the GPU no longer answers."""
        at = np.array(slots)
        with _on_gpu():
            finite = self.pool.decode(slots, positions, steps, self.start[at], self.seed[at], self.temperature[at])
            self.canvas[at] = self.pool.images(slots).numpy()
            self.saturated = self.pool.saturated()
        return [slot for slot, well in zip(slots, finite, strict=True) if not well]


@contextmanager
def _on_gpu() -> Iterator[None]:
    """An error that the GPU goes on giving is no longer one of this batch: EngineLost."""
    try:
        yield
    except RuntimeError as error:
        try:
            torch.cuda.synchronize()
        except RuntimeError as still:
            raise EngineLost(f"the GPU no longer answers ({str(still).splitlines()[0]}); "
                             "the process ends, for its supervisor to start it again") from error
        raise


def new_decoder(checkpoint: Checkpoint, slots: int, engine: str = "auto", precision: str = "auto", *,
               device: str = "auto", state: StateFormat | None = None, fill_freed_with_nan: bool = False) -> Decoder:
    """The engine of that name, precision and device, or the best that there is for this model. Raises ValueError."""
    chosen = choose(checkpoint.net.config, engine, precision, device)
    if chosen.warning:
        logger.warning("%s: %s", checkpoint.name, chosen.warning)
    if chosen.device == "cuda":
        try:
            pool = GpuPool(checkpoint.net, slots, precision=chosen.precision, state=state)
            pool.record(slots)
        except torch.OutOfMemoryError as error:
            free, whole = (size / 2**30 for size in torch.cuda.mem_get_info())
            raise ValueError(f"{slots} slots of {checkpoint.name} are more than the GPU has memory for, {free:.1f} GiB "
                             f"of {whole:.1f} free; lower --slots") from error
        return CudaDecoder(checkpoint, slots, pool, precision=chosen.precision, fill_freed_with_nan=fill_freed_with_nan)
    if state not in (None, StateFormat()):
        obstacle = gpu_obstacle(checkpoint.net.config, precision)
        raise ValueError("--state fp16 and --defer are for decoding on a GPU, and this model decodes on a processor"
                         f"{f': {obstacle}' if obstacle else ''}; leave the flags out")
    if chosen.engine == "eager":
        return EagerDecoder(checkpoint, slots, fill_freed_with_nan=fill_freed_with_nan)
    return CompiledDecoder(checkpoint, slots, precision=chosen.precision, fill_freed_with_nan=fill_freed_with_nan)
