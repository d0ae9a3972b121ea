"""The batches of a run: which images, with which of their pixels known, and which tokens go through
the layers. A GPU needs them faster than one process makes them, and would have to wait wherever a
number of tokens is read from it.
"""

import copy
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from linpix.model.conditional import Conditional
from linpix.model.config import ModelConfig
from linpix.model.inputs import START
from linpix.model.machine import usable_cores
from linpix.model.sequences import Sequences
from linpix.model.transformer import Transformer

from .datasets import Dataset
from .init import Batch
from .masks import known_of
from .readers import Pixels
from .run import TrainConfig
from .workers import Workers, blocked_in_children

FARTHEST = 3  # pixels by which an image is moved in y and in x
MAX_MAKERS = 8  # each makes some thousand images a second


def makers(device: torch.device, sharing: int) -> int:
    """How many processes make batches for one that trains on a device. sharing: number of those on
    this machine.
    """
    return 0 if device.type == "cpu" else max(0, min(MAX_MAKERS, usable_cores() // sharing - 1))


def readings(config: TrainConfig, model: ModelConfig, step: int) -> Tensor | None:
    """What is known of a step's images in further readings: (batch, readings, T) bool; None: there
    are none.
    """
    if not config.readings:
        return None
    known = known_of(
        np.random.default_rng((config.seed, 4, step)), model, config.batch * config.readings
    )
    return torch.from_numpy(known).view(config.batch, config.readings, -1)


class Batches(torch_data.Dataset[Batch]):
    """Batch n is a pure function of n: epochs are shuffled, with each image once per epoch."""

    def __init__(self, data: Dataset, config: TrainConfig, model: ModelConfig) -> None:
        self.data, self.config, self.model = data, config, model
        self._epoch, self._order = -1, np.arange(0)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Images (batch, T) uint8, start indices (batch,) int64 and, with patches, known (batch, T)
        bool, else None.
        """
        count, size, seed = len(self.data.images), self.config.batch, self.config.seed
        picked = np.array([self._at(step * size + i, count) for i in range(size)])
        labels = self.data.labels[picked]
        free = np.random.default_rng((seed, 1, step)).random(size) < self.config.unconditional
        free &= not self.model.class_first
        known = None
        if self.model.patch:
            generator = np.random.default_rng((seed, 2, step))
            conditioned = generator.random(size) < self.config.conditional
            known = torch.from_numpy(known_of(generator, self.model, size) & conditioned[:, None])
        generator = np.random.default_rng((seed, 3, step))
        changed = generator.random(size) < 0.5
        images = self.data.images[picked]
        pictures = images.reshape(size, self.model.height, self.model.width, -1)
        if self.config.augment == "flip":
            pictures[changed] = pictures[changed, :, ::-1]
        if self.config.augment == "shift" and known is not None:
            # images that are drawn whole stay in the middle, as those that it draws
            changed &= known.numpy().any(1)
            for index in np.flatnonzero(changed):
                down, right = generator.integers(-FARTHEST, FARTHEST + 1, 2)
                pictures[index] = self._moved(pictures[index], down, right)
        start = np.full(size, START)
        if self.model.classes:
            start = np.where(free, START, START + 1 + labels)
        return torch.from_numpy(images), torch.from_numpy(start), known

    def _moved(self, picture: Pixels, down: int, right: int) -> Pixels:
        """A picture, (height, width, channels), moved by whole pixels. Background comes in, or
        black.
        """
        height, width, _ = picture.shape
        ground = np.pad(
            picture,
            ((FARTHEST, FARTHEST), (FARTHEST, FARTHEST), (0, 0)),
            constant_values=self.model.background or 0,
        )
        return ground[
            FARTHEST - down : FARTHEST - down + height, FARTHEST - right : FARTHEST - right + width
        ]

    def _at(self, number: int, count: int) -> int:
        epoch, index = divmod(number, count)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self.config.seed, 0, epoch)).permutation(count)
        return int(self._order[index])


class Part(NamedTuple):
    """Images of which a gradient is computed at once."""

    images: Tensor  # (B, T) uint8
    start: Tensor  # (B,) start indices
    sequences: Sequences | None = None  # of a model that packs them
    # of all images, each with other pixels known, from which it learns the class
    readings: Sequences | None = None


def part_of(
    net: Transformer,
    images: Tensor,
    start: Tensor,
    known: Tensor | None = None,
    again: Tensor | None = None,
) -> Part:
    """Shapes as in Part; known: (B, T) bool · again: (B, n, T) bool, what is known in n further
    readings.
    """
    if not isinstance(net, Conditional):
        return Part(images, start)
    part = Part(images, start, net.sequences(images, start, known))
    if again is None:
        return part
    images, start = (each.repeat_interleave(again.shape[1], 0) for each in (images, start))
    return part._replace(readings=net.sequences(images, start, again.flatten(0, 1), end=0))


def moved(given: Any, device: torch.device) -> Any:
    """Tensors, and what consists of them, on a device. Those in pinned memory are copied while the
    program goes on.
    """
    if given is None or isinstance(given, Tensor):
        return None if given is None else given.to(device, non_blocking=True)
    return type(given)(*(moved(each, device) for each in given))


class Parts(torch_data.Dataset[list[Part]]):
    """What one process learns from in each step: a part for each time that it computes a
    gradient.
    """

    def __init__(self, batches: Batches, net: Transformer, workers: Workers) -> None:
        self._batches, self._workers, self._pinned = batches, workers, net.device.type != "cpu"
        # only what does not change is read from it
        self._net = copy.deepcopy(net).cpu() if self._pinned else net

    def __getitem__(self, step: int) -> list[Part]:
        config, workers = self._batches.config, self._workers
        count = workers.count * config.accumulate
        images, start, known = self._batches[step]
        again, found = readings(config, self._net.config, step), []
        for first in range(workers.rank, count, workers.count):
            rest = (None if each is None else each[first::count] for each in (known, again))
            with torch.device("cpu"):  # a GPU must not be used after a fork
                found.append(part_of(self._net, images[first::count], start[first::count], *rest))
        return found

    def since(self, step: int, processes: int = 0) -> Iterator[list[Part]]:
        """All parts from a step on, made ahead by so many processes; 0: by this one, when they are
        asked for.
        """
        context = "fork" if processes else None
        loader = torch_data.DataLoader(
            self,
            sampler=itertools.count(step),
            batch_size=None,
            num_workers=processes,
            multiprocessing_context=context,
            pin_memory=self._pinned,
        )
        # a signal to all processes stops the training, which then ends these
        with blocked_in_children():
            return iter(loader)
