"""The transformer: one set of weights, run over a whole image at once or one token per step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from . import reversible
from .attention import PADDING_SLOT, State, attention_for
from .background import BackgroundHead
from .config import ModelConfig
from .heads import head_of
from .inputs import START, InputEmbedding, PatchEmbedding
from .sequences import Sequences, sequences_of

# tokens of an image that go through the layers together; fixed, as other numbers round differently
PREFILL_TOKENS = 32

# (layer, q, k, v) -> y, with heads before positions: the only difference between the two forms
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Attention and feed-forward, each with a residual and a LayerNorm, after it (post) or before
    it (pre).

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
        self.shared = attention_for(config).shared_qk
        self.qkv = nn.Linear(config.d_model, (1 if self.shared else 2) * keys + values)
        self.out = nn.Linear(values, config.d_model)
        self.norm1 = nn.LayerNorm(config.d_model)
        self.up = nn.Linear(config.d_model, config.d_ff)
        self.down = nn.Linear(config.d_ff, config.d_model)
        self.norm2 = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(dropout)

    def attention(self, x: Tensor, index: int, attend: Attend) -> Tensor:
        """x: (B, d_model) or (B, T, d_model); attend sees (B, H, ...) or (B, H, T, ...)."""
        c = self.config
        keys = c.heads * c.key_dim
        parts = self.qkv(x).split([keys] * (1 if self.shared else 2) + [c.heads * c.value_dim], -1)
        q, *k_or_none, v = (part.unflatten(-1, (c.heads, -1)).transpose(1, -2) for part in parts)
        k = k_or_none[0] if k_or_none else q
        return self.out(attend(index, q, k, v).transpose(1, -2).flatten(-2))

    def feed_forward(self, x: Tensor) -> Tensor:
        activation = F.gelu if self.config.activation == "gelu" else F.relu
        return self.down(activation(self.up(x)))

    def normed_attention(self, x: Tensor, index: int, attend: Attend) -> Tensor:
        return self.attention(self.norm1(x), index, attend)

    def normed_feed_forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.norm2(x))

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
        """x: (B, d_model) or (B, T, d_model); two such streams (2, ...) for reversible residuals.
        Keeps the shape.
        """
        if self.config.residual == "reversible":
            x1, x2 = x
            y1 = x1 + self.normed_attention(x2, index, attend)
            return torch.stack([y1, x2 + self.in_chunks(self.normed_feed_forward, y1)])
        if self.config.norm == "pre":
            x = x + self.dropout(self.normed_attention(x, index, attend))
            return x + self.dropout(self.in_chunks(self.normed_feed_forward, x))
        x = self.norm1(x + self.dropout(self.attention(x, index, attend)))
        return self.norm2(x + self.dropout(self.in_chunks(self.feed_forward, x)))

    def residuals(self, index: int, attend: Attend, *, compiled: bool) -> list[reversible.Residual]:
        """The two residuals of a reversible layer, for reversible.run."""
        wrap: Callable[[Any], Any] = _compiled if compiled else lambda function: function
        attention = partial(wrap(Layer.normed_attention), self, index=index, attend=attend)
        feed_forward = partial(wrap(Layer.normed_feed_forward), self)
        return [
            reversible.Residual(attention, _learning(self.norm1, self.qkv, self.out)),
            reversible.Residual(
                feed_forward, _learning(self.norm2, self.up, self.down), self.chunks
            ),
        ]


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """function, compiled once for all layers, which are alike; it draws the same random numbers as
    eager code.
    """
    return torch.compile(function, options={"fallback_random": True})


def _learning(*modules: nn.Module) -> tuple[Tensor, ...]:
    return tuple(p for module in modules for p in module.parameters() if p.requires_grad)


def _run_reversibly(
    layers: Iterable[nn.Module], x: Tensor, attend: Attend, *, compiled: bool
) -> Tensor:
    residuals: list[reversible.Residual] = []
    for index, layer in enumerate(layers):
        assert isinstance(layer, Layer)
        residuals += layer.residuals(index, attend, compiled=compiled)
    return reversible.run(residuals, x)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A model's predictions for B images."""

    parameters: Tensor  # (B, n, P): parameters of each token; 0 for known tokens (not predicted)
    # (n, classes): unnormalised log-probabilities, for images with any known sub-pixel
    class_scores: Tensor | None


class Transformer(nn.Module):
    """An autoregressive model of images: the distribution of each token given all earlier ones.

    In a conditional model (with a patch), the distribution is given all earlier and all known
    tokens. The tokens of an image are its T sub-pixels or, depending on `ModelConfig.tokens`, its
    pixels; n in shapes is their number. P is the number of a token's parameters: 3 * K or 10 * K of
    a mixture (see mixture.py), or 256 logits (categorical.py).
    """

    def __init__(
        self, config: ModelConfig, *, feed_forward_chunks: int = 1, dropout: float = 0.0
    ) -> None:
        """feed_forward_chunks, dropout: see Layer; neither changes what is computed in evaluation
        mode.
        """
        super().__init__()
        if dropout and config.residual == "reversible":
            raise ValueError(
                "dropout must be 0 with reversible residuals, which are computed twice; got"
                f" {dropout}"
            )
        self.config, self.attention = config, attention_for(config)
        self.inputs = InputEmbedding(config)
        self.dropout = nn.Dropout(dropout)  # of embedded inputs
        self.layers = nn.ModuleList(
            Layer(config, feed_forward_chunks, dropout) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.d_model)
        self.head = head_of(config)
        self.patches = PatchEmbedding(config) if config.patch else None
        self.class_head = (
            nn.Linear(config.d_model, config.classes) if config.patch and config.classes else None
        )
        self.background = BackgroundHead(config) if config.background is not None else None
        # per token, roughly
        self.multiplications = sum(p.numel() for p in self.layers.parameters())
        # The undoing of a stack cannot be traced, but the functions in it can be compiled. Only for
        # reversible models, since importing the compiler takes as long as the rest of torch.
        self._reversibly = (
            torch.compiler.disable(_run_reversibly) if config.residual == "reversible" else None
        )

    @property
    def device(self) -> torch.device:
        """The device of the weights. New tensors are made on torch's default device, which must be
        the same.
        """
        return self.inputs.table.device

    def layer_input(self, x: Tensor) -> Tensor:
        """The first layer's input: the embedded inputs x or, for reversible residuals, two streams
        of them (2, ...).
        """
        return torch.stack([x, x]) if self.config.residual == "reversible" else x

    def output_head(self, x: Tensor) -> Tensor:
        """Parameters from the last layer's output; from the mean of the two streams, if there are
        two.
        """
        # bf16 rounding would move a mean by a grey level
        with torch.autocast(x.device.type, enabled=False):
            return self.head(self.norm(x.mean(0) if self.config.residual == "reversible" else x))

    def _run(self, x: Tensor, attend: Attend) -> Tensor:
        x = self.layer_input(self.dropout(x))
        if self._reversibly is not None and torch.is_grad_enabled():
            return self.output_head(
                self._reversibly(self.layers, x, attend, compiled=torch.compiler.is_compiling())
            )
        for index, layer in enumerate(self.layers):
            x = layer(x, index, attend)
        return self.output_head(x)

    def start_index(self, label: int | None) -> int:
        """The start index before token 0: the unconditional start, or the start of class
        `label`.
        """
        if label is None:
            return START
        if not 0 <= label < self.config.classes:
            allowed = (
                f"0..{self.config.classes - 1}"
                if self.config.classes
                else "none: this model has no classes"
            )
            raise ValueError(f"label must be one of {allowed}; got {label}")
        return START + 1 + label

    def forward(self, images: Tensor, start: Tensor | None = None) -> Tensor:
        """The parallel form: parameters of every token, each from earlier tokens only.

        images: (B, T) uint8 · start: (B,) int64 start indices, unconditional if absent ·
        returns (B, n, P); NaN at position 0 for a model without a start token.
        """
        first = self.config.first
        t = torch.arange(first, self.config.length).expand(len(images), -1)
        if start is None:
            start = torch.full((len(images),), START)
        if self.config.packed:
            return self.predict(sequences_of(self.inputs, self.patches, images, start)).parameters
        parameters = self._run(self.inputs(images, t, start), self._parallel)
        # bf16 under autocast
        parameters = parameters.to(torch.promote_types(parameters.dtype, torch.float32))
        return F.pad(parameters, (0, 0, first, 0), value=torch.nan) if first else parameters

    def sequences(
        self,
        images: Tensor,
        start: Tensor,
        known: Tensor | None = None,
        *,
        begin: int = 0,
        end: int | None = None,
    ) -> Sequences:
        """Which tokens of images go through the layers; see sequences_of."""
        return sequences_of(self.inputs, self.patches, images, start, known, begin=begin, end=end)

    def predict(self, s: Sequences) -> Prediction:
        """The parallel form for models with packed sequences (`ModelConfig.packed`)."""
        features = self.features(s)
        with torch.autocast(features.device.type, enabled=False):  # see output_head
            return self._predicted(s, features)

    def _predicted(
        self, s: Sequences, features: Tensor, before: Tensor | None = None
    ) -> Prediction:
        """before: (B, background_dim), `project` of each image's last token before these; 0 if
        absent.
        """
        predicted = self.head(features.index_select(0, s.pixel_place))
        parameters = predicted.new_zeros(
            len(s.canvas) * self.config.length, predicted.shape[1]
        ).index_copy(0, s.pixel_image * self.config.length + s.pixel_t, predicted)
        if self.background is not None:
            last = self.background.project(features)
            last = (
                F.pad(last, (0, 0, 0, len(s.canvas)))
                if before is None
                else torch.cat([last, before])
            )
            last = last.index_select(0, s.last)
            skipped = self.background(
                last, s.skipped_t, s.start[s.skipped_image], s.skipped_following
            )
            parameters = parameters.index_copy(
                0, s.skipped_image * self.config.length + s.skipped_t, skipped
            )
        scores = (
            self.class_head(features.index_select(0, s.query_place))
            if self.class_head is not None
            else None
        )
        return Prediction(parameters.view(len(s.canvas), self.config.length, -1), scores)

    def features(self, s: Sequences, attend: Attend | None = None) -> Tensor:
        """Final features of all tokens, (N, d_model); float32 even under autocast. attend: takes
        packed q, k and v.
        """
        pixels = self.inputs.embed(s.pixel_values, s.pixel_t, s.start[s.pixel_image])
        parts = [pixels]
        if self.patches is not None:
            query = self.patches.query.expand(len(s.query_image), -1)
            parts = [self.patches(s.canvas, s.known, s.patch_image, s.patch), query, pixels]
        return self._final(
            torch.cat(parts).index_select(0, s.order), attend or partial(self._packed, s.offsets)
        )

    def _final(self, x: Tensor, attend: Attend) -> Tensor:
        x = self.dropout(x)
        for index, layer in enumerate(self.layers):
            x = layer(x, index, attend)
        with torch.autocast(x.device.type, enabled=False):
            return self.norm(x.to(torch.promote_types(x.dtype, torch.float32)))

    def _packed(self, offsets: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention.packed(layer, q, k, v, offsets)

    def _parallel(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention.parallel(layer, q, k, v, training=self.training)

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
        first = self.config.first
        for chunk in range(begin, length, PREFILL_TOKENS):
            after = min(chunk + PREFILL_TOKENS, length)
            if self.config.packed:
                for image, slot in enumerate(slots):
                    row = slice(image, image + 1)
                    self._fold(
                        self.sequences(canvas[row], start[row], begin=chunk, end=after),
                        state,
                        slot,
                        chunk,
                    )
                continue
            t = torch.arange(max(chunk, first), after).expand(len(canvas), -1)
            if t.shape[1]:
                self._run(
                    self.inputs(canvas, t, start),
                    partial(state.prefill, slots=slots, held=max(chunk - first, 0)),
                )

    @torch.inference_mode()
    def read(self, canvas: Tensor, known: Tensor, state: State, slots: Tensor) -> Tensor:
        """Fold the known sub-pixels of images into clear slots, before the first sub-pixel; for
        models with patches.

        canvas: (B, T) uint8 · known: (B, T) bool, at least one sub-pixel of each image · slots:
                (B,).
        Returns class scores, (B, classes): unnormalised log-probabilities of each class given the
        known sub-pixels.
        """
        start = torch.full((1,), START)
        features = [
            self._fold(
                self.sequences(canvas[i : i + 1], start, known[i : i + 1], end=0), state, slot
            )
            for i, slot in enumerate(slots)
        ]
        return self.class_scores(torch.cat(features))

    @torch.inference_mode()
    def inputs_read(self, canvas: Tensor, known: Tensor) -> list[Tensor]:
        """The inputs of the first layer in `read`, (n, d_model) for each image.

        An image's inputs do not depend on the other images, bit for bit. canvas, known: as in read.
        """
        assert self.patches is not None
        given, query = self.patches.given(known), self.patches.query[None]
        image, patch = given.nonzero(as_tuple=True)
        counts = given.sum(1).tolist()
        # one by one, and from memory of its own: a matrix product rounds by the number of rows, and
        # by where they lie
        found = [
            self.patches.linear(part.clone()) + place
            for part, place in zip(
                self.patches.parts(canvas, known, image, patch).split(counts),
                self.patches.place[patch].split(counts),
                strict=True,
            )
        ]
        return [torch.cat([each, query]) for each in found]

    def class_scores(self, features: Tensor) -> Tensor:
        """Class scores (B, classes), see read, from the final features of each image's last token,
        (B, d_model).
        """
        return (
            torch.empty(len(features), 0) if self.class_head is None else self.class_head(features)
        )

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
        is 0, else as left by the call that ended at `begin` · known: (B, T) bool, sub-pixels that a
        conditional model reads first; nothing if absent.
        For a packed model, all B must be the same image, under different classes.
        Returns (B, end - begin, P); NaN at position 0 for a model without a start token, 0 where
        `known`.
        """
        if self.config.packed:
            return self._packed_between(canvas, begin, end, start, state, slots, known)
        first = self.config.first
        t = torch.arange(max(begin, first), end).expand(len(canvas), -1)
        if not t.shape[1]:
            return torch.full((len(canvas), 1, self.head.out_features), torch.nan)
        parameters = self._run(
            self.inputs(canvas, t, start),
            partial(state.prefill, slots=slots, held=max(begin - first, 0)),
        )
        return F.pad(parameters, (0, 0, end - begin - t.shape[1], 0), value=torch.nan)

    def _packed_between(
        self,
        canvas: Tensor,
        begin: int,
        end: int,
        start: Tensor,
        state: State,
        slots: Tensor,
        known: Tensor | None,
    ) -> Tensor:
        s = sequences_of(
            self.inputs, None if begin else self.patches, canvas, start, known, begin=begin, end=end
        )
        each = len(s.order) // len(canvas)
        assert bool((s.offsets.diff() == each).all()), "images differ: they do not fit side by side"

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.unflatten(0, (-1, each)).transpose(1, 2) for x in (q, k, v))
            return state.prefill(layer, q, k, v, slots, begin).transpose(1, 2).flatten(0, 1)

        features = self.features(s, attend) if len(s.order) else torch.empty(0, self.config.d_model)
        parameters = self._predicted(s, features, state.last[slots]).parameters
        if self.background is not None and len(s.order):
            state.last[slots] = self.background.project(features[s.offsets[1:] - 1])
        return parameters[:, begin:end]

    def _fold(self, s: Sequences, state: State, slot: Tensor, held: int = 0) -> Tensor:
        """Fold one image's tokens into its slot; return the last one's final features, (1,
        d_model), or (0, d_model).

        held: 0 if the slot is clear.
        """

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            return state.prefill(layer, q, k, v, slot[None], held)[0].transpose(0, 1)

        if not len(s.order):
            return torch.empty(0, self.config.d_model)
        features = self.features(s, attend)[-1:]
        if self.background is not None:
            state.last[slot] = self.background.project(features)[0]
        return features

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

        canvas: (B, T) uint8, known before token t; from t on, read only where `known`
        t:      (B,) int64, the positions being predicted; rows may be at different positions
        start:  (B,) int64 start indices
        slots:  (B,) int64, no slot twice except 0
        known:  (B, T) bool, the sub-pixels that `read` has read; nothing if absent
        Returns (B, P). Updates state in place at slots, and nowhere else.
        """
        if self.config.packed:
            return self._step_or_skip(canvas, t, start, state, slots, known)
        if self.config.first_marginal:  # no start token: position 0 must leave no trace in its slot
            slots = torch.where(t == 0, PADDING_SLOT, slots)
        x = self.inputs(canvas, t[:, None], start)[:, 0]
        parameters = self._run(x, lambda layer, q, k, v: state.step(layer, q, k, v, t, slots))
        if self.config.first_marginal:
            parameters = parameters.masked_fill((t == 0)[:, None], torch.nan)
        return parameters

    def _step_or_skip(
        self,
        canvas: Tensor,
        t: Tensor,
        start: Tensor,
        state: State,
        slots: Tensor,
        known: Tensor | None,
    ) -> Tensor:
        values = self.inputs.values(canvas, t[:, None], start, known)[:, 0]
        skips = (
            self.inputs.amid_background(values)
            if self.background is not None
            else torch.zeros_like(t).bool()
        )
        [runs], [skipped] = (~skips).nonzero(as_tuple=True), skips.nonzero(as_tuple=True)
        parameters = torch.empty(len(t), self.head.out_features, dtype=self.inputs.table.dtype)
        if len(runs):
            x = self.inputs.embed(values[runs], t[runs], start[runs])
            features = self._final(
                x, lambda layer, q, k, v: state.step(layer, q, k, v, t[runs], slots[runs])
            )
            parameters[runs] = self.head(features)
            if self.background is not None:
                state.last[slots[runs]] = self.background.project(features)
        if self.background is not None:
            parameters[skipped] = self.background(
                state.last[slots[skipped]],
                t[skipped],
                start[skipped],
                self.inputs.known_background(values[skipped]),
            )
        return parameters
