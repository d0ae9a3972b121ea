"""Pictures whose likelihood is computed, and the map that shows it: bright where the model did not
expect a pixel.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linpix.model.checkpoint import Checkpoint
from linpix.model.config import ModelConfig
from linpix.model.likelihood import mixture_of, posterior

from ..errors import InvalidRequest
from .encode import Frame, encoded, framed
from .uploads import Upload

# bits of a sub-pixel that is drawn white: the cost of a uniform guess among 256 values
WHITE_BITS = 8.0


def labels_of(
    checkpoint: Checkpoint, picture: Upload, label: int | None, *, every: bool
) -> Sequence[int | None] | None:
    """The classes under which Scoring scores a picture: `every` one, or label. Raises
    InvalidRequest.
    """
    marginal = checkpoint.net.config.first_marginal
    if marginal and not picture.known[0] and not marginal[picture.canvas[0]]:
        raise InvalidRequest(
            f"{checkpoint.name} considers the value of the first sub-pixel impossible: none of its"
            " training pictures starts with it; send another picture, or keep the first pixel with"
            " a mask",
            param="image",
        )
    return range(len(checkpoint.class_names)) if every else None if label is None else [label]


def likelihood(
    checkpoint: Checkpoint,
    known: NDArray[np.bool_],
    log_probs: NDArray[np.float32],
    priors: NDArray[np.float64],
    label: int | None,
    *,
    every: bool,
) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Bits of each sub-pixel, (T,), NaN where not counted, and the other results of a Scoring under
    labels_of.

    log_probs: (labels, T) · priors: (labels,), as in Scoring · every: report each class too.
    Without a label, if every class was scored: of a mixture of the classes, each as probable as
    what is known makes it. Classes that Scoring has left out are not reported.
    """
    own_probs = log_probs.astype(np.float64)[:, ~known]
    own = mixture_of(own_probs, priors) if label is None else own_probs[label if every else 0]
    bits, counted = np.full(len(known), np.nan), len(own)
    bits[~known] = -own / math.log(2)
    names, totals = checkpoint.class_names, own_probs.sum(1)

    def measured(nats: float) -> dict[str, float]:
        return {"log_likelihood": float(nats), "bits_per_dim": float(-nats / math.log(2) / counted)}

    classes = None
    if every:
        shares = enumerate(posterior(totals + priors))
        classes = [
            {"label": names[index], "posterior": float(share), **measured(totals[index])}
            for index, share in sorted(shares, key=lambda pair: -pair[1])
            if np.isfinite(totals[index])
        ]
    return bits, {
        "label": None if label is None else names[label],
        "counted": counted,
        **measured(own.sum()),
        "exact": label is not None or bool(np.isfinite(totals).all()),
        "labels": classes,
    }


def numbers(bits: NDArray[np.float64], config: ModelConfig) -> list[list[list[float | None]]]:
    """Bits (T,) as lists of height x width x channels for JSON; None for NaN."""
    rounded = bits.round(6).astype(object)
    rounded[np.isnan(bits)] = None
    return rounded.reshape(config.height, config.width, config.channels).tolist()


def map_png(bits: NDArray[np.float64], config: ModelConfig, frame: Frame) -> bytes:
    """A grey PNG of bits (T,), the mean of each pixel's channels: 0 is black, WHITE_BITS white, NaN
    transparent.

    The frame around the picture is transparent too.
    """
    mean = bits.reshape(config.height, config.width, config.channels).mean(-1)
    counted = ~np.isnan(mean)
    grey = np.where(counted, mean, 0) * (255 / WHITE_BITS)
    picture = np.stack([np.rint(grey.clip(0, 255)), counted * 255], -1).astype(np.uint8)
    return encoded(framed(picture, frame, around="constant"))
