"""The flags of the commands about training, and those that other commands have too.

Only `train` and `experiment` need torch, as some of their flags are fields of settings.
"""

import math
import os
import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args


def number(
    kind: type, least: float, most: float = math.inf, word: str = ""
) -> Callable[[str], Any]:
    """The type of a flag for a number. word: what may be given instead of one."""

    def parse(text: str) -> Any:
        if word and text == word:
            return word
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            bounds = f"at least {least}" if math.isinf(most) else f"{least} to {most}"
            wanted = ("an integer, " if kind is int else "a number, ") + bounds
            raise ArgumentTypeError(f"must be {word and f'{word} or '}{wanted}; got {text!r}")
        return value

    return parse


def words_of(command: str, values: Mapping[str, Any]) -> list[str]:
    """Values by the names of a command's flags, as words of its command line. None: not given.

    Raises ValueError, with the cure, for a name or a kind of value that there is not.
    """
    from linpix.model.toml import nearest

    actions = actions_of(command)
    words = []
    for name, value in values.items():
        if name not in actions:
            cure = nearest(name, actions, f"linpix {command}")
            raise ValueError(f"{name} is not an option of linpix {command}; {cure}")
        if value is not None:
            words += _words(actions[name], value)
    return words


def with_file(words: list[str]) -> list[str]:
    """The words of a command, with those of the file of --config before its own, which win."""
    finder = ArgumentParser(add_help=False)
    finder.add_argument("--config", type=Path)
    config = finder.parse_known_args(words)[0].config
    if config is None:
        return words
    from linpix.model import toml

    found = toml.read(config, actions_of(words[0]), f"linpix {words[0]}")
    return [words[0], *words_of(words[0], found), *words[1:]]


def actions_of(command: str) -> dict[str, Action]:
    """The options of a command by name, with underscores."""
    parser = ArgumentParser(add_help=False)
    COMMANDS[command][0](parser)
    actions = {}
    for action in parser._actions:
        if action.option_strings:
            actions[action.option_strings[0].removeprefix("--").replace("-", "_")] = action
    return actions


def _words(action: Action, value: Any) -> list[str]:
    flag = action.option_strings[0]
    if action.nargs == 0:  # on or off
        if not isinstance(value, bool):
            raise ValueError(f"{flag} must be true or false, got {value!r}")
        negative = flag.replace("--", "--no-")
        off = [negative] if negative in action.option_strings else []
        return [flag] if value else off
    values = value if isinstance(value, (list, tuple)) else [value]
    for part in values:
        if isinstance(part, bool) or not isinstance(part, (str, int, float, os.PathLike)):
            raise ValueError(f"{flag} must be a text, a number, or a list of them, got {value!r}")
    parts = [str(part) for part in values]
    if isinstance(action.nargs, int):
        return [flag, *parts]
    return [f"{flag}={','.join(parts)}"]


def model_flags(parser: ArgumentParser, *, positional: bool = False, required: bool = True) -> None:
    add = parser.add_argument
    text = "a name under --checkpoints, or a folder"
    if positional:
        add("model", help=text)
    elif required:
        add("--model", required=True, help=text)
    else:
        add("--model", help=f"{text}; default: the first of linpix models")
    checkpoints_flag(parser)
    add("--json", action="store_true", help="print one JSON object")


def checkpoints_flag(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=os.environ.get("LINPIX_CHECKPOINTS") or None,
        help=(
            "folder of checkpoints (or LINPIX_CHECKPOINTS); default: checkpoints/ in the source"
            " tree"
        ),
    )
    plugin_flag(parser)


def plugin_flag(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--plugin",
        action="append",
        metavar="MODULE",
        help=(
            "module, or .py file, that registers kinds of attention or feature maps; may be given"
            " several times (or LINPIX_PLUGIN, comma-separated)"
        ),
    )


def _device(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to compute on"
    )


def _new_folder(text: str) -> str:
    if Path(text).name in ("", ".."):
        raise ArgumentTypeError(
            f"must be a folder that does not exist yet, such as runs/mine; got {text!r}"
        )
    return text


def _size(text: str) -> tuple[int, int]:
    from .palette import SIDES

    # a file of --config has a list
    sides = [number(int, *SIDES)(part) for part in text.lower().replace(",", "x").split("x")]
    if len(sides) != 2:
        raise ArgumentTypeError(f"must be width x height in pixels, such as 24x32; got {text!r}")
    return sides[0], sides[1]


def _temperatures(text: str) -> Any:
    bounds = [number(float, 0, 10)(part) for part in text.split(",")]
    if len(bounds) != 2 or bounds[0] > bounds[1]:
        raise ArgumentTypeError(
            f"must be two numbers, the lower first, such as 0.5,1.2; got {text!r}"
        )
    return bounds


def train(parser: ArgumentParser) -> None:
    add = parser.add_argument
    from linpix.model.config import PRESETS, AttentionKind, FeatureMap, Head

    from .run import TrainConfig

    add(
        "preset",
        nargs="?",
        metavar="PRESET",
        help=(
            "architecture: auto, "
            f"{', '.join(sorted(PRESETS))}; with --preset, give the folder of pictures here"
        ),
    )
    add(
        "--preset",
        dest="chosen",
        choices=["auto", *sorted(PRESETS)],
        help=(
            "architecture, with the folder of pictures as the argument; auto: size, colours and"
            " minutes are chosen from the pictures, which may have any size, and training starts"
            " with the weights of mnist-conditional (grey) or cifar10-conditional (colour), or at"
            " random for pictures of few colours, such as sprites, which get a palette"
        ),
    )
    add("--data", help="folder of the data set; if it is empty, the data are downloaded")
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help=(
            "TOML file of flags, such as batch = 32; flags win; every run writes such a file,"
            " FOLDER.training/run.toml"
        ),
    )
    add(
        "--out",
        type=_new_folder,
        required=True,
        help=(
            "checkpoint folder to write; FOLDER.training "
            "holds the log, and the state to resume from"
        ),
    )
    _device(parser)
    add(
        "--attention",
        default="linear",
        help=f"kind of attention: {', '.join(get_args(AttentionKind))}, or one of --plugin",
    )
    add(
        "--feature-map",
        default="elu+1",
        help=f"feature map of linear attention: {', '.join(get_args(FeatureMap))}, or of --plugin",
    )
    add("--lsh-rounds", type=number(int, 1), default=1, help="hashing rounds of lsh attention")
    add(
        "--layers",
        type=number(int, 1),
        help=(
            "number of layers; default: the preset's. If "
            "the model of --init has fewer layers, the new ones change nothing at first"
        ),
    )
    add(
        "--head",
        choices=get_args(Head),
        help=(
            "what predicts a value: a mixture of logistics, or (categorical) 256 logits for grey"
            " pictures; default: the preset's. With --init, another kind of head begins at random"
        ),
    )
    add(
        "--colours",
        type=number(int, 2, 256),
        help=(
            "most colours of a palette, which the preset palette takes from the pictures (default:"
            " 64); with --preset auto, choose this preset"
        ),
    )
    add(
        "--size",
        type=_size,
        metavar="WxH",
        help=(
            "width and height of the pictures, each of 8 to 64 pixels; default: the preset's; with"
            " --preset auto, they are converted to it (default: by their own shape)"
        ),
    )
    add(
        "--reversible",
        action="store_true",
        help=(
            "reversible residuals with pre-norm: memory use does not grow with the number of layers"
        ),
    )
    add("--twin-of", default="", help="name of the model to compare this one with")
    add(
        "--init",
        help=(
            "model whose weights training starts from; it may have fewer layers, or a half, "
            "a third, ... of the heads, d_model and d_ff alike"
        ),
    )
    checkpoints_flag(parser)
    add(
        "--fall-from",
        metavar="FOLDER",
        help=(
            "begin as a copy of the run in FOLDER, such as one with --images 0, with all its"
            " settings; the learning rate falls from that run's to the final one within"
            " --max-images (default: a quarter of that run's images)"
        ),
    )
    add("--resume", action="store_true", help="continue the run in --out, which must exist")
    add(
        "--max-minutes",
        type=number(float, 0),
        default=math.inf,
        help="stop after this many minutes; --resume continues",
    )
    add(
        "--max-images",
        type=number(int, 1),
        default=math.inf,
        help="stop after this many images; --resume continues",
    )
    add("--save-minutes", type=number(float, 0.01), default=2.0, help="minutes between saves")
    add(
        "--evaluate-minutes",
        type=number(float, 0.01),
        default=10.0,
        help="minutes between evaluations",
    )
    add(
        "--processes",
        type=number(int, 1),
        help=(
            "number of processes that share each batch; default: "
            "one per thread, as long as each has at least 4 images"
        ),
    )
    for field in fields(TrainConfig):
        kind: dict[str, Any] = {"type": type(field.default)}
        if isinstance(field.default, bool):
            kind = {"action": BooleanOptionalAction}
        elif isinstance(field.default, tuple):
            kind = {"type": float, "nargs": len(field.default)}
        add(
            f"--{field.name.replace('_', '-')}",
            default=None,
            **kind,
            help=(
                f"{field.metadata['help']} (default: {field.default}, or the value of the resumed "
                "run)"
            ),
        )


def evaluate(parser: ArgumentParser) -> None:
    add = parser.add_argument
    model_flags(parser, positional=True)
    add(
        "--data",
        required=True,
        help="folder of the data set; if it is empty, the data are downloaded",
    )
    _device(parser)
    add("--limit", type=number(int, 1), help="use only the first N test images")
    add(
        "--engine",
        choices=("auto", "eager", "compiled"),
        default="eager",
        help="eager: torch, all positions in parallel; compiled: the kernels, step by step",
    )
    add(
        "--precision",
        choices=("auto", "fp32", "bf16", "int8"),
        default="auto",
        help="precision of the compiled engine's matrix products",
    )
    add(
        "--labels",
        choices=("all",),
        help=(
            "also measure how often the most probable class is right, "
            "if all classes are equally probable at first; needs one pass per class"
        ),
    )
    add(
        "--classes",
        type=number(int, 1, 1_000_000),
        nargs="?",
        const=1_000,
        metavar="N",
        help=(
            "draw N images (default: 1,000) instead, and measure the share that a CNN, trained on "
            "the same data, recognises as the requested class"
        ),
    )
    add(
        "--write",
        action="store_true",
        help=(
            "with --classes: write the share into the checkpoint, and also the values of the next"
            " five flags (default: the checkpoint's own values, or values that suit its data)"
        ),
    )
    add("--temperature", type=number(float, 0, 10), help="temperature of requests that give none")
    add(
        "--temperature-range",
        type=_temperatures,
        metavar="LOW,HIGH",
        help="range of useful temperatures",
    )
    add(
        "--attempts",
        type=number(int, 1, 16),
        help=(
            "how many times an image may be drawn until it is "
            "recognised and not torn, for requests that do not say so"
        ),
    )
    add(
        "--recognised",
        type=number(float, 0, 1),
        help=(
            "probability of its class at which an image is recognised (default: 0.99); lower where "
            "pictures show several classes at once"
        ),
    )
    add("--limits", help="one sentence about what the model cannot do")
    add("--grid", help="write a grid of samples to this .png file")


def export(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("run_folder", help="folder written by `linpix train`")
    add("--data", required=True, help="folder of the data set used in training")
    add("--out", type=_new_folder, required=True, help="checkpoint folder to write")
    plugin_flag(parser)
    add(
        "--twin-of", help="name of the model to compare it with; default: the one given in training"
    )
    add(
        "--fp32",
        action="store_true",
        help="keep all weights in float32, not only the head and the norm before it",
    )
    add(
        "--calibrate",
        action="store_true",
        help=(
            "correct overconfidence: fit one or two numbers to the images that the training held"
            " out, and multiply them into the head; for runs that saw each image many times"
        ),
    )


def import_(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("reference", help=".pth file of the checkpoint")
    add(
        "--heads",
        type=number(int, 1),
        required=True,
        help="number of attention heads, which the file does not store",
    )
    add(
        "--attention",
        choices=("linear", "softmax"),
        default="linear",
        help="kind of attention that the model was trained with",
    )
    add("--data", help="folder of the training data; needed for the distribution of sub-pixel 0")
    add("--out", type=_new_folder, required=True, help="checkpoint folder to write")


def experiment(parser: ArgumentParser) -> None:
    from .experiments import ExperimentName, study

    names = parser.add_subparsers(dest="experiment", required=True, metavar="NAME")
    for name in get_args(ExperimentName):
        kind, text = study(name), sys.modules[study(name).__module__].__doc__ or ""
        sub = names.add_parser(
            name, help=text, description=text, formatter_class=parser.formatter_class
        )
        sub.add_argument(
            "--out",
            help=(
                "folder for tables, plot and summary; "
                "FOLDER.training holds the state that the next run continues from (default:"
                f" runs/experiment-{name}, or runs/experiment-{name}-quick)"
            ),
        )
        smaller = ", ".join(f"{name} {value}" for name, value in kind.quick_form.items())
        sub.add_argument(
            "--quick",
            action="store_true",
            help=f"a form that takes minutes, and shows less; other defaults: {smaller}",
        )
        _device(sub)
        sub.add_argument(
            "--max-minutes",
            type=number(float, 0),
            default=math.inf,
            help="stop after this many minutes; the same command continues",
        )
        for field in fields(kind.settings_type):
            action: dict[str, Any] = {"type": type(field.default)}
            default = field.default
            if isinstance(default, bool):
                action = {"action": BooleanOptionalAction}
            elif isinstance(default, tuple):
                action = {"type": lambda text: text.split(","), "action": "extend"}
                default = ",".join(default)
            text = f"{field.metadata['help']} (default: {default})"
            sub.add_argument(f"--{field.name.replace('_', '-')}", default=None, help=text, **action)


COMMANDS = {  # the function that adds its flags, named as the one in commands.py; and what it does
    "train": (train, "train a preset; this writes a checkpoint folder"),
    "evaluate": (evaluate, "measure the bits/dim of a model on the test images"),
    "export": (
        export,
        "evaluate a training run on all test images, and write a checkpoint for distribution",
    ),
    "import": (import_, "convert a checkpoint of the published reference implementation"),
    "experiment": (experiment, "repeat an experiment of the papers; run again, it continues"),
}
