"""Which models are served: checkpoints found, read, and given slots."""

from pathlib import Path

from model import checkpoint
from model.checkpoint import Checkpoint, CheckpointError
from model.cuda import StateFormat
from model.packing import choose
from server.backends import free_bytes
from server.batcher import Batcher
from server.engine import new_engine
from server.faults import Faults
from server.settings import Settings

_FIRST = ("mnist", "mnist-small")  # the default model, where they exist


def batchers(settings: Settings, faults: Faults | None = None) -> dict[str, Batcher]:
    """A batcher per model, the default one first. Raises CheckpointError or ValueError with the cure."""
    found: dict[str, Batcher] = {}
    form = StateFormat(precision=settings.state, defer=settings.defer)
    for folder in folders(settings):
        loaded = checkpoint.read(folder)
        if loaded.name in found:
            raise CheckpointError(f"two models are called {loaded.name}; rename one of their folders")
        if not loaded.net.attention.steps_as:
            if settings.models:
                raise ValueError(f"{loaded.name} has {loaded.net.config.attention} attention, which draws no images; "
                                 "leave it out of --models")
            continue
        linear = loaded.net.config.attention == "linear"
        slots = settings.slots if linear else min(settings.slots, settings.softmax_slots)
        # softmax has no compiled engine: what is asked for is meant for the linear models beside it
        wanted = (settings.engine, settings.precision) if linear else ("auto", "auto")
        device, state = (settings.device, form) if linear else ("cpu", None)
        try:
            chosen = choose(loaded.net.config, *wanted, device)
            if chosen.device == "cpu":
                _check_memory(loaded, slots, shadowed=linear and chosen.engine == "eager")
            engine = new_engine(loaded, slots, *wanted, device=device, state=state, poison=settings.poison)
        except ValueError as error:
            raise ValueError(f"{loaded.name}: {error}; or leave the model out with --models") from error
        found[loaded.name] = Batcher(engine, settings.max_queue, faults)
    if not found:
        raise CheckpointError(f"{checkpoint.root(settings.checkpoints)} holds no checkpoint that draws images; name "
                              "another folder with --checkpoints, or make one with linpix train")
    return found


def _check_memory(source: Checkpoint, slots: int, *, shadowed: bool) -> None:
    """shadowed: whether the slots are copied before each quantum."""
    attention = source.net.attention
    needed, free = (1 + shadowed) * attention.state_bytes * (slots + 1), free_bytes()
    if needed > free:
        flag = "--softmax-slots" if attention.steps_as == "stateful-softmax" else "--slots"
        raise ValueError(f"{slots} slots take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free; lower {flag}")


def folders(settings: Settings) -> list[Path]:
    if settings.models:
        return [checkpoint.find(name.strip(), settings.checkpoints) for name in settings.models.split(",")]
    root = checkpoint.root(settings.checkpoints)
    found = checkpoint.folders(root)
    if not found:
        raise CheckpointError(f"{root} holds no checkpoint; name another folder with --checkpoints, "
                              "or make one with linpix train")
    return sorted(found, key=lambda folder: (_FIRST.index(folder.name) if folder.name in _FIRST else 9, folder.name))

