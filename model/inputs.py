"""The input at position t: a sum of table look-ups, each of something known before t.

All tables are stacked into one, so that an engine needs one gather-and-sum whatever a
configuration looks up. Row blocks, in order: the previous sub-pixel (256 values, the
unconditional start, one start per class), the positional look-ups, then 257 rows for each
neighbour (256 values, and 256 for outside the image).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import ModelConfig

START = 256    # previous value at t = 0, unconditionally; START + 1 + c starts class c
OUTSIDE = 256  # value of a neighbour that lies outside the image


class InputEmbedding(nn.Module):
    """x_{t-1}, t and the neighbours of t, embedded and summed."""

    source: Tensor
    outside: Tensor
    base: Tensor
    positional: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        t = torch.arange(config.subpixels)
        place = {"position": t,
                 "row": t // (config.width * config.channels),
                 "column": t // config.channels % config.width,
                 "channel": t % config.channels}
        sizes = {"position": config.subpixels, "row": config.height, "column": config.width, "channel": config.channels}
        source, outside, base = [t - 1], [t == 0], [torch.zeros_like(t)]
        rows = START + 1 + config.classes
        positional, tables = torch.zeros(config.subpixels, 0, dtype=torch.int64), [0]
        for name in config.look_ups:
            if name != "previous":
                positional = torch.cat([positional, (place[name] + rows)[:, None]], 1)
                rows += sizes[name]
        for dy, dx, dc in config.neighbours:
            inside = torch.ones_like(t, dtype=torch.bool)
            for at, size in ((place["row"] + dy, config.height), (place["column"] + dx, config.width),
                             (place["channel"] + dc, config.channels)):
                inside &= (at >= 0) & (at < size)
            source.append(t + config.offset((dy, dx, dc)))
            outside.append(~inside)
            base.append(torch.full_like(t, rows))
            tables.append(rows)
            rows += OUTSIDE + 1
        # (T, number of values looked up): where a value stands, whether that is outside, its table's first row
        self.register_buffer("source", torch.stack(source, 1).clamp(0, config.subpixels - 1), persistent=False)
        self.register_buffer("outside", torch.stack(outside, 1), persistent=False)
        self.register_buffer("base", torch.stack(base, 1), persistent=False)
        self.register_buffer("positional", positional, persistent=False)
        table = torch.randn(rows, config.d_model)
        if config.channels == 3:  # similar values begin with similar rows; tried with colours only
            for first in tables:
                walk = table[first:first + 256].cumsum(0)
                walk -= walk.mean(0)
                table[first:first + 256] = walk / walk.std()
        self.table = nn.Parameter(table * 0.5)

    def indices(self, canvas: Tensor, t: Tensor, start: Tensor) -> Tensor:
        """Rows of the stacked table to be summed for each position.

        canvas: (B, T) uint8, of which only sub-pixels before t are looked at
        t:      (B, n) int64, the positions being predicted
        start:  (B,) int64, the start index that stands before sub-pixel 0
        Returns (B, n, look-ups) int64.
        """
        rows, n = t.shape
        values = canvas.gather(1, self.source[t].flatten(1)).view(rows, n, -1).long()
        nothing = torch.full_like(values, OUTSIDE)
        nothing[..., 0] = start[:, None]
        values = torch.where(self.outside[t], nothing, values) + self.base[t]
        return torch.cat([values, self.positional[t]], -1)

    def forward(self, canvas: Tensor, t: Tensor, start: Tensor) -> Tensor:
        """Shapes as in indices; returns (B, n, d_model)."""
        indices = self.indices(canvas, t, start)
        return F.embedding_bag(indices.flatten(0, 1), self.table, mode="sum").view(*t.shape, -1)
