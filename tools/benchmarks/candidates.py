"""What `candidates` bring: images and completions, one against the chosen one.

    python -m tools.benchmarks.candidates --data DIR [--models mnist-conditional] [--count 200]
                                          [--checkpoints DIR]

The models draw the class first. Those of digits are asked for --count images of every class in
turn, and for as many of any class; an image keeps its class if a CNN gives it the one asked for.
Each picture is asked for once over HTTP, with n and candidates of --candidates: the first image of
the answer is the best, and the mean over all is what one drawn at random would have been. A
completion keeps its class if the CNN gives it that of the original, and is sure at a probability
above 0.9. The CNN is that of tools/benchmarks/quality.py. Images are taken from the test set after
the first 200.

Models of other pictures (cifar10-conditional) have no judge: completions have the error and the
seam of quality.py, which are better the less they are.
"""

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from linpix.model import checkpoint
from linpix.training import datasets
from tools.benchmarks.occlusion import Asked, Images, error, masks, seam
from tools.benchmarks.quality import SIDE, SURE, judged, trained_judge
from tools.harness.arguments import new_parser
from tools.harness.servers import ROOT, serving

SEEN = 200


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the models' data set")
    parser.add_argument("--models", default="mnist-conditional", help="names, comma-separated")
    parser.add_argument("--count", type=int, default=200, help="test images")
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument(
        "--checkpoints", type=Path, default=ROOT / "checkpoints", help="folder of the models"
    )
    given = parser.parse_args()
    models, ways = given.models.split(","), given.candidates
    configs = {name: checkpoint.named(name, given.checkpoints).net.config for name in models}
    config = configs[models[-1]]
    test = datasets.load(given.data, "test", config)
    digits = (config.height, config.width, config.channels) == (SIDE, SIDE, 1)
    judge = trained_judge(given.data) if digits else None
    unseen = slice(SEEN, SEEN + given.count)
    images, labels_of = test.images[unseen], test.labels[unseen].astype(np.int64)
    figures, last = ("kept and sure", "any") if digits else ("error and seam", "the least")
    print(
        f"{len(images)} images; {figures}: of one at random, of the best of {ways}, of {last} of"
        f" {ways}"
    )
    with serving(
        given.checkpoints, "--models", given.models, "--max-n", str(max(16, ways))
    ) as server:
        for model in models:
            asked = Asked(server.url, model, config)

            def tell(
                name: str, found: list[NDArray[np.float64]], began: float, model: str = model
            ) -> None:
                """found: (N, ways) each."""
                best = np.max if digits else np.min
                figures = [
                    f"{one.mean():.3f} {one[:, 0].mean():.3f} {best(one, 1).mean():.3f}"
                    for one in found
                ]
                print(
                    f"{model:18}{name:16}{'   '.join(figures)}   {time.monotonic() - began:.0f} s",
                    flush=True,
                )

            def as_judged(
                drawn: Images, right: NDArray[np.int64] | None
            ) -> list[NDArray[np.float64]]:
                assert judge is not None
                of, sure = (found.reshape(-1, ways) for found in judged(judge, drawn))
                kept = np.zeros_like(sure) if right is None else of == right[:, None]
                return [kept.astype(np.float64), (sure > SURE).astype(np.float64)]

            if digits:
                classes = np.arange(given.count) % 10
                for name, right in (("label", classes), ("no label", None)):
                    began = time.monotonic()
                    labels = [None] * given.count if right is None else right.tolist()
                    tell(name, as_judged(asked.drawn(labels, candidates=ways), right), began)
            for name, hidden in masks(len(images), config).items():
                began = time.monotonic()
                drawn = asked.completed(images, hidden, ways, candidates=ways)
                if digits:
                    found = as_judged(drawn, labels_of)
                else:
                    holes = hidden.repeat(ways, 0)
                    errors = error(images.repeat(ways, 0), drawn, holes)
                    seams = seam(drawn, holes, config)
                    found = [errors.reshape(-1, ways), seams.reshape(-1, ways)]
                tell(name, found, began)


if __name__ == "__main__":
    main()
