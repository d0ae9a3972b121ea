"""Opening a client's file: one still picture within bounds, upright, with 8 bits a channel."""

import io
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from linpix.model.orientation import TURNS

from ..errors import InvalidRequest
from . import sanitise
from .coverage import Crop, cut

# pixels, as the header declares them; Pillow mostly uses 4 bytes a pixel
LARGEST_UPLOAD = 4096 * 4096
# pixels of a JPEG in one scan, which is then decoded at half its width and height
LARGEST_PHOTOGRAPH = 8192 * 8192
MAX_SCANS = 500  # of one JPEG: each costs 33 bytes of upload, but a pass over all its pixels
# pixels in all passes: 16 million take 11 ms; encoders make about ten passes
MAX_SCANNED = 32 * LARGEST_UPLOAD
DECODING_BYTES = 2**29  # which no upload needs more of while it is decoded
OPAQUE = 128  # pixels of at least this alpha are known

# load readers and writers now, not while a request waits or when no more files can be opened
Image.init()
# Once for the process: catch_warnings is not thread-safe, and a client's odd picture does not
# belong in our log.
warnings.filterwarnings("ignore", module=r"PIL\.")


def upright(picture: Image.Image, orientation: int) -> Image.Image:
    """orientation: as EXIF counts, 1..8; 1 is upright."""
    turn = TURNS.get(orientation)
    return picture.transpose(Image.Transpose[turn]) if turn else picture


def eight_bits(wide: Image.Image) -> Image.Image:
    """Grey of 16 bits as L, or LA if a value is transparent: Pillow would clip it, not scale it."""
    values = np.asarray(wide).astype(np.uint32)
    grey = ((values + 128) // 257).astype(np.uint8)
    if "transparency" in wide.info:
        alpha = np.where(values == wide.info["transparency"], 0, 255).astype(np.uint8)
        return Image.fromarray(np.dstack([grey, alpha]))
    return Image.fromarray(grey)


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    image: Image.Image  # L, RGB or RGBA
    alpha: NDArray[np.uint8] | None  # (H, W)
    scale: int  # sides of the file's picture / sides of this one
    profile: bytes  # ICC; it is not used here

    def colours(self, channels: int, crop: Crop | None = None, *, flat: bool) -> NDArray[np.uint8]:
        """A crop, or the whole picture, (H, W, channels).

        flat: what is transparent shows black; in a whole picture white, if that differs more from
        the opaque parts. Otherwise pixels have their colours whatever their alpha.
        """
        image = (self.image if crop is None else self.image.crop(crop)).convert(
            "L" if channels == 1 else "RGB"
        )
        colours = np.asarray(image).reshape(image.height, image.width, channels)
        if not flat or self.alpha is None:
            return colours
        if crop is None:
            return flattened(colours, self.alpha)
        return flattened(colours, cut(self.alpha, crop), white=False)

    def transparency(self, holes: Crop) -> NDArray[np.uint8] | None:
        """The alpha, (H, W), without that of holes, in a crop; None if all else is opaque."""
        if self.alpha is None:
            return None
        alpha = self.alpha.copy()
        cut(alpha, holes)[...] = 255
        return None if (alpha == 255).all() else alpha

    def cut_out(self, crop: Crop | None = None, *, flat: bool) -> NDArray[np.uint8]:
        """A crop, or the whole picture, (H, W, 4): all is 0 in transparent parts, and alpha is 255
        elsewhere. Unless flat, nothing counts as transparent.
        """
        colours = self.colours(3, crop, flat=False)
        there = np.ones(colours.shape[:2], np.bool_)
        if flat and self.alpha is not None:
            there = (self.alpha if crop is None else cut(self.alpha, crop)) >= OPAQUE
        return np.dstack([colours, np.full(there.shape, 255, np.uint8)]) * there[..., None]


def flattened(
    colours: NDArray[np.uint8], alpha: NDArray[np.uint8], *, white: bool = True
) -> NDArray[np.uint8]:
    """Colours, (H, W, channels), on black; or on white, unless white is false, if that differs more
    from the opaque parts.
    """
    opaque = colours[alpha >= OPAQUE]
    behind = 255 if white and opaque.size and opaque.mean() < 128 else 0
    share = alpha[..., None].astype(np.uint16)
    blended = colours * share
    blended += behind * (255 - share) + 127
    blended //= 255  # in place: a large picture takes 100 MB here
    return blended.astype(np.uint8)


def opened(data: bytes, param: str) -> Picture:
    """Raises InvalidRequest: status 400, also for whatever Pillow raises, 413 (too large) or 415
    (another format).

    MemoryError is not the picture's fault, however a decoder says it: libwebp's failed allocations
    look like damaged files.
    """
    try:
        return _opened(data, param)
    except (InvalidRequest, MemoryError):
        raise
    # warning: with -W error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(param, "far more") from error
    except Exception as error:
        np.empty(DECODING_BYTES, np.uint8)  # raises MemoryError; what it returns is never touched
        raise InvalidRequest(
            f"{param} is truncated or corrupt, and cannot be decoded; save it again as PNG, "
            "JPEG or WebP",
            param=param,
        ) from error


def _too_large(param: str, got: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param} may have up to {LARGEST_UPLOAD} pixels (4096x4096), or up to {LARGEST_PHOTOGRAPH}"
        f" (8192x8192) if it is a JPEG with one scan, as cameras save them; got {got}",
        413,
        param=param,
    )


def _opened(data: bytes, param: str) -> Picture:
    if not data:
        raise InvalidRequest(f"{param} is empty: the file has 0 bytes", param=param)
    found = sanitise.pixels_of(data)
    if found is None:
        other = sanitise.other_kind(data)
        got = f" that begin with {data[:8]!r}" if other is None else f": {other}"
        raise InvalidRequest(
            f"{param} must be a PNG, JPEG or WebP picture, got {len(data)} bytes{got}",
            415,
            param=param,
        )
    if found.frames > 1:
        raise InvalidRequest(
            f"{param} is animated ({found.frames} frames); it must be one still picture",
            param=param,
        )
    opened = Image.open(io.BytesIO(found.data), formats=[found.kind])  # reads the header only
    picture: Image.Image = opened
    scale, pixels = 1, picture.width * picture.height
    if LARGEST_UPLOAD < pixels <= LARGEST_PHOTOGRAPH and found.kind == "JPEG" and found.scans == 1:
        while pixels > LARGEST_UPLOAD * scale**2:
            scale *= 2
        opened.draft(None, (max(1, opened.width // scale), max(1, opened.height // scale)))
    if picture.width * picture.height > LARGEST_UPLOAD:
        raise _too_large(param, f"{picture.width}x{picture.height}")
    max_scans = min(MAX_SCANS, MAX_SCANNED // max(1, picture.width * picture.height))
    if found.scans > max_scans:
        raise InvalidRequest(
            f"{param} may have up to {max_scans} scans (JPEG of {picture.width}x{picture.height} "
            f"pixels), got {found.scans}",
            param=param,
        )
    if found.kind == "PNG" and "transparency" in picture.info:
        picture.info["transparency"] = _eight_bit(picture.info["transparency"], opened.tile[0][3])
    if found.orientation != 1:
        picture = upright(picture, found.orientation)
    alpha = None
    if picture.mode.startswith("I"):
        picture = eight_bits(picture)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        alpha = np.asarray(picture.getchannel("A"))
    elif picture.mode not in ("L", "RGB"):
        picture = picture.convert("L" if picture.mode == "1" else "RGB")
    picture.load()
    return Picture(picture, alpha, scale, found.profile)


def _eight_bit(transparent: object, raw_mode: object) -> object:
    """Scale the transparent colour as Pillow scales the pixels of these raw modes; Pillow 13.0
    leaves it as it is.
    """
    if isinstance(transparent, int) and raw_mode in ("1", "L;2", "L;4"):
        return {"1": 255 * (transparent > 0), "L;2": 85 * transparent, "L;4": 17 * transparent}[
            raw_mode
        ]
    if isinstance(transparent, tuple) and raw_mode == "RGB;16B":
        return tuple(value >> 8 for value in transparent)
    return transparent
