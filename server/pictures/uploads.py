"""Turn the fields of an edit into the image that the model completes, and what completions are laid back over."""

import io
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from linpix.model.checkpoint import Checkpoint
from linpix.model.config import ModelConfig

from .coverage import half_known, reduced
from .overlay import Overlay, overlay
from .pictures import Occluded, PictureError, decode, occluded
from .prepare import SIDE, Box, NoFigure, Prepared, prepare

Preparation = Literal["none", "mnist"]

LARGEST_SIDE = 1024  # pixels; uploads to prepare or to lay back are reduced to this side
LIGHT_EDGE = 8       # grey levels; the mean of MNIST's edges is below 1, and completions suffer from 10 on


@dataclass(frozen=True, slots=True, eq=False)
class Upload:
    occluded: Occluded
    crop: Box                   # left, top, right, bottom of what the model's picture shows, in pixels of the upload
    prepared: Prepared | None   # in pixels of the reduced upload
    box: Box | None             # of the prepared figure, in pixels of the upload
    overlay: Overlay | None

    @property
    def held(self) -> int:
        """Bytes of memory that are still needed once the upload is decoded."""
        return 0 if self.overlay is None else self.overlay.held

    def seen(self) -> bytes:
        """A PNG of what the model sees of a prepared picture, transparent where pixels are to be drawn."""
        out = io.BytesIO()
        shape = SIDE, SIDE
        alpha = 255 * self.occluded.known.reshape(shape).astype(np.uint8)
        Image.fromarray(np.dstack([self.occluded.canvas.reshape(shape), alpha])).save(out, "PNG")
        return out.getvalue()


def read(image: bytes, config: ModelConfig, *, mask: bytes | None = None, keep_rows: int | None = None,
         preparation: Preparation = "none", lay_back: bool = False) -> Upload:
    """Decode an upload; pictures.decode says what its holes are. Raises PictureError, or MemoryError.

    preparation mnist: find the digit, and bring it to MNIST's size and place · lay_back: also make Upload.overlay.
    """
    if preparation == "none":
        decoded = decode(image, config, mask=mask, keep_rows=keep_rows)
        left, top, width, height = decoded.crop
        crop = _scaled((left, top, left + width, top + height), decoded.scale)
        laid = _overlay(image, config, mask, keep_rows, decoded.crop) if lay_back else None
        return Upload(occluded(decoded, config), crop, None, None, laid)
    check_preparable(config)
    decoded = decode(image, config, mask=mask, keep_rows=keep_rows, whole=True)
    tall, wide, factor = _smaller(decoded.colours)
    try:
        prepared = reduce_and_prepare(decoded.colours[..., 0], decoded.kept)
    except NoFigure as error:
        raise PictureError(f"image: {error}, or leave out prepare", "image") from error
    known = prepared.known & (np.arange(SIDE)[:, None] < (SIDE if keep_rows is None else keep_rows))
    canvas = np.where(known, prepared.canvas, np.uint8(0))
    laid = None
    if lay_back:
        colours = decode(image, config, mask=mask, keep_rows=keep_rows, channels=3, whole=True)
        kept = half_known(decoded.kept, tall, wide).copy()
        if keep_rows is not None:
            kept &= ~_below(kept.shape, prepared.field, keep_rows)
        laid = overlay(reduced(colours.colours, colours.kept, tall, wide)[0], kept, prepared.field, 1, prepared,
                       decoded.profile)
    return Upload(Occluded(canvas.reshape(-1), known.reshape(-1), bool(config.patch)),
                  _scaled(prepared.field, factor * decoded.scale), prepared,
                  _scaled(prepared.box, factor * decoded.scale), laid)


def reduce_and_prepare(grey: NDArray[np.uint8], kept: NDArray[np.bool_]) -> Prepared:
    """Reduce a grey picture (H, W), and prepare it. kept: of any size, stretched over it. Raises NoFigure."""
    values, known = reduced(grey[..., None], kept, *_smaller(grey)[:2])
    return prepare(values[..., 0], known)


def warnings_of(upload: Upload, checkpoint: Checkpoint) -> list[str]:
    """Why a model may complete an upload badly, or the answer look different from it."""
    found = outside(upload.occluded)
    if upload.overlay is not None and upload.overlay.profile and not upload.overlay.fits:
        found.append("the picture's colour profile is not one of RGB, so it is left out, and known pixels may look "
                     "different; convert the picture to sRGB first")
    if upload.prepared is None and checkpoint.provenance.get("data") == "mnist":
        found += unlike_mnist(upload.occluded)
    return found


def outside(occluded: Occluded) -> list[str]:
    """A warning if something is hidden that the model does not see, else no warning."""
    if not occluded.missed:
        return []
    return [f"{max(1, round(100 * occluded.missed))} % of the hidden pixels are outside the part of the picture that "
            "the model sees, so they are not used; crop the picture to the part that you need, closer to the model's "
            "aspect ratio"]


def unlike_mnist(occluded: Occluded) -> list[str]:
    """A warning for a model of MNIST's digits, whose edges are black, if the known edge of a picture is not."""
    if occluded.canvas.size != SIDE * SIDE:
        return []
    edge = np.ones((SIDE, SIDE), np.bool_)
    edge[1:-1, 1:-1] = False
    seen = occluded.canvas.reshape(SIDE, SIDE)[edge & occluded.known.reshape(SIDE, SIDE)]
    if not seen.size or seen.mean() < LIGHT_EDGE:
        return []
    return ["the picture's edge is not black, and this model knows only light digits on a black ground, so it may "
            "complete the picture badly; use prepare=mnist to have the digit found and brought to MNIST's form"]


def check_preparable(config: ModelConfig) -> None:
    """Raise PictureError unless the model has the shape of MNIST's images."""
    if (config.height, config.width, config.channels) != (SIDE, SIDE, 1):
        raise PictureError(f"prepare=mnist works only with models of {SIDE}x{SIDE} grey pixels, but this one has "
                           f"{config.width}x{config.height} with {config.channels} channels; leave out "
                           "prepare, or choose another model", "prepare")


def _smaller(pixels: NDArray[np.uint8]) -> tuple[int, int, float]:
    """Height and width to which an upload is reduced, and the length of one reduced pixel in pixels of the upload."""
    height, width = pixels.shape[:2]
    factor = max(1.0, max(height, width) / LARGEST_SIDE)
    return max(1, round(height / factor)), max(1, round(width / factor)), factor


def _scaled(box: Box, factor: float) -> Box:
    left, top, right, bottom = (round(side * factor, 2) for side in box)
    return left, top, right, bottom


def _below(shape: tuple[int, ...], field: Box, rows: int) -> NDArray[np.bool_]:
    """Pixels of (H, W) whose middle is in the field, below the first rows of the model's picture."""
    left, top, right, bottom = field
    y, x = np.arange(shape[0])[:, None] + 0.5, np.arange(shape[1])[None] + 0.5
    return (y >= top + rows * (bottom - top) / SIDE) & (y < bottom) & (x >= left) & (x < right)


def _overlay(image: bytes, config: ModelConfig, mask: bytes | None, keep_rows: int | None,
             crop: tuple[int, int, int, int]) -> Overlay:
    """The overlay over a whole upload, of which the model sees only the crop."""
    whole = decode(image, config, mask=None, keep_rows=config.height, channels=3, whole=True)
    decoded = decode(image, config, mask=mask, keep_rows=keep_rows, channels=3)
    tall, wide, factor = _smaller(whole.colours)
    left, top, right, bottom = (round(side / factor) for side in
                                (crop[0], crop[1], crop[0] + crop[2], crop[1] + crop[3]))
    colours = reduced(whole.colours, np.ones(whole.colours.shape[:2], np.bool_), tall, wide)[0]
    kept = np.ones((tall, wide), np.bool_)
    inside = np.s_[top:bottom, left:right]
    colours[inside], kept[inside] = reduced(decoded.colours, decoded.kept, bottom - top, right - left)
    return overlay(colours, kept, (float(left), float(top), float(right), float(bottom)), config.channels,
                   profile=decoded.profile)
