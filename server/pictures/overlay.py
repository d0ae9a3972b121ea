"""A completion laid back over the upload that it completes: known pixels stay, hidden ones are
filled from it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .encode import Format, encoded
from .pictures import OPAQUE, flattened
from .prepare import Box, Prepared

# strokes get edges up to this many times as steep as in an enlarged picture, in large uploads
EDGE = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class Overlay:
    """What is needed to lay completions back over one upload, at the size of the answer."""

    blank: NDArray[np.uint8]  # (H, W, channels): the upload, with paper where it is hidden
    hidden: NDArray[np.bool_]  # (H, W)
    field: Box  # where the model's picture lies
    # (channels,), of a prepared figure; None: colours are the model's
    ink: NDArray[np.uint8] | None
    profile: bytes = b""  # ICC, of the upload: known pixels keep their meaning
    alpha: NDArray[np.uint8] | None = None  # (H, W), of what stays; None: all is opaque
    bare: bool = False  # the ground is transparent: what is drawn is ink on nothing

    @property
    def fits(self) -> bool:
        """Whether the profile is one of pictures with these channels: of CMYK, for example, it is
        not.
        """
        return self.profile[16:20] == {1: b"GRAY"}.get(self.blank.shape[2], b"RGB ")

    @property
    def size(self) -> str:
        return f"{self.hidden.shape[1]}x{self.hidden.shape[0]}"

    def encoded(self, picture: NDArray[np.uint8], kind: Format = "png") -> bytes:
        """The laid-back picture as a file. picture: the model's complete picture, (height, width,
        channels).
        """
        laid = self.laid(picture)
        if kind == "jpeg" and self.alpha is not None:  # which has no alpha
            laid = flattened(laid[..., :-1], laid[..., -1])
        return encoded(laid, kind, compress_level=1, profile=self.profile if self.fits else b"")

    def laid(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The upload with its hidden pixels filled in, (H, W, channels); alpha is one channel more,
        unless all is opaque.
        """
        left, top, right, bottom = self.field
        tall, wide = picture.shape[:2]
        across, down = wide / (right - left), tall / (bottom - top)
        # between colours of a palette there are none
        resampling = Image.Resampling.NEAREST if picture.shape[2] == 4 else Image.Resampling.BICUBIC
        planes = [
            Image.fromarray(plane).transform(
                self.hidden.shape[::-1],
                Image.Transform.AFFINE,
                (across, 0, -left * across, 0, down, -top * down),
                resampling,
            )
            for plane in np.moveaxis(picture, 2, 0).copy()
        ]
        drawn = np.stack([np.asarray(plane)[self.hidden] for plane in planes], axis=-1)
        laid, opacity = self.blank.copy(), np.float64(1)
        if self.ink is None:
            laid[self.hidden] = drawn
        else:
            steep = min(EDGE, max(1.0, 1 / across))
            share = np.clip((drawn / 255 - 0.5) * steep + 0.5, 0, 1)
            paper = laid[self.hidden]
            if self.bare:
                opacity, share = share[:, 0], np.ones_like(share)
            laid[self.hidden] = (
                paper + (self.ink - paper.astype(np.float64)) * share + 0.5
            ).astype(np.uint8)
        if self.alpha is None:
            return laid
        alpha = self.alpha.copy()
        alpha[self.hidden] = np.round(255 * opacity)
        return np.dstack([laid, alpha])


def overlay(
    colours: NDArray[np.uint8],
    kept: NDArray[np.bool_],
    field: Box,
    channels: int,
    prepared: Prepared | None = None,
    profile: bytes = b"",
    alpha: NDArray[np.uint8] | None = None,
    *,
    fill: bool = False,
) -> Overlay:
    """colours: (H, W, 3), or with a palette (H, W, 4), at the size of the answer · kept: (H, W),
    what is known · channels: of the model's pictures · alpha: (H, W), of what stays; None: all is
    opaque, or alpha is a channel · fill: have hidden parts filled, whatever the ground is.
    """
    if alpha is not None and (alpha[kept] == 255).all():
        alpha = None
    if channels == 1 and profile[16:20] != b"RGB " and (colours == colours[..., :1]).all():
        colours = colours[..., :1]
    opaque = kept if alpha is None else kept & (alpha >= OPAQUE)
    inked = opaque if prepared is None else opaque & prepared.ink
    plain = kept if prepared is None else kept & prepared.sheet & ~prepared.ink
    no_paper = channels == 1 and inked.any() and 2 * opaque[plain].sum() <= plain.sum()
    if no_paper and not fill:
        ink = np.median(colours[inked], axis=0).astype(np.uint8)
        alpha = np.full(kept.shape, 255, np.uint8) if alpha is None else alpha
        return Overlay(colours, ~kept, field, ink, profile, alpha, bare=True)
    blank, ink = colours.copy(), None
    if prepared is not None:
        tone = prepared.paper / max(1.0, float(np.median(prepared.paper[plain])))  # the light alone
        paper = tone[~kept][:, None] * np.median(colours[plain], axis=0)
        blank[~kept] = np.clip(paper + 0.5, 0, 255).astype(np.uint8)
        ink = np.median(colours[prepared.ink], axis=0).astype(np.uint8)
    return Overlay(blank, ~kept, field, ink, profile, alpha)
