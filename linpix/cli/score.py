"""How probable a picture is: `linpix score` and the same in Python, by the same functions as the service."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linpix.model.checkpoint import Checkpoint, find, read
from linpix.model.likelihood import Scoring
from linpix.model.team import limit_threads
from linpix.server.engine.job import class_of
from linpix.server.pictures.encode import enlarged
from linpix.server.pictures.likelihoods import labels_of, likelihood, map_png, numbers, read_scored
from linpix.server.pictures.pictures import Occluded
from linpix.server.pictures.uploads import outside

from .draw import flattened, warn


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    bits_per_dim: float            # of the sub-pixels counted: all, or the hidden ones
    log_likelihood: float          # of these, in nats
    map: NDArray[np.float64]       # bits, (height, width) or (height, width, 3); NaN where known
    posterior: dict[str, float]    # of each class, the most probable first; empty unless asked for


def score(model: str | Path, image: ArrayLike, known: ArrayLike | None, label: int | str | None, posterior: bool,
          folder: str | Path | None) -> Score:
    """`linpix.score`."""
    limit_threads()
    checkpoint = read(find(str(model), None if folder is None else Path(folder)))
    config, number = checkpoint.net.config, class_of(label, checkpoint)
    if posterior and not checkpoint.class_names:
        raise ValueError(f"posterior needs a model with classes, and {checkpoint.name} has none; leave it out")
    hidden = np.zeros((config.height, config.width), np.bool_)
    canvas, given = flattened(np.asarray(image), hidden if known is None else np.asarray(known), config)
    if given.all():
        raise ValueError("known hides no pixel, so there is nothing to score: set it to false for at least one pixel, "
                         "or leave it out")
    bits, found = _scored(checkpoint, Occluded(canvas, given), number, every=posterior)
    return Score(found["bits_per_dim"], found["log_likelihood"], bits.reshape(checkpoint.net.config.image_shape),
                 {entry["label"]: entry["posterior"] for entry in found["labels"] or []})


def _scored(checkpoint: Checkpoint, picture: Occluded, label: int | None, *, every: bool
            ) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """As `likelihood`."""
    labels = labels_of(checkpoint, picture, label, every=every)
    scoring = Scoring(checkpoint.net, picture.canvas, picture.known, labels).complete()
    return likelihood(checkpoint, picture.known, scoring.log_probs.cpu().numpy(), scoring.priors, label, every=every)


def run(given: argparse.Namespace) -> None:
    if given.out and (Path(given.out).suffix.lower() != ".png" or not Path(given.out).parent.is_dir()):
        raise ValueError(f"--out {given.out}: the map is written as a PNG; give NAME.png in an existing folder")
    picture = Path(given.image).read_bytes()  # before the model: a wrong path is reported at once
    mask = Path(given.mask).read_bytes() if given.mask else None
    checkpoint = read(find(given.model, given.checkpoints))
    label, every, config = class_of(given.label, checkpoint), given.labels == "all", checkpoint.net.config
    if every and not checkpoint.class_names:
        raise ValueError(f"--labels all needs a model with classes, and {checkpoint.name} has none; leave it out")
    occluded = read_scored(picture, config, mask=mask, keep_rows=given.keep_rows)
    warn("score", outside(occluded))
    bits, found = _scored(checkpoint, occluded, label, every=every)
    if given.out:
        Path(given.out).write_bytes(map_png(bits, config, enlarged(config, given.scale)))
    if given.json:
        print(json.dumps({"model": checkpoint.name, "checkpoint": checkpoint.digest,
                          "conditioning": occluded.conditioning, "known": occluded.known_count, **found,
                          "map": numbers(bits, config)}))
        return
    unlabelled = "of any class" if every or config.class_first else "without a class"
    whose = unlabelled if label is None else f"as {found['label']}"
    exception = checkpoint.net.attention.exception
    print(f"{found['bits_per_dim']:.4f} bits/dim{' *' if exception else ''}, log-likelihood "
          f"{found['log_likelihood']:.2f} nats, of {found['counted']:,} sub-pixels given {occluded.known_count:,} "
          f"known ones, {whose}" + (f"; map in {given.out}" if given.out else ""))
    for entry in found["labels"] or []:
        print(f"{entry['posterior']:7.4f}  {entry['label']:12}  {entry['bits_per_dim']:.4f} bits/dim  "
              f"{entry['log_likelihood']:.2f} nats")
    if exception:
        print(f"* {exception}, so this is not strictly a likelihood")
