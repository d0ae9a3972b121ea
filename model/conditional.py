"""The conditional transformer: it reads known pixels first, wherever they are, and lets tokens amid
background skip the layers.

Known pixels are read as patches, from which a head also predicts the class. Only some tokens of an
image go through the layers, so the tokens of a batch are packed one after the other (sequences.py).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .attention import State
from .background import BackgroundHead
from .config import ModelConfig
from .inputs import START, PatchEmbedding
from .sequences import Sequences, sequences_of
from .transformer import PREFILL_TOKENS, Attend, Layer, Transformer


class Prediction(NamedTuple):
    """A model's predictions for B images."""

    parameters: Tensor  # (B, n, P): parameters of each token; 0 for known tokens (not predicted)
    # (n, classes): unnormalised log-probabilities, for images with any known sub-pixel
    class_scores: Tensor | None


class Conditional(Transformer):
    """A transformer with patches, a background, or both: the distribution of each token given all
    earlier and all known ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        make_layer: Callable[[], Layer],
        dropout: float = 0.0,
    ) -> None:
        super().__init__(config, make_layer, dropout)
        self.patches = PatchEmbedding(config) if config.patch else None
        self.class_head = nn.Linear(config.d_model, config.classes) if config.class_first else None
        self.background = BackgroundHead(config) if config.background is not None else None

    def forward(
        self, images: Tensor, start: Tensor | None = None, known: Tensor | None = None
    ) -> Tensor:
        """As Transformer.forward; known: (B, T) bool, nothing if absent."""
        if start is None:
            start = torch.full((len(images),), START)
        return self.predict(self.sequences(images, start, known)).parameters

    def sequences(
        self,
        images: Tensor,
        start: Tensor,
        known: Tensor | None = None,
        *,
        begin: int = 0,
        end: int | None = None,
    ) -> Sequences:
        """Which tokens of images go through the layers; see sequences_of. Patches come before token
        0, so there are none in later pieces.
        """
        patches = None if begin else self.patches
        return sequences_of(self.inputs, patches, images, start, known, begin=begin, end=end)

    def predict(self, s: Sequences) -> Prediction:
        """The parallel form."""
        features = self.features(s)
        with torch.autocast(features.device.type, enabled=False):  # see output_head
            return self._predicted(s, features)

    def _predicted(
        self, s: Sequences, features: Tensor, before: Tensor | None = None
    ) -> Prediction:
        """before: (B, background_dim), `project` of each image's last token before these; 0 if
        absent.
        """
        count, length = len(s.canvas), self.config.length
        predicted = self.head(features.index_select(0, s.pixel_place))
        parameters = predicted.new_zeros(count * length, predicted.shape[1])
        parameters = parameters.index_copy(0, s.pixel_image * length + s.pixel_t, predicted)
        if self.background is not None:
            last = self.background.project(features)
            if before is None:
                before = last.new_zeros(count, last.shape[1])
            last = torch.cat([last, before]).index_select(0, s.last)
            skipped = self.background(
                last, s.skipped_t, s.start[s.skipped_image], s.skipped_following
            )
            parameters = parameters.index_copy(0, s.skipped_image * length + s.skipped_t, skipped)
        scores = None
        if self.class_head is not None:
            scores = self.class_head(features.index_select(0, s.query_place))
        return Prediction(parameters.view(count, length, -1), scores)

    def features(self, s: Sequences, attend: Attend | None = None) -> Tensor:
        """Final features of all tokens, (N, d_model); float32 even under autocast. attend: takes
        packed q, k and v.
        """
        x = self.inputs.embed(s.pixel_values, s.pixel_t, s.start[s.pixel_image])
        if self.patches is not None:
            query = self.patches.query.expand(len(s.query_image), -1)
            x = torch.cat([self.patches(s.canvas, s.known, s.patch_image, s.patch), query, x])
        attend = attend or partial(self.attention.packed, offsets=s.offsets)
        return self._final(x.index_select(0, s.order), attend)

    def _final(self, x: Tensor, attend: Attend) -> Tensor:
        x = self.dropout(x)
        for index, layer in enumerate(self.layers):
            x = layer(x, index, attend)
        with torch.autocast(x.device.type, enabled=False):
            return self.norm(x.to(torch.promote_types(x.dtype, torch.float32)))

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
        """As Transformer.prefill, one image after the other."""
        for chunk in range(begin, length, PREFILL_TOKENS):
            end = min(chunk + PREFILL_TOKENS, length)
            for row in torch.arange(len(slots)).split(1):
                s = self.sequences(canvas[row], start[row], begin=chunk, end=end)
                self._fold(s, state, slots[row], chunk)

    @torch.inference_mode()
    def read(self, canvas: Tensor, known: Tensor, state: State, slots: Tensor) -> Tensor:
        """Fold the known sub-pixels of images into clear slots, before the first sub-pixel.

        canvas: (B, T) uint8 · known: (B, T) bool, at least one sub-pixel of each image · slots:
                (B,).
        Returns class scores, (B, classes): unnormalised log-probabilities of each class given the
        known sub-pixels.
        """
        start = torch.full((1,), START)
        features = []
        for row in torch.arange(len(slots)).split(1):
            s = self.sequences(canvas[row], start, known[row], end=0)
            features.append(self._fold(s, state, slots[row])[-1:])
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
        found = []
        parts = self.patches.parts(canvas, known, image, patch).split(counts)
        for part, place in zip(parts, self.patches.place[patch].split(counts), strict=True):
            found.append(torch.cat([self.patches.linear(part.clone()) + place, query]))
        return found

    def class_scores(self, features: Tensor) -> Tensor:
        """Class scores (B, classes), see read, from the final features of each image's last token,
        (B, d_model).
        """
        return self.class_head(features) if self.class_head else torch.empty(len(features), 0)

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
        """As Transformer.parameters_between. All B must be the same image, under different classes.

        known: (B, T) bool, sub-pixels that are read first, nothing if absent; their parameters are
        0.
        """
        s = self.sequences(canvas, start, known, begin=begin, end=end)
        before = state.last[slots]
        features = self._fold(s, state, slots, begin)
        return self._predicted(s, features, before).parameters[:, begin:end]

    def _fold(self, s: Sequences, state: State, slots: Tensor, held: int = 0) -> Tensor:
        """Fold the tokens of images, which have equally many, into slots; return their final
        features, (N, d_model).

        held: 0 if the slots are clear.
        """
        each = len(s.order) // len(slots)
        assert bool((s.offsets.diff() == each).all()), "images differ: they do not fit side by side"

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.unflatten(0, (-1, each)).transpose(1, 2) for x in (q, k, v))
            return state.prefill(layer, q, k, v, slots, held).transpose(1, 2).flatten(0, 1)

        if not each:
            return torch.empty(0, self.config.d_model)
        features = self.features(s, attend)
        if self.background is not None:
            state.last[slots] = self.background.project(features[s.offsets[1:] - 1])
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
        """As Transformer.step, but tokens amid background skip the layers.

        canvas: from token t on, read only where `known` · known: (B, T) bool, the sub-pixels that
        `read` has read; nothing if absent
        """
        values = self.inputs.values(canvas, t[:, None], start, known)[:, 0]
        skips = self.inputs.amid_background(values)
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
