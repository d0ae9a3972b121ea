"""The commands serve, sample, complete, compare, models and doctor. Each takes the parsed flags."""

import argparse
import dataclasses
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from tqdm import tqdm

from linpix.model import checkpoint as checkpoints
from linpix.model import ops
from linpix.model.attention import attention_for
from linpix.model.choice import choose
from linpix.model.config import PRESETS
from linpix.model.cuda import GpuPool
from linpix.model.folders import find, root, under
from linpix.model.nets import net_for
from linpix.model.provenance import config_of
from linpix.server import serve as service
from linpix.server.compare import chart
from linpix.server.compare.backends import backends
from linpix.server.compare.checkpoints import find_twins
from linpix.server.compare.comparison import Comparison, ComparisonPlan
from linpix.server.compare.report import table
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.engine import Engine
from linpix.server.engine.decode.limits import measured_share
from linpix.server.engine.image import Image
from linpix.server.engine.job import Job, checked_options, class_of
from linpix.server.pictures import animation, uploads
from linpix.server.settings import ON_GPU, Settings, from_file

from . import bulk, preview
from .draw import pixels_of, produce, unsure_of, warn
from .output import Output, check_output, kind_of, scale_of


def serve(given: argparse.Namespace) -> None:
    flags: dict[str, Any] = {
        name: flag
        for name, flag in vars(given).items()
        if name in Settings.model_fields and flag is not None
    }
    written = from_file(given.config, os.environ) if given.config else {}
    try:
        settings = Settings(**written | flags)
    except ValidationError as invalid:
        first = invalid.errors()[0]
        if not first["loc"]:  # of several settings
            raise ValueError(first["msg"].removeprefix("Value error, ")) from invalid
        name = str(first["loc"][0])
        raise ValueError(
            f"--{name.replace('_', '-')} (LINPIX_{name.upper()}): "
            f"{first['msg'].removeprefix('Value error, ')}, got {first['input']!r:.80}"
        ) from invalid
    if given.print_config:
        print(settings.toml(), end="")
        return
    service.check_tls(settings)
    if settings.replicas:
        from linpix.server.cluster import local  # its dependencies are an extra

        local.serve(settings)
    else:
        service.serve(settings)


def sample(given: argparse.Namespace) -> None:
    if given.shards:
        _sample_shards(given)
        return
    if given.shard_format:
        raise ValueError(
            f"--shard-format {given.shard_format} needs --shards, the number of shards"
        )
    engine, options, output = _opened(given)
    _produce(given, engine, Job(**options, stream=True), output)


def _sample_shards(given: argparse.Namespace) -> None:
    if kind_of(given.out) or given.candidates or given.preview == "always":
        raise ValueError(
            "--shards writes every drawn image into a folder: leave out --candidates and --preview "
            "always, and give a folder as --out"
        )
    if given.scale == "auto":
        raise ValueError(
            "--scale auto is for grids on a screen; with --shards, give a number or leave it out"
        )
    if given.shards > given.count:
        raise ValueError(
            f"--shards {given.shards}: each shard needs at least one image, and --count is "
            f"{given.count}; give fewer shards"
        )
    given.preview = "never"
    engine, options, _ = _opened(given)
    drawn = bulk.draw_shards(
        Path(given.out),
        Job(**options),
        engine,
        shards=given.shards,
        scale=given.scale or 1,
        shard_format=given.shard_format or "tar",
        seed_given=given.seed is not None,
    )
    count, seconds, decoder = drawn["drawn"], drawn["seconds"], engine.decoder
    text = (
        f"{given.out} has {given.count} images in {given.shards} shards, seeds from"
        f" {drawn['seed']}; {count} of them were drawn now"
    )
    speed = None
    if count:
        speed = count / seconds
        text += (
            f" in {seconds:.2f} s ({speed:.2f} images/s, {decoder.kind} engine,"
            f" {decoder.precision})"
        )
    result = {
        "images": given.count,
        "images_per_second": speed,
        **decoder.facts,
        "shards": given.shards,
        **drawn,
    }
    _say(given, result, text)


def complete(given: argparse.Namespace) -> None:
    picture = Path(given.image).read_bytes()  # before the model: a wrong path is reported at once
    mask = Path(given.mask).read_bytes() if given.mask else None
    if given.lay_back and (kind_of(given.out) or given.scale):
        raise ValueError(
            "--lay-back writes one PNG per image at the size of the picture: give a folder as"
            " --out, and leave out --scale"
        )
    engine, options, output = _opened(given)
    upload = uploads.read(
        picture,
        output.config,
        mask=mask,
        keep_rows=given.keep_rows,
        preparation=given.prepare,
        lay_back=given.lay_back,
    )
    warn("complete", uploads.warnings_of(upload, engine.decoder.checkpoint))
    facts = {name: upload.facts[name] for name in ("conditioning", "known")} | {"crop": upload.crop}
    job = Job(**options, stream=True, canvas=upload.canvas, known=upload.known)
    if upload.figure is not None:
        facts["prepared"] = {"inverted": upload.inverted, "box": upload.figure}
    _produce(given, engine, job, dataclasses.replace(output, overlay=upload.overlay), **facts)


def _opened(given: argparse.Namespace) -> tuple[Engine, dict[str, Any], Output]:
    """An engine, the options of its Job, and where that goes. What cannot be drawn, written or
    shown is refused here.
    """
    kind = check_output(given.out)
    if given.json and given.preview == "auto":
        given.preview = "never"
    given.colours = preview.colours_of(sys.stderr, given.preview, os.environ)
    checkpoint = checkpoints.named(given.model, given.checkpoints)
    config = checkpoint.net.config
    scale = scale_of(kind, given.count, config, given.scale)
    options = checked_options(
        checkpoint,
        given.count,
        label=class_of(given.label, checkpoint),
        seed=given.seed,
        temperature=given.temperature,
        candidates=given.candidates,
        attempts=given.attempts,
    )
    warn(given.command, checkpoint.temperature_warnings(options["temperature"]))
    decoder = new_decoder(
        checkpoint,
        min(options["count"], given.batch),
        given.engine,
        given.precision,
        device=given.device,
        state=given.state,
    )
    return Engine(decoder), options, Output(given.out, kind, scale, config)


def _produce(
    given: argparse.Namespace, engine: Engine, job: Job, output: Output, **facts: object
) -> None:
    """Draw all images, choose those to return if there are candidates, write them, and report.
    job: a stream, for the preview
    """
    decoder, config = engine.decoder, output.config
    animated = output.kind in ("GIF", "WEBP")
    frames = animation.MAX_FRAMES if animated else 1
    with preview.Progress(
        job, config, sys.stderr, colours=given.colours, frames=frames
    ) as progress:

        def done(image: Image) -> None:
            # at once: an interruption loses only unfinished images
            if not output.kind and not job.candidates:
                output.write_one(image.index, image)
            progress.done(image)

        kept, seconds = produce(engine, job, done, progress.advanced)
    checked = [image.recognised for image in kept if image.recognised is not None]
    if checked:
        facts["confidences"] = [recognised.confidence for recognised in checked]
    warn(given.command, unsure_of(kept))
    if job.attempts > 1:
        facts["attempts"] = [recognised.attempts for recognised in checked]
    text = output.path
    if output.kind:
        indices = [image.index for image in kept]
        moments = [rows[indices] for rows in progress.film.moments]
        output.write_all(pixels_of(kept), moments, job.known)
        if animated:
            facts["frames"], text = len(moments), f"{text} ({len(moments)} frames)"
    elif job.candidates:
        for place, image in enumerate(kept):
            output.write_one(place, image)
    if job.candidates:
        facts["candidates"] = job.count
    seeds = [job.seed + image.index for image in kept]
    files = list(dict.fromkeys(output.file(place, seed) for place, seed in enumerate(seeds)))
    result = {
        "images": len(kept),
        "seconds": seconds,
        "images_per_second": len(kept) / seconds,
        "drawn": job.count,
        **decoder.facts,
        "seeds": seeds,
        "files": files,
        **facts,
    }
    what = f"the best {len(kept)} of them " if job.candidates else ""
    drawn = "1 image" if job.count == 1 else f"{job.count} images"
    _say(
        given,
        result,
        f"{drawn} in {seconds:.2f} s ({job.count / seconds:.2f} images/s, {decoder.kind} engine,"
        f" {decoder.precision}), seeds from {job.seed}, {what}written to {text}",
    )


def compare(given: argparse.Namespace) -> None:
    wanted = backends()
    if given.backends:
        wanted = tuple(",".join(given.backends).split(","))
    plan = ComparisonPlan(
        backends=wanted, batches=tuple(given.batch or (1, 16, 64)), budget_s=given.budget
    )
    folder = find(given.model, given.checkpoints)
    if given.out:
        Path(given.out).mkdir(parents=True, exist_ok=True)
    checkpoint = checkpoints.read(folder)
    comparison = Comparison(
        checkpoint,
        find_twins(checkpoint),
        plan,
        command=given.command_line,
    )
    with tqdm(total=100, unit="%", disable=not sys.stderr.isatty()) as bar:
        for _ in comparison.run():
            bar.update(round(100 * comparison.progress) - bar.n)
    result = comparison.report
    if given.out:
        warn("compare", chart.write(result, Path(given.out)))
    _say(given, result, table(result))


def models(given: argparse.Namespace) -> None:
    columns = "{size:7} {colours:6} {classes:3} classes  {attention:8} {engine:20} {checkpoint:.16}"
    found, lines = [], []
    for folder in under(root(given.checkpoints)):
        try:
            facts = _facts_of(folder)
            line = columns.format(**facts)
        except ValueError as error:  # the others are listed nevertheless
            facts, line = {"error": str(error)}, str(error)
        found.append({"model": folder.name, **facts})
        lines.append(f"{folder.name:20} {line}")
    _say(given, {"models": found}, "\n".join(lines))


def _facts_of(folder: Path) -> dict[str, Any]:
    """What is known of a checkpoint without reading its tensors. Raises ValueError."""
    config = config_of(folder)
    engine = "draws no images"
    if attention_for(config).steps_as:
        chosen = choose(config, device="auto")
        engine = f"{chosen.engine} {chosen.precision} {chosen.device}"
    colours = "colour"
    if config.channels == 1 and not config.palette:
        colours = "grey"
    return {
        "size": f"{config.width}x{config.height}",
        "colours": colours,
        "classes": config.classes,
        "attention": config.attention,
        "engine": engine,
        "checkpoint": checkpoints.digest_of(folder),
    }


def doctor(given: argparse.Namespace) -> None:
    engine, precision, int8_products = "eager", "fp32", "none"
    if ops.compiled:
        engine = "compiled"
        int8_products = "with --precision int8, without VNNI, so little faster"
        if torch.ops.linpix.cpu_has_fast_bf16():
            precision = "bf16"
        if ops.kernel() in ops.VNNI_KERNELS:
            int8_products = "with --precision int8, using VNNI"
    device, gpu_kernels = "cpu", None
    if ops.gpu:
        pool = GpuPool(net_for(PRESETS["mnist"]), ON_GPU["slots"])
        pool.record(ON_GPU["slots"])
        # the fastest ones for the preset mnist
        device, gpu_kernels = torch.cuda.get_device_name(), pool.kernels
    measured, no_share = None, None
    try:
        measured = measured_share(find(None, given.checkpoints))
    except (ValueError, OSError) as error:  # the rest is worth knowing nevertheless
        no_share = str(error)
    facts = {
        "engine": engine,
        "kernel": ops.kernel(),
        "why": ops.why(),
        "precision": precision,
        "feature_maps": (
            "elu+1 in the compiled kernels, relu, polynomial and random in the eager engine"
        ),
        "residuals": "plain in the compiled kernels, reversible in the eager engine",
        "device": device,
        "no_gpu": ops.why_no_gpu() or None,
        "gpu_kernels": gpu_kernels,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "int8_products": int8_products,
        "bf16_matrix_products": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "share_of_limit": measured and dataclasses.asdict(measured),
        "no_share": no_share,
    }
    known = {name.replace("_", " "): fact for name, fact in facts.items() if fact is not None}
    if measured:
        known["share of limit"] = (
            f"{measured.share:.0%} with {measured.images} images of {measured.model} in"
            f" {measured.precision} on the processor, limited by {measured.limited_by};"
            " inexact while other programs run"
        )
    _say(given, facts, "\n".join(f"{name:21} {fact}" for name, fact in known.items()))


def _say(given: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    """One JSON object with --json, else text for people."""
    if given.json:
        text = json.dumps(result, allow_nan=False)
    print(text)
