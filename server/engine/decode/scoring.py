"""Likelihoods, computed between quanta in small pieces, and as HTTP and the command line report them."""

import logging
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linpix.model.checkpoint import Checkpoint
from linpix.model.likelihood import Scoring, posterior

from ... import logs
from ...errors import Impossible

logger = logging.getLogger("linpix")


@dataclass(slots=True, eq=False)
class ScoringJob:
    """A request's image that is to be scored."""

    request: str
    client: str
    scoring: Scoring


class ScoringQueue:
    """Images to be scored, the clients in turn. Used by the engine thread only; `busy` may be read by any thread."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[ScoringJob]] = {}  # by client; the first client is next
        self._rests_until = 0.0                      # no piece before, while images are drawn; by perf_counter

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def append(self, score: ScoringJob) -> None:
        self._waiting.setdefault(score.client, deque()).append(score)

    def cancel(self, request: str) -> None:
        """Forget a request, or do nothing if it is not here."""
        for client, scores in [*self._waiting.items()]:
            for score in [score for score in scores if score.request == request]:
                scores.remove(score)
            if not scores:
                del self._waiting[client]

    def advance(self, *, drawing: bool) -> tuple[ScoringJob, Exception | None] | None:
        """Compute one piece of the first image. Returns the image that is done with it, and what it raised.

        drawing: images are being drawn. A piece then waits for as long as the one before it took, so that these images
        have at least half of the time: quanta may be far shorter than pieces.
        """
        began = time.perf_counter()
        if drawing and began < self._rests_until:
            return None
        client, scores = next(iter(self._waiting.items()))
        error: Exception | None = None
        more = False
        try:
            more = scores[0].scoring.advance()
        except Exception as raised:
            logger.exception("a likelihood could not be computed", extra=logs.of(scores[0].request))
            error = raised
        now = time.perf_counter()
        self._rests_until = now + (now - began)
        if more:
            return None
        ended = scores.popleft()
        del self._waiting[client]
        if scores:
            self._waiting[client] = scores  # behind the others
        return ended, error


def scoring_of(checkpoint: Checkpoint, canvas: NDArray[np.uint8], known: NDArray[np.bool_], label: int | None, *,
               every: bool) -> Scoring:
    """canvas, known: (T,), something hidden · every: score all classes, instead of label. Raises Impossible."""
    marginal = checkpoint.net.config.first_marginal
    if marginal and not known[0] and not marginal[canvas[0]]:
        raise Impossible(checkpoint.name)
    return Scoring(checkpoint.net, canvas, known, [*range(len(checkpoint.class_names))] if every else
                   None if label is None else [label])


def likelihood(scoring: Scoring, label: int | None, checkpoint: Checkpoint, *, every: bool
               ) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Bits of each sub-pixel, (T,), NaN where not counted, and the other results of a complete Scoring of scoring_of.

    Without a label, if every class was scored: of a mixture of the classes, each as probable as what is known makes it.
    every: report each class too.
    """
    hidden = scoring.hidden.cpu().numpy()
    log_probs = scoring.log_probs.double().cpu().numpy()[:, hidden]
    own = scoring.mixed if label is None else log_probs[label if every else 0]
    bits, counted = np.full(len(hidden), np.nan), len(own)
    bits[hidden] = -own / math.log(2)
    names, totals = checkpoint.class_names, log_probs.sum(1)

    def measured(nats: float) -> dict[str, float]:
        return {"log_likelihood": float(nats), "bits_per_dim": float(-nats / math.log(2) / counted)}

    classes = [{"label": names[index], "posterior": float(share), **measured(totals[index])}
               for index, share in sorted(enumerate(posterior(totals + scoring.priors)), key=lambda pair: -pair[1])
               ] if every else None
    return bits, {"label": None if label is None else names[label], "counted": counted, **measured(own.sum()),
                  "labels": classes}
