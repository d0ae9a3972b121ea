"""Training with one number of hashing rounds, evaluation with another: table 2 of the Reformer
(section 2.1).
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from linpix.model.attention import attention_for
from linpix.model.config import ModelConfig

from ..run import setting
from . import check_kinds
from .learning import check_numbers
from .record import Sitting, table
from .words import FIELDS, TokenModel, WordSettings, WordStudy

EVALUATED = ("full", "lsh-8", "lsh-4", "lsh-2", "lsh-1")
PAPER = {  # accuracy in per cent, by trained kind, in the order of EVALUATED; lsh-8 was not trained
    "full": (100.0, 94.8, 92.5, 76.9, 52.5),
    "lsh-4": (0.8, 100.0, 99.9, 99.4, 91.9),
    "lsh-2": (0.8, 100.0, 99.9, 98.1, 86.8),
    "lsh-1": (0.8, 99.9, 99.6, 94.8, 77.9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(WordSettings):
    """Settings with shorter words than the paper's, to save time; the paper has --word 511
    --updates 150000.
    """

    kinds: tuple[str, ...] = setting(
        ("full", "lsh-4", "lsh-2", "lsh-1"), "kinds of attention to train: full or lsh-ROUNDS"
    )
    updates: int = setting(3_000, "updates of each kind of attention; the paper has 150,000")
    drop: int = setting(2_250, "updates with the full learning rate; a tenth of it after them")
    learning_rate: float = setting(2e-3, "learning rate of RAdam, until --drop")
    word: int = setting(
        31, "number of symbols in the word w; a sequence is 0w0w; the paper has 511"
    )
    symbols: int = setting(127, "number of different symbols")
    heads: int = setting(4, "heads of the only layer")
    width: int = setting(256, "width of the model, and of its feed-forward layer")
    chunk: int = setting(
        8,
        "number of sorted tokens that attend together; the number of buckets is twice the length "
        "divided by it",
    )
    sequences: int = setting(512, "sequences to evaluate on")

    def __post_init__(self) -> None:
        check_numbers(self)
        check_kinds(self.kinds, ("full", "lsh-ROUNDS"))

    @property
    def sizes(self) -> tuple[int, int]:
        return 1, self.width


class Study(WordStudy):
    """Weights are trained with one kind of attention and scored with each; in all kinds, queries
    are also keys.
    """

    settings_type = Settings
    quick_form = MappingProxyType(
        {
            "updates": 900,
            "drop": 700,
            "word": 15,
            "symbols": 31,
            "width": 128,
            "sequences": 128,
            "compile": False,
        }
    )
    tables = MappingProxyType(
        {"learning": FIELDS, "results": ("trained", "evaluated", "loss", "accuracy", "sequences")}
    )
    settings: Settings

    def done(self, kind: str) -> bool:
        return set(self.accuracies(kind)) == set(EVALUATED)

    def assess(self, kind: str, net: TokenModel, sitting: Sitting) -> bool:
        s = self.settings
        for other in EVALUATED:
            if sitting.over:
                return False
            if other not in self.accuracies(kind):
                loss, accuracy = evaluate(net, s.config(other), s.sequences, s.batch, s.seed)
                self.record.add(
                    "results",
                    trained=kind,
                    evaluated=other,
                    loss=loss,
                    accuracy=accuracy,
                    sequences=s.sequences,
                )
                self.record.save()
        return True

    def accuracies(self, kind: str) -> dict[str, float]:
        """Accuracies so far of the weights trained with a kind, by the kind of the evaluation."""
        return {
            row["evaluated"]: float(row["accuracy"])
            for row in self.record.tables["results"]
            if row["trained"] == kind
        }

    def draw(self, figure: Any) -> None:
        figure.set_size_inches(10, 4.5)
        left, right = figure.subplots(1, 2)
        self.plot(left, "accuracy")
        places, width = np.arange(len(EVALUATED)), 0.8 / len(self.settings.kinds)
        for index, kind in enumerate(self.settings.kinds):
            found = self.accuracies(kind)
            heights = [found.get(other, 0.0) for other in EVALUATED]
            right.bar(places + index * width, heights, width)
        left.set(xlabel="update", ylabel="accuracy in training", ylim=(0, 1.01))
        right.set(xlabel="evaluated with", ylabel="accuracy", ylim=(0, 1.01))
        right.set_xticks(places + 0.4 - width / 2, EVALUATED)
        left.legend(title="trained with")

    def summary(self) -> str:
        s = self.settings
        rows = []
        for kind in s.kinds:
            found = {other: 100 * share for other, share in self.accuracies(kind).items()}
            paper = dict(zip(EVALUATED, PAPER.get(kind, ()), strict=False))
            rows.append([kind, *_cells(found), *_cells(paper)])
        return f"""\
Accuracy on the duplication task of the Reformer (section 2.1, table 2): sequences 0w0w of
{s.task.length} tokens, w being {s.word} symbols out of {s.symbols} (the paper: 1,024 tokens, 511
symbols out of 127). One layer of width {s.width} with {s.heads} heads, queries serving as keys, was
trained with full attention or with some rounds of hashing for {s.updates:,} updates of {s.batch}
sequences (the paper: 150,000 updates). The same weights were then scored with each kind of
attention on {s.sequences:,} sequences, hashed anew for every batch. Only the second half of a
sequence counts, in training too. lsh has {s.config("lsh-1").lsh_buckets} buckets and chunks of
{s.chunk}; full is one bucket and one chunk.

{table(["trained with", *EVALUATED, *(f"paper: {other}" for other in EVALUATED)], rows)}
"""


def _cells(accuracies: dict[str, float]) -> list[str]:
    """Accuracies in per cent, in the order of EVALUATED."""
    text = {kind: f"{accuracy:.1f} %" for kind, accuracy in accuracies.items()}
    return [text.get(kind, "-") for kind in EVALUATED]


@torch.no_grad()
def evaluate(
    net: TokenModel, config: ModelConfig, sequences: int, batch: int, seed: int
) -> tuple[float, float]:
    """Mean loss and accuracy of net's weights with the attention of config, on sequences that were
    not trained on.
    """
    trained, net.attention = net.attention, attention_for(config)
    scores = []
    for number, at in enumerate(range(0, sequences, batch)):
        torch.manual_seed(number)
        count = min(batch, sequences - at)
        loss, accuracy = net.score(net.task.batch(count, seed, 1, number))
        scores.append((float(loss) * count, float(accuracy) * count))
    net.attention = trained
    loss, accuracy = np.sum(scores, 0) / sequences
    return float(loss), float(accuracy)
