"""The files of a run: each appears under its name only when it is complete, the state to resume
from has a digest, and a folder is written by one run at a time.
"""

import errno
import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MARK = b"\nsha256 "  # begins the end of a state, which is the digest of all before it


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """The error of the system for a file that cannot be written becomes a sentence with the
    cure.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # it is such a sentence already
            raise
        full = error.errno in _FULL
        cure = "free some space there" if full else "check the disk and the folder's permissions"
        raise OSError(
            f"{error.filename or path} cannot be written ({os.strerror(error.errno).lower()});"
            f" {cure}, and run the command again: a training continues from its last save with"
            " --resume"
        ) from error


def put(path: Path, content: bytes | memoryview) -> None:
    """Write a whole file. After an error, which is a sentence, what was there before is still
    there, and nothing else.
    """
    temporary = path.with_name(path.name + ".new")
    try:
        with writing(path):
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # or a failing machine could leave an empty file
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def save_state(path: Path, state: dict[str, Any]) -> None:
    content = io.BytesIO()  # not a file: torch's own errors for a full disk name no cure
    torch.save(state, content)
    digest = hashlib.sha256(content.getbuffer()).hexdigest()
    content.write(_MARK + digest.encode())
    put(path, content.getbuffer())


def load_state(raw: bytes) -> Any:
    """What save_state has written into a file, on the CPU. Raises one of many types of exception
    if the bytes are others.
    """
    content, _, digest = raw.rpartition(_MARK)
    if hashlib.sha256(content).hexdigest().encode() != digest:
        raise ValueError("the digest of its content is another one")
    return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")


@contextmanager
def undamaged(path: Path, cure: str) -> Iterator[None]:
    """Whatever goes wrong with what a file contains becomes a ValueError that names the file."""
    try:
        yield
    except Exception as error:  # a damaged pickle can raise any
        raise ValueError(f"{path} is damaged ({type(error).__name__}); {cure}") from error


@contextmanager
def locked(folder: Path, what: Path, cure: str) -> Iterator[None]:
    """Hold a folder, which is created, as long as the block and this process last. Raises
    ValueError if another process holds it.

    A folder that is empty afterwards is removed. There is no lock where the system or the disk has
    none: on Windows, and on some network disks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        with suppress(ImportError, OSError):
            import fcntl

            descriptor = os.open(folder, os.O_RDONLY)
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process is writing to {what}; {cure}") from None
        try:
            yield
        finally:
            with suppress(OSError):
                folder.rmdir()
