"""The transformer: one set of weights, run over a whole image at once or one token per step.

This is the plain model. conditional.py adds what a model does with known pixels.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .attention import PADDING_SLOT, State, attention_for
from .config import ModelConfig
from .heads import head_of
from .inputs import START, InputEmbedding

# tokens of an image that go through the layers together; fixed, as other numbers round differently
PREFILL_TOKENS = 32

# (layer, q, k, v) -> y, with heads before positions: the only difference between the two forms
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Attention and feed-forward, each with a residual and a LayerNorm after it.

    feed_forward_chunks: number of parts of the positions. With more than one, the full (B, T, d_ff)
    never exists: parts are computed one after the other, and again in the backward pass. Results
    change only by rounding.
    dropout: share of each sub-layer's outputs that are left out in training (Srivastava et al.,
             2014).
    """

    def __init__(
        self, config: ModelConfig, feed_forward_chunks: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.config, self.chunks = config, feed_forward_chunks
        keys, values = config.heads * config.key_dim, config.heads * config.value_dim
        shared = attention_for(config).shared_qk
        self.widths = [keys, values] if shared else [keys, keys, values]
        self.qkv = nn.Linear(config.d_model, sum(self.widths))
        self.out = nn.Linear(values, config.d_model)
        self.norm1 = nn.LayerNorm(config.d_model)
        self.up = nn.Linear(config.d_model, config.d_ff)
        self.down = nn.Linear(config.d_ff, config.d_model)
        self.norm2 = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(dropout)

    def attention(self, x: Tensor, index: int, attend: Attend) -> Tensor:
        """x: (B, d_model) or (B, T, d_model); attend sees (B, H, ...) or (B, H, T, ...)."""
        parts = []
        for part in self.qkv(x).split(self.widths, -1):
            parts.append(part.unflatten(-1, (self.config.heads, -1)).transpose(1, -2))
        # queries, keys and values; the first two may be the same
        y = attend(index, parts[0], parts[-2], parts[-1])
        return self.out(y.transpose(1, -2).flatten(-2))

    def feed_forward(self, x: Tensor) -> Tensor:
        activation = F.gelu if self.config.activation == "gelu" else F.relu
        return self.down(activation(self.up(x)))

    def in_chunks(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """function(x), computed by chunks of positions; function must not mix them."""
        if self.chunks == 1 or x.dim() < 3:
            return function(x)
        parts = [
            checkpoint(function, part, use_reentrant=False, preserve_rng_state=False)
            for part in x.chunk(self.chunks, 1)
        ]
        return torch.cat(parts, 1)

    def forward(self, x: Tensor, index: int, attend: Attend) -> Tensor:
        """x: (B, d_model) or (B, T, d_model). Keeps the shape."""
        x = self.norm1(x + self.dropout(self.attention(x, index, attend)))
        return self.norm2(x + self.dropout(self.in_chunks(self.feed_forward, x)))


class Transformer(nn.Module):
    """An autoregressive model of images: the distribution of each token given all earlier ones.

    The tokens of an image are its T sub-pixels or, depending on `ModelConfig.tokens`, its pixels; n
    in shapes is their number. P is the number of a token's parameters: 3 * K or 10 * K of a mixture
    (see mixture.py), or 256 logits (categorical.py). net_for in nets.py makes the network of a
    configuration.
    """

    def __init__(
        self,
        config: ModelConfig,
        make_layer: Callable[[], Layer],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.config, self.attention = config, attention_for(config)
        self.inputs = InputEmbedding(config)
        self.dropout = nn.Dropout(dropout)  # of embedded inputs
        self.layers = nn.ModuleList(make_layer() for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = head_of(config)
        # per token, roughly
        self.multiplications = sum(p.numel() for p in self.layers.parameters())

    @property
    def device(self) -> torch.device:
        """The device of the weights. New tensors are made on torch's default device, which must be
        the same.
        """
        return self.inputs.table.device

    def start_index(self, label: int | None) -> int:
        """The start index before token 0: the unconditional start, or the start of class
        `label`.
        """
        if label is None:
            return START
        if not 0 <= label < self.config.classes:
            allowed = "none: this model has no classes"
            if self.config.classes:
                allowed = f"0..{self.config.classes - 1}"
            raise ValueError(f"label must be one of {allowed}; got {label}")
        return START + 1 + label

    def embed(self, canvas: Tensor, t: Tensor, start: Tensor) -> Tensor:
        """The first layer's input, (B, n, d_model). Shapes as in InputEmbedding.values."""
        return self.dropout(self.inputs(canvas, t, start))

    def run(self, x: Tensor, attend: Attend) -> Tensor:
        """Parameters, (B, n, P) or (B, P), from the first layer's input."""
        for index, layer in enumerate(self.layers):
            x = layer(x, index, attend)
        return self.output_head(x)

    def output_head(self, x: Tensor) -> Tensor:
        """Parameters from the last layer's output."""
        # bf16 rounding would move a mean by a grey level
        with torch.autocast(x.device.type, enabled=False):
            return self.head(self.norm(x))

    def forward(self, images: Tensor, start: Tensor | None = None) -> Tensor:
        """The parallel form: parameters of every token, each from earlier tokens only.

        images: (B, T) uint8 · start: (B,) int64 start indices, unconditional if absent ·
        returns (B, n, P); NaN at position 0 for a model without a start token.
        """
        first = self.config.first
        t = torch.arange(first, self.config.length).expand(len(images), -1)
        if start is None:
            start = torch.full((len(images),), START)
        attend = partial(self.attention.parallel, training=self.training)
        parameters = self.run(self.embed(images, t, start), attend)
        # bf16 under autocast
        parameters = parameters.to(torch.promote_types(parameters.dtype, torch.float32))
        return F.pad(parameters, (0, 0, first, 0), value=torch.nan) if first else parameters

    def parameters_of(self, images: Tensor | np.ndarray, label: int | None = None) -> Tensor:
        """Parameters of whole images, (B, T) uint8: (B, n, P) float32. Raises ValueError.

        label: their class; None for the unconditional start, which a model that draws the class
               first does not have.
        """
        if self.config.class_first and label is None:
            raise ValueError(
                "this model draws the class of an image first: give a label, 0 to "
                f"{self.config.classes - 1}"
            )
        images = torch.as_tensor(images).to(self.device)
        if (
            images.dtype != torch.uint8
            or images.dim() != 2
            or images.shape[1] != self.config.subpixels
        ):
            raise ValueError(
                f"images must be uint8 of shape (B, {self.config.subpixels}), "
                f"got {images.dtype} of shape {tuple(images.shape)}"
            )
        return self(images, torch.full((len(images),), self.start_index(label)))

    @torch.inference_mode()
    def prefill(
        self,
        canvas: Tensor,
        length: int,
        start: Tensor,
        state: State,
        slots: Tensor,
        begin: int = 0,
    ) -> None:
        """Fold the first `length` tokens into slots; step can then continue at t = length.

        canvas: (B, T) uint8, known before token `length` · start: (B,) · slots: (B,), clear, or as
        left by a call with length `begin`, a multiple of PREFILL_TOKENS. Several such calls give
        the same result as one, bit for bit.
        """
        for chunk in range(begin, length, PREFILL_TOKENS):
            end = min(chunk + PREFILL_TOKENS, length)
            self.parameters_between(canvas, chunk, end, start, state, slots)

    @torch.inference_mode()
    def parameters_between(
        self,
        canvas: Tensor,
        begin: int,
        end: int,
        start: Tensor,
        state: State,
        slots: Tensor,
        known: Tensor | None = None,
    ) -> Tensor:
        """The parallel form by pieces: return parameters of tokens begin .. end - 1, and fold these
        into slots.

        canvas: (B, T) uint8, known before token `end` · start: (B,) · slots: (B,), clear if begin
        is 0, else as left by the call that ended at `begin` · known: for conditional models.
        Returns (B, end - begin, P); NaN at position 0 for a model without a start token.
        """
        first = self.config.first
        t = torch.arange(max(begin, first), end).expand(len(canvas), -1)
        if not t.shape[1]:
            return torch.full((len(canvas), 1, self.head.out_features), torch.nan)
        attend = partial(state.prefill, slots=slots, held=max(begin - first, 0))
        parameters = self.run(self.embed(canvas, t, start), attend)
        return F.pad(parameters, (0, 0, end - begin - t.shape[1], 0), value=torch.nan)

    @torch.inference_mode()
    def step(
        self,
        canvas: Tensor,
        t: Tensor,
        start: Tensor,
        state: State,
        slots: Tensor,
        known: Tensor | None = None,
    ) -> Tensor:
        """Advance B images by one token; return the parameters of the token at t.

        canvas: (B, T) uint8, known before token t
        t:      (B,) int64, the positions being predicted; rows may be at different positions
        start:  (B,) int64 start indices
        slots:  (B,) int64, no slot twice except 0
        known:  for conditional models
        Returns (B, P). Updates state in place at slots, and nowhere else.
        """
        if self.config.first_marginal:  # no start token: position 0 must leave no trace in its slot
            slots = torch.where(t == 0, PADDING_SLOT, slots)
        x = self.embed(canvas, t[:, None], start)[..., 0, :]
        parameters = self.run(x, lambda layer, q, k, v: state.step(layer, q, k, v, t, slots))
        if self.config.first_marginal:
            parameters = parameters.masked_fill((t == 0)[:, None], torch.nan)
        return parameters
