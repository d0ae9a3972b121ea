"""What `candidates` and particles bring, as a CNN sees it: images and completions, one against the chosen one.

    python -m tests.benchmarks.candidates --data DIR [--models mnist-small,mnist-conditional] [--count 200]
                                          [--particles 16]

Models that draw the class first are asked for --count images of every class in turn, and for as many of any class; an
image keeps its class if the CNN gives it the one asked for. Each picture is asked for once over HTTP, with n and
candidates of --candidates: the first image of the answer is the best, and the mean over all is what one drawn at random
would have been. With --particles each is asked for once more, by method smc, of models that are not conditional. A
completion keeps its class if the CNN gives it that of the original, and is sure at a probability above 0.9. The CNN is
that of tests/benchmarks/quality.py. Images are taken from the test set after the first 200, on which
ranking.TEMPERATURE was chosen.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.training import datasets
from tests.benchmarks.quality import SURE, Asked, Images, from_first_hole_on, judged, masks, trained_judge
from tests.server.conftest import ROOT, serving

SEEN = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST")
    parser.add_argument("--models", default="mnist-small,mnist-conditional", help="names, comma-separated")
    parser.add_argument("--count", type=int, default=200, help="test images")
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--particles", type=int, default=0)
    given = parser.parse_args()
    judge, test = trained_judge(given.data), datasets.load(given.data, "test", PRESETS["mnist-small"])
    ways, particles = given.candidates, given.particles
    images, labels_of = (part[SEEN:SEEN + given.count] for part in (test.images, test.labels.astype(np.int64)))
    print(f"{len(images)} images; kept and sure: of one at random, of the best of {ways}, of any of {ways}"
          + (f"; with {particles} particles" if particles else ""))
    with serving(ROOT / "checkpoints", "--models", given.models, "--max-n", str(max(16, ways, particles))) as server:
        for model in given.models.split(","):
            asked = Asked(server.url, model)

            def tell(name: str, drawn: Images, began: float, right: NDArray[np.int64] | None,
                     model: str = model) -> None:
                of, sure = (found.reshape(-1, ways) for found in judged(judge, drawn))
                kept = np.zeros_like(sure) if right is None else of == right[:, None]
                figures = [f"{found.mean():.3f} {found[:, 0].mean():.3f} {found.any(1).mean():.3f}"
                           for found in (kept, sure > SURE)]
                print(f"{model:18}{name:16}{'   '.join(figures)}   {time.monotonic() - began:.0f} s", flush=True)

            config = checkpoint.read(checkpoint.find(model)).net.config
            conditional = bool(config.patch)
            if config.class_first:
                classes = np.arange(given.count) % 10
                for name, right in (("label", classes), ("no label", None)):
                    began = time.monotonic()
                    labels = [None] * given.count if right is None else right.tolist()
                    tell(name, asked.drawn(labels, candidates=ways), began, right)
            for name, hidden in masks(len(images)).items():
                began = time.monotonic()
                tell(name, asked.completed(images, hidden, ways, candidates=ways), began, labels_of)
                if particles and not conditional and (hidden != from_first_hole_on(hidden)).any():
                    of, sure = judged(judge, asked.completed(images, hidden, particles=particles))
                    print(f"{'':18}by particles    {(of == labels_of).mean():.3f}   {(sure > SURE).mean():.3f}")


if __name__ == "__main__":
    main()
