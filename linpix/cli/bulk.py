"""Bulk work: `linpix sample --shards` draws images into tars or folders, and continues when it is
repeated.

A shard appears under its name whole or not at all, so a killed command loses only its unfinished
shards, and the same command draws exactly those. The folder's linpix.json has the settings that
decide the bytes.
"""

import contextlib
import importlib.metadata
import io
import json
import os
import shutil
import sys
import tarfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from tqdm import tqdm

from linpix.model import ops
from linpix.server.engine.decode.engine import Engine
from linpix.server.engine.image import Image, images_of
from linpix.server.engine.job import Job
from linpix.server.pictures import encode

from .draw import class_name, quantum_of

SETTINGS = "linpix.json"
ShardFormat = Literal["tar", "png"]  # WebDataset's tars, or folders of the same files
Add: TypeAlias = Callable[[str, bytes], object]  # a file to a shard


def draw_shards(
    folder: Path,
    job: Job,
    engine: Engine,
    *,
    shards: int,
    shard_format: ShardFormat,
    scale: int,
    seed_given: bool,
) -> dict[str, Any]:
    """Draw the shards that folder lacks; returns how many images that were, and the facts of all
    shards.

    seed_given: else the seed is that of the folder's first call. Raises ValueError if the folder
    was begun with other settings, or is in use.
    """
    # of fixed width, for names like shard-{00000..00099}
    count, digits = job.count, max(5, len(str(shards - 1)))
    with _locked(folder):
        settings: dict[str, object] = {
            "count": count,
            "shards": shards,
            "shard_format": shard_format,
            "scale": scale,
        }
        job = replace(job, seed=_settle(folder, job, engine, seed_given, settings))
        suffix = ".tar" if shard_format == "tar" else ""
        images: dict[Path, range] = {}  # the numbers of each shard's images
        for shard in range(shards):
            path = folder / f"shard-{shard:0{digits}}{suffix}"
            images[path] = range(shard * count // shards, (shard + 1) * count // shards)
        missing = {path: numbers for path, numbers in images.items() if not path.exists()}
        todo, began = sum(map(len, missing.values())), time.perf_counter()
        with tqdm(
            total=count,
            initial=count - todo,
            disable=not sys.stderr.isatty(),
            unit=" images",
            bar_format=(
                "{l_bar}{bar}| {n:.0f}/{total:.0f} images [{elapsed}<{remaining}, {rate_noinv_fmt}]"
            ),
        ) as bar:
            drawn = _drawn(engine, job, [*missing.values()], bar)
            for path, numbers in missing.items():
                with _writing(path, shard_format) as add:
                    for number in numbers:
                        _write(number, next(drawn), job, engine, scale, add)
        return {
            "drawn": todo,
            "seconds": time.perf_counter() - began,
            "seed": job.seed,
            "files": [str(path) for path in images],
        }


def _drawn(engine: Engine, job: Job, shards: Sequence[range], bar: "tqdm[Any]") -> Iterator[Image]:
    """The images of some shards in their order, drawn without a pause between shards.

    In the compiled engine, an image does not depend on the others in its batch. In the eager engine
    it may, in the last bits, so there the batches must be the same after an interruption: it gets a
    part only when the last one is done.
    """
    slots, eager = engine.slots.count, engine.decoder.kind.startswith("eager")
    # the clock decides when an image is drawn again, and so what is in a batch
    if eager and job.attempts > 1:
        slots = 1
    parts: deque[range] = deque()
    for shard in shards:
        parts.extend(shard[first : first + slots] for first in range(0, len(shard), slots))
    finished: dict[int, Image] = {}  # by number
    for number in chain.from_iterable(shards):
        while number not in finished:
            while parts and (
                not engine.busy if eager else len(engine.scheduler.interactive) < slots
            ):
                part = parts.popleft()
                asked = replace(job, seed=job.seed + part[0], count=len(part))
                engine.scheduler.submit(images_of(asked, str(part[0])))
            _, done = quantum_of(engine)
            finished |= {int(image.request) + image.index: image for image in done}
            bar.update(len(done))
        yield finished.pop(number)


def _write(number: int, image: Image, job: Job, engine: Engine, scale: int, add: Add) -> None:
    """Add the PNG and JSON of an image to its shard."""
    decoder, checkpoint = engine.decoder, engine.decoder.checkpoint
    facts = {
        "seed": job.seed + number,
        "label": image.label,
        "class": class_name(image, checkpoint),
        "temperature": job.temperature,
        "attempts": job.attempts,
        "model": checkpoint.name,
        "digest": checkpoint.digest,
        "engine": decoder.kind,
        "precision": decoder.precision,
    }
    assert image.canvas is not None
    key = f"{number:09}"  # no dot: in WebDataset, a sample's files differ after the first dot
    add(f"{key}.png", encode.png(image.canvas, decoder.config, scale))
    add(f"{key}.json", json.dumps(facts, ensure_ascii=False).encode())


# --- settings of a folder ---


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    import fcntl  # missing on Windows, where the rest of this package works

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--out {folder}: another process is drawing into this folder; wait until it ends,"
                " or give another folder"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _settle(
    folder: Path, job: Job, engine: Engine, seed_given: bool, settings: dict[str, object]
) -> int:
    """Write a new folder's settings, or check those of an old one; returns the seed of image 0.
    Raises ValueError.

    They are all that decides a shard's bytes: also the versions of what draws and of what writes
    PNG.
    """
    file, decoder = folder / SETTINGS, engine.decoder
    settings |= {
        "temperature": job.temperature,
        "attempts": job.attempts,
        "label": job.label,
        **decoder.facts,
        "kernel": ops.kernel(),
        "torch": torch.__version__,
        "pillow": importlib.metadata.version("pillow"),
    }
    if decoder.kind.startswith("eager"):
        settings |= {"batch": decoder.slots.count, "threads": torch.get_num_threads()}
    if not file.exists():
        if next(folder.glob("shard-*"), None):
            raise ValueError(
                f"--out {folder} has shards, but the file {SETTINGS} that describes them is"
                " missing; restore it, or give another folder"
            )
        temporary = file.with_name(file.name + ".new")
        temporary.write_text(json.dumps({"seed": job.seed} | settings, indent=1) + "\n")
        _published(temporary, file)
        return job.seed
    try:
        begun = {"attempts": 1} | json.loads(file.read_text())  # older releases made one attempt
        first = int(begun["seed"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is damaged; restore it, or give another --out") from None
    seed = job.seed if seed_given else first
    wanted = {"seed": seed} | settings
    differing = [
        f"{name} {begun.get(name)!r}, now {value!r}"
        for name, value in wanted.items()
        if begun.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"--out {folder} was started with other settings: {'; '.join(differing)}; use the"
            " settings of the first call, or give another folder"
        )
    return first


# --- files ---


@contextlib.contextmanager
def _writing(path: Path, shard_format: ShardFormat) -> Iterator[Add]:
    """Write a shard under a temporary name; it is renamed when all files are added, and removed
    after an error.

    The bytes of a tar depend on names and contents alone: its files have no time and no owner.
    """
    temporary = path.with_name(path.name + ".new")
    _remove(temporary)  # left by a call that was killed
    try:
        if shard_format == "tar":
            with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar:

                def add(name: str, content: bytes) -> None:
                    member = tarfile.TarInfo(name)  # of 1970 and root, with mode 644
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))

                yield add
        else:
            temporary.mkdir()
            yield lambda name, content: (temporary / name).write_bytes(content)
        _published(temporary, path)
    except BaseException:
        _remove(temporary)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _published(temporary: Path, path: Path) -> None:
    """Rename a complete shard or file once its bytes are on the disk: else a failing machine could
    truncate it.

    The files in a folder are not synced: there may be thousands.
    """
    _synced(temporary)
    os.replace(temporary, path)
    _synced(path.parent)


def _synced(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
