"""Time and peak memory of attention, forward and backward, by sequence length: figure 1 of
"Transformers are RNNs".
"""

import os
import re
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from linpix.model.attention import attention_for
from linpix.model.config import AttentionKind, ModelConfig

from ..run import check_least, setting
from . import Experiment, attention_of, check_kinds
from .lengths import (
    doublings,
    draw_lengths,
    exponents,
    in_a_process,
    missing,
    on_gpu,
    peak_of,
    tables_of,
    wait,
)
from .record import Sitting, table

# largest expected exponents of time and memory, at the longest lengths
BARS = {"linear": 1.1, "lsh": 1.3}
QUICK_S = 0.5  # a point is measured more often if a call takes less
# per sequence; empty if it did not fit
FIELDS = ("round", "kind", "length", "batch", "seconds", "bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings: the sizes of the paper's models, and its rule that the batch is inverse to the
    length.
    """

    kinds: tuple[str, ...] = setting(
        ("linear", "softmax", "softmax-matrix", "lsh-1", "lsh-4"),
        "kinds of attention; lsh-ROUNDS for lsh, softmax-matrix for softmax with its whole matrix",
    )
    shortest: int = setting(2**9, "first length N; each next one is twice as long")
    longest: int = setting(2**14, "last length N; the paper's 65536 needs a GPU")
    tokens: int = setting(
        2**14, "tokens of a batch, over all its sequences; a batch has at least one sequence"
    )
    rounds: int = setting(
        3, "number of processes that measure a point, in turns with those of the other points"
    )
    oftener: int = setting(
        3,
        "factor for --rounds at points whose call takes less than half a second, since these "
        "vary more",
    )
    calls: int = setting(
        3, "timed calls in each process, after a first call that measures the memory"
    )
    heads: int = setting(8, "number of heads, H")
    key_dim: int = setting(32, "key dim D, and value dim M")
    chunk: int = setting(32, "number of sorted tokens that attend together in lsh")
    buckets: int = setting(
        64,
        "number of lsh buckets, as in the paper's models; 0: the Reformer's rule, twice N "
        "divided by chunk",
    )
    memory: float = setting(0.5, "share of the free memory that a point may use")
    seed: int = setting(0, "seed of inputs and hashing")

    def __post_init__(self) -> None:
        check_least(self, 1, "shortest", "tokens", "rounds", "oftener", "calls")
        check_least(self, 1, "heads", "key_dim", "chunk")
        check_least(self, 0, "buckets", "seed")
        check_kinds(self.kinds, (*get_args(AttentionKind), "softmax-matrix", "lsh-ROUNDS"))
        if self.longest < 2 * self.shortest:
            raise ValueError(
                f"longest must be at least twice shortest ({self.shortest}), got {self.longest}"
            )
        if not 0 < self.memory <= 1:
            raise ValueError(f"memory must be above 0 and at most 1, got {self.memory}")

    @property
    def lengths(self) -> list[int]:
        return doublings(self.shortest, self.longest)

    def config(self, kind: str, length: int) -> ModelConfig:
        buckets = self.buckets or max(2, 2 * round(length / self.chunk))
        return ModelConfig(
            height=1,
            width=length,
            heads=self.heads,
            key_dim=self.key_dim,
            value_dim=self.key_dim,
            lsh_chunk=self.chunk,
            lsh_buckets=buckets,
            **attention_of(kind),
        )


def matrix_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention by its definition, with the full N x N matrix, like the paper's
    baseline.
    """
    length = q.shape[2]
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(
        torch.ones(length, length).bool().triu(1), -torch.inf
    )
    return scores.softmax(-1) @ v


def measure(settings: Settings, kind: str, length: int, batch: int) -> tuple[float, int]:
    """Seconds (of the median call) and peak bytes of attention and its gradients for the whole
    batch, in this process.

    The bytes do not include the inputs, but include the gradients.
    """
    torch.manual_seed(settings.seed)
    shape = batch, settings.heads, length, settings.key_dim
    *inputs, out = (torch.randn(shape) for _ in range(4))
    attention = attention_for(settings.config(kind, length))

    def call(length: int | None = None) -> float:
        mine = [x[:, :, :length].detach().requires_grad_() for x in inputs]
        wait()
        began = time.perf_counter()
        if kind == "softmax-matrix":
            y = matrix_attention(*mine)
        else:
            y = attention.parallel(0, *mine, training=True)
        y.backward(out[:, :, :length])
        wait()
        return time.perf_counter() - began

    call(min(length, 64))  # libraries initialise themselves
    peak = peak_of(call)
    return statistics.median(call() for _ in range(settings.calls)), peak


def free_bytes() -> int:
    """Bytes of memory that are free now for a new process, or on the GPU."""
    if on_gpu():
        return int(torch.cuda.mem_get_info()[0])
    found = []
    with suppress(OSError, ValueError):  # no such file, or no limit
        for kib in re.findall(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text()):
            found.append(1024 * int(kib))
        group = Path("/sys/fs/cgroup")
        most, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        found.append(int(most) - int(used))
    return min(found, default=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


class Study(Experiment):
    """Every point is measured in separate processes, so that no point reuses memory that another
    has left.
    """

    settings_type = Settings
    quick_form = MappingProxyType({"longest": 2**12, "tokens": 2**12, "rounds": 1, "oftener": 1})
    tables = MappingProxyType({"results": FIELDS})
    settings: Settings

    def work(self, sitting: Sitting) -> bool:
        s, rows = self.settings, self.record.tables["results"]
        todo = missing(rows, s.rounds * s.oftener, s.lengths, s.kinds)
        done = len(rows)
        with tqdm(total=done + len(todo), initial=done, unit="point", disable=None) as bar:
            for round_, length, kind in todo:
                if round_ >= s.rounds and not self.quick(kind, length):
                    bar.update()
                    continue
                if sitting.over:
                    return False
                bar.set_description(f"{kind}, N = {length}")
                batch = self.batch(kind, length)
                found = None
                if batch:
                    work = s, kind, length, batch
                    found = in_a_process(measure, work, sitting, f"{kind} at N = {length}")
                if sitting.stop_requested:  # the process was ended before it gave a result
                    return False
                seconds, peak = (found[0] / batch, found[1] // batch) if found else (None, None)
                self.record.add(
                    "results",
                    round=round_,
                    kind=kind,
                    length=length,
                    batch=batch,
                    seconds=seconds,
                    bytes=peak,
                )
                self.record.save()
                bar.update()
        return True

    def quick(self, kind: str, length: int) -> bool:
        """Whether a call of this point took less than QUICK_S in the first process: then it is
        measured more often.
        """
        first = next(row for row in self.rows("results", kind) if row["length"] == length)
        return first["seconds"] is not None and first["seconds"] * first["batch"] < QUICK_S

    def batch(self, kind: str, length: int) -> int:
        """Sequences by the rule, or fewer if not all fit, estimated from half the length; 0 if not
        even one fits.
        """
        s, matrix = self.settings, kind == "softmax-matrix"
        half = [row["bytes"] for row in self.rows("results", kind) if row["length"] == length // 2]
        if half and half[-1] is None:
            return 0
        # four matrices
        expected = 4 * 4 * s.heads * length**2 * matrix
        if half:
            expected = (4 if matrix else 2) * half[-1]
        return min(max(1, s.tokens // length), int(s.memory * free_bytes() / max(1, expected)))

    def draw(self, figure: Any) -> None:
        figure.set_size_inches(10, 4.5)
        draw_lengths(figure.subplots(1, 2), self.settings.kinds, self.record.tables["results"])

    def summary(self) -> str:
        s = self.settings
        results = self.record.tables["results"]
        tables = tables_of(s.kinds, s.lengths, results)
        slopes = []
        for kind in s.kinds:
            bar = BARS.get(kind.split("-")[0])
            theory = f"at most {bar}" if bar else "-"
            if kind.startswith("softmax"):
                theory = "about 2"
            in_memory = "about 1" if kind == "softmax" else theory
            time_, memory = exponents(results, kind)
            slopes.append([kind, time_, theory, memory, in_memory])
        tables.append(table(["exponent", "of time", "expected", "of memory", "expected"], slopes))
        hashing = f"{s.buckets} buckets"
        if not s.buckets:
            hashing = "as many buckets as twice N over the chunk"
        return f"""\
Attention and its gradients by sequence length, as in figure 1 of "Transformers are RNNs" (section
4.1.2): {s.heads} heads, keys and values of {s.key_dim}, float32, causal. A batch has {s.tokens:,}
tokens in all, so fewer sequences the longer they are (at least one; fewer where more would need
over {s.memory:g} of the free memory), and figures are for one sequence. They are medians over
processes of their own for every point, {s.rounds} in all ({s.rounds * s.oftener} where a call takes
under {QUICK_S:g} s), by turns with those of all other points. Time is the median of {s.calls} in
each after a first one that warms up, memory the peak of that first one beyond the inputs, gradients
included.

softmax is what the models here run: torch's fused kernel, which computes the N x N matrix piece by
piece and never keeps it. softmax-matrix keeps it, as the paper's baseline did. lsh has {hashing}
and chunks of {s.chunk} at every N: tokens see their own chunk and the one before, so the cost is
linear but for the sorting.

{tables[0]}

{tables[1]}

Exponents are slopes of log time and log memory over log N for the last two doublings that fitted.

{tables[2]}
"""
