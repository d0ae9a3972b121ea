"""Preferences: a model learns from images that it draws itself, by whether it would accept them.

    python -m linpix.training.preferences MODEL --data DIR --out FOLDER

A model that draws the class first draws an image again until it recognises it and it is in one
piece (model/attempts.py). Here it learns to need fewer attempts: what it would accept becomes more
probable, and what it would refuse less, while it goes on learning from as many real images. The
loss is that of binary classifier optimisation (Jung et al., 2024, arXiv 2404.04656), a form of
direct preference optimisation for single images instead of pairs. Its gradient fades as an image
moves, so a refused one cannot lower it without end. Images are drawn anew every ROUND steps, and
used once, so they are always those of nearly the present weights.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

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
from linpix.model.likelihood import class_log_probs
from linpix.model.packing import pack
from linpix.model.sequences import Sequences

from .batches import Part
from .datasets import Dataset, check_classes, load
from .evaluate import decoded, evaluate
from .export import card, provenance
from .files import writing
from .loop import held_out, loss_function, parts_of, steps
from .run import Augmentation, Run, TrainConfig, stop_signals
from .workers import Workers, count_for, together

ROUND = 100  # steps from one drawing to the next
SHARPNESS = 0.3  # a change of so many nats, inverted, halves an image's gradient and more
WEIGHT = 1.5  # of a refused image, relative to a real one; all accepted ones weigh as much together
RATE = 4e-4  # peak learning rate
FIRST_SEED = 5_000_000_000  # of the images; no request is likely to draw the same
MEASURED = ("class_agreement", "look", "bits_per_dim")  # of other weights


class Drawn(NamedTuple):
    """Images of a model, each drawn once, with a class."""

    images: Tensor  # (N, T) uint8
    labels: Tensor  # (N,) int64
    nats: Tensor  # (N,): log-likelihood of each, given its class, when it was drawn
    accepted: Tensor  # (N,) bool

    @property
    def weights(self) -> Tensor:
        """(N,): of accepted ones above 0, of others below; together 0."""
        share = float(self.accepted.double().mean())
        least = 1 / len(self.accepted)
        return torch.where(self.accepted, WEIGHT * (1 - share) / max(share, least), -WEIGHT).float()


class Preferred(NamedTuple):
    """Drawn images of which a gradient is computed at once."""

    sequences: Sequences
    nats: Tensor  # (B,), as in Drawn
    weights: Tensor  # (B,), as in Drawn


def loss(log_likelihood: Tensor, nats: Tensor, weights: Tensor) -> Tensor:
    """The loss of drawn images in nats, (): that of a classifier whose score is how much more
    probable an image is than when it was drawn. All (B,).

    It is so scaled that the gradient of an image that has not moved is its weight.
    """
    score = SHARPNESS * weights.sign() * (log_likelihood - nats)
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
        start=torch.tensor([net.start_index(label) for label in labels.tolist()]),
        seed=(FIRST_SEED + numbers).tolist(),
    ).sum(1)
    return Drawn(canvas[1:], labels, nats, torch.tensor(accepted_of(found, canvas[1:], labels)))


def accepted_of(found: Checkpoint, images: Tensor, labels: Tensor) -> list[bool]:
    """Which images, (B, T), the model would not draw again."""
    count, net, accepted = len(images), found.net, []
    assert isinstance(net, Conditional)
    state, slots = net.attention.new_state(count), torch.arange(1, count + 1)
    scores = net.read(images, torch.ones_like(images, dtype=torch.bool), state, slots)
    log_probs = class_log_probs(scores)
    torn = found.torn(images.numpy(), np.zeros(images.shape, np.bool_), labels.tolist())
    for label, of_classes, apart in zip(labels.tolist(), log_probs, torn, strict=True):
        seen = Recognised(label, float(of_classes[label]), apart, least=found.recognised)
        accepted.append(seen.accepted)
    return accepted


def preferred_of(run: Run, found: Checkpoint, workers: Workers) -> Iterator[Preferred]:
    """What this process learns from in each step besides real images: as many that it has drawn.

    found: of the model that the run began with. Of its net only the settings count.
    """
    assert isinstance(run.net, Conditional)
    share, step = run.config.batch // workers.count, run.step
    while True:
        first = (step * workers.count + workers.rank * ROUND) * share
        drawn = draw(replace(found, net=run.exported.eval()), ROUND * share, first)
        if not workers.rank:
            accepted = float(drawn.accepted.double().mean())
            print(f"{run.images:,} images: accepts {accepted:.3f} of its own", file=sys.stderr)
        weights = drawn.weights
        for at in range(0, ROUND * share, share):
            part = slice(at, at + share)
            sequences = run.net.sequences(drawn.images[part], START + 1 + drawn.labels[part])
            yield Preferred(sequences, drawn.nats[part], weights[part])
        step += ROUND


def learn(
    run: Run, found: Checkpoint, data: Dataset, stop: Sequence[int], workers: Workers
) -> None:
    """Take the steps of a run that began with the weights of `found`, until its images are over or
    a signal is in `stop`. data: the training images.
    """
    net, of_real, began = run.net, loss_function(run.net, run.config), time.monotonic()
    assert isinstance(net, Conditional)

    def loss_of(part: Part | Preferred) -> Tensor:
        if isinstance(part, Part):
            return of_real(part)
        prediction = net.predict(part.sequences)
        likelihood = log_likelihood(run.model, prediction.parameters, part.sequences.canvas)
        nats = loss(likelihood.sum(1), part.nats, part.weights)
        return nats / len(part.nats) * bits_per_dim(1.0, run.model)

    def clock() -> tuple[float, bool]:
        over = run.config.complete(run.images + run.config.batch, 0)
        return (time.monotonic() - began) / 60, over or bool(stop)

    real, drawn = parts_of(run, data, workers), preferred_of(run, found, workers)
    coming: Iterator[list[Part | Preferred]] = (
        [*parts, preferred] for parts, preferred in zip(real, drawn, strict=False)
    )
    for _ in steps(run, coming, loss_of, workers, clock):
        pass


def _begun(found: Checkpoint, config: TrainConfig) -> Run:
    run = Run(found.net.config, config)
    run.start_from(found)
    return run


def _take_part(workers: Workers, folder: Path, config: TrainConfig, data: Dataset) -> None:
    found = checkpoint.read(folder)
    learn(_begun(found, config), found, data, [], workers)


def train(
    found: Checkpoint, data: Dataset, out: Path, config: TrainConfig, *, command: str
) -> dict[str, float]:
    """Train the weights of a checkpoint by preferences, and write a new one, also after SIGTERM or
    SIGINT.

    data: those that the model was trained on. Returns bits/dim of the images held out, under their
    classes, before and after. Raises ValueError if the model does not draw the class first, or if
    the compiled engine cannot draw with it.
    """
    check_classes(data, found.class_names, found.name)
    count = len(data.images) - held_out(config.validation, data)
    seen, unseen = data.part(slice(count)), data.part(slice(count, None))
    run, stop = _begun(found, config), stop_signals()
    before = evaluate(run.exported, unseen.images, labels=unseen.labels).bits_per_dim
    processes = count_for(config.batch, None, "cpu")
    with together(processes, _take_part, found.folder, config, seen) as workers:
        learn(run, found, seen, stop, workers)
    after = evaluate(run.exported.eval(), unseen.images, labels=unseen.labels).bits_per_dim
    kept = {name: fact for name, fact in found.provenance.items() if name not in MEASURED}
    history = run.history["history"] + (
        f" With the last {run.images:,} it learnt from as many images of its own which of them"
        " attempts accept."
    )
    source = kept | provenance(
        data.name,
        data.classes,
        **run.history | {"history": history},
        seed=config.seed,
        command=command,
        settings=asdict(config),
        bits_per_dim={"validation": after},
    )
    with writing(out):
        checkpoint.save(out, run.exported, source, card(out.name, run.model, source))
    return {"before": before, "after": after}


def check(found: Checkpoint, data: Path, out: Path) -> None:
    """Raise ValueError if a model cannot learn so, if its data are not there, or if `out` is."""
    if not found.net.config.class_first:
        raise ValueError(
            f"{found.name} does not recognise what it draws; give a model that draws the class"
            " first, such as mnist-conditional"
        )
    if obstacle := processor_obstacle(found.net.config):
        raise ValueError(f"{found.name} cannot be drawn from with the compiled engine: {obstacle}")
    if out.exists():
        raise ValueError(f"{out} exists; give another --out")
    if not data.exists():
        raise ValueError(f"--data {data} does not exist; check the path")


def settings_of(found: Checkpoint, **given: Any) -> TrainConfig:
    """The settings of such a run; given: some of them. Raises ValueError."""
    if given["images"] < 1:  # 0 would have no end
        raise ValueError(f"images must be at least 1, got {given['images']}")
    return TrainConfig(
        learning_rate=RATE,
        warmup_images=given["images"] // 20,
        head_share=1.0 if found.net.config.head == "categorical" else TrainConfig().head_share,
        class_weight=40,
        readings=1,
        ema=0.99,
        compile=False,
        **given,
    )


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description="Train a model on images that it draws itself, by whether it would accept them."
    )
    parser.add_argument("model", help="name of a model, or its checkpoint folder")
    parser.add_argument("--data", type=Path, required=True, help="what it was trained on")
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
    try:
        found = checkpoint.named(given.model, given.checkpoints)
        check(found, given.data, given.out)
        bits = train(
            found,
            load(given.data, "train", found.net.config),
            given.out,
            settings_of(found, images=given.images, augment=given.augment, seed=given.seed),
            command="python -m linpix.training.preferences " + shlex.join(args),
        )
    except (ValueError, OSError, ChildProcessError, FloatingPointError) as error:
        sys.exit(f"preferences: {error}")
    print(f"{bits['before']:.4f} bits/dim of images held out before, {bits['after']:.4f} after")


if __name__ == "__main__":
    main(sys.argv[1:])
