"""Weights that several processes of one machine have in common.

Two processes with packed weights of their own keep two copies in a cache that may have room for one. These are in a
file in memory that all of them map. Its name is the digest of what it holds: who packs the same weights finds it.
"""

import fcntl
import hashlib
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

MEMORY = Path("/dev/shm")  # nosec B108: a file is opened by its owner alone, and no other user can put one in its place
PREFIX = "linpix-weights-"
ALIGNED = 64  # bytes

logger = logging.getLogger(__name__)


class SharedWeights:
    """Tensors with these contents, in memory that processes of the same user share as long as one of them lives.

    A write to one of them is this process's alone (MAP_PRIVATE). Where sharing is not possible, they are the tensors
    that were given: not on Linux, and with a warning if there is no room.
    """

    def __init__(self, weights: Sequence[Tensor], folder: Path = MEMORY) -> None:
        self.weights, self._path, self._file = list(weights), folder, -1
        if sys.platform != "linux":
            return
        parts = [weight.contiguous().flatten().view(torch.uint8) for weight in weights]
        digest = hashlib.sha256(repr([(weight.dtype, weight.shape) for weight in weights]).encode())
        for part in parts:
            digest.update(part.numpy().data)
        self._path = folder / f"{PREFIX}{digest.hexdigest()}"
        size = sum(map(_padded, parts))
        try:
            remove_unused(folder)
            while (file := _opened(self._path)) is None:
                with suppress(FileExistsError):  # another process was quicker
                    _write(self._path, parts)
            self._file = file
            if os.fstat(file).st_size != size or os.fstat(file).st_uid != os.geteuid():
                raise OSError(f"{self._path} is not ours")
            whole = torch.from_file(f"/proc/self/fd/{file}", shared=False, size=size, dtype=torch.uint8)
        except OSError as error:
            logger.warning("each replica of this machine has weights of its own, and decodes more slowly: %s; give %s "
                           "room for them (docker run --shm-size)", error, folder)
            self.close()
            return
        begin = 0
        for index, (weight, part) in enumerate(zip(weights, parts, strict=True)):
            self.weights[index] = whole[begin:begin + len(part)].view(weight.dtype).view(weight.shape)
            begin += _padded(part)

    def close(self) -> None:
        """Let go of the file, and remove it if no other process has it. The tensors can still be used."""
        if self._file >= 0:
            _remove_if_unused(self._path, self._file)
            os.close(self._file)
            self._file = -1


def remove_unused(folder: Path = MEMORY) -> None:
    """Remove the files of processes that were killed."""
    for path in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or removed just now
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                _remove_if_unused(path, file)
            finally:
                os.close(file)


def _padded(part: Tensor) -> int:
    return -(-len(part) // ALIGNED) * ALIGNED


def _opened(path: Path) -> int | None:
    """The file, locked as one that is used; None if there is none."""
    while True:
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(file)):
                return file
        os.close(file)  # it was removed before we had the lock


def _write(path: Path, parts: Sequence[Tensor]) -> None:
    """Make the file, whole at once. Raises FileExistsError if there is one."""
    file = os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        with os.fdopen(os.dup(file), "wb") as written:
            for part in parts:
                written.write(part.numpy().data)
                written.write(bytes(_padded(part) - len(part)))
        os.link(f"/proc/self/fd/{file}", path, src_dir_fd=file)  # with a src_dir_fd, Python follows the link
    finally:
        os.close(file)


def _remove_if_unused(path: Path, file: int) -> None:
    """Whoever has it all to itself may remove it: those who open it look whether it is still there."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(path), os.fstat(file)):
            path.unlink()
