"""The command line. A command imports only what it needs."""

import argparse
import atexit
import contextlib
import gc
import importlib
import io
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version

from linpix.training.flags import (
    COMMANDS,
    checkpoints_flag,
    model_flags,
    number,
    with_file,
)

from . import __version__

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. An error that the user can correct is one line on
    standard error.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    # before torch: spinning threads would starve others for hours
    if words[:1] in (["train"], ["experiment"]):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    alone, serving = arguments is None, words[:1] == ["serve"]
    command_line = shlex.join(["linpix", *words])
    _prepare_process(alone=alone, serving=serving)
    try:
        if words[:1] == ["train"]:
            words = with_file(words)
        given = _parser(words[:1]).parse_args(words)
        given.command_line = command_line
        if not serving:
            _warn_of_misspelt_variables(words[0])
        wanted = ",".join(getattr(given, "plugin", None) or ()) or os.environ.get("LINPIX_PLUGIN")
        if wanted and not serving:  # a server loads its own, once signals are handled
            importlib.import_module("linpix.model.plugins").load(wanted)
        command = getattr(importlib.import_module(given.module), given.function)
        if "torch" in sys.modules:
            importlib.import_module("linpix.model.team").limit_threads()
        if alone and not serving:  # a server enables it once it has started
            gc.freeze()
            gc.enable()
        command(given)
    except BrokenPipeError:
        return 1
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        print(f"linpix {words[0]}: {_reason(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _prepare_process(*, alone: bool, serving: bool) -> None:
    """Set up garbage collection, signals and standard streams. alone: the process is ours."""
    # imports are not garbage: collecting takes half a second, and again at the end
    if alone or serving:
        gc.disable()
        atexit.register(gc.freeze)
    # Until the server handles SIGTERM there is nothing to drain. And the first process of a
    # container never gets a signal that it does not handle. Not SystemExit: a native module that is
    # being imported takes it for its own failure.
    if serving or (alone and os.getpid() == 1):
        status = 0 if serving else 128 + signal.SIGTERM
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(status))
    # pending until the server handles it: else it would end the process
    if serving and hasattr(signal, "SIGHUP"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    # a stream that a shell has closed (>&-) is None; a file's name may not be in the locale's
    # encoding
    if alone:
        sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
        sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")


def _warn_of_misspelt_variables(command: str) -> None:
    if not any(name.startswith("LINPIX_") for name in os.environ):
        return
    # training may be installed without the packages for serving
    with contextlib.suppress(ModuleNotFoundError):
        settings = importlib.import_module("linpix.server.settings")
        for sentence in settings.misspelt(os.environ):
            print(f"linpix {command}: {sentence}", file=sys.stderr)


def _reason(error: Exception) -> str:
    """What went wrong, in one line. The words of the system, and of an import, say no cure."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        cure = _CURES.get(type(error), "give another path")
        return f"{error.filename}: {error.strerror.lower()}; {cure}"
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ModuleNotFoundError) and error.name:
        message += "; install the packages that LinPix needs: pip install ."
    return message


_CURES: dict[type[Exception], str] = {
    FileNotFoundError: "check the path",
    IsADirectoryError: "give a file in it",
    PermissionError: "give a path that you have access to, or change its permissions",
}


# --- flags ---


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default of a flag, unless its text names it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        complete = (
            "default" in (action.help or "") or action.required or action.default in (None, "")
        )
        return action.help if complete else super()._get_help_string(action)


def _parser(wanted: list[str]) -> argparse.ArgumentParser:
    """wanted: the command, if any. Flags that come from a package's settings are added for its
    command only.
    """
    parser = argparse.ArgumentParser(
        prog="linpix",
        description=(
            "Linear transformers that draw images: train, serve, sample, complete, compare."
        ),
    )
    versions = ""
    if wanted == ["--version"]:  # torch's takes 0.2 s to find
        versions = (
            f"linpix {__version__}, torch {version('torch')}, Python {sys.version.split()[0]}"
        )
    parser.add_argument(
        "--version",
        action="version",
        help="show the version of LinPix, torch and Python",
        version=versions,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, text: str, module: str = "linpix.cli.commands", function: str = ""
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text[:1].upper() + text[1:] + ".", formatter_class=_Help
        )
        sub.set_defaults(module=module, function=function or name)
        return sub

    serving = command("serve", "serve models over HTTP")
    if wanted == ["serve"]:
        from linpix.server import settings

        settings.add_flags(serving)
    keying = command(
        "key",
        "make an API key, and its line for the key file (`serve --api-keys`)",
        "linpix.cli.keys",
    )
    keying.add_argument(
        "name", help="name of the client that gets the key; the log and the limits use it"
    )
    keying.add_argument(
        "--rate",
        help="limit of requests, such as 10/s, 600/min or 5000/h; without it, there is no limit",
    )
    keying.add_argument("--file", help="append the line to this file; a new file gets mode 600")
    drawing = command("sample", "draw images without a server")
    _drawing_flags(drawing)
    drawing.add_argument(
        "--shards",
        type=number(int, 1, 1_000_000),
        help=(
            "for bulk work: number of parts in which the images are written to --out, each a tar"
            " for WebDataset; the same command, run again, draws the missing images"
        ),
    )
    drawing.add_argument(
        "--shard-format",
        choices=("tar", "png"),
        help=(
            "with --shards: tar (default); or png, which "
            "writes a folder with the same files instead of each tar"
        ),
    )
    completing = command("complete", "fill in the holes of a picture")
    completing.add_argument("image", help="PNG, JPEG or WebP; transparent pixels are filled in")
    _drawing_flags(completing)
    completing.add_argument("--mask", help="picture whose transparent pixels are filled in")
    completing.add_argument(
        "--keep-rows", type=number(int, 0), help="image rows to keep; those below are filled in"
    )
    completing.add_argument(
        "--prepare",
        choices=("none", "mnist"),
        default="none",
        help=(
            "mnist: find the digit in a "
            "photograph or scan, and give it the size and position of MNIST digits"
        ),
    )
    completing.add_argument(
        "--lay-back",
        action="store_true",
        help=(
            "write the given picture at its own size (at most "
            "1024 pixels a side), with its hidden parts filled in; --out must be a folder"
        ),
    )

    scoring = command(
        "score",
        "compute how probable a picture is, or its hidden part given the rest",
        "linpix.cli.score",
        "run",
    )
    scoring.add_argument(
        "image",
        help="PNG, JPEG or WebP; its transparent pixels are hidden; if it has none, all are",
    )
    model_flags(scoring, required=False)
    scoring.add_argument("--mask", help="picture whose transparent pixels are hidden")
    scoring.add_argument(
        "--keep-rows", type=number(int, 0), help="image rows that are known; those below are hidden"
    )
    scoring.add_argument(
        "--label",
        help=(
            "class that the model assumes, by index or name; default: no class; a model "
            "that draws the class first then uses the mixture of all classes"
        ),
    )
    scoring.add_argument(
        "--labels",
        choices=("all",),
        help="compute the likelihood under every class, and the probability of each class",
    )
    scoring.add_argument(
        "--classes",
        choices=("plausible",),
        help=(
            "compute only classes that the model finds possible: several times faster, and a lower"
            " bound; default: all"
        ),
    )
    scoring.add_argument(
        "--out", help="write the map to this .png file: black is 0 bits, white is 8 bits or more"
    )
    scoring.add_argument(
        "--scale", type=number(int, 1, 64), default=1, help="enlarge the map by this factor"
    )

    comparing = command("compare", "measure attention backends side by side")
    model_flags(comparing)
    which = comparing.add_mutually_exclusive_group()
    which.add_argument(
        "--backends",
        action="append",
        help=(
            "comma-separated list of linear, softmax, "
            "stateful-softmax, lsh-1, lsh-4 and kinds of --plugin; default: all"
        ),
    )
    which.add_argument("--all", action="store_true", help="all backends")
    comparing.add_argument(
        "--batch",
        type=lambda text: [number(int, 1, 4096)(part) for part in text.split(",")],
        action="extend",
        help="comma-separated batch sizes; default: 1,16,64",
    )
    comparing.add_argument(
        "--budget", type=number(float, 1), default=60.0, help="time for the measurement, in seconds"
    )
    comparing.add_argument(
        "--out",
        help="folder for report.json, report.md and report.svg (a chart, which needs matplotlib)",
    )

    for name, (add_flags, text) in COMMANDS.items():
        training = command(name, text, "linpix.training.commands", add_flags.__name__)
        if wanted == [name]:
            add_flags(training)
    listing = command("models", "list the models, the default one first")
    checkpoints_flag(listing)
    examining = command(
        "doctor", "show which kernels run on this machine, why, and how near they come to its limit"
    )
    checkpoints_flag(examining)
    for sub in (keying, listing, examining):
        sub.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _drawing_flags(parser: argparse.ArgumentParser) -> None:
    model_flags(parser, required=False)
    parser.add_argument(
        "--count", type=number(int, 1, 1_000_000), default=1, help="number of images"
    )
    parser.add_argument(
        "--candidates",
        type=number(int, 1),
        help=(
            "draw this many images and keep the best --count of them; only for models that draw the"
            " class first; default: draw --count images and keep all"
        ),
    )
    parser.add_argument(
        "--attempts",
        type=number(int, 1, 16),
        help=(
            "draw an image up to this many times, until the model recognises its class and it is"
            " not torn; only for models that draw the class first; default: the model's own"
        ),
    )
    parser.add_argument(
        "--batch",
        type=number(int, 1, 4096),
        default=64,
        help="largest number of images decoded at once",
    )
    parser.add_argument(
        "--seed",
        type=number(int, 0, 2**53 - 1),
        help="image i uses seed + i; default: a random seed",
    )
    parser.add_argument(
        "--temperature",
        type=number(float, 0, 10),
        help="1: as trained; lower: less varied; higher: more varied; default: the model's own",
    )
    parser.add_argument("--label", help="class, by index or name")
    for name, text, choices in (  # the first one is the default
        ("engine", "engine to decode with", ("auto", "eager", "compiled")),
        ("precision", "precision of matrix products", ("auto", "fp32", "bf16", "int8")),
        ("device", "device to decode on", ("auto", "cpu", "cuda")),
        ("state", "precision of the recurrent state on a GPU", ("fp32", "fp16")),
    ):
        variable = f"LINPIX_{name.upper()}"
        parser.add_argument(
            f"--{name}",
            type=str.lower,
            default=os.environ.get(variable) or choices[0],
            choices=choices,
            help=f"{text} (or {variable})",
        )
    parser.add_argument(
        "--out",
        required=True,
        help=(
            "a folder for one PNG per image; X.png for one grid of all images, or for a single"
            " image; or X.gif or X.webp for an animation of the grid while it is drawn"
        ),
    )
    parser.add_argument(
        "--scale",
        type=number(int, 1, 64, "auto"),
        help=(
            "enlarge pictures by this factor; auto: up to 560 pixels wide; default: auto for"
            " animations, and for X.png if a terminal is used; other pictures are not enlarged"
        ),
    )
    parser.add_argument(
        "--preview",
        choices=("auto", "always", "never"),
        default="auto",
        help=(
            "show the images on standard error while they are drawn; auto: if it is a terminal "
            "with colours and --json is not given"
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
