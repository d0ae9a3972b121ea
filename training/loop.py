"""The training loop: trains on images and writes a checkpoint folder. A crash loses only the steps
since the last save.

A run is a function of its settings and its number of steps: batches, labels and the learning rate
are computed from that number, so a resumed run continues as if it had not stopped. There are two
exceptions: with --minutes, the learning rate depends on the clock; and the order in which gradients
are summed depends on the number of processes.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.nn import functional as F

from linpix.model import checkpoint
from linpix.model.config import ModelConfig, bits_per_dim
from linpix.model.heads import log_likelihood
from linpix.model.inputs import START
from linpix.model.machine import usable_cores
from linpix.model.sequences import Sequences

from .batches import Batches, Part, Parts, makers, moved
from .datasets import Dataset
from .evaluate import Evaluation, evaluate
from .export import attempts_of, card, grid, provenance, samples
from .files import put, writing
from .log import Log, write_curve
from .look import board_of
from .precision import has_bf16_products
from .progress import Progress
from .run import Run, StoppedCompiling, TrainConfig, stop_signals
from .workers import Workers, together

P = TypeVar("P")  # what a loss is computed of, such as Part
LOG_S = 60.0  # longest time between lines of the log
# every so many steps it is seen whether the gradient is a number, for which a GPU must be waited
# for
CHECKED = 20


def can_compile() -> bool:
    """Whether torch.compile finds a C++ compiler here."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile; on a processor without processes of its own, which a signal to all processes
    would end while this one waits for them.
    """
    if torch.get_default_device().type == "cpu":
        inductor_config.compile_threads = 1
    return torch.compile(function, **options)


def loss_function(net: Any, config: TrainConfig) -> Callable[[Part], Tensor]:
    """The loss of a part: mean bits/dim of hidden sub-pixels, and class losses.

    net: a Transformer, and a Conditional if parts have sequences.

    It is compiled if the settings ask for it and a C++ compiler is there.
    """
    bf16 = config.bf16 and has_bf16_products(net.device)

    def dense(images: Tensor, start: Tensor) -> Tensor:
        with torch.autocast(net.device.type, torch.bfloat16, enabled=bf16):
            parameters = net(images, start)
        likelihood = log_likelihood(net.config, parameters[:, first:], images[:, first:])
        return -likelihood.sum(1).mean() * bits_per_dim(1.0, net.config)

    def packed(sequences: Sequences) -> Tensor:
        with torch.autocast(net.device.type, torch.bfloat16, enabled=bf16):
            prediction = net.predict(sequences)
        likelihood = log_likelihood(net.config, prediction.parameters, sequences.canvas)
        nats = -likelihood.masked_fill(sequences.known, 0).sum()
        if prediction.class_scores is not None:
            nats = nats + class_loss(prediction.class_scores, sequences)
        return nats / len(sequences.canvas) * bits_per_dim(1.0, net.config)

    def read(sequences: Sequences) -> Tensor:
        with torch.autocast(net.device.type, torch.bfloat16, enabled=bf16):
            features = net.features(sequences)
        nats = class_loss(
            net.class_scores(features.index_select(0, sequences.query_place)), sequences
        )
        return nats / len(sequences.canvas) * bits_per_dim(1.0, net.config)

    def class_loss(scores: Tensor, sequences: Sequences) -> Tensor:
        classes = sequences.start[sequences.query_image] - START - 1  # -1 without a label
        return config.class_weight * F.cross_entropy(
            scores, classes, reduction="sum", ignore_index=-1
        )

    first = net.config.first  # the distribution of the one before it is not trained
    if config.compile and not can_compile():
        print(
            "training without torch.compile, at about two thirds of the speed, because there is no"
            " C++ compiler",
            file=sys.stderr,
        )
    elif config.compile:
        dense = compiled(dense)
        packed, read = (compiled(each, dynamic=True) for each in (packed, read))

    def loss_of(part: Part) -> Tensor:
        if part.sequences is None:
            return dense(part.images, part.start)
        loss = packed(part.sequences)
        return loss if part.readings is None else loss + read(part.readings)

    return loss_of


def parts_of(run: Run, data: Dataset, workers: Workers) -> Iterator[list[Part]]:
    """What this process learns from in each step that comes. data: the training images."""
    batches = Batches(data, run.config, run.model)
    return Parts(batches, run.net, workers).since(run.step, makers(run.net.device, workers.here))


def steps(
    run: Run,
    coming: Iterator[list[P]],
    loss_of: Callable[[P], Tensor],
    workers: Workers,
    clock: Callable[[], tuple[float, bool]],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Take steps until the clock of some process says that a step is the last. Yields each loss and
    gradient norm.

    coming: the parts of each step, see parts_of · clock: called in each step; returns run.minutes
    after the step, and whether the step is the last one. The minutes of the first process count,
    and a last step in one process is the last in all. Raises FloatingPointError if the gradient is
    no longer a number.
    """
    last = False
    while not last:
        loss = compute_gradient(run, next(coming), loss_of, workers)
        minutes, last = clock()
        if workers.count > 1:
            loss, minutes, last = average(run, workers, loss, minutes, last)
        # each group separately: if clipped together, a spike in the head would suppress the layers'
        # gradients
        clip = run.config.clip
        norms = [nn.utils.clip_grad_norm_(group["params"], clip) for group in run.groups]
        norm = torch.stack(norms).norm()
        if run.step % CHECKED == 0:
            check(run, norm)
        for optimizer in run.optimizers:
            optimizer.step()
        run.average()
        run.step += 1
        run.minutes = minutes
        yield loss, norm


def compute_gradient(
    run: Run, parts: list[P], loss_of: Callable[[P], Tensor], workers: Workers
) -> Tensor:
    """Set the learning rate of a step, and the gradient of what this process learns from in it;
    return the loss.
    """
    config = run.config
    rate = config.learning_rate * config.learning_rate_share(run.images, run.minutes)
    for group in run.groups:
        group["lr"] = rate * group["share"]
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    loss = torch.zeros((), device=run.net.device)
    for number, part in enumerate(parts):
        # the same after a resume; the hashing of lsh is the same in every part, dropout is not
        seed = config.seed * 2**32 + run.step
        if config.dropout:
            place = workers.rank + number * workers.count
            seed = seed * workers.count * config.accumulate + place
        torch.manual_seed(seed % 2**64)
        share_of_loss = loss_of(moved(part, run.net.device)) / config.accumulate
        share_of_loss.backward()
        loss += share_of_loss.detach()
    return loss


def average(
    run: Run, workers: Workers, loss: Tensor, minutes: float, last: bool
) -> tuple[Tensor, float, bool]:
    """Average the gradients over all processes. Returns the mean loss, the minutes of the first
    process, and whether the step is the last in any.
    """
    gradients = []
    for weight in run.net.parameters():
        if weight.grad is None:  # of a part of a batch, some weights may have none
            weight.grad = torch.zeros_like(weight)
        gradients.append(weight.grad)
    if workers.rank:
        minutes = 0.0
    shared = torch.stack(
        [loss, loss.new_tensor(minutes * workers.count), loss.new_tensor(float(last))]
    )
    workers.mean([shared, *gradients])
    return shared[0], float(shared[1]), bool(shared[2] > 0)


def check(run: Run, norm: Tensor) -> None:
    """Raise FloatingPointError if a gradient's norm, and with it all weights after that step, is
    not a number.
    """
    if not bool(torch.isfinite(norm)):
        raise FloatingPointError(
            f"the gradient is not a number at step {run.step}, or some steps earlier; resume from "
            "the last save with a lower --learning-rate"
        )


def _take_part(workers: Workers, state: Path, model: ModelConfig, data: Dataset) -> None:
    _follow(Run.resumed(state, model, {}), data, workers, [])


def _follow(run: Run, data: Dataset, workers: Workers, stop: list[int]) -> None:
    """Take steps together with the first process, until it ends the run or a signal arrives
    here.
    """
    coming, loss_of = parts_of(run, data, workers), loss_function(run.net, run.config)
    for _ in steps(run, coming, loss_of, workers, lambda: (0.0, bool(stop))):
        pass


def held_out(wanted: int, data: Dataset) -> int:
    """How many of a data set's last images are held out of training for validation, if so many are
    wanted.
    """
    return min(wanted, len(data.images) // 10)


def train(
    run: Run,
    data: Dataset,
    folder: Path,
    *,
    command: str,
    processes: int = 1,
    workers: Workers | None = None,
    **limits: float,
) -> bool:
    """Train until the schedule, the minutes or the images are over, or SIGTERM or SIGINT asks to
    stop.

    Each evaluation that is better than all before writes a checkpoint to folder. `folder`.training
    holds the state to resume from, the log (CSV; as curve.svg and for TensorBoard if these are
    installed) and a sample grid of each evaluation. processes, workers: see workers.py; only the
    first of the processes launched by torchrun writes · limits: of the sitting, see Session.
    Returns whether the schedule is complete. Raises FloatingPointError if the gradient is no longer
    a number, and ChildProcessError if another process has died.
    """
    classes = int(data.labels.max(initial=-1)) + 1
    if 0 < run.model.classes < classes:
        raise ValueError(
            f"{data.name} has {classes} classes, but this architecture has {run.model.classes};"
            " give data with fewer, or without class folders"
        )
    workers = workers or Workers()
    sitting = Session(run, data, folder, command, workers, **limits)
    # signals do not count here, as all processes must agree
    begins = not sitting.over(run.images, run.minutes)
    if not workers.rank:
        sitting.train(processes if begins else 0)
    elif begins:
        _follow(run, sitting.data, workers, sitting.stop)
    return run.config.complete(run.images, run.minutes)


class Session:
    """One sitting of a run, in the process that writes its files."""

    log: Log
    progress: Progress

    def __init__(
        self,
        run: Run,
        data: Dataset,
        folder: Path,
        command: str,
        workers: Workers,
        *,
        max_minutes: float = math.inf,
        max_images: float = math.inf,
        save_minutes: float = 2.0,
        evaluate_minutes: float = 10.0,
    ) -> None:
        """max_minutes, max_images: of this sitting · save_minutes, evaluate_minutes: between saves,
        and between evaluations.
        """
        self.run, self.folder, self.command, self.workers = run, folder, command, workers
        self.max_minutes, self.max_images = max_minutes, max_images
        self.save_s, self.evaluate_s = save_minutes * 60, evaluate_minutes * 60
        self.side = folder.with_name(folder.name + ".training")
        kept = len(data.images) - held_out(run.config.validation, data)
        self.data, self.validation = data.part(slice(kept)), data.part(slice(kept, None))
        self.stop = stop_signals(twice_ends=not workers.launched)
        self.began = self.saved = self.evaluated = self.logged = time.monotonic()
        self.minutes_before, self.images_before = run.minutes, run.images
        self.losses: list[Tensor] = []  # since the last line of the log
        self.norm = torch.zeros(())  # of the last gradient
        threads = torch.get_num_threads()  # and of all processes on this machine:
        self.threads = max(threads, min(threads * workers.here, usable_cores()))

    def over(self, images: int, minutes: float) -> bool:
        """Whether the schedule or this sitting is over after this many images and minutes."""
        return (
            self.run.config.complete(images, minutes)
            or images >= self.images_before + self.max_images
            or minutes >= self.minutes_before + self.max_minutes
        )

    def clock(self) -> tuple[float, bool]:
        """Minutes of the run after a step, and whether it is the last one: see steps."""
        minutes = self.minutes_before + (time.monotonic() - self.began) / 60
        images = self.run.images + self.run.config.batch
        return minutes, bool(self.stop) or self.over(images, minutes)

    def train(self, processes: int) -> None:
        """Take steps with so many processes, 0: none; then save and evaluate."""
        self.side.mkdir(parents=True, exist_ok=True)
        self.log = Log(self.side, self.run.step, self.run.images)
        self.progress = Progress(self.run, self.max_images, self.max_minutes)
        with closing(self.log), closing(self.progress):
            if processes:
                self.take_steps(processes)
            self.workers.leave()
            self.keep()
            self.publish()
            self.progress.ended(len(self.data.images))

    def take_steps(self, processes: int) -> None:
        run = self.run
        if processes > 1:
            self.keep()  # the others begin from this save
        state = self.side / "state.pt"
        ours = together(processes, _take_part, state, run.model, self.data)
        team = nullcontext(self.workers) if self.workers.launched else ours
        # no weight has changed in a step that is being compiled
        with suppress(StoppedCompiling), team as workers:
            coming, loss_of = parts_of(run, self.data, workers), loss_function(run.net, run.config)
            for loss, norm in steps(run, coming, loss_of, workers, self.clock):
                self.step(loss, norm)

    def step(self, loss: Tensor, norm: Tensor) -> None:
        """What follows a step: a line of the log, a save, an evaluation, each when it is due."""
        self.norm = norm
        self.losses.append(loss)
        self.progress.step(self.losses)
        now = time.monotonic()
        if len(self.losses) == 100 or now - self.logged > LOG_S:
            self.log.write(
                self.run,
                train=float(torch.stack(self.losses).mean()),
                norm=float(self.norm),
                learning_rate=self.run.optimizers[0].param_groups[0]["lr"],
            )
            self.losses, self.logged = [], now
        if now - self.saved > self.save_s:
            self.keep()
            self.saved = time.monotonic()
        if now - self.evaluated > self.evaluate_s:
            self.keep()
            self.publish()
            self.evaluated = time.monotonic()

    def keep(self) -> None:
        """Save the state to resume from, unless its weights are not numbers."""
        check(self.run, self.norm)
        self.run.save(self.side / "state.pt")

    def publish(self) -> None:
        """Evaluate, and draw samples; write a checkpoint if none before was better."""
        run = self.run
        found = self.evaluate()
        bits = {}
        if found is not None:
            bits["validation"] = found.bits_per_dim
        self.log.write(run, **bits)
        write_curve(self.side)
        sheet = images = None
        if run.net.attention.steps_as:  # else the model cannot draw
            sheet, images = self.side / f"samples-{run.images:08}.png", samples(run.exported, 20)
            put(sheet, grid(images, run.model))
        kept = None
        if found is not None and found.bits_per_dim > run.best and self.folder.exists():
            kept = run.best
        self.progress.evaluated(found, sheet, images, kept)
        if kept is not None:
            return
        self.write_checkpoint(bits)
        if found is not None:
            run.best = found.bits_per_dim
            self.keep()

    def evaluate(self) -> Evaluation | None:
        """The averaged weights on the images held out, if there are any."""
        net, validation = self.run.exported.eval(), self.validation
        if not len(validation.images):
            return None
        share = torch.get_num_threads()
        torch.set_num_threads(self.threads)  # the other processes wait
        labels = validation.labels if self.run.model.class_first else None
        found = evaluate(net, validation.images, labels=labels)
        torch.set_num_threads(share)
        return found

    def write_checkpoint(self, bits: dict[str, float]) -> None:
        run = self.run
        if run.model.palette:
            board = checkpoint.board_of(run.exported)
        else:
            board = board_of(self.data.images, run.model)
        source = provenance(
            self.data.name,
            self.data.classes,
            board=board,
            **run.history,
            **attempts_of(run.model),
            seed=run.config.seed,
            command=self.command,
            settings=dataclasses.asdict(run.config),
            bits_per_dim=bits,
        )
        with writing(self.folder):
            checkpoint.save(
                self.folder, run.exported, source, card(self.folder.name, run.model, source)
            )
