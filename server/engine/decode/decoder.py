"""Decoders: images in slots, advanced together a quantum at a time. Torch begins here.

EagerDecoder uses torch, step by step, and is easy to read; the decoders of compiled.py call csrc's
kernels.

A position counts an image's tokens. A step fixes the token at a position, and moves the image to
the next one. A pass is a step that runs the layers; known tokens and background need no pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from linpix.model.attempts import Recognised
from linpix.model.attention import PADDING_SLOT, SlotPool, State, attention_for
from linpix.model.attention.linear import RecurrentState
from linpix.model.checkpoint import Checkpoint
from linpix.model.conditional import Conditional
from linpix.model.generate import decode_threads, draw_token, noise_of, starts_of
from linpix.model.inputs import START, check_known
from linpix.model.likelihood import class_log_probs
from linpix.model.transformer import PREFILL_TOKENS

from ..image import Image
from .slots import Numbers, Plan, Slots, slots_of


class Advance(NamedTuple):
    """What a quantum did, by row of the batch."""

    positions: Numbers  # where the images are now
    passes: Numbers  # steps that went through the layers
    # slots whose parameters were not all finite: only their images are invalid
    not_finite: list[int]


class Decoder(ABC):
    """One model's weights, its table of slots, and their state."""

    precision, device, state_format, kernels = "fp32", "cpu", "fp32", ""
    stride = 1  # a quantum of so many steps costs no more than one step
    prefill_stride = PREFILL_TOKENS  # prefill of so many tokens costs little more than of one
    prefills_together = 1  # requests in one call of prefill; restore may pass more images
    reads_together = 1  # requests whose images it reads, or images that it judges, in one call
    saturated = 0  # elements of state so far that float16 could not hold
    fill_freed_with_nan = False  # for debugging, so that reading a freed slot shows

    def __init__(self, checkpoint: Checkpoint, slots: int, pool: SlotPool | None = None) -> None:
        """pool: if not in main memory."""
        self.checkpoint, self.net, self.config = checkpoint, checkpoint.net, checkpoint.net.config
        # some skip the layers
        self.skips = self.config.packed
        self.slots = Slots(slots, self.config.length, self.config.token_size)
        if pool is None:
            self.state = pool = attention_for(self.config).new_state(slots)
        self.pool = pool

    @property
    def facts(self) -> dict[str, str]:
        """How images are made, as answers report it."""
        return {
            "model": self.checkpoint.name,
            "checkpoint": self.checkpoint.digest,
            "engine": self.kind,
            "precision": self.precision,
            "device": self.device,
            "state": self.state_format,
        }

    def close(self) -> None:  # noqa: B027 - most have nothing of the kind
        """Release what the decoder holds; it decodes no more."""

    def take(self, images: list[Image]) -> None:
        """Clear the slots of images that differ in their seeds only, and fill them in.

        What the images share must then be prefilled in the first slot, piece by piece, and copied;
        or read, if `conditioned`.
        """
        job, slots = images[0].job, slots_of(images)
        if job.known is not None:
            check_known(self.config, job.known)
        for slot in slots:
            # on taking, not on giving back: a crashed request gives back nothing clean
            self.pool.clear(slot)
        start = self.net.start_index(images[0].label)
        self.slots.fill(images, np.array(slots), start, reads=bool(self.config.patch))
        if self.config.class_first and not self.slots.conditioned[slots[0]]:
            self._set_classes(slots, torch.zeros(1, self.config.classes))

    def copy(self, slots: Sequence[int]) -> None:
        """Copy what was prefilled in the first of these slots to the others."""
        self.pool.copy(slots[0], list(slots[1:]))

    @torch.inference_mode()
    def read(self, requests: Sequence[Sequence[int]]) -> None:
        """Have a conditional model read what is known of each request's images: some fifty tokens.

        requests: the slots of each; its images differ in their seeds only. Images without a class
        get one that fits what is known.
        """
        firsts = [slots[0] for slots in requests]
        canvas, known = from_numpy(self.slots.canvas[firsts]), from_numpy(self.slots.known[firsts])
        # a decoder reads into the pool that it was made with
        scores = self.read_known(canvas, known, cast(State, self.pool), torch.tensor(firsts))
        for row, slots in enumerate(requests):
            self.copy(slots)
            self._set_classes(slots, scores[row : row + 1])

    def _set_classes(self, slots: Sequence[int], scores: Tensor) -> None:
        """Give images that have no class one that fits. scores: (1, classes), see starts_of."""
        at, table = np.array(slots), self.slots
        start = from_numpy(table.start[at])
        scores = scores.expand(len(slots), -1)
        table.start[at] = starts_of(self.net, scores, table.seed[at], start).numpy()

    @torch.inference_mode()
    def judge(self, slots: Sequence[int]) -> list[Recognised]:
        """Have the model read whole images, once they are drawn; returns what is known of each.

        If an image has no class, since nothing had to be drawn, it gets the most probable one.
        """
        drawn = self.canvases(slots)  # of a GPU, too
        canvas, state = from_numpy(drawn), attention_for(self.config).new_state(len(slots))
        scores = self.read_known(
            canvas,
            torch.ones_like(canvas, dtype=torch.bool),
            state,
            torch.arange(1, len(slots) + 1),
        )
        log_probs = class_log_probs(scores)
        labels = []
        for slot, row in zip(slots, log_probs, strict=True):
            label = self.label(slot)
            if label is None:
                label = int(row.argmax())
            labels.append(label)
        torn = self.checkpoint.torn(drawn, self.slots.known[slots], labels)
        least = self.checkpoint.recognised
        return [
            Recognised(label, float(row[label]), in_pieces, least=least)
            for label, row, in_pieces in zip(labels, log_probs, torn, strict=True)
        ]

    def read_known(self, canvas: Tensor, known: Tensor, state: State, places: Tensor) -> Tensor:
        """Fold what is known of images into a state at places, (B,); returns class scores, (B,
        classes). canvas: (B, T) uint8 · known: (B, T) bool. This runs in torch.
        """
        assert isinstance(self.net, Conditional)
        with decode_threads(self.net, self.config.patches + 1, 0):
            return self.net.read(canvas, known, state, places)

    def label(self, slot: int) -> int | None:
        """The class of a slot's image, requested or drawn first; None if it has none."""
        start = int(self.slots.start[slot])
        return None if start == START else start - START - 1

    def canvases(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """The sub-pixels of these slots' images, (B, T); those not decoded yet are 0, or as they
        were given.
        """
        return self.slots.canvas[slots]

    @property
    @abstractmethod
    def kind(self) -> str:
        """The name of the engine, as in --engine and in answers."""

    @abstractmethod
    def prefill(self, slots: Numbers, positions: Numbers, steps: Numbers) -> None:
        """Fold the next inputs of each image into its slot, from its position on: start token, x_0,
        x_1 and so on.

        Positions are multiples of prefill_stride, except in restore. Where prefills_together is 1
        it gets one image.
        """

    def keep(self, slots: Sequence[int]) -> None:  # noqa: B027 - those that prefill again keep nothing
        """Keep a copy of the state of these slots before a quantum, in case the quantum raises."""

    @abstractmethod
    def restore(self, slots: Sequence[int]) -> None:
        """Put some of the slots kept last back to their positions, as they were before a quantum
        that raised.

        Sub-pixels need no copy: before a position none is written, and after it each is written
        before it is read.
        """

    @abstractmethod
    def quantum(self, plan: Plan) -> Advance:
        """Advance each slot's image from its position by its number of steps.

        Positions and steps count tokens, and positions are not moved on here. If tokens may skip
        the layers, the largest number of steps limits passes, not tokens: each image advances as
        far as that many passes take it.
        """


class EagerDecoder(Decoder):
    """Torch alone, or with our operator for the step of linear attention."""

    @property
    def kind(self) -> str:
        if isinstance(self.state, RecurrentState) and self.state.operator:
            return "eager+operator"
        return "eager"

    def prefill(self, slots: Numbers, positions: Numbers, steps: Numbers) -> None:
        begin = int(positions[0])
        self.net.prefill(
            from_numpy(self.slots.canvas[slots]),
            begin + int(steps[0]),
            from_numpy(self.slots.start[slots]),
            self.state,
            from_numpy(slots),
            begin,
        )

    def keep(self, slots: Sequence[int]) -> None:
        self.state.keep(torch.tensor(slots))

    def restore(self, slots: Sequence[int]) -> None:
        self.state.restore(torch.tensor(slots))

    @torch.inference_mode()
    def quantum(self, plan: Plan) -> Advance:
        """As Decoder.quantum, but every step counts as a pass.

        Rows with fewer steps come last: those still running are always the first `rows`.
        """
        slots, steps = plan.T
        table, positions, most = self.slots, self.slots.position[slots], int(steps[0])
        noise = noise_of(self.config, table.seed[slots], positions[:, None] + np.arange(most))
        at, t = from_numpy(slots.copy()), from_numpy(positions)
        arrays = table.canvas, table.known, table.conditioned, table.start, table.temperature
        canvas, *given = [from_numpy(array[slots]) for array in arrays]  # as step takes them
        finite = torch.ones(len(slots), dtype=torch.bool)
        for step in range(most):
            rows = int((step < steps).sum())
            with decode_threads(self.net, rows, int(positions[:rows].max()) + step):
                now = [canvas, *given, noise[:, step], t + step, at]
                finite[:rows] &= self.step(*(tensor[:rows] for tensor in now))
        table.canvas[slots] = canvas.numpy()
        return Advance(positions + steps, steps, slots[~finite.numpy()].tolist())

    def step(
        self,
        canvas: Tensor,
        known: Tensor,
        conditioned: Tensor,
        start: Tensor,
        temperature: Tensor,
        noise: Tensor,
        t: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """One token for every row: predict it, draw it, and keep the given one where it is known.

        canvas, known: (B, T), canvas changed in place · conditioned, start, temperature, t, slots:
            (B,) ·
        noise: (B, C, 2) · returns (B,) bool, whether the row's parameters were finite.
        """
        subpixels = t[:, None] * self.config.token_size + torch.arange(self.config.token_size)
        given = known.gather(1, subpixels)
        was_read = given[:, 0] & conditioned
        # a token that was read must not change its slot again
        changed = torch.where(was_read, PADDING_SLOT, slots)
        read = known & conditioned[:, None] if self.config.patch else None
        parameters = self.net.step(canvas, t, start, self.state, changed, read)
        drawn = draw_token(self.net, parameters, t, noise, temperature)
        canvas.scatter_(1, subpixels, torch.where(given, canvas.gather(1, subpixels), drawn))
        # sub-pixel 0 without a start token is NaN by design
        unpredicted = was_read | (t < self.config.first)
        return parameters.isfinite().all(-1) | unpredicted
