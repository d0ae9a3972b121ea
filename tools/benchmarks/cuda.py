"""What only a GPU can say of decoding and training, part by part; `make gpu-check` runs all of
them.

    python -m tools.benchmarks.cuda PART [--results FILE] [--preset mnist,mnist-large]
                                         [--batch 64,4096] [--state fp32,fp16] [--data FOLDER]

    machine   speed of copies, also within the L2 cache, and of a bf16 product; us of an empty
              kernel
    decode    images/s, us of a pass and TB/s of state of whole images; and for each number of rows
              of a graph the us of a pass with each variant of its kernels, of which the fastest is
              used (model/cuda.py)
    digests   of the first pictures, for each number of rows and each variant of the kernels; ends
              badly if they are not the same
    likelihood bits/dim of the first 1,000 test images of FOLDER: of each state, and in float32 on
              the processor
    kernels   us of a pass by kernel, one after the other, without a graph
    products  us of torch's bf16 products in the shapes of `mnist`; and numbers of rows at which a
              row has other bits
    exchange  us in which eight multiprocessors tell each other a row: as a cluster, and through the
              L2 cache (exchange.cu)
    training  images/s, launches of a step, and its ms by kind of kernel

A measurement is a line of FILE as soon as it is done, and what FILE has is not measured again.
Presets have random weights, which does not change their speed; but where background skips the
layers, what is drawn does, and they have those of the checkpoint of their name. Needs torch, numpy
and safetensors, training also tqdm and pillow, and csrc/cuda compiled (python setup.py build_ext
--inplace). --emulated: a library of the kernels for a processor, to try all this in tiny form.
"""

import argparse
import hashlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
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
from linpix.model.packing import POOLS, rows_of
from linpix.model.transformer import Transformer
from tools.harness.arguments import new_parser, numbers, words
from tools.harness.commands import ran
from tools.harness.machine import define_emulated
from tools.results import Found, Results

Measure = Callable[..., Found]
STEPS = 30  # of training, after a third as many
DIGESTS = 1, 2, 64  # numbers of pictures


def main() -> None:
    parser = new_parser(__doc__)
    works = machine, decode, digests, likelihood, kernels, products, exchange, training
    parts = {work.__name__: work for work in works}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--results", type=Path, default=Path("build/gpu-check/results.jsonl"))
    parser.add_argument("--preset", type=words, default=["mnist"])
    parser.add_argument("--batch", type=numbers, default=[64, 4096])
    parser.add_argument("--state", type=words, default=["fp32", "fp16"])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
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
        "saturated": pool().saturated(),
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


def digests(given: argparse.Namespace, measure: Measure) -> None:
    wrong = []
    for preset, state in product(given.preset, given.state):
        pool = cache(partial(pool_of, given, preset, state, graphs=False))
        found: dict[str, set[str]] = {}
        # only what was found to work, if a step has said so
        kinds = (os.environ[TILES],) if os.environ[TILES] else ("few", "medium", "large")
        overlaps = "10" if os.environ[OVERLAP] != "0" else "0"
        for batch, tiles, overlap in product(given.batch, kinds, overlaps):
            work = partial(drawn, pool, batch, {TILES: tiles, OVERLAP: overlap})
            line = measure(
                work, preset=preset, state=state, batch=batch, tiles=tiles, overlaps=overlap
            )
            for count, digest in line["digests"].items():
                found.setdefault(count, set()).add(digest)
        wrong += [
            f"the first {count} of {preset}, {state}" for count in found if len(found[count]) > 1
        ]
    if wrong:
        sys.exit(f"pictures depend on the number of rows, or on the kernels: {'; '.join(wrong)}")


def drawn(pool: Callable[[], GpuPool], batch: int, variant: dict[str, str]) -> Found:
    """Digests of the first pictures, as these kernels draw them."""
    images, before = Images(pool(), batch), {name: os.environ[name] for name in variant}
    os.environ.update(variant)
    try:
        while images.at.min() < images.pool.config.length:
            images.advance(images.pool.config.row_length)
    finally:
        os.environ.update(before)
    pictures = images.pool.images(images.slots).numpy()
    return {
        "digests": {
            str(count): hashlib.sha256(pictures[:count].tobytes()).hexdigest()[:16]
            for count in DIGESTS
            if count <= batch
        }
    }


class Stepped:
    """Scores given images by the steps of a pool, in the place of the compiled engine."""

    def __init__(self, pool: GpuPool) -> None:
        self.pool = pool

    def decode(self, given: list[Any], rows: Any, temperature: Any, **_: Any) -> tuple[Any, Any]:
        pool, count = self.pool, len(temperature)
        for name, part in (("canvas", pool.canvas), ("known", pool.known)):
            part[: count + 1] = given[POOLS.index(name)]
        length = pool.config.length
        found, finite, *_ = pool._operators.decode_quantum(
            pool.pools,
            rows.to(pool.device),
            temperature.to(pool.device),
            *pool._packed.model,
            [length, length, 1],
            math.inf,
            True,
        )
        return found.cpu(), finite.cpu()


def likelihood(given: argparse.Namespace, measure: Measure) -> None:
    """Of image and class together: at most 0.001 above that of the image alone."""
    from linpix.training import datasets  # its dependencies are not needed for the other parts

    for preset in given.preset:
        net = preset_net(preset) if given.emulated else checkpoint.named(preset).net
        data = datasets.load(given.data, "test", net.config)
        measure(partial(scored, net, data, None), preset=preset, state="fp32 on the processor")
        for state in given.state:
            measure(partial(scored, net, data, (given, state)), preset=preset, state=state)


def scored(net: Transformer, data: Any, on: tuple[argparse.Namespace, Any] | None) -> Found:
    """on: what the pool is made of, if a GPU computes it."""
    from linpix.training.evaluate import bits_of

    images, labels, packed, saturated = data.images[:1000], data.labels[:1000], None, 0
    if on:
        given, state = on
        operators = torch.ops.linpix_emulated if given.emulated else torch.ops.linpix
        pool = GpuPool(net, 64, device=device_of(given), operators=operators, state=state)
        packed = Stepped(pool)
    bits = bits_of(net, images, labels=labels, packed=packed)  # type: ignore[arg-type]
    if on:
        saturated = pool.saturated()
    return {"bits_per_dim": float(bits.mean()), "images": len(bits), "saturated": saturated}


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


def exchange(_: argparse.Namespace, measure: Measure) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        return print("this GPU has no clusters of multiprocessors")
    measure(exchanged)


def exchanged() -> Found:
    with tempfile.TemporaryDirectory() as folder:
        program, source = Path(folder) / "exchange", Path(__file__).with_name("exchange.cu")
        for command in (f"nvcc -std=c++17 -O2 -arch=sm_90 -o {program} {source}", program):
            ended = ran(command)
            if ended.returncode:
                raise RuntimeError(ended.stderr.strip() or f"exit status {ended.returncode}")
    found: Found = json.loads(ended.stdout)
    return found


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
    workers = Workers()
    coming = loop.parts_of(run, data, workers)
    loss_of = loop.loss_function(run.net, run.config)
    stepping = loop.steps(run, coming, loss_of, workers, lambda: (0.0, False))

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
