"""A training run: its settings, and the state that a save stores and a resume restores."""

import copy
import hashlib
import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch._guards import CompileContext
from torch.optim.swa_utils import get_ema_multi_avg_fn

from linpix.model.checkpoint import Checkpoint
from linpix.model.config import Head, ModelConfig
from linpix.model.nets import net_for
from linpix.model.transformer import Transformer

from .files import load_state, save_state, undamaged
from .init import Batch, weights_for
from .precision import Muon
from .workers import compilers_of, kill

Optimizer = Literal["adamw", "radam", "muon"]
Augmentation = Literal["none", "flip", "shift"]
STATE_VERSION = 1
_RESTORE = "restore it, or start again with another --out and --init"


class StoppedCompiling(KeyboardInterrupt):
    """A signal to stop came while torch compiled: it may take minutes, or wait for a compiler that
    the same signal has ended.
    """


def stop_signals(*, twice_ends: bool = True) -> list[int]:
    """A list to which each SIGTERM or SIGINT is appended, so a first one makes it non-empty. One
    that comes while torch compiles raises StoppedCompiling too.

    twice_ends: whether a second signal of the same kind has its default effect. It is False under
    torchrun, where one Ctrl-C arrives both from the terminal and from torchrun, which kills
    processes that still run after 30 s.
    """
    received: list[int] = []

    def handle(number: int, _: Any) -> None:
        received.append(number)
        if twice_ends:
            signal.signal(number, signal.SIG_DFL)
        if CompileContext.current_compile_id() is not None:
            kill(compilers_of(os.getpid()))
            raise StoppedCompiling

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return received


def setting(default: Any, text: str) -> Any:
    """A field with its description; the text is the flag's help."""
    return field(default=default, metadata={"help": text})


def check_least(settings: Any, least: int, *names: str) -> None:
    """Raise ValueError if one of these settings is lower."""
    for name in names:
        value = getattr(settings, name)
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """All settings that determine the course of a run. Limits of one sitting are arguments of
    train.
    """

    images: int = setting(
        400_000,
        "length of the schedule in images; the learning rate reaches its final value there; 0: it "
        "stays at its peak, until --minutes, --max-images or --max-minutes are over",
    )
    minutes: float = setting(
        0.0,
        "length of the schedule in minutes, if this is reached before --images; 0: only "
        "--images counts",
    )
    batch: int = setting(16, "images per step")
    accumulate: int = setting(
        1,
        "number of parts in which a process computes the gradient of its images; more parts "
        "need less memory and give the same gradients",
    )
    optimizer: Optimizer = setting(
        "muon", "adamw, radam or muon (Muon for the layers' matrices, AdamW for the rest)"
    )
    learning_rate: float = setting(1.5e-3, "peak learning rate")
    head_share: float = setting(
        0.1,
        "learning rate of the head and its norm, relative to the others; 1 for a "
        "categorical head unless given",
    )
    final_learning_rate: float = setting(
        0.02, "final learning rate, relative to the peak (cosine decay)"
    )
    warmup_images: int = setting(8_000, "number of images during the linear rise to the peak")
    weight_decay: float = setting(
        0.05, "weight decay of the layers' matrices; other parameters have none"
    )
    betas: tuple[float, float] = setting((0.9, 0.95), "decay rates of Adam's two averages")
    clip: float = setting(
        1.0, "largest gradient norm of a group: the layers' matrices, the head, the rest"
    )
    dropout: float = setting(
        0.0,
        "share of each sub-layer's outputs, and of the embedded inputs, that are left out at "
        "random; for runs that see each image more than some 15 times",
    )
    augment: Augmentation = setting(
        "none",
        "none; or flip: half of the images are mirrored, for pictures whose mirror "
        "image is as likely, such as photographs, but not digits or letters; or "
        "shift: half of those with known pixels are moved by up to 3 pixels each "
        "way, so that a model completes what people draw beside the middle",
    )
    ema: float = setting(
        0.998,
        "decay per step of the averaged weights, which are exported; lower in the first steps",
    )
    unconditional: float = setting(
        0.5,
        "share of the images that train without their class; not used by a model that "
        "draws the class first",
    )
    conditional: float = setting(
        0.67, "share of the images with known pixels, for a model with patches"
    )
    class_weight: float = setting(
        10.0,
        "weight of the class loss, for a model that predicts classes from known "
        "pixels; relative to the likelihood in nats",
    )
    readings: int = setting(
        0,
        "how often each image of a step is read again, each time with other pixels known, to "
        "learn its class alone; for a model that predicts classes from known pixels",
    )
    seed: int = setting(0, "seed of initial weights, order of images and omitted labels")
    validation: int = setting(
        1_000, "number of training images held out for validation; at most a tenth"
    )
    feed_forward_chunks: int = setting(
        1,
        "number of parts in which positions pass the feed-forward layers; more parts "
        "need less memory and give the same gradients",
    )
    bf16: bool = setting(True, "use bf16 autocast where the processor supports it")
    compile: bool = setting(True, "use torch.compile where there is a C++ compiler")

    def __post_init__(self) -> None:
        check_least(self, 1, "batch", "accumulate", "feed_forward_chunks")
        if self.batch % self.accumulate:
            raise ValueError(
                f"batch must be a multiple of accumulate, got {self.batch} images and"
                f" {self.accumulate} parts"
            )
        check_least(self, 0, "images", "minutes", "warmup_images", "weight_decay")
        check_least(self, 0, "validation", "class_weight", "readings", "seed")
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        for name in ("ema", "unconditional", "conditional", "final_learning_rate", "head_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        for name, kind in (("optimizer", Optimizer), ("augment", Augmentation)):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise ValueError(
                    f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}"
                )

    def complete(self, images: int, minutes: float) -> bool:
        """Whether the schedule is over after this many images and minutes."""
        return 0 < self.images <= images or 0 < self.minutes <= minutes

    def learning_rate_share(self, images: int, minutes: float) -> float:
        """Share of the peak learning rate after this many images and minutes: linear warm-up,
        cosine decay.
        """
        if images < self.warmup_images:
            return (images + self.batch) / (self.warmup_images + self.batch)
        done = 0.0
        if self.images:
            done = (images - self.warmup_images) / max(1, self.images - self.warmup_images)
        if self.minutes:
            done = max(done, minutes / self.minutes)
        return self.final_learning_rate + (1 - self.final_learning_rate) * 0.5 * (
            1 + math.cos(math.pi * min(1.0, done))
        )


def optimizers(net: Transformer, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Optimisers for config: weight decay for the layers' matrices only; muon takes these matrices,
    AdamW the rest.

    The heads and the norm before them have their own learning rate. Where scales are small, the
    loss is so sharp in their weights that at the layers' rate they oscillate, with gradients a
    hundred times larger than all others.
    """
    matrices = [p for p in net.layers.parameters() if p.dim() == 2]
    names = ("norm.", "head.", "class_head.", "background.head.")
    head = [p for name, p in net.named_parameters() if name.startswith(names)]
    chosen = {id(p) for p in matrices + head}
    rest = [p for p in net.parameters() if id(p) not in chosen]
    lr, betas = config.learning_rate, config.betas
    decayed = {"params": matrices, "weight_decay": config.weight_decay, "share": 1.0}
    others = [
        {"params": rest, "weight_decay": 0.0, "share": 1.0},
        {"params": head, "weight_decay": 0.0, "share": config.head_share},
    ]
    groups = [decayed, *others]
    if config.optimizer == "radam":
        return [torch.optim.RAdam(groups, lr=lr, betas=betas, decoupled_weight_decay=True)]
    if config.optimizer == "adamw":
        return [torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)]
    muon = Muon([decayed], lr=lr, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=lr, betas=betas, fused=True)]


class Run:
    """Weights, averaged weights, optimiser state and counters, which a save stores and a resume
    restores.
    """

    def __init__(self, model: ModelConfig, config: TrainConfig) -> None:
        if config.augment == "shift" and not model.patch:
            raise ValueError(
                "--augment shift moves images with known pixels, which only models with patches"
                " read; train one, such as mnist-conditional, or leave --augment out"
            )
        torch.manual_seed(config.seed)
        self.model, self.config = model, config
        self.net = net_for(
            model, feed_forward_chunks=config.feed_forward_chunks, dropout=config.dropout
        )
        # with averaged weights: it is evaluated, drawn from and shipped
        self.exported = copy.deepcopy(self.net).requires_grad_(False)
        self.optimizers = optimizers(self.net, config)
        self.step, self.minutes = 0, 0.0
        self.best = math.inf  # bits/dim of validation images, of the weights that were published
        self.began_with = ""  # the model of --init
        self.inherited: dict[str, float] = {"images": 0, "steps": 0, "minutes": 0}

    @property
    def images(self) -> int:
        return self.step * self.config.batch

    def average(self) -> None:
        """Let the averaged weights follow, at the end of a step.

        They follow faster in the first steps, or else random initial weights would dominate the
        average of a short run for long. Not torch's AveragedModel, which waits for the GPU in each
        step, to read its counter from it.
        """
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step)) if self.step else 0.0
        get_ema_multi_avg_fn(decay)(
            list(self.exported.parameters()), list(self.net.parameters()), self.step
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the weights, for processes to compare."""
        found = hashlib.sha256()
        for weight in self.net.parameters():
            found.update(weight.detach().cpu().numpy().tobytes())
        return found.hexdigest()

    def start_from(
        self, other: Checkpoint, batch: Batch | None = None, *, invert: bool = False
    ) -> None:
        """Begin with the weights of a checkpoint; its images, steps and minutes count towards
        `history`.

        Its architecture must be the same, except for classes, a mixture where a categorical head
        begins anew, fewer layers, and heads, d_model and d_ff that are all the same fraction of
        those here, such as half. batch: (images, start, known or None), on which the norms of new
        layers are fitted (see grow); without it no layers are added · invert: convert the weights
        to draw in negative. Raises ValueError if the architectures differ.
        """
        weights = weights_for(self.net, other, batch, invert=invert)
        self.net.load_state_dict(weights)
        self.exported.load_state_dict(weights)
        self.began_with = other.name
        self.inherited = {name: other.provenance.get(name, 0) for name in self.inherited}

    def fall(self, images: int) -> None:
        """From now on, let the learning rate fall from its value to the final one, within so many
        images. The checkpoint is compared with none of before.
        """
        was, final = self.config, self.config.final_learning_rate
        if final == 1:  # of a run at a constant rate
            final = TrainConfig().final_learning_rate
        self.config = replace(
            was,
            learning_rate=was.learning_rate * was.learning_rate_share(self.images, self.minutes),
            final_learning_rate=final,
            warmup_images=self.images,
            images=self.images + images,
            minutes=0.0,
        )
        self.best = math.inf

    @property
    def groups(self) -> Iterator[dict[str, Any]]:
        """The groups of weights of all optimisers, with their settings."""
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    @property
    def history(self) -> dict[str, Any]:
        """Images, steps and minutes of training in the weights, including those of --init, and a
        sentence about it.
        """
        own = {"images": self.images, "steps": self.step, "minutes": round(self.minutes, 1)}
        found: dict[str, Any] = {name: own[name] + self.inherited[name] for name in own}
        if self.began_with:
            counted = ""
            if self.inherited["images"]:
                counted = f", whose {self.inherited['images']:,.0f} images are counted above"
            found["history"] = f"It began with the weights of {self.began_with}{counted}."
        return found

    def save(self, path: Path) -> None:
        state = {
            "version": STATE_VERSION,
            "model": json.dumps(self.model.to_json()),
            "config": json.dumps(asdict(self.config)),
            "step": self.step,
            "minutes": self.minutes,
            "best": self.best,
            "inherited": self.inherited,
            "began_with": self.began_with,
            "net": self.net.state_dict(),
            "averaged": self.exported.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        save_state(path, state)

    @classmethod
    def resumed(
        cls,
        path: Path,
        model: ModelConfig,
        changes: dict[str, Any],
        *,
        layers: int | None = None,
        head: Head | None = None,
    ) -> "Run":
        """Continue from a save with its settings, except for changes. Raises ValueError if that is
        not possible.

        model: must equal the saved one, except for its background, which was chosen by looking at
        the pictures, and its layers and head · layers, head: the requested ones, which must be the
        saved ones; None for no request.
        """
        raw = path.read_bytes()
        with undamaged(path, _RESTORE):
            state = load_state(raw)
            # older saves lack later settings
            saved = asdict(TrainConfig()) | json.loads(state["config"])
            saved["betas"] = tuple(saved["betas"])
            kept = TrainConfig(**saved)
            was = ModelConfig.from_json(json.loads(state["model"]))
            if None not in (model.background, was.background):
                model = replace(model, background=was.background)
            model = replace(model, layers=layers or was.layers)
            if head is None and model.channels == 1:
                model = replace(model, head=was.head)
            same = state["version"] == STATE_VERSION and was == model
        if not same:
            raise ValueError(
                f"{path} was saved by a run of another architecture; give this run another --out"
            )
        # of the images seen, and of the state
        for name in ("optimizer", "batch", "seed", "validation", "augment"):
            if changes.get(name, saved[name]) != saved[name]:
                raise ValueError(
                    f"{path} was saved with --{name} {saved[name]}; resume with the same value, got"
                    f" {changes[name]}"
                )
        run = cls(model, replace(kept, **changes))
        with undamaged(path, _RESTORE):
            run._restore(state)
        return run

    def _restore(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.exported.load_state_dict(state["averaged"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            settings = [dict(group) for group in optimizer.param_groups]
            optimizer.load_state_dict(kept)  # this restores the old settings too
            for group, new in zip(optimizer.param_groups, settings, strict=True):
                group.update(new)
        self.step, self.minutes = int(state["step"]), float(state["minutes"])
        self.best = float(state["best"])
        self.inherited = dict(state["inherited"])
        self.began_with = str(state["began_with"])
