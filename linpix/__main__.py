"""The command line. A command imports only what it needs."""

import argparse
import atexit
import contextlib
import dataclasses
import gc
import importlib
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. An error that the user can correct is one line on standard error."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] in (["train"], ["experiment"]):  # before torch: spinning threads would starve others for hours
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    alone, serving = arguments is None, words[:1] == ["serve"]
    if alone or serving:  # imports are not garbage: collecting takes half a second, and again at the end
        gc.disable()
        atexit.register(gc.freeze)
    if serving:
        # Until the server handles SIGTERM there is nothing to drain. Not SystemExit: a native module that is being
        # imported takes it for its own failure.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
        if hasattr(signal, "SIGHUP"):  # pending until the server handles it: else it would end the process
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        given = _parser(words[:1]).parse_args(words)
        given.command_line = shlex.join(["linpix", *words])
        if not serving and any(name.startswith("LINPIX_") for name in os.environ):
            with contextlib.suppress(ModuleNotFoundError):  # training may be installed without the packages for serving
                for sentence in importlib.import_module("linpix.server.settings").misspelt(os.environ):
                    print(f"linpix {words[0]}: {sentence}", file=sys.stderr)
        command = getattr(_imported(given.module), given.function)
        if "torch" in sys.modules:
            importlib.import_module("linpix.model.team").limit_threads()
        if alone and not serving:  # a server enables it once it has started
            gc.freeze()
            gc.enable()
        command(given)
    except BrokenPipeError:
        return 1
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, OSError) and error.filename and error.strerror:  # the system's words say no cure
            cure = next((cure for kind, cure in _CURES.items() if isinstance(error, kind)), "give another path")
            message = f"{error.filename}: {error.strerror.lower()}; {cure}"
        print(f"linpix {words[0]}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


_CURES = {FileNotFoundError: "check the path", IsADirectoryError: "give a file in it",
          PermissionError: "give a path that you have access to, or change its permissions"}


def _imported(module: str) -> Any:
    """Import a module of ours. Raises ModuleNotFoundError that says how to install what is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; install the packages that LinPix needs: pip install .") from error


# --- flags ---

def _number(kind: type, least: float, most: float = math.inf) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            bounds = f"at least {least}" if math.isinf(most) else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"must be {'an integer' if kind is int else 'a number'}, {bounds}; "
                                             f"got {text!r}")
        return value

    return parse


def _new_folder(text: str) -> str:
    if Path(text).name in ("", ".."):
        raise argparse.ArgumentTypeError(f"must be a folder that does not exist yet, such as runs/mine; got {text!r}")
    return text


def _scale(text: str) -> Any:
    if text == "auto":
        return text
    try:
        return _number(int, 1, 64)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(str(error).replace("must be", "must be auto or")) from None


def _temperatures(text: str) -> Any:
    bounds = [_number(float, 0, 10)(part) for part in text.split(",")]
    if len(bounds) != 2 or bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"must be two numbers, the lower first, such as 0.5,1.2; got {text!r}")
    return bounds


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default of a flag, unless its text names it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        complete = "default" in (action.help or "") or action.required or action.default in (None, "")
        return action.help if complete else super()._get_help_string(action)


def _integers(text: str) -> list[int]:
    return [_number(int, 1, 4096)(part) for part in text.split(",")]


def _parser(wanted: list[str]) -> argparse.ArgumentParser:
    """wanted: the command, if any. Flags that come from a package's settings are added for its command only."""
    parser = argparse.ArgumentParser(prog="linpix", description="Linear transformers that draw images: train, serve, "
                                                                "sample, complete, compare.")
    if wanted == ["--version"]:
        parser.add_argument("--version", action="version", version=_release())
    else:
        parser.add_argument("--version", action="store_true", help="show the version of LinPix, torch and Python")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(room: str, name: str, text: str, *, module: str = "commands", function: str = ""
                ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".",
                                  formatter_class=_Help)
        sub.set_defaults(module=f"{room}.{module}", function=function or name)
        return sub

    serving = command("linpix.cli", "serve", "serve models over HTTP")
    if wanted == ["serve"]:
        _serve_flags(serving)
    keying = command("linpix.cli", "key", "make an API key, and its line for the key file (`serve --api-keys`)",
                     module="keys")
    keying.add_argument("name", help="name of the client that gets the key; the log and the limits use it")
    keying.add_argument("--rate", help="limit of requests, such as 10/s, 600/min or 5000/h; without it, there is no "
                                       "limit")
    keying.add_argument("--file", help="append the line to this file; a new file gets mode 600")
    keying.add_argument("--json", action="store_true", help="print one JSON object")
    drawing = command("linpix.cli", "sample", "draw images without a server")
    _drawing_flags(drawing)
    drawing.add_argument("--shards", type=_number(int, 1, 1_000_000), help="for bulk work: number of parts in which "
                         "the images are written to --out, each a tar for WebDataset; the same command, run again, "
                         "draws the missing images")
    drawing.add_argument("--shard-format", choices=("tar", "png"), help="with --shards: tar (default); or png, which "
                         "writes a folder with the same files instead of each tar")
    completing = command("linpix.cli", "complete", "fill in the holes of a picture")
    completing.add_argument("image", help="PNG, JPEG or WebP; transparent pixels are filled in")
    _drawing_flags(completing)
    completing.add_argument("--mask", help="picture whose transparent pixels are filled in")
    completing.add_argument("--keep-rows", type=_number(int, 0), help="image rows to keep; those below are filled in")
    completing.add_argument("--prepare", choices=("none", "mnist"), default="none", help="mnist: find the digit in a "
                            "photograph or scan, and give it the size and position of MNIST digits")
    completing.add_argument("--lay-back", action="store_true", help="write the given picture at its own size (at most "
                            "1024 pixels a side), with its hidden parts filled in; --out must be a folder")

    scoring = command("linpix.cli", "score", "compute how probable a picture is, or its hidden part given the "
                      "rest", module="score", function="run")
    scoring.add_argument("image", help="PNG, JPEG or WebP; its transparent pixels are hidden; if it has none, all are")
    _model_flags(scoring)
    scoring.add_argument("--mask", help="picture whose transparent pixels are hidden")
    scoring.add_argument("--keep-rows", type=_number(int, 0), help="image rows that are known; those below are hidden")
    scoring.add_argument("--label", help="class that the model assumes, by index or name; default: no class; a model "
                         "that draws the class first then uses the mixture of all classes")
    scoring.add_argument("--labels", choices=("all",), help="compute the likelihood under every class, and the "
                         "probability of each class")
    scoring.add_argument("--out", help="write the map to this .png file: black is 0 bits, white is 8 bits or more")
    scoring.add_argument("--scale", type=_number(int, 1, 64), default=1, help="enlarge the map by this factor")

    comparing = command("linpix.cli", "compare", "measure attention backends side by side")
    _model_flags(comparing)
    which = comparing.add_mutually_exclusive_group()
    which.add_argument("--backends", action="append", help="comma-separated list of linear, softmax, "
                       "stateful-softmax, lsh-1 and lsh-4; default: all")
    which.add_argument("--all", action="store_true", help="all backends")
    comparing.add_argument("--batch", type=_integers, action="extend", help="comma-separated batch sizes; default: "
                                                                            "1,16,64")
    comparing.add_argument("--budget", type=_number(float, 1), default=60.0, help="time for the measurement, in "
                           "seconds")
    comparing.add_argument("--out", help="folder for report.json, report.md and report.svg (a chart, which "
                           "needs matplotlib)")

    teaching = command("linpix.training", "train", "train a preset; this writes a checkpoint folder")
    if wanted == ["train"]:
        _train_flags(teaching)

    evaluating = command("linpix.training", "evaluate", "measure the bits/dim of a model on the test images")
    _model_flags(evaluating, positional=True)
    evaluating.add_argument("--data", required=True, help="folder of the data set; if it is empty, the data are "
                                                          "downloaded")
    _device_flag(evaluating)
    evaluating.add_argument("--limit", type=_number(int, 1), help="use only the first N test images")
    evaluating.add_argument("--engine", choices=("auto", "eager", "compiled"), default="eager",
                            help="eager: torch, all positions in parallel; compiled: the kernels, step by step")
    evaluating.add_argument("--precision", choices=("auto", "fp32", "bf16", "int8"), default="auto",
                            help="precision of the compiled engine's matrix products")
    evaluating.add_argument("--labels", choices=("all",), help="also measure how often the most probable "
                            "class is right, if all classes are equally probable at first; needs one pass per class")
    evaluating.add_argument("--classes", type=_number(int, 1, 1_000_000), nargs="?", const=1_000, metavar="N",
                            help="draw N images (default: 1,000) instead, and measure the share that a CNN, trained on "
                            "the same data, recognises as the requested class")
    evaluating.add_argument("--write", action="store_true", help="with --classes: write the share into the "
                            "checkpoint, and also the values of the next four flags (default: the checkpoint's own "
                            "values, or values that suit its data)")
    evaluating.add_argument("--temperature", type=_number(float, 0, 10), help="temperature of requests that give none")
    evaluating.add_argument("--temperature-range", type=_temperatures, metavar="LOW,HIGH",
                            help="range of useful temperatures")
    evaluating.add_argument("--attempts", type=_number(int, 1, 16), help="how many times an image may be drawn until "
                            "it is recognised and not torn, for requests that do not say so")
    evaluating.add_argument("--limits", help="one sentence about what the model cannot do")
    evaluating.add_argument("--grid", help="write a grid of samples to this .png file")

    exporting = command("linpix.training", "export", "evaluate a training run on all test images, and write a "
                                                     "checkpoint for distribution")
    exporting.add_argument("run_folder", help="folder written by `linpix train`")
    exporting.add_argument("--data", required=True, help="folder of the data set used in training")
    exporting.add_argument("--out", type=_new_folder, required=True, help="checkpoint folder to write")
    exporting.add_argument("--twin-of", help="name of the model to compare it with; default: the one given in training")
    exporting.add_argument("--fp32", action="store_true", help="keep all weights in float32, not only the "
                                                                    "head and the norm before it")
    exporting.add_argument("--calibrate", action="store_true", help="correct overconfidence: fit one or two numbers to "
                           "the images that the training held out, and multiply them into the head; for runs that saw "
                           "each image many times")

    importing = command("linpix.training", "import", "convert a checkpoint of the published reference implementation",
                        function="import_")
    importing.add_argument("reference", help=".pth file of the checkpoint")
    importing.add_argument("--heads", type=_number(int, 1), required=True, help="number of attention heads, which the "
                                                                                "file does not store")
    importing.add_argument("--attention", choices=("linear", "softmax"), default="linear", help="kind of attention "
                           "that the model was trained with")
    importing.add_argument("--data", help="folder of the training data; needed for the distribution of sub-pixel 0")
    importing.add_argument("--out", type=_new_folder, required=True, help="checkpoint folder to write")

    trying = command("linpix.training", "experiment", "repeat an experiment of the papers; run again, it continues")
    if wanted == ["experiment"]:
        _experiment_flags(trying)

    examining = command("linpix.cli", "doctor", "show which kernels run on this machine, and why")
    examining.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _release() -> str:
    from importlib.metadata import PackageNotFoundError, version

    def release(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "unknown"

    return f"linpix {release('linpix')}, torch {release('torch')}, Python {sys.version.split()[0]}"


def _serve_flags(parser: argparse.ArgumentParser) -> None:
    _imported("linpix.server.settings")
    from linpix.server.settings import BYTES, HIDDEN, LIST, SECONDS, Settings

    for name, field in Settings.model_fields.items():
        kind = "|".join(get_args(field.annotation) if get_origin(field.annotation) is Literal else ())
        default = field.default
        if SECONDS in field.metadata:
            kind, default = "TIME", f"{default:g}s"
        elif BYTES in field.metadata:
            kind, default = "SIZE", f"{default >> 20}MiB"
        default = "" if field.default in (None, "") else f"default: {default}; "
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=kind or name.upper(),
                            action="append" if LIST in field.metadata else "store",
                            help=argparse.SUPPRESS if field.json_schema_extra == HIDDEN else
                            f"{field.description} ({default}LINPIX_{name.upper()})")
    parser.formatter_class = argparse.HelpFormatter  # defaults are in the texts; None: the variable decides
    parser.epilog = ("TIME: seconds, or a number with a unit (500ms, 90s, 2m, 1h, 1m30s). SIZE: bytes, or a number "
                     "with a unit (16MiB, 1.5GiB, 500MB). A comma-separated list may be given in several flags.")


def _model_flags(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    if positional:
        parser.add_argument("model", help="a name under --checkpoints, or a folder")
    else:
        parser.add_argument("--model", required=True, help="a name under --checkpoints, or a folder")
    _checkpoints_flag(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _checkpoints_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoints", type=Path, default=os.environ.get("LINPIX_CHECKPOINTS"),
                        help="folder of checkpoints (or LINPIX_CHECKPOINTS); default: checkpoints/ in the source tree")


def _device_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to compute on")


def _drawing_flags(parser: argparse.ArgumentParser) -> None:
    _model_flags(parser)
    parser.add_argument("--count", type=_number(int, 1, 1_000_000), default=1, help="number of images")
    parser.add_argument("--candidates", type=_number(int, 1), help="draw this many images and keep the best --count of "
                        "them; only for models that draw the class first; default: draw --count images and keep all")
    parser.add_argument("--attempts", type=_number(int, 1, 16), help="draw an image up to this many times, until the "
                        "model recognises its class and it is not torn; only for models that draw the class first; "
                        "default: the model's own")
    parser.add_argument("--batch", type=_number(int, 1, 4096), default=64, help="largest number of images decoded at "
                                                                                "once")
    parser.add_argument("--seed", type=_number(int, 0, 2**53 - 1), help="image i uses seed + i; default: a random seed")
    parser.add_argument("--temperature", type=_number(float, 0, 10), help="1: as trained; lower: less varied; "
                        "higher: more varied; default: the model's own")
    parser.add_argument("--label", help="class, by index or name")
    for name, default, text, limits in (
            ("engine", "auto", "engine to decode with", {"choices": ("auto", "eager", "compiled")}),
            ("precision", "auto", "precision of matrix products", {"choices": ("auto", "fp32", "bf16", "int8")}),
            ("device", "auto", "device to decode on", {"choices": ("auto", "cpu", "cuda")}),
            ("state", "fp32", "precision of the recurrent state on a GPU; fp16 needs --defer",
             {"choices": ("fp32", "fp16")}),
            ("defer", "1", "number of tokens that a GPU adds to the state at once", {"type": _number(int, 1, 64)})):
        variable = f"LINPIX_{name.upper()}"
        parser.add_argument(f"--{name}", default=os.environ.get(variable, default), help=f"{text} (or {variable})",
                            **limits)
    parser.add_argument("--out", required=True, help="a folder for one PNG per image; X.png for one grid of "
                        "all images, or for a single image; or X.gif or X.webp for an animation of the grid while it "
                        "is drawn")
    parser.add_argument("--scale", type=_scale, help="enlarge pictures by this factor; auto: up to 560 pixels wide; "
                        "default: auto for animations, and for X.png if a terminal is used; other pictures are not "
                        "enlarged")
    parser.add_argument("--preview", choices=("auto", "always", "never"), default="auto",
                        help="show the images on standard error while they are drawn; auto: if it is a terminal "
                        "with colours and --json is not given")


def _train_flags(parser: argparse.ArgumentParser) -> None:
    _imported("linpix.training.run")
    from linpix.model.config import PRESETS, AttentionKind, FeatureMap, Head
    from linpix.training.run import TrainConfig

    parser.add_argument("preset", nargs="?", metavar="PRESET", help="architecture: auto, "
                        f"{', '.join(sorted(PRESETS))}; with --preset, give the folder of pictures here")
    parser.add_argument("--preset", dest="chosen", choices=["auto", *sorted(PRESETS)], help="architecture, with the "
                        "folder of pictures as the argument; auto: size, colours and minutes are chosen from the "
                        "pictures, which may have any size, and training starts with the weights of mnist-conditional "
                        "(grey) or cifar10-conditional (colour)")
    parser.add_argument("--data", help="folder of the data set; if it is empty, the data are downloaded")
    parser.add_argument("--out", type=_new_folder, required=True, help="checkpoint folder to write; FOLDER.training "
                        "holds the log, and the state to resume from")
    _device_flag(parser)
    parser.add_argument("--attention", choices=get_args(AttentionKind), default="linear", help="kind of attention")
    parser.add_argument("--feature-map", choices=get_args(FeatureMap), default="elu+1", help="feature map of linear "
                                                                                             "attention")
    parser.add_argument("--lsh-rounds", type=_number(int, 1), default=1, help="hashing rounds of lsh attention")
    parser.add_argument("--layers", type=_number(int, 1), help="number of layers; default: the preset's. If "
                        "the model of --init has fewer layers, the new ones change nothing at first")
    parser.add_argument("--head", choices=get_args(Head), help="what predicts a value: a mixture of logistics, or "
                        "(categorical) 256 logits for grey pictures; default: the preset's. With --init, another kind "
                        "of head begins at random")
    parser.add_argument("--reversible", action="store_true",
                        help="reversible residuals with pre-norm: memory use does not grow with the number of layers")
    parser.add_argument("--twin-of", default="", help="name of the model to compare this one with")
    parser.add_argument("--init", help="model whose weights training starts from; it may have fewer layers, or a half, "
                        "a third, ... of the heads, d_model and d_ff alike")
    _checkpoints_flag(parser)
    parser.add_argument("--resume", action="store_true", help="continue the run in --out, if there is one")
    parser.add_argument("--max-minutes", type=_number(float, 0), default=math.inf,
                        help="stop after this many minutes; --resume continues")
    parser.add_argument("--max-images", type=_number(int, 1), default=math.inf,
                        help="stop after this many images; --resume continues")
    parser.add_argument("--save-minutes", type=_number(float, 0.01), default=2.0, help="minutes between saves")
    parser.add_argument("--evaluate-minutes", type=_number(float, 0.01), default=10.0, help="minutes between "
                                                                                            "evaluations")
    parser.add_argument("--processes", type=_number(int, 1), help="number of processes that share each batch; default: "
                        "one per thread, as long as each has at least 4 images")
    for field in dataclasses.fields(TrainConfig):
        kind: dict[str, Any] = {"type": type(field.default)}
        if isinstance(field.default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        elif isinstance(field.default, tuple):
            kind = {"type": float, "nargs": len(field.default)}
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=None, **kind,
                            help=f"{field.metadata['help']} (default: {field.default}, or the value of the resumed "
                                 f"run)")


def _experiment_flags(parser: argparse.ArgumentParser) -> None:
    _imported("linpix.training.experiments")
    from linpix.training.experiments import ExperimentName, study

    names = parser.add_subparsers(dest="experiment", required=True, metavar="NAME")
    for name in get_args(ExperimentName):
        kind, text = study(name), sys.modules[study(name).__module__].__doc__ or ""
        sub = names.add_parser(name, help=text, description=text, formatter_class=parser.formatter_class)
        sub.add_argument("--out", default=f"runs/experiment-{name}", help="folder for tables, plot and summary; "
                         "FOLDER.training holds the state that the next run continues from")
        _device_flag(sub)
        sub.add_argument("--max-minutes", type=_number(float, 0), default=math.inf,
                         help="stop after this many minutes; the same command continues")
        for field in dataclasses.fields(kind.settings_type):
            action: dict[str, Any] = {"type": type(field.default), "default": field.default}
            text = field.metadata["help"]
            if isinstance(field.default, bool):
                action = {"action": argparse.BooleanOptionalAction, "default": field.default}
            elif isinstance(field.default, tuple):
                action = {"type": lambda text: text.split(","), "action": "extend"}
                text += f" (default: {','.join(field.default)})"
            sub.add_argument(f"--{field.name.replace('_', '-')}", help=text, **action)


if __name__ == "__main__":
    sys.exit(main())
