"""Steps of training with linear attention computed in three ways, side by side.

    python -m tools.benchmarks.training [--preset mnist] [--batch 16] [--rounds 5] [--json FILE]

    operator    causal_attention of csrc, as `linpix train` has it
    chunked     its reference in torch: quadratic inside a chunk, cumulative sums of the state
                between chunks
    definition  equations 9 to 12 in plain torch: cumulative sums of the state over all tokens

each with torch.compile and without (--eager for the latter alone). A step is forward, backward and
optimiser, in bf16 where the processor has it, of random images with random weights, which does not
change the speed. The ways take turns; of each the median over rounds counts, and the ratio is its
images/s over those of the definition.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linpix.model import ops, provenance
from linpix.model.config import PRESETS
from linpix.model.ops import phi
from linpix.training.batches import part_of
from linpix.training.loop import loss_function
from linpix.training.run import Run, TrainConfig
from tools.harness.arguments import new_parser

Parallel = Callable[..., Tensor]


def chunked(layer: int, q: Tensor, k: Tensor, v: Tensor, *, training: bool = False) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ops.attention_of_one_length(q, k, v, 1e-6)[0].transpose(1, 2)


def definition(layer: int, q: Tensor, k: Tensor, v: Tensor, *, training: bool = False) -> Tensor:
    q, k = phi(q), phi(k)
    S = (k[..., None] * v[..., None, :]).cumsum(2)
    numerator = (q[..., None, :] @ S.to(q.dtype))[..., 0, :]
    return numerator / ((q * k.cumsum(2).to(q.dtype)).sum(-1, keepdim=True) + 1e-6)


class Way:
    """One way to compute a step, warm."""

    def __init__(
        self, preset: str, parallel: Parallel | None, compiled: bool, images: Tensor, start: Tensor
    ) -> None:
        self.run = Run(PRESETS[preset], TrainConfig(compile=compiled))
        if parallel is not None:
            self.run.net.attention.parallel = parallel  # type: ignore[method-assign]
        self.loss = loss_function(self.run.net, self.run.config)
        self.given = images, start
        self.seconds: list[float] = []
        for _ in range(2):
            self.step()
        self.seconds.clear()

    def step(self) -> None:
        began = time.perf_counter()
        for optimizer in self.run.optimizers:
            optimizer.zero_grad()
        self.loss(part_of(self.run.net, *self.given)).backward()
        for optimizer in self.run.optimizers:
            optimizer.step()
        self.seconds.append(time.perf_counter() - began)

    @property
    def images_per_second(self) -> float:
        return len(self.given[0]) / statistics.median(self.seconds)


def measure(
    preset: str, batch: int, rounds: int, compiled: tuple[bool, ...]
) -> list[dict[str, Any]]:
    """A line for each way; those without torch.compile are named so."""
    config = PRESETS[preset]
    random = torch.Generator().manual_seed(0)
    images = torch.randint(256, (batch, config.subpixels), dtype=torch.uint8, generator=random)
    start = torch.full((batch,), 256)
    kinds = {"operator": None, "chunked": chunked, "definition": definition}
    ways = {
        (name, fast): Way(preset, kinds[name], fast, images, start)
        for fast, name in product(compiled, kinds)
    }
    for _ in range(rounds):
        for way in ways.values():
            way.step()
    base = {fast: ways["definition", fast].images_per_second for fast in compiled}
    return [
        {
            "way": name,
            "compiled": fast,
            "images_per_second": way.images_per_second,
            "ratio": way.images_per_second / base[fast],
        }
        for (name, fast), way in ways.items()
    ]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--preset", default="mnist", choices=sorted(PRESETS))
    parser.add_argument(
        "--batch", type=int, default=16, help="images a step; 16 is what training has"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="without torch.compile only")
    parser.add_argument("--json", help="write the results there too")
    given = parser.parse_args()
    compiled = (False,) if given.eager else (True, False)
    results = measure(given.preset, given.batch, given.rounds, compiled)
    where = (
        f"{platform.machine()}, {torch.get_num_threads()} threads, kernel {ops.kernel()}, torch"
        f" {torch.__version__}, commit {provenance.commit()}, preset {given.preset}, batch"
        f" {given.batch}"
    )
    print(
        where
        + "\n\n| attention | torch.compile | images/s | of the definition |\n|---|---|---:|---:|"
    )
    for one in results:
        fast = "yes" if one["compiled"] else "no"
        print(f"| {one['way']} | {fast} | {one['images_per_second']:.2f} | {one['ratio']:.1f} |")
    if given.json:
        Path(given.json).write_text(
            json.dumps({"where": where, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
