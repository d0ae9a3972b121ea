"""The commands about training: train, evaluate, export, import, experiment. Each takes the parsed
flags.
"""

import contextlib
import json
import math
import os
import sys
from argparse import Namespace
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from linpix.model.checkpoint import Checkpoint, board_of, describe, digest_of, named, read, save
from linpix.model.choice import choose
from linpix.model.config import PRESETS, ModelConfig
from linpix.model.folders import find
from linpix.model.importer import import_reference
from linpix.model.packing import PRECISIONS, Packed, pack
from linpix.model.provenance import CheckpointError, config_of

from . import automatic
from .batches import Batches
from .calibrate import MAX_IMAGES, MIN_IMAGES
from .class_agreement import agreement, trained
from .datasets import Dataset, check_classes, load, load_existing
from .evaluate import evaluate as evaluate_net
from .evaluate import evaluate_classes
from .experiments import conduct, study
from .export import DRAWN, card, drawing_rows, first_marginal, provenance, sample_grid, with_rows
from .export import export as export_run
from .files import locked, put, undamaged, writing
from .loop import held_out
from .loop import train as train_run
from .palette import COLOURS, at_size, of_pictures
from .plan import check_options, file_of, filled_in, is_plain, preset_and_data, refuse, settings_of
from .run import Run, TrainConfig
from .workers import Workers, count_for, launched, shared

# flags of evaluate --write, fields of config.json
DRAWING = ("temperature", "temperature_range", "attempts", "recognised", "limits")
GROWTH_IMAGES = 64  # images on which new layers are fitted


def _choose_device(given: Namespace) -> None:
    """Make the CUDA GPU the default device, if --device is cuda, or is auto and there is a GPU."""
    if given.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: torch finds no CUDA GPU; leave the flag out, or install a CUDA build of"
            " torch"
        )
    if given.device != "cpu" and torch.cuda.is_available():
        torch.set_default_device("cuda")


def _chosen(given: Namespace, side: Path, *, first: bool) -> Namespace:
    """The flags with preset and data, after the pictures were looked at for --preset auto.

    first: whether this process looks; other processes read what it has chosen.
    """
    preset, data = preset_and_data(given)
    given = Namespace(**vars(given) | {"preset": preset, "data": data})
    if preset != "auto":
        return given
    kept, pictures = side / "plan.json", side / "pictures"
    if first and not (given.resume and kept.exists()):
        choice = automatic.choose(
            Path(data),
            pictures,
            plain=is_plain(given),
            colours=given.colours,
            size=given.size,
        )
        if given.minutes is not None:
            choice = replace(choice, minutes=given.minutes)
        facts = {name: getattr(choice, name) for name in ("preset", "minutes", "colours", "size")}
        put(kept, json.dumps(facts).encode())
        print(choice, file=sys.stderr, flush=True)
    with undamaged(kept, "delete it, and it is made again"):
        chosen, shipped = json.loads(kept.read_text()), None
        # no other model knows the colours of a palette
        if not given.resume and chosen["preset"] in (automatic.GREY, automatic.COLOUR):
            with contextlib.suppress(CheckpointError):
                folder = find(chosen["preset"], given.checkpoints)
                shipped = config_of(folder)
        given.data = str(pictures)
        return filled_in(given, chosen, shipped)


def train(given: Namespace) -> None:
    with launched(given.device) as workers:
        _choose_device(given)
        out = Path(given.out)
        side = out.with_name(out.name + ".training")
        cure = (
            "wait until it ends or stop it, then continue it with --resume, or give another --out"
        )
        lock = contextlib.nullcontext() if workers.rank else locked(side, out, cure)
        with lock:
            _train(given, workers, out, side)


def _train(given: Namespace, workers: Workers, out: Path, side: Path) -> None:
    """side: the folder with the state to resume from."""
    state = side / "state.pt"
    refuse(
        (
            state.exists() and not given.resume,
            f"{out} already has a run; continue it with --resume, or give another --out",
        ),
        (
            # a link to nowhere would be noticed by the first save
            os.path.lexists(out) and not state.exists(),
            f"{out} exists, but {state}, which --resume needs, does not; give another --out, and"
            " start with these weights by --init",
        ),
        (
            given.resume and not state.exists(),
            f"--resume: {state} does not exist, so there is no run to continue; check --out, or"
            " leave out --resume to begin one",
        ),
    )
    trunk = None if given.resume or given.fall_from is None else _trunk(given)
    with workers.in_turn():
        given = _chosen(given, side, first=not workers.rank)
    preset = PRESETS[given.preset]
    check_options(given, preset)
    if given.size:
        preset = at_size(preset, *given.size)
    with workers.in_turn():
        if preset.palette:
            preset = of_pictures(Path(given.data), preset, given.colours or COLOURS, given.size)
        data = load_existing(given.data, "train", preset)
    if given.resume:
        run = _resumed(given, preset, data, state, out)
    elif trunk is not None:
        run = _resumed(given, preset, data, trunk, Path(given.fall_from))
        _fall(run, given)
    else:
        run = _new(given, preset, data)
    batch, accumulate, processes = run.config.batch, run.config.accumulate, 1
    if workers.launched:
        shared(batch, accumulate, workers, given.processes)
        workers.check_alike(
            settings=asdict(run.config),
            step=run.step,
            weights=run.fingerprint,
            data=(data.images.shape, int(data.images.sum()), int(data.labels.sum())),
        )
    else:
        processes = count_for(batch, given.processes, run.net.device.type, accumulate)
    if not workers.rank and not given.resume:
        put(side / "run.toml", file_of(given).encode())
    complete = train_run(
        run,
        data,
        out,
        command=given.command_line,
        processes=processes,
        workers=workers,
        max_minutes=given.max_minutes,
        max_images=given.max_images,
        save_minutes=given.save_minutes,
        evaluate_minutes=given.evaluate_minutes,
    )
    if workers.rank:
        return
    rest = "the schedule is complete" if complete else "continue with --resume"
    if Path(given.data) == side / "pictures":  # of --preset auto
        rest += f"; linpix evaluate {out} --data {given.data} measures it"
    print(
        f"{run.images:,} images in {run.minutes:.1f} minutes, written to {out}; {rest}",
        file=sys.stderr,
    )


def _new(given: Namespace, preset: ModelConfig, data: Dataset) -> Run:
    start = None
    if given.init:
        start = named(given.init, given.checkpoints)
    plan = settings_of(given, preset, data, start)
    run = Run(plan.model, TrainConfig(**plan.changes))
    if start is not None:
        examples = TrainConfig(batch=GROWTH_IMAGES, seed=run.config.seed)
        run.start_from(start, Batches(data, examples, plan.model)[0], invert=plan.invert)
    return run


def _resumed(
    given: Namespace, preset: ModelConfig, data: Dataset, state: Path, folder: Path
) -> Run:
    """folder: with the checkpoint of the run that is continued or copied, if it has one."""
    plan = settings_of(given, preset, data, None)
    if (folder / "config.json").exists():
        had = read(folder)
        if len(data.classes) == had.net.config.classes:
            check_classes(data, had.class_names, had.name)
    return Run.resumed(state, plan.model, plan.changes, layers=given.layers, head=given.head)


def _trunk(given: Namespace) -> Path:
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


def _fall(run: Run, given: Namespace) -> None:
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


def evaluate(given: Namespace) -> None:
    facts, text = measured(given)
    print(json.dumps(facts) if given.json else text)


def measured(given: Namespace) -> tuple[dict[str, Any], str]:
    """What evaluate measures, as facts and as text. Raises ValueError."""
    refuse(
        (
            not given.classes
            and (given.write or any(getattr(given, name) is not None for name in DRAWING)),
            "--write, --temperature, --temperature-range, --attempts, --recognised and --limits"
            " need --classes, which measures the share that is written with them",
        ),
        (
            given.engine != "eager" and given.device == "cuda",
            f"--engine {given.engine} evaluates on the CPU; leave out --device cuda, or use"
            " --engine eager",
        ),
        (
            given.grid and not Path(given.grid).parent.is_dir(),
            f"--grid {given.grid}: its folder does not exist; create it first",
        ),
    )
    if given.engine == "eager":
        _choose_device(given)
    found = named(given.model, given.checkpoints)
    data = load_existing(given.data, "test", found.net.config)
    known = found.net.config.classes
    refuse(
        (
            given.labels and not (known and len(data.classes) == known),
            f"--labels all: {found.name} has {known} classes, but the test images have "
            f"{len(data.classes)}; leave it out, or give the data that the model was trained on",
        )
    )
    if given.labels or given.classes:
        check_classes(data, found.class_names, found.name)
    engine = "auto" if given.classes else given.engine
    chosen, packed = choose(found.net.config, engine, given.precision), None
    if chosen.engine == "compiled":
        packed = pack(found.net, PRECISIONS[chosen.precision])
    if given.classes:
        facts, text = _class_agreement(given, found, data, packed)
    else:
        facts, text = _bits(given, found, data, packed)
        facts = {"engine": chosen.engine, "precision": chosen.precision, **facts}
    return {"model": found.name, "checkpoint": digest_of(found.folder), **facts}, text


def _bits(
    given: Namespace, found: Checkpoint, test: Dataset, packed: Packed | None
) -> tuple[dict[str, Any], str]:
    """Measure bits/dim, and with --labels how often the most probable class is right; as facts and
    as text.
    """
    test, progress, right = test.part(slice(given.limit)), sys.stderr.isatty(), None
    if given.labels:
        measured, right = evaluate_classes(
            found.net, test.images, test.labels, packed=packed, progress=progress
        )
    else:
        measured = evaluate_net(found.net, test.images, packed=packed, progress=progress)
    facts = asdict(measured)
    text = (
        f"{measured.bits_per_dim:.4f} bits/dim +- {measured.interval:.4f} (95 %),"
        f" {measured.images:,} test images in {measured.seconds:.0f} s"
    )
    if right is not None:
        facts["labels"] = asdict(right)
        text += (
            f"; the most probable class is right for {right.accuracy:.4f} +- {right.interval:.4f}"
            " of them"
        )
    if given.grid:
        Path(given.grid).write_bytes(sample_grid(found.net, 100))
        text += f"; samples in {given.grid}"
    return facts, text


def _class_agreement(
    given: Namespace, found: Checkpoint, test: Dataset, packed: Packed | None
) -> tuple[dict[str, Any], str]:
    """Measure class agreement, as facts and as text; with --write, add it and the facts about
    drawing to the checkpoint.
    """
    config, source = found.net.config, found.provenance
    fits = config.classes and len(test.classes) == config.classes and found.net.attention.steps_as
    facts = dict(DRAWN.get(source.get("data", ""), {}))
    for name in DRAWING:
        if name in source:
            facts[name] = source[name]
        if getattr(given, name) is not None:
            facts[name] = getattr(given, name)
    attempts = facts.get("attempts", 1)
    refuse(
        (
            not fits,
            "--classes needs a model with classes, and test images of the same classes:"
            f" {found.name} has {config.classes}, and the test images have {len(test.classes)}",
        ),
        (
            attempts > 1 and not config.class_first,
            f"--attempts {attempts}: {found.name} cannot recognise classes; leave it out",
        ),
    )
    print(
        "a CNN learns the classes, unless an earlier one is kept; then images are drawn",
        file=sys.stderr,
        flush=True,
    )
    measured = agreement(
        found.net,
        trained(load(Path(given.data), "train", config), config),
        test,
        count=given.classes,
        packed=packed,
        temperature=facts.get("temperature", found.temperature),
        attempts=attempts,
        recognised=facts.get("recognised", 0),
    )
    text = (
        f"{measured.class_agreement:.3f} +- {measured.interval:.3f} (95 %) of {measured.drawn:,}"
        f" drawn images are of the class asked for ({measured.worst_class:.3f} of the worst class),"
        f" to a CNN that is right for {measured.judge:.3f} of {len(test.images):,} test images. It"
        f" is sure of {measured.sure:.3f} of the drawn images, and of {measured.judge_sure:.3f} of"
        f" the test images. An image took {measured.attempts:g} attempts on average"
    )
    look, real, result = measured.look, measured.real_look, asdict(measured)
    if look is not None and real is not None:
        text += (
            f". In an image (in test images): {look.greys} ({real.greys}) different greys,"
            f" {look.full_ink} ({real.full_ink}) pixels of full ink; more than one piece in"
            f" {look.pieces:.3f} ({real.pieces:.3f}), specks in {look.specks:.3f}"
            f" ({real.specks:.3f})"
        )
    if given.write:
        facts["class_agreement"] = measured.class_agreement
        if look is not None:
            facts |= {"look": result["look"], "real_look": result["real_look"]}
        rows = drawing_rows(source | facts)
        describe(found.folder, facts, lambda card: with_rows(card, rows))
        text += f"; written to {found.folder}"
    return result, text


def export(given: Namespace) -> None:
    unseen = _unseen(given) if given.calibrate else None
    with writing(Path(given.out)):
        exported = export_run(
            Path(given.run_folder),
            Path(given.out),
            lambda config: load_existing(given.data, "test", config),
            unseen=unseen,
            fp32=given.fp32,
            twin_of=given.twin_of,
            progress=sys.stderr.isatty(),
        )
    bits = ", ".join(f"{name} {value:.4f}" for name, value in exported["bits_per_dim"].items())
    print(f"written to {given.out}; bits/dim: {bits}", file=sys.stderr)


def _unseen(given: Namespace) -> Dataset:
    """Images that a run held out for validation, at most MAX_IMAGES. Raises ValueError if there are
    too few.
    """
    run = read(Path(given.run_folder))
    data, trained_on = (
        load_existing(given.data, "train", run.net.config),
        run.provenance.get("data"),
    )
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
    return data.part(slice(-count, len(data.images) - count + min(count, MAX_IMAGES)))


def import_(given: Namespace) -> None:
    out = Path(given.out)
    if out.exists():
        raise ValueError(f"--out {out} exists already; give a new folder")

    def marginal(config: ModelConfig) -> list[float]:
        return first_marginal(load(Path(given.data), "train", config))

    source_of_first = marginal if given.data else None
    net, facts = import_reference(
        Path(given.reference), given.heads, given.attention, source_of_first
    )
    source = provenance("unknown", (), command=given.command_line, board=board_of(net), **facts)
    save(out, net, source, card(out.name, net.config, source))
    told = f"; {facts['history']}" if "history" in facts else ""
    print(f"written to {out}{told}", file=sys.stderr)


def experiment(given: Namespace) -> None:
    _choose_device(given)
    kind, name = study(given.experiment), f"experiment-{given.experiment}"
    if given.quick:
        name += "-quick"
    folder = Path(given.out or f"runs/{name}")
    asked = {field.name: getattr(given, field.name) for field in fields(kind.settings_type)}
    asked = {name: value for name, value in asked.items() if value is not None}
    if "kinds" in asked:
        asked["kinds"] = tuple(asked["kinds"])
    smaller = kind.quick_form if given.quick else {}
    settings = kind.settings_type(**{**smaller, **asked})
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
