"""The commands about training: train, evaluate, export, import, experiment. Each takes the parsed
flags.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
from pathlib import Path

import torch

from linpix.model.attention import kind_of
from linpix.model.checkpoint import Checkpoint, board_of, describe, digest_of, named, read, save
from linpix.model.choice import choose
from linpix.model.config import PRESETS, ModelConfig
from linpix.model.folders import find
from linpix.model.importer import import_reference
from linpix.model.packing import PRECISIONS, Packed, pack
from linpix.model.provenance import CheckpointError, config_of

from .batches import Batches
from .calibrate import MAX_IMAGES, MIN_IMAGES
from .datasets import Dataset, check_classes, load
from .evaluate import evaluate as evaluate_net
from .evaluate import evaluate_classes
from .experiments import conduct, study
from .export import DRAWN, card, drawing_rows, first_marginal, provenance, sample_grid, with_rows
from .export import export as export_run
from .files import locked, put, undamaged, writing
from .loop import held_out
from .loop import train as train_run
from .own.automatic import COLOUR, GREY, PALETTE, plan
from .own.inherit import negative
from .own.judge import agreement, trained
from .own.palette import COLOURS, of_pictures
from .readers import Split
from .run import Run, TrainConfig
from .workers import Workers, count_for, launched, shared

# flags of evaluate --write, fields of config.json
DRAWING = ("temperature", "temperature_range", "attempts", "limits")
SHORT_WARMUP = 1_000  # images, for --preset auto, whose runs are short
GROWTH_IMAGES = 64  # images on which new layers are fitted


def _choose_device(given: argparse.Namespace) -> None:
    """Make the CUDA GPU the default device, if --device is cuda, or is auto and there is a GPU."""
    if given.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: torch finds no CUDA GPU; leave the flag out, or install a CUDA build of"
            " torch"
        )
    if given.device != "cpu" and torch.cuda.is_available():
        torch.set_default_device("cuda")


def _choose_preset(given: argparse.Namespace, out: Path, *, first: bool = True) -> None:
    """Set given.preset and given.data from PRESET --data DIR or --preset PRESET|auto DIR, and the
    plan of auto.

    first: whether this process plans; other processes read its plan.
    """
    if given.chosen is not None:
        if given.data is not None and given.preset is not None:
            raise ValueError(
                "with --preset, the other argument is the folder of pictures; leave out --data"
            )
        given.preset, given.data = given.chosen, given.data or given.preset
    if given.preset is None or given.data is None:
        raise ValueError(
            "give an architecture and a folder: linpix train mnist-small --data DIR --out FOLDER,"
            " or linpix train --preset auto DIR --out FOLDER"
        )
    if given.preset not in (*PRESETS, "auto"):
        raise ValueError(
            f"there is no preset {given.preset!r}; choose one of auto, {', '.join(sorted(PRESETS))}"
        )
    if given.preset != "auto":
        return
    beside = out.with_name(out.name + ".training")
    if first and not (given.resume and (beside / "plan.json").exists()):
        plain = (
            given.attention != "linear"
            or given.feature_map != "elu+1"
            or given.reversible
            or given.unconditional is not None
        )
        chosen = plan(Path(given.data), beside / "pictures", plain=plain, colours=given.colours)
        if given.minutes is not None:
            chosen = dataclasses.replace(chosen, minutes=given.minutes)
        names = ("preset", "minutes", "colours")
        facts = {name: getattr(chosen, name) for name in names}
        put(beside / "plan.json", json.dumps(facts).encode())
        print(chosen, file=sys.stderr, flush=True)
    with undamaged(beside / "plan.json", "delete it, and it is made again"):
        kept = json.loads((beside / "plan.json").read_text())
        packed, minutes = PRESETS[kept["preset"]].packed, float(kept["minutes"])
    given.preset, given.data = kept["preset"], str(beside / "pictures")
    given.minutes = minutes if given.minutes is None else given.minutes
    if given.compile is None and packed:
        given.compile = False  # the lengths of its sequences vary
    given.colours = kept.get("colours", given.colours)
    if given.preset not in (GREY, COLOUR, PALETTE) or (beside / "state.pt").exists():
        return
    given.warmup_images = SHORT_WARMUP if given.warmup_images is None else given.warmup_images
    if given.preset == PALETTE:  # no other model knows these colours
        return
    with contextlib.suppress(CheckpointError):
        layers = config_of(find(given.preset, given.checkpoints)).layers
        # digits are a better start than noise
        if given.init is None and (given.layers or layers) >= layers:
            given.init = given.preset
        if given.init == given.preset and given.layers is None:
            given.layers = layers


def train(given: argparse.Namespace) -> None:
    with launched(given.device) as workers:
        _train(given, workers)


def _train(given: argparse.Namespace, workers: Workers | None) -> None:
    """workers: those of torchrun, if it has started this process, else None."""
    _choose_device(given)
    out = Path(given.out)
    side = out.with_name(out.name + ".training")
    lock: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if workers is None or workers.rank == 0:
        cure = (
            "wait until it ends or stop it, then continue it with --resume, or give another --out"
        )
        lock = locked(side, out, cure)
    with lock:
        _run(given, workers, out, side / "state.pt")


def _run(given: argparse.Namespace, workers: Workers | None, out: Path, state: Path) -> None:
    if state.exists() and not given.resume:
        raise ValueError(
            f"{out} already has a run; continue it with --resume, or give another --out"
        )
    # a link to nowhere would be noticed by the first save
    if os.path.lexists(out) and not state.exists():
        raise ValueError(
            f"{out} exists, but {state}, which --resume needs, does not; give another --out, and"
            " start with these weights by --init"
        )
    if given.resume and not state.exists():
        raise ValueError(
            f"--resume: {state} does not exist, so there is no run to continue; check --out, or"
            " leave out --resume to begin one"
        )
    source, saved = out, state if state.exists() else None
    if saved is None and given.fall_from is not None:
        source, saved = Path(given.fall_from), _trunk(given)
    with contextlib.nullcontext() if workers is None else workers.in_turn():
        _choose_preset(given, out, first=workers is None or workers.rank == 0)
    preset, options = PRESETS[given.preset], kind_of(given.attention).options
    if given.colours and not preset.palette:
        raise ValueError(
            f"--colours {given.colours}: {given.preset} has no palette; leave it out, or give the"
            " preset palette or auto"
        )
    for name in ("feature_map", "lsh_rounds"):
        if getattr(given, name) != getattr(preset, name) and name not in options:
            raise ValueError(
                f"--{name.replace('_', '-')} is not an option of {given.attention} attention; leave"
                " it out"
            )
    with contextlib.nullcontext() if workers is None else workers.in_turn():
        if preset.palette:
            preset = of_pictures(Path(given.data), preset, given.colours or COLOURS)
        data = _data(given.data, "train", preset)
    head = given.head or preset.head
    if given.init and given.head is None and preset.channels == 1 and not state.exists():
        head = config_of(find(given.init, given.checkpoints)).head
    config = dataclasses.replace(
        preset,
        attention=given.attention,
        twin_of=given.twin_of,
        feature_map=given.feature_map,
        lsh_rounds=given.lsh_rounds,
        layers=given.layers or preset.layers,
        head=head,
        classes=len(data.classes),
        look_ups=tuple(name for name in preset.look_ups if data.classes or name != "class"),
    )
    light = not preset.palette and bool(
        data.images.mean() > 127.5
    )  # dark ink on paper; digits are light on dark
    if light:
        config = negative(config)
    if given.reversible:
        config = dataclasses.replace(config, residual="reversible", norm="pre")
    if config.class_first and given.unconditional is not None:
        raise ValueError(
            f"--unconditional is not an option of {given.preset}, which draws the class of every"
            " image first; leave it out"
        )
    if given.readings and not config.class_first:
        raise ValueError(
            f"--readings {given.readings}: this model predicts no classes from known pixels; leave"
            " it out, or train mnist-conditional on pictures with classes"
        )
    changes = {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(TrainConfig)
        if getattr(given, field.name) is not None
    }
    if config.head == "categorical" and saved is None:
        changes.setdefault("head_share", 1.0)  # a smaller rate is for means, which oscillate
    if "betas" in changes:
        changes["betas"] = tuple(changes["betas"])
    if saved is not None:
        if (source / "config.json").exists() and len(data.classes) == (
            had := read(source)
        ).net.config.classes:
            check_classes(data, had.class_names, had.name)
        run = Run.resumed(saved, config, changes, layers=given.layers, head=given.head)
        if saved != state:
            _fall(run, given)
    else:
        run = Run(config, TrainConfig(**changes))
        if given.init:
            other = named(given.init, given.checkpoints)
            examples = Batches(
                data, TrainConfig(batch=GROWTH_IMAGES, seed=run.config.seed), config
            )[0]
            ground = other.net.config.background
            invert = (
                light and other.provenance.get("data") == "mnist"
                if None in (ground, config.background)
                else ground != config.background
            )
            run.start_from(other, examples, invert=invert)
    batch, accumulate, processes = run.config.batch, run.config.accumulate, 1
    if workers is None:
        processes = count_for(batch, given.processes, run.net.device.type, accumulate)
    else:
        shared(batch, accumulate, workers, given.processes)
        workers.check_alike(
            settings=dataclasses.asdict(run.config),
            step=run.step,
            weights=run.fingerprint,
            data=(data.images.shape, int(data.images.sum()), int(data.labels.sum())),
        )
    complete = train_run(
        run,
        data,
        out,
        command=given.command_line,
        max_minutes=given.max_minutes,
        max_images=given.max_images,
        save_minutes=given.save_minutes,
        evaluate_minutes=given.evaluate_minutes,
        processes=processes,
        launched=workers,
    )
    if workers is not None and workers.rank:
        return
    rest = "the schedule is complete" if complete else "continue with --resume"
    if Path(given.data) == out.with_name(out.name + ".training") / "pictures":  # of --preset auto
        rest += f"; linpix evaluate {out} --data {given.data} measures it"
    print(
        f"{run.images:,} images in {run.minutes:.1f} minutes, written to {out}; {rest}",
        file=sys.stderr,
    )


def _trunk(given: argparse.Namespace) -> Path:
    """The state of the run that --fall-from names."""
    for name in ("init", "images", "minutes", "warmup_images"):
        if getattr(given, name) is not None:
            raise ValueError(
                f"--fall-from and --{name.replace('_', '-')} do not go together: the run begins as"
                " a copy, and --max-images says for how many images its learning rate falls"
            )
    folder = Path(given.fall_from)
    state = folder.with_name(folder.name + ".training") / "state.pt"
    if not state.exists():
        raise ValueError(
            f"--fall-from {folder}: {state} does not exist; give the --out of a run that has saved"
            " its state"
        )
    return state


def _fall(run: Run, given: argparse.Namespace) -> None:
    """Let the learning rate of a copied run fall within --max-images, or the last fifth of all."""
    images = run.images // 4
    if not math.isinf(given.max_images):
        images = given.max_images
    print(
        f"a copy of {given.fall_from} at {run.images:,} images, whose learning rate falls within"
        f" {images:,} more",
        file=sys.stderr,
    )
    run.fall(images)


def _data(folder: str, split: Split, config: ModelConfig) -> Dataset:
    """The images in a folder, which must exist: a misspelt folder is not created and filled by a
    download.
    """
    if not Path(folder).exists():
        raise ValueError(
            f"--data {folder} does not exist; check the path, or create an empty folder, and MNIST"
            " or CIFAR-10 will be downloaded into it"
        )
    return load(Path(folder), split, config)


def evaluate(given: argparse.Namespace) -> None:
    if not given.classes and (
        given.write or any(getattr(given, name) is not None for name in DRAWING)
    ):
        raise ValueError(
            "--write, --temperature, --temperature-range, --attempts and --limits need --classes,"
            " which measures the share that is written with them"
        )
    if given.engine == "eager":
        _choose_device(given)
    elif given.device == "cuda":
        raise ValueError(
            f"--engine {given.engine} evaluates on the CPU; leave out --device cuda, or use"
            " --engine eager"
        )
    if given.grid and not Path(given.grid).parent.is_dir():
        raise ValueError(f"--grid {given.grid}: its folder does not exist; create it first")
    found = named(given.model, given.checkpoints)
    data = _data(given.data, "test", found.net.config)
    known = found.net.config.classes
    if given.labels and not (known and len(data.classes) == known):
        raise ValueError(
            f"--labels all: {found.name} has {known} classes, but the test images have "
            f"{len(data.classes)}; leave it out, or give the data that the model was trained on"
        )
    if given.labels or given.classes:
        check_classes(data, found.class_names, found.name)
    chosen = choose(found.net.config, "auto" if given.classes else given.engine, given.precision)
    packed = pack(found.net, PRECISIONS[chosen.precision]) if chosen.engine == "compiled" else None
    if given.classes:
        _class_agreement(given, found, data, packed)
        return
    images, progress = data.images[: given.limit], sys.stderr.isatty()
    right = None
    if given.labels:
        measured, right = evaluate_classes(
            found.net, images, data.labels[: given.limit], packed=packed, progress=progress
        )
    else:
        measured = evaluate_net(found.net, images, packed=packed, progress=progress)
    text = (
        f"{measured.bits_per_dim:.4f} bits/dim +- {measured.interval:.4f} (95 %),"
        f" {measured.images:,} test images in {measured.seconds:.0f} s"
    )
    if right:
        text += (
            f"; the most probable class is right for {right.accuracy:.4f} +- {right.interval:.4f}"
            " of them"
        )
    if given.grid:
        Path(given.grid).write_bytes(sample_grid(found.net, 100))
        text += f"; samples in {given.grid}"
    result = {
        "model": found.name,
        "checkpoint": found.digest,
        "engine": chosen.engine,
        "precision": chosen.precision,
        **dataclasses.asdict(measured),
        **({"labels": dataclasses.asdict(right)} if right else {}),
    }
    print(json.dumps(result) if given.json else text)


def _class_agreement(
    given: argparse.Namespace, found: Checkpoint, test: Dataset, packed: Packed | None
) -> None:
    """Measure class agreement; with --write, add it and the facts about drawing to the
    checkpoint.
    """
    config = found.net.config
    if not (
        config.classes and len(test.classes) == config.classes and found.net.attention.steps_as
    ):
        raise ValueError(
            "--classes needs a model with classes, and test images of the same classes:"
            f" {found.name} has {config.classes}, and the test images have {len(test.classes)}"
        )
    facts = {name: found.provenance[name] for name in DRAWING if name in found.provenance}
    facts = DRAWN.get(found.provenance.get("data", ""), {}) | facts
    facts |= {name: value for name in DRAWING if (value := getattr(given, name)) is not None}
    if facts.get("attempts", 1) > 1 and not config.class_first:
        raise ValueError(
            f"--attempts {facts['attempts']}: {found.name} cannot recognise classes; leave it out"
        )
    print(
        "a CNN learns the classes, unless an earlier one is kept; then images are drawn",
        file=sys.stderr,
        flush=True,
    )
    judge = trained(load(Path(given.data), "train", config), config)
    measured = agreement(
        found.net,
        judge,
        test,
        count=given.classes,
        packed=packed,
        temperature=facts.get("temperature", found.temperature),
        attempts=facts.get("attempts", 1),
    )
    text = (
        f"{measured.class_agreement:.3f} +- {measured.interval:.3f} (95 %) of {measured.drawn:,}"
        f" drawn images are of the class asked for ({measured.worst_class:.3f} of the worst class),"
        f" to a CNN that is right for {measured.judge:.3f} of {len(test.images):,} test images. It"
        f" is sure of {measured.sure:.3f} of the drawn images, and of {measured.judge_sure:.3f} of"
        f" the test images. An image took {measured.attempts:g} attempts on average"
    )
    if (look := measured.look) is not None and (real := measured.real_look) is not None:
        text += (
            f". In an image (in test images): {look.greys} ({real.greys}) different greys,"
            f" {look.full_ink} ({real.full_ink}) pixels of full ink; more than one piece in"
            f" {look.pieces:.3f} ({real.pieces:.3f}), specks in {look.specks:.3f}"
            f" ({real.specks:.3f})"
        )
    if given.write:
        facts |= (
            {"temperature_range": list(facts["temperature_range"])}
            if "temperature_range" in facts
            else {}
        )
        facts["class_agreement"] = measured.class_agreement
        if measured.look is not None:
            facts |= {name: dataclasses.asdict(measured)[name] for name in ("look", "real_look")}
        describe(
            found.folder,
            facts,
            lambda card: with_rows(card, drawing_rows(found.provenance | facts)),
        )
        text += f"; written to {found.folder}"
    result = {
        "model": found.name,
        "checkpoint": digest_of(found.folder),
        **dataclasses.asdict(measured),
    }
    print(json.dumps(result) if given.json else text)


def export(given: argparse.Namespace) -> None:
    unseen = _unseen(given) if given.calibrate else None
    with writing(Path(given.out)):
        exported = export_run(
            Path(given.run_folder),
            Path(given.out),
            lambda config: _data(given.data, "test", config),
            unseen=unseen,
            fp32=given.fp32,
            twin_of=given.twin_of,
            progress=sys.stderr.isatty(),
        )
    bits = ", ".join(f"{name} {value:.4f}" for name, value in exported["bits_per_dim"].items())
    print(f"written to {given.out}; bits/dim: {bits}", file=sys.stderr)


def _unseen(given: argparse.Namespace) -> Dataset:
    """Images that a run held out for validation, at most MAX_IMAGES. Raises ValueError if there are
    too few.
    """
    run = read(Path(given.run_folder))
    data, trained_on = _data(given.data, "train", run.net.config), run.provenance.get("data")
    if data.name != trained_on:
        raise ValueError(
            f"--calibrate needs the data that {run.name} was trained on, {trained_on}, to know what"
            f" it has not seen, but --data holds {data.name}"
        )
    count = held_out(run.provenance.get("settings", {}).get("validation", 0), data)
    if count < MIN_IMAGES:
        raise ValueError(
            f"--calibrate needs at least {MIN_IMAGES} pictures that {run.name} was not trained on,"
            f" but --validation held out {count}; leave out --calibrate"
        )
    last = slice(-count, len(data.images) - count + min(count, MAX_IMAGES))
    return dataclasses.replace(data, images=data.images[last], labels=data.labels[last])


def import_(given: argparse.Namespace) -> None:
    out = Path(given.out)
    if out.exists():
        raise ValueError(f"--out {out} exists already; give a new folder")

    def marginal(config: ModelConfig) -> list[float]:
        return first_marginal(load(Path(given.data), "train", config))

    net, facts = import_reference(
        Path(given.reference), given.heads, given.attention, marginal if given.data else None
    )
    source = provenance("unknown", (), command=given.command_line, board=board_of(net), **facts)
    save(out, net, source, card(out.name, net.config, source))
    print(
        "; ".join([f"written to {out}", *([facts["history"]] if "history" in facts else [])]),
        file=sys.stderr,
    )


def experiment(given: argparse.Namespace) -> None:
    _choose_device(given)
    kind, folder = study(given.experiment).settings_type, Path(given.out)
    asked = {field.name: getattr(given, field.name) for field in dataclasses.fields(kind)}
    settings = kind(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in asked.items()
            if value is not None
        }
    )
    cure = "wait until it ends, or give another --out"
    with locked(folder.with_name(folder.name + ".training"), folder, cure):
        complete = conduct(
            given.experiment,
            settings,
            folder,
            command=given.command_line,
            max_minutes=given.max_minutes,
        )
    rest = "the experiment is complete" if complete else "the same command continues it"
    print(f"written to {folder}; {rest}", file=sys.stderr)
