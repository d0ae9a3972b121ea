"""Models that learn to repeat a word of symbols: the task, the transformer, and training that can
be resumed.
"""

import itertools
import json
import math
import statistics
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from linpix.model.attention import attention_for
from linpix.model.config import ModelConfig
from linpix.model.nets import layer_for

from ..files import load_state, save_state, undamaged
from ..loop import can_compile, compiled
from .record import Record, Row, Sitting

# columns of the table that learn fills; seconds: see clock
FIELDS = ("kind", "update", "seconds", "loss", "accuracy")
EVERY = 50  # updates per row
SAVE_S = 30  # seconds between saves, which a kill can lose


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplication:
    """Sequences 0 w 0 w, where w is a word of uniformly drawn symbols (Reformer, section 2.1)."""

    word: int  # symbols in w
    symbols: int  # symbols of w are 1..symbols; 0 separates

    @property
    def length(self) -> int:
        return 2 * (self.word + 1)

    @property
    def floor(self) -> float:
        """Loss in nats per token of a perfect model, over all tokens but the first: the first word
        is unpredictable.
        """
        return self.word * math.log(self.symbols) / (self.length - 1)

    def batch(self, count: int, *key: int) -> Tensor:
        """Sequences (count, length) int64, determined by key."""
        word = np.random.default_rng(key).integers(1, self.symbols + 1, (count, self.word))
        half = np.pad(word, ((0, 0), (1, 0)))
        return torch.from_numpy(np.concatenate([half, half], 1)).to(torch.get_default_device())


class TokenModel(nn.Module):
    """A transformer over a sequence of symbols, which predicts the next symbol given all earlier
    ones.
    """

    def __init__(self, config: ModelConfig, task: Duplication) -> None:
        """config: for the layers; its image shape is not used here."""
        super().__init__()
        self.task, self.attention = task, attention_for(config)
        self.symbols = nn.Embedding(task.symbols + 1, config.d_model)
        self.positions = nn.Embedding(task.length, config.d_model)
        self.layers = nn.ModuleList(layer_for(config)(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, task.symbols + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token after each token. tokens: (B, T) int64; returns (B, T, symbols +
        1).
        """
        x = self.symbols(tokens) + self.positions.weight[: tokens.shape[1]]
        for index, layer in enumerate(self.layers):
            x = layer(x, index, self._attend)
        return self.head(self.norm(x))

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention.parallel(layer, q, k, v, training=True)  # lsh: new hashes each time

    def score(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss in nats and accuracy over the second half, which can be predicted."""
        half = self.task.length // 2
        logits, targets = self(tokens)[:, half - 1 : -1].flatten(0, 1), tokens[:, half:].flatten()
        return F.cross_entropy(logits, targets), (logits.argmax(-1) == targets).double().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of the training: RAdam, with a tenth of the learning rate after `drop` updates."""

    updates: int
    drop: int  # updates at the full learning rate
    batch: int
    learning_rate: float
    seed: int
    compile: bool


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
        recipe: Recipe,
        optimizer: type[torch.optim.Optimizer] = torch.optim.RAdam,
    ) -> None:
        self.net, self.recipe = net, recipe
        self.optimizer = optimizer(net.parameters(), lr=recipe.learning_rate)  # type: ignore[call-arg]
        self.update, self.seconds = 0, 0.0
        self.pending: list[tuple[float, ...]] = []  # measures of the updates since the last row

    @abstractmethod
    def measure(self) -> tuple[Tensor, ...]:
        """The measures of this update; the first one is the loss, to be minimised."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of this update."""
        return self.recipe.learning_rate * (1.0 if self.update < self.recipe.drop else 0.1)

    def step(self) -> None:
        began = clock()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        torch.manual_seed(self.recipe.seed * 2**32 + self.update)  # for the hashing
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


class WordLearner(Learner):
    """Learns to say words again."""

    net: TokenModel

    def __init__(self, config: ModelConfig, task: Duplication, recipe: Recipe) -> None:
        torch.manual_seed(recipe.seed)
        super().__init__(TokenModel(config, task), recipe)
        self.score = self.net.score
        if recipe.compile and can_compile():
            self.score = compiled(self.net.score)

    def measure(self) -> tuple[Tensor, ...]:
        recipe = self.recipe
        return self.score(self.net.task.batch(recipe.batch, recipe.seed, 0, self.update))


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

    saved, recipe = time.monotonic(), learner.recipe
    with tqdm(
        total=recipe.updates,
        initial=learner.update,
        desc=kind,
        unit="update",
        disable=not sys.stderr.isatty(),
    ) as bar:
        while learner.update < recipe.updates and not sitting.over:
            learner.step()
            bar.update()
            if len(learner.pending) == EVERY or learner.update == recipe.updates:
                means = [
                    sum(part) / len(learner.pending) for part in zip(*learner.pending, strict=True)
                ]
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
    return learner.update >= recipe.updates


def update_s(curve: list[Row]) -> float:
    """Seconds per update, the median over the rows of one kind, since the first row, and the first
    after each resume, include compilation."""
    ends = [(0, 0.0), *((int(row["update"]), float(row["seconds"])) for row in curve)]
    return statistics.median(
        (later - sooner) / (end - begin)
        for (begin, sooner), (end, later) in itertools.pairwise(ends)
    )


def kind_config(kind: str, task: Duplication, *, chunk: int, **sizes: Any) -> ModelConfig:
    """The layers' configuration for a kind by its name in the papers: linear, softmax, full, or
    lsh-ROUNDS.

    full: softmax attention with shared queries and keys, which is lsh with one bucket and one
    chunk. The number of buckets of lsh follows the Reformer's rule: a chunk is twice the average
    size of a bucket (section 2).
    """
    base, _, rounds = kind.partition("-")
    hashing = {
        "lsh_rounds": int(rounds or 1),
        "lsh_chunk": chunk,
        "lsh_buckets": max(2, 2 * round(task.length / chunk)),
    }
    if base == "full":
        base, hashing = "lsh", {"lsh_rounds": 1, "lsh_chunk": task.length, "lsh_buckets": 1}
    return ModelConfig(height=1, width=task.length, attention=base, **hashing, **sizes)  # type: ignore[arg-type]


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
