"""Folders of checkpoints: where they are, what they are called, and how one is replaced."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from .attention import attention_for
from .provenance import CheckpointError, config_of

# the default model, the first of these that exists
_FIRST = ("mnist", "mnist-conditional", "mnist-small")


def find(name: str | Path | None, checkpoints: str | Path | None = None) -> Path:
    """The folder of MODEL: a name under checkpoints, or a folder; None: of the default model.
    Raises CheckpointError, listing the names.
    """
    if name is None:
        at = root(checkpoints)
        drawing = (path for path in under(at) if attention_for(config_of(path)).steps_as)
        if (first := next(drawing, None)) is None:
            raise CheckpointError(
                f"{at} holds no checkpoint that draws images; give another folder"
                " with --checkpoints, or train a model with linpix train"
            )
        return first
    if not isinstance(name, str | Path):
        raise CheckpointError(
            f"model must be a name or a folder, and comes first; got a {type(name).__name__}"
        )
    name = str(name)
    if "/" in name or name in (".", ".."):
        if not Path(name).is_dir():
            raise CheckpointError(f"there is no checkpoint folder {name}")
        return Path(name)
    if Path(name).is_dir() and (Path(name) / "SHA256SUMS").exists():
        return Path(name)
    at = root(checkpoints)
    if not name or not (at / name).is_dir():
        there = ", ".join(path.name for path in under(at)) or "none"
        raise CheckpointError(
            f"there is no model {name!r} in {at}, which has: {there}. Give one of these names, or a"
            " checkpoint folder"
        )
    return at / name


def root(checkpoints: str | Path | None) -> Path:
    """The folder in which names are looked up: the given one, else checkpoints/ of the checkout."""
    if checkpoints is None:
        found = Path(__file__).resolve().parent.parent / "checkpoints"
        if not found.is_dir():
            raise CheckpointError(
                "this LinPix is installed without its source tree, so it has no checkpoints of its "
                "own; give their folder with --checkpoints DIR"
            )
        return found
    found = Path(checkpoints)
    if not found.is_dir():
        raise CheckpointError(
            f"{found} is not a folder; give the folder of checkpoints as --checkpoints"
        )
    return found


def name_of(folder: Path) -> str:
    """The last part of a folder's path. A link is not followed, since its target may change."""
    return Path(os.path.abspath(folder)).name


def under(root: Path) -> list[Path]:
    """The checkpoint folders under root: the default model's first, all others sorted by name.

    Folders that a save or a training run keeps beside them are left out, as are folders that this
    process may not enter, such as a volume's lost+found.
    """
    found = []
    for path in sorted(root.iterdir()):
        beside = path.suffix in (".new", ".old", ".training")
        if not beside and os.path.isfile(path / "config.json"):
            found.append(path)
    first = [root / name for name in _FIRST if root / name in found]
    return first + [path for path in found if path not in first]


def unfinished(folder: Path) -> list[Path]:
    """What there is of a folder: itself, and what a save in progress, or an interrupted one, has
    beside it.
    """
    return [path for path in (folder, *_beside(folder)) if path.is_dir()]


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder, to be made in the block, which then replaces `folder`; after an error, as of a
    full disk, it is removed.
    """
    new, old = _beside(folder)
    # an earlier save was interrupted between its two renames
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(new, ignore_errors=True)
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    for path in new.iterdir():
        # whatever the umask is: a service may run as another user
        path.chmod(0o644)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    """Temporary places: of the new folder until it is complete, and of the old one until the new
    one is renamed.
    """
    return folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
