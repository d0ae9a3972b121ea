"""The command that tells how probable a picture is: `linpix score`, by the same functions as the service."""

import argparse
import json
from pathlib import Path

from linpix.model import checkpoint as checkpoints

from ..engine.decode.scoring import likelihood, scoring_of
from ..pictures.likelihoods import map_png, numbers, read_scored
from .draw import class_of


def score(given: argparse.Namespace) -> None:
    if given.out and (Path(given.out).suffix.lower() != ".png" or not Path(given.out).parent.is_dir()):
        raise ValueError(f"--out {given.out}: the map is written as a PNG; give NAME.png in an existing folder")
    picture = Path(given.image).read_bytes()  # before the model: a wrong path is told at once
    mask = Path(given.mask).read_bytes() if given.mask else None
    checkpoint = checkpoints.read(checkpoints.find(given.model, given.checkpoints))
    label, every, config = class_of(given.label, checkpoint), given.labels == "all", checkpoint.net.config
    if every and not checkpoint.class_names:
        raise ValueError(f"--labels all needs a model with classes, and {checkpoint.name} has none; leave it out")
    occluded = read_scored(picture, config, mask=mask, keep_rows=given.keep_rows)
    scoring = scoring_of(checkpoint, occluded.canvas, occluded.known, label, every=every).complete()
    bits, found = likelihood(scoring, label, checkpoint, every=every)
    if given.out:
        Path(given.out).write_bytes(map_png(bits, config, given.scale))
    if given.json:
        print(json.dumps({"model": checkpoint.name, "checkpoint": checkpoint.digest,
                          "conditioning": occluded.conditioning, "known": occluded.known_count, **found,
                          "map": numbers(bits, config)}))
        return
    whose = f"as {found['label']}" if label is not None else "of any class" if every else "without a class"
    exception = checkpoint.net.attention.exception
    print(f"{found['bits_per_dim']:.4f} bits/dim{' *' if exception else ''}, log-likelihood "
          f"{found['log_likelihood']:.2f} nats, of {found['counted']:,} sub-pixels given {occluded.known_count:,} "
          f"known ones, {whose}" + (f"; map in {given.out}" if given.out else ""))
    for entry in found["labels"] or []:
        print(f"{entry['posterior']:7.4f}  {entry['label']:12}  {entry['bits_per_dim']:.4f} bits/dim  "
              f"{entry['log_likelihood']:.2f} nats")
    if exception:
        print(f"* {exception}, so this is not a likelihood in the strict sense")
