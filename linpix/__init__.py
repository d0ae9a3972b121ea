"""LinPix from Python: `load`, `sample`, `complete`, `score`, `inside`, `train`, `evaluate`,
`models`; `linpix.cli` has the commands.

Its other packages are folders beside this one:

- `linpix.model`: the transformers and their checkpoints; depends on neither server nor training.
- `linpix.server`: the service (server/__init__.py is its map).
- `linpix.training`: data sets, training runs, experiments.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union

if TYPE_CHECKING:  # an import of linpix alone needs nothing but Python
    from collections.abc import Sequence

    from numpy.typing import ArrayLike
    from PIL.Image import Image

    from linpix.model.inside import Inside
    from linpix.model.transformer import Transformer

    from .cli.pictures import Images
    from .cli.score import Score
    from .cli.train import Trained

__all__ = ["complete", "evaluate", "inside", "load", "models", "sample", "score", "train"]
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
                 times faster, and without a label a lower bound, which `exact` of the score says
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


def train(
    preset: str | None = None,
    data: str | Path | None = None,
    out: str | Path | None = None,
    *,
    config: str | Path | None = None,
    device: Literal["auto", "cpu", "cuda"] | None = None,
    attention: str | None = None,
    feature_map: str | None = None,
    lsh_rounds: int | None = None,
    layers: int | None = None,
    head: Literal["mixture", "categorical"] | None = None,
    colours: int | None = None,
    size: tuple[int, int] | None = None,
    reversible: bool | None = None,
    twin_of: str | None = None,
    init: str | Path | None = None,
    checkpoints: str | Path | None = None,
    plugin: "str | Sequence[str] | None" = None,
    fall_from: str | Path | None = None,
    resume: bool | None = None,
    max_minutes: float | None = None,
    max_images: int | None = None,
    save_minutes: float | None = None,
    evaluate_minutes: float | None = None,
    processes: int | None = 1,
    images: int | None = None,
    minutes: float | None = None,
    batch: int | None = None,
    accumulate: int | None = None,
    optimizer: Literal["adamw", "radam", "muon"] | None = None,
    learning_rate: float | None = None,
    head_share: float | None = None,
    final_learning_rate: float | None = None,
    warmup_images: int | None = None,
    weight_decay: float | None = None,
    betas: tuple[float, float] | None = None,
    clip: float | None = None,
    dropout: float | None = None,
    augment: Literal["none", "flip", "shift"] | None = None,
    ema: float | None = None,
    unconditional: float | None = None,
    conditional: float | None = None,
    class_weight: float | None = None,
    readings: int | None = None,
    seed: int | None = None,
    validation: int | None = None,
    feed_forward_chunks: int | None = None,
    bf16: bool | None = None,
    compile: bool | None = None,
) -> "Trained":
    """Train a model, as `linpix train` does, with options of the same names.

    Returns `folder`, the path of the checkpoint; `history`, a dictionary for each line of the log:
    step, images, minutes, and where they were measured train and validation (bits/dim), norm (of
    the gradient) and learning_rate; and `bits_per_dim` of the checkpoint. Progress is shown on
    standard error. Ctrl-C ends the run after a step, and it is saved. Where an option is None, the
    default of the command counts, or the setting of the run that is continued.

    preset:              the architecture, one of those that `linpix train --help` lists; auto
                         chooses it for pictures of any size
    data:                folder of the data set; if it is empty, MNIST or CIFAR-10 is downloaded
                         into it
    out:                 checkpoint folder to write; beside it OUT.training has the log, and the
                         state to resume from
    config:              TOML file of these options, such as OUT.training/run.toml of another run;
                         options given here win
    device:              device to compute on; None: auto
    attention:           linear, softmax, lsh, or a kind of a plugin; None: linear
    feature_map:         elu+1, relu, polynomial, random, or one of a plugin; None: elu+1
    lsh_rounds:          hashing rounds of lsh attention; None: 1
    layers:              number of layers; None: the preset's
    head:                what predicts a value; None: the preset's
    colours:             most colours of a palette, for the presets palette and auto; None: 64
    size:                width and height of the pictures in pixels, each 8 to 64; None: the
                         preset's, or with auto by their own shape
    reversible:          reversible residuals: memory use does not grow with the number of layers
    twin_of:             name of the model to compare this one with
    init:                model whose weights training starts from
    checkpoints:         folder of models; None: that of LinPix
    plugin:              modules or .py files that register kinds of attention or feature maps
    fall_from:           begin as a copy of the run in this folder, and let its learning rate fall
    resume:              continue the run in `out`
    max_minutes:         stop after so many minutes; `resume` continues
    max_images:          stop after so many images; `resume` continues
    save_minutes:        minutes between saves; None: 2
    evaluate_minutes:    minutes between evaluations; None: 10
    processes:           number of processes that share each batch; with more than 1, the others
                         import your program again, which then needs `if __name__ == "__main__":`;
                         None: as many as the command uses
    images:              length of the schedule in images; the learning rate reaches its final value
                         there; 0: it stays at its peak, until minutes, max_images or max_minutes
                         are over; None: 400000
    minutes:             length of the schedule in minutes, if this is reached before images; 0:
                         only images counts; None: 0.0
    batch:               images per step; None: 16
    accumulate:          number of parts in which a process computes the gradient of its images;
                         more parts need less memory and give the same gradients; None: 1
    optimizer:           adamw, radam or muon (Muon for the layers' matrices, AdamW for the rest);
                         None: muon
    learning_rate:       peak learning rate; None: 0.0015
    head_share:          learning rate of the head and its norm, relative to the others; 1 for a
                         categorical head unless given; None: 0.1
    final_learning_rate: final learning rate, relative to the peak (cosine decay); None: 0.02
    warmup_images:       number of images during the linear rise to the peak; None: 8000
    weight_decay:        weight decay of the layers' matrices; other parameters have none; None:
                         0.05
    betas:               decay rates of Adam's two averages; None: (0.9, 0.95)
    clip:                largest gradient norm of a group: the layers' matrices, the head, the rest;
                         None: 1.0
    dropout:             share of each sub-layer's outputs, and of the embedded inputs, that are
                         left out at random; for runs that see each image more than some 15 times;
                         None: 0.0
    augment:             none; or flip: half of the images are mirrored, for pictures whose mirror
                         image is as likely, such as photographs, but not digits or letters; or
                         shift: half of those with known pixels are moved by up to 3 pixels each
                         way, so that a model completes what people draw beside the middle; None:
                         none
    ema:                 decay per step of the averaged weights, which are exported; lower in the
                         first steps; None: 0.998
    unconditional:       share of the images that train without their class; not used by a model
                         that draws the class first; None: 0.5
    conditional:         share of the images with known pixels, for a model with patches; None: 0.67
    class_weight:        weight of the class loss, for a model that predicts classes from known
                         pixels; relative to the likelihood in nats; None: 10.0
    readings:            how often each image of a step is read again, each time with other pixels
                         known, to learn its class alone; for a model that predicts classes from
                         known pixels; None: 0
    seed:                seed of initial weights, order of images and omitted labels; None: 0
    validation:          number of training images held out for validation; at most a tenth; None:
                         1000
    feed_forward_chunks: number of parts in which positions pass the feed-forward layers; more parts
                         need less memory and give the same gradients; None: 1
    bf16:                use bf16 autocast where the processor supports it; None: True
    compile:             use torch.compile where there is a C++ compiler; None: True
    Raises ValueError, which says what is allowed; OSError for files; FloatingPointError if the
    gradient is no longer a number.
    """
    given = locals()  # first: only the options
    from .cli.train import train

    return train(given)


def evaluate(
    model: str | Path,
    data: str | Path,
    *,
    device: Literal["auto", "cpu", "cuda"] | None = None,
    limit: int | None = None,
    engine: Literal["auto", "eager", "compiled"] | None = None,
    precision: Literal["auto", "fp32", "bf16", "int8"] | None = None,
    labels: Literal["all"] | None = None,
    classes: int | None = None,
    write: bool | None = None,
    temperature: float | None = None,
    temperature_range: tuple[float, float] | None = None,
    attempts: int | None = None,
    recognised: float | None = None,
    limits: str | None = None,
    grid: str | Path | None = None,
    checkpoints: str | Path | None = None,
    plugin: "str | Sequence[str] | None" = None,
) -> dict[str, Any]:
    """Measure a model on the test images, as `linpix evaluate` does, with options of the same
    names.

    Returns what `linpix evaluate --json` prints: bits_per_dim, the mean over images; interval, half
    the width of its 95 % interval, if images are independent; images; seconds; model, checkpoint
    (its digest), engine and precision; with labels also `labels`, with accuracy and its interval.
    With classes: class_agreement and the other figures of that.

    model:             a name of `models()`, or a checkpoint folder
    data:              folder of the data set; if it is empty, MNIST or CIFAR-10 is downloaded into
                       it
    device:            device to compute on; None: auto
    limit:             use only the first so many test images; None: all
    engine:            eager: torch, all positions in parallel; compiled: the kernels, step by step;
                       None: eager
    precision:         precision of the compiled engine's matrix products; None: auto
    labels:            "all": also measure how often the most probable class is right
    classes:           draw so many images instead, and measure the share that a CNN recognises as
                       the requested class
    write:             with classes: write the share and the next five options into the checkpoint
    temperature:       temperature of requests that give none
    temperature_range: range of useful temperatures, the lower first
    attempts:          how often an image may be drawn until it is recognised and not torn
    recognised:        probability of its class at which an image is recognised; None: 0.99
    limits:            one sentence about what the model cannot do
    grid:              write a grid of samples to this .png file
    checkpoints:       folder of models; None: that of LinPix
    plugin:            modules or .py files that register kinds of attention or feature maps
    Raises ValueError, of which CheckpointError is one; OSError for files.
    """
    given = locals()  # first: only the options
    from .cli.train import evaluate

    return evaluate(given.pop("model"), given)
