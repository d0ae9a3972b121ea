"""How probable an image is: log-probabilities of its hidden sub-pixels given what is known, under several classes.

By the parallel form, piece by piece: a piece is a bounded number of tokens of a bounded number of classes, so that
it takes a bounded time, and a service can do something else between two pieces. Pieces depend on the model and the
number of classes alone, so that an image always gets the same numbers.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import mixture
from .attention import State
from .inputs import check_known
from .transformer import PREFILL_TOKENS, Transformer

PIECE = 1.6e8  # multiplications in one piece, those of its last token times its tokens: some 10 ms on two cores

NOT_FINITE = "the model produced NaN or infinite values for this image"


class Scoring:
    """The log-likelihood of one image, under as many classes as there are labels, computed piece by piece.

    log_probs: (labels, T) float32, in nats: of each sub-pixel that is hidden, given all earlier sub-pixels; given all
    known ones too, if the model is conditional. NaN where a sub-pixel is known. Complete when `advance` returns False.
    """

    log_probs: Tensor
    priors: NDArray[np.float64]  # (labels,), their log-probabilities given what is known: equal, or as the model tells

    def __init__(self, net: Transformer, canvas: NDArray[np.uint8], known: NDArray[np.bool_] | None = None,
                 labels: Sequence[int | None] | None = None) -> None:
        """canvas, known: (T,), nothing known if absent. Raises ValueError.

        labels: classes, None for the unconditional start; if absent, what an image without a class may begin with: that
        start, or every class if the model draws it first.
        """
        self.net, config = net, net.config
        self.asked = canvas, known, labels  # as given, so that another process can compute it
        if labels is None:
            labels = range(config.classes) if config.class_first else (None,)
        known = np.zeros(config.subpixels, np.bool_) if known is None else known
        check_known(config, known)
        if known.all():
            raise ValueError("nothing is hidden: at least one sub-pixel must be, to have a likelihood")
        self.hidden = torch.from_numpy(~known).to(net.device)
        self._canvas = torch.from_numpy(canvas.copy()).to(net.device)
        reads = net.patches is not None and known.any()
        self._known = ~self.hidden if reads else None
        self._start = torch.tensor([net.start_index(label) for label in labels], device=net.device)
        self.priors = np.full(len(labels), uniform_prior(len(labels)))
        self._told = [] if None in labels or len(labels) == 1 or not reads else list(labels)
        self._pieces = self._run(int(np.flatnonzero(~known)[-1]) // config.token_size + 1)

    def advance(self) -> bool:
        """Compute one piece; returns whether there are more. Raises FloatingPointError if the model gives NaN."""
        return next(self._pieces, False)

    def take(self, log_probs: NDArray[np.float32], priors: NDArray[np.float64]) -> None:
        """What another process found for what was `asked`, in place of `advance`."""
        self.log_probs, self.priors = torch.tensor(log_probs, device=self.net.device), priors

    def complete(self) -> "Scoring":
        """Compute all that is left."""
        while self.advance():
            pass
        return self

    @property
    def mixed(self) -> NDArray[np.float64]:
        """(n,): log-probabilities in nats of the hidden sub-pixels, where the image is of any of the labels."""
        return mixture_of(self.log_probs[:, self.hidden].double().cpu().numpy(), self.priors)

    @property
    def totals(self) -> NDArray[np.float64]:
        """(labels,): the log-likelihood in nats; -inf if a value is impossible, which sub-pixel 0 alone may be."""
        sums: NDArray[np.float64] = self.log_probs[:, self.hidden].double().sum(1).cpu().numpy()
        return sums

    def _run(self, length: int) -> Iterator[bool]:
        """length: tokens up to the last hidden one."""
        # not before: many may wait, and of many classes this is large
        self.log_probs = torch.full((len(self._start), len(self.hidden)), torch.nan, device=self.net.device)
        attention, rows, most, tokens = self.net.attention, len(self._start), 1, length
        if self._told and self._known is not None:
            scores = self.net.read(self._canvas[None], self._known[None], attention.new_state(1), torch.tensor([1]))
            self.priors = scores.double().log_softmax(-1)[0, self._told].cpu().numpy()
        if attention.steps_as:  # else there are no pieces: the whole image, one class after the other
            a_token = self.net.multiplications + attention.memory_multiplications(length - 1)
            groups = -(-rows // max(1, int(PIECE / (PREFILL_TOKENS * a_token))))
            most = -(-rows // groups)
            tokens = max(1, int(PIECE / (most * a_token * PREFILL_TOKENS))) * PREFILL_TOKENS
        for first in range(0, rows, most):
            at = slice(first, min(first + most, rows))
            state = attention.new_state(most) if attention.steps_as else None
            for begin in range(0, length, tokens):
                end = min(begin + tokens, length)
                self._score(at, begin, end, state)
                yield at.stop < rows or end < length

    @torch.inference_mode()
    def _score(self, rows: slice, begin: int, end: int, state: State | None) -> None:
        net, start = self.net, self._start[rows]
        canvas = self._canvas.expand(len(start), -1)
        if state is None:
            parameters = net(canvas, start)[:, begin:end]
        else:
            known = None if self._known is None else self._known.expand(len(start), -1)
            slots = torch.arange(1, len(start) + 1)
            parameters = net.parameters_between(canvas, begin, end, start, state, slots, known)
        at = slice(begin * net.config.token_size, end * net.config.token_size)
        hidden, values = self.hidden[at], canvas[:, at]
        log_probs = mixture.log_likelihood(parameters, values)
        finite = log_probs.isfinite() | ~hidden
        if net.config.first_marginal and begin == 0:  # no start token: sub-pixel 0 has the training set's marginal
            log_probs[:, 0], finite[:, 0] = torch.tensor(net.config.first_marginal).log()[values[:, 0].long()], True
        if not bool(finite.all()):
            raise FloatingPointError(NOT_FINITE)
        self.log_probs[rows, at] = log_probs.where(hidden, torch.nan)


def uniform_prior(classes: int) -> float:
    """The log-probability in nats of each of so many classes that are equally probable."""
    return -math.log(classes)


def class_log_probs(scores: Tensor) -> NDArray[np.float64]:
    """Log-probabilities in nats, (B, classes), of scores that Transformer.read gives.

    Raises FloatingPointError if the model gives NaN or infinity.
    """
    if not bool(scores.isfinite().all()):
        raise FloatingPointError(NOT_FINITE)
    found: NDArray[np.float64] = scores.double().log_softmax(-1).cpu().numpy()
    return found


@torch.inference_mode()
def class_log_probs_of(net: Transformer, canvas: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Log-probabilities in nats of the classes of a whole image, (classes,), by a model that draws the class first.

    It reads the image as it reads what is known of an occluded one. Its class head was trained to tell classes apart:
    it sees malformed digits to which `Scoring` gives nearly all of the probability, since the same weights drew them.
    canvas: (T,). Raises FloatingPointError if the model gives NaN.
    """
    image = torch.from_numpy(canvas.copy()).to(net.device)[None]
    scores = net.read(image, torch.ones_like(image, dtype=torch.bool), net.attention.new_state(1), torch.tensor([1]))
    found: NDArray[np.float64] = class_log_probs(scores)[0]
    return found


def mixture_of(log_probs: NDArray[np.float64], priors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log-probabilities of sub-pixels where the class is unknown.

    log_probs: (labels, n), of each given the ones before it · priors: (labels,), log-probabilities of the classes
    before the first of them · returns (n,). By the chain rule: their sum is the log of the mean likelihood, and with
    each sub-pixel the classes that expected it gain weight.
    """
    so_far = np.logaddexp.reduce(log_probs.cumsum(1) + priors[:, None], axis=0)
    differences: NDArray[np.float64] = np.diff(so_far, prepend=0.0)
    return differences


def posterior(log_likelihoods: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities of classes from log-likelihoods of an image and each of them, (classes,).

    NaN if the image is impossible under each of them.
    """
    weights = np.exp(log_likelihoods - log_likelihoods.max())
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares
