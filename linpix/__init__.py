"""LinPix from Python: `load`, `sample`, `complete`, `score`, `inside`, `models`; `linpix.cli` has
the commands.

Its other packages are folders beside this one:

- `linpix.model`: the transformers and their checkpoints; depends on neither server nor training.
- `linpix.server`: the service (server/__init__.py is its map).
- `linpix.training`: data sets, training runs, experiments.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, Union

if TYPE_CHECKING:  # an import of linpix alone needs nothing but Python
    from collections.abc import Sequence

    from numpy.typing import ArrayLike
    from PIL.Image import Image

    from linpix.model.inside import Inside
    from linpix.model.transformer import Transformer

    from .cli.pictures import Images
    from .cli.score import Score

__all__ = ["complete", "inside", "load", "models", "sample", "score"]
__version__ = "0.1.0"

# In a checkout, links lead to these folders, so that type checkers and editors find them. Where
# links were not made, as on Windows, Python finds them all the same.
_folder = Path(__file__).parent
if not (_folder / "model").is_dir():
    __path__.append(str(_folder.parent))

Picture: TypeAlias = Union[str, Path, "Image", "ArrayLike"]
Labels: TypeAlias = Union[int, str, "Sequence[int | str | None]"]


def models(checkpoints: str | Path | None = None) -> list[str]:
    """The names of the models in a folder. checkpoints: the folder; None: that of LinPix."""
    from linpix.model.folders import root, under

    return [folder.name for folder in under(root(checkpoints))]


def load(
    model: str | Path, checkpoints: str | Path | None = None, *, trainable: bool = False
) -> "Transformer":
    """The transformer itself, a torch module: float32, in evaluation mode, its weights frozen.

    model:       a name of `models()`, or a checkpoint folder
    checkpoints: folder of models; None: that of LinPix
    trainable:   thaw the weights (requires_grad), to train them further; else gradients are not
                 computed
    Raises CheckpointError, a ValueError.
    """
    from linpix.model.checkpoint import load
    from linpix.model.folders import find

    from .cli.draw import torch_defaults

    with torch_defaults():
        net = load(find(model, checkpoints))
    return net.requires_grad_(trainable)


def sample(
    model: str | Path,
    count: int = 1,
    *,
    label: Labels | None = None,
    seed: int | None = None,
    temperature: float | None = None,
    candidates: int | None = None,
    attempts: int | None = None,
    batch: int = 64,
    checkpoints: str | Path | None = None,
    progress: bool | None = None,
) -> "Images":
    """Draw images without a server: an array, uint8 (count, height, width), or (count, height,
    width, 3) in colour, or (count, height, width, 4) with alpha, if the model has a palette.

    It has the lists `seeds`, `labels` and `confidences`, and `grid()` makes one PIL image of it.

    model:       a name of `models()`, or a checkpoint folder
    label:       the class, by name or number, or a list of classes, one for each image, with which
                 count may be left out; None: any class
    seed:        of the first image; image i has seed + i, and a server draws the same image for it;
                 None: a random seed
    temperature: 1: as trained; lower: less varied; higher: more varied; None: the model's own
    candidates:  draw this many images, and return the best `count` of them; None: draw `count` and
                 return all
    attempts:    draw an image up to this many times, until it is recognised and not torn; None: the
                 model's own
    batch:       largest number of images that are drawn together
    checkpoints: folder of models; None: that of LinPix
    progress:    show a bar on standard error; None: if that is a terminal or a notebook
    Raises ValueError, which says what is allowed; CheckpointError is one.
    """
    from .cli.draw import draw

    return draw(
        model,
        None,
        count=count,
        label=label,
        seed=seed,
        temperature=temperature,
        candidates=candidates,
        attempts=attempts,
        batch=batch,
        checkpoints=checkpoints,
        progress=progress,
    )


def complete(
    model: str | Path,
    image: "Picture",
    known: "Picture | int | None" = None,
    count: int = 1,
    *,
    prepare: Literal["none", "mnist"] = "none",
    label: Labels | None = None,
    seed: int | None = None,
    temperature: float | None = None,
    candidates: int | None = None,
    attempts: int | None = None,
    batch: int = 64,
    checkpoints: str | Path | None = None,
    progress: bool | None = None,
) -> "Images":
    """Complete an image without a server: known pixels stay, and the others are drawn `count`
    times.

    image:   a path, a PIL image or a uint8 array (height, width[, 3]), of any size; it is cropped
             and reduced to the model's size, as a server does with uploads
    known:   the pixels that stay: a bool array (height, width) of the size of the image or of the
             model, true for them; or how many rows of the model's image; or a path or PIL image
             that is transparent in the other places; None: all but the transparent parts of the
             image
    prepare: "mnist": `image` is a photographed digit, which gets the size and place of MNIST's
             digits first
    All other options, the result and the errors are those of `sample`.
    """
    from .cli.draw import draw

    return draw(
        model,
        (image, known),
        prepare,
        count=count,
        label=label,
        seed=seed,
        temperature=temperature,
        candidates=candidates,
        attempts=attempts,
        batch=batch,
        checkpoints=checkpoints,
        progress=progress,
    )


def score(
    model: str | Path,
    image: "Picture",
    known: "Picture | int | None" = None,
    *,
    label: int | str | None = None,
    posterior: bool = False,
    plausible: bool = False,
    checkpoints: str | Path | None = None,
) -> "Score":
    """How probable an image is, or its hidden part given the known one.

    model:       a name of `models()`, or a checkpoint folder
    image:       as in `complete`, hidden pixels too
    known:       as in `complete`; None: all pixels are hidden, unless parts of the image are
                 transparent
    label:       the class that the model assumes, by name or number; None: no class; a model that
                 draws the class first then uses the mixture of all classes
    posterior:   compute the likelihood under every class; without a label, the score is then that
                 of their mixture
    plausible:   compute only classes that the model finds possible in the whole image: several
                 times faster, and a lower bound; `exact` of the score is then False
    checkpoints: folder of models; None: that of LinPix
    Raises ValueError, of which CheckpointError is one, also if a checkpoint cannot draw such an
    image.
    """
    from .cli.score import score

    return score(model, image, known, label, posterior, plausible, checkpoints)


def inside(
    model: str | Path,
    image: "Picture",
    known: "Picture | int | None" = None,
    *,
    label: int | str | None = None,
    checkpoints: str | Path | None = None,
) -> "Inside":
    """What a model does with an image, token by token: `attention(layer, head)` says where each
    token looked, `states(layer, head)` what was remembered, `distributions` which values were
    expected, and `bits` how unexpected each sub-pixel was.

    model:       a name of `models()`, or a checkpoint folder
    image:       as in `complete`, hidden pixels too
    known:       as in `complete`; None: all pixels are hidden, unless parts of the image are
                 transparent
    label:       the class that the model assumes, by name or number; None: no class; a model that
                 draws the class first then assumes the one that it finds most probable
    checkpoints: folder of models; None: that of LinPix
    Raises ValueError, of which CheckpointError is one.
    """
    from .cli.score import inside

    return inside(model, image, known, label, checkpoints)
