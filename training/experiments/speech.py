"""Phonemes of synthetic speech, by attention kinds and an LSTM: table 3 of "Transformers are RNNs"
(section 4.3).
"""

import functools
import itertools
import statistics
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from linpix.model.attention import attention_for
from linpix.model.config import AttentionKind, ModelConfig
from linpix.model.nets import layer_for

from ..run import setting
from . import Experiment, attention_of, check_kinds
from .learning import Learner, check_numbers, clock, learn, update_s
from .lengths import (
    doublings,
    draw_lengths,
    exponents,
    in_a_process,
    missing,
    peak_of,
    tables_of,
)
from .record import Sitting, table
from .utterances import BANDS, OTHER_VOICES, VOICES, Utterance, edits, espeak, utterances

STRIDE = 2  # frames of a token; the paper has 1
# %, s an epoch
PAPER = {
    "linear": (8.08, 824),
    "softmax": (5.12, 2711),
    "lsh-4": (9.33, 2250),
    "lstm": (10.94, 1047),
}
# frames (B, T, BANDS), with 0 as padding; lengths (B,); phonemes
Batch = tuple[Tensor, Tensor, list[list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings for some hours on two cores. lsh has 32 buckets, and chunks of 32."""

    kinds: tuple[str, ...] = setting(
        ("softmax", "lsh-4", "linear", "lstm"),
        "kinds of attention, lsh-ROUNDS for lsh; lstm for a bidirectional LSTM",
    )
    recordings: int = setting(5_000, "recordings to train on")
    held_out: int = setting(
        300, "recordings of other sentences to evaluate on, and as many again in other voices"
    )
    epochs: int = setting(10, "passes over the recordings, of each kind")
    batch: int = setting(16, "recordings per update")
    learning_rate: float = setting(
        2e-3,
        "first learning rate of RAdam (the paper: 1e-4); Adam, for lstm, has half of "
        "it (the paper: 1e-3)",
    )
    layers: int = setting(6, "layers of the transformers; the paper has 9")
    heads: int = setting(4, "heads of each layer; the paper has 6")
    width: int = setting(
        128, "width of the transformers; the feed-forward layers have four times as much"
    )
    hidden: int = setting(
        136, "hidden size of each direction of lstm's 3 layers; the paper has 320"
    )
    shortest: int = setting(
        200, "frames of the first length that is measured; each next one is twice as long"
    )
    longest: int = setting(
        3_200, "frames of the last length that is measured, and of each batch measured"
    )
    rounds: int = setting(3, "number of processes that measure each length")
    seed: int = setting(0, "seed of recordings, their order, initial weights and hashing")

    def __post_init__(self) -> None:
        check_numbers(self)
        check_kinds(self.kinds, (*get_args(AttentionKind), "lsh-ROUNDS", "lstm"))

    @property
    def updates(self) -> int:
        """Updates of an epoch."""
        return -(-self.recordings // self.batch)

    @property
    def lengths(self) -> list[int]:
        return doublings(self.shortest, self.longest)

    def config(self, kind: str) -> ModelConfig:
        size = self.width // self.heads
        return ModelConfig(
            layers=self.layers,
            heads=self.heads,
            key_dim=size,
            value_dim=size,
            d_model=self.width,
            d_ff=4 * self.width,
            norm="pre",
            lsh_chunk=32,
            lsh_buckets=32,
            **attention_of(kind),
        )


class BothWays(nn.Module):
    """A layer of a bidirectional LSTM. Each direction reads padding last: faster than torch's
    packed sequences.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.ahead, self.back = (nn.LSTM(inputs, hidden, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """x: (B, T, inputs) · lengths: (B,) · returns (B, T, 2 * hidden)."""
        rows, at = torch.arange(len(x))[:, None], torch.arange(x.shape[1])
        last = lengths[:, None] - 1
        turned = rows, torch.where(at <= last, last - at, at)
        return torch.cat([self.ahead(x)[0], self.back(x[turned])[0][turned]], -1)


class Recogniser(nn.Module):
    """A convolution over frames, then a transformer without a causal mask, or an LSTM."""

    def __init__(self, s: Settings, kind: str, symbols: int) -> None:
        super().__init__()
        self.whole = None if kind == "lstm" else attention_for(s.config(kind)).parallel
        self.input = nn.Conv1d(BANDS, s.width, 5, stride=STRIDE, padding=2)
        width = s.width
        if self.whole:
            config = s.config(kind)
            layers: list[nn.Module] = [layer_for(config)(config) for _ in range(s.layers)]
        else:
            width = 2 * s.hidden
            layers = [BothWays(size, s.hidden) for size in (s.width, width, width)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1 + symbols)

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, T, 1 + symbols) of no phoneme and of each one, and lengths in
        tokens. See Batch.
        """
        x, lengths = F.gelu(self.input(frames.mT)).mT, -(-lengths // STRIDE)
        if self.whole:
            speeds = 1e-4 ** torch.linspace(0, 1, -(-x.shape[2] // 2))
            angles = torch.arange(x.shape[1])[:, None] * speeds
            x = x + torch.cat([angles.sin(), angles.cos()], -1)[:, : x.shape[2]]
        for index, layer in enumerate(self.layers):
            if self.whole:
                attend = functools.partial(self.whole, lengths=lengths, training=self.training)
                x = layer(x, index, attend)
            else:
                x = layer(x, lengths)
        return self.head(self.norm(x)).log_softmax(-1), lengths

    def loss(self, batch: Batch) -> Tensor:
        """CTC (Graves et al., 2006): nats per phoneme."""
        scores, lengths = self(*batch[:2])
        said, counts = [*itertools.chain(*batch[2])], [*map(len, batch[2])]
        scores = scores.transpose(0, 1)
        return F.ctc_loss(scores, torch.tensor(said), lengths, torch.tensor(counts))


class Speech:
    """Three sets of recordings: to train on, of other sentences, and of other sentences in other
    voices.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = s = settings
        self.train = utterances(s.recordings, s.seed, 0, voices=VOICES)
        self.held_out = [
            utterances(s.held_out, s.seed, 1 + n, voices=v)
            for n, v in enumerate((VOICES, OTHER_VOICES))
        ]
        sentences = [said for _, said in itertools.chain(self.train, *self.held_out)]
        found = {*itertools.chain(*sentences)}
        # 0 is CTC's blank
        self.numbers = {phoneme: number for number, phoneme in enumerate(sorted(found), 1)}

    def batch(self, chosen: list[Utterance]) -> Batch:
        frames = pad_sequence([frames.float() for frames, _ in chosen], batch_first=True)
        return (
            frames.to(torch.get_default_device()),
            torch.tensor([len(frames) for frames, _ in chosen]),
            [[self.numbers[phoneme] for phoneme in said] for _, said in chosen],
        )

    def batches(self, epoch: int) -> list[list[Utterance]]:
        """All recordings to train on, in batches of similar lengths."""
        draws, size = np.random.default_rng((self.settings.seed, epoch)), self.settings.batch
        order = sorted(self.train, key=lambda one: len(one[0]) * draws.uniform(0.9, 1.1))
        return [
            order[at * size : (at + 1) * size] for at in draws.permutation(self.settings.updates)
        ]

    @torch.no_grad()
    def error_rate(self, net: Recogniser, held_out: list[Utterance]) -> float:
        """Edits from the most probable phoneme of each token, without repeats, to what was said,
        per phoneme.
        """
        net.eval()
        wrong, order, size = 0, sorted(held_out, key=lambda one: len(one[0])), self.settings.batch
        for at in range(0, len(order), size):
            frames, lengths, said = self.batch(order[at : at + size])
            scores, lengths = net(frames, lengths)
            for path, length, phonemes in zip(scores.argmax(-1), lengths, said, strict=True):
                heard = path[:length].unique_consecutive()
                wrong += edits(phonemes, heard[heard > 0].tolist())
        net.train()
        return wrong / sum(len(said) for _, said in held_out)


class Listener(Learner):
    """Learns to recognise phonemes. halvings: of the learning rate so far."""

    measures, largest_gradient = ("loss",), 1.0
    net: Recogniser

    def __init__(self, kind: str, speech: Speech) -> None:
        s = speech.settings
        torch.manual_seed(s.seed)
        optimizer = torch.optim.Adam if kind == "lstm" else torch.optim.RAdam
        super().__init__(Recogniser(s, kind, len(speech.numbers)), s, 0, optimizer)
        self.speech, self.halvings, self.batches = speech, 0, functools.lru_cache(1)(speech.batches)

    def measure(self) -> tuple[Tensor, ...]:
        epoch, index = divmod(self.update, self.settings.updates)
        return (self.net.loss(self.speech.batch(self.batches(epoch)[index])),)

    @property
    def learning_rate(self) -> float:
        """Halved when the error stopped falling, as in the paper. In the last third it also falls,
        to zero.
        """
        s = self.settings
        halved = self.halvings + (self.net.whole is None)
        fall = min(1.0, 3 - 3 * self.update / (s.epochs * s.updates))
        return float(s.learning_rate * 0.5**halved * fall)


def halvings(errors: list[float]) -> int:
    """How many errors were not lower than all before, not counting those before half of the
    phonemes were right.
    """
    return sum(error >= min(errors[:at]) < 0.5 for at, error in enumerate(errors) if at)


def update_of(settings: Settings, kind: str, frames: int) -> tuple[float, int]:
    """Processor seconds and peak bytes of loss and gradients, for a sequence of this many frames in
    a batch.
    """
    net, count = Recogniser(settings, kind, 50), settings.longest // frames

    def call(count: int = count, frames: int = frames) -> float:
        batch = (
            torch.randn(count, frames, BANDS),
            torch.full((count,), frames),
            torch.randint(1, 51, (count, frames // 8)).tolist(),
        )
        net.zero_grad()
        began = clock()
        net.loss(batch).backward()
        return clock() - began

    # libraries initialise themselves; the whole batch would leave memory to the next call
    call(1, min(frames, 64))
    peak = peak_of(call)
    return statistics.median(call() for _ in range(3)) / count, peak // count


class Study(Experiment):
    """Every kind hears the same recordings in the same order."""

    settings_type = Settings
    quick_form = MappingProxyType(
        {
            "kinds": ("softmax", "linear", "lstm"),
            "recordings": 400,
            "held_out": 40,
            "epochs": 4,
            "layers": 2,
            "width": 64,
            "hidden": 48,
            "longest": 800,
            "rounds": 1,
        }
    )
    tables = MappingProxyType(
        {
            "learning": ("kind", "update", "seconds", "loss"),
            # phoneme error rates
            "results": ("kind", "epoch", "sentences", "voices"),
            # of a sequence
            "lengths": ("round", "kind", "length", "seconds", "bytes"),
        }
    )
    settings: Settings

    def work(self, sitting: Sitting) -> bool:
        espeak()  # before anything is measured
        s = self.settings
        rows = self.record.tables["lengths"]
        for round_, length, kind in missing(rows, s.rounds, s.lengths, s.kinds):
            if sitting.over:
                return False
            found = in_a_process(update_of, (s, kind, length), sitting, kind)
            if found is None:
                return False
            self.record.add(
                "lengths",
                round=round_,
                kind=kind,
                length=length,
                seconds=found[0],
                bytes=found[1],
            )
            self.record.save()
        return self._train(sitting)

    def _train(self, sitting: Sitting) -> bool:
        s, speech = self.settings, None
        for kind in s.kinds:
            learner = None
            for epoch in range(len(self.rows("results", kind)) + 1, s.epochs + 1):
                if sitting.over:
                    return False
                speech = speech or Speech(s)
                learner = learner or Listener(kind, speech)
                errors = [row["sentences"] for row in self.rows("results", kind)]
                learner.halvings, learner.updates = halvings(errors), epoch * s.updates
                if not learn(kind, learner, self.record, sitting):
                    return False
                sentences, voices = (
                    speech.error_rate(learner.net, held_out) for held_out in speech.held_out
                )
                self.record.add(
                    "results", kind=kind, epoch=epoch, sentences=sentences, voices=voices
                )
                self.record.save()
        return True

    def draw(self, figure: Any) -> None:
        figure.set_size_inches(13, 4.5)
        left, *both = figure.subplots(1, 3)
        for kind in self.settings.kinds:
            minutes = {row["update"]: row["seconds"] / 60 for row in self.rows("learning", kind)}
            errors = {
                row["epoch"] * self.settings.updates: row["sentences"]
                for row in self.rows("results", kind)
            }
            left.semilogy(
                [minutes[update] for update in errors],
                [100 * error for error in errors.values()],
                label=kind,
            )
        axes = {"xlabel": "minutes of the processor", "ylabel": "phoneme error rate, %"}
        left.set(**axes, title="other sentences")
        left.legend()
        draw_lengths(both, self.settings.kinds, self.record.tables["lengths"])

    def summary(self) -> str:
        s, rows, lengths = self.settings, [], self.record.tables["lengths"]
        for kind in s.kinds:
            errors, learning = self.rows("results", kind), self.rows("learning", kind)
            weights = sum(weight.numel() for weight in Recogniser(s, kind, 53).parameters())
            row = [kind, f"{weights / 1e6:.2f} million", str(len(errors)), *["-"] * 5]
            if errors:
                row[3:5] = [f"{100 * errors[-1][name]:.2f}" for name in ("sentences", "voices")]
            if learning:
                row[5] = f"{s.updates * update_s(learning):,.0f}"
            if kind in PAPER:
                row[6:] = [f"{value:,}" for value in PAPER[kind]]
            rows.append(row)
        header = ["", "parameters", "epochs", "other sentences", "other voices too"]
        header += ["s an epoch", "paper", "paper: s an epoch"]
        time, memory = tables_of(s.kinds, s.lengths, lengths)
        slopes = [[kind, *exponents(lengths, kind)] for kind in s.kinds]
        return f"""\
Recognition of phonemes, as in table 3 of "Transformers are RNNs" (section 4.3). Its recordings, 80
hours of the Wall Street Journal, are licensed. These {s.recordings:,} were spoken by espeak-ng, in
{len(VOICES)} voices, with noise. So error rates can be compared with each other, but not with the
paper's. Time is that of the processor, all threads together; the paper's is that of a GPU. Models
are smaller than the paper's, and a token has {STRIDE} frames, not one. The learning rate is halved
after each epoch without a lower error, as in the paper. It also falls to zero in the last third of
{s.epochs} epochs, while the paper trains until the error stops falling. Phoneme error rates, in %,
are those after the last epoch: for {s.held_out} recordings of other sentences, which also halve the
learning rate, and for {s.held_out} of other sentences in {len(OTHER_VOICES)} other voices.

{table(header, rows)}

Time and memory of the loss and its gradients for a sequence of N frames, in batches of
{s.longest:,} frames. Memory is the peak beyond weights, with their gradients. softmax never keeps
its whole matrix. lstm goes through a sequence step by step, so it is slower where a batch has few
sequences. Exponents are slopes of log time and log memory over log N for the last two doublings.

{time}

{memory}

{table(["exponent", "of time", "of memory"], slopes)}
"""
