"""Decoding on a GPU: a pool of slots in its memory, and a CUDA graph for each number of rows."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate, product
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .attention import PADDING_SLOT
from .inputs import START
from .packing import PRECISIONS, ROWS, pack, pack_state, pools_of, rows_of, state_scale
from .transformer import Transformer

# rows of a graph; unused rows are padding, which is computed too
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
# as in csrc/cuda/kernels.h: tokens that are added to a float16 S together, and its heads
GROUP, HALF_HEAD = 8, 32
PREFILL_ROWS = 256  # at once: 128 tokens of each need 250 MB of buffers in the mnist preset
Numbers = NDArray[np.int64] | Sequence[int]
# Precision of S, whose reading and writing is the main cost of decode on a GPU; z stays float32.
# With fp16 little more than a third of the bytes move: elements are half as long, and S is written,
# and rounded, once in eight tokens.
StatePrecision = Literal["fp32", "fp16"]
Work = Callable[[], object]
# values of LINPIX_TILES and LINPIX_OVERLAP: other kernels, and the same bits
Variant = tuple[str, str]

logger = logging.getLogger(__name__)
# for recording, by GPU: each stream keeps the memory that was used on it
_stream = cache(torch.cuda.Stream)
# CUDA allows one capture at a time, and a model may be loaded while another one decodes
_recording = threading.Lock()
# held while kernels run, so that variants are timed when nothing else decodes
_running = threading.RLock()
# The tiles of products, "" for those of csrc's own rule; and whether a kernel may begin while the
# one before it ends. csrc reads both at each launch. They are set at import: adding a name later
# may make C move the environment while another thread reads it.
TILES, OVERLAP = "LINPIX_TILES", "LINPIX_OVERLAP"
os.environ.setdefault(TILES, "")
os.environ.setdefault(OVERLAP, "1")
SLOT, POSITION, STEPS = ROWS.index("slot"), ROWS.index("position"), ROWS.index("steps")
# the other lines of a graph's numbers
PASSES, TEMPERATURES, FINITE = len(ROWS), len(ROWS) + 1, len(ROWS) + 2
TIMED = 4  # strides of a graph, to choose among variants
# their seconds; kept, and so is the choice, for the life of the process
_timed = dict[object, dict[Variant, float]]()


def check_state(state: str) -> None:
    """Raises ValueError for a precision of S that there is not."""
    if state not in get_args(StatePrecision):
        raise ValueError(f"state must be fp32 or fp16, got {state!r}")


@dataclass(slots=True)
class _Rows:
    """The tensors of its rows that a graph reads and writes, at fixed addresses."""

    # (9, bucket) int64, one transfer each way: the lines of ROWS with the steps that are left,
    # passes (steps that went through the layers), and at the beginning of a line each temperatures
    # (float32) and finite (bool)
    numbers: Tensor
    graph: Work | None = field(default=None)  # replays the recorded work


def record_graph(work: Work, device: str = "cuda", pool: Any = None) -> Work:
    """Record the work of `work` on this GPU; return a function that replays it. Runs the work twice
    meanwhile.

    pool: handle of the memory that it shares with graphs that never run at the same time.

    On a stream of its own, and not by torch.cuda.graph, which would wait until another model has
    decoded.
    """
    with torch.cuda.device(device):  # the stream is one of the current GPU
        graph, stream = torch.cuda.CUDAGraph(), _stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # warm-up: some things are created at first use
            stream.synchronize()
            # other threads may allocate memory meanwhile
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
            graph.replay()  # detects a graph that the driver accepts but cannot run
            stream.synchronize()
    return graph.replay


def _record(recorder: Callable[[Work], Work], work: Work, variant: Variant | None = None) -> Work:
    """Record; if that fails, record again with kernels that do not overlap: a driver may refuse
    overlapping ones.
    """
    with _recording:
        tiles, overlap = os.environ[TILES], os.environ[OVERLAP]
        if variant:
            os.environ[TILES], os.environ[OVERLAP] = variant[0], min(variant[1], overlap)
        try:
            return recorder(work)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if os.environ[OVERLAP] == "0":
                raise
            overlap = os.environ[OVERLAP] = "0"
            logger.warning(
                "a CUDA graph could not be recorded (%s); this process now decodes without"
                " overlapping kernels, which is slower, and torch up to 2.11 no longer frees cached"
                " memory when it runs out",
                str(error).partition("\n")[0],
            )
            return recorder(work)
        finally:
            os.environ[TILES], os.environ[OVERLAP] = tiles, overlap


class GpuPool:
    """One model's weights and slots on a GPU. Slots need no clearing: position 0 means an empty
    state.
    """

    def __init__(
        self,
        net: Transformer,
        slots: int,
        *,
        precision: str = "bf16",
        state: StatePrecision = "fp32",
        device: str = "cuda",
        operators: Any = None,
        recorder: Callable[[Work], Work] | None = None,
    ) -> None:
        """operators: has decode_quantum, prefill and read. Tests give it, with another device, to
        emulate a GPU.

        recorder: a function like record_graph, which is the default unless operators are given.
        Without a recorder the operators are called at each stride.
        """
        config, half = net.config, state == "fp16"
        check_state(state)
        if half and config.key_dim != HALF_HEAD:
            raise ValueError(
                f"--state fp16 is for heads of size {HALF_HEAD}, but this model has heads of size "
                f"{config.key_dim}; use --state fp32"
            )
        self.config, self.device, self.precision, self.state = config, device, precision, state
        self._operators = operators or torch.ops.linpix
        self._recorder = recorder
        if recorder is None and operators is None:
            pool = torch.cuda.graph_pool_handle()
            self._recorder = partial(record_graph, device=device, pool=pool)
        # passes per graph
        self.stride = max(steps for steps in range(1, 9) if config.row_length % steps == 0)
        self._rows: dict[int, _Rows] = {}
        # of each number of rows, as they were timed
        self.seconds: dict[int, dict[Variant, float]] = {}
        self._packed = pack(net, PRECISIONS[precision], gpu=True).to(device)
        zeros = partial(torch.zeros, device=device)
        shape = slots + 1, config.layers, config.heads
        dtype = torch.float16 if half else torch.float32
        self.S = zeros(*shape, config.key_dim, config.value_dim, dtype=dtype)
        self.z = zeros(*shape, config.key_dim)
        self.pairs = self.scale = self._saturated = self.last = self.tokens = None
        if config.packed:
            self.tokens = zeros(slots + 1, dtype=torch.int64)
        if config.background is not None:
            self.last = zeros(slots + 1, config.background_dim)
        if half:
            self.pairs = zeros(*shape, GROUP, 2 * HALF_HEAD, dtype=torch.bfloat16)
            self.scale = state_scale(net).to(device)
            self._saturated = zeros(1, dtype=torch.int64)
        self.canvas = zeros(slots + 1, config.subpixels, dtype=torch.uint8)
        self.known = zeros(slots + 1, config.subpixels, dtype=torch.bool)

    @property
    def pools(self) -> list[Tensor]:
        """As the operators take them."""
        return pools_of(
            canvas=self.canvas,
            known=self.known,
            S=self.S,
            z=self.z,
            last=self.last,
            tokens=self.tokens,
            pairs=self.pairs,
            scale=self.scale,
            saturated=self._saturated,
        )

    @property
    def _parts(self) -> list[Tensor]:
        return [
            part
            for part in (self.S, self.z, self.pairs, self.last, self.tokens)
            if part is not None
        ]

    def saturated(self) -> int:
        """Number of elements of S so far that exceeded float16 and were clamped. It should be 0."""
        return 0 if self._saturated is None else int(self._saturated)

    def put(self, slots: Numbers, canvas: Tensor | None, known: Tensor | None) -> None:
        """Set the initial canvas (T,) uint8 and known (T,) bool of these slots' images; None clears
        them.
        """
        at = torch.from_numpy(np.asarray(slots, np.int64)).to(self.device)
        self.canvas[at] = 0 if canvas is None else canvas.to(self.device)
        self.known[at] = False if known is None else known.to(self.device)

    def images(self, slots: Numbers) -> Tensor:
        """The images in these slots, (B, T) uint8, on the CPU."""
        return self.canvas[torch.from_numpy(np.asarray(slots, np.int64)).to(self.device)].cpu()

    def clear(self, slot: int) -> None:
        """Does nothing: an image's first token starts from an empty state, whatever the slot
        holds.
        """

    def fill_with_nan(self, slot: int) -> None:
        for part in self._parts:
            # tokens stay as they are: a slot with 0 tokens is not read
            if part.is_floating_point():
                part[slot] = torch.nan

    def copy(self, source: int, targets: list[int]) -> None:
        for part in self._parts:
            part[targets] = part[source].clone()

    @torch.inference_mode()
    def read(self, inputs: Sequence[Tensor], state: Any, slots: Tensor) -> Tensor:
        """Fold each image's inputs of the first layer into an empty state, in float32.

        inputs: B tensors (n, d_model) float32, n at least 1 · slots: (B,) int64, which get these
        states, as one complete group of tokens each, if `state` is this pool; else nobody gets them
        · returns the final features of each image's last token, (B, d_model) float32, on the CPU.
        """
        count, config, device = len(inputs), self.config, self.device
        assert state is not self or (slots.min() > PADDING_SLOT and slots.max() < len(self.canvas))
        shape = count, config.layers, config.heads, config.key_dim
        S = torch.empty(*shape, config.value_dim, device=device)
        z, last = torch.empty(shape, device=device), None
        if self.last is not None:
            last = torch.empty(count, config.background_dim, device=device)
        offsets = torch.tensor([0, *accumulate(map(len, inputs))])
        features: Tensor = self._operators.read(
            pools_of(S=S, z=z, last=last),
            torch.arange(count, device=device),
            torch.cat([*inputs]).to(device),
            offsets.to(device),
            *self._packed.model,
            max(map(len, inputs)),
            1,
        )
        if state is self:
            self._load(slots.to(device), S, z, last)
        return features.cpu()

    def _load(self, slots: Tensor, S: Tensor, z: Tensor, last: Tensor | None) -> None:
        assert self.tokens is not None
        if self.scale is not None and self._saturated is not None:
            S = S / self.scale[..., None, None]
            most = torch.finfo(torch.float16).max
            self._saturated += (S.abs() > most).sum()
            S = pack_state(S.clamp(-most, most))
        self.S[slots], self.z[slots] = S.to(self.S.dtype), z
        self.tokens[slots] = 1 if self.pairs is None else GROUP
        if self.last is not None and last is not None:
            self.last[slots] = last

    @torch.inference_mode()
    def prefill(self, rows: NDArray[np.int64]) -> None:
        """Fold the next inputs of each image into its slot, from its position on: start token, x_0,
        x_1 and so on.

        rows: (6, B), see ROWS; seeds do not count. Waits for the GPU, so that a caller can measure
        the time.
        """
        self._check(rows)
        with _running:
            for first in range(0, rows.shape[1], PREFILL_ROWS):
                part = rows[:, first : first + PREFILL_ROWS]
                self._operators.prefill(
                    self.pools,
                    torch.from_numpy(np.ascontiguousarray(part)).to(self.device),
                    *self._packed.model,
                    int(part[STEPS].max()),
                    1,
                )
            self._wait()

    def _wait(self) -> None:
        """Wait for this thread's work. Waiting for the whole GPU is an error in CUDA while another
        thread records a graph, as a reload does.
        """
        if self.canvas.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    @torch.inference_mode()
    def decode(
        self,
        rows: NDArray[np.int64],
        temperatures: NDArray[np.float32],
        *,
        passes: int | None = None,
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
        """Advance each of B images from its position by its number of steps, or until `passes` are
        used up.

        rows: (6, B), see ROWS · temperatures: (B,) · passes: limit of passes through the layers,
        rounded up to a multiple of `stride`.
        Returns, (B,) each, whether all parameters were finite, the steps taken, and how many of
        them went through the layers. Decodes up to 4,096 images at a time, and waits for the GPU
        once per 4,096.
        """
        self._check(rows)
        count, most = rows.shape[1], BUCKETS[-1]
        if temperatures.shape != (count,):
            raise ValueError(
                f"there must be a temperature for each of {count} rows, got {temperatures.shape}"
            )
        if not (temperatures >= 0).all():
            raise ValueError(f"temperatures must be at least 0, got {temperatures.min()}")
        steps = np.where(rows[SLOT] == PADDING_SLOT, 0, rows[STEPS])
        longest = int(steps.max())
        limit = longest if passes is None else min(passes, longest)
        strides = -(-limit // self.stride)
        rows = np.stack([*rows[:STEPS], steps, *rows[STEPS + 1 :]])
        parts = []
        for first in range(0, count, most):
            some = slice(first, first + most)
            parts.append(self._decode(rows[:, some], temperatures[some], strides))
        finite, taken, passed = np.concatenate(parts, 1)
        return finite.astype(np.bool_), taken, passed

    def _decode(
        self, numbers: NDArray[np.int64], temperatures: NDArray[np.float32], strides: int
    ) -> NDArray[np.int64]:
        """Run the graph `strides` times; returns (3, B): the results of decode."""
        count = len(temperatures)
        rows = self._rows_for(count)
        graph = rows.graph or partial(self._advance, rows)
        done = self._replay(rows, graph, numbers, temperatures, strides)
        finite = done[FINITE].view(np.bool_)[:count]
        return np.stack([finite, done[POSITION, :count] - numbers[POSITION], done[PASSES, :count]])

    def _replay(
        self,
        rows: _Rows,
        graph: Work,
        numbers: NDArray[np.int64],
        temperatures: NDArray[np.float32],
        strides: int,
    ) -> NDArray[np.int64]:
        """Returns what the numbers of _Rows are then."""
        count = len(temperatures)
        host = np.zeros(rows.numbers.shape, np.int64)  # padding takes no step
        host[: len(ROWS), :count] = numbers
        host[TEMPERATURES].view(np.float32)[:count] = temperatures
        host[FINITE].view(np.bool_)[:] = True
        with _running:
            rows.numbers.copy_(torch.from_numpy(host))
            for _ in range(strides):
                graph()
            return rows.numbers.cpu().numpy()

    def record(self, rows: int) -> None:
        """Record the graphs for every number of rows up to this one, each in its fastest variant.

        To time them, images are drawn into the slots, so none may be in use.
        """
        for bucket in BUCKETS:
            if self._recorder and bucket not in self._rows:
                self._rows[bucket] = self._fastest(self._recorder, bucket)
            if bucket >= rows:
                break
        logger.info(
            "kernels for %s layers of width %s, state %s: %s",
            self.config.layers,
            self.config.d_model,
            self.state,
            self.kernels,
        )

    @property
    def kernels(self) -> str:
        """The variants in use, each with the largest number of rows that it is used for."""
        found: dict[int, str] = {}
        for bucket, seconds in self.seconds.items():
            tiles, overlap = min(seconds, key=seconds.__getitem__)
            variant = f"{tiles or 'usual'} tiles" + ("" if overlap == "1" else " without overlap")
            if found and [*found.values()][-1] == variant:
                found.popitem()
            found[bucket] = variant
        return ", ".join(f"{variant} up to {bucket} rows" for bucket, variant in found.items())

    def _fastest(self, recorder: Callable[[Work], Work], bucket: int) -> _Rows:
        rows = self._new_rows(bucket)
        tiles: tuple[str, ...] = (os.environ[TILES],)
        if self.precision == "bf16" and tiles == ("",):
            tiles = "few", "medium", "large"
        overlaps = ("1", "0") if os.environ[OVERLAP] != "0" else ("0",)
        seconds = _timed.setdefault(
            (self.config, self.precision, self.state, self.device, bucket), {}
        )
        for variant in (
            [min(seconds, key=seconds.__getitem__)] if seconds else [*product(tiles, overlaps)]
        ):
            graph = _record(recorder, partial(self._advance, rows), variant)
            if variant not in seconds:
                seconds[variant] = min(self._time(rows, graph) for _ in range(3))
            if seconds[variant] == min(seconds.values()):
                rows.graph = graph
        self.seconds[bucket] = seconds
        return rows

    def _new_rows(self, bucket: int) -> _Rows:
        return _Rows(torch.zeros(FINITE + 1, bucket, dtype=torch.int64, device=self.device))

    def _time(self, rows: _Rows, graph: Work) -> float:
        """Seconds of TIMED strides in which all rows draw, from their first tokens on."""
        slots = np.arange(1, min(rows.numbers.shape[1], len(self.canvas) - 1) + 1)
        numbers = rows_of(
            slot=slots,
            steps=[self.config.length] * len(slots),
            start=[START] * len(slots),
            seed=slots,
        )
        with _running:
            began = time.perf_counter()
            self._replay(rows, graph, numbers.numpy(), np.ones(len(slots), np.float32), TIMED)
            return time.perf_counter() - began

    def _advance(self, rows: _Rows) -> None:
        """The content of a graph: `stride` passes of every row with steps left, and the update of
        its numbers.
        """
        numbers, bucket = rows.numbers, rows.numbers.shape[1]
        temperatures = numbers[TEMPERATURES].view(torch.float32)[:bucket]
        all_finite = numbers[FINITE].view(torch.bool)[:bucket]
        most = self.stride if self.tokens is None else self.config.length
        _, finite, taken, passes = self._operators.decode_quantum(
            self.pools,
            numbers[: len(ROWS)],
            temperatures,
            *self._packed.model,
            [most, self.stride, 1],
            math.inf,
            False,
        )
        all_finite &= finite
        numbers[PASSES] += passes
        numbers[POSITION] += taken
        numbers[STEPS] -= taken

    def _rows_for(self, count: int) -> _Rows:
        """The smallest bucket that holds this many rows. Its graph is recorded at first use."""
        bucket = next(size for size in BUCKETS if size >= count)
        if bucket not in self._rows:
            rows = self._new_rows(bucket)
            if self._recorder:  # no row has a step left yet
                rows.graph = _record(self._recorder, partial(self._advance, rows))
            self._rows[bucket] = rows
        return self._rows[bucket]

    def _check(self, rows: NDArray[np.int64]) -> None:
        """Check the arguments, since the kernels do not: a wrong one would write into another
        image's memory.
        """
        slots, positions, steps, start, *_ = rows
        N, length, last = len(self.canvas), self.config.length, START + self.config.classes
        if (
            not len(slots)
            or slots.min() < 0
            or slots.max() >= N
            or np.bincount(slots)[PADDING_SLOT + 1 :].max(initial=0) > 1
        ):
            raise ValueError(
                f"slots must be in 0..{N - 1}, and only 0 may appear twice, got {slots.tolist()}"
            )
        if wrong := np.flatnonzero(
            (positions < 0) | (steps < 0) | (positions + steps > length)
        ).tolist():
            raise ValueError(
                f"an image has {length} tokens, got {steps[wrong[0]]} steps from"
                f" {positions[wrong[0]]}"
            )
        if start.min() < START or start.max() > last:
            raise ValueError(f"start must be in {START}..{last}, got {start.tolist()}")
