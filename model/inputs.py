"""Embeddings of tokens: sums of table look-ups for sub-pixels, and the known pixels of a square for
patches.

The input of token t is a sum of table look-ups, each of something that is known before t is drawn.
All tables are stacked into one, so a kernel needs a single gather-and-sum for every configuration.
Its blocks of rows, in order: the sub-pixel before t's first one (256 values, the unconditional
start, one start per class); the positional look-ups and the class, in the order of look_ups; 257
rows for each neighbour (256 values, and row 256 for outside the image); 258 rows for each following
neighbour (256 values, row 256 for unknown, row 257 for outside).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig
from .palette import painted

START = 256  # previous value of token 0 without a class; START + 1 + c starts class c
OUTSIDE = 256  # value of a neighbour that lies outside the image
UNKNOWN, FOLLOWING_OUTSIDE = 256, 257  # values of a following neighbour


def first_hole(known: NDArray[np.bool_]) -> int:
    """The number of known sub-pixels before the first unknown one; T if all are known. known:
    (T,).
    """
    return known.size if known.all() else int(known.argmin())


def check_known(config: ModelConfig, known: Tensor | NDArray[np.bool_]) -> None:
    """Raise ValueError if only some sub-pixels of a token are known. known: (..., T) bool."""
    tokens = torch.as_tensor(known).reshape(-1, config.token_size)
    if bool((tokens != tokens[:, :1]).any()):
        raise ValueError(
            "this model draws whole pixels: in each pixel, either all channels or none must be"
            " known"
        )


def blocks(config: ModelConfig) -> list[tuple[str, int]]:
    """Name and number of rows of each block of the table, in order."""
    sizes = {
        "position": config.length,
        "row": config.height,
        "column": config.width,
        "channel": config.channels,
        "class": config.classes + 1,
    }
    found = [("values", START + 1), ("starts", config.classes)]
    found += [(name, sizes[name]) for name in config.look_ups if name != "previous"]
    found += [(f"neighbour {each}", OUTSIDE + 1) for each in config.neighbours]
    found += [(f"following {each}", FOLLOWING_OUTSIDE + 1) for each in config.following]
    return found


class InputEmbedding(nn.Module):
    """The previous value, t, the class and the neighbours of t, embedded and summed."""

    source: Tensor
    outside: Tensor
    base: Tensor
    positional: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # Not on "meta", where checkpoints are checked: a division there imports torch's compiler,
        # which takes a second.
        token = torch.arange(config.length, device="cpu")
        t = token * config.token_size  # each token's first sub-pixel
        place = {
            "position": token,
            "row": t // (config.width * config.channels),
            "column": t // config.channels % config.width,
            "channel": t % config.channels,
        }
        # first row of the classes' table (no class, class 0, 1, ...); 0: no such table
        self.class_rows = 0
        positional, tables, rows = [], [], 0
        for name, size in blocks(config):
            if name in place:
                positional.append(place[name] + rows)
            elif name == "class":
                self.class_rows = rows
            elif name != "starts":
                tables.append(rows)
            rows += size
        source, outside = [t - 1], [t == 0]
        shape = {"row": config.height, "column": config.width, "channel": config.channels}
        for neighbour in config.neighbours + config.following:
            beyond = torch.zeros_like(t, dtype=torch.bool)
            for (name, size), step in zip(shape.items(), neighbour, strict=True):
                at = place[name] + step
                beyond |= (at < 0) | (at >= size)
            source.append(t + config.offset(neighbour))
            outside.append(beyond)
        # (tokens, number of looked-up values): a value's place, whether it is outside, its table's
        # first row
        for buffer, indices in (
            ("source", torch.stack(source, 1).clamp(0, config.subpixels - 1)),
            ("outside", torch.stack(outside, 1)),
            ("base", torch.tensor(tables, device="cpu").repeat(len(t), 1)),
            ("positional", torch.stack(positional, 1) if positional else t.new_zeros(len(t), 0)),
        ):
            self.register_buffer(buffer, indices.to(torch.get_default_device()), persistent=False)
        self.table = nn.Parameter(torch.empty(rows, config.d_model))
        if not self.table.is_meta:
            self._initialize(self.table.data.normal_(), tables)

    def _initialize(self, table: Tensor, tables: list[int]) -> None:
        """tables: first rows of the tables that hold sub-pixel values."""
        # similar values start with similar rows; tried only with colour
        if self.config.channels == 3:
            for first in tables:
                walk = table[first : first + 256].cumsum(0)
                walk -= walk.mean(0)
                table[first : first + 256] = walk / walk.std()
        if self.config.following:  # mostly unknown, so nearly a constant, which should not dominate
            table[tables[1 + len(self.config.neighbours)] :] *= 0.4
        # a neighbour's channels together have the norm of one table
        table *= 0.5 / self.config.token_size**0.5

    def values(
        self, canvas: Tensor, t: Tensor, start: Tensor, known: Tensor | None = None
    ) -> Tensor:
        """The values looked up for each token: the previous one, the neighbours', the following
        neighbours'.

        canvas: (B, T) uint8; only sub-pixels of earlier tokens and known ones of later tokens are
                read
        t:      (B, n) int64, the tokens being predicted
        start:  (B,) int64, the start index before token 0
        known:  (B, T) bool, which sub-pixels following neighbours may read; none if absent
        Returns (B, n, 1 + neighbours + following) int64.
        """
        rows, n = t.shape
        place, seen = self.source[t].flatten(1), 1 + len(self.config.neighbours)
        values = canvas.gather(1, place).view(rows, n, -1).long()
        nothing = torch.full_like(values, OUTSIDE)
        nothing[..., 0] = start[:, None]
        if self.config.following:
            nothing[..., seen:] = FOLLOWING_OUTSIDE
            if known is None:
                values[..., seen:] = UNKNOWN
            else:
                is_known = known.gather(1, place).view(rows, n, -1)[..., seen:]
                values[..., seen:] = torch.where(is_known, values[..., seen:], UNKNOWN)
        return torch.where(self.outside[t], nothing, values)

    def amid_background(self, values: Tensor) -> Tensor:
        """Whether all looked-up values are background, outside or unknown. values: (..., as above);
        returns (...).
        """
        if self.config.background is None:
            return torch.zeros_like(values[..., 0], dtype=torch.bool)
        return ((values == self.config.background) | (values >= 256)).all(-1)

    def known_background(self, values: Tensor) -> Tensor:
        """Number of following neighbours that are known background. Shapes as in amid_background;
        int64.
        """
        if self.config.background is None:
            return torch.zeros_like(values[..., 0])
        return (values[..., 1 + len(self.config.neighbours) :] == self.config.background).sum(-1)

    def indices(self, values: Tensor, t: Tensor, start: Tensor) -> Tensor:
        """Rows of the table to sum, (..., look-ups). values: (..., as above) · t, start: (...)."""
        parts = [values + self.base[t], self.positional[t]]
        if self.class_rows:
            parts.append((self.class_rows + start - START)[..., None])
        return torch.cat(parts, -1)

    def embed(self, values: Tensor, t: Tensor, start: Tensor) -> Tensor:
        """Shapes as in indices; returns (..., d_model)."""
        indices = self.indices(values, t, start)
        return F.embedding_bag(indices.flatten(0, -2), self.table, mode="sum").view(
            *t.shape, self.config.d_model
        )

    def forward(
        self, canvas: Tensor, t: Tensor, start: Tensor, known: Tensor | None = None
    ) -> Tensor:
        """Shapes as in values; returns (B, n, d_model)."""
        return self.embed(self.values(canvas, t, start, known), t, start[:, None].expand_as(t))


class PatchEmbedding(nn.Module):
    """Embeddings of the known pixels by squares, which a conditional model reads before the first
    sub-pixel, and of the query token after them.

    A patch is embedded as a linear function of its sub-pixels (value / 255 where known, else 0) and
    of flags for which of them are known. With a palette, the four parts of its colour stand for a
    value, since the number of a colour means nothing. The class is predicted from the features of
    the query token.
    """

    members: Tensor
    parts_of: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        side, size = config.patch, config.patch**2 * config.channels
        t = torch.arange(config.subpixels, device="cpu").view(
            config.height // side, side, -1, side * config.channels
        )
        self.register_buffer(
            "members",
            t.transpose(1, 2).reshape(-1, size).to(torch.get_default_device()),
            persistent=False,
        )  # (patches, size)
        # what a value shows, 0 to 1, (256, parts)
        shown = painted(np.arange(256, dtype=np.uint8), config)
        if config.palette:  # what is transparent has no colour
            shown = shown * (shown[:, 3:] == 255)
        parts_of = torch.from_numpy(shown) / 255
        self.register_buffer("parts_of", parts_of.to(torch.get_default_device()), persistent=False)
        self.linear = nn.Linear((1 + parts_of.shape[1]) * size, config.d_model)
        nn.init.normal_(self.linear.weight, std=0.35)
        self.place = nn.Parameter(torch.empty(config.patches, config.d_model))
        self.query = nn.Parameter(torch.empty(config.d_model))
        for values in (self.place, self.query):
            nn.init.normal_(values, std=0.3)

    def given(self, known: Tensor) -> Tensor:
        """Which patches hold any known sub-pixel. known: (B, T) bool; returns (B, patches)."""
        return known[:, self.members].any(-1)

    def parts(self, canvas: Tensor, known: Tensor, image: Tensor, patch: Tensor) -> Tensor:
        """What patches show, and flags, (n, (parts + 1) * size). Arguments as in forward."""
        image, members = image[:, None], self.members[patch]
        there = known[image, members].to(self.place.dtype)
        shown = self.parts_of[canvas[image, members].int()] * there[..., None]
        return torch.cat([shown.flatten(1), there], -1)

    def forward(self, canvas: Tensor, known: Tensor, image: Tensor, patch: Tensor) -> Tensor:
        """(n, d_model). canvas: (B, T) uint8 · known: (B, T) bool · image, patch: (n,) int64, their
        indices.
        """
        return self.linear(self.parts(canvas, known, image, patch)) + self.place[patch]
