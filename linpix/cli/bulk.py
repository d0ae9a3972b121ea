"""Bulk work: `linpix sample --shards` draws images into tars or folders, and continues when it is repeated.

A shard appears under its name whole or not at all, so a killed command loses only its unfinished shards, and the same
command draws exactly those. The folder's linpix.json has the settings that decide the bytes.
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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from linpix.model import ops
from linpix.server.engine.attempts import chosen
from linpix.server.engine.decode.engine import Engine
from linpix.server.engine.image import images_of
from linpix.server.engine.job import Job
from linpix.server.pictures import encode

from .draw import quantum_of

SETTINGS = "linpix.json"
ShardFormat = Literal["tar", "png"]  # WebDataset's tars, or folders of the same files


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkOrder:
    """The images that a bulk command draws."""

    job: Job
    seed_given: bool  # else a later call takes that of the folder's first call
    shards: int
    shard_format: ShardFormat
    scale: int

    @property
    def count(self) -> int:
        return self.job.images

    def images_of(self, shard: int) -> range:
        """The numbers of a shard's images: shards are equally long, or differ by one image."""
        return range(shard * self.count // self.shards, (shard + 1) * self.count // self.shards)

    def path_of(self, folder: Path, shard: int) -> Path:
        number = f"{shard:0{max(5, len(str(self.shards - 1)))}}"  # of fixed width, for names like shard-{00000..00099}
        return folder / f"shard-{number}{'.tar' if self.shard_format == 'tar' else ''}"


@dataclass(frozen=True, slots=True)
class Drawn:
    seed: int        # of image 0
    images: int      # drawn by this call
    seconds: float   # to draw and write them
    files: list[str]  # of all shards


def draw_shards(folder: Path, order: BulkOrder, engine: Engine) -> Drawn:
    """Draw the shards that folder lacks. Raises ValueError if it was begun with other settings, or is in use."""
    with _locked(folder):
        seed = _settle(folder, order, engine)
        paths = [order.path_of(folder, shard) for shard in range(order.shards)]
        missing = [shard for shard, path in enumerate(paths) if not path.exists()]
        todo = sum(len(order.images_of(shard)) for shard in missing)
        began = time.perf_counter()
        with tqdm(total=order.count, initial=order.count - todo, disable=not sys.stderr.isatty(), unit=" images",
                  bar_format="{l_bar}{bar}| {n:.0f}/{total:.0f} images [{elapsed}<{remaining}, {rate_noinv_fmt}]"
                  ) as bar:
            drawing = _Drawing(engine, replace(order, job=replace(order.job, seed=seed)), missing, bar)
            for shard in missing:
                with _writing(paths[shard], order.shard_format) as files:
                    for index in order.images_of(shard):
                        drawing.write(index, files)
        return Drawn(seed, todo, time.perf_counter() - began, [str(path) for path in paths])


class _Drawing:
    """The images of some shards, drawn without a pause between shards, and written in their order."""

    def __init__(self, engine: Engine, order: BulkOrder, shards: list[int], bar: "tqdm[Any]") -> None:
        self._engine, self._order, self._job, self._bar = engine, order, order.job, bar
        self._eager = engine.decoder.kind.startswith("eager")
        self._parts = (part for shard in shards for part in self._parts_of(order.images_of(shard)))
        self._finished: dict[int, tuple[NDArray[np.uint8], int | None]] = {}  # sub-pixels (T,), and class, by number

    def _parts_of(self, images: range) -> list[range]:
        # the clock decides when an image is drawn again, and so what is in the eager engine's batches: see _submit
        slots = 1 if self._eager and self._job.attempts > 1 else self._engine.decoder.slots
        return [images[first:first + slots] for first in range(0, len(images), slots)]

    def write(self, index: int, files: "_Files") -> None:
        """Add the PNG and JSON of the next image."""
        decoder = self._engine.decoder
        while index not in self._finished:
            self._submit()
            _, finished = quantum_of(self._engine)
            for image in finished:
                best = chosen(image)
                assert best.canvas is not None
                self._finished[int(image.request) + image.index] = best.canvas, best.label
            self._bar.update(len(finished))
        canvas, label = self._finished.pop(index)
        names = decoder.checkpoint.class_names
        facts = {"seed": self._job.seed + index, "label": label,
                 "class": None if label is None or label >= len(names) else names[label],
                 "temperature": self._job.temperature, "attempts": self._job.attempts,
                 "model": decoder.checkpoint.name,
                 "digest": decoder.checkpoint.digest, "engine": decoder.kind, "precision": decoder.precision}
        key = f"{index:09}"  # no dot: in WebDataset, a sample's files differ after the first dot
        files.add(f"{key}.png", encode.png(canvas, decoder.config, self._order.scale))
        files.add(f"{key}.json", json.dumps(facts, ensure_ascii=False).encode())

    def _submit(self) -> None:
        """Keep the queue filled. The eager engine gets a part only when the last one is done.

        In the compiled engine, an image does not depend on the others in its batch. In the eager engine it may, in the
        last bits, so there the batches must be the same after an interruption.
        """
        while not self._engine.busy if self._eager else (
                sum(1 for _ in self._engine.scheduler.waiting) < self._engine.decoder.slots):
            part = next(self._parts, None)
            if part is None:
                return
            self._engine.submit(images_of(replace(self._job, seed=self._job.seed + part[0], images=len(part)),
                                          str(part[0])))


# --- settings of a folder ---

@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    import fcntl  # missing on Windows, where the rest of this package works

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out {folder}: another process is drawing into this folder; wait until it ends, or "
                             "give another folder") from None
        yield
    finally:
        os.close(descriptor)


def _settle(folder: Path, order: BulkOrder, engine: Engine) -> int:
    """Write a new folder's settings, or check those of an old one; returns the seed of image 0. Raises ValueError."""
    file, settings = folder / SETTINGS, _settings(order, engine)
    if not file.exists():
        if next(folder.glob("shard-*"), None):
            raise ValueError(f"--out {folder} has shards, but the file {SETTINGS} that describes them is missing; "
                             "restore it, or give another folder")
        temporary = file.with_name(file.name + ".new")
        temporary.write_text(json.dumps({"seed": order.job.seed} | settings, indent=1) + "\n")
        _published(temporary, file)
        return order.job.seed
    try:
        begun = {"attempts": 1} | json.loads(file.read_text())  # older releases made one attempt
        first = int(begun["seed"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is damaged; restore it, or give another --out") from None
    wanted = {"seed": order.job.seed if order.seed_given else first} | settings
    if differing := [f"{name} {begun.get(name)!r}, now {value!r}" for name, value in wanted.items()
                     if begun.get(name) != value]:
        raise ValueError(f"--out {folder} was started with other settings: {'; '.join(differing)}; use the settings of "
                         "the first call, or give another folder")
    return first


def _settings(order: BulkOrder, engine: Engine) -> dict[str, object]:
    """All that decides a shard's bytes, except the seed: also the versions of what draws and of what writes PNG."""
    decoder = engine.decoder
    of_eager = {"batch": decoder.slots, "threads": torch.get_num_threads()}
    return {"count": order.count, "shards": order.shards, "shard_format": order.shard_format,
            "temperature": order.job.temperature, "attempts": order.job.attempts, "label": order.job.label,
            "scale": order.scale, **decoder.facts, "kernel": ops.kernel(), "torch": torch.__version__,
            "pillow": importlib.metadata.version("pillow"),
            **(of_eager if decoder.kind.startswith("eager") else {})}


# --- files ---

class _Files(Protocol):
    def add(self, name: str, content: bytes) -> None: ...


class _Tar:
    """A tar whose bytes depend on names and contents alone: its files have no time and no owner."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar

    def add(self, name: str, content: bytes) -> None:
        member = tarfile.TarInfo(name)  # of 1970 and root, with mode 644
        member.size = len(content)
        self._tar.addfile(member, io.BytesIO(content))


class _Folder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, name: str, content: bytes) -> None:
        (self._path / name).write_bytes(content)


@contextlib.contextmanager
def _writing(path: Path, shard_format: ShardFormat) -> Iterator[_Files]:
    """Write a shard under a temporary name; it is renamed when all files are added, and removed after an error."""
    temporary = path.with_name(path.name + ".new")
    _remove(temporary)  # left by a call that was killed
    try:
        if shard_format == "tar":
            with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar:
                yield _Tar(tar)
        else:
            temporary.mkdir()
            yield _Folder(temporary)
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
    """Rename a complete shard or file once its bytes are on the disk: else a failing machine could truncate it.

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
