"""The training loop: images in, a checkpoint folder out, and nothing lost but the steps since the last save.

A run is a function of its settings and the number of steps done: batches, labels and the learning
rate are computed from that number, so a resumed run goes on as if it had not stopped.
"""

import csv
import dataclasses
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from model import checkpoint, mixture
from model.config import ModelConfig, bits_per_dim
from model.inputs import START
from model.transformer import Transformer
from training.datasets import Dataset
from training.evaluate import evaluate
from training.export import card, provenance, sample_grid

Optimizer = Literal["adamw", "radam", "muon"]
STATE_VERSION = 1


def _setting(default: Any, text: str) -> Any:
    """A field that explains itself: the text is the flag's help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How to train. Everything that decides the run's course; limits of one sitting are arguments of train."""

    images: int = _setting(400_000, "images of the whole schedule; the learning rate ends there")
    batch: int = _setting(16, "images a step")
    optimizer: Optimizer = _setting("muon", "adamw, radam, or muon (for the layers' matrices; AdamW for the rest)")
    learning_rate: float = _setting(1.5e-3, "at its peak")
    head_share: float = _setting(0.1, "learning rate of the head and its norm, as a share of the others'")
    final_learning_rate: float = _setting(0.02, "share of the peak at the schedule's end (cosine decay)")
    warmup_images: int = _setting(8_000, "linear rise to the peak")
    weight_decay: float = _setting(0.05, "of the layers' matrices only")
    betas: tuple[float, float] = _setting((0.9, 0.95), "decay of Adam's two averages")
    clip: float = _setting(1.0, "largest gradient norm of a group: the layers' matrices, the head, the rest")
    ema: float = _setting(0.998, "decay a step of the averaged weights, the ones that are exported")
    unconditional: float = _setting(0.5, "share of images that begin with the unconditional start")
    seed: int = _setting(0, "of initial weights, order of images, and labels left out")
    validation: int = _setting(1_000, "last training images, held out to watch the run; at most a tenth")
    bf16: bool = _setting(True, "bf16 autocast, where the processor has it")
    compile: bool = _setting(True, "torch.compile, where a C++ compiler is there")

    def __post_init__(self) -> None:
        for name in ("images", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup_images", "weight_decay", "validation", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("ema", "unconditional", "final_learning_rate", "head_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.optimizer not in get_args(Optimizer):
            raise ValueError(f"optimizer must be one of {', '.join(get_args(Optimizer))}, got {self.optimizer!r}")

    def learning_rate_share(self, images: int) -> float:
        """Share of the peak learning rate after that many images: linear warm-up, cosine decay."""
        if images < self.warmup_images:
            return (images + self.batch) / (self.warmup_images + self.batch)
        done = min(1.0, (images - self.warmup_images) / max(1, self.images - self.warmup_images))
        return self.final_learning_rate + (1 - self.final_learning_rate) * 0.5 * (1 + math.cos(math.pi * done))


class Batches:
    """Batch number n of a run: shuffled epochs, each image used once an epoch; a pure function of n."""

    def __init__(self, data: Dataset, config: TrainConfig, classes: int) -> None:
        self.data, self.config, self.classes = data, config, classes
        self._epoch, self._order = -1, np.arange(0)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Images (batch, T) uint8 and start indices (batch,) int64."""
        count, size, seed = len(self.data.images), self.config.batch, self.config.seed
        picked = np.array([self._at(step * size + i, count) for i in range(size)])
        labels = self.data.labels[picked]
        free = np.random.default_rng((seed, 1, step)).random(size) < self.config.unconditional
        start = np.where(free, START, START + 1 + labels) if self.classes else np.full(size, START)
        return torch.from_numpy(self.data.images[picked]), torch.from_numpy(start)

    def _at(self, number: int, count: int) -> int:
        epoch, index = divmod(number, count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self.config.seed, 0, epoch)).permutation(count)
        return int(self._order[index])


def optimizers(net: Transformer, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Decay for matrices, none for biases, norms and tables; muon takes the layers' matrices, AdamW the rest.

    The head and the norm before it have a learning rate of their own: where scales are small, the loss is so sharp
    in their weights that at the layers' rate they oscillate, with gradients a hundred times those of all else.
    """
    matrices = [p for layer in net.layers for p in layer.parameters() if p.dim() == 2]
    head = [*net.norm.parameters(), *net.head.parameters()]
    chosen = {id(p) for p in matrices + head}
    rest = [p for p in net.parameters() if id(p) not in chosen]
    lr, betas = config.learning_rate, config.betas
    decayed = {"params": matrices, "weight_decay": config.weight_decay, "share": 1.0}
    others = [{"params": rest, "weight_decay": 0.0, "share": 1.0},
              {"params": head, "weight_decay": 0.0, "share": config.head_share}]
    if config.optimizer == "radam":
        return [torch.optim.RAdam([decayed, *others], lr=lr, betas=betas, decoupled_weight_decay=True)]
    if config.optimizer == "adamw":
        return [torch.optim.AdamW([decayed, *others], lr=lr, betas=betas, fused=True)]
    return [torch.optim.Muon([decayed], lr=lr, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, betas=betas, fused=True)]


class Run:
    """Weights, averaged weights, optimiser state and counters: what a save holds and a resume restores."""

    def __init__(self, model: ModelConfig, config: TrainConfig) -> None:
        torch.manual_seed(config.seed)
        self.model, self.config = model, config
        self.net = Transformer(model)
        self.averaged = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(config.ema))
        self.optimizers = optimizers(self.net, config)
        self.step, self.minutes = 0, 0.0

    @property
    def images(self) -> int:
        return self.step * self.config.batch

    @property
    def exported(self) -> Transformer:
        """The averaged weights: the ones to evaluate, draw from and ship."""
        net = self.averaged.module
        assert isinstance(net, Transformer)
        return net

    def start_from(self, net: Transformer) -> None:
        """Begin with the weights of another checkpoint of the same architecture."""
        if dataclasses.replace(net.config, twin_of="") != dataclasses.replace(self.model, twin_of=""):
            raise ValueError("--init needs a checkpoint of the same architecture; "
                             f"it has {net.config}, this run has {self.model}")
        self.net.load_state_dict(net.state_dict())
        self.exported.load_state_dict(net.state_dict())

    def save(self, path: Path) -> None:
        state = {"version": STATE_VERSION, "model": json.dumps(self.model.to_json()),
                 "config": json.dumps(dataclasses.asdict(self.config)), "step": self.step, "minutes": self.minutes,
                 "net": self.net.state_dict(), "averaged": self.averaged.state_dict(),
                 "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}
        temporary = path.with_name(path.name + ".new")
        torch.save(state, temporary)
        os.replace(temporary, path)

    @classmethod
    def resumed(cls, path: Path, model: ModelConfig, changes: dict[str, Any]) -> "Run":
        """Continue from a save with its settings, but for changes. Raises ValueError where that cannot be."""
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
            saved = json.loads(state["config"])
            same = state["version"] == STATE_VERSION and ModelConfig.from_json(json.loads(state["model"])) == model
        except (OSError, RuntimeError, EOFError, KeyError, ValueError, UnpicklingError) as error:
            raise ValueError(f"{path} is damaged ({type(error).__name__}); restore it, or begin again with another "
                             "--out and --init") from error
        if not same:
            raise ValueError(f"{path} was saved by a run of another architecture; give this run another --out")
        saved["betas"] = tuple(saved["betas"])
        for name in ("optimizer", "batch", "seed", "validation"):  # these decide what has been seen, or fit the state
            if changes.get(name, saved[name]) != saved[name]:
                raise ValueError(f"{path} was saved with --{name} {saved[name]}; resume with the same, "
                                 f"got {changes[name]}")
        run = cls(model, TrainConfig(**saved | changes))
        run.net.load_state_dict(state["net"])
        run.averaged.load_state_dict(state["averaged"])
        for optimizer, kept in zip(run.optimizers, state["optimizers"], strict=True):
            settings = [{name: value for name, value in group.items() if name != "params"}
                        for group in optimizer.param_groups]
            optimizer.load_state_dict(kept)  # this brings back the old settings too
            for group, new in zip(optimizer.param_groups, settings, strict=True):
                group.update(new)
        run.step, run.minutes = state["step"], state["minutes"]
        return run


def can_compile() -> bool:
    """Whether torch.compile finds a C++ compiler here."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def loss_function(net: Transformer, config: TrainConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """(images, start) -> mean bits/dim of the batch; compiled where asked for and possible."""
    bf16 = config.bf16 and (net.device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def loss(images: Tensor, start: Tensor) -> Tensor:
        with torch.autocast(net.device.type, torch.bfloat16, enabled=bf16):
            parameters = net(images, start)
        likelihood = mixture.log_likelihood(parameters[:, first:], images[:, first:])
        return -likelihood.sum(1).mean() * bits_per_dim(1.0, net.config)

    first = 1 if net.config.first_marginal else 0  # that sub-pixel's distribution is not trained
    if config.compile and not can_compile():
        print("training without torch.compile, at about two thirds of the speed: there is no C++ compiler",
              file=sys.stderr)
        return loss
    return torch.compile(loss) if config.compile else loss


def train(run: Run, data: Dataset, folder: Path, *, command: str, max_minutes: float = math.inf,
          max_images: float = math.inf, save_minutes: float = 2.0, evaluate_minutes: float = 10.0) -> bool:
    """Train until the schedule, the minutes or the images are over, or SIGTERM or SIGINT asks to stop.

    folder becomes a checkpoint at each evaluation; `folder`.training holds what a resume needs, the log
    (CSV, and TensorBoard where installed) and a sample grid of each evaluation. Returns whether the
    schedule is complete. Raises FloatingPointError when the loss is no longer a number.
    """
    if run.model.classes and (most := int(data.labels.max(initial=-1))) >= run.model.classes:
        raise ValueError(f"{data.name} has {most + 1} classes, but this architecture knows {run.model.classes}; "
                         "give data with fewer, or without class folders")
    config, side = run.config, folder.with_name(folder.name + ".training")
    side.mkdir(parents=True, exist_ok=True)
    held_out = min(config.validation, len(data.images) // 10)
    kept = len(data.images) - held_out
    validation = data.images[kept:]
    batches = Batches(dataclasses.replace(data, images=data.images[:kept], labels=data.labels[:kept]),
                      config, run.model.classes)
    loss_of = loss_function(run.net, config)
    log = Log(side, run.step, run.images)
    stop = _stop_signals()
    began = saved = evaluated = time.monotonic()
    minutes_before, images_before = run.minutes, run.images
    limit = min(config.images, images_before + max_images)
    losses: list[Tensor] = []

    def keep() -> None:
        run.minutes = minutes_before + (time.monotonic() - began) / 60
        run.save(side / "state.pt")

    def publish() -> None:
        found = evaluate(run.exported.eval(), validation) if held_out else None
        bits = {"validation": found.bits_per_dim} if found else {}
        log.write(run, **bits)
        (side / f"samples-{run.images:08}.png").write_bytes(sample_grid(run.exported, 20))
        source = provenance(data.name, data.classes, images=run.images, steps=run.step, minutes=run.minutes,
                            seed=config.seed, command=command, settings=dataclasses.asdict(config), bits_per_dim=bits)
        checkpoint.save(folder, run.exported, source, card(folder.name, run.model, source))

    bar = tqdm(total=config.images, initial=run.images, unit="image", disable=not sys.stderr.isatty())
    try:
        while run.images < limit and not stop and (time.monotonic() - began) / 60 < max_minutes:
            share = config.learning_rate_share(run.images)
            for optimizer in run.optimizers:
                optimizer.zero_grad()
                for group in optimizer.param_groups:
                    group["lr"] = config.learning_rate * share * group["share"]
            images, start = batches(run.step)
            loss = loss_of(images.to(run.net.device), start.to(run.net.device))
            loss.backward()
            # each group by itself: clipped together, a spike of the head's would silence the layers
            norms = [nn.utils.clip_grad_norm_(group["params"], config.clip)
                     for optimizer in run.optimizers for group in optimizer.param_groups]
            norm = torch.stack(norms).norm()
            if not bool(torch.isfinite(norm)):
                raise FloatingPointError(f"the gradient is not a number at step {run.step}; the last save is "
                                         f"in {side}: resume with a lower --learning-rate")
            for optimizer in run.optimizers:
                optimizer.step()
            run.averaged.update_parameters(run.net)
            run.step += 1
            losses.append(loss.detach())
            bar.update(config.batch)
            now = time.monotonic()
            if len(losses) == 100:
                run.minutes = minutes_before + (now - began) / 60
                train_bits = float(torch.stack(losses).mean())
                log.write(run, train=train_bits, norm=float(norm), learning_rate=config.learning_rate * share)
                bar.set_postfix(bits=f"{train_bits:.4f}")
                losses = []
            if now - saved > save_minutes * 60:
                keep()
                saved = time.monotonic()
            if now - evaluated > evaluate_minutes * 60:
                keep()
                publish()
                evaluated = time.monotonic()
        keep()
        publish()
    finally:
        bar.close()
        log.close()
    return run.images >= config.images


def _stop_signals() -> list[int]:
    """A list that a first SIGTERM or SIGINT makes non-empty; a second one acts as usual."""
    received: list[int] = []

    def handle(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return received


class Log:
    """log.csv, a line a hundred steps and one an evaluation; the same to TensorBoard where it is installed."""

    FIELDS = ("step", "images", "minutes", "train", "norm", "learning_rate", "validation")

    def __init__(self, folder: Path, step: int, images: int) -> None:
        path, temporary = folder / "log.csv", folder / "log.csv.new"
        rows = list(csv.DictReader(path.read_text().splitlines())) if path.exists() and step else []
        self._file = temporary.open("w", newline="")
        self._csv = csv.DictWriter(self._file, self.FIELDS)
        self._csv.writeheader()
        self._csv.writerows(row for row in rows if int(row["step"]) <= step)  # those after the save happen again
        self._file.flush()
        temporary.replace(path)  # the open file goes with its name
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._board = None
        else:
            self._board = SummaryWriter(folder / "tensorboard", purge_step=images + 1)

    def write(self, run: Run, **values: float) -> None:
        row = {"step": run.step, "images": run.images, "minutes": f"{run.minutes:.2f}"}
        self._csv.writerow(row | {name: f"{value:.6g}" for name, value in values.items()})
        self._file.flush()
        for name, value in values.items():
            if self._board is not None:
                self._board.add_scalar(name, value, run.images)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
