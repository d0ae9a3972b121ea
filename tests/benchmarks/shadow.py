"""What a shadow of the state costs: images/s of decodes that copy the running slots before each quantum, over without.

    python -m tests.benchmarks.shadow [--preset mnist-small,mnist] [--batch 1,16,64] [--engine compiled] [--repeat 5]

The eager engine takes this shadow; the compiled ones go without it, and prefill a row again up to its position when a
quantum threw: `restore_s` is what that takes for all rows in the middle of the image, in quanta `restore_quanta`.
Presets have random weights, which does not change their speed. Quanta are those that the server would make: at most an
image row, and at most 50 ms. Decodes with and without copies take turns, and which goes first does too; the ratio is
of medians, and `copies_share` is what the copies alone took.
"""

import argparse
import json
import statistics
import time

import torch

from linpix.model import checkpoint, ops
from linpix.model.checkpoint import Checkpoint
from linpix.model.config import PRESETS
from linpix.model.transformer import Transformer
from linpix.server.engine.batch import RESTORED
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.decoder import Decoder
from linpix.server.engine.decode.image_spec import ImageSpec
from linpix.server.engine.schedule.quantum import QUANTUM_S
from tests.benchmarks.decode import machine, rounded


def decode(engine: Decoder, batch: int, steps: int, limit: int, *, shadow: bool) -> tuple[float, float]:
    """Seconds of a decode of the first `limit` sub-pixels, and of them those of the copies."""
    slots = list(range(1, batch + 1))
    at = torch.tensor(slots)
    engine.take(slots, [ImageSpec(seed=seed) for seed in range(batch)])
    copying, began = 0.0, time.perf_counter()
    for position in range(0, limit, steps):
        first = time.perf_counter()
        if shadow:
            engine.state.keep(at)
        copying += time.perf_counter() - first
        engine.quantum(slots, [position] * batch, [min(steps, limit - position)] * batch)
    return time.perf_counter() - began, copying


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="mnist-small,mnist", help=", ".join(PRESETS))
    parser.add_argument("--batch", default="1,16,64")
    parser.add_argument("--engine", choices=("eager", "compiled"), default="compiled")
    parser.add_argument("--repeat", type=int, default=5, help="decodes of each")
    parser.add_argument("--limit", type=int, default=10_000, help="sub-pixels of a decode, at most")
    given = parser.parse_args()
    print(f"{machine()}; kernel {ops.kernel()}, torch {torch.__version__}, commit {checkpoint.commit()}")
    for name in given.preset.split(","):
        torch.manual_seed(0)
        source = Checkpoint(name, Transformer(PRESETS[name]).eval().requires_grad_(False), {}, "", ())
        for batch in map(int, given.batch.split(",")):
            engine = new_decoder(source, batch, given.engine)
            row = engine.config.width * engine.config.channels
            limit = min(engine.config.length, given.limit)
            first = min(2 * row, limit)
            decode(engine, batch, row, first, shadow=True)  # to warm up
            steps = max(1, min(row, int(QUANTUM_S / decode(engine, batch, row, first, shadow=False)[0] * first)))
            taken: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for turn in range(given.repeat):
                for shadow in (True, False) if turn % 2 else (False, True):
                    taken[shadow].append(decode(engine, batch, steps, limit, shadow=shadow))
            copied, plain = (statistics.median(seconds for seconds, _ in taken[shadow]) for shadow in (True, False))
            slots, middle = list(range(1, batch + 1)), engine.config.length // 2
            began = time.perf_counter()
            for some in range(0, batch, RESTORED):
                engine.restore(slots[some:some + RESTORED], [middle] * len(slots[some:some + RESTORED]))
            restoring = time.perf_counter() - began
            print(json.dumps({
                "preset": name, "engine": given.engine, "precision": engine.precision, "batch": batch,
                "steps_a_quantum": steps, "images_per_second_ratio": rounded(plain / copied),
                "copies_share": rounded(statistics.median(copies / seconds for seconds, copies in taken[True])),
                "restore_s": rounded(restoring), "restore_quanta": rounded(restoring / (plain * steps / limit)),
            }), flush=True)


if __name__ == "__main__":
    main()
