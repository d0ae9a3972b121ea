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
from linpix.model.conditional import Conditional
from linpix.model.cuda import PREFILL_ROWS, GpuPool
from linpix.model.packing import PRECISIONS, Packed, pack, pools_of
from linpix.model.sharing import SharedWeights

from ..image import Image
from .decoder import Advance, Decoder
from .failures import EngineLost
from .slots import Numbers, Plan, slots_of

READS_TOGETHER, READS_ON_GPU = 8, 64  # requests, or images, in one call of the kernels
# (B,) each: whether all parameters were finite, the steps taken, and how many of these were passes
Decoded = tuple[NDArray[np.bool_], Numbers, Numbers]


class BitwiseDecoder(Decoder):
    """Its prefill equals its decoding, bit for bit: it restores an image by prefill, and keeps no
    copy of its state.
    """

    # where known pixels, and drawn images whose class is checked, are read
    reader: Packed | GpuPool

    def read_known(
        self, canvas: Tensor, known: Tensor, state: State | GpuPool, places: Tensor
    ) -> Tensor:
        assert isinstance(self.net, Conditional)
        features = self.reader.read(self.net.inputs_read(canvas, known), state, places)
        # one by one: a matrix product rounds differently for another number of rows
        return torch.cat([self.net.class_scores(row) for row in features[:, None]])

    def restore(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.pool.clear(slot)
            if self.slots.conditioned[slot]:
                self.read([[slot]])
        at = np.array(slots)
        begun = at[self.slots.position[at] > 0]
        if len(begun):
            self.prefill(begun, np.zeros_like(begun), self.slots.position[begun])

    def quantum(self, plan: Plan) -> Advance:
        """As Decoder.quantum, but steps may come in any order. One call, without the GIL."""
        slots, steps = plan.T
        positions, most = self.slots.position[slots], int(steps.max())
        if self.skips:
            steps = self.config.length - positions
        rows = self.slots.rows(slots, positions, steps)
        finite, taken, passes = self.decode(rows, self.slots.temperature[slots], most)
        return Advance(positions + taken, passes, slots[~finite].tolist())

    @abstractmethod
    def decode(self, rows: Numbers, temperatures: NDArray[np.float32], passes: int) -> Decoded:
        """Advance images by their steps, or as far as `passes` passes take them.

        rows: see ROWS in model/packing.py.
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
        if self._shared:
            packed = replace(packed, weights=self._shared.weights)
        self.packed = self.reader = packed
        self._pools = pools_of(
            canvas=from_numpy(self.slots.canvas),
            known=from_numpy(self.slots.known),
            S=self.state.S,
            z=self.state.z,
            last=self.state.last,
        )

    def close(self) -> None:
        if self._shared:
            self._shared.close()

    def prefill(self, slots: Numbers, positions: Numbers, steps: Numbers) -> None:
        self.packed.prefill(self._pools, from_numpy(self.slots.rows(slots, positions, steps)))

    @torch.inference_mode()
    def decode(self, rows: Numbers, temperatures: NDArray[np.float32], passes: int) -> Decoded:
        _, finite, taken, passed = self.packed.decode(
            self._pools, from_numpy(rows), from_numpy(temperatures), passes=passes
        )
        return finite.numpy(), taken.numpy(), passed.numpy()


@contextmanager
def _on_gpu() -> Iterator[None]:
    """Raise EngineLost instead of an error that the GPU keeps giving: it is then not an error of
    this batch.
    """
    try:
        yield
    except RuntimeError as error:
        try:
            # not for the whole GPU, which CUDA forbids while a reload records graphs
            torch.cuda.current_stream().synchronize()
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
    prefill_stride, prefills_together = 128, PREFILL_ROWS
    pool: GpuPool

    def __init__(
        self, checkpoint: Checkpoint, slots: int, pool: GpuPool, *, precision: str = "bf16"
    ) -> None:
        super().__init__(checkpoint, slots, pool)
        self.precision, self.stride, self.kernels = precision, pool.stride, pool.kernels
        self.state_format, self.reader = pool.state, pool

    @_on_gpu()
    def take(self, images: list[Image]) -> None:
        job, slots = images[0].job, slots_of(images)
        canvas = None if job.canvas is None else from_numpy(job.canvas)
        known = None if job.known is None else from_numpy(job.known)
        self.pool.put(slots, canvas, known)
        super().take(images)

    @_on_gpu()
    def prefill(self, slots: Numbers, positions: Numbers, steps: Numbers) -> None:
        self.pool.prefill(self.slots.rows(slots, positions, steps))

    copy, read = _on_gpu()(BitwiseDecoder.copy), _on_gpu()(BitwiseDecoder.read)
    judge = _on_gpu()(BitwiseDecoder.judge)

    @_on_gpu()
    def canvases(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        return self.pool.images(slots).numpy()

    @_on_gpu()
    def decode(self, rows: Numbers, temperatures: NDArray[np.float32], passes: int) -> Decoded:
        """Raises EngineLost if the GPU no longer answers."""
        done = self.pool.decode(rows, temperatures, passes=passes)
        self.saturated = self.pool.saturated()
        return done
