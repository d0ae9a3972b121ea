"""The compiled engine against the eager one, and both against what the machine can do.

    python -m tests.benchmarks.decode [--preset mnist,cifar10] [--batch 1,16,64] [--precision bf16,fp32] [--json FILE]

Presets have random weights, which does not change their speed; --model takes a checkpoint instead. First come this
machine's matrix product (4096^3) and the rate at which it reads a buffer of the packed weights' size, over and over.
Then images are decoded from start to end, an image row a call: of each row the median over decodes, and the mean of
these. Of a result:

    ratio_to_eager   images/s over the eager engine's, fp32, at the same batch
    roofline_share   arithmetic of the decoded images a second over that of the matrix product in the same precision
    floor_ratio      seconds of a step over those of reading the packed weights once
    tail_over_head   step time in the last tenth of the image over that in the first
"""

import argparse
import ctypes
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linpix.model import checkpoint, ops
from linpix.model.checkpoint import Checkpoint
from linpix.model.config import PRESETS, ModelConfig
from linpix.model.mixture import groups
from linpix.model.packing import PRECISIONS
from linpix.model.transformer import Transformer
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.compiled import CompiledDecoder
from linpix.server.engine.decode.decoder import Decoder, EagerDecoder, ImageSpec

EAGER_STEPS = 12  # of the eager engine, whose steps all cost the same and take long


def main() -> None:
    given = parse()
    rates = {name: matrix_product(dtype) for name, dtype in PRECISIONS.items() if name in given.precision}
    for name, rate in rates.items():
        print(f"matrix product {name}: {rate / 1e9:.0f} GFLOP/s", flush=True)
    results: list[dict[str, Any]] = []
    for source in sources(given):
        config = source.net.config
        eager = {batch: eager_step(source, batch, given.repeat) for batch in given.batch}
        for batch in given.batch:
            results.append(described(source, "eager", "fp32", batch, [eager[batch]], eager[batch]))
        for precision in given.precision:
            if not ops.compiled:
                continue
            floor = None
            for batch in given.batch:
                engine = new_decoder(source, batch, "compiled", precision)
                assert isinstance(engine, CompiledDecoder)
                floor = floor or engine.packed.step_bytes / read_rate(engine.packed.step_bytes)
                steps = decode(engine, batch, given.repeat)
                found = described(source, "compiled", precision, batch, steps, eager[batch])
                found["roofline_share"] = rounded(found["images_per_second"] * arithmetic(config) / rates[precision])
                found["floor_ratio"] = rounded(found["seconds_per_step"] / floor)
                results.append(found)
                print(json.dumps(found), flush=True)
    circumstances = {"machine": machine(), "kernel": ops.kernel(), "torch": torch.__version__,
                     "commit": checkpoint.commit(), "matrix_product_flops": rates}
    print("\n" + markdown(circumstances, results))
    if given.json:
        Path(given.json).write_text(json.dumps(circumstances | {"results": results}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--preset", type=words, default=["mnist", "cifar10"], help=", ".join(PRESETS))
    parser.add_argument("--model", type=words, default=[], help="checkpoints, by name or folder, instead of presets")
    parser.add_argument("--batch", type=lambda text: [int(word) for word in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--precision", type=words, default=["bf16", "fp32"])
    parser.add_argument("--repeat", type=int, default=3, help="decodes of each")
    parser.add_argument("--json", help="file to write")
    given = parser.parse_args()
    if unknown := set(given.precision) - set(PRECISIONS):
        parser.error(f"--precision must be of {', '.join(PRECISIONS)}, got {', '.join(unknown)}")
    if unknown := set(given.preset) - set(PRESETS):
        parser.error(f"--preset must be of {', '.join(PRESETS)}, got {', '.join(unknown)}")
    return given


def sources(given: argparse.Namespace) -> list[Checkpoint]:
    if given.model:
        return [checkpoint.read(checkpoint.find(name, None)) for name in given.model]
    torch.manual_seed(0)
    return [Checkpoint(name, Transformer(PRESETS[name]).eval().requires_grad_(False), {}, "", ())
            for name in given.preset]


def matrix_product(dtype: torch.dtype) -> float:
    """Floating-point operations a second, median of five."""
    a, b = (torch.randn(4096, 4096).to(dtype) for _ in range(2))
    a @ b
    return 2 * 4096**3 / statistics.median(seconds_of(lambda: a @ b) for _ in range(5))


def read_rate(size: int) -> float:
    """Bytes a second, by all threads, over a buffer of that size read before: memchr looks for what is not there."""
    libc = ctypes.CDLL(None)
    libc.memchr.argtypes, libc.memchr.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
    threads, rounds = torch.get_num_threads(), 40
    buffer = np.ones(size, np.uint8)
    part = size // threads

    def read(index: int) -> None:
        for _ in range(rounds):
            libc.memchr(buffer.ctypes.data + index * part, 0, part)

    def together() -> None:
        workers = [threading.Thread(target=read, args=(index,)) for index in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return part * threads * rounds / statistics.median(seconds_of(together) for _ in range(7))


def arithmetic(config: ModelConfig) -> float:
    """Floating-point operations of an image: two a weight and token, four a number of the state."""
    keys, values = config.heads * config.key_dim, config.heads * config.value_dim
    weights = config.layers * config.d_model * (2 * keys + 2 * values + 2 * config.d_ff)
    weights += groups(config.token_size) * config.mixtures * config.d_model
    return config.length * (2 * weights + 4 * config.layers * config.heads * config.key_dim * config.value_dim)


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def eager_step(source: Checkpoint, batch: int, repeat: int) -> float:
    engine = EagerDecoder(source, batch)
    slots = list(range(1, batch + 1))
    engine.take(slots, [ImageSpec(seed=seed) for seed in range(batch)])
    engine.quantum(slots, [0] * batch, [1] * batch)
    return statistics.median(seconds_of(lambda: engine.quantum(slots, [1] * batch, [EAGER_STEPS] * batch))
                             for _ in range(repeat)) / EAGER_STEPS


def decode(engine: Decoder, batch: int, repeat: int) -> list[float]:
    """Seconds of a step in each row of the image: medians over whole decodes."""
    config, slots, row = engine.config, list(range(1, batch + 1)), engine.config.row_length
    decodes: list[list[float]] = []
    for _ in range(repeat + 1):
        engine.take(slots, [ImageSpec(seed=seed) for seed in range(batch)])
        decodes.append([seconds_of(lambda at=at: engine.quantum(slots, [at] * batch, [row] * batch)) / row
                        for at in range(0, config.length, row)])
    return [statistics.median(steps) for steps in zip(*decodes[1:], strict=True)]  # the first was to warm up


def described(source: Checkpoint, engine: str, precision: str, batch: int, steps: list[float],
              eager: float) -> dict[str, Any]:
    step, tenth = statistics.mean(steps), max(1, round(len(steps) / 10))
    return {"preset": source.name, "engine": engine, "precision": precision, "batch": batch,
            "images_per_second": rounded(batch / step / source.net.config.length),
            "seconds_per_step": rounded(step), "ratio_to_eager": rounded(eager / step),
            "roofline_share": None, "floor_ratio": None,
            "tail_over_head": rounded(statistics.median(steps[-tenth:]) / statistics.median(steps[:tenth]))
            if len(steps) > 1 else None}


def rounded(x: float) -> float:
    return float(f"{x:.4g}")


def machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.machine()
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def markdown(circumstances: dict[str, Any], results: list[dict[str, Any]]) -> str:
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in circumstances["matrix_product_flops"].items())
    lines = [f"{circumstances['machine']}; kernel {circumstances['kernel']}, torch {circumstances['torch']}, commit "
             f"{circumstances['commit']}; matrix product, GFLOP/s: {rates}", "",
             "| preset | engine | B | images/s | step, us | times torch with our operator | of the matrix product "
             "| of the read floor | last tenth over first |", "|---|---|---|---|---|---|---|---|---|"]
    for r in results:
        share = f"{r['roofline_share']:.0%}" if r["roofline_share"] else ""
        floor = f"{r['floor_ratio']:.2f}" if r["floor_ratio"] else ""
        tail = f"{r['tail_over_head']:.2f}" if r["tail_over_head"] else ""
        lines.append(f"| {r['preset']} | {r['engine']} {r['precision']} | {r['batch']} | {r['images_per_second']:.3g} "
                     f"| {r['seconds_per_step'] * 1e6:.3g} | {r['ratio_to_eager']:.1f} | {share} | {floor} | {tail} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
