"""The CUDA engine against the traffic that bounds it, and against the eager engine on the same GPU.

    python -m tools.benchmarks.cuda [--preset mnist,cifar10,mnist-conditional] [--batch 1,64,1024,4096]
                                      [--json FILE] [--markdown FILE]

First come this GPU's copy bandwidth (bytes read and written) and matrix product. Presets have random weights, which
does not change their speed; but where background skips the layers, what is drawn does, and they have those of the
checkpoint of their name. Whole images are decoded, a row of sub-pixels a call, or as many passes. Of a result:

    overlap       whether a kernel may begin while the one before it ends; both are measured, unless LINPIX_OVERLAP=0
                  or a graph that cannot be recorded with it forbids it
    passes        of an image through the layers, on average
    limit_share   images/s over what the run's copy bandwidth allows if nothing but the state moved
    of `kernels`  microseconds of a step, by kernel, as the profiler sees them, and the state kernel's bytes a second

Needs torch, numpy and safetensors, and csrc/cuda compiled (python setup.py build_ext --inplace).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linpix.model import checkpoint, ops
from linpix.model.attention.linear import RecurrentState
from linpix.model.config import PRESETS, ModelConfig
from linpix.model.cuda import OVERLAP, GpuPool, StateFormat
from linpix.model.generate import draw_token
from linpix.model.inputs import START
from linpix.model.transformer import Transformer

FORMATS = (StateFormat(), StateFormat(defer=8), StateFormat(precision="fp16", defer=8))
EAGER_STEPS = 16  # of the eager engine, whose steps all cost the same


def main() -> None:
    given = parse()
    if not ops.gpu:
        sys.exit(f"there is nothing to measure: {ops.why_no_gpu()}")
    for report in measure(given.preset, given.batch, repeat=given.repeat):  # written each time: it may run out
        for path, text in ((given.json, json.dumps(report, indent=1) + "\n"), (given.markdown, markdown(report))):
            if path:
                Path(path).write_text(text)
    print("\n" + markdown(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: Callable[[str], list[int]] = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("--preset", type=lambda text: text.split(","),
                        default=["mnist", "cifar10", "mnist-conditional"])
    parser.add_argument("--batch", type=numbers, default=[1, 64, 1024, 4096])
    parser.add_argument("--repeat", type=int, default=3, help="decodes of each, of which the median counts")
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--markdown", help="file to write")
    given = parser.parse_args()
    if unknown := set(given.preset) - set(PRESETS):
        parser.error(f"--preset must be of {', '.join(PRESETS)}, got {', '.join(unknown)}")
    return given


def measure(presets: list[str], batches: list[int], *, repeat: int = 3,
            emulated: Any = None) -> Iterator[dict[str, Any]]:
    """The report, after each result. emulated: operators to run on the host instead, in tiny form, for tests."""
    device = "cpu" if emulated else "cuda"
    report: dict[str, Any] = machine(device) | {
        "copy_bytes_per_second": copy_bandwidth(device, 2**20 if emulated else 2**31),
        "matrix_product_flops": matrix_product(device, 64 if emulated else 8192), "results": [], "kernels": []}
    print(json.dumps(report), flush=True)

    def reported(part: str, result: dict[str, Any]) -> dict[str, Any]:
        report[part].append(result)
        print(json.dumps(result), flush=True)
        return report

    for preset in presets:
        net = net_of(preset)
        for form in FORMATS:
            bound = report["copy_bytes_per_second"] / state_traffic(net.config, form)  # passes a second
            for wanted in (True, False) if os.environ[OVERLAP] != "0" else (False,):
                with overlapping(wanted):
                    pool = GpuPool(net, max(batches), state=form, device=device, operators=emulated)
                    for batch in batches:
                        decodes = [decode(pool, batch) for _ in range(repeat)]
                        seconds, passes = statistics.median(taken for taken, _ in decodes), decodes[0][1]
                        result = described(preset, "compiled", form, batch, seconds)
                        yield reported("results", result | {"overlap": os.environ[OVERLAP] != "0", "passes": passes,
                                                            "limit_share": batch * passes / seconds / bound})
                    del pool
            if not emulated:
                yield reported("kernels", {"preset": preset, **named(form), "batch": max(batches)}
                               | profiled(net, form, max(batches)))
        for batch in batches if not net.config.packed else ():  # of those steps cost the same
            seconds = eager_step(net, batch, device) * net.config.length
            yield reported("results", described(preset, "eager", FORMATS[0], batch, seconds))


@contextmanager
def overlapping(yes: bool) -> Iterator[None]:
    """Kernels that overlap, or do not; if a graph could not be recorded with it, none does from then on."""
    given = os.environ[OVERLAP]
    os.environ[OVERLAP] = "1" if yes else "0"
    try:
        yield
    finally:
        if not yes or os.environ[OVERLAP] != "0":
            os.environ[OVERLAP] = given


def machine(device: str) -> dict[str, Any]:
    facts = {"torch": torch.__version__, "commit": checkpoint.commit()}
    if device == "cpu":
        return facts | {"device": "emulated"}
    ended = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                           text=True, check=False)
    return facts | {"device": torch.cuda.get_device_name(), "driver": ended.stdout.strip() or "unknown"}


def seconds_of(work: Callable[[], object], device: str) -> float:
    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def copy_bandwidth(device: str, size: int) -> float:
    """Bytes a second, read and written, of copies between buffers far larger than the caches; median of five."""
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    target.copy_(source)
    times = [seconds_of(lambda: [target.copy_(source) for _ in range(10)], device) for _ in range(5)]
    return 2 * size * 10 / statistics.median(times)


def matrix_product(device: str, size: int) -> float:
    """Floating-point operations a second in bf16, of random numbers; median of five."""
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    a @ b
    times = [seconds_of(lambda: [a @ b for _ in range(10)], device) for _ in range(5)]
    return 2 * size**3 * 10 / statistics.median(times)


def net_of(preset: str) -> Transformer:
    if PRESETS[preset].packed:
        return checkpoint.read(checkpoint.find(preset, None)).net
    torch.manual_seed(0)
    return Transformer(PRESETS[preset]).eval().requires_grad_(False)


def state_traffic(config: ModelConfig, form: StateFormat) -> float:
    """Of state, that a step of one image must move: S is read, and written once in `defer` steps; z is both; of the
    pairs that wait, half a group is read on average, and all but the last are written."""
    S = config.key_dim * config.value_dim * (2 if form.precision == "fp16" else 4)
    pair, waiting = 2 * (config.key_dim + config.value_dim), form.defer - 1
    return config.layers * config.heads * (S + S / form.defer + 8 * config.key_dim
                                           + pair * (waiting / 2 + waiting / form.defer))


class Images:
    """Some that are decoded together, from where they are."""

    def __init__(self, pool: GpuPool, batch: int) -> None:
        self.pool, self.slots, self.at = pool, list(range(1, batch + 1)), np.zeros(batch, np.int64)
        pool.put(self.slots, None, None)

    def advance(self, passes: int) -> int:
        """By so many passes; returns how many all rows took together."""
        count, left = len(self.slots), self.pool.config.length - self.at
        steps = left if self.pool.config.packed else left.clip(max=passes)
        _, taken, passed = self.pool.decode(self.slots, self.at, steps, [START] * count, self.slots, [1.0] * count,
                                            passes=passes)
        self.at += taken
        return int(passed.sum())


def decode(pool: GpuPool, batch: int) -> tuple[float, float]:
    """Seconds of whole images, and passes of one."""
    config, passes = pool.config, [0]
    Images(pool, batch).advance(1)  # records the graph
    images = Images(pool, batch)

    def work() -> None:
        while images.at.min() < config.length:
            passes[0] += images.advance(config.row_length)

    return seconds_of(work, pool.device), passes[0] / batch


# Kernels of decode and prefill; a part of a kernel's name finds it. The first two are attention.
KERNELS = ("Attend", "Recall", "NormaliseRows", "Multiply", "Embed", "Finish", "RunAhead", "KeepLast")


def profiled(net: Transformer, form: StateFormat, batch: int) -> dict[str, Any]:
    """Microseconds of a step by kernel, nothing where the profiler sees no GPU.

    Without a graph, and one kernel after the other: time that one waits beside another would count twice.
    """
    pool = GpuPool(net, batch, state=form, operators=torch.ops.linpix)  # not recorded: a profiler sees kernels by name
    images, steps = Images(pool, batch), 4 * pool.stride
    with overlapping(False):
        images.advance(steps)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            passed = images.advance(steps)
    found: dict[str, float] = {}
    for event in profile.key_averages():
        name = next((part for part in KERNELS if part in event.key), "other")
        found[name] = found.get(name, 0.0) + event.self_device_time_total / steps
    attention = sum(found.get(name, 0.0) for name in KERNELS[:2])
    if not attention:
        return {"microseconds": None}
    moved = state_traffic(net.config, form) * passed / steps / attention * 1e6
    return {"microseconds": {name: round(time_, 1) for name, time_ in found.items()}, "state_bytes_per_second": moved}


@torch.inference_mode()
def eager_step(net: Transformer, batch: int, device: str) -> float:
    """Seconds of a step in torch on the same device, its attention step from the kernels where they have one."""
    with torch.device(device):
        moved = Transformer(net.config).eval().requires_grad_(False)
        moved.load_state_dict(net.state_dict())
        state = RecurrentState(net.config, batch)
        canvas = torch.zeros(batch, net.config.subpixels, dtype=torch.uint8)
        start, slots, temperatures = torch.full((batch,), START), torch.arange(1, batch + 1), torch.ones(batch)
        C = net.config.token_size
        u = torch.rand(batch, C, 2)

        def work(first: int) -> None:
            for position in range(first, first + EAGER_STEPS):
                t = torch.full((batch,), position)
                parameters = moved.step(canvas, t, start, state, slots)
                canvas[:, position * C:(position + 1) * C] = draw_token(moved, parameters, t, u, temperatures)

        work(0)
        return seconds_of(lambda: work(EAGER_STEPS), device) / EAGER_STEPS


def named(form: StateFormat) -> dict[str, Any]:
    return {"state": form.precision, "defer": form.defer}


def described(preset: str, engine: str, form: StateFormat, batch: int, seconds: float) -> dict[str, Any]:
    return {"preset": preset, "engine": engine, **named(form), "batch": batch, "images_per_second": batch / seconds,
            "seconds_per_batch": seconds}


def markdown(report: dict[str, Any]) -> str:
    lines = [f"{report['device']}, driver {report.get('driver', 'none')}, torch {report['torch']}, commit "
             f"`{report['commit'][:7]}`, `python -m tools.benchmarks.cuda`: copy "
             f"{report['copy_bytes_per_second'] / 1e12:.2f} TB/s, bf16 product "
             f"{report['matrix_product_flops'] / 1e12:.0f} TFLOP/s", "",
             "| preset | engine | state | defer | overlap | batch | images/s | seconds a batch | share of the limit |",
             "|---|---|---|---|---|---|---|---|---|"]
    for r in report["results"]:
        share = f"{r['limit_share']:.2f}" if "limit_share" in r else "-"
        overlap = {True: "on", False: "off"}.get(r.get("overlap"), "-")
        lines.append(f"| {r['preset']} | {r['engine']} | {r['state']} | {r['defer']} | {overlap} | {r['batch']} | "
                     f"{r['images_per_second']:.1f} | {r['seconds_per_batch']:.3f} | {share} |")
    for k in report["kernels"]:
        if k["microseconds"]:
            times = ", ".join(f"{name} {time_}" for name, time_ in k["microseconds"].items())
            lines.append(f"\nA step of {k['batch']} {k['preset']} images, state {k['state']}, defer {k['defer']}, in "
                         f"microseconds: {times}; the state kernel moves {k['state_bytes_per_second'] / 1e12:.2f} TB/s")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
