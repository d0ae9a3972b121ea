"""Weights that several processes on one machine share.

Two processes with separate packed weights keep two copies in a cache that may have room for only
one. Shared weights are in a file in memory that all processes map. Its name is the digest of its
content, and the NUMA node.
"""

import errno
import hashlib
import logging
import os
import stat
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

if sys.platform != "win32":
    import fcntl

MEMORY = Path("/dev/shm")  # nosec B108: files in it are opened only if they are ours
PREFIX = "linpix-weights-"
ALIGNED = 64  # bytes
AGAIN_S = 0.02

logger = logging.getLogger(__name__)


class SharedWeights:
    """Tensors with these contents, in memory that processes of the same user share as long as one
    of them lives.

    Writes of this process are not visible to others (MAP_PRIVATE). If sharing is not possible, the
    given tensors are used: on systems other than Linux, and, with a warning, if there is no room.
    Raises nothing.

    folder: for the file; in a file system in memory.
    """

    def __init__(self, weights: Sequence[Tensor], folder: Path = MEMORY) -> None:
        self.weights = list(weights)
        self._close: weakref.finalize | None = None  # type: ignore[type-arg]
        if sys.platform != "linux":
            return
        try:
            remove_unused(folder)
            self._share(folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: torch cannot map the memory
            self.close()
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            logger.warning(
                "this replica could not share its weights with other replicas, so it may be slower:"
                " %s%s",
                error,
                f"; give {folder} more room (docker run --shm-size)" if full else "",
            )

    def _share(self, folder: Path) -> None:
        parts = [weight.contiguous().flatten().view(torch.uint8) for weight in self.weights]
        digest = hashlib.sha256(
            repr([(weight.dtype, weight.shape) for weight in self.weights]).encode()
        )
        for part in parts:
            digest.update(part.numpy().data)
        path, size = folder / f"{PREFIX}{digest.hexdigest()}-{_node()}", sum(map(_padded, parts))
        file = _found_or_written(path, parts)
        self._close = weakref.finalize(self, _let_go, path, file)
        whole = torch.from_file(f"/proc/self/fd/{file}", shared=False, size=size, dtype=torch.uint8)
        begin, shared = 0, []
        for weight, part in zip(self.weights, parts, strict=True):
            shared.append(whole[begin : begin + len(part)].view(weight.dtype).view(weight.shape))
            begin += _padded(part)
        self.weights = shared

    def close(self) -> None:
        """Remove the file unless another process uses it. The tensors can still be used."""
        if self._close is not None:
            self._close()


def remove_unused(folder: Path = MEMORY) -> None:
    """Remove files that killed processes left behind."""
    for path in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's file, or just removed
            _let_go(path, _open(path, os.O_RDONLY))


def _node() -> str:
    """The NUMA node of this process's first core; replicas on other nodes have their own copy."""
    cpu = Path(f"/sys/devices/system/cpu/cpu{min(os.sched_getaffinity(0))}")
    return min((node.name for node in cpu.glob("node*")), default="node0")


def _padded(part: Tensor) -> int:
    return -(-len(part) // ALIGNED) * ALIGNED


def _open(path: Path, flags: int) -> int:
    """Open a file of this user without blocking. Raises OSError, for another user's file too: its
    locks could block.
    """
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    found = os.fstat(file)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return file
    os.close(file)
    raise PermissionError(errno.EPERM, "belongs to another user", str(path))


def _found_or_written(path: Path, parts: Sequence[Tensor]) -> int:
    """The open file, locked as in use. One process writes it while the others wait. Raises
    OSError.
    """
    begun = path.with_name(f"{path.name}.new")
    while True:
        with suppress(FileNotFoundError):
            file = _open(path, os.O_RDONLY)
            fcntl.flock(file, fcntl.LOCK_SH)
            if _is_at(path, file):
                return file
            os.close(file)  # removed before this process had the lock
            continue
        file = _open(begun, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # else another process has finished it, or failed
            if _is_at(begun, file) and not path.exists():
                _write(file, parts)
                begun.rename(path)
        # another process writes it; to wait for LOCK_EX is to wait for all that then use it
        except BlockingIOError:
            time.sleep(AGAIN_S)
        finally:
            _let_go(begun, file)


def _write(file: int, parts: Sequence[Tensor]) -> None:
    os.ftruncate(file, 0)  # the process that began it may have been killed
    with os.fdopen(os.dup(file), "wb") as written:
        for part in parts:
            written.write(part.numpy().data)
            written.write(bytes(_padded(part) - len(part)))


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _let_go(path: Path, file: int) -> None:
    """Close the file, and remove it if no other process has it open.

    A process that opens the file at that moment checks with _is_at whether it is still there.
    """
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file):
                path.unlink()
    finally:
        os.close(file)
