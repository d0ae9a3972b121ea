"""Preferences: a model learns from images that it draws itself, by whether it would accept them.

    python -m linpix.training.preferences MODEL --data DIR --out FOLDER

A model that draws the class first draws an image again until it recognises it and it is in one
piece (model/attempts.py). Here it learns to need fewer attempts: what it would accept becomes more
probable, and what it would refuse less, while it goes on learning from as many real images. The
loss is that of binary classifier optimisation (Jung et al., 2024, arXiv 2404.04656), a form of
direct preference optimisation for single images instead of pairs, without its shift of the score.
Its gradient fades as an image moves, so a refused one cannot lower it without end. Images are drawn
anew every ROUND steps, and used once, so they are always those of nearly the present weights.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from linpix.model import checkpoint
from linpix.model.attempts import Recognised
from linpix.model.checkpoint import Checkpoint
from linpix.model.choice import processor_obstacle
from linpix.model.conditional import Conditional
from linpix.model.config import bits_per_dim
from linpix.model.heads import log_likelihood
from linpix.model.inputs import START
from linpix.model.likelihood import class_log_probs_of
from linpix.model.packing import pack
from linpix.model.sequences import Sequences
from linpix.model.team import limit_threads

from .batches import Part
from .datasets import Dataset, check_classes, load_existing
from .evaluate import decoded, evaluate
from .export import card, provenance
from .files import locked
from .look import look_of
from .loop import held_out, loss_function, parts_of, steps
from .run import Augmentation, Run, TrainConfig
from .workers import Workers, count_for, together

ROUND = 100  # steps from one drawing to the next
SHARPNESS = (
    0.3  # per nat: of an image that has moved by 1 / SHARPNESS, half of the gradient is left
)
WEIGHT = 1.5  # of a refused image, relative to a real one; all accepted ones weigh as much together
RATE = 4e-4  # peak learning rate
FIRST_SEED = 5_000_000_000  # of the images; no request is likely to draw the same
LEAST = 10  # pictures, of which one is held out
OF_OLD_WEIGHTS = ("class_agreement", "look", "weights")  # facts that do not hold for new ones


class Drawn(NamedTuple):
    """Images of a model, each drawn once, with a class."""

    images: Tensor  # (N, T) uint8
    labels: Tensor  # (N,) int64
    nats: Tensor  # (N,): log-likelihood of each, given its class, when it was drawn
    accepted: Tensor  # (N,) bool

    @property
    def weights(self) -> Tensor:
        """(N,): of accepted ones above 0, of others below; together 0, if any was accepted."""
        share = max(float(self.accepted.double().mean()), 1 / len(self.accepted))
        return torch.where(self.accepted, WEIGHT * (1 - share) / share, -WEIGHT).float()


class Judged(NamedTuple):
    """Drawn images of which a gradient is computed at once."""

    sequences: Sequences
    nats: Tensor  # (B,), as in Drawn
    weights: Tensor  # (B,), as in Drawn


def loss(likelihood: Tensor, nats: Tensor, weights: Tensor) -> Tensor:
    """The loss of drawn images in nats, (): that of a classifier whose score is how much more
    probable an image is than when it was drawn. All (B,).

    It is so scaled that the gradient of an image that has not moved is its weight.
    """
    score = SHARPNESS * weights.sign() * (likelihood - nats)
    return (2 / SHARPNESS * weights.abs() * F.softplus(-score)).sum()


def draw(found: Checkpoint, count: int, first: int = 0) -> Drawn:
    """Draw so many images, of all classes in turn, with seeds from FIRST_SEED + first on."""
    net, numbers = found.net, np.arange(first, first + count)
    labels = torch.from_numpy(numbers % net.config.classes)
    canvas = torch.zeros(1 + count, net.config.subpixels, dtype=torch.uint8)  # slot 0 is padding
    nats = decoded(
        net,
        pack(net, torch.float32),
        canvas,
        torch.zeros_like(canvas, dtype=torch.bool),
        torch.ones(count),
        log_probs=True,
        start=START + 1 + labels,
        seed=(FIRST_SEED + numbers).tolist(),
    ).sum(1)
    return Drawn(canvas[1:], labels, nats, torch.tensor(accepted_of(found, canvas[1:], labels)))


def accepted_of(found: Checkpoint, images: Tensor, labels: Tensor) -> list[bool]:
    """Which images, (B, T), the model would not draw again."""
    accepted, pictures = [], images.numpy()
    torn = found.torn(pictures, np.zeros(pictures.shape, np.bool_), labels.tolist())
    for image, label, apart in zip(pictures, labels.tolist(), torn, strict=True):
        log_prob = float(class_log_probs_of(found.net, image)[label])
        seen = Recognised(label, log_prob, apart, least=found.recognised)
        accepted.append(seen.accepted)
    return accepted


def judged_of(run: Run, found: Checkpoint, workers: Workers) -> Iterator[Judged]:
    """What this process learns from in each step besides real images: as many that the averaged
    weights have drawn.

    found: of the model that the run began with. Of its net only the settings count.
    """
    assert isinstance(run.net, Conditional)
    share, seed = run.config.batch // workers.count, run.config.seed * run.config.images
    for step in range(0, run.config.images // run.config.batch, ROUND):
        count = share * min(ROUND, run.config.images // run.config.batch - step)
        first = seed + step * run.config.batch + workers.rank * count
        drawn = draw(replace(found, net=run.exported.eval()), count, first)
        if not workers.rank:
            accepted = float(drawn.accepted.double().mean())
            print(f"{run.images:,} images: accepts {accepted:.3f} of its own", file=sys.stderr)
        weights = drawn.weights
        for at in range(0, count, share):
            part = slice(at, at + share)
            sequences = run.net.sequences(drawn.images[part], START + 1 + drawn.labels[part])
            yield Judged(sequences, drawn.nats[part], weights[part])


def learn(workers: Workers, found: Checkpoint, config: TrainConfig, data: Dataset) -> Run:
    """The run that begins with the weights of a checkpoint, at its end. data: the training
    images.
    """
    run = Run(found.net.config, config)
    run.start_from(found)
    net, of_real, began = run.net, loss_function(run.net, config), time.monotonic()
    assert isinstance(net, Conditional)

    def loss_of(part: Part | Judged) -> Tensor:
        if isinstance(part, Part):
            return of_real(part)
        prediction = net.predict(part.sequences)
        likelihood = log_likelihood(run.model, prediction.parameters, part.sequences.canvas)
        lost = loss(likelihood.sum(1), part.nats, part.weights)
        return lost / len(part.nats) * bits_per_dim(1.0, run.model)

    def clock() -> tuple[float, bool]:
        over = config.complete(run.images + config.batch, 0)
        return (time.monotonic() - began) / 60, over

    real, judged = parts_of(run, data, workers), judged_of(run, found, workers)
    coming: Iterator[list[Part | Judged]] = (
        [*parts, own] for parts, own in zip(real, judged, strict=False)
    )
    for _ in steps(run, coming, loss_of, workers, clock):
        pass
    return run


def train(
    found: Checkpoint, data: Dataset, out: Path, config: TrainConfig, *, command: str
) -> tuple[float, float]:
    """Train the weights of a checkpoint by preferences, and write a new one.

    data: those that the model was trained on. Returns bits/dim of the images held out, under their
    classes, before and after. Raises ValueError if the data have other classes than the model.
    """
    check_classes(data, found.class_names, found.name)
    if len(data.classes) != found.net.config.classes or len(data.images) < LEAST:
        raise ValueError(
            f"{found.name} has {found.net.config.classes} classes, and {data.name} has"
            f" {len(data.classes)} in {len(data.images)} pictures; give the data that the model was"
            " trained on"
        )
    count = len(data.images) - held_out(config.validation, data)
    seen, unseen = data.part(slice(count)), data.part(slice(count, None))
    before = evaluate(found.net, unseen.images, labels=unseen.labels).bits_per_dim
    ground = found.board["ground"]
    if found.net.config.grey and ground and "real_look" not in found.provenance:
        look = look_of(seen.images, found.net.config, ground[0], seen.labels)
        found = replace(found, provenance=found.provenance | {"real_look": asdict(look)})
    processes = count_for(config.batch, None, "cpu")
    with together(processes, learn, found, config, seen) as workers:
        run = learn(workers, found, config, seen)
    after = evaluate(run.exported.eval(), unseen.images, labels=unseen.labels).bits_per_dim
    old = found.provenance
    source = {name: fact for name, fact in old.items() if name not in OF_OLD_WEIGHTS}
    source |= run.history | provenance(
        data.name,
        data.classes,
        seed=config.seed,
        command=command,
        settings=asdict(config),
        bits_per_dim={"validation": after},
        history=f"It began with weights of `{old.get('command', found.name)}`."
        f" {old.get('history', '')} In the last {run.images:,} images it also drew as many itself,"
        " and learnt which of them it would accept.",
    )
    checkpoint.save(out, run.exported, source, card(out.name, run.model, source))
    return before, after


def check(found: Checkpoint, out: Path) -> None:
    """Raise ValueError if a model cannot learn so, or if `out` exists."""
    if not found.net.config.class_first:
        raise ValueError(
            f"{found.name} does not recognise what it draws; give a model that draws the class"
            " first, such as mnist-conditional"
        )
    if obstacle := processor_obstacle(found.net.config):
        raise ValueError(f"{found.name} cannot be drawn from with the compiled engine: {obstacle}")
    if out.exists():
        raise ValueError(f"{out} exists; give another --out")


def settings_of(found: Checkpoint, images: int, augment: Augmentation, seed: int) -> TrainConfig:
    """The settings of such a run. Raises ValueError."""
    batch = TrainConfig().batch
    if images < batch:
        raise ValueError(f"--images must be at least {batch}, got {images}")
    return TrainConfig(
        images=images // batch * batch,
        learning_rate=RATE,
        warmup_images=images // 20,
        head_share=1.0 if found.net.config.head == "categorical" else TrainConfig().head_share,
        augment=augment,
        class_weight=40,
        readings=1,
        ema=0.99,
        seed=seed,
        compile=False,
    )


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description="Train a model on images that it draws itself, by whether it would accept them."
    )
    parser.add_argument("model", help="name of a model, or its checkpoint folder")
    parser.add_argument("--data", required=True, help="what it was trained on")
    parser.add_argument("--out", type=Path, required=True, help="folder for the new checkpoint")
    parser.add_argument(
        "--images", type=int, default=12_000, help="drawn ones, and as many real ones; 12000"
    )
    parser.add_argument(
        "--augment", default="none", choices=get_args(Augmentation), help="of real ones; none"
    )
    parser.add_argument("--checkpoints", type=Path, help="folder of the models")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(args)
    limit_threads()
    out, command = given.out, f"python -m linpix.training.preferences {shlex.join(args)}"
    try:
        found = checkpoint.named(given.model, given.checkpoints)
        check(found, out)
        config = settings_of(found, given.images, given.augment, given.seed)
        data = load_existing(given.data, "train", found.net.config)
        with locked(out.with_name(out.name + ".training"), out, "give another --out"):
            before, after = train(found, data, out, config, command=command)
    except (ChildProcessError, FloatingPointError):
        sys.exit(
            "preferences: a process has ended, perhaps because memory ran out, or a gradient is no"
            " longer a number; nothing was written, so run the command again"
        )
    except (ValueError, OSError) as error:
        sys.exit(f"preferences: {error}")
    print(f"{before:.4f} bits/dim of images held out before, {after:.4f} after")


if __name__ == "__main__":
    main(sys.argv[1:])
