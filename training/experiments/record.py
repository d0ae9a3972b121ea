"""The record of an experiment on disk: tables of results so far, their circumstances, plot and
summary.
"""

import csv
import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from linpix.model import provenance
from linpix.model.machine import processor_name

from ..files import put, undamaged
from ..plots import svg
from ..run import stop_signals

VERSION = 1
Row = dict[str, Any]


class Sitting:
    """One sitting of a long job. It is over after its minutes, or after a first SIGTERM or SIGINT.

    A second signal of the same kind has its default effect.
    """

    def __init__(self, max_minutes: float = math.inf) -> None:
        self._began, self._max_minutes = time.monotonic(), max_minutes
        self._received = stop_signals()

    @property
    def stop_requested(self) -> bool:
        """Whether a signal has asked to stop."""
        return bool(self._received)

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self._began) / 60

    @property
    def over(self) -> bool:
        return self.stop_requested or self.minutes >= self._max_minutes


class Record:
    """The folder of one experiment. Tables are lists of rows in memory and CSV files after save."""

    def __init__(
        self, folder: Path, experiment: str, settings: Any, tables: Mapping[str, tuple[str, ...]]
    ) -> None:
        """Read the folder, if it has content. Raises ValueError if it is not of this experiment
        with these settings.
        """
        self.folder, self.experiment, self.columns = folder, experiment, tables
        self.settings = json.loads(json.dumps(dataclasses.asdict(settings)))
        self.complete, self.sittings = False, list[Row]()
        self.tables: dict[str, list[Row]] = {name: [] for name in tables}
        self._sitting: Sitting | None = None
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out {folder} is a file; give a folder")
        if folder.is_dir() and any(folder.iterdir()):
            self._read()

    @property
    def side(self) -> Path:
        """The folder with the state to resume from; removed when the experiment is complete."""
        return self.folder.with_name(self.folder.name + ".training")

    def begin(self, command: str, sitting: Sitting) -> None:
        """Add a sitting with its command, commit and machine, and create the folder."""
        self._sitting = sitting
        self.sittings.append(
            {"command": command, "commit": provenance.commit(), **machine(), "minutes": 0.0}
        )
        self.side.mkdir(parents=True, exist_ok=True)
        self.save()

    def add(self, table: str, **values: Any) -> None:
        """Add a row, rounded as in the file, so that results computed from it are the same after a
        resume.
        """
        assert tuple(values) == self.columns[table], (table, values)
        self.tables[table].append(
            {column: _value(_text(value)) for column, value in values.items()}
        )

    def save(self) -> None:
        """Write tables and circumstances. Each file is replaced atomically."""
        if self._sitting is not None:
            self.sittings[-1]["minutes"] = round(self._sitting.minutes, 2)
        self.folder.mkdir(parents=True, exist_ok=True)
        facts = {
            "version": VERSION,
            "experiment": self.experiment,
            "settings": self.settings,
            "complete": self.complete,
            "sittings": self.sittings,
        }
        self._replace("experiment.json", json.dumps(facts, indent=2) + "\n")
        for name, rows in self.tables.items():
            text = ",".join(self.columns[name]) + "\n"
            for row in rows:
                text += ",".join(map(_text, row.values())) + "\n"
            self._replace(f"{name}.csv", text)

    def publish(self, draw: Callable[[Any], None], summary: str) -> None:
        """Rewrite plot.svg and summary.md. If the experiment is complete, remove the folder
        `side`.
        """
        put(self.folder / "plot.svg", svg(draw))
        state = "" if self.complete else "\n**Not complete yet: the same command continues it.**\n"
        self._replace(
            "summary.md",
            f"# {self.experiment}\n{state}\n{summary.strip()}\n\n![plot](plot.svg)\n\n"
            f"{self.circumstances()}\n",
        )
        if self.complete:
            shutil.rmtree(self.side, ignore_errors=True)

    def circumstances(self) -> str:
        """Settings, machine, commit and command, as Markdown."""

        def each(name: str) -> str:
            return ", ".join(dict.fromkeys(str(sitting[name]) for sitting in self.sittings))

        settings = ", ".join(f"{name} {_shown(value)}" for name, value in self.settings.items())
        minutes = sum(sitting["minutes"] for sitting in self.sittings)
        command = self.sittings[-1]["command"] if self.sittings else ""
        return (
            f"Settings: {settings}.\n\nMachine: {each('machine')}; torch {each('torch')},"
            f" {each('threads')} threads; commit {each('commit')}; {minutes:.0f} minutes in"
            f" {len(self.sittings)} sitting{'s' * (len(self.sittings) != 1)}; `{command}`"
        )

    def _replace(self, name: str, text: str) -> None:
        put(self.folder / name, text.encode())

    def _read(self) -> None:
        path = self.folder / "experiment.json"
        if not path.exists():
            raise ValueError(f"--out {self.folder} exists and has no experiment; give a new folder")
        with undamaged(path, "restore it, or give another --out"):
            facts = json.loads(path.read_text())
            other = facts | facts["settings"]
            self.complete, self.sittings = bool(facts["complete"]), list(facts["sittings"])
            self.circumstances()
        identity = {"version": VERSION, "experiment": self.experiment, **self.settings}
        for name, mine in identity.items():
            if other.get(name) != mine:
                raise ValueError(
                    f"--out {self.folder} has an experiment with {name} {_shown(other.get(name))},"
                    f" and this one has {_shown(mine)}; use the same settings, or give another"
                    " --out"
                )
        for name, columns in self.columns.items():
            self.tables[name] = self._read_table(self.folder / f"{name}.csv", columns)

    def _read_table(self, path: Path, columns: tuple[str, ...]) -> list[Row]:
        try:
            header, *lines = list(csv.reader(path.read_text().splitlines()))
            if tuple(header) != columns:
                raise ValueError(f"its columns are {', '.join(header)}, not {', '.join(columns)}")
            return [dict(zip(columns, map(_value, line), strict=True)) for line in lines]
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path} is damaged ({error}); restore it, or give another --out"
            ) from error


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> dict[str, Any]:
    """The machine of this process: processor or GPU, torch version, and number of threads."""
    name = processor_name()
    if torch.get_default_device().type == "cuda":
        name = f"{torch.cuda.get_device_name()}, {name}"
    return {
        "machine": f"{name}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _value(text: str) -> Any:
    """The value that _text has formatted: a number if the text reads like one; None if it is
    empty.
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
