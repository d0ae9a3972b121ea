"""Decoders that run csrc's kernels: a quantum is one call on a processor, and a few recorded calls
on a GPU.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from linpix.model.attention import State
from linpix.model.attention.linear import RecurrentState
from linpix.model.checkpoint import Checkpoint
from linpix.model.cuda import GpuPool
from linpix.model.packing import PRECISIONS, Packed, pack
from linpix.model.sharing import SharedWeights

from ..image import Image
from .decoder import Advance, Decoder, Numbers
from .failures import EngineLost

READS_TOGETHER, READS_ON_GPU = 8, 64  # requests, or images, in one call of the kernels


class BitwiseDecoder(Decoder):
    """Its prefill equals its decoding, bit for bit: it restores an image by prefill, and keeps no
    copy of its state.
    """

    # where known pixels, and drawn images whose class is checked, are read
    reader: Packed | GpuPool

    def read_known(
        self, canvas: Tensor, known: Tensor, state: State | GpuPool, places: Tensor
    ) -> Tensor:
        features = self.reader.read(self.net.inputs_read(canvas, known), state, places)
        # one by one: a matrix product rounds differently for another number of rows
        return torch.cat([self.net.class_scores(row) for row in features[:, None]])

    def restore(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        for slot in slots:
            self.pool.clear(slot)
            if self.conditioned[slot]:
                self.read([[slot]])
        at, lengths = np.array(slots), np.array(positions)
        if (begun := lengths > 0).any():
            self.prefill(at[begun], np.zeros_like(lengths[begun]), lengths[begun])

    def quantum(
        self, slots: Sequence[int], positions: Sequence[int], steps: Sequence[int]
    ) -> Advance:
        """As Decoder.quantum, but steps may come in any order. One call, without the GIL."""
        at, where, most = np.array(slots), np.array(positions), np.array(steps)
        finite, taken, passes = self.decode(
            at, where, self.config.length - where if self.skips else most, int(most.max())
        )
        return Advance(where + taken, passes, at[~finite].tolist())

    @abstractmethod
    def decode(
        self, slots: Numbers, positions: Numbers, steps: Numbers, passes: int
    ) -> tuple[NDArray[np.bool_], Numbers, Numbers]:
        """Advance images by their steps, or as far as `passes` passes take them.

        Returns, (B,) each: whether all parameters were finite, the steps taken, and how many of
        these were passes.
        """


class CompiledDecoder(BitwiseDecoder):
    """csrc's kernels on a processor. An image does not depend on what else is in the batch, bit for
    bit.
    """

    kind, reads_together = "compiled", READS_TOGETHER

    def __init__(
        self, checkpoint: Checkpoint, slots: int, *, precision: str = "fp32", share: bool = False
    ) -> None:
        """share: whether other processes on this machine decode with the same weights."""
        super().__init__(checkpoint, slots)
        assert isinstance(self.state, RecurrentState)
        self.precision = precision
        packed = pack(self.net, PRECISIONS[precision])
        self._shared = SharedWeights(packed.weights) if share else None
        self.packed = self.reader = (
            replace(packed, weights=self._shared.weights) if self._shared else packed
        )
        self.S, self.z = self.state.S, self.state.z

    def close(self) -> None:
        if self._shared:
            self._shared.close()

    def prefill(self, slots: Numbers, positions: Numbers, steps: Numbers) -> None:
        self.packed.prefill(
            from_numpy(self.canvas),
            from_numpy(self.known),
            self.S,
            self.z,
            *map(from_numpy, (slots, positions, steps, self.start[slots])),
            last=self.state.last,
            conditioned=from_numpy(self.conditioned[slots]),
        )

    @torch.inference_mode()
    def decode(
        self, slots: Numbers, positions: Numbers, steps: Numbers, passes: int
    ) -> tuple[NDArray[np.bool_], Numbers, Numbers]:
        rows = (
            slots,
            positions,
            steps,
            self.start[slots],
            self.seed[slots],
            self.temperature[slots],
        )
        _, finite, taken, passed = map(
            Tensor.numpy,
            self.packed.decode(
                from_numpy(self.canvas),
                from_numpy(self.known),
                self.S,
                self.z,
                *map(from_numpy, rows),
                passes=passes,
                last=self.state.last,
                conditioned=from_numpy(self.conditioned[slots]),
            ),
        )
        return finite, taken, passed


@contextmanager
def _on_gpu() -> Iterator[None]:
    """Raise EngineLost instead of an error that the GPU keeps giving: it is then not an error of
    this batch.
    """
    try:
        yield
    except RuntimeError as error:
        try:
            torch.cuda.synchronize()
        except RuntimeError as still:
            raise EngineLost(
                f"the GPU no longer answers ({str(still).splitlines()[0]}); the process ends, so"
                " that its supervisor can restart it"
            ) from error
        raise


class CudaDecoder(BitwiseDecoder):
    """csrc's kernels on a GPU, which has state, weights and images; these are copied back when they
    are to be seen.
    """

    kind, device, reads_together = "compiled", "cuda", READS_ON_GPU
    prefill_stride = 128
    pool: GpuPool

    def __init__(
        self, checkpoint: Checkpoint, slots: int, pool: GpuPool, *, precision: str = "bf16"
    ) -> None:
        super().__init__(checkpoint, slots, pool)
        self.precision, self.stride, self.kernels = precision, pool.stride, pool.kernels
        self.state_format, self.reader = pool.state, pool

    @_on_gpu()
    def take(self, slots: Sequence[int], images: Sequence[Image]) -> None:
        self.pool.put(
            slots,
            *(
                None if given is None else from_numpy(given)
                for given in (images[0].job.canvas, images[0].job.known)
            ),
        )
        super().take(slots, images)

    @_on_gpu()
    def prefill(self, slots: Numbers, positions: Numbers, steps: Numbers) -> None:
        self.pool.prefill(
            slots, positions, steps, self.start[slots], conditioned=self.conditioned[slots]
        )

    copy, read = _on_gpu()(BitwiseDecoder.copy), _on_gpu()(BitwiseDecoder.read)
    judge = _on_gpu()(BitwiseDecoder.judge)

    def read_into(self, slots: Sequence[int]) -> Tensor:
        return self.read_known(
            from_numpy(self.canvas[slots]),
            from_numpy(self.known[slots]),
            self.pool,
            torch.tensor(slots),
        )

    @_on_gpu()
    def canvases(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        return self.pool.images(slots).numpy()

    @_on_gpu()
    def decode(
        self, slots: Numbers, positions: Numbers, steps: Numbers, passes: int
    ) -> tuple[NDArray[np.bool_], Numbers, Numbers]:
        """Raises EngineLost if the GPU no longer answers."""
        done = self.pool.decode(
            slots,
            positions,
            steps,
            self.start[slots],
            self.seed[slots],
            self.temperature[slots],
            conditioned=self.conditioned[slots],
            passes=passes,
        )
        self.saturated = self.pool.saturated()
        return done
