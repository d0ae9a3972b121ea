"""Uploads: which part of a picture is known, what the model gets of it, and what completions are
laid back over.

A picture of the model's size comes through unchanged. A larger one is cropped to the model's aspect
ratio, around its centre or around its holes, and reduced by the rules of coverage.py. prepare.py
does more for photographed digits.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from linpix.model.checkpoint import Checkpoint
from linpix.model.config import ModelConfig
from linpix.model.inputs import first_hole
from linpix.model.palette import nearest, painted

from ..errors import InvalidRequest
from .coverage import Crop, centred, cut, half_known, moved, reduced
from .encode import encoded
from .overlay import Overlay, overlay
from .pictures import OPAQUE, Picture, opened
from .prepare import SIDE, NoFigure, prepare

Preparation = Literal["none", "mnist"]

LARGEST_SIDE = 1024  # pixels; uploads to prepare or to lay back are reduced to this side
# grey levels; the mean of MNIST's edges is below 1, and completions suffer from 10 on
LIGHT_EDGE = 8
FAR_COLOURS = 40  # from a palette: most people then see another colour


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Upload:
    """A picture of the model's size with holes. Counts are in sub-pixels; T, raster order, channels
    interleaved.
    """

    canvas: NDArray[np.uint8]  # (T,); holes are 0, or what was beneath them
    known: NDArray[np.bool_]  # (T,), the channels of one pixel always agree
    crop: tuple[float, ...]  # left, top, right, bottom of what it shows, in pixels of the upload
    read: bool  # the model is conditional: it reads what is known before it draws anything
    missed: float = 0.0  # the share of the hidden area that is outside the crop
    off: float = 0.0  # mean distance of its colours from those of the model's palette, 0 to 441
    figure: tuple[float, ...] | None = None  # as crop, of a prepared digit
    inverted: bool = False  # the digit's ink was darker than the paper
    overlay: Overlay | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What answers say of it. conditioning: prefix, full: all that is known conditions all that
        is drawn, since it comes before the first hole, or is read · partial: known sub-pixels after
        the first hole condition only the sub-pixels that follow them.
        """
        known, prefix = int(self.known.sum()), first_hole(self.known)
        return {
            "conditioning": "prefix" if prefix == known else "full" if self.read else "partial",
            "known": known,
            "known_before_first_hole": prefix,
            # argmin is 0 if all are True
            "known_after_last_hole": int(self.known[::-1].argmin()),
        }

    def prefix_only(self) -> "Upload":
        """The same upload, with everything from the first hole on hidden."""
        known = np.arange(self.known.size) < first_hole(self.known)
        return replace(self, canvas=np.where(known, self.canvas, np.uint8(0)), known=known)

    def seen(self) -> bytes:
        """A PNG of what the model sees of a prepared picture, transparent where pixels are to be
        drawn.
        """
        return encoded(
            np.stack([self.canvas, 255 * self.known.astype(np.uint8)], -1).reshape(SIDE, SIDE, 2)
        )


def read(
    image: bytes,
    config: ModelConfig,
    *,
    mask: bytes | None = None,
    keep_rows: int | None = None,
    preparation: Preparation = "none",
    lay_back: bool = False,
    scored: bool = False,
) -> Upload:
    """Decode a PNG, JPEG or WebP, and find its holes. Raises InvalidRequest for any bad upload, or
    MemoryError.

    A mask or keep_rows decides alone, and transparent parts of the image then show black. A mask
    has holes where its alpha is under 128; its colours do not count. It may have any size, and is
    cropped as the image is. keep_rows makes holes from that row of the model's image on; an image
    that has holes of its own is refused with it, unless it is prepared. Without either, the image
    has holes where its own alpha is under 128, and other pixels keep their colours whatever their
    alpha. An opaque mask or alpha channel leaves nothing to fill. The crop is around the centre;
    holes outside it move it, see coverage.moved.
    preparation mnist: find the digit, and bring it to MNIST's size and place · lay_back: also make
        Upload.overlay ·
    scored: holes keep their values; if nothing says what is hidden, all is; and something must be.
    If the model's ground is transparent, so may the image be: its transparent parts are holes only
    where nothing else can say what to fill in.
    """
    if mask is not None and keep_rows is not None:
        raise InvalidRequest(
            "mask and keep_rows both say what to fill in; use one of them", param="mask"
        )
    if keep_rows is not None and not 0 <= keep_rows <= config.height:
        raise InvalidRequest(
            f"keep_rows must be from 0 to {config.height}, the height of the model's image, got "
            f"{keep_rows}",
            param="keep_rows",
        )
    if preparation == "mnist":
        check_preparable(config)
    picture = opened(image, "image")
    alpha = picture.alpha if mask is None else opened(mask, "mask").alpha
    width, height = picture.image.size
    if preparation == "none" and (width < config.width or height < config.height):
        raise InvalidRequest(
            f"image must have at least the model's {config.width}x{config.height} pixels "
            f"(width x height), got {width}x{height}; enlarge it, or put it on a larger ground",
            param="image",
        )
    if mask is not None and alpha is None:
        raise InvalidRequest(
            "mask has no alpha channel; it must be a PNG or WebP that is transparent where pixels "
            "are to be filled in",
            param="mask",
        )
    if alpha is None and keep_rows is None and not scored:
        raise InvalidRequest(
            "it is not clear what to fill in: erase that part of the picture (save it as a PNG with"
            " transparent pixels), or use a mask or keep_rows",
            param="image",
        )
    clear = bool(config.palette) and not config.palette[0][3]
    flat = mask is not None or keep_rows is not None or (scored and clear)
    if flat and mask is None:
        alpha = None  # keep_rows says what is hidden, or nothing does
    if preparation == "mnist":
        return _prepared(
            picture, alpha, keep_rows, flat=flat, lay_back=lay_back, read=bool(config.patch)
        )
    crop, kept, missed = _kept(picture, alpha, config, keep_rows, clear=clear)
    if scored and kept.all() and keep_rows is None and mask is None:
        kept = ~kept
    canvas, known, off = _values(picture, crop, kept, config, flat=flat)
    if scored:
        if known.all():
            param = "keep_rows" if mask is None else "mask"
            raise InvalidRequest(
                f"{param} hides nothing, so there is nothing to score: hide at least one pixel, or"
                f" leave out {param} to score the whole picture",
                param=param,
            )
        beneath, _, off = _values(picture, crop, np.ones_like(kept), config, flat=flat)
        canvas = np.where(known[..., None], canvas, beneath)
    over = _overlay(picture, crop, kept, config, flat=flat) if lay_back else None
    return Upload(
        canvas=canvas.reshape(-1),
        known=known.reshape(-1).repeat(config.channels),
        read=bool(config.patch),
        crop=tuple(side * picture.scale for side in crop),
        missed=missed,
        off=off,
        overlay=over,
    )


def _kept(
    picture: Picture,
    alpha: NDArray[np.uint8] | None,
    config: ModelConfig,
    keep_rows: int | None,
    *,
    clear: bool,
) -> tuple[Crop, NDArray[np.bool_], float]:
    """The crop that the model sees; what is kept of it, (H, W) of any size; and the share of the
    hidden area that is outside. Raises InvalidRequest.

    alpha: of the picture, or of its mask; None: the first rows are kept, or nothing · clear: the
    model's ground is transparent.
    """
    size = picture.image.size
    crop = centred(size, (config.width, config.height))
    holes = picture.alpha is not None and (cut(picture.alpha, crop) < OPAQUE).any()
    if keep_rows is not None and holes and not clear:
        raise InvalidRequest(
            "keep_rows and the transparent parts of the picture both say what to fill in; use"
            " one of them",
            param="keep_rows",
        )
    if alpha is None:
        rows = np.arange(config.height)[:, None].repeat(config.width, axis=1)
        return crop, rows < (keep_rows or 0), 0.0
    within = centred(alpha.shape[::-1], (crop[2] - crop[0], crop[3] - crop[1]))
    crop, within, missed = moved(alpha < OPAQUE, size, crop, within)
    return crop, cut(alpha, within) >= OPAQUE, missed


def _values(
    picture: Picture, crop: Crop, kept: NDArray[np.bool_], config: ModelConfig, *, flat: bool
) -> tuple[NDArray[np.uint8], NDArray[np.bool_], float]:
    """A crop, reduced to the model's size: its values, (H, W, C), what is known of it, and how far
    its colours are from those of the palette.
    """
    size = config.height, config.width
    if not config.palette:
        return *reduced(picture.colours(config.channels, crop, flat=flat), kept, *size), 0.0
    pixels, known = reduced(picture.cut_out(crop, flat=flat), kept, *size)
    pixels = _straight(pixels)
    values = nearest(pixels.reshape(-1, 4), config).reshape(size)
    distances = np.linalg.norm(
        (painted(values, config)[..., :3] - pixels[..., :3].astype(float)), axis=-1
    )
    there = pixels[..., 3] >= OPAQUE
    return values[..., None], known, float(distances[there].mean()) if there.any() else 0.0


def _straight(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Means of cut_out, (H, W, 4), with the colours of what is there alone."""
    alpha = np.maximum(pixels[..., 3:], 1)
    colours = np.minimum(np.rint(pixels[..., :3] * (255 / alpha)), 255).astype(np.uint8)
    return np.concatenate([colours, pixels[..., 3:]], -1)


def _prepared(
    picture: Picture,
    alpha: NDArray[np.uint8] | None,
    keep_rows: int | None,
    *,
    flat: bool,
    lay_back: bool,
    read: bool,
) -> Upload:
    """An upload of a digit. alpha: of the picture, or of its mask; None: keep_rows says what is
    hidden.
    """
    grey = picture.colours(1, flat=flat)
    tall, wide, factor = _smaller(*picture.image.size)
    kept = np.ones(grey.shape[:2], np.bool_)
    if alpha is not None:
        kept = cut(alpha, centred(alpha.shape[::-1], picture.image.size)) >= OPAQUE
    values, known = reduced(grey, kept, tall, wide)
    try:
        found = prepare(values[..., 0], known)
    except NoFigure as error:
        raise InvalidRequest(f"image: {error}, or leave out prepare", param="image") from error
    known = found.known & (np.arange(SIDE)[:, None] < (SIDE if keep_rows is None else keep_rows))
    over = None
    if lay_back:
        alpha = picture.transparency((0, 0, 0, 0) if flat else (0, 0, *picture.image.size))
        own = half_known(kept, *grey.shape[:2])
        colours, alpha = _shown(picture, alpha, own, tall, wide, flat=flat)
        stays = half_known(kept, tall, wide)
        if keep_rows is not None:
            left, top, right, bottom = found.field
            y, x = np.arange(tall)[:, None] + 0.5, np.arange(wide) + 0.5
            below = (y >= top + keep_rows * (bottom - top) / SIDE) & (y < bottom)
            stays = stays & ~(below & (x >= left) & (x < right))
        over = overlay(colours, stays, found.field, 1, found, picture.profile, alpha)
    crop, figure = (
        tuple(round(side * factor * picture.scale, 2) for side in box)
        for box in (found.field, found.box)
    )
    return Upload(
        canvas=np.where(known, found.canvas, np.uint8(0)).reshape(-1),
        known=known.reshape(-1),
        read=read,
        crop=crop,
        figure=figure,
        inverted=found.inverted,
        overlay=over,
    )


def warnings_of(upload: Upload, checkpoint: Checkpoint | None = None) -> list[str]:
    """Why an answer may look different from the upload, or a model may complete it badly."""
    found = []
    if upload.missed:
        found.append(
            f"{max(1, round(100 * upload.missed))} % of the hidden pixels are outside the part of"
            " the picture that the model sees, so they are not used; crop the picture to the part"
            " that you need, closer to the model's aspect ratio"
        )
    elif upload.known.all():
        found.append(
            "no pixel of the model's picture is hidden, so nothing is drawn; hide some where the"
            " picture or a mask is transparent, whatever its colours are, or with a smaller"
            " keep_rows"
        )
    if upload.overlay is not None and upload.overlay.profile and not upload.overlay.fits:
        found.append(
            "the picture's colour profile is not one of RGB, so it is left out, and known pixels"
            " may look different; convert the picture to sRGB first"
        )
    if upload.off >= FAR_COLOURS:
        found.append(
            "the picture's colours are far from those that the model knows, so the nearest of these"
            " were taken; use colours of the model's palette"
        )
    if (
        checkpoint is not None
        and checkpoint.board.get("prepare") == "mnist"
        and upload.figure is None
        and upload.canvas.size == SIDE * SIDE
    ):
        edge = np.ones((SIDE, SIDE), np.bool_)
        edge[1:-1, 1:-1] = False
        seen = upload.canvas[edge.reshape(-1) & upload.known]
        if seen.size and seen.mean() >= LIGHT_EDGE:
            found.append(
                "the picture's edge is not black, and this model knows only light ink on a black"
                " ground, so it may complete the picture badly; use prepare=mnist to have the ink"
                " found and brought to MNIST's form"
            )
    return found


def check_preparable(config: ModelConfig) -> None:
    """Raise InvalidRequest unless the model has the shape of MNIST's images."""
    if not config.grey or (config.height, config.width) != (SIDE, SIDE):
        raise InvalidRequest(
            f"prepare=mnist works only with models of {SIDE}x{SIDE} grey pixels, but this one has "
            f"{config.width}x{config.height} {'grey' if config.grey else 'coloured'} ones; leave"
            " out prepare, or choose another model",
            param="prepare",
        )


def _smaller(width: int, height: int) -> tuple[int, int, float]:
    """Height and width to which an upload is reduced, and the length of one reduced pixel in pixels
    of the upload.
    """
    factor = max(1.0, max(height, width) / LARGEST_SIDE)
    return max(1, round(height / factor)), max(1, round(width / factor)), factor


def _overlay(
    picture: Picture, crop: Crop, kept: NDArray[np.bool_], config: ModelConfig, *, flat: bool
) -> Overlay:
    """The overlay over a whole upload, of which the model sees only the crop."""
    width, height = picture.image.size
    tall, wide, factor = _smaller(width, height)
    left, top, right, bottom = (round(side / factor) for side in crop)
    field = (left, top, right, bottom)
    stays, inside = np.ones((tall, wide), np.bool_), np.s_[top:bottom, left:right]
    size = stays[inside].shape
    everything = np.ones((height, width), np.bool_)
    if config.palette:
        colours, _ = reduced(picture.cut_out(flat=True), everything, tall, wide)
        colours[inside], stays[inside] = reduced(picture.cut_out(crop, flat=flat), kept, *size)
        return overlay(_straight(colours), stays, field, 4, profile=picture.profile)
    alpha = picture.transparency((0, 0, 0, 0) if flat else crop)
    colours, alpha = _shown(picture, alpha, everything, tall, wide, flat=True)
    within, stays[inside] = reduced(picture.colours(3, crop, flat=flat), kept, *size)
    if alpha is None or not flat:
        colours[inside] = within
    return overlay(
        colours,
        stays,
        field,
        config.channels,
        profile=picture.profile,
        alpha=alpha,
        fill=not flat,
    )


def _shown(
    picture: Picture,
    alpha: NDArray[np.uint8] | None,
    kept: NDArray[np.bool_],
    tall: int,
    wide: int,
    *,
    flat: bool,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """The colours, (tall, wide, 3), and the alpha of what stays of a whole picture; see
    Picture.transparency. flat: of colours, if nothing stays transparent.
    """
    if alpha is None:
        colours, _ = reduced(picture.colours(3, flat=flat), kept, tall, wide)
        return colours, None
    kept = kept & (alpha > 0)  # invisible paint has no weight
    colours, _ = reduced(picture.colours(3, flat=False), kept, tall, wide)
    reduced_alpha, _ = reduced(alpha[..., None], kept, tall, wide)
    return colours, reduced_alpha[..., 0]
