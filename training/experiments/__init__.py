"""Experiments from the two papers: the interface of an experiment, and how one is conducted.

Each experiment is a module here, named like the command's argument, with a subclass of Experiment
called Study. Its folder holds tables (CSV), plot.svg, summary.md and experiment.json.
`FOLDER.training` holds the state to resume from.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..plots import can_plot
from .record import Record, Row, Sitting

ExperimentName = Literal["scaling", "copy", "duplication", "speech"]


def check_kinds(kinds: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless each kind is in allowed, where lsh-ROUNDS stands for lsh-1, lsh-2 and
    so on.
    """
    for kind in kinds:
        base, _, rounds = kind.partition("-")
        hashed = (
            base == "lsh" and rounds.isdecimal() and int(rounds) > 0 and "lsh-ROUNDS" in allowed
        )
        if not hashed and kind not in set(allowed) - {"lsh-ROUNDS"}:
            raise ValueError(f"kinds must be a list from {', '.join(allowed)}; got {kind!r}")
    if not kinds or len(set(kinds)) < len(kinds):
        raise ValueError(
            f"kinds must have at least one entry, and none twice; got {', '.join(kinds) or 'none'}"
        )


def attention_of(kind: str) -> dict[str, Any]:
    """The fields of ModelConfig for a kind, where lsh-4 stands for four rounds of lsh."""
    attention, _, rounds = kind.partition("-")
    if not rounds.isdecimal():
        return {"attention": attention}
    return {"attention": attention, "lsh_rounds": int(rounds)}


class Experiment(ABC):
    """One experiment with one set of settings. All its results are stored in its record, and read
    from there.
    """

    settings_type: ClassVar[type[Any]]  # a frozen dataclass, each field with a text for --help
    quick_form: ClassVar[Mapping[str, Any]]  # those settings that --quick changes: it takes minutes
    tables: ClassVar[Mapping[str, tuple[str, ...]]]  # names and columns

    def __init__(self, settings: Any, record: Record) -> None:
        self.settings, self.record = settings, record

    def rows(self, table: str, kind: str) -> list[Row]:
        """The results so far of one kind of attention."""
        return [row for row in self.record.tables[table] if row["kind"] == kind]

    @abstractmethod
    def work(self, sitting: Sitting) -> bool:
        """Add missing results until the record is complete or the sitting is over; return whether
        it is complete.
        """

    @abstractmethod
    def draw(self, figure: Any) -> None:
        """Plot the results so far on a matplotlib figure."""

    @abstractmethod
    def summary(self) -> str:
        """The results so far, as Markdown: the method, the figures, and the paper's figures if it
        has any.
        """


def study(name: str) -> type[Experiment]:
    """The class of an experiment."""
    found: type[Experiment] = import_module(f"linpix.training.experiments.{name}").Study
    return found


def conduct(
    name: ExperimentName, settings: Any, folder: Path, *, command: str, max_minutes: float
) -> bool:
    """Begin or continue an experiment; return whether it is complete. Plot and summary are written
    in any case.

    Raises ValueError if folder is damaged, or holds anything but this experiment with these
    settings.
    """
    if not can_plot():
        raise ValueError(
            "experiments need matplotlib for their plots, and it is not installed; run: pip install"
            " '.[train]' in the folder of LinPix"
        )
    kind = study(name)
    record = Record(folder, name, settings, kind.tables)
    experiment = kind(settings, record)
    if not record.complete:
        sitting = Sitting(max_minutes)
        record.begin(command, sitting)
        record.complete = experiment.work(sitting)
        record.save()
    record.publish(experiment.draw, experiment.summary())
    return record.complete
