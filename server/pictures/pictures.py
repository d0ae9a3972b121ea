"""Between a client's picture and the model's sub-pixels: decoding uploads, finding the holes, writing PNG.

A picture of the model's size comes through unchanged. A larger one is cropped to the model's aspect ratio, around its
centre or around its holes, and reduced by the rules of coverage.py. prepare.py does more for photographed digits.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from linpix.model.config import ModelConfig
from linpix.model.inputs import first_hole

from ..errors import OptionError
from . import coverage, sanitise
from .coverage import Crop, centred, moved
from .encode import encoded, enlarged, framed

LARGEST_UPLOAD = 4096 * 4096  # pixels, as the header declares them; Pillow mostly uses 4 bytes a pixel
LARGEST_PHOTOGRAPH = 8192 * 8192  # pixels of a JPEG in one scan, which is then decoded at half its width and height
MAX_SCANS = 500              # of one JPEG: each costs 33 bytes of upload, but a pass over all its pixels
MAX_SCANNED = 32 * LARGEST_UPLOAD  # pixels in all passes: 16 million take 11 ms; encoders make about ten passes
OPAQUE = 128                  # pixels of at least this alpha are known

_UPRIGHT = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
            5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
            8: Image.Transpose.ROTATE_90}  # by EXIF's orientation

Image.init()  # load readers and writers now, not while a request waits or when no more files can be opened
# Once for the process: catch_warnings is not thread-safe, and a client's odd picture does not belong in our log.
warnings.filterwarnings("ignore", module=r"PIL\.")


class PictureError(OptionError):
    """status is 400, 413 (too large) or 415 (not an accepted format)."""


@dataclass(frozen=True, slots=True, eq=False)
class Occluded:
    """One image of the model's size with holes; every count is in sub-pixels."""

    canvas: NDArray[np.uint8]  # (T,), raster order, channels interleaved; holes are 0, or what was beneath them
    known: NDArray[np.bool_]   # (T,), the channels of one pixel always agree
    read: bool = False         # the model is conditional: it reads what is known before it draws anything
    missed: float = 0.0        # the share of the upload's hidden area that is outside its crop

    @property
    def prefix(self) -> int:
        """Known sub-pixels before the first hole; T if there is no hole."""
        return first_hole(self.known)

    @property
    def conditioning(self) -> Literal["prefix", "full", "partial"]:
        """prefix, full: all that is known conditions all that is drawn: it comes before the first hole, or is read.

        partial: known sub-pixels after the first hole condition only the sub-pixels that follow them.
        """
        return "prefix" if self.prefix == self.known_count else "full" if self.read else "partial"

    def prefix_only(self) -> "Occluded":
        """The same image, with everything from the first hole on hidden."""
        known = np.arange(self.known.size) < self.prefix
        return replace(self, canvas=np.where(known, self.canvas, np.uint8(0)), known=known)

    @property
    def known_count(self) -> int:
        return int(self.known.sum())

    @property
    def known_before_first_hole(self) -> int:
        """The prefix, under its name in the API's answer."""
        return self.prefix

    @property
    def known_after_last_hole(self) -> int:
        """Known sub-pixels after the last hole: unless read, they condition nothing; 0 if there is no hole."""
        return int(self.known[::-1].argmin())  # argmin is 0 if all are True


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """An upload before it is brought to the model's size. H and W are those of its crop."""

    colours: NDArray[np.uint8]       # (H, W, channels)
    kept: NDArray[np.bool_]          # False in holes; of any size, stretched over the colours
    crop: Crop                       # in the upload as it was decoded
    missed: float = 0.0              # as in Occluded
    scale: int = 1                   # sides of the upload / sides of the decoded picture
    profile: bytes = b""             # ICC, of the upload


def occluded(decoded: Decoded, config: ModelConfig) -> Occluded:
    """Reduce a decoded upload to the model's size."""
    values, known = coverage.reduced(decoded.colours, decoded.kept, config.height, config.width)
    return Occluded(values.reshape(-1), known.reshape(-1).repeat(config.channels), bool(config.patch), decoded.missed)


def decode(image: bytes, config: ModelConfig, *, mask: bytes | None, keep_rows: int | None,
           channels: int | None = None, whole: bool = False, unmarked: bool = False) -> Decoded:
    """Decode a PNG, JPEG or WebP, and find its holes. Raises PictureError for any bad upload, or MemoryError.

    A mask or keep_rows decides alone, and transparent parts of the image then show black. A mask has holes where its
    alpha is under 128; its colours do not count. It may have any size, and is cropped as the image is. keep_rows makes
    holes from that row of the model's image on; unless `whole`, an image that has holes of its own is refused with it.
    Without either, the image has holes where its own alpha is under 128, and other pixels keep their colours whatever
    their alpha. An opaque mask or alpha channel leaves nothing to fill. The crop is around the centre; holes outside it
    move it, see coverage.moved.
    channels: 1 or 3, if not the model's · whole: do not crop; keep_rows then makes no holes here, and transparent parts
    show black or white, whichever differs more from the opaque ones · unmarked: if nothing says what is hidden, all is.
    """
    if mask is not None and keep_rows is not None:
        raise PictureError("mask and keep_rows both say what to fill in; use one of them", "mask")
    if keep_rows is not None and not 0 <= keep_rows <= config.height:
        raise PictureError(f"keep_rows must be from 0 to {config.height}, the height of the model's image, got "
                           f"{keep_rows}", "keep_rows")
    picture, scale = _opened(image, "image")
    masked = None if mask is None else _opened(mask, "mask")[0]
    size, missed = picture.size, 0.0
    if not whole and (size[0] < config.width or size[1] < config.height):
        raise PictureError(f"image must have at least the model's {config.width}x{config.height} pixels "
                           f"(width x height), got {size[0]}x{size[1]}", "image")
    crop = centred(size, size if whole else (config.width, config.height))
    holes = picture if masked is None else masked
    within = crop if masked is None else centred(masked.size, crop[2:])
    if keep_rows is None and not whole and (crop[2:] != size or within[2:] != holes.size):
        with _blaming("image" if masked is None else "mask"):
            hidden = _alpha(holes)
        if hidden is not None:
            crop, within, missed = moved(hidden < OPAQUE, size, crop, within)
    with _blaming("image"):
        colours, alpha = _pixels(_cropped(picture, crop), channels or config.channels)
    if keep_rows is not None and not whole and alpha is not None and (alpha < OPAQUE).any():
        raise PictureError("keep_rows and the transparent parts of the picture both say what to fill in; use one of "
                           "them", "keep_rows")
    if masked is not None:
        with _blaming("mask"):
            painted = _alpha(_cropped(masked, within))
        if painted is None:
            raise PictureError("mask has no alpha channel; it must be a PNG or WebP that is transparent where pixels "
                               "are to be filled in", "mask")
        kept = painted >= OPAQUE
    elif keep_rows is not None:
        kept = np.arange(config.height)[:, None].repeat(config.width, axis=1) < (config.height if whole else keep_rows)
    elif alpha is not None and not (unmarked and (alpha >= OPAQUE).all()):
        kept = alpha >= OPAQUE
    elif unmarked:
        kept = np.zeros(colours.shape[:2], np.bool_)
    else:
        raise PictureError("it is not clear what to fill in: erase that part of the picture (save it as a PNG with "
                           "transparent pixels), or use a mask or keep_rows", "image")
    if alpha is not None and (mask is not None or keep_rows is not None):
        opaque = colours[alpha >= OPAQUE]
        behind = 255 if whole and opaque.size and opaque.mean() < 128 else 0
        share = alpha[..., None].astype(np.uint16)
        colours = ((colours * share + behind * (255 - share) + 127) // 255).astype(np.uint8)
    return Decoded(colours, kept, crop, missed, scale, picture.info.get("icc_profile", b""))


def png(canvas: NDArray[np.uint8], config: ModelConfig, factor: int = 1, rows: int | None = None) -> bytes:
    """A PNG of (T,) sub-pixels; image rows from `rows` on are unfinished and black."""
    return encoded(framed(canvas, config, enlarged(config, factor), rows))


@contextmanager
def _blaming(param: str) -> Iterator[None]:
    """Turn whatever Pillow raises for a broken picture into PictureError. Only MemoryError stays."""
    try:
        yield
    except (PictureError, MemoryError):  # a lack of memory is not the picture's fault
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # warning: with -W error
        raise _too_large(param, "far more") from error
    except Exception as error:
        raise PictureError(f"{param} is truncated or corrupt, and cannot be decoded; save it again as PNG, "
                           "JPEG or WebP", param) from error


def _too_large(param: str, got: str) -> PictureError:
    return PictureError(f"{param} may have up to {LARGEST_UPLOAD} pixels (4096x4096), or up to {LARGEST_PHOTOGRAPH} "
                        f"(8192x8192) if it is a JPEG with one scan, as cameras save them; got {got}", param, 413)


def _opened(data: bytes, param: str) -> tuple[Image.Image, int]:
    """The picture, and the factor by which decoding reduced its sides."""
    with _blaming(param):
        picture, scale = _upright(data, param)
        picture.load()
        return picture, scale


def _cropped(picture: Image.Image, crop: Crop) -> Image.Image:
    left, top, width, height = crop
    return picture.crop((left, top, left + width, top + height))


def _alpha(picture: Image.Image) -> NDArray[np.uint8] | None:
    """The alpha channel (H, W), if there is one."""
    if picture.mode.startswith("I"):
        if "transparency" not in picture.info:
            return None
        return np.where(np.asarray(picture) == picture.info["transparency"], 0, 255).astype(np.uint8)
    if not picture.has_transparency_data:
        return None
    return np.asarray((picture if picture.mode in ("LA", "RGBA") else picture.convert("RGBA")).getchannel("A"))


def _pixels(picture: Image.Image, channels: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """Colours (H, W, channels) and alpha (H, W), if any."""
    alpha = _alpha(picture)
    if picture.mode.startswith("I"):  # 16-bit grey: Pillow would clip it to 8 bits, not scale it
        picture = Image.fromarray(((np.asarray(picture).astype(np.uint32) + 128) // 257).astype(np.uint8))
    elif alpha is not None:
        picture = picture.convert("RGBA")
    colours = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
    return colours.reshape(picture.height, picture.width, channels), alpha


def _upright(data: bytes, param: str) -> tuple[Image.Image, int]:
    """The one frame of an upload, turned as its EXIF says, and how much its sides are reduced. No profile is used."""
    if not data:
        raise PictureError(f"{param} is empty: the file has 0 bytes", param)
    kind = sanitise.kind_of(data)
    if kind is None:
        other = sanitise.other_kind(data)
        begins = repr(data[:8])
        got = f"{len(data)} bytes that begin with {begins}" if other is None else f"{len(data)} bytes: {other}"
        raise PictureError(f"{param} must be a PNG, JPEG or WebP picture, got {got}", param, 415)
    found = sanitise.pixels_of(data, kind)
    if found.frames > 1:
        raise PictureError(f"{param} is animated ({found.frames} frames); it must be one still picture", param)
    opened = Image.open(io.BytesIO(found.data), formats=[kind])  # reads the header only
    picture: Image.Image = opened
    scale, pixels = 1, picture.width * picture.height
    if LARGEST_UPLOAD < pixels <= LARGEST_PHOTOGRAPH and kind == "JPEG" and found.scans == 1:
        while pixels > LARGEST_UPLOAD * scale**2:
            scale *= 2
        opened.draft(None, (max(1, opened.width // scale), max(1, opened.height // scale)))
    if picture.width * picture.height > LARGEST_UPLOAD:
        raise _too_large(param, f"{picture.width}x{picture.height}")
    if found.scans > (max_scans := min(MAX_SCANS, MAX_SCANNED // max(1, picture.width * picture.height))):
        raise PictureError(f"{param} may have up to {max_scans} scans (JPEG of {picture.width}x{picture.height} "
                           f"pixels), got {found.scans}", param)
    if kind == "PNG" and "transparency" in picture.info:
        picture.info["transparency"] = _eight_bit(picture.info["transparency"], opened.tile[0][3])
    if found.profile:
        picture.info["icc_profile"] = found.profile
    if found.orientation in _UPRIGHT:
        picture = picture.transpose(_UPRIGHT[found.orientation])
    return picture, scale


def _eight_bit(transparent: object, raw_mode: object) -> object:
    """Scale the transparent colour as Pillow scales the pixels of these raw modes; Pillow 13.0 leaves it as it is."""
    if isinstance(transparent, int) and raw_mode in ("1", "L;2", "L;4"):
        return {"1": 255 * (transparent > 0), "L;2": 85 * transparent, "L;4": 17 * transparent}[raw_mode]
    if isinstance(transparent, tuple) and raw_mode == "RGB;16B":
        return tuple(value >> 8 for value in transparent)
    return transparent
