"""Sequences of the tokens that go through the layers, for models in which not every sub-pixel does.

The sequence of an image is: its patches with any known sub-pixel and the query, if anything is
known; then, in raster order, each sub-pixel that is to be drawn and is not amid background (each
pixel, for a model with tokens "pixel"). Sequences are packed one after the other, without padding.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .inputs import InputEmbedding, PatchEmbedding


class Sequences(NamedTuple):
    """N tokens of B images. Each kind of token has a list of images and one of positions, both in
    packed order.
    """

    canvas: Tensor  # (B, T) uint8
    known: Tensor  # (B, T) bool
    start: Tensor  # (B,) start indices
    patch_image: Tensor  # tokens of known squares
    patch: Tensor
    query_image: Tensor  # the query token after them, for each image with any known sub-pixel
    pixel_image: Tensor  # sub-pixels, or pixels, that go through the layers
    pixel_t: Tensor
    pixel_values: Tensor  # their looked-up values: InputEmbedding.values
    skipped_image: Tensor  # sub-pixels amid background, which skip the layers
    skipped_t: Tensor
    skipped_following: Tensor  # number of following neighbours of each that are known background
    # for each that skips: the packed place of the token before it; N + image if there is none
    last: Tensor
    # (N,): packed place -> place in a list of all patches, then queries, then sub-pixels
    order: Tensor
    query_place: Tensor  # packed places of queries and sub-pixels
    pixel_place: Tensor
    offsets: Tensor  # (B + 1,): where each image's tokens begin


def sequences_of(
    inputs: InputEmbedding,
    patches: PatchEmbedding | None,
    canvas: Tensor,
    start: Tensor,
    known: Tensor | None = None,
    *,
    begin: int = 0,
    end: int | None = None,
) -> Sequences:
    """Lay out a batch of images. canvas: (B, T) uint8 · start: (B,) · known: (B, T) bool, nothing
    if absent.

    begin, end: only tokens of sub-pixels, or pixels, at positions begin .. end - 1; patches and
                queries in any case.
    """
    config = inputs.config
    B, length = len(canvas), config.length
    if known is None:
        known = torch.zeros_like(canvas, dtype=torch.bool)
    t = torch.arange(length).expand(B, length)
    drawn = ~known[:, :: config.token_size] & (t >= begin) & (t < (length if end is None else end))
    values = inputs.values(canvas, t, start, known)
    skips = drawn & inputs.amid_background(values)
    runs = drawn & ~skips
    given = patches.given(known) if patches else torch.zeros(B, 0, dtype=torch.bool)
    asked = given.any(1)
    # each token's place in its image's sequence: patches, the query, sub-pixels
    kinds = torch.cat([given, asked[:, None], runs], 1).long()
    local = kinds.cumsum(1) - kinds
    lengths = kinds.sum(1)
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    place = local + offsets[:-1, None]
    patch_image, patch = given.nonzero(as_tuple=True)
    [query_image] = asked.nonzero(as_tuple=True)
    pixel_image, pixel_t = runs.nonzero(as_tuple=True)
    skipped_image, skipped_t = skips.nonzero(as_tuple=True)
    P = given.shape[1]
    before = place[skipped_image, P + 1 + skipped_t] - 1
    none = local[skipped_image, P + 1 + skipped_t] == 0
    query_place, pixel_place = place[query_image, P], place[pixel_image, P + 1 + pixel_t]
    places = torch.cat([place[patch_image, patch], query_place, pixel_place])
    return Sequences(
        canvas,
        known,
        start,
        patch_image,
        patch,
        query_image,
        pixel_image,
        pixel_t,
        values[pixel_image, pixel_t],
        skipped_image,
        skipped_t,
        inputs.known_background(values[skipped_image, skipped_t]),
        torch.where(none, len(places) + skipped_image, before),
        places.argsort(),
        query_place,
        pixel_place,
        offsets,
    )
