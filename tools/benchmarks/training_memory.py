"""Peak memory of a training step: reversible layers, chunked feed-forward, both, and neither.

    python -m tools.benchmarks.training_memory [--preset mnist] [--layers 8,16,32] [--batch 4]
    [--chunks 8] [--compile] python -m tools.benchmarks.training_memory --layers 8 --batch 1
    --lengths 512,1024,2048,4096,8192,16384

Forward and backward with random weights, each point in a process of its own: the most resident
memory that it has during a step, over what it has before. So that is activations, what operations
borrow, and the weights' gradients, which are told beside it; the optimiser is in neither. The C
library gives back at once what is freed (its threshold is fixed at 64 KB), so figures are of what
lives and not of holes between; time is measured without that, and is the processor's, which other
work on the machine disturbs less. A step that is not counted comes first, for what loads or
compiles once. Linux with glibc only.
"""

import argparse
import ctypes
import dataclasses
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import torch

from linpix.model import provenance
from linpix.model.config import PRESETS
from linpix.model.inputs import START
from linpix.model.nets import net_for
from linpix.training.batches import part_of
from linpix.training.loop import loss_function
from linpix.training.run import TrainConfig
from tools.harness.arguments import new_parser
from tools.harness.machine import machine

FORMS: dict[str, tuple[Literal["plain", "reversible"], bool]] = {
    "plain": ("plain", False),
    "chunked": ("plain", True),
    "reversible": ("reversible", False),
    "both": ("reversible", True),
}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--preset", default="mnist", choices=PRESETS)
    parser.add_argument("--attention", default="linear", choices=("linear", "softmax", "lsh"))
    parser.add_argument("--layers", default="8,16,32", help="comma-separated")
    parser.add_argument(
        "--lengths",
        default="",
        help=(
            "sub-pixels N of an image, comma-separated multiples of 32; the "
            "preset's own if left out"
        ),
    )
    parser.add_argument("--batch", type=int, default=4, help="images a step")
    parser.add_argument(
        "--chunks", type=int, default=8, help="of the feed-forward, where it is chunked"
    )
    parser.add_argument(
        "--forms", default=",".join(FORMS), help=f"comma-separated, of {', '.join(FORMS)}"
    )
    parser.add_argument("--compile", action="store_true", help="compile the loss as training does")
    parser.add_argument(
        "--steps", type=int, default=3, help="time is their median, memory that of the hungriest"
    )
    # one form and depth, measured in this process
    parser.add_argument("--point", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        print(json.dumps(measured(given, *given.point.split(","))))
        return
    how = "compiled" if given.compile else "not compiled"
    print(
        f"`{given.preset}`, {given.attention} attention, batch {given.batch}, {given.chunks}"
        f" chunks, {how}; {machine()}, torch {torch.__version__}, commit {provenance.commit()}\n"
    )
    print(
        "| layers | N | | peak, MB | gradients in it, MB | peak of an image, MB | of plain | time,"
        " of plain |\n|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    own = PRESETS[given.preset].subpixels
    for layers, length in itertools.product(given.layers.split(","), given.lengths.split(",")):
        plain = None
        for form in given.forms.split(","):
            point = f"{form},{layers},{length or own}"
            found = in_a_process(point, MALLOC_MMAP_THRESHOLD_="65536") | {
                "seconds": in_a_process(point)["seconds"]
            }
            plain = plain or found
            image = (found["bytes"] - found["gradients"]) / given.batch
            print(
                f"| {layers} | {length or own} | {form} | {found['bytes'] / 1e6:.0f} |"
                f" {found['gradients'] / 1e6:.0f} | {image / 1e6:.1f} |"
                f" {found['bytes'] / plain['bytes']:.2f} |"
                f" {found['seconds'] / plain['seconds']:.2f} |",
                flush=True,
            )


def in_a_process(point: str, **environment: str) -> dict[str, float]:
    words = [
        sys.executable,
        "-m",
        "tools.benchmarks.training_memory",
        *sys.argv[1:],
        "--point",
        point,
    ]
    ended = subprocess.run(
        words, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    )
    result: dict[str, float] = json.loads(ended.stdout)
    return result


def measured(given: argparse.Namespace, form: str, layers: str, length: str) -> dict[str, float]:
    """Bytes at the peak of a step over those before it, those of gradients, and processor seconds
    of a step.
    """
    residual, chunked = FORMS[form]
    config = dataclasses.replace(
        PRESETS[given.preset],
        attention=given.attention,
        layers=int(layers),
        norm="pre",
        residual=residual,
    )
    if config.subpixels != int(length):
        config = dataclasses.replace(config, height=int(length) // 32, width=32, channels=1)
    torch.manual_seed(0)
    chunks = given.chunks if chunked else 1
    net = net_for(config, feed_forward_chunks=chunks)
    loss = loss_function(net, TrainConfig(compile=given.compile))
    images = torch.randint(0, 256, (given.batch, config.subpixels), dtype=torch.uint8)
    start = torch.full((given.batch,), START)
    part = part_of(net, images, start)
    loss(part).backward()
    peaks, seconds = [], []
    for _ in range(given.steps):
        net.zero_grad()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier steps borrowed goes back
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, began = _status("VmRSS"), time.process_time()
        loss(part).backward()
        seconds.append(time.process_time() - began)
        peaks.append(_status("VmHWM") - before)
    gradients = sum(p.numel() * p.element_size() for p in net.parameters())
    return {"bytes": max(peaks), "gradients": gradients, "seconds": statistics.median(seconds)}


def _status(name: str) -> int:
    """A size of /proc/self/status, in bytes."""
    [line] = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    ]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
