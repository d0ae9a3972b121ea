"""Training of a model in an experiment, which can be resumed."""

import itertools
import json
import math
import statistics
import time
from abc import ABC, abstractmethod
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..files import load_state, save_state, undamaged
from .record import Record, Row, Sitting

EVERY = 50  # updates per row
SAVE_S = 30  # seconds between saves, which a kill can lose


def clock() -> float:
    """Processor seconds of all threads, without other work on the machine; on a GPU, wall-clock
    seconds.
    """
    return time.perf_counter() if torch.get_default_device().type == "cuda" else time.process_time()


class Learner(ABC):
    """A model and its optimiser after some updates. The data and hashes of an update depend only on
    seed and number.
    """

    # of each update: columns of the table `learning`
    measures: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    largest_gradient = math.inf  # norm to which longer gradients of an update are scaled

    def __init__(
        self,
        net: nn.Module,
        settings: Any,
        updates: int,
        optimizer: Any = torch.optim.RAdam,
    ) -> None:
        """settings: with learning_rate and seed · updates: how many there are in all."""
        self.net, self.settings, self.updates = net, settings, updates
        self.optimizer = optimizer(net.parameters(), lr=settings.learning_rate)
        self.update, self.seconds = 0, 0.0
        self.pending: list[tuple[float, ...]] = []  # measures of the updates since the last row

    @abstractmethod
    def measure(self) -> tuple[Tensor, ...]:
        """The measures of this update; the first one is the loss, to be minimised."""

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """The learning rate of this update."""

    def step(self) -> None:
        began = clock()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        torch.manual_seed(self.settings.seed * 2**32 + self.update)  # for the hashing
        loss, *others = self.measure()
        self.optimizer.zero_grad()
        loss.backward()
        if math.isfinite(self.largest_gradient):
            nn.utils.clip_grad_norm_(self.net.parameters(), self.largest_gradient)
        self.optimizer.step()
        self.pending.append((float(loss.detach()), *map(float, others)))
        if not math.isfinite(self.pending[-1][0]):
            raise FloatingPointError(
                f"the loss is not a number at update {self.update}; try a lower --learning-rate "
                "and another --out"
            )
        self.update += 1
        self.seconds += clock() - began

    def save(self, path: Path, identity: str) -> None:
        """identity: of the experiment, the only one that may resume from this save."""
        state = {
            "identity": identity,
            "update": self.update,
            "seconds": self.seconds,
            "pending": self.pending,
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        save_state(path, state)

    def resume(self, path: Path, identity: str) -> None:
        """Continue from a save. Raises ValueError if it is damaged or belongs to another
        experiment.
        """
        raw = path.read_bytes()
        again = f"delete it, and the training of {path.stem} starts again"
        with undamaged(path, again):
            state = load_state(raw)
            same = state["identity"] == identity
            if same:
                self.net.load_state_dict(state["net"])
                self.optimizer.load_state_dict(state["optimizer"])
                self.update, self.seconds = int(state["update"]), float(state["seconds"])
                self.pending = [tuple(map(float, measures)) for measures in state["pending"]]
        if not same:
            raise ValueError(f"{path} belongs to an experiment with other settings; {again}")


def learn(
    kind: str, learner: Learner, record: Record, sitting: Sitting, *, save_s: float = SAVE_S
) -> bool:
    """Train until all updates are done or the sitting is over; return whether they are done.

    kind: its name in the rows of the table `learning` and in the name of the save. Continues from
          the save, if any.
    """
    path, rows = record.side / f"{kind}.pt", record.tables["learning"]
    identity = json.dumps([kind, record.experiment, record.settings])
    if path.exists():
        learner.resume(path, identity)
    rows[:] = [row for row in rows if row["kind"] != kind or row["update"] <= learner.update]

    def keep() -> None:
        # rows first: a resume drops the rows after the saved weights, and makes them again
        record.save()
        learner.save(path, identity)

    saved, begun = time.monotonic(), learner.update
    with tqdm(total=learner.updates, initial=begun, desc=kind, unit="update", disable=None) as bar:
        while learner.update < learner.updates and not sitting.over:
            learner.step()
            bar.update()
            if len(learner.pending) == EVERY or learner.update == learner.updates:
                means = np.mean(learner.pending, 0).tolist()
                record.add(
                    "learning",
                    kind=kind,
                    update=learner.update,
                    seconds=learner.seconds,
                    **dict(zip(learner.measures, means, strict=True)),
                )
                bar.set_postfix(loss=f"{means[0]:.4f}")
                learner.pending = []
            if time.monotonic() - saved > save_s:
                keep()
                saved = time.monotonic()
    keep()
    return learner.update >= learner.updates


def update_s(curve: list[Row]) -> float:
    """Seconds per update, the median over the rows of one kind, since the first row, and the first
    after each resume, include compilation."""
    ends = [(0, 0.0), *((int(row["update"]), float(row["seconds"])) for row in curve)]
    return statistics.median(
        (later - sooner) / (end - begin)
        for (begin, sooner), (end, later) in itertools.pairwise(ends)
    )


def check_numbers(settings: Any) -> None:
    """Raise ValueError if settings of these experiments cannot work."""
    for field in fields(settings):
        value, least = getattr(settings, field.name), 0 if field.name in ("drop", "seed") else 1
        if type(value) is int and not least <= value < 2**31:
            raise ValueError(f"{field.name} must be at least {least} and below 2^31, got {value}")
    if not 0 < settings.learning_rate < math.inf:
        raise ValueError(f"learning_rate must be above 0, got {settings.learning_rate}")
    if settings.width % settings.heads:
        raise ValueError(
            f"width must be a multiple of heads ({settings.heads}), got {settings.width}"
        )
