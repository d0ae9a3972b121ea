"""LinPix from Python: `load`, `sample`, `complete`, `score`; `linpix.cli` has the commands.

Its other packages are folders beside this one, linked into it:

- `linpix.model`: the transformers and their checkpoints; depends on neither server nor training.
- `linpix.server`: the service (server/__init__.py is its map).
- `linpix.training`: data sets, training runs, experiments.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # an import of linpix alone needs nothing but Python
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from linpix.model.transformer import Transformer

    from .cli.score import Score

__all__ = ["complete", "load", "sample", "score"]


def load(folder: str | Path) -> "Transformer":
    """The transformer of a checkpoint folder, float32, in evaluation mode. Raises CheckpointError."""
    from linpix.model import load

    return load(folder)


def sample(model: str | Path, count: int = 1, *, label: int | str | None = None, seed: int | None = None,
           temperature: float | None = None, candidates: int | None = None, attempts: int | None = None,
           batch: int = 64, checkpoints: str | Path | None = None, progress: bool | None = None
           ) -> "NDArray[np.uint8]":
    """Draw images without a server: uint8 (count, height, width), or (count, height, width, 3) with colour models.

    model:       a name under checkpoints/, or a checkpoint folder
    label:       the class, by name or number; None: any class
    seed:        of the first image; image i has seed + i, and a server draws the same image for it; None: a random seed
    temperature: 1: as trained; lower: less varied; higher: more varied; None: the model's own
    candidates:  draw this many images, and return the best `count` of them; None: draw `count` and return all
    attempts:    draw an image up to this many times, until the model recognises its class; None: the model's own
    batch:       largest number of images that are drawn together
    checkpoints: folder of models; None: that of LinPix
    progress:    show a bar on standard error; None: if that is a terminal or a notebook
    Raises ValueError, which says what is allowed; CheckpointError is one.
    """
    from .cli.draw import draw

    return draw(model, count, None, label=label, seed=seed, temperature=temperature, candidates=candidates,
                attempts=attempts, batch=batch, checkpoints=checkpoints, progress=progress)


def complete(model: str | Path, image: "ArrayLike", known: "ArrayLike", count: int = 1, *,
             prepare: Literal["none", "mnist"] = "none", label: int | str | None = None, seed: int | None = None,
             temperature: float | None = None, candidates: int | None = None, attempts: int | None = None,
             batch: int = 64, checkpoints: str | Path | None = None, progress: bool | None = None
             ) -> "NDArray[np.uint8]":
    """Complete an image without a server: known pixels stay, and the others are drawn `count` times.

    image:       uint8 (height, width), or (height, width, 3) with colour models, of the model's size
    known:       bool (height, width): true for pixels that stay
    prepare:     "mnist": `image` is a photographed digit, grey and of any size, which gets the size and place of MNIST
                 digits first
    All other options, the result and the errors are those of `sample`.
    """
    from .cli.draw import draw

    return draw(model, count, (image, known), prepare, label=label, seed=seed, temperature=temperature,
                candidates=candidates, attempts=attempts, batch=batch, checkpoints=checkpoints, progress=progress)


def score(model: str | Path, image: "ArrayLike", known: "ArrayLike | None" = None, *, label: int | str | None = None,
          posterior: bool = False, checkpoints: str | Path | None = None) -> "Score":
    """How probable an image is, or its hidden part given the known one.

    model:       a name under checkpoints/, or a checkpoint folder
    image:       uint8 (height, width), or (height, width, 3) with colour models, of the model's size, hidden pixels too
    known:       bool (height, width): true for known pixels; None: all are hidden
    label:       the class that the model assumes, by name or number; None: no class; a model that draws the class
                 first then uses the mixture of all classes
    posterior:   compute the likelihood under every class; without a label, the score is then that of their mixture
    checkpoints: folder of models; None: that of LinPix
    Raises ValueError, of which CheckpointError is one, and Impossible if a checkpoint cannot draw such an image.
    """
    from .cli.score import score

    return score(model, image, known, label, posterior, checkpoints)
