"""Models that learn to repeat a word of symbols: the task, the transformer, and what the
experiments copy and duplication share.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linpix.model.attention import attention_for
from linpix.model.config import ModelConfig
from linpix.model.transformer import Layer

from ..loop import can_compile, compiled
from ..run import setting
from . import Experiment, attention_of
from .learning import Learner, learn
from .record import Sitting

# columns of the table that learn fills; seconds: see learning.clock
FIELDS = ("kind", "update", "seconds", "loss", "accuracy")


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
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
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


class WordLearner(Learner):
    """Learns to say words again."""

    net: TokenModel

    def __init__(self, kind: str, settings: "WordSettings") -> None:
        torch.manual_seed(settings.seed)
        net = TokenModel(settings.config(kind), settings.task)
        super().__init__(net, settings, settings.updates)
        self.score = net.score
        if settings.compile and can_compile():
            self.score = compiled(net.score)

    def measure(self) -> tuple[Tensor, ...]:
        s = self.settings
        return self.score(s.task.batch(s.batch, s.seed, 0, self.update))

    @property
    def learning_rate(self) -> float:
        """A tenth after `drop` updates."""
        return self.settings.learning_rate * (1.0 if self.update < self.settings.drop else 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WordSettings:
    """Settings of both experiments; each has its own defaults for those without one here."""

    updates: int
    drop: int  # updates at the full learning rate of RAdam
    batch: int = setting(64, "sequences per update")
    learning_rate: float
    seed: int = setting(
        0, "seed of initial weights, words and hashing; the same for every kind of attention"
    )
    compile: bool = setting(True, "use torch.compile where there is a C++ compiler")
    kinds: tuple[str, ...]
    word: int
    symbols: int
    heads: int
    width: int
    chunk: int

    @property
    def task(self) -> Duplication:
        return Duplication(word=self.word, symbols=self.symbols)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of layers, and the width of their feed-forward part."""
        raise NotImplementedError

    def config(self, kind: str) -> ModelConfig:
        """The layers' configuration for a kind by its name in the papers: linear, softmax, full, or
        lsh-ROUNDS.

        full: softmax attention with shared queries and keys, which is lsh with one bucket and one
        chunk. The number of buckets of lsh follows the Reformer's rule: a chunk is twice the
        average size of a bucket (section 2).
        """
        (layers, d_ff), length, size = self.sizes, self.task.length, self.width // self.heads
        chunk, buckets = self.chunk, max(2, 2 * round(length / self.chunk))
        if kind == "full":
            kind, chunk, buckets = "lsh", length, 1
        return ModelConfig(
            height=1,
            width=length,
            layers=layers,
            heads=self.heads,
            key_dim=size,
            value_dim=size,
            d_model=self.width,
            d_ff=d_ff,
            lsh_chunk=chunk,
            lsh_buckets=buckets,
            **attention_of(kind),
        )


class WordStudy(Experiment):
    """Every kind sees the same sequences in the same order, and begins with weights of the same
    seed.
    """

    settings: WordSettings

    def work(self, sitting: Sitting) -> bool:
        s = self.settings
        for kind in s.kinds:
            if self.done(kind):
                continue
            learner = WordLearner(kind, s)
            if not learn(kind, learner, self.record, sitting):
                return False
            if not self.assess(kind, learner.net, sitting):
                return False
        return True

    @abstractmethod
    def done(self, kind: str) -> bool:
        """Whether all results of a kind are there."""

    def assess(self, kind: str, net: TokenModel, sitting: Sitting) -> bool:
        """Add the results of a trained model; return whether all are there."""
        return True

    def plot(self, axes: Any, column: str) -> None:
        """A column of the table `learning` by update, a line for each kind."""
        for kind in self.settings.kinds:
            curve = self.rows("learning", kind)
            updates, values = ([row[name] for row in curve] for name in ("update", column))
            axes.plot(updates, values, label=kind)
