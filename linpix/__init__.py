"""LinPix from Python: `load`, `sample`, `complete`, `score`; `linpix.cli` has the commands.

Its other packages are folders beside this one, linked into it:

- `linpix.model`: the transformers and their checkpoints; depends on neither server nor training.
- `linpix.server`: the service (server/__init__.py is its map).
- `linpix.training`: data sets, training runs, experiments.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linpix.model.transformer import Transformer

    from .cli.draw import Pictures
    from .cli.score import Score

__all__ = ["complete", "load", "sample", "score"]


def load(folder: str | Path) -> "Transformer":
    """The transformer of a checkpoint folder, float32, in evaluation mode. Raises CheckpointError."""
    from linpix.model import load

    return load(folder)


def sample(model: str, count: int = 1, **options: Any) -> "Pictures":
    """Draw images without a server. Options and errors: linpix.cli.draw.sample."""
    from .cli.draw import sample

    return sample(model, count, **options)


def complete(model: str, image: Any, known: Any, count: int = 1, **options: Any) -> "Pictures":
    """Complete an image without a server. Options and errors: linpix.cli.draw.complete."""
    from .cli.draw import complete

    return complete(model, image, known, count, **options)


def score(model: str, image: Any, known: Any = None, **options: Any) -> "Score":
    """How probable an image is, or its hidden part given the known one. Options and errors: linpix.cli.score.score."""
    from .cli.score import score

    return score(model, image, known, **options)
