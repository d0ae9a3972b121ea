"""Finished pictures as PNG, WebP or JPEG files, enlarged, and centred in the size that was asked
for.
"""

import io
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from linpix.model.config import Colour, ModelConfig
from linpix.model.palette import painted

from ..errors import InvalidRequest

Format = Literal["png", "webp", "jpeg"]  # webp: lossless

LARGEST_SIDE = 2048  # of an answer, in pixels; enlarging by nearest neighbour only adds bytes
NPY = "application/x-npy"
MEDIA_TYPES: dict[str, Format | Literal["gif", "npy"]] = {
    "image/png": "png",
    "image/webp": "webp",
    "image/jpeg": "jpeg",
    "image/gif": "gif",  # the drawing of a picture: of pictures/animation.py
    NPY: "npy",
}
JPEG_QUALITY = 95
INLINE_PIXELS = 2**14  # of a picture that is written in 2 ms; the largest take 40 to 200 ms
# the largest grey picture that Pillow does not write, and its zlib level
SMALL_PIXELS, SMALL_LEVEL = 2**12, 2


@dataclass(frozen=True, slots=True)
class Frame:
    """The size of an answer: the model's picture, enlarged by a whole factor, in the middle of
    width x height.
    """

    factor: int
    width: int
    height: int
    warning: str = ""  # for the client if its size is not an enlargement alone, else empty

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"


def sizes(config: ModelConfig) -> list[str]:
    """The model's own size, width x height, and then its multiples."""
    largest = max(1, LARGEST_SIDE // max(config.height, config.width))
    return [frame_of(factor, config).size for factor in range(1, largest + 1)]


def frame_of(size: str | int | None, config: ModelConfig) -> Frame:
    """The frame that a size stands for; a number enlarges the picture, with nothing around it.
    Raises InvalidRequest."""
    if size is None or size in ("auto", "native"):
        size = 1
    if isinstance(size, int):
        return Frame(size, config.width * size, config.height * size)
    numbers = re.fullmatch("([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", size)
    width, height = map(int, numbers.groups()) if numbers else (0, 0)
    factor = min(width // config.width, height // config.height)
    own, largest = frame_of(1, config).size, frame_of(factor, config).size
    if not factor or max(width, height) > max(LARGEST_SIDE, config.width, config.height):
        raise InvalidRequest(
            f"size must be auto, native, or width x height in pixels such as 280x280, from {own} "
            f"to {LARGEST_SIDE}x{LARGEST_SIDE}; got {size[:40]!r}",
            param="size",
        )
    if largest == size:
        return Frame(factor, width, height)
    return Frame(
        factor,
        width,
        height,
        f"size {size}: the picture of {own} is enlarged to {largest}, the largest multiple"
        " that fits, and placed in the middle; the pixels of its edge fill the rest",
    )


def framed(
    picture: NDArray[np.uint8],
    frame: Frame,
    rows: int | None = None,
    *,
    around: Literal["edge", "constant"] = "edge",
) -> NDArray[np.uint8]:
    """Enlarge (height, width, channels) by nearest neighbour, and fill its frame with its edge
    pixels, or with 0.

    Image rows from `rows` on are unfinished and black.
    """
    if rows is not None:
        picture = picture.copy()
        picture[rows:] = 0
    picture = picture.repeat(frame.factor, axis=0).repeat(frame.factor, axis=1)
    top, left = frame.height - picture.shape[0], frame.width - picture.shape[1]
    if left or top:
        picture = np.pad(
            picture,
            ((top // 2, top - top // 2), (left // 2, left - left // 2), (0, 0)),
            mode=around,
        )
    return picture


def encoded(
    pixels: NDArray[np.uint8],
    kind: Format = "png",
    *,
    compress_level: int = -1,
    profile: bytes = b"",
    palette: Sequence[Colour] = (),
) -> bytes:
    """(H, W, 1 to 4) as a file: grey, grey with alpha (PNG only), RGB or RGBA (in JPEG, RGB). PNG
    and WebP are exact, JPEG is not.

    Equal arguments give equal bytes with one version of Pillow: a file has no time and no comment.
    compress_level: of PNG; -1: zlib's default. A PNG of a palette, or a small grey one, ignores it
    and uses SMALL_LEVEL. profile: ICC. palette: of which one channel's values are colours, for PNG.
    """
    small = pixels.shape[2] == 1 and pixels.size <= SMALL_PIXELS and not profile
    if kind == "png" and (small or palette):
        height, width, _ = pixels.shape  # without filters: a third of Pillow's time, and not larger
        # each line begins with its filter number; 0: none
        lines = np.zeros((height, 1 + width), np.uint8)
        lines[:, 1:] = pixels[..., 0]
        colours = (
            (b"PLTE", b"".join(bytes(colour[:3]) for colour in palette)),
            (b"tRNS", bytes(colour[3] for colour in palette[:1])),
        )
        chunks = (
            (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3 if palette else 0, 0, 0, 0)),
            *(colours if palette else ()),
            (b"IDAT", zlib.compress(lines.tobytes(), SMALL_LEVEL)),
            (b"IEND", b""),
        )
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data))
            + name
            + data
            + struct.pack(">I", zlib.crc32(data, zlib.crc32(name)))
            for name, data in chunks
        )
    pixels = pixels[..., :3] if kind == "jpeg" else pixels
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    out = io.BytesIO()
    options = {
        "png": {"compress_level": compress_level},
        "jpeg": {"quality": JPEG_QUALITY, "subsampling": 0},
        # quality, method: effort of the search; pixels stay exact
        "webp": {"lossless": True, "quality": 50, "method": 2},
    }
    picture.save(out, kind, icc_profile=profile, **options[kind])
    return out.getvalue()


def max_bytes(frame: Frame, channels: int, kind: Format) -> int:
    """Bytes that no file of a picture in this frame exceeds, whatever its pixels are.

    Enlarging adds little to PNG and WebP, which find the copies of a pixel; to JPEG it adds what
    the edges between enlarged pixels cost, each in one block of 8 x 8.
    """
    enlarged = frame.width * frame.height * channels
    if kind == "jpeg":
        size = enlarged * min(1.25, 8 / frame.factor)
    else:
        size = min(1.01 * enlarged, 4 * enlarged / frame.factor**2 + enlarged / 64)
    return 1024 + int(size)


def png(
    canvas: NDArray[np.uint8], config: ModelConfig, factor: int = 1, rows: int | None = None
) -> bytes:
    """A PNG of (T,) sub-pixels; image rows from `rows` on are unfinished and black."""
    return drawn(canvas, config, frame_of(factor, config), rows=rows)


def drawn(
    canvas: NDArray[np.uint8],
    config: ModelConfig,
    frame: Frame,
    kind: Format | Literal["npy"] = "png",
    rows: int | None = None,
) -> bytes:
    """(T,) sub-pixels as a file, or for npy as the bytes of what they show. Image rows from `rows`
    on are unfinished: black, or the palette's ground.
    """
    picture = canvas.reshape(config.height, config.width, config.channels)
    pixels = framed(picture, frame, rows)
    if kind == "png":
        return encoded(pixels, palette=config.palette)
    shown = painted(pixels[..., 0], config) if config.palette else pixels
    return shown.tobytes() if kind == "npy" else encoded(shown, kind)


def npy(pictures: list[bytes], height: int, width: int) -> bytes:
    """The bytes of n pictures, each of shape (H, W, channels), as the file that numpy.load reads.

    Its array is (n, H, W) for grey, else (n, H, W, 3), or with a palette (n, H, W, 4), uint8.
    """
    array = np.frombuffer(b"".join(pictures), np.uint8).reshape(len(pictures), height, width, -1)
    if array.shape[3] == 1:
        array = array[..., 0]
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()
