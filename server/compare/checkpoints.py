"""The weights that each backend runs: a model's, those of twins trained to be compared with it, or
random ones.
"""

import dataclasses
import json
from collections.abc import Sequence

from linpix.model import checkpoint as checkpoints
from linpix.model import folders
from linpix.model.attention import kind_of, kinds
from linpix.model.checkpoint import Checkpoint
from linpix.model.config import ModelConfig

from ..errors import InvalidRequest
from .backends import ATTENTION, backends, config_of

# What may differ between twins, beside the options of their attention
_FREE = {"attention", "twin_of", "eps", "first_marginal"}


def find_twins(checkpoint: Checkpoint) -> list[Checkpoint]:
    """The checkpoints beside this one to compare it with: its twins; or the model that it is a
    twin of, followed by the other twins of that. Raises CheckpointError if one cannot be read.
    """
    family = checkpoint.net.config.twin_of or checkpoint.name
    found: list[Checkpoint] = []
    for candidate in folders.under(checkpoint.folder.parent):
        try:
            theirs = json.loads((candidate / "config.json").read_text())["architecture"]
            related = candidate.name != checkpoint.name and family in (
                candidate.name,
                theirs.get("twin_of"),
            )
            known = theirs["attention"] in kinds()
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue  # not a checkpoint of ours, so not a twin either
        # see check_comparable
        known &= not theirs.get("patch") and theirs.get("background") is None
        if known and related:
            found.append(checkpoints.read(candidate))
    return sorted(found, key=lambda twin: twin.name != family)


def check_comparable(checkpoint: Checkpoint) -> None:
    """Raise InvalidRequest for a model that cannot be compared, whatever its twins are."""
    if checkpoint.net.config.packed:
        raise InvalidRequest(
            f"{checkpoint.name} cannot be compared: it uses patches of known pixels or skips "
            "background, which other kinds of attention cannot do; choose another model",
            param="model",
        )


def sources_of(checkpoint: Checkpoint, twins: Sequence[Checkpoint]) -> dict[str, Checkpoint | None]:
    """The checkpoint whose weights each backend runs; None: random weights. twins: see find_twins;
    the last one counts.

    A twin stands for its attention rather than the model that it is a twin of, since twins were
    trained alike. A twin that is itself compared stands for its own attention. Raises ValueError
    for a checkpoint that is not a twin, or a model that is not compared.
    """
    ours = checkpoint.net.config
    check_comparable(checkpoint)
    free = _FREE.union(*(kind_of(kind).options for kind in kinds()))
    for twin in twins:
        theirs = twin.net.config
        names = [entry.name for entry in dataclasses.fields(ours) if entry.name not in free]
        if differing := [name for name in names if getattr(ours, name) != getattr(theirs, name)]:
            raise ValueError(
                f"{twin.name} cannot be compared with {checkpoint.name}: "
                f"they differ in {', '.join(differing)}"
            )
    own = _stands_for(ours, ours)
    if not own:
        known = [fields["lsh_rounds"] for fields in ATTENTION.values() if "lsh_rounds" in fields]
        raise ValueError(
            f"{checkpoint.name} has lsh attention of {ours.lsh_rounds} rounds, which cannot be"
            " compared; choose a linear or softmax model, or one with lsh attention of"
            f" {' or '.join(map(str, known))}"
        )
    sources: dict[str, Checkpoint | None] = dict.fromkeys(backends())
    for twin in twins:
        sources |= dict.fromkeys(_stands_for(twin.net.config, ours), twin)
    return sources | {
        backend: checkpoint for backend in own if ours.twin_of or sources[backend] is None
    }


def _stands_for(theirs: ModelConfig, ours: ModelConfig) -> list[str]:
    """The backends that `theirs` is the configuration of, when the model of `ours` is compared.

    Options of attention that a backend does not set are those of `ours`.
    """
    options = {name: getattr(ours, name) for name in kind_of(theirs.attention).options}
    return [
        name
        for name in backends()
        if config_of(name, theirs)
        == theirs
        == config_of(name, dataclasses.replace(theirs, **options))
    ]
