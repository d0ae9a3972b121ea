"""The commands that decode: serve, sample, complete, compare, doctor. Each takes the parsed flags."""

import argparse
import dataclasses
import io
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError
from tqdm import tqdm

from linpix.model import checkpoint as checkpoints
from linpix.model import ops
from linpix.model.checkpoint import Checkpoint
from linpix.model.cuda import StateFormat

from .. import serve as service
from ..compare import report
from ..compare.backends import BACKENDS
from ..compare.checkpoints import find_twins
from ..compare.comparison import Comparison, ComparisonPlan
from ..engine.batch import Batcher
from ..engine.decode.choice import new_decoder
from ..engine.decode.decoder import ImageSpec
from ..engine.decode.particles import answer_seed, check_filter, particles_for, particles_of
from ..engine.decode.ranking import attempts_for
from ..pictures import pictures, uploads
from ..pictures.overlay import Overlay
from ..settings import Settings
from . import animation, bulk, preview
from .draw import (
    check_candidates,
    check_recognises,
    class_of,
    in_own_words,
    produce,
    ranked,
    seeds_from,
    temperature_of,
    warn,
)


def serve(given: argparse.Namespace) -> None:
    flags = {name: getattr(given, name) for name in Settings.model_fields if getattr(given, name) is not None}
    try:
        settings = Settings(**flags)
    except ValidationError as invalid:
        first = invalid.errors()[0]
        name = str(first["loc"][0])
        raise ValueError(f"--{name.replace('_', '-')} (LINPIX_{name.upper()}): "
                         f"{first['msg'].removeprefix('Value error, ')}, got {first['input']!r:.80}") from invalid
    if settings.replicas:
        from ..cluster import local  # its dependencies are an extra

        local.serve(settings)
    else:
        service.serve(settings)


@in_own_words()
def sample(given: argparse.Namespace) -> None:
    if given.shards:
        _sample_shards(given)
        return
    if given.shard_format:
        raise ValueError(f"--shard-format {given.shard_format} needs --shards, the number of shards")
    check_candidates(given.candidates, given.count)
    drawn = given.candidates or given.count
    checkpoint, batcher = _batcher(given, min(drawn, given.batch))
    temperature = temperature_of(given.temperature, checkpoint)
    warn("sample", checkpoint.temperature_warnings(temperature))
    check_recognises(given.candidates, checkpoint)
    label, attempts = class_of(given.label, checkpoint), _attempts(given, checkpoint, temperature)
    _produce(given, checkpoint, batcher, [ImageSpec(seed=seed, temperature=temperature, label=label, attempts=attempts)
                                          for seed in seeds_from(given.seed, drawn)])


def _sample_shards(given: argparse.Namespace) -> None:
    if _kind(given.out) or given.candidates or given.preview == "always":
        raise ValueError("--shards writes every drawn image into a folder: leave out --candidates and --preview "
                         "always, and give a folder as --out")
    if given.scale == "auto":
        raise ValueError("--scale auto is for grids on a screen; with --shards, give a number or leave it out")
    order = bulk.BulkOrder(count=given.count, shards=given.shards, shard_format=given.shard_format or "tar",
                           seed=given.seed, temperature=1.0, attempts=0, label=None, scale=given.scale or 1)
    given.preview = "never"
    checkpoint, batcher = _batcher(given, min(given.count, given.batch))
    temperature = temperature_of(given.temperature, checkpoint)
    warn("sample", checkpoint.temperature_warnings(temperature))
    order = dataclasses.replace(order, label=class_of(given.label, checkpoint), temperature=temperature,
                                attempts=_attempts(given, checkpoint, temperature))
    drawn, engine = bulk.draw_shards(Path(given.out), order, batcher), batcher.decoder
    speed = drawn.images / drawn.seconds if drawn.images else None
    result = {"images": given.count, "drawn": drawn.images, "seconds": drawn.seconds, "images_per_second": speed,
              **engine.facts, "seed": drawn.seed, "shards": given.shards, "files": drawn.files}
    how = f" in {drawn.seconds:.2f} s ({speed:.2f} images/s, {engine.name} engine, {engine.precision})" if speed else ""
    _say(given, result, f"{given.out} has {given.count} images in {given.shards} shards, seeds from {drawn.seed}; "
                        f"{drawn.images} of them were drawn now{how}")


@in_own_words()
def complete(given: argparse.Namespace) -> None:
    picture = Path(given.image).read_bytes()  # before the model: a wrong path is reported at once
    mask = Path(given.mask).read_bytes() if given.mask else None
    if given.lay_back and (_kind(given.out) or given.scale):
        raise ValueError("--lay-back writes one PNG per image at the size of the picture: give a folder as --out, and "
                         "leave out --scale")
    check_candidates(given.candidates, given.count)
    particles = particles_for(given.method, given.particles, candidates=given.candidates,
                              temperature=1.0 if given.temperature is None else given.temperature)
    answers = given.candidates or given.count
    checkpoint, batcher = _batcher(given, min(answers * max(1, particles), max(given.batch, particles)))
    label = class_of(given.label, checkpoint)
    temperature = temperature_of(given.temperature, checkpoint, filtered=particles > 0)
    attempts = _attempts(given, checkpoint, temperature)
    upload = uploads.read(picture, checkpoint.net.config, mask=mask, keep_rows=given.keep_rows,
                          preparation=given.prepare, lay_back=given.lay_back)
    occluded = upload.occluded
    warn("complete", checkpoint.temperature_warnings(temperature) + uploads.warnings_of(upload, checkpoint))
    facts: dict[str, object] = {"crop": upload.crop, "method": given.method or "raster", "particles": particles or None}
    if particles:
        check_filter(batcher.decoder, occluded.known)
    if upload.prepared is not None:
        facts["prepared"] = {"inverted": upload.prepared.inverted, "box": upload.box}
    _produce(given, checkpoint, batcher,
             particles_of([ImageSpec(seed=seed, temperature=temperature, label=label, attempts=attempts,
                                     canvas=occluded.canvas, known=occluded.known)
                           for seed in seeds_from(given.seed, answers)], particles),
             upload.overlay, conditioning=occluded.conditioning, known=occluded.known_count, **facts)


def _attempts(given: argparse.Namespace, checkpoint: Checkpoint, temperature: float) -> int:
    return attempts_for(given.attempts, checkpoint, candidates=given.candidates, temperature=temperature)


def _batcher(given: argparse.Namespace, slots: int) -> tuple[Checkpoint, Batcher]:
    """The model and its batcher. Output that cannot be written or shown is refused here, before the work."""
    kind = _check_output(given.out)
    given.colours = preview.colours_of(sys.stderr, "never" if given.json and given.preview == "auto"
                                       else given.preview, os.environ)
    loaded = checkpoints.read(checkpoints.find(given.model, given.checkpoints))
    auto = given.scale == "auto"
    wanted = None if auto else given.scale
    if kind in ("GIF", "WEBP"):
        given.scale = animation.enlargement(given.count, loaded.net.config, wanted)
    elif auto or (kind == "PNG" and wanted is None and sys.stdout.isatty()):  # to look at
        given.scale = animation.readable(given.count if kind else 1, loaded.net.config)
    engine = new_decoder(loaded, slots, given.engine, given.precision, device=given.device,
                         state=StateFormat(precision=given.state, defer=given.defer))
    return loaded, Batcher(engine)


def _produce(given: argparse.Namespace, checkpoint: Checkpoint, batcher: Batcher,
             specs: Sequence[ImageSpec], overlay: Overlay | None = None, **facts: object) -> None:
    config, engine, candidates = checkpoint.net.config, batcher.decoder, given.candidates
    kind, scale, chooses = _kind(given.out), given.scale or 1, candidates is not None or specs[0].particles > 0

    def file(place: int, index: int) -> str:
        return str(Path(given.out) / f"{place:05}-{answer_seed(specs[index])}.png")

    def write(place: int, index: int, image: NDArray[np.uint8]) -> None:
        _write(file(place, index), pictures.png(image, config, scale) if overlay is None else
               overlay.png(image.reshape(config.height, config.width, config.channels)))

    with preview.Progress(specs, config, sys.stderr, colours=given.colours,
                          frames=animation.MAX_FRAMES if kind in ("GIF", "WEBP") else 1) as progress:

        def done(index: int, image: NDArray[np.uint8]) -> None:
            if not kind and not chooses:  # at once: an interruption then loses only unfinished images
                write(index, index, image)
            progress.done(index, image)

        produced = produce(batcher, specs, done, progress.advanced)
    kept, text, seconds = [*(produced.estimates or range(len(specs)))], given.out, produced.seconds
    if estimates := produced.estimates.values():
        facts |= {"effective_sample_sizes": [one.effective_sample_size for one in estimates],
                  "log_evidences": [one.log_evidence for one in estimates]}
    if specs[0].attempts > 1:
        facts |= {"attempts": [one.attempts for one in produced.recognised.values()],
                  "confidences": [one.confidence for one in produced.recognised.values()]}
    if candidates is not None:
        began = time.perf_counter()
        best = ranked(checkpoint.net, produced, specs[0].known, given.count)
        kept, seconds = [*best], seconds + time.perf_counter() - began
        first, *_ = best.values()
        facts |= {"candidates": candidates} | {f"{name}s": [one[name] for one in best.values()] for name in first}
    if kind:
        images = np.stack([produced.images[index] for index in kept])
    elif chooses:
        for place, index in enumerate(kept):
            write(place, index, produced.images[index])
    if kind == "PNG" and len(images) == 1:
        _write(given.out, pictures.png(images[0], config, scale))  # without a frame, to be completed or scored
    elif kind == "PNG":
        sheet = animation.grid(images, config).repeat(scale, axis=0).repeat(scale, axis=1)
        buffer = io.BytesIO()
        Image.fromarray(sheet).save(buffer, "PNG")
        _write(given.out, buffer.getvalue())
    elif kind:
        moments = progress.film.moments
        frames = [animation.grid(images, config, rows=rows[kept], known=specs[0].known) for rows in moments]
        _write(given.out, animation.animate(frames, kind, scale))
        facts["frames"] = len(frames)
        text += f" ({len(frames)} frames)"
    files = [given.out] if kind else [file(place, index) for place, index in enumerate(kept)]
    result = {"images": len(kept), "seconds": seconds, "images_per_second": len(kept) / seconds, "drawn": len(specs),
              **engine.facts, "seeds": [answer_seed(specs[index]) for index in kept], "files": files, **facts}
    what = f"{'' if candidates is None else 'the best '}{len(kept)} of them " if chooses else ""
    ranking = "" if candidates is None else " with their ranking"
    drawn = "1 image" if len(specs) == 1 else f"{len(specs)} images"
    _say(given, result, f"{drawn} in {seconds:.2f} s{ranking} ({len(specs) / seconds:.2f} images/s, "
         f"{engine.name} engine, {engine.precision}), seeds from {answer_seed(specs[0])}, "
         f"{what}written to {text}")


_KINDS: dict[str, Literal["PNG", "GIF", "WEBP"]] = {".png": "PNG", ".gif": "GIF", ".webp": "WEBP"}


def _kind(out: str) -> Literal["PNG", "GIF", "WEBP"] | None:
    """What --out names: one file of that kind, or a folder."""
    return None if out.endswith("/") else _KINDS.get(Path(out).suffix.lower())


def _check_output(out: str) -> Literal["PNG", "GIF", "WEBP"] | None:
    """The kind of --out; a folder is made. Raises ValueError before the work, not after it, if it cannot be written."""
    path, kind = Path(out), _kind(out)
    possible = "NAME.png for a grid, NAME.gif or NAME.webp for an animation of it"
    if kind:
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"--out {out}: {'is a folder' if path.is_dir() else 'its folder does not exist'}; give a "
                             f"new folder for one PNG per image, or {possible} in an existing folder")
        Image.init()
        if kind not in Image.SAVE_ALL:
            raise ValueError(f"--out {out}: this Pillow was built without {kind}; give NAME.gif, or install another "
                             "Pillow")
    elif path.is_file():
        raise ValueError(f"--out {out} is a file; give a folder for one PNG per image, or {possible}")
    elif path.suffix[1:2].isalpha() and not path.is_dir() and not out.endswith("/"):
        raise ValueError(f"--out {out}: the format {path.suffix} is not supported; give {possible}, or a folder, "
                         f"{out}/, for one PNG per image")
    else:
        path.mkdir(parents=True, exist_ok=True)
    return kind


def _write(file: str, content: bytes) -> None:
    temporary = Path(file + ".new")
    temporary.write_bytes(content)
    temporary.replace(file)


def compare(given: argparse.Namespace) -> None:
    backends = BACKENDS if given.all or not given.backends else tuple(given.backends.split(","))
    plan = ComparisonPlan(backends=backends, batches=tuple(given.batch), budget_s=given.budget)
    folder = checkpoints.find(given.model, given.checkpoints)
    if given.out:
        Path(given.out).mkdir(parents=True, exist_ok=True)
    checkpoint = checkpoints.read(folder)
    comparison = Comparison(checkpoint, find_twins(checkpoint, checkpoint.folder.parent), plan,
                            command=given.command_line)
    with tqdm(total=100, unit="%", disable=not sys.stderr.isatty()) as bar:
        for _ in comparison.run():
            bar.update(round(100 * comparison.progress) - bar.n)
    result = comparison.report
    if given.out:
        report.write(result, Path(given.out))
    _say(given, result, report.table(result))


def doctor(given: argparse.Namespace) -> None:
    facts = {"engine": "compiled" if ops.compiled else "eager", "kernel": ops.kernel(), "why": ops.why(),
             "precision": "bf16" if ops.compiled and torch.ops.linpix.cpu_has_fast_bf16() else "fp32",
             "feature_maps": "elu+1 in the compiled kernels, relu, polynomial and random in the eager engine",
             "residuals": "plain in the compiled kernels, reversible in the eager engine",
             "device": torch.cuda.get_device_name() if ops.gpu else "cpu", "no_gpu": ops.why_no_gpu() or None,
             "instruction_set": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads(),
             "int8_products": "with --precision int8, using VNNI" if ops.kernel() in ops.VNNI_KERNELS else
                              "with --precision int8, but without VNNI, so not faster" if ops.compiled else "none",
             "bf16_matrix_products": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
             "python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform()}
    _say(given, facts, "\n".join(f"{name.replace('_', ' '):21} {value}" for name, value in facts.items()
                                 if value is not None))


def _say(given: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    """One JSON object with --json, else text for people."""
    print(json.dumps(result, allow_nan=False) if given.json else text)
