"""What `candidates` and particles bring, as a CNN sees it: one completion of each test image against the chosen one.

    python -m tests.benchmarks.candidates --data DIR [--models mnist-small,mnist-conditional] [--count 200]
                                          [--particles 16]

Each picture is asked for once over HTTP, with n and candidates of --candidates: the first image of the answer is the
best, and the mean over all is what one drawn at random would have been. With --particles each is asked for once more,
by method smc, of models that are not conditional. A completion keeps its class if the CNN gives
it that of the original, and is sure at a probability above 0.9. The CNN is that of tests/benchmarks/quality.py. Images
are taken from the test set after the first 200, on which ranking.TEMPERATURE was chosen.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from linpix.model.config import PRESETS
from linpix.training import datasets
from tests.benchmarks.quality import SURE, Asked, from_first_hole_on, judged, masks, trained_judge
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
    images, labels = (part[SEEN:SEEN + given.count] for part in (test.images, test.labels.astype(np.int64)))
    print(f"{len(images)} images; kept and sure: of one at random, of the best of {ways}, of any of {ways}"
          + (f"; with {particles} particles" if particles else ""))
    with serving(ROOT / "checkpoints", "--models", given.models, "--max-n", str(max(16, ways, particles))) as server:
        conditional = {card["id"] for card in server.get("/v1/models").json()["data"] if card["conditional"]}
        for model in given.models.split(","):
            for name, hidden in masks(len(images)).items():
                began = time.monotonic()
                drawn = Asked(server.url, model).completed(images, hidden, ways, candidates=ways)
                of, sure = (found.reshape(-1, ways) for found in judged(judge, drawn))
                figures = [f"{right.mean():.3f} {right[:, 0].mean():.3f} {right.any(1).mean():.3f}"
                           for right in (of == labels[:, None], sure > SURE)]
                if particles and model not in conditional and (hidden != from_first_hole_on(hidden)).any():
                    filtered = Asked(server.url, model).completed(images, hidden, particles=particles)
                    of, sure = judged(judge, filtered)
                    figures.append(f"{(of == labels).mean():.3f} {(sure > SURE).mean():.3f}")
                print(f"{model:18}{name:16}{'   '.join(figures)}   {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
