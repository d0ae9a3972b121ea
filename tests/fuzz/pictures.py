"""Hostile pictures: valid ones of every kind, taken apart, changed where it hurts, and put together
again.
"""

import io
import struct
import zlib
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import ExifTags, Image

Piece = tuple[bytes, bytes]  # name and body; in a JPEG the marker's second byte

SIZES = [0, 1, 2, 7, 8, 9, 255, 4096, 4097, 16383, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1]

PNG_NAMES = b"tRNS PLTE gAMA sRGB cHRM pHYs acTL fcTL fdAT IDAT IHDR IEND abCD \xff\0\1\2".split()
JPEG_MARKERS = bytes.fromhex("c0 c2 c3 c4 c9 cc d0 d8 d9 db dc dd e0 e2 ed ee fe 01")


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    """Bytes of any value, the same each time."""
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def encode(picture: Image.Image | np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    picture.save(out, kind, **options)
    return out.getvalue()


def chunk(name: bytes, body: bytes, checksum: int | None = None) -> bytes:
    wanted = zlib.crc32(name + body) if checksum is None else checksum
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", wanted)


def png_of(
    depth: int, colour_type: int, width: int, height: int, scanlines: bytes, *more: bytes
) -> bytes:
    """A PNG of a kind that Pillow does not write; each scanline begins with its filter, 0."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            *more,
            chunk(b"IDAT", zlib.compress(scanlines)),
            chunk(b"IEND", b""),
        ]
    )


@cache
def valid() -> list[bytes]:
    """One of every kind that an encoder writes, 8 x 8 to 12 x 12."""
    colours = noise(12, 12, 4)
    half = np.repeat(np.array([255] * 4 + [0] * 4, np.uint8), 8).reshape(8, 8)
    frames = [Image.new("RGBA", (8, 8), shade) for shade in ("red", "blue")]
    palette = Image.fromarray(colours[..., :3]).quantize(16)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.Make] = 5, "LinPix"
    return [
        encode(colours),
        encode(colours[..., 0]),
        encode(colours[..., :2]),
        encode(colours[..., :3], exif=exif, icc_profile=b"profile", dpi=(72, 72)),
        encode(palette, transparency=bytes(range(0, 160, 10))),
        encode(palette, transparency=3),
        png_of(16, 0, 8, 8, (b"\0" + bytes(range(16))) * 8, chunk(b"tRNS", b"\0\1")),
        png_of(16, 6, 8, 8, (b"\0" + bytes(range(64))) * 8),
        png_of(16, 2, 8, 8, (b"\0" + bytes(48)) * 8),
        png_of(2, 0, 8, 8, (b"\0" + b"\x1b\xe4") * 8, chunk(b"tRNS", b"\0\3")),
        encode(Image.fromarray(half).convert("1")),
        encode(frames[0], save_all=True, append_images=frames[1:]),
        encode(colours[..., 0], "JPEG", exif=exif),
        encode(colours[..., :3], "JPEG", progressive=True),
        encode(colours[..., :3], "JPEG", subsampling=2, restart_marker_blocks=1),
        encode(Image.fromarray(colours, "CMYK"), "JPEG"),
        encode(colours[..., :3], "MPO", save_all=True, append_images=[frames[0].convert("RGB")]),
        encode(colours, "WEBP", lossless=True, exif=exif),
        encode(colours, "WEBP"),
        encode(colours[..., :3], "WEBP"),
        encode(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
    ]


@cache
def bombs() -> dict[str, bytes]:
    """Kilobytes that inflate to 32 MiB, and EXIF of which every entry is all of it."""
    zeros = zlib.compress(bytes(32 * 2**20), 9)
    entries = b"".join(struct.pack("<HHII", 0x8000 + tag, 7, 60_000, 8) for tag in range(4000))
    return {
        "zeros": zeros,
        "exif": b"II*\0\x08\0\0\0" + struct.pack("<H", 4000) + entries + bytes(14_000),
    }


@st.composite
def tiff(draw: st.DrawFn) -> bytes:
    """EXIF: entries of any type, with counts and offsets that overlap, repeat or leave the file."""
    order, magic = draw(st.sampled_from([("<", b"II*\0"), (">", b"MM\0*"), ("<", b"II+\0")]))
    numbers = st.sampled_from([0, 1, 2, 6, 8, 9, 0xFFFF, 2**31, 2**32 - 1])
    tags = st.sampled_from([0x0112, 0x0128, 0x011A, 0x8769, 0x8825, 1])
    entry = st.tuples(tags, st.integers(0, 13), numbers, numbers)
    body = b"".join(
        struct.pack(order + "HHII", *each) for each in draw(st.lists(entry, max_size=4))
    )
    count, start = (
        draw(st.sampled_from([0, 1, 2, 4, 65535])),
        draw(st.sampled_from([8, 8, 8, 0, 2, 2**32 - 1])),
    )
    return magic + struct.pack(order + "IH", start, count) + body + draw(st.binary(max_size=20))


def split_png(data: bytes) -> list[Piece]:
    pieces, at = [], 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4])
        pieces.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    return pieces


def split_jpeg(data: bytes) -> list[Piece]:
    """Up to the first scan, which is all the rest."""
    pieces, at = [], 2
    while data[at + 1] != 0xDA:
        length = int.from_bytes(data[at + 2 : at + 4])
        pieces.append((data[at + 1 : at + 2], data[at + 4 : at + 2 + length]))
        at += 2 + length
    return [*pieces, (b"\xda", data[at + 2 :])]


def split_webp(data: bytes) -> list[Piece]:
    pieces, at = [], 12
    while at + 8 <= len(data):
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        pieces.append((data[at : at + 4], data[at + 8 : at + 8 + length]))
        at += 8 + length + length % 2
    return pieces


@st.composite
def once_or_often(draw: st.DrawFn, one: st.SearchStrategy[Piece]) -> list[Piece]:
    """A piece, or many of it if it is short."""
    piece = draw(one)
    count = draw(st.sampled_from([1, 3, 200, 20_000]))
    if len(piece[1]) >= 50:
        count = min(count, 3)
    return [piece] * count


@st.composite
def pngs(draw: st.DrawFn) -> bytes:
    pieces = draw(_rearranged(split_png(draw(st.sampled_from(valid()[:12]))), _png_pieces()))
    if draw(st.booleans()) and pieces and len(pieces[0][1]) == 13:  # IHDR
        fields = list(struct.unpack(">IIBBBBB", pieces[0][1]))
        index = draw(st.integers(0, 6))
        fields[index] = draw(st.sampled_from(SIZES) if index < 2 else st.integers(0, 17))
        pieces[0] = b"IHDR", struct.pack(">IIBBBBB", *fields)
    wrong = draw(st.sampled_from([None] * 9 + [0]))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(name, body, wrong if name == b"IDAT" else None) for name, body in pieces
    )


@cache
def _png_pieces() -> st.SearchStrategy[list[Piece]]:
    zeros, exif = bombs()["zeros"], bombs()["exif"]
    one = st.one_of(
        st.tuples(
            st.sampled_from(PNG_NAMES),
            st.binary(max_size=40),
        ),
        st.tuples(st.just(b"eXIf"), tiff()),
        st.sampled_from(
            [
                (b"zTXt", b"a\0\0" + zeros),
                (b"iCCP", b"a\0\0" + zeros),
                (b"iTXt", b"a\0\1\0\0\0" + zeros),
                (b"IDAT", zeros),
                (b"eXIf", exif),
                (b"tEXt", b"Raw profile type exif\0\nexif\n4\n00zz"),
                (b"iTXt", b'XML:com.adobe.xmp\0\0\0\0\0tiff:Orientation="9"'),
            ]
        ),
    )
    return once_or_often(one)


@st.composite
def jpegs(draw: st.DrawFn) -> bytes:
    pieces = draw(_rearranged(split_jpeg(draw(st.sampled_from(valid()[12:17]))), _jpeg_pieces()))
    if draw(st.integers(0, 3)) == 0:  # the frame's size, which no more than its two bytes can say
        size = struct.pack(">HH", *(draw(st.sampled_from(SIZES)) % 65536 for _ in range(2)))
        pieces = [
            (name, body[:1] + size + body[5:]) if name in (b"\xc0", b"\xc2") else (name, body)
            for name, body in pieces
        ]
    between = draw(
        st.sampled_from([b""] * 6 + [b"\xff", b"\xff" * 30_000, b"\0" * 30_000, b"\xff\0" * 9])
    )
    between = between[: 1_000_000 // (1 + len(pieces))]  # a megabyte in all
    joined = b"".join(
        between
        + b"\xff"
        + name
        + (b"" if name == b"\xda" else struct.pack(">H", 2 + len(body)))
        + body
        for name, body in pieces
    )
    scans = draw(st.sampled_from([0] * 8 + [1, 20, 700]))
    scan = (
        joined[joined.rindex(b"\xff\xda") :].removesuffix(b"\xff\xd9")
        if scans and b"\xff\xda" in joined
        else b""
    )
    return b"\xff\xd8" + joined.removesuffix(b"\xff\xd9") + scan[:2000] * scans + b"\xff\xd9"


@cache
def _jpeg_pieces() -> st.SearchStrategy[list[Piece]]:
    one = st.one_of(
        st.tuples(
            st.integers(0, len(JPEG_MARKERS) - 1).map(lambda at: JPEG_MARKERS[at : at + 1]),
            st.binary(max_size=70),
        ),
        st.tuples(st.just(b"\xe1"), tiff().map(lambda body: b"Exif\0\0" + body)),
        st.sampled_from(
            [
                (b"\xe1", b"Exif\0\0" + bombs()["exif"]),
                (b"\xe2", b"MPF\0" + bombs()["exif"]),
                (b"\xe2", b"ICC_PROFILE\0\1\1" + bytes(200)),
                (b"\xee", b"Adobe\0d\0\0\0\0\2"),
                (b"\xed", b"Photoshop 3.0\0" + b"8BIM\4\4\0\0\0\0\0\0" * 100),
            ]
        ),
    )
    return once_or_often(one)


@st.composite
def webps(draw: st.DrawFn) -> bytes:
    pieces = draw(_rearranged(split_webp(draw(st.sampled_from(valid()[17:]))), _webp_pieces()))
    if draw(st.booleans()):  # a canvas, as the extended format has it
        size = b"".join(
            (draw(st.sampled_from(SIZES)) % 2**24).to_bytes(3, "little") for _ in range(2)
        )
        pieces = [(b"VP8X", bytes([draw(st.integers(0, 255))]) + bytes(3) + size), *pieces]
    body = b"WEBP" + b"".join(
        name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)
        for name, body in pieces
    )
    return (
        b"RIFF"
        + struct.pack("<I", draw(st.sampled_from([len(body)] * 8 + [0, len(body) // 2, 2**32 - 1])))
        + body
    )


@cache
def _webp_pieces() -> st.SearchStrategy[list[Piece]]:
    names = [b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"ANIM", b"ANMF", b"ICCP", b"XMP ", b"abcd"]
    return st.one_of(
        st.tuples(st.sampled_from(names), st.binary(max_size=40)).map(lambda piece: [piece]),
        tiff().map(lambda body: [(b"EXIF", body)]),
        st.just([(b"EXIF", bombs()["exif"])]),
        st.just([(b"abcd", b"")] * 20_000),
    )


@st.composite
def _rearranged(
    draw: st.DrawFn, pieces: list[Piece], more: st.SearchStrategy[list[Piece]]
) -> list[Piece]:
    """Pieces taken out, doubled, moved, changed in a byte, cut short; and hostile ones put in."""
    pieces = list(pieces)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, len(pieces) - 1)))
        match draw(st.integers(0, 6)):
            case 0 if len(pieces) > 1:
                del pieces[at]
            case 1:
                pieces.insert(at, pieces[draw(st.integers(0, len(pieces) - 1))])
            case 2:
                pieces.insert(draw(st.integers(0, len(pieces) - 1)), pieces.pop(at))
            case 3 if pieces[at][1]:
                name, body = pieces[at][0], bytearray(pieces[at][1])
                body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
                pieces[at] = name, bytes(body)
            case 4:
                pieces[at] = (
                    pieces[at][0],
                    pieces[at][1][: draw(st.integers(0, len(pieces[at][1])))],
                )
            case _:
                pieces[at:at] = draw(more)
    return pieces


@st.composite
def broken(draw: st.DrawFn) -> bytes:
    """Bytes changed wherever they are, whatever they mean; or no picture at all."""
    data = bytearray(
        draw(
            st.one_of(
                st.sampled_from(valid()),
                st.binary(max_size=60),
                st.sampled_from(valid()).flatmap(
                    lambda one: st.sampled_from(valid()).map(lambda other: one + other)
                ),
            )
        )
    )
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.integers(0, 4)):
            case 0:
                del data[at:]
            case 1:
                del data[at : at + draw(st.integers(0, 40))]
            case 2:
                data[at:at] = draw(st.binary(max_size=40))
            case _ if data:
                data[at] = draw(st.integers(0, 255))
    return bytes(data)


pictures = st.one_of(pngs(), jpegs(), webps(), broken())
