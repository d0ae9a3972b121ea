"""Convergence of attention kinds on repeating a word: figure 2 of "Transformers are RNNs" (section
4.1.1).
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

from linpix.model.config import AttentionKind, ModelConfig

from ..run import setting
from . import Experiment, check_kinds, colour
from .record import Row, Sitting, table
from .tokens import (
    EVERY,
    FIELDS,
    Duplication,
    Recipe,
    WordLearner,
    check_numbers,
    kind_config,
    learn,
    update_s,
)

BAR = 0.05  # nats; linear and softmax should end below


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The paper's settings, except for the width, which it does not give."""

    kinds: tuple[str, ...] = setting(
        ("linear", "softmax", "lsh-1", "lsh-4"),
        "kinds of attention; lsh-ROUNDS for lsh, full for softmax with shared queries and keys",
    )
    updates: int = setting(3_200, "updates of each kind of attention")
    drop: int = setting(3_000, "updates with the full learning rate; a tenth of it after them")
    learning_rate: float = setting(1e-3, "learning rate of RAdam, until --drop")
    batch: int = setting(64, "sequences per update")
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
    seed: int = setting(
        0, "seed of initial weights, words and hashing; the same for every kind of attention"
    )
    compile: bool = setting(True, "use torch.compile where there is a C++ compiler")

    def __post_init__(self) -> None:
        check_numbers(self)
        check_kinds(self.kinds, (*get_args(AttentionKind), "full", "lsh-ROUNDS"))

    @property
    def task(self) -> Duplication:
        return Duplication(word=self.word, symbols=self.symbols)

    def config(self, kind: str) -> ModelConfig:
        return kind_config(
            kind,
            self.task,
            chunk=self.chunk,
            layers=self.layers,
            heads=self.heads,
            key_dim=self.width // self.heads,
            value_dim=self.width // self.heads,
            d_model=self.width,
            d_ff=self.feed_forward,
        )


class Study(Experiment):
    """Every kind sees the same sequences in the same order, and begins with weights of the same
    seed.
    """

    settings_type = Settings
    tables = MappingProxyType({"learning": FIELDS})
    settings: Settings

    def work(self, sitting: Sitting) -> bool:
        s = self.settings
        recipe = Recipe(
            updates=s.updates,
            drop=s.drop,
            batch=s.batch,
            learning_rate=s.learning_rate,
            seed=s.seed,
            compile=s.compile,
        )
        for kind in s.kinds:
            if self._done(kind):
                continue
            if not learn(kind, WordLearner(s.config(kind), s.task, recipe), self.record, sitting):
                return False
        return True

    def draw(self, figure: Any) -> None:
        figure.set_size_inches(8, 4.5)
        axes = figure.subplots()
        for kind in self.settings.kinds:
            curve = self._curve(kind)
            axes.semilogy(
                [row["update"] for row in curve],
                [row["loss"] for row in curve],
                label=kind,
                color=colour(kind),
            )
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
        marks = sorted(
            {s.updates * part // 8 // EVERY * EVERY for part in range(1, 8)} - {0} | {s.updates}
        )
        rows = []
        for kind in s.kinds:
            curve = self._curve(kind)
            at = {row["update"]: row for row in curve}
            rows.append(
                [
                    kind,
                    *(f"{at[mark]['loss']:.4f}" if mark in at else "-" for mark in marks),
                    *(
                        (
                            f"{self.end(kind):.4f}",
                            f"{100 * curve[-1]['accuracy']:.2f} %",
                            f"{1000 * update_s(curve):.0f}",
                        )
                        if curve
                        else ("-",) * 3
                    ),
                ]
            )
        return f"""\
Convergence of attention kinds on saying a word again, as in figure 2 of "Transformers are RNNs" (section 4.1.1):
sequences 0w0w of {task.length} tokens, w being {task.word} symbols out of {task.symbols}; layers: {s.layers}, of
{s.heads} heads, {s.width} wide, feed-forward {s.feed_forward}; batches of {s.batch}; RAdam at {s.learning_rate:g},
a tenth of it after {s.drop:,} updates. lsh has {s.config("lsh-1").lsh_buckets} buckets and chunks of {s.chunk}.

Every update has new sequences, the same for every kind, so what is lost in training would be lost on sequences never
seen. Loss (nats) and accuracy are means over the second half of the sequence, the part that can be predicted; the loss
of that half is also what is trained. Over all tokens but the first, a perfect model would have {task.floor:.3f} nats.
Each figure is the mean of the {EVERY} updates before it; `end` is that of the last {2 * EVERY}. Time is that of
the processor, all threads together.

{table(["loss after", *(f"{mark:,}" for mark in marks), "end", "accuracy", "ms an update"], rows)}

{" ".join(self._claims())}
"""  # noqa: E501

    def end(self, kind: str) -> float:
        """Mean loss over the updates of the last two rows so far."""
        curve = self._curve(kind)
        begin = [0, *(row["update"] for row in curve)]
        last = [
            (row["update"] - start, row["loss"]) for start, row in zip(begin, curve, strict=False)
        ][-2:]
        return float(sum(count * loss for count, loss in last)) / sum(count for count, _ in last)

    def _claims(self) -> list[str]:
        """The claims of the paper's figure, and whether they hold here."""
        done = {kind: self.end(kind) for kind in self.settings.kinds if self._done(kind)}
        plain = {kind: loss for kind, loss in done.items() if kind in ("linear", "softmax")}
        claims = [
            f"{kind} ends {'under' if loss < BAR else 'not under'} {BAR} nats."
            for kind, loss in plain.items()
        ]
        for kind, loss in done.items():
            if kind.startswith("lsh") and plain:
                above = all(loss > other for other in plain.values())
                claims.append(f"{kind} ends {'above them' if above else 'not above them'}.")
        return claims

    def _done(self, kind: str) -> bool:
        curve = self._curve(kind)
        return bool(curve) and curve[-1]["update"] == self.settings.updates

    def _curve(self, kind: str) -> list[Row]:
        return [row for row in self.record.tables["learning"] if row["kind"] == kind]
