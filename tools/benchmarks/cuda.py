"""What only a GPU can say of decoding and training, part by part; `make gpu-check` runs all of
them.

    python -m tools.benchmarks.cuda PART [--results FILE] [--preset mnist,mnist-large]
                                         [--batch 64,4096] [--state fp32,fp16]

    machine   speed of copies, also within the L2 cache, and of a bf16 product; us of an empty
              kernel
    decode    images/s, us of a pass and TB/s of state of whole images; and for each number of rows
              of a graph the us of a pass with each variant of its kernels, of which the fastest is
              used (model/cuda.py)
    kernels   us of a pass by kernel, one after the other, without a graph
    products  us of torch's bf16 products in the shapes of `mnist`; and numbers of rows at which a
              row has other bits
    training  images/s, launches of a step, and its ms by kind of kernel

A measurement is a line of FILE as soon as it is done, and what FILE has is not measured again.
Presets have random weights, which does not change their speed; but where background skips the
layers, what is drawn does, and they have those of the checkpoint of their name. Needs torch, numpy
and safetensors, training also tqdm and pillow, and csrc/cuda compiled (python setup.py build_ext
--inplace). --emulated: a library of the kernels for a processor, to try all this in tiny form.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from linpix.model import checkpoint, ops, provenance
from linpix.model.config import PRESETS, ModelConfig
from linpix.model.cuda import GROUP, OVERLAP, TILES, TIMED, GpuPool
from linpix.model.inputs import START
from linpix.model.nets import net_for
from linpix.model.packing import rows_of
from linpix.model.transformer import Transformer
from tools.harness.arguments import new_parser, numbers, words
from tools.harness.machine import define_emulated
from tools.results import Found, Results

Measure = Callable[..., None]
STEPS = 30  # of training, after a third as many


def main() -> None:
    parser = new_parser(__doc__)
    parts = {work.__name__: work for work in (machine, decode, kernels, products, training)}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--results", type=Path, default=Path("build/gpu-check/results.jsonl"))
    parser.add_argument("--preset", type=words, default=["mnist"])
    parser.add_argument("--batch", type=numbers, default=[64, 4096])
    parser.add_argument("--state", type=words, default=["fp32", "fp16"])
    parser.add_argument("--emulated", type=Path)
    given = parser.parse_args()
    if unknown := set(given.preset) - set(PRESETS):
        parser.error(f"--preset must be of {', '.join(PRESETS)}, got {', '.join(unknown)}")
    if given.emulated:
        definitions = define_emulated(given.emulated)  # noqa: F841 - as long as this lives
    elif not ops.gpu:
        sys.exit(f"there is nothing to measure: {ops.why_no_gpu()}")
    variables: dict[str, Any] = {
        name: os.environ[name]
        for name in (OVERLAP, TILES, "CUBLASLT_WORKSPACE_SIZE")
        if os.environ.get(name) and (name, os.environ[name]) != (OVERLAP, "1")
    }
    parts[given.part](given, partial(Results(given.results).measure, part=given.part, **variables))


def device_of(given: argparse.Namespace) -> str:
    return "cpu" if given.emulated else "cuda"


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def microseconds(work: Callable[[], object], device: str, calls: int = 20) -> float:
    """Of one call: the median of seven runs of so many, recorded in a graph where there is a
    GPU.
    """
    run: Callable[[], object] = lambda: [work() for _ in range(calls)]  # noqa: E731
    run()
    wait(device)
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    times = []
    for _ in range(7):
        began = time.perf_counter()
        run()
        wait(device)
        times.append((time.perf_counter() - began) / calls * 1e6)
    return statistics.median(times)


def machine(given: argparse.Namespace, measure: Measure) -> None:
    device = device_of(given)

    def found() -> Found:
        def copy_tbs(size: int, calls: int) -> float:
            one, other = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
            return 2 * size / microseconds(lambda: one.copy_(other), device, calls) / 1e6

        side, scale = (64, 2**10) if given.emulated else (8192, 2**20)
        a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
        x, driver = torch.zeros(32, device=device), ""
        if not given.emulated:
            query = "--query-gpu=driver_version,clocks.sm,clocks.mem"
            driver = subprocess.run(
                ["nvidia-smi", query, "--format=csv,noheader"],
                capture_output=True,
                text=True,
                check=False,
            ).stdout.strip()
        name = "emulated" if given.emulated else torch.cuda.get_device_name()
        return {
            "name": name,
            "driver and clocks": driver,
            "torch": torch.__version__,
            "commit": provenance.commit(),
            "copy_tbs": copy_tbs(2048 * scale, 5),
            "l2_copy_tbs": copy_tbs(8 * scale, 50),
            "empty_kernel_us": microseconds(lambda: x.add_(1), device, 200),
            "product_tflops": 2 * side**3 / microseconds(lambda: a @ b, device, 3) / 1e6,
        }

    measure(found)


def preset_net(preset: str) -> Transformer:
    if PRESETS[preset].packed:
        return checkpoint.named(preset).net
    torch.manual_seed(0)
    return net_for(PRESETS[preset]).eval().requires_grad_(False)


def pool_of(given: argparse.Namespace, preset: str, state: str, *, graphs: bool = True) -> GpuPool:
    operators = recorder = None
    if given.emulated:
        operators = torch.ops.linpix_emulated
        recorder = (lambda work: work) if graphs else None
    elif not graphs:
        operators = torch.ops.linpix
    pool = GpuPool(
        preset_net(preset),
        max(given.batch),
        device=device_of(given),
        operators=operators,
        recorder=recorder,
        state=state,  # type: ignore[arg-type]
    )
    if graphs:
        pool.record(max(given.batch))
    return pool


def state_traffic(config: ModelConfig, state: str) -> float:
    """Of state, that a step of one image must move: S is read, and written, in float16 once a
    group; z is both; of the pairs that wait in float16, half a group is read on average, and all
    but the last are written."""
    group, size = (GROUP, 2) if state == "fp16" else (1, 4)
    S, pair = size * config.key_dim * config.value_dim, 2 * (config.key_dim + config.value_dim)
    return (
        config.layers
        * config.heads
        * (S + S / group + 8 * config.key_dim + pair * (group - 1) * (1 / 2 + 1 / group))
    )


class Images:
    """Some that are decoded together, from where they are."""

    def __init__(self, pool: GpuPool, batch: int) -> None:
        self.pool, self.slots, self.at = pool, list(range(1, batch + 1)), np.zeros(batch, np.int64)
        pool.put(self.slots, None, None)

    def advance(self, passes: int) -> int:
        """By so many passes; returns how many all rows took together."""
        count, left = len(self.slots), self.pool.config.length - self.at
        steps = left if self.pool.config.packed else left.clip(max=passes)
        rows = rows_of(
            slot=self.slots, position=self.at, steps=steps, start=[START] * count, seed=self.slots
        )
        _, taken, passed = self.pool.decode(rows.numpy(), np.ones(count, np.float32), passes=passes)
        self.at += taken
        return int(passed.sum())


def decode(given: argparse.Namespace, measure: Measure) -> None:
    for preset, state in product(given.preset, given.state):
        pool = cache(partial(pool_of, given, preset, state))
        measure(partial(timed, pool), part="variants", preset=preset, state=state)
        for batch in given.batch:
            measure(partial(decoded, pool, batch), preset=preset, state=state, batch=batch)


def decoded(pool: Callable[[], GpuPool], batch: int) -> Found:
    config = pool().config
    for _ in range(2):  # the first one is not measured
        images, passes, calls = Images(pool(), batch), 0, 0
        began = time.perf_counter()
        while images.at.min() < config.length:
            passes, calls = passes + images.advance(config.row_length), calls + 1
        seconds = time.perf_counter() - began
    moved = state_traffic(config, pool().state) * passes
    return {
        "images_per_second": batch / seconds,
        "us_a_pass": seconds / calls / config.row_length * 1e6,
        "passes": passes / batch,
        "state_tbs": moved / seconds / 1e12,
        "kernels": pool().kernels,
    }


def timed(pool: Callable[[], GpuPool]) -> Found:
    passes = TIMED * pool().stride
    found = {}
    for rows, seconds in pool().seconds.items():
        found[rows] = {}
        for (tiles, overlap), taken in seconds.items():
            without = "" if overlap == "1" else ", no overlap"
            found[rows][f"{tiles or 'usual'}{without}"] = taken / passes * 1e6
    return {"us": found}


def kernels(given: argparse.Namespace, measure: Measure) -> None:
    os.environ[OVERLAP] = "0"  # time that a kernel waits beside another would count twice
    for preset, state in product(given.preset, given.state):
        # with one, a profiler sees no names
        pool = cache(partial(pool_of, given, preset, state, graphs=False))
        for batch in given.batch:
            measure(partial(profiled, pool, batch), preset=preset, state=state, batch=batch)


def profiled(pool: Callable[[], GpuPool], batch: int) -> Found:
    images, steps = Images(pool(), batch), 4 * pool().stride
    images.advance(steps)
    times: dict[str, float] = {}
    for name, us, _ in launched(lambda: images.advance(steps), pool().device):
        times[kernel_of(name)] = times.get(kernel_of(name), 0.0) + us / steps
    return {"us": times}


def launched(work: Callable[[], object], device: str) -> list[tuple[str, float, int]]:
    """Name, us in all, and number of each kernel that this starts; without a GPU, of each
    operator.
    """
    activity, time_of = ProfilerActivity.CPU, "self_cpu_time_total"
    if device == "cuda":
        activity, time_of = ProfilerActivity.CUDA, "self_device_time_total"
    with profile(activities=[activity]) as found:
        work()
        wait(device)
    return [(event.key, getattr(event, time_of), event.count) for event in found.key_averages()]


def kernel_of(name: str) -> str:
    """A kernel's name and template arguments, without the call that it is given; another name is
    cut off.
    """
    ours = name.partition("enter<")[2].rpartition(", ")[0]
    return re.sub(r"\(\w+\)", "", re.sub(r"\w+::", "", ours)) or name[:40]


def products(given: argparse.Namespace, measure: Measure) -> None:
    """torch's may be used beside ours only where a row's bits do not depend on the number of
    rows.
    """
    for name, (wide, deep) in {
        "qkv": (768, 256),
        "out": (256, 256),
        "up": (1024, 256),
        "down": (256, 1024),
    }.items():
        measure(partial(multiplied, wide, deep, given.batch, device_of(given)), product=name)


def multiplied(wide: int, deep: int, batches: list[int], device: str) -> Found:
    torch.manual_seed(0)
    w, a = (torch.randn(rows, deep, device=device).bfloat16() for rows in (wide, max(batches)))
    whole = a @ w.T
    return {
        "rows_that_differ": [
            rows
            for rows in (1, 2, 7, 16, 64, 100, 128, 512, 1000, 2048)
            if rows < max(batches) and not torch.equal(a[:rows] @ w.T, whole[:rows])
        ],
        "us": {rows: microseconds(lambda rows=rows: a[:rows] @ w.T, device) for rows in batches},
    }


def training(given: argparse.Namespace, measure: Measure) -> None:
    steps = 3 if given.emulated else STEPS
    for preset, batch in product(given.preset, given.batch):
        work = partial(trained, preset, batch, device_of(given), steps)
        measure(work, preset=preset, batch=batch)


KINDS = {
    "attention": "causal",
    "product": "gemm|cutlass|nvjet|xmma",
    "copy": "memcpy|memset",
    "optimiser": "multi_tensor",
    "norm": "layer_norm",
    "reduction": "reduce",
}


def trained(preset: str, batch: int, device: str, steps: int) -> Found:
    """Steps of `linpix train` without torch.compile; images are noise in the middle half, on
    background.
    """
    from linpix.training import loop  # its dependencies are not needed for the other parts
    from linpix.training.datasets import Dataset
    from linpix.training.run import Run, TrainConfig
    from linpix.training.workers import Workers

    config = PRESETS[preset]
    shape = (max(4 * batch, 256), config.height, config.width, config.channels)
    random = np.random.default_rng(0)
    images = np.full(shape, config.background or 0, np.uint8)
    middle = tuple(slice(side // 4, side - side // 4) for side in shape[1:3])
    images[:, *middle] = random.integers(0, 256, images[:, *middle].shape, np.uint8)
    data = Dataset(
        "noise",
        images.reshape(len(images), -1),
        random.integers(0, 10, len(images)),
        tuple("0123456789"),
    )
    with torch.device(device):
        run = Run(config, TrainConfig(batch=batch, compile=False))
    stepping = loop.steps(run, data, Workers(), lambda: (0.0, False))

    def some(count: int) -> float:
        wait(device)
        began = time.perf_counter()
        for _ in range(count):
            next(stepping)
        wait(device)
        return (time.perf_counter() - began) / count

    some(-(-steps // 3))
    seconds, repeats = some(steps), -(-steps // 6)
    kinds: dict[str, float] = {}
    events = [event for event in launched(lambda: some(repeats), device) if event[1]]
    for key, us, _ in events:
        name = next(
            (kind for kind, words in KINDS.items() if re.search(words, key.lower())), "other"
        )
        kinds[name] = kinds.get(name, 0.0) + us / repeats / 1e3
    return {
        "images_per_second": batch / seconds,
        "ms_a_step": seconds * 1e3,
        "ms_of_kernels": sum(kinds.values()),
        "launches": sum(count for *_, count in events) / repeats,
        "ms": kinds,
    }


if __name__ == "__main__":
    main()
