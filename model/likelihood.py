"""The likelihood of an image: log-probabilities of its hidden sub-pixels given the known ones,
under several classes.

It is computed by the parallel form, piece by piece. A piece has a bounded number of tokens and of
classes, so it takes a bounded time, and a service can do other work between two pieces. How an
image is cut into pieces depends only on the model, the number of classes and the last hidden token,
so an image always gets the same numbers.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .attention import State
from .conditional import Conditional
from .heads import log_likelihood
from .inputs import check_known
from .transformer import PREFILL_TOKENS, Transformer

PLAUSIBLE = 1e-4  # least probability of a class that the class head finds possible

# multiplications in one piece (those of its last token times its tokens): some 10 ms on two cores
PIECE = 1.6e8

NOT_FINITE = "the model produced NaN or infinite values for this image"


class Scoring:
    """The log-likelihood of one image, under as many classes as there are labels, computed piece by
    piece.

    log_probs: (labels, T) float32, in nats: for each hidden sub-pixel, given all earlier sub-pixels
    and, if the model is conditional, all known ones. NaN where a sub-pixel is known. Complete when
    `advance` returns False.
    """

    log_probs: Tensor
    # (labels,), their log-probabilities given the known pixels: equal, or the model's
    priors: NDArray[np.float64]

    def __init__(
        self,
        net: Transformer,
        canvas: NDArray[np.uint8],
        known: NDArray[np.bool_] | None = None,
        labels: Sequence[int | None] | None = None,
        *,
        plausible: bool = False,
        asked: int | None = None,
    ) -> None:
        """canvas, known: (T,), nothing known if absent. Raises ValueError.

        labels: classes, None for the unconditional start. If absent, the starts of an image without
        a class: the unconditional one, or every class if the model draws the class first.
        plausible: of several classes, compute only those that the class head finds possible in the
        whole image; the others count as impossible, so that the mixture is a lower bound. asked: a
        class that is computed in any case.
        """
        self.net, config = net, net.config
        if labels is None:
            labels = range(config.classes) if config.class_first else (None,)
        known = np.zeros(config.subpixels, np.bool_) if known is None else known
        check_known(config, known)
        if known.all():
            raise ValueError(
                "no sub-pixel is hidden: a likelihood needs at least one hidden sub-pixel"
            )
        self.hidden = torch.from_numpy(~known).to(net.device)
        self._canvas = torch.from_numpy(canvas.copy()).to(net.device)
        reads = bool(config.patch) and known.any()
        self._known = ~self.hidden if reads else None
        self._start = torch.tensor([net.start_index(label) for label in labels], device=net.device)
        self.priors = np.full(len(labels), uniform_prior(len(labels)))
        several = [] if None in labels or len(labels) == 1 else list(labels)
        self._prior_labels = several if reads else []
        # some of these may be left out
        self._in_doubt = several if plausible and config.class_first else []
        self._asked = asked
        self._pieces = self._run(int(np.flatnonzero(~known)[-1]) // config.token_size + 1)

    def advance(self) -> bool:
        """Compute one piece; return whether there are more. Raises FloatingPointError if the model
        gives NaN.
        """
        return next(self._pieces, False)

    def complete(self) -> "Scoring":
        """Compute all remaining pieces."""
        while self.advance():
            pass
        return self

    @property
    def mixed(self) -> NDArray[np.float64]:
        """(n,): log-probabilities in nats of the hidden sub-pixels, for an image of unknown label;
        see mixture_of.
        """
        return mixture_of(self.log_probs[:, self.hidden].double().cpu().numpy(), self.priors)

    def _run(self, length: int) -> Iterator[bool]:
        """length: tokens up to the last hidden one."""
        # not earlier: many scorings may wait, and with many classes this is large
        self.log_probs = torch.full(
            (len(self._start), len(self.hidden)), torch.nan, device=self.net.device
        )
        rows = torch.arange(len(self._start))
        if self._in_doubt:
            found = torch.from_numpy(class_log_probs_of(self.net, self._canvas.cpu().numpy()))
            if self._asked is not None:
                found[self._asked] = 0
            rows = rows[found[self._in_doubt] >= math.log(PLAUSIBLE)]
            self.log_probs[:, self.hidden] = -torch.inf
        attention, most, tokens = self.net.attention, 1, length
        if self._prior_labels and self._known is not None:
            scores = _read(self.net, self._canvas, self._known)
            self.priors = scores.double().log_softmax(-1)[0, self._prior_labels].cpu().numpy()
        if attention.steps_as:  # else a piece is the whole image under one class
            groups = -(-len(rows) * PREFILL_TOKENS // tokens_of_a_piece(self.net, 1, length))
            most = -(-len(rows) // groups)
            tokens = tokens_of_a_piece(self.net, most, length)
        for first in range(0, len(rows), most):
            at = rows[first : first + most]
            state = attention.new_state(most) if attention.steps_as else None
            for begin in range(0, length, tokens):
                end = min(begin + tokens, length)
                self._score(at, begin, end, state)
                yield first + most < len(rows) or end < length

    @torch.inference_mode()
    def _score(self, rows: Tensor, begin: int, end: int, state: State | None) -> None:
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
        log_probs = log_likelihood(net.config, parameters, values)
        finite = log_probs.isfinite() | ~hidden
        # no start token: sub-pixel 0 has the training set's marginal
        if net.config.first_marginal and begin == 0:
            marginal = torch.tensor(net.config.first_marginal).log()
            log_probs[:, 0], finite[:, 0] = marginal[values[:, 0].long()], True
        if not bool(finite.all()):
            raise FloatingPointError(NOT_FINITE)
        self.log_probs[rows, at] = log_probs.where(hidden, torch.nan)


def tokens_of_a_piece(net: Transformer, rows: int, length: int) -> int:
    """How many tokens of so many rows make a piece of an image of this length."""
    a_token = net.multiplications + net.attention.memory_multiplications(length - 1)
    return max(1, int(PIECE / (rows * a_token * PREFILL_TOKENS))) * PREFILL_TOKENS


def uniform_prior(classes: int) -> float:
    """The log-probability in nats of each class if this many classes are equally probable."""
    return -math.log(classes)


def class_log_probs(scores: Tensor) -> NDArray[np.float64]:
    """Log-probabilities in nats, (B, classes), for the scores that Transformer.read returns.

    Raises FloatingPointError if the model gives NaN or infinity.
    """
    if not bool(scores.isfinite().all()):
        raise FloatingPointError(NOT_FINITE)
    found: NDArray[np.float64] = scores.double().log_softmax(-1).cpu().numpy()
    return found


@torch.inference_mode()
def class_log_probs_of(net: Transformer, canvas: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Log-probabilities in nats of the classes of a whole image, (classes,), by a model that draws
    the class first.

    The model reads the image in the same way as the known pixels of an occluded one. Its class head
    was trained to distinguish classes, so it detects malformed digits. `Scoring` does not: it gives
    nearly all of the probability to the class they were drawn with, since the same weights drew
    them.
    canvas: (T,). Raises FloatingPointError if the model gives NaN.
    """
    image = torch.from_numpy(canvas.copy()).to(net.device)
    scores = _read(net, image, torch.ones_like(image, dtype=torch.bool))
    found: NDArray[np.float64] = class_log_probs(scores)[0]
    return found


def _read(net: Transformer, canvas: Tensor, known: Tensor) -> Tensor:
    """Class scores (1, classes), as Conditional.read gives them. canvas, known: (T,)"""
    assert isinstance(net, Conditional)
    return net.read(canvas[None], known[None], net.attention.new_state(1), torch.tensor([1]))


def mixture_of(log_probs: NDArray[np.float64], priors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log-probabilities of sub-pixels if the class is unknown.

    log_probs: (labels, n), of each sub-pixel given the ones before it · priors: (labels,),
    log-probabilities of the classes before the first sub-pixel · returns (n,). By the chain rule,
    their sum is the log of the likelihood averaged over classes by `priors`. At each sub-pixel the
    classes that expected it gain weight.
    """
    so_far = np.logaddexp.reduce(log_probs.cumsum(1) + priors[:, None], axis=0)
    differences: NDArray[np.float64] = np.diff(so_far, prepend=0.0)
    return differences


def posterior(log_likelihoods: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities of classes, given the joint log-likelihoods of an image and each class,
    (classes,).

    NaN if the image is impossible under every class.
    """
    weights = np.exp(log_likelihoods - log_likelihoods.max())
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares
