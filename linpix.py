"""The command line: parses, then hands over to one room, imported only when needed."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve other processes

import argparse
import dataclasses
import json
import math
import secrets
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from model.checkpoint import Checkpoint
    from model.config import ModelConfig
    from server.batcher import Batcher
    from server.engine import ImageSpec


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. What the user can mend is one line on standard error."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    given = _parser(words[:1]).parse_args(words)
    given.command_line = shlex.join(["linpix", *words])
    try:
        status: int | None = given.run(given)
    except BrokenPipeError:
        return 1
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ModuleNotFoundError):
            message += "; install what LinPix depends on: pip install ."
        print(f"linpix {given.command}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status or 0


# --- serve ---

def serve(given: argparse.Namespace) -> None:
    from pydantic import ValidationError

    from server.app import serve as serve_forever
    from server.settings import Settings

    flags = {name: getattr(given, name) for name in Settings.model_fields if getattr(given, name) is not None}
    try:
        settings = Settings(**flags)
    except ValidationError as invalid:
        first = invalid.errors()[0]
        name = str(first["loc"][0])
        raise ValueError(f"--{name.replace('_', '-')} (LINPIX_{name.upper()}): {first['msg']}, "
                         f"got {first['input']!r}") from invalid
    serve_forever(settings)


# --- sample and complete ---

def sample(given: argparse.Namespace) -> None:
    from server.engine import ImageSpec

    checkpoint, batcher = _batcher(given, min(given.count, given.batch))
    label = _label(given.label, checkpoint)
    seeds = _seeds(given.seed, given.count)
    _produce(given, checkpoint, batcher,
             [ImageSpec(seed=seed, temperature=given.temperature, label=label) for seed in seeds])


def complete(given: argparse.Namespace) -> None:
    from server import pictures
    from server.engine import ImageSpec

    checkpoint, batcher = _batcher(given, min(given.count, given.batch))
    label = _label(given.label, checkpoint)
    mask = Path(given.mask).read_bytes() if given.mask else None
    occluded = pictures.read_occluded(Path(given.image).read_bytes(), checkpoint.net.config,
                                      mask=mask, keep_rows=given.keep_rows)
    _produce(given, checkpoint, batcher,
             [ImageSpec(seed=seed, temperature=given.temperature, label=label, canvas=occluded.canvas,
                        known=occluded.known) for seed in _seeds(given.seed, given.count)],
             conditioning=occluded.conditioning, known=occluded.known_count)


def _batcher(given: argparse.Namespace, slots: int) -> "tuple[Checkpoint, Batcher]":
    from model import checkpoint
    from server.batcher import Batcher
    from server.catalogue import engine_of
    from server.engine import Engine

    _check_output(given.out)
    engine_of(given.engine, given.precision)
    loaded = checkpoint.read(checkpoint.find(given.model, given.checkpoints))
    return loaded, Batcher(Engine(loaded, slots), max_queue=given.count)


def _produce(given: argparse.Namespace, checkpoint: "Checkpoint", batcher: "Batcher",
             specs: "Sequence[ImageSpec]", **facts: object) -> None:
    import numpy as np
    from tqdm import tqdm

    from server.bulk import produce

    with tqdm(total=len(specs), unit="image", disable=not sys.stderr.isatty()) as bar:
        produced = produce(batcher, specs, bar.update)
    files = _write_images(given.out, np.stack(produced.images), [spec.seed for spec in specs], checkpoint.net.config)
    engine = batcher.engine
    result = {"images": len(specs), "seconds": produced.seconds, "images_per_second": len(specs) / produced.seconds,
              "engine": engine.name, "precision": engine.precision, "model": checkpoint.name,
              "checkpoint": checkpoint.digest, "seeds": [spec.seed for spec in specs], "files": files, **facts}
    _report(given, result, f"{len(specs)} images in {produced.seconds:.2f} s "
                           f"({len(specs) / produced.seconds:.2f} images/s, {engine.name} engine, "
                           f"{engine.precision}), seeds from {specs[0].seed}, written to {given.out}")


def _check_output(out: str) -> None:
    """Refuse before the work, not after it, what cannot be written."""
    path = Path(out)
    if path.suffix.lower() == ".png" and not out.endswith("/"):
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"--out {out}: {'is a folder' if path.is_dir() else 'its folder does not exist'}; "
                             "give a new folder, or a .png file in an existing one")
    elif path.is_file():
        raise ValueError(f"--out {out} is a file; give a folder for one PNG per image, or a .png name for a grid")
    else:
        path.mkdir(parents=True, exist_ok=True)


def _write_images(out: str, images: "NDArray[np.uint8]", seeds: list[int], config: "ModelConfig") -> list[str]:
    from PIL import Image

    from model.grid import tile
    from server import pictures

    path = Path(out)
    if path.suffix.lower() == ".png" and not out.endswith("/"):
        temporary = path.with_name(path.name + ".new")
        Image.fromarray(tile(images, config)).save(temporary, "PNG")
        temporary.replace(path)
        return [str(path)]
    files = []
    for index, (image, seed) in enumerate(zip(images, seeds, strict=True)):
        files.append(str(path / f"{index:05}-{seed}.png"))
        Path(files[-1]).write_bytes(pictures.png(image, config))
    return files


def _seeds(first: int | None, count: int) -> list[int]:
    from model.philox import MAX_SEED

    first = secrets.randbelow(MAX_SEED - count) if first is None else first
    if first + count - 1 > MAX_SEED:
        raise ValueError(f"--seed: image i uses seed + i, which must stay under 2^53, got {first} for {count} images")
    return list(range(first, first + count))


def _label(label: str | None, checkpoint: "Checkpoint") -> int | None:
    if label is None:
        return None
    names = [name.casefold() for name in checkpoint.class_names]
    if label.casefold() in names:
        return names.index(label.casefold())
    if not label.isdecimal() or int(label) >= len(names):
        raise ValueError(f"--label must be a class of {checkpoint.name}: "
                         f"{', '.join(checkpoint.class_names) or 'none, it knows no classes'}; got {label!r}")
    return int(label)


# --- compare ---

def compare(given: argparse.Namespace) -> None:
    from tqdm import tqdm

    from model import checkpoint
    from server import compare as comparing
    from server import report
    from server.catalogue import comparison_of

    backends = comparing.BACKENDS if given.all or not given.backends else tuple(given.backends.split(","))
    plan = comparing.ComparisonPlan(backends=backends, batches=tuple(given.batch), budget_s=given.budget)
    folder = checkpoint.find(given.model, given.checkpoints)
    main_ = checkpoint.read(folder)
    siblings = [path for path in sorted(folder.resolve().parent.iterdir())
                if path != folder.resolve() and (path / "SHA256SUMS").exists()]
    comparison = comparison_of(main_, [checkpoint.read(path) for path in siblings], plan)
    with tqdm(total=100, unit="%", disable=not sys.stderr.isatty()) as bar:
        for _ in comparison.run():
            bar.update(round(100 * comparison.progress) - bar.n)
    result = comparison.report | {"command": given.command_line}
    if given.out:
        report.write(result, Path(given.out))
    _report(given, result, report.table(result))


# --- train, evaluate, export, import ---

def train(given: argparse.Namespace) -> int:
    from model import checkpoint
    from model.config import PRESETS
    from training.datasets import load
    from training.loop import Run, TrainConfig
    from training.loop import train as train_run

    settings = TrainConfig(**{field.name: getattr(given, field.name) for field in dataclasses.fields(TrainConfig)})
    config = dataclasses.replace(PRESETS[given.preset], attention=given.attention, twin_of=given.twin_of)
    out = Path(given.out)
    state = out.with_name(out.name + ".training") / "state.pt"
    if not given.resume and (state.exists() or out.exists()):
        raise ValueError(f"{out} holds a run or a checkpoint already; continue it with --resume, "
                         "or give another --out")
    data = load(Path(given.data), "train", config)
    run = Run(config, settings)
    if given.resume and state.exists():
        run.resume(state)
    elif given.init:
        run.start_from(checkpoint.load(checkpoint.find(given.init, given.checkpoints)))
    complete = train_run(run, data, out, command=given.command_line, max_minutes=given.max_minutes,
                         max_images=given.max_images, save_minutes=given.save_minutes,
                         evaluate_minutes=given.evaluate_minutes)
    rest = "the schedule is complete" if complete else "continue with --resume"
    print(f"{run.images:,} images in {run.minutes:.1f} minutes, written to {out}; {rest}", file=sys.stderr)
    return 0


def evaluate(given: argparse.Namespace) -> None:
    from model import checkpoint
    from model.generate import generate
    from training.datasets import load
    from training.evaluate import evaluate as evaluate_net
    from training.export import grid

    if given.grid:
        _check_output(given.grid)
    found = checkpoint.read(checkpoint.find(given.model, given.checkpoints))
    data = load(Path(given.data), "test", found.net.config)
    measured = evaluate_net(found.net, data.images[:given.limit], progress=sys.stderr.isatty())
    text = (f"{measured.bits_per_dim:.4f} bits/dim +- {measured.interval:.4f} (95 %), {measured.images:,} test images "
            f"in {measured.seconds:.0f} s")
    if given.grid:
        classes = found.net.config.classes
        labels = [index % 10 % classes if classes else None for index in range(50)]
        grid(generate(found.net, list(range(50)), labels=labels).numpy(), found.net.config, Path(given.grid))
        text += f"; samples in {given.grid}"
    _report(given, {"model": found.name, "checkpoint": found.digest, **dataclasses.asdict(measured)}, text)


def export(given: argparse.Namespace) -> None:
    from training.datasets import load
    from training.export import export as export_run

    exported = export_run(Path(given.run_folder), Path(given.out),
                          lambda config: load(Path(given.data), "test", config),
                          fp32=given.fp32, progress=sys.stderr.isatty())
    bits = ", ".join(f"{name} {value:.4f}" for name, value in exported["bits_per_dim"].items())
    print(f"written to {given.out}; bits/dim: {bits}", file=sys.stderr)


def import_(given: argparse.Namespace) -> None:
    from model import checkpoint
    from model.importer import import_reference
    from training.datasets import load
    from training.export import card, first_marginal, provenance

    out = Path(given.out)
    if out.exists():
        raise ValueError(f"--out {out} exists already; give a new folder")
    data = Path(given.data) if given.data else None
    net, facts = import_reference(Path(given.reference), given.heads, given.attention,
                                  data and (lambda config: first_marginal(load(data, "train", config))))
    source = provenance("unknown", (), command=given.command_line, **facts)
    checkpoint.save(out, net, source, card(out.name, net.config, source))
    print(f"written to {out}", file=sys.stderr)


def doctor(given: argparse.Namespace) -> None:
    import platform

    import torch

    facts = {"engine": "eager", "why": "this build has no compiled kernels", "device": "cpu",
             "instruction_set": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads(),
             "bf16_matrix_products": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
             "python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform()}
    _report(given, facts, "\n".join(f"{name.replace('_', ' '):21} {value}" for name, value in facts.items()))


def _report(given: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    """One JSON object with --json, else text for people."""
    print(json.dumps(result, allow_nan=False) if given.json else text)


# --- flags ---

def _number(kind: type, least: float, most: float = math.inf) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            bounds = f"at least {least:g}" if math.isinf(most) else f"{least:g}..{most:g}"
            raise argparse.ArgumentTypeError(f"must be {'an integer' if kind is int else 'a number'}, {bounds}; "
                                             f"got {text!r}")
        return value

    return parse


def _integers(text: str) -> list[int]:
    return [_number(int, 1, 4096)(part) for part in text.split(",")]


def _parser(wanted: list[str]) -> argparse.ArgumentParser:
    """wanted: the command, if any; flags that live in a room's settings are read from it only then."""
    parser = argparse.ArgumentParser(prog="linpix", description="Linear transformers that draw images: train, serve, "
                                                                "sample, complete, compare.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int | None], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".",
                                  formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        sub.set_defaults(run=run)
        return sub

    serving = command("serve", serve, "serve models over HTTP")
    if wanted == ["serve"]:
        _serve_flags(serving)
    drawing = command("sample", sample, "draw images without a server")
    _drawing_flags(drawing)
    completing = command("complete", complete, "fill in the holes of a picture")
    completing.add_argument("image", help="PNG, JPEG or WebP; transparent pixels are filled in")
    _drawing_flags(completing)
    completing.add_argument("--mask", help="picture whose transparent pixels are filled in")
    completing.add_argument("--keep-rows", type=_number(int, 0), help="image rows to keep; those below are filled in")

    comparing = command("compare", compare, "measure attention backends side by side")
    _model_flags(comparing)
    comparing.add_argument("--backends", help="comma-separated; default: all")
    comparing.add_argument("--all", action="store_true", help="all backends")
    comparing.add_argument("--batch", type=_integers, default=[1, 16, 64], help="comma-separated batch sizes")
    comparing.add_argument("--budget", type=_number(float, 1), default=60.0, help="seconds to measure in")
    comparing.add_argument("--out", help="folder for report.json, report.md and report.svg")

    teaching = command("train", train, "train a preset; --out becomes a checkpoint folder")
    if wanted == ["train"]:
        _train_flags(teaching)

    evaluating = command("evaluate", evaluate, "bits/dim of a model on the test images")
    _model_flags(evaluating, positional=True)
    evaluating.add_argument("--data", required=True, help="folder of the data set; fetched if it is empty")
    evaluating.add_argument("--limit", type=_number(int, 1), help="only the first N test images")
    evaluating.add_argument("--grid", help="write a grid of samples to this .png file")

    exporting = command("export", export, "evaluate a run on all test images and write it as a checkpoint to ship")
    exporting.add_argument("run_folder", help="what linpix train wrote")
    exporting.add_argument("--data", required=True, help="folder of the data set")
    exporting.add_argument("--out", required=True, help="checkpoint folder to write")
    exporting.add_argument("--fp32", action="store_true", help="keep float32 weights; bf16 otherwise")

    importing = command("import", import_, "turn a checkpoint of the published reference into ours")
    importing.add_argument("reference", help="its .pth file")
    importing.add_argument("--heads", type=_number(int, 1), required=True, help="attention heads; the file has no word")
    importing.add_argument("--attention", choices=("linear", "softmax"), default="linear", help="as it was trained")
    importing.add_argument("--data", help="training data, for the distribution of sub-pixel 0")
    importing.add_argument("--out", required=True, help="checkpoint folder to write")

    examining = command("doctor", doctor, "which kernels run here, and why")
    examining.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _serve_flags(parser: argparse.ArgumentParser) -> None:
    from server.settings import Settings

    for name, field in Settings.model_fields.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=name.upper(),
                            help=f"{field.description} (default: {field.default}; LINPIX_{name.upper()})")
    parser.formatter_class = argparse.HelpFormatter  # the defaults are in the text: None means the variable decides


def _model_flags(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    if positional:
        parser.add_argument("model", help="a name under --checkpoints, or a folder")
    else:
        parser.add_argument("--model", required=True, help="a name under --checkpoints, or a folder")
    parser.add_argument("--checkpoints", type=Path, default=os.environ.get("LINPIX_CHECKPOINTS"),
                        help="folder of checkpoints; default: that of the checkout")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _drawing_flags(parser: argparse.ArgumentParser) -> None:
    _model_flags(parser)
    parser.add_argument("--count", type=_number(int, 1, 1_000_000), default=1, help="images to make")
    parser.add_argument("--batch", type=_number(int, 1, 4096), default=64, help="images at a time, at most")
    parser.add_argument("--seed", type=_number(int, 0, 2**53 - 1), help="image i uses seed + i; drawn if absent")
    parser.add_argument("--temperature", type=_number(float, 0, 10), default=1.0, help="1 as trained, lower is tidier")
    parser.add_argument("--label", help="class, by index or name")
    parser.add_argument("--engine", choices=("auto", "eager", "compiled"), default="auto", help="what decodes")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto", help="of the matrix products")
    parser.add_argument("--out", required=True, help="folder for one PNG per image, or a .png name for a grid")


def _train_flags(parser: argparse.ArgumentParser) -> None:
    from model.config import PRESETS, Attention
    from training.loop import TrainConfig

    parser.add_argument("preset", choices=sorted(PRESETS), help="architecture")
    parser.add_argument("--data", required=True, help="folder of the data set; fetched if it is empty")
    parser.add_argument("--out", required=True, help="checkpoint folder; FOLDER.training holds log and resume state")
    parser.add_argument("--attention", choices=get_args(Attention), default="linear", help="attention kind")
    parser.add_argument("--twin-of", default="", help="name of the model that this one is trained to be compared with")
    parser.add_argument("--init", help="begin with the weights of this model")
    parser.add_argument("--checkpoints", type=Path, help="folder of checkpoints; default: that of the checkout")
    parser.add_argument("--resume", action="store_true", help="continue the run of --out, if there is one")
    parser.add_argument("--max-minutes", type=_number(float, 0), default=math.inf, help="of this sitting")
    parser.add_argument("--max-images", type=_number(int, 1), default=math.inf, help="of this sitting")
    parser.add_argument("--save-minutes", type=_number(float, 0.01), default=2.0, help="between saves")
    parser.add_argument("--evaluate-minutes", type=_number(float, 0.01), default=10.0, help="between evaluations")
    for field in dataclasses.fields(TrainConfig):
        kind: dict[str, Any] = {"type": type(field.default)}
        if isinstance(field.default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        elif isinstance(field.default, tuple):
            kind = {"type": float, "nargs": 2}
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, help=field.metadata["help"],
                            **kind)


if __name__ == "__main__":
    sys.exit(main())
