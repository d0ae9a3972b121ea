"""Convergence of attention kinds on repeating a word: figure 2 of "Transformers are RNNs" (section
4.1.1).
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

import numpy as np

from linpix.model.config import AttentionKind

from ..run import setting
from . import check_kinds
from .learning import EVERY, check_numbers, update_s
from .record import table
from .words import FIELDS, WordSettings, WordStudy

BAR = 0.05  # nats; linear and softmax should end below


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(WordSettings):
    """The paper's settings, except for the width, which it does not give."""

    kinds: tuple[str, ...] = setting(
        ("linear", "softmax", "lsh-1", "lsh-4"),
        "kinds of attention; lsh-ROUNDS for lsh, full for softmax with shared queries and keys",
    )
    updates: int = setting(3_200, "updates of each kind of attention")
    drop: int = setting(3_000, "updates with the full learning rate; a tenth of it after them")
    learning_rate: float = setting(1e-3, "learning rate of RAdam, until --drop")
    word: int = setting(63, "number of symbols in the word w; a sequence is 0w0w")
    symbols: int = setting(10, "number of different symbols")
    layers: int = setting(4, "layers of the transformer")
    heads: int = setting(8, "heads of each layer")
    width: int = setting(128, "width of the model; the paper's image models have 256")
    feed_forward: int = setting(
        256, "width of the feed-forward layers; the paper's image models have 1024"
    )
    chunk: int = setting(
        16,
        "number of sorted tokens that attend together in lsh; the number of buckets is twice the "
        "length divided by it",
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        check_kinds(self.kinds, (*get_args(AttentionKind), "full", "lsh-ROUNDS"))

    @property
    def sizes(self) -> tuple[int, int]:
        return self.layers, self.feed_forward


class Study(WordStudy):
    settings_type = Settings
    quick_form = MappingProxyType(
        {
            "updates": 700,
            "drop": 600,
            "batch": 32,
            "word": 15,
            "layers": 2,
            "width": 64,
            "feed_forward": 128,
            "chunk": 8,
            "compile": False,
        }
    )
    tables = MappingProxyType({"learning": FIELDS})
    settings: Settings

    def done(self, kind: str) -> bool:
        curve = self.rows("learning", kind)
        return bool(curve) and curve[-1]["update"] == self.settings.updates

    def draw(self, figure: Any) -> None:
        figure.set_size_inches(8, 4.5)
        axes = figure.subplots()
        self.plot(axes, "loss")
        axes.set_yscale("log")
        axes.axhline(BAR, color="grey", linestyle=":", label=f"{BAR} nats")
        axes.axvline(
            self.settings.drop, color="grey", linewidth=0.8, label="learning rate falls to a tenth"
        )
        axes.set(
            xlabel="update",
            ylabel="loss in nats, second half of the sequence",
            title="Saying a word again",
        )
        axes.legend()

    def summary(self) -> str:
        s, task = self.settings, self.settings.task
        eighths = {s.updates * part // 8 // EVERY * EVERY for part in range(1, 8)}
        marks = sorted(eighths - {0} | {s.updates})
        rows = []
        for kind in s.kinds:
            curve = self.rows("learning", kind)
            losses = {row["update"]: f"{row['loss']:.4f}" for row in curve}
            row = [kind, *(losses.get(mark, "-") for mark in marks)]
            if curve:
                row += [f"{self.end(kind):.4f}", f"{100 * curve[-1]['accuracy']:.2f} %"]
                row.append(f"{1000 * update_s(curve):.0f}")
            else:
                row += ["-", "-", "-"]
            rows.append(row)
        return f"""\
Convergence of attention kinds on saying a word again, as in figure 2 of "Transformers are RNNs"
(section 4.1.1): sequences 0w0w of {task.length} tokens, w being {task.word} symbols out of
{task.symbols}; layers: {s.layers}, of {s.heads} heads, {s.width} wide, feed-forward
{s.feed_forward}; batches of {s.batch}; RAdam at {s.learning_rate:g}, a tenth of it after {s.drop:,}
updates. lsh has {s.config("lsh-1").lsh_buckets} buckets and chunks of {s.chunk}.

Every update has new sequences, the same for every kind, so what is lost in training would be lost
on sequences never seen. Loss (nats) and accuracy are means over the second half of the sequence,
the part that can be predicted; the loss of that half is also what is trained. Over all tokens but
the first, a perfect model would have {task.floor:.3f} nats. Each figure is the mean of the {EVERY}
updates before it; `end` is that of the last {2 * EVERY}. Time is that of the processor, all threads
together.

{table(["loss after", *(f"{mark:,}" for mark in marks), "end", "accuracy", "ms an update"], rows)}

{" ".join(self._claims())}
"""

    def end(self, kind: str) -> float:
        """Mean loss over the updates of the last two rows so far."""
        curve = self.rows("learning", kind)
        updates = [0, *(row["update"] for row in curve)]
        counts = np.diff(updates)[-2:]
        return float(np.average([row["loss"] for row in curve[-2:]], weights=counts))

    def _claims(self) -> list[str]:
        """The claims of the paper's figure, and whether they hold here."""
        done = {kind: self.end(kind) for kind in self.settings.kinds if self.done(kind)}
        plain = {kind: loss for kind, loss in done.items() if kind in ("linear", "softmax")}
        claims = []
        for kind, loss in plain.items():
            negation = "" if loss < BAR else "not "
            claims.append(f"{kind} ends {negation}under {BAR} nats.")
        for kind, loss in done.items():
            if kind.startswith("lsh") and plain:
                negation = "" if loss > max(plain.values()) else "not "
                claims.append(f"{kind} ends {negation}above them.")
        return claims
