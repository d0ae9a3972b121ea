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
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from linpix.model import checkpoint
from linpix.training import datasets
from tools.benchmarks.occlusion import Asked, Images, masks
from tools.benchmarks.quality import SURE, judged, trained_judge
from tools.harness.arguments import new_parser
from tools.harness.commands import ROOT
from tools.harness.servers import serving

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
    config = checkpoint.named(models[-1], given.checkpoints).net.config
    judge = trained_judge(given.data)
    test = datasets.load(given.data, "test", config)
    unseen = slice(SEEN, SEEN + given.count)
    images, labels_of = test.images[unseen], test.labels[unseen].astype(np.int64)
    print(f"{len(images)} images; kept and sure: of one at random, of the best of {ways}, of any")

    def shares(drawn: Images, right: NDArray[np.int64] | None) -> str:
        """drawn: `ways` candidates of each image, the best first · right: their classes."""
        of, sure = (found.reshape(-1, ways) for found in judged(judge, drawn))
        kept = np.zeros_like(of, np.bool_) if right is None else of == right[:, None]
        figures = []
        for one in (kept, sure > SURE):
            figures.append(f"{one.mean():.3f} {one[:, 0].mean():.3f} {one.max(1).mean():.3f}")
        return "   ".join(figures)

    flags = f"--models {given.models} --max-n {max(16, ways)}"
    with serving(given.checkpoints, flags) as server:
        for model in models:
            asked = Asked(server.url, model, config)
            classes = np.arange(given.count) % 10
            drawn = asked.drawn(classes.tolist(), candidates=ways)
            print(f"{model:18}{'label':16}{shares(drawn, classes)}", flush=True)
            drawn = asked.drawn([None] * given.count, candidates=ways)
            print(f"{model:18}{'no label':16}{shares(drawn, None)}", flush=True)
            for name, hidden in masks(len(images), config).items():
                drawn = asked.completed(images, hidden, ways, candidates=ways)
                print(f"{model:18}{name:16}{shares(drawn, labels_of)}", flush=True)


if __name__ == "__main__":
    main()
