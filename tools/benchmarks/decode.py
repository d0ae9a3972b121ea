"""The compiled engine against the eager one, and both against what the machine can do: a ledger of
limits.

    python -m tools.benchmarks.decode [--preset mnist,cifar10] [--batch 1,16,64]
                                      [--precision bf16,fp32,int8] [--without-eager]
                                      [--processor-time] [--json FILE]

Presets have random weights, which does not change their speed; --model takes a checkpoint instead.
First come this machine's matrix products (4096^3). Then images are decoded from start to end, an
image row a call: of each row the median over decodes, and the mean of these. Of a result:

    gflop            arithmetic of an image, all precisions together
    step_mb          what a step reads and writes: the packed weights once, and the state of every
                     image twice
    limit            images/s at which the arithmetic would be done at the rates of the matrix
                     products, each part in its own precision, or at which step_mb would be moved at
                     the rate at which this machine reads a buffer of weights and states, over and
                     over; whichever is lower
    limited_by       arithmetic or memory
    share            images/s over the limit
    ratio_to_eager   images/s over the eager engine's, fp32, at the same batch
    tail_over_head   step time in the last tenth of the image over that in the first

--processor-time: for a machine that does other work. Seconds are then those of the processor over
the number of threads. They are too long where threads wait for each other, so below some 16 images.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linpix.model import checkpoint, ops, provenance
from linpix.model.checkpoint import Checkpoint
from linpix.model.config import PRESETS
from linpix.model.nets import net_for
from linpix.model.packing import PRECISIONS
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.compiled import CompiledDecoder
from linpix.server.engine.decode.decoder import Decoder, EagerDecoder
from linpix.server.engine.decode.limits import (
    Clock,
    arithmetic,
    fill,
    limit_of,
    matrix_product,
    seconds_of,
)
from tools.harness.arguments import new_parser, numbers, words
from tools.harness.machine import machine

EAGER_STEPS = 12  # of the eager engine, whose steps all cost the same and take long


def main() -> None:
    given = parse()
    needed = set()
    for precision in given.precision:
        needed.update(arithmetic(PRESETS["tiny"], precision))
    clock = processor_seconds if given.processor_time else time.perf_counter
    rates = {name: matrix_product(PRECISIONS[name], clock=clock) for name in sorted(needed)}
    for name, rate in rates.items():
        print(f"matrix product {name}: {rate / 1e9:.0f} GFLOP/s", flush=True)
    results: list[dict[str, Any]] = []
    for source in sources(given):
        eager = dict.fromkeys(given.batch)
        if not given.without_eager:
            for batch in given.batch:
                step = eager[batch] = eager_step(source, batch, given.repeat, clock)
                results.append(described(source, "eager", "fp32", batch, [step], step))
        for precision in given.precision:
            if not ops.compiled:
                continue
            for batch in given.batch:
                engine = new_decoder(source, batch, "compiled", precision)
                assert isinstance(engine, CompiledDecoder)
                steps = decode(engine, batch, given.repeat, clock)
                found = described(source, "compiled", precision, batch, steps, eager[batch])
                limit = limit_of(engine, batch, rates, clock)
                found["gflop"] = rounded(limit.operations / 1e9)
                found["step_mb"] = rounded(limit.moved / 1e6)
                found["limit"] = rounded(batch / source.net.config.length / limit.seconds)
                found["limited_by"] = limit.by
                found["share"] = rounded(found["images_per_second"] / found["limit"])
                results.append(found)
                print(json.dumps(found), flush=True)
    circumstances = {
        "machine": machine(),
        "kernel": ops.kernel(),
        "torch": torch.__version__,
        "commit": provenance.commit(),
        "matrix_product_flops": rates,
    }
    print("\n" + markdown(circumstances, results))
    if given.json:
        Path(given.json).write_text(
            json.dumps(circumstances | {"results": results}, indent=1) + "\n"
        )


def parse() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--preset", type=words, default=["mnist", "cifar10"], help=", ".join(PRESETS)
    )
    parser.add_argument(
        "--model", type=words, default=[], help="checkpoints, by name or folder, instead of presets"
    )
    parser.add_argument("--batch", type=numbers, default=[1, 16, 64])
    parser.add_argument("--precision", type=words, default=["bf16", "fp32", "int8"])
    parser.add_argument(
        "--without-eager", action="store_true", help="leave the slow comparison out"
    )
    parser.add_argument(
        "--processor-time", action="store_true", help="on a machine that does other work"
    )
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
        return [checkpoint.named(name) for name in given.model]
    torch.manual_seed(0)
    found = []
    for name in given.preset:
        net = net_for(PRESETS[name]).eval().requires_grad_(False)
        for weight in net.parameters():
            weight.copy_(weight.bfloat16())  # as checkpoints are, which engines make use of
        found.append(Checkpoint(name, net, {}, "", ()))
    return found


def processor_seconds() -> float:
    return time.process_time() / torch.get_num_threads()


def quantum(engine: Decoder, batch: int, position: int, steps: int) -> None:
    """Advance all images from a position by so many steps."""
    slots = np.arange(1, batch + 1)
    engine.slots.position[slots] = position
    engine.quantum(np.stack([slots, np.full(batch, steps)], 1))


def eager_step(source: Checkpoint, batch: int, repeat: int, clock: Clock) -> float:
    engine = EagerDecoder(source, batch)
    fill(engine, batch)
    quantum(engine, batch, 0, 1)
    seconds = [
        seconds_of(lambda: quantum(engine, batch, 1, EAGER_STEPS), clock) for _ in range(repeat)
    ]
    return statistics.median(seconds) / EAGER_STEPS


def decode(engine: Decoder, batch: int, repeat: int, clock: Clock) -> list[float]:
    """Seconds of a step in each row of the image: medians over whole decodes."""
    length, row = engine.config.length, engine.config.row_length
    decodes: list[list[float]] = []
    for _ in range(repeat + 1):
        fill(engine, batch)
        steps = []
        for at in range(0, length, row):
            steps.append(seconds_of(lambda at=at: quantum(engine, batch, at, row), clock) / row)
        decodes.append(steps)
    # the first was to warm up
    return np.median(decodes[1:], axis=0).tolist()


def described(
    source: Checkpoint,
    engine: str,
    precision: str,
    batch: int,
    steps: list[float],
    eager: float | None,
) -> dict[str, Any]:
    step, tail_over_head = statistics.mean(steps), None
    if len(steps) > 1:
        tenth = max(1, round(len(steps) / 10))
        tail, head = statistics.median(steps[-tenth:]), statistics.median(steps[:tenth])
        tail_over_head = rounded(tail / head)
    ratio = rounded(eager / step) if eager else None
    return {
        "preset": source.name,
        "engine": engine,
        "precision": precision,
        "batch": batch,
        "images_per_second": rounded(batch / step / source.net.config.length),
        "seconds_per_step": rounded(step),
        "ratio_to_eager": ratio,
        "gflop": None,
        "step_mb": None,
        "limit": None,
        "limited_by": None,
        "share": None,
        "tail_over_head": tail_over_head,
    }


def rounded(x: float) -> float:
    return float(f"{x:.4g}")


def markdown(circumstances: dict[str, Any], results: list[dict[str, Any]]) -> str:
    rates = ", ".join(
        f"{name} {rate / 1e9:.0f}" for name, rate in circumstances["matrix_product_flops"].items()
    )
    lines = [
        (
            f"{circumstances['machine']}; kernel {circumstances['kernel']}, torch"
            f" {circumstances['torch']}, commit {circumstances['commit']}; matrix product, GFLOP/s:"
            f" {rates}"
        ),
        "",
        (
            "| preset | engine | B | GFLOP an image | MB a step | limit, images/s | limited by |"
            " images/s | share | step, us | times torch with our operator | last tenth over first |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        known = r["limit"]
        limit = (
            f"{r['gflop']:.3g} | {r['step_mb']:.3g} | {known:.3g} | {r['limited_by']}"
            if known
            else "| | |"
        )
        share = f"{r['share']:.0%}" if r["share"] else ""
        ratio = f"{r['ratio_to_eager']:.1f}" if r["ratio_to_eager"] else ""
        tail = f"{r['tail_over_head']:.2f}" if r["tail_over_head"] else ""
        step, rate = f"{r['seconds_per_step'] * 1e6:.3g}", f"{r['images_per_second']:.3g}"
        lines.append(
            f"| {r['preset']} | {r['engine']} {r['precision']} | {r['batch']} | {limit} | {rate} |"
            f" {share} | {step} | {ratio} | {tail} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
