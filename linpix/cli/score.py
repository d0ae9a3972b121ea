"""How probable a picture is, and what a model looks at in it: `linpix score` and the same in
Python, by the same functions as the service.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linpix.model.checkpoint import Checkpoint, named
from linpix.model.config import ModelConfig
from linpix.model.inside import Inside
from linpix.model.likelihood import Scoring
from linpix.server.engine.job import class_of
from linpix.server.pictures import uploads
from linpix.server.pictures.encode import frame_of
from linpix.server.pictures.likelihoods import labels_of, likelihood, map_png, numbers

from .draw import torch_defaults, warn, warn_caller
from .pictures import read_given


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """How probable an image is. In a notebook it is shown as its map: bright where a pixel was not
    expected.
    """

    bits_per_dim: float  # of the sub-pixels counted: all, or the hidden ones
    log_likelihood: float  # of these, in nats
    map: NDArray[np.float64]  # bits, (height, width) or (height, width, 3); NaN where known
    posterior: dict[str, float]  # of each class, the most probable first; empty unless asked for
    exact: bool  # False: classes of the mixture were left out, and bits_per_dim may be lower
    _config: ModelConfig

    def __repr__(self) -> str:
        text = f"{self.bits_per_dim:.4f} bits/dim, log-likelihood {self.log_likelihood:.2f} nats"
        if self.posterior:
            name, share = next(iter(self.posterior.items()))
            text += f", {name} with {share:.3g}"
        return f"<{text}>"

    def _repr_png_(self) -> bytes:
        return map_png(
            self.map.reshape(-1),
            self._config,
            frame_of(max(1, 280 // self._config.width), self._config),
        )


@torch_defaults()
def score(
    model: str | Path,
    image: object,
    known: object,
    label: int | str | None,
    posterior: object,
    plausible: object,
    checkpoints: str | Path | None,
) -> Score:
    """`linpix.score`."""
    for name, value in {"posterior": posterior, "plausible": plausible}.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    checkpoint = named(model, checkpoints)
    config, number = checkpoint.net.config, class_of(label, checkpoint)
    found = read_given(image, known, config, scored=True)
    warn_caller(uploads.warnings_of(found))
    every = "posterior" if posterior else ""
    bits, facts = _scored(checkpoint, found, number, every, bool(plausible))
    return Score(
        facts["bits_per_dim"],
        facts["log_likelihood"],
        bits.reshape(config.image_shape),
        {entry["label"]: entry["posterior"] for entry in facts["labels"] or []},
        facts["exact"],
        config,
    )


@torch_defaults()
def inside(
    model: str | Path,
    image: object,
    known: object,
    label: int | str | None,
    checkpoints: str | Path | None,
) -> Inside:
    """`linpix.inside`."""
    checkpoint = named(model, checkpoints)
    found = read_given(image, known, checkpoint.net.config, scored=True)
    warn_caller(uploads.warnings_of(found))
    number = class_of(label, checkpoint)
    return Inside(checkpoint.net, found.canvas, found.known, number).complete()


def _scored(
    checkpoint: Checkpoint,
    picture: uploads.Upload,
    label: int | None,
    every: str,
    plausible: bool,
) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """As `likelihood`. every: the option that asks for all classes, if it is given. Raises
    ValueError.
    """
    if every and not checkpoint.class_names:
        raise ValueError(
            f"{every} needs a model with classes, and {checkpoint.name} has none; leave it out"
        )
    labels = labels_of(checkpoint, picture, label, every=bool(every))
    scoring = Scoring(
        checkpoint.net, picture.canvas, picture.known, labels, plausible=plausible, asked=label
    ).complete()
    return likelihood(
        checkpoint,
        picture.known,
        scoring.log_probs.cpu().numpy(),
        scoring.priors,
        label,
        every=bool(every),
    )


def run(given: argparse.Namespace) -> None:
    if given.out and (
        Path(given.out).suffix.lower() != ".png" or not Path(given.out).parent.is_dir()
    ):
        raise ValueError(
            f"--out {given.out}: the map is written as a PNG; give NAME.png in an existing folder"
        )
    picture = Path(given.image).read_bytes()  # before the model: a wrong path is reported at once
    mask = Path(given.mask).read_bytes() if given.mask else None
    checkpoint = named(given.model, given.checkpoints)
    label, config = class_of(given.label, checkpoint), checkpoint.net.config
    every = "--labels all" if given.labels else ""
    upload = uploads.read(picture, config, mask=mask, keep_rows=given.keep_rows, scored=True)
    warn("score", uploads.warnings_of(upload))
    bits, found = _scored(checkpoint, upload, label, every, bool(given.classes))
    facts = upload.facts
    if given.out:
        Path(given.out).write_bytes(map_png(bits, config, frame_of(given.scale, config)))
    if given.json:
        result = {
            "model": checkpoint.name,
            "checkpoint": checkpoint.digest,
            "conditioning": facts["conditioning"],
            "known": facts["known"],
            **found,
            "map": numbers(bits, config),
        }
        print(json.dumps(result))
        return
    unlabelled = "of any class" if every or config.class_first else "without a class"
    class_words = unlabelled if label is None else f"as {found['label']}"
    caveat = checkpoint.net.attention.exception
    star = " *" if caveat else ""
    map_words = f"; map in {given.out}" if given.out else ""
    print(
        f"{found['bits_per_dim']:.4f} bits/dim{star}, log-likelihood"
        f" {found['log_likelihood']:.2f} nats, of {found['counted']:,} sub-pixels given"
        f" {facts['known']:,} known ones, {class_words}{map_words}"
    )
    for entry in found["labels"] or []:
        print(
            f"{entry['posterior']:7.4f}  {entry['label']:12}  {entry['bits_per_dim']:.4f} bits/dim "
            f" {entry['log_likelihood']:.2f} nats"
        )
    if not found["exact"]:
        print("a lower bound: implausible classes were left out (--classes plausible)")
    if caveat:
        print(f"* {caveat}, so this is not strictly a likelihood")
