"""Inside a model: what it looked at, what it remembered and what it expected, for each token of one
picture.

The parallel form computes a picture piece by piece, as in likelihood.py. Here it keeps the queries,
keys and values of all layers, from which the weights of attention and the states of the recurrent
form follow.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .attention import Attention, State
from .conditional import Conditional
from .heads import log_likelihood
from .inputs import check_known
from .likelihood import NOT_FINITE, class_log_probs_of, tokens_of_a_piece
from .transformer import Transformer


class Token(NamedTuple):
    """A token that goes through the layers."""

    kind: Literal["patch", "query", "drawn"]
    # drawn: its position among the picture's tokens · patch: its index among the picture's squares,
    # in raster order · query: 0
    at: int


class View(NamedTuple):
    """What one head did with one picture, as arrays of float32 that can be sent; see Inside."""

    tokens: list[Token]
    label: int | None
    attention: NDArray[np.float32]  # (n, n)
    # S and z, (n, D, M + 1); None if the model has no state of a fixed size
    states: NDArray[np.float32] | None
    distributions: NDArray[np.float32]  # (T, 256)
    bits: NDArray[np.float32]  # (T,)


class Inside:
    """One picture inside a model, computed piece by piece: complete when `advance` returns False.

    A model reads a picture token by token: those of known squares (patches) first, a query after
    them if there are any, then one for each sub-pixel, or pixel, in raster order. `tokens` lists
    those that go through the layers; n is their number. Known sub-pixels, and those amid
    background, do not.
    """

    tokens: list[Token]
    label: int | None  # the class that the model assumed

    def __init__(
        self,
        net: Transformer,
        canvas: NDArray[np.uint8],
        known: NDArray[np.bool_] | None = None,
        label: int | None = None,
    ) -> None:
        """canvas: (T,) · known: (T,), nothing if absent · label: None for no class; a model that
        draws the class first then takes the class that it finds most probable. Raises ValueError.
        """
        self.net, config = net, net.config
        known = np.zeros(config.subpixels, np.bool_) if known is None else known
        check_known(config, known)
        if label is None and config.class_first:
            label = int(class_log_probs_of(net, canvas).argmax())
        self.label = label
        self._canvas = torch.from_numpy(canvas.copy()).to(net.device)
        self._known = torch.from_numpy(known.copy()).to(net.device)
        self._start = torch.tensor([net.start_index(label)], device=net.device)
        self._recorder = _Recorder(net.attention)
        self.tokens = self._tokens()
        # of a piece: log-probabilities of the 256 values of its sub-pixels, (sub-pixels, 256)
        self._log_probs: list[Tensor] = []
        self._pieces = self._run()

    def advance(self) -> bool:
        """Compute one piece; return whether there are more. Raises FloatingPointError if the model
        gives NaN.
        """
        return next(self._pieces, False)

    def complete(self) -> "Inside":
        """Compute all remaining pieces."""
        while self.advance():
            pass
        return self

    def _tokens(self) -> list[Token]:
        net, config = self.net, self.net.config
        if not isinstance(net, Conditional):
            return [Token("drawn", t) for t in range(config.first, config.length)]
        sequences = net.sequences(self._canvas[None], self._start, self._read)
        tokens = [Token("patch", square) for square in sequences.patch.tolist()]
        tokens += [Token("query", 0)] * len(sequences.query_image)
        return tokens + [Token("drawn", t) for t in sequences.pixel_t.tolist()]

    @property
    def _read(self) -> Tensor | None:
        """What a model with patches reads first, (1, T)."""
        return self._known[None] if self.net.config.patch else None

    def _run(self) -> Iterator[bool]:
        length = self.net.config.length
        tokens = tokens_of_a_piece(self.net, 1, length)
        for begin in range(0, length, tokens):
            end = min(begin + tokens, length)
            parameters = self.net.parameters_between(
                self._canvas[None],
                begin,
                end,
                self._start,
                cast(State, self._recorder),
                torch.tensor([1]),
                self._read,
            )
            self._log_probs.append(self._expected(parameters[0], begin))
            yield end < length

    @torch.inference_mode()
    def _expected(self, parameters: Tensor, begin: int) -> Tensor:
        """Log-probabilities of the 256 values of sub-pixels, given all earlier ones: (sub-pixels,
        256), NaN for known ones. parameters: (tokens, P) · begin: the first token.
        """
        config, size = self.net.config, self.net.config.token_size
        at = slice(begin * size, (begin + len(parameters)) * size)
        found = torch.empty(256, len(parameters) * size)
        parameters = parameters.expand(256, -1, -1)
        for channel in range(size):
            values = self._canvas[at].repeat(256, 1)
            values[:, channel::size] = torch.arange(256)[:, None]
            log_probs = log_likelihood(config, parameters, values)
            found[:, channel::size] = log_probs[:, channel::size]
        found = found.T
        if config.first_marginal and begin == 0:
            found[0] = torch.tensor(config.first_marginal).log()
        known = self._known[at, None]
        if bool((found.isnan() & ~known).any()):
            raise FloatingPointError(NOT_FINITE)
        return found.masked_fill(known, torch.nan)

    def attention(self, layer: int, head: int) -> NDArray[np.float32]:
        """Where each token looked: (n, n), a row for each of `tokens`, the weight of each of them.

        A token looks at those before it and at itself. The weights of later ones are 0, and the sum
        of a row is 1. Linear attention: phi(q) . phi(k_j) / (phi(q) . z), equations 4 and 9;
        softmax: equation 2. Raises ValueError.
        """
        q, k, _ = self._recorded(layer, head)
        weights: NDArray[np.float32] = self.net.attention.weights(q, k).cpu().numpy()
        return weights

    def states(self, layer: int, head: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The state of a head after each of `tokens`: S (n, D, M) and z (n, D), equations 18 and
        19.

        It is all that the model remembers of the tokens so far. Raises ValueError, also if the
        model has no linear attention: others remember all keys and values.
        """
        _, k, v = self._recorded(layer, head)
        S, z = self.net.attention.states(k, v)
        return S.cpu().numpy(), z.cpu().numpy()

    def view(self, layer: int, head: int) -> View:
        """All of this for one head."""
        states = None
        if self.net.attention.has_states:
            S, z = self.states(layer, head)
            states = np.concatenate([S, z[..., None]], -1)
        attention = self.attention(layer, head)
        return View(self.tokens, self.label, attention, states, self.distributions, self.bits)

    def _recorded(self, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, (n, D), and values, (n, M), of a head. Raises ValueError."""
        config = self.net.config
        for name, value, size in (("layer", layer, config.layers), ("head", head, config.heads)):
            if not 0 <= value < size:
                raise ValueError(f"{name} must be 0..{size - 1}, got {value}")
        q, k, v = (torch.cat(pieces, 1)[head] for pieces in self._recorder.layers[layer])
        return q, k, v

    @property
    def distributions(self) -> NDArray[np.float32]:
        """How probable each value of each sub-pixel was before it was drawn, given all earlier
        ones: (T, 256). NaN where it is known.
        """
        found: NDArray[np.float32] = torch.cat(self._log_probs).exp().cpu().numpy()
        return found

    @property
    def bits(self) -> NDArray[np.float32]:
        """How unexpected each sub-pixel was, (T,), in bits; NaN where it is known."""
        log_probs = torch.cat(self._log_probs).gather(1, self._canvas[:, None].long())[:, 0]
        bits: NDArray[np.float32] = (-log_probs / math.log(2)).cpu().numpy()
        return bits


class _Recorder:
    """The memory of one image, which keeps the queries, keys and values that it is given."""

    def __init__(self, attention: Attention) -> None:
        self._state = attention.new_state(1)
        self.last = self._state.last
        # of each layer: the pieces of q, of k and of v, each (heads, tokens, D or M)
        self.layers: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = [
            ([], [], []) for _ in range(attention.config.layers)
        ]

    def prefill(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, held: int = 0
    ) -> Tensor:
        for pieces, piece in zip(self.layers[layer], (q, k, v), strict=True):
            pieces.append(piece[0])
        return self._state.prefill(layer, q, k, v, slots, held)
