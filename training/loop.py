"""The training loop: trains on images and writes a checkpoint folder. A crash loses only the steps
since the last save.

A run is a function of its settings and its number of steps: batches, labels and the learning rate
are computed from that number, so a resumed run continues as if it had not stopped. There are two
exceptions: with --minutes, the learning rate depends on the clock; and the order in which gradients
are summed depends on the number of processes.
"""

import contextlib
import csv
import dataclasses
import io
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from .evaluate import evaluate
from .export import attempts_of, card, grid, provenance, samples
from .files import put, writing
from .own.curve import write_curve
from .own.look import board_of
from .own.progress import Progress
from .precision import has_bf16_products
from .run import Run, StoppedCompiling, TrainConfig, stop_signals
from .workers import Workers, together

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


def steps(
    run: Run, data: Dataset, workers: Workers, clock: Callable[[], tuple[float, bool]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Take steps until the clock of some process says that a step is the last. Yields each loss and
    gradient norm.

    data: the training images · clock: called in each step; returns run.minutes after the step, and
    whether the step is the last one. The minutes of the first process count, and a last step in one
    process is the last in all. Raises FloatingPointError if the gradient is no longer a number.
    """
    config = run.config
    coming = Parts(Batches(data, config, run.model), run.net, workers).since(
        run.step, makers(run.net.device, workers.here)
    )
    loss_of, weights = loss_function(run.net, config), list(run.net.parameters())
    deciding, last, parts = (
        workers.count * (workers.rank == 0),
        False,
        workers.count * config.accumulate,
    )
    while not last:
        share = config.learning_rate_share(run.images, run.minutes)
        for optimizer in run.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * share * group["share"]
        loss = torch.zeros((), device=run.net.device)
        for number, part in enumerate(next(coming)):
            # the same after a resume; the hashing of lsh is the same in every part, dropout is not
            seed = config.seed * 2**32 + run.step
            if config.dropout:
                seed = seed * parts + workers.rank + number * workers.count
            torch.manual_seed(seed % 2**64)
            share_of_loss = loss_of(moved(part, run.net.device)) / config.accumulate
            share_of_loss.backward()
            loss += share_of_loss.detach()
        minutes, last = clock()
        if workers.count > 1:
            for weight in weights:  # some may have no gradient in a part of a batch
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            shared = torch.stack(
                [loss, loss.new_tensor(minutes * deciding), loss.new_tensor(float(last))]
            )
            workers.mean([shared, *(weight.grad for weight in weights if weight.grad is not None)])
            loss, minutes, last = shared[0], float(shared[1]), bool(shared[2] > 0)
        # each group separately: if clipped together, a spike in the head would suppress the layers'
        # gradients
        norm = torch.stack(
            [
                nn.utils.clip_grad_norm_(group["params"], config.clip)
                for optimizer in run.optimizers
                for group in optimizer.param_groups
            ]
        ).norm()
        if run.step % CHECKED == 0:
            check(run, norm)
        for optimizer in run.optimizers:
            optimizer.step()
        run.average()
        run.step += 1
        run.minutes = minutes
        yield loss, norm


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
    for _ in steps(run, data, workers, lambda: (0.0, bool(stop))):
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
    max_minutes: float = math.inf,
    max_images: float = math.inf,
    save_minutes: float = 2.0,
    evaluate_minutes: float = 10.0,
    processes: int = 1,
    launched: Workers | None = None,
) -> bool:
    """Train until the schedule, the minutes or the images are over, or SIGTERM or SIGINT asks to
    stop.

    Each evaluation that is better than all before writes a checkpoint to folder. `folder`.training
    holds the state to resume from, the log (CSV; as curve.svg and for TensorBoard if these are
    installed) and a sample grid of each evaluation. processes, launched: see workers; only the
    first of the processes launched by torchrun writes. Returns whether the schedule is complete.
    Raises FloatingPointError if the gradient is no longer a number, and ChildProcessError if
    another process has died.
    """
    if run.model.classes and (most := int(data.labels.max(initial=-1))) >= run.model.classes:
        raise ValueError(
            f"{data.name} has {most + 1} classes, but this architecture has {run.model.classes};"
            " give data with fewer, or without class folders"
        )
    config, side = run.config, folder.with_name(folder.name + ".training")
    kept = len(data.images) - held_out(config.validation, data)
    validation = data.images[kept:]
    classes = data.labels[kept:] if run.model.class_first else None
    data = dataclasses.replace(data, images=data.images[:kept], labels=data.labels[:kept])
    stop = stop_signals(twice_ends=launched is None)
    began = saved = evaluated = logged = time.monotonic()
    minutes_before, images_before = run.minutes, run.images

    def over(images: int, minutes: float) -> bool:
        return (
            config.complete(images, minutes)
            or images >= images_before + max_images
            or minutes >= minutes_before + max_minutes
        )

    def clock() -> tuple[float, bool]:
        minutes = minutes_before + (time.monotonic() - began) / 60
        return minutes, bool(stop) or over(run.images + config.batch, minutes)

    # signals do not count here, as all processes must agree
    begins = not over(run.images, run.minutes)
    if launched is not None and launched.rank:
        if begins:
            _follow(run, data, launched, stop)
        return config.complete(run.images, run.minutes)
    side.mkdir(parents=True, exist_ok=True)
    log = Log(side, run.step, run.images)
    losses: list[Tensor] = []
    norm = torch.zeros(())
    threads = torch.get_num_threads()
    if launched is not None:
        threads = max(threads, min(threads * launched.here, usable_cores()))

    def keep() -> None:
        check(run, norm)
        run.save(side / "state.pt")

    def publish() -> None:
        share = torch.get_num_threads()
        torch.set_num_threads(threads)  # the other processes wait
        net = run.exported.eval()
        found = evaluate(net, validation, labels=classes) if len(validation) else None
        torch.set_num_threads(share)
        bits = {"validation": found.bits_per_dim} if found else {}
        log.write(run, **bits)
        write_curve(side)
        sheet, images = None, None
        if run.net.attention.steps_as:  # else the model cannot draw
            sheet, images = side / f"samples-{run.images:08}.png", samples(net, 20)
            put(sheet, grid(images, run.model))
        better = found is None or found.bits_per_dim <= run.best or not folder.exists()
        progress.evaluated(found, sheet, images, kept=None if better else run.best)
        if not better:
            return
        counted = (
            f", whose {run.inherited['images']:,.0f} images are counted above"
            if run.inherited["images"]
            else ""
        )
        start = (
            {"history": f"It began with the weights of {run.began_with}{counted}."}
            if run.began_with
            else {}
        )
        source = provenance(
            data.name,
            data.classes,
            board=checkpoint.board_of(run.exported)
            if run.model.palette
            else board_of(data.images, run.model),
            **run.history,
            **attempts_of(run.model),
            **start,
            seed=config.seed,
            command=command,
            settings=dataclasses.asdict(config),
            bits_per_dim=bits,
        )
        with writing(folder):
            checkpoint.save(folder, run.exported, source, card(folder.name, run.model, source))
        if found is not None:
            run.best = found.bits_per_dim
            keep()

    progress = Progress(run, max_images, max_minutes)
    try:
        if begins:
            if processes > 1:
                keep()  # the others begin from this save
            team = (
                together(processes, _take_part, side / "state.pt", run.model, data)
                if launched is None
                else contextlib.nullcontext(launched)
            )
            # no weight has changed in a step that is being compiled
            with contextlib.suppress(StoppedCompiling), team as workers:
                for loss, norm in steps(run, data, workers, clock):
                    losses.append(loss)
                    progress.step(losses)
                    now = time.monotonic()
                    if len(losses) == 100 or now - logged > LOG_S:
                        train_bits = float(torch.stack(losses).mean())
                        share = config.learning_rate_share(run.images - config.batch, run.minutes)
                        log.write(
                            run,
                            train=train_bits,
                            norm=float(norm),
                            learning_rate=config.learning_rate * share,
                        )
                        losses, logged = [], now
                    if now - saved > save_minutes * 60:
                        keep()
                        saved = time.monotonic()
                    if now - evaluated > evaluate_minutes * 60:
                        keep()
                        publish()
                        evaluated = time.monotonic()
        if launched is not None:
            launched.leave()
        keep()
        publish()
        progress.ended(len(data.images))
    finally:
        progress.close()
        log.close()
    return config.complete(run.images, run.minutes)


class Log:
    """log.csv, with a line per hundred steps, at least one a minute, and one per evaluation; also
    for TensorBoard.
    """

    FIELDS = ("step", "images", "minutes", "train", "norm", "learning_rate", "validation")

    def __init__(self, folder: Path, step: int, images: int) -> None:
        self._path, self._board = folder / "log.csv", None
        # steps after the save are taken again
        self._rows = [row for row in _rows_of(self._path) if int(row["step"]) <= step and step]
        self._put()
        with contextlib.suppress(ImportError), writing(folder / "tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(folder / "tensorboard", purge_step=images + 1)

    def write(self, run: Run, **values: float) -> None:
        numbers = {name: f"{value:.6g}" for name, value in values.items()}
        row = {"step": run.step, "images": run.images, "minutes": f"{run.minutes:.2f}"}
        self._rows.append(row | numbers)
        self._put()
        if self._board is not None:
            with writing(self._path.with_name("tensorboard")):
                for name, value in values.items():
                    self._board.add_scalar(name, value, run.images)

    def _put(self) -> None:
        """Write the whole log anew: if the disk is full, it does not end in half a line."""
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, self.FIELDS)
        table.writeheader()
        table.writerows(self._rows)
        put(self._path, text.getvalue().encode())

    def close(self) -> None:
        if self._board is not None:
            with contextlib.suppress(OSError):  # log.csv has it all
                self._board.close()


def _rows_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a log that are whole, if there is one."""
    if not path.exists():
        return []
    lines = csv.DictReader(path.read_text(errors="replace").splitlines())
    return [row for row in lines if _is_whole(row)]


def _is_whole(row: dict[str, Any]) -> bool:
    if tuple(row) != Log.FIELDS or None in row.values():
        return False
    try:
        for name, text in row.items():
            float(text or 0)
            if name in ("step", "images"):
                int(text)
    except ValueError:
        return False
    return True
