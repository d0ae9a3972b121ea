"""Which tokens of a batch of images go through the layers, where not every sub-pixel does.

A sequence is what one image has of them: its patches with anything known and the query, if anything is, and then
each sub-pixel (of a model with tokens "pixel": each pixel) that is to be drawn and does not lie amid background, in
raster order. Sequences are packed one after the other, without padding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .inputs import InputEmbedding, PatchEmbedding


@dataclass(frozen=True, slots=True)
class Sequences:
    """N tokens of B images. Images and positions of a kind of token are two lists of equal length, in packed order."""

    canvas: Tensor           # (B, T) uint8
    known: Tensor            # (B, T) bool
    start: Tensor            # (B,) start indices
    patch_image: Tensor      # tokens of known squares
    patch: Tensor
    query_image: Tensor      # a token after them, for each image of which anything is known
    pixel_image: Tensor      # sub-pixels, or pixels, that go through the layers
    pixel_t: Tensor
    pixel_values: Tensor     # what they look up: InputEmbedding.values
    skipped_image: Tensor    # sub-pixels amid background, which do not
    skipped_t: Tensor
    skipped_following: Tensor  # known background that follows each, in following neighbours
    last: Tensor             # of each that skips: the packed place of the token before it; N + image, if there is none
    order: Tensor            # (N,): packed place -> place in a list of all patches, then queries, then sub-pixels
    query_place: Tensor      # packed places of queries and sub-pixels
    pixel_place: Tensor
    offsets: Tensor          # (B + 1,): where each image's tokens begin


def sequences_of(inputs: InputEmbedding, patches: PatchEmbedding | None, canvas: Tensor, start: Tensor,
                 known: Tensor | None = None, *, begin: int = 0, end: int | None = None) -> Sequences:
    """Lay out a batch of images. canvas: (B, T) uint8 · start: (B,) · known: (B, T) bool, nothing if absent.

    begin, end: leave out those of sub-pixels, or pixels, before and from these positions.
    """
    config = inputs.config
    B, length = len(canvas), config.length
    if known is None:
        known = torch.zeros_like(canvas, dtype=torch.bool)
    t = torch.arange(length).expand(B, length)
    drawn = ~known[:, ::config.token_size] & (t >= begin) & (t < (length if end is None else end))
    skips = torch.zeros_like(drawn)
    values = inputs.values(canvas, t, start, known)
    if config.background is not None:
        skips = drawn & inputs.amid_background(values)
    runs = drawn & ~skips
    told = patches.told(known) if patches else torch.zeros(B, 0, dtype=torch.bool)
    asked = told.any(1)
    # where in its image's sequence each token stands: patches, the query, sub-pixels
    kinds = torch.cat([told, asked[:, None], runs], 1).long()
    local = kinds.cumsum(1) - kinds
    lengths = kinds.sum(1)
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    place = local + offsets[:-1, None]
    patch_image, patch = told.nonzero(as_tuple=True)
    [query_image] = asked.nonzero(as_tuple=True)
    pixel_image, pixel_t = runs.nonzero(as_tuple=True)
    skipped_image, skipped_t = skips.nonzero(as_tuple=True)
    P = told.shape[1]
    before = place[skipped_image, P + 1 + skipped_t] - 1
    none = local[skipped_image, P + 1 + skipped_t] == 0
    query_place, pixel_place = place[query_image, P], place[pixel_image, P + 1 + pixel_t]
    places = torch.cat([place[patch_image, patch], query_place, pixel_place])
    return Sequences(
        canvas, known, start, patch_image, patch, query_image, pixel_image, pixel_t, values[pixel_image, pixel_t],
        skipped_image, skipped_t, inputs.known_background(values[skipped_image, skipped_t]),
        torch.where(none, len(places) + skipped_image, before), places.argsort(), query_place, pixel_place,
        offsets)
