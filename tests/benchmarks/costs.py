"""What each thing that ships costs in images/s: the `mnist` preset with and without it, in one run.

    python -m tests.benchmarks.costs --data DIR [--preset mnist] [--batch 1,16,64] [--precision auto] [--rounds 3]
                                     [--lines WORDS] [--processor-time]

Weights are random, which does not change their speed; but what random weights draw has no background. So lines that
are measured "on test digits" have all sub-pixels but the first given: they go through the model as those that it draws
itself do, and skip the layers where test images of MNIST do. Completions draw the upper half of a digit whose lower
half was read. B images are decoded at a time; one that is done makes room for the next, and what is decoded is counted
until the last of 3 B images has joined. Lines and precisions take turns; each figure is the median of the rounds, and a
ratio is the median of the ratios within a round: to the line that it is compared with, and to the first precision.
--lines: only those whose names contain one of these words. --processor-time: as in decode.py.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from linpix.model import checkpoint, ops
from linpix.model.checkpoint import Checkpoint
from linpix.model.config import PRESETS, ModelConfig
from linpix.model.transformer import Transformer
from linpix.server.engine.batch import Batcher
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.image_spec import ImageSpec
from linpix.server.engine.messages import Submission
from linpix.training import datasets
from tests.benchmarks.decode import Clock, machine, processor_seconds

BATCHES = 3
Specs = Callable[[int, NDArray[np.uint8]], ImageSpec]  # of an image, by its seed and a test digit


def drawn(seed: int, digit: NDArray[np.uint8]) -> ImageSpec:
    return ImageSpec(seed=seed)


def given(seed: int, digit: NDArray[np.uint8]) -> ImageSpec:
    return ImageSpec(seed=seed, label=seed % 10, canvas=digit, known=np.arange(len(digit)) > 0)


def completed(seed: int, digit: NDArray[np.uint8]) -> ImageSpec:
    return ImageSpec(seed=seed, canvas=digit, known=np.arange(len(digit)) >= len(digit) // 2)


@dataclass(frozen=True, slots=True)
class Line:
    """A model, and the line that its images/s are compared with."""

    name: str
    config: ModelConfig
    specs: Specs = given
    relative_to: str = ""


def lines_of(preset: ModelConfig) -> list[Line]:
    conditional = PRESETS["mnist-conditional"]
    classes = dataclasses.replace(preset, look_ups=(*preset.look_ups, "class"))
    hears = dataclasses.replace(preset, patch=conditional.patch, following=conditional.following)
    return [
        Line("the preset, on test digits", preset),
        Line("without its neighbours", dataclasses.replace(preset, neighbours=()), given, "the preset, on test digits"),
        Line("with the class looked up at each position", classes, given, "the preset, on test digits"),
        Line("background skips the layers", dataclasses.replace(preset, background=0), given,
             "the preset, on test digits"),
        Line("the preset, drawn", preset, drawn),
        Line("with the condition, nothing known", hears, drawn, "the preset, drawn"),
        Line("with the condition, half known, completions", hears, completed, "the preset, drawn"),
    ]


def rate(line: Line, count: int, digits: NDArray[np.uint8], batcher: Batcher, clock: Clock) -> float:
    """Images/s while the batch is full; of images that are under way, the part that has been decoded counts."""
    steps = line.config.length // (2 if line.specs is completed else 1)
    finished, began = 0, clock()
    for seed in range(count):
        batcher.submit(Submission(str(seed), [line.specs(seed, digits[seed % len(digits)])]))
    while len(batcher.scheduler.waiting):
        report = batcher.run_quantum()
        finished += len(report.finished)
    decoded = finished + sum(image.position for image in report.running) / steps
    seconds = clock() - began
    for image in report.running:
        batcher.cancel(image.request)
    while batcher.busy:
        batcher.run_quantum()
    return decoded / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST")
    parser.add_argument("--preset", default="mnist", choices=("mnist", "mnist-small"))
    parser.add_argument("--batch", type=lambda text: [int(word) for word in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--precision", type=lambda text: text.split(","), default=["auto"])
    parser.add_argument("--lines", type=lambda text: text.split(","), default=[""])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processor-time", action="store_true")
    asked = parser.parse_args()
    clock = processor_seconds if asked.processor_time else time.perf_counter
    preset = PRESETS[asked.preset]
    digits = datasets.load(asked.data, "test", preset).images[:256]
    lines = [line for line in lines_of(preset) if any(word in line.name for word in asked.lines)]
    kinds = [(line, precision) for precision in asked.precision for line in lines]
    print(f"{machine()}; kernel {ops.kernel()}, torch {torch.__version__}, commit {checkpoint.commit()}\n")
    print(f"| B | `{asked.preset}` | precision | images/s | relative | to {asked.precision[0]} |")
    print("|---|---|---|---|---|---|", flush=True)
    for batch in asked.batch:
        batchers: dict[tuple[str, str], Batcher] = {}
        rates: dict[tuple[str, str], list[float]] = {(line.name, precision): [] for line, precision in kinds}
        for line, precision in kinds:
            torch.manual_seed(0)
            net = Transformer(line.config).eval().requires_grad_(False)
            decoder = new_decoder(Checkpoint(line.name, net, {}, "", ()), batch, precision=precision)
            batchers[line.name, precision] = Batcher(decoder)
            rate(line, 2, digits, batchers[line.name, precision], clock)  # to warm up
        for turn in range(asked.rounds):
            for line, precision in kinds if turn % 2 else kinds[::-1]:
                rates[line.name, precision].append(rate(line, BATCHES * batch, digits, batchers[line.name, precision],
                                                        clock))
        for line, precision in kinds:
            here = rates[line.name, precision]
            relative, to_first = (_ratio(here, rates.get(other, [])) for other in
                                  ((line.relative_to, precision), (line.name, asked.precision[0])))
            print(f"| {batch} | {line.name} | {precision} | {statistics.median(here):.3g} | {relative} | {to_first} |",
                  flush=True)


def _ratio(rates: list[float], others: list[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(rates, others, strict=True)):.2f}" if others else ""


if __name__ == "__main__":
    main()
