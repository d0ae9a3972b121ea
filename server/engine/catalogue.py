"""The models to serve: finds their checkpoints, reads them, gives them slots, and reads them again
on SIGHUP.
"""

import asyncio
import logging
from pathlib import Path
from typing import get_args

from linpix.model import checkpoint, folders, plugins, provenance
from linpix.model.attention import attention_for
from linpix.model.checkpoint import Checkpoint
from linpix.model.choice import choose
from linpix.model.config import AttentionKind, ModelConfig
from linpix.model.provenance import CheckpointError

from ..memory import free_bytes
from ..settings import Settings
from .admission import Admission
from .decode.choice import new_decoder
from .decode.engine import Engine
from .decode.faults import Faults, with_faults
from .request import Requests

logger = logging.getLogger("linpix")


class Catalogue:
    """The checkpoints that the settings name, as engines."""

    def __init__(self, settings: Settings, *, share: bool = False) -> None:
        """share: whether other processes on this machine serve the same models."""
        self._settings, self._share = settings, share
        self._faults = Faults(settings.faults) if settings.faults else None
        plugins.load(settings.plugin)

    def read(self) -> dict[str, Engine]:
        """An engine per model, the default one first. Raises CheckpointError or ValueError with the
        cure.
        """
        found: dict[str, Engine] = {}
        for folder in self._folders():
            if (name := folders.name_of(folder)) in found:
                raise CheckpointError(
                    f"two models have the name {name}; rename one of their folders"
                )
            if (engine := self._engine(folder)) is not None:
                found[name] = engine
        if not found:
            raise CheckpointError(
                f"{folders.root(self._settings.checkpoints)} holds no checkpoint that draws "
                "images; give another folder with --checkpoints, or train a model with linpix train"
            )
        return found

    def check(self) -> None:
        """Raise CheckpointError or ValueError, with the cure, if there is nothing to read. Reads no
        weights.
        """
        for folder in self._folders():
            _config_of(folder)

    async def reload(self, requests: Requests, admission: Admission) -> None:
        """Serve what the folders hold now; digests show what has changed. On the event loop, but
        reads in a thread.

        A checkpoint is read while the model before it is served, and replaces it once it is
        complete. One that cannot be served is refused, and the model of its name goes on.
        """
        try:
            present = await asyncio.to_thread(self._present)
        except (OSError, ValueError) as error:
            self._refuse(admission, f"the models that are served do not change: {error}")
            return
        serving = {name: model.engine for name, model in admission.models.items()}
        default = next(iter(serving))
        for name, folder in present.items():
            served = serving.get(name)
            try:
                fresh = await asyncio.to_thread(self._engine, folder, served)
            except Exception as error:
                known = isinstance(error, (OSError, ValueError))
                self._refuse(
                    admission,
                    f"{name}: {error}" + ("; the loaded one is kept" if served else ""),
                    exc_info=not known,
                )
                continue
            if requests.draining or admission.gone:
                return
            outcome = "unchanged"
            if fresh is not None:
                outcome = "replaced" if served else "added"
                serving[name] = fresh
                order = [*present, *serving]
                serving = {other: serving[other] for other in order if other in serving}
                admission.serve(serving)
                digest = fresh.decoder.checkpoint.digest[:16]
                logger.warning("SIGHUP: %s is %s: checkpoint %s", name, outcome, digest)
            admission.metrics.reloads.labels(outcome).inc()
        self._remove(admission, serving, [name for name in serving if name not in present])
        if (now := next(iter(admission.models))) != default:
            logger.warning("SIGHUP: the default model is now %s; before, it was %s", now, default)

    def _remove(self, admission: Admission, serving: dict[str, Engine], gone: list[str]) -> None:
        none_left = len(gone) == len(serving)
        for name in gone:
            folder = admission.models[name].checkpoint.folder
            if left := folders.unfinished(folder):
                self._refuse(
                    admission,
                    f"{name} is kept: {folder} has no readable config.json but contains {left[0]}, "
                    "so it is still being written, or a save was interrupted; send SIGHUP again "
                    "when it is complete",
                )
            elif none_left:
                self._refuse(
                    admission,
                    f"{name} is kept: {folder} does not exist, but without it no model would be "
                    f"left; put a valid checkpoint into {folder.parent}, and send SIGHUP again",
                )
            else:
                del serving[name]
                admission.serve(serving)
                logger.warning("SIGHUP: %s was removed", name)
                admission.metrics.reloads.labels("removed").inc()

    def _refuse(self, admission: Admission, why: str, *, exc_info: bool = False) -> None:
        logger.error("SIGHUP: refused: %s", why, exc_info=exc_info)
        admission.metrics.reloads.labels("refused").inc()

    def _present(self) -> dict[str, Path]:
        """Folders by model, the default one first; models named by --models that are missing are
        left out.
        """
        found: dict[str, Path] = {}
        for folder in self._folders(missing=True):
            if (other := found.setdefault(folders.name_of(folder), folder)) != folder:
                logger.error(
                    "SIGHUP: %s was not loaded, because %s has the same name; rename one of them",
                    folder,
                    other,
                )
        return found

    def _engine(self, folder: Path, served: Engine | None = None) -> Engine | None:
        """The model of a folder; None if it is the one served, or if its attention draws no images
        (ValueError if it is named, or would replace one). Raises ValueError with the cure.
        """
        if served is not None and checkpoint.digest_of(folder) == served.decoder.checkpoint.digest:
            return None
        settings, config = self._settings, _config_of(folder)
        if not attention_for(config).steps_as:
            if settings.models or served is not None:
                raise ValueError(
                    f"{folders.name_of(folder)} has {config.attention} attention, which cannot"
                    " draw images; leave it out of --models"
                )
            return None
        loaded = checkpoint.read(folder)
        linear, fixed = loaded.net.config.attention == "linear", loaded.net.attention.fixed_state
        slots = settings.slots if fixed else min(settings.slots, settings.softmax_slots)
        # others have no compiled engine: these settings are meant for the linear models beside it
        wanted = (settings.engine, settings.precision) if linear else ("auto", "auto")
        device, state = (settings.device, settings.state) if linear else ("cpu", "fp32")
        try:
            chosen = choose(loaded.net.config, *wanted, device)
            if chosen.device == "cpu":
                shadowed = fixed and chosen.engine == "eager"  # see Decoder.keep
                _check_memory(loaded, slots, shadowed=shadowed)
            decoder = new_decoder(
                loaded, slots, *wanted, device=device, state=state, share=self._share
            )
            decoder.fill_freed_with_nan = settings.poison
        except ValueError as error:
            raise ValueError(
                f"{loaded.name}: {error}; or leave the model out with --models"
            ) from error
        engine = Engine(with_faults(decoder, self._faults) if self._faults else decoder)
        if config.attention not in get_args(AttentionKind):
            _check_plugin(engine)
        return engine

    def _folders(self, *, missing: bool = False) -> list[Path]:
        """missing: whether named models may be missing, and there may be no model at all."""
        settings = self._settings
        if settings.models:
            found = []
            for name in settings.models.split(","):
                try:
                    found.append(folders.find(name, settings.checkpoints))
                except CheckpointError:
                    if not missing:
                        raise
            return found
        root = folders.root(settings.checkpoints)
        found = folders.under(root)
        if not found and not missing:
            raise CheckpointError(
                f"{root} holds no checkpoint; give another folder with --checkpoints, or train a "
                "model with linpix train"
            )
        return found


def _check_plugin(engine: Engine) -> None:
    """Raises ValueError if a kind from outside the project cannot draw: at load, where it ends
    nothing else.
    """
    try:
        engine.draw_test_image(1)
    except Exception as error:
        kind = engine.decoder.config.attention
        raise ValueError(
            f"{engine.name}: {kind} attention raised {type(error).__name__} in its first step:"
            f" {error}; correct its plugin, or leave the model out with --models"
        ) from error


def _config_of(folder: Path) -> ModelConfig:
    """The architecture of a model whose name answers and metrics can have. Raises
    CheckpointError.
    """
    name = folders.name_of(folder)
    if provenance.HALF_A_PAIR.search(name):
        raise CheckpointError(
            f"a model's name must be UTF-8, since answers have it, got {name!a}; rename its folder"
        )
    return provenance.config_of(folder)


def _check_memory(source: Checkpoint, slots: int, *, shadowed: bool) -> None:
    """Raise ValueError if slots do not fit into memory. shadowed: whether each needs room for a
    copy as well.
    """
    attention = source.net.attention
    needed, free = (1 + shadowed) * attention.state_bytes * (slots + 1), free_bytes()
    if needed > free:
        flag = "--slots" if attention.fixed_state else "--softmax-slots"
        raise ValueError(
            f"{slots} slots take {needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB are"
            f" free; lower {flag}"
        )
