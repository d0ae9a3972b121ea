"""What each thing that ships costs in images/s: the `mnist` preset with and without it, in one run.

    python -m tests.benchmarks.costs --data DIR [--preset mnist] [--batch 1,16,64] [--rounds 3]

Weights are random, which does not change their speed; but what random weights draw has no background. So lines that
are measured "on test digits" have all sub-pixels but the first given: they go through the model as those that it draws
itself do, and skip the layers where test images of MNIST do. Completions draw the upper half of a digit whose lower
half was read. B images are decoded at a time; one that is done makes room for the next, and what is decoded is counted
until the last of 3 B images has joined. Lines take turns; each figure is the median of the rounds, and a ratio is the
median of the ratios within a round.
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
from linpix.server.engine.decode.decoder import ImageSpec
from linpix.server.engine.messages import Submission
from linpix.training import datasets
from tests.benchmarks.decode import machine

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


def rate(line: Line, count: int, digits: NDArray[np.uint8], batcher: Batcher) -> float:
    """Images/s while the batch is full; of images that are under way, the part that has been decoded counts."""
    steps = line.config.length // (2 if line.specs is completed else 1)
    finished, began = 0, time.perf_counter()
    for seed in range(count):
        batcher.submit(Submission(str(seed), [line.specs(seed, digits[seed % len(digits)])]))
    while len(batcher.scheduler.waiting):
        report = batcher.run_quantum()
        finished += len(report.finished)
    decoded = finished + sum(image.position for image in report.running) / steps
    seconds = time.perf_counter() - began
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
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    preset = PRESETS[asked.preset]
    digits, lines = datasets.load(asked.data, "test", preset).images[:256], lines_of(preset)
    print(f"{machine()}; kernel {ops.kernel()}, torch {torch.__version__}, commit {checkpoint.commit()}\n")
    print(f"| B | `{asked.preset}` | images/s | relative |\n|---|---|---|---|", flush=True)
    for batch in asked.batch:
        batchers, rates = {}, {line.name: [] for line in lines}
        for line in lines:
            torch.manual_seed(0)
            net = Transformer(line.config).eval().requires_grad_(False)
            batchers[line.name] = Batcher(new_decoder(Checkpoint(line.name, net, {}, "", ()), batch))
            rate(line, 2, digits, batchers[line.name])  # to warm up
        for turn in range(asked.rounds):
            for line in lines if turn % 2 else lines[::-1]:
                rates[line.name].append(rate(line, BATCHES * batch, digits, batchers[line.name]))
        for line in lines:
            ratios = [one / other for one, other in zip(rates[line.name], rates[line.relative_to], strict=True)] \
                if line.relative_to else []
            relative = f"{statistics.median(ratios):.2f}" if ratios else ""
            print(f"| {batch} | {line.name} | {statistics.median(rates[line.name]):.3g} | {relative} |", flush=True)


if __name__ == "__main__":
    main()
