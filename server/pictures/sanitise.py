"""The pieces of PNG, JPEG and WebP files: only those that an upload's pixels need are passed to the
decoder.

Pillow reads a file piece by piece, in Python, and keeps what it finds: a small upload of millions
of empty pieces, or of text, profiles and EXIF that inflate or overlap, would take minutes or
gigabytes. So this module counts pieces, compares checksums, reads the orientation, the number of
frames and a small colour profile, keeps the pixels, and drops everything else.
"""

import re
import struct
import zlib
from dataclasses import dataclass
from typing import Literal

from linpix.model.orientation import EXIF_MARK, orientation

ContainerFormat = Literal["PNG", "JPEG", "WEBP"]

# bytes, as one segment of a JPEG has; those of cameras and screens have a few thousand
MAX_PROFILE = 2**16
# chunks or segments; 16 MiB of PNG in chunks of 8 KiB, the common size, have 2,048
MAX_PIECES = 16_384
_PNG = b"\x89PNG\r\n\x1a\n"
# of JPEG; any number of 0xff may come before it
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
_ALONE = {0x01, 0xD8}  # markers without a length; restarts, also without, are pixels
# applications, comments; JFIF and Adobe stay: what colours mean
_LEFT_OUT = {*range(0xE1, 0xF0), 0xFE} - {0xEE}
_EXIF, _PROFILE, _END, _SCAN = 0xE1, 0xE2, 0xD9, 0xDA
_WEBP_PIXELS = (b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF")


@dataclass(frozen=True, slots=True)
class Pixels:
    """A file reduced to its pixels, and what else was read from it."""

    kind: ContainerFormat
    data: bytes
    frames: int = 1
    scans: int = 1  # of a JPEG: passes over all its pixels
    orientation: int = 1  # as EXIF counts, 1..8; 1 is upright
    # what its colours mean (ICC); empty if there is none, or a damaged or very large one
    profile: bytes = b""


_OTHERS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"GIF8", "a GIF; save it as PNG"),
    (0, b"BM", "a BMP; save it as PNG"),
    (0, b"II*\0", "a TIFF, or a camera's raw picture; save it as PNG or JPEG"),
    (0, b"MM\0*", "a TIFF, or a camera's raw picture; save it as PNG or JPEG"),
    (0, b"\xff\x0a", "JPEG XL; save it as PNG or JPEG"),
    (4, b"JXL ", "JPEG XL; save it as PNG or JPEG"),
    (4, b"jP  ", "JPEG 2000; save it as PNG or JPEG"),
    (0, b"8BPS", "a Photoshop file; export it as PNG"),
    (0, b"%PDF", "a PDF; export the page as PNG"),
    (0, b"\0\0\x01\0", "an icon (ICO); save it as PNG"),
    (0, b"\x1f\x8b", "gzip; unpack it first"),
    (0, b"PK\3\4", "a ZIP archive; unpack it, and send one picture of it"),
)
# how texts begin that are sent in place of a picture, after white space
_TEXTS: tuple[tuple[bytes, str], ...] = (
    (rb"(?i:<svg)", "an SVG; export it as PNG"),
    (rb"(?i:<\?xml)", "XML, perhaps an SVG; export it as PNG"),
    (
        rb"(?i:<(!doctype|html|head|body|!--))",
        "an HTML page, perhaps of an error or a login; download the picture itself",
    ),
    (rb"[{\[]\s*[\"{\[\d}\]]", "JSON; send the picture itself"),
    (rb"version https://git-lfs", "a pointer of Git LFS; git lfs pull fetches the file itself"),
    (rb"(?i:data:)[\w/+.-]*[;,]", "a data URL; decode the base64 in it, and send the bytes"),
    (rb"[\w+/-]{24}[\w+/=\r\n-]*\Z", "text, probably base64; decode it, and send the bytes"),
)
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


def other_kind(data: bytes) -> str | None:
    """What an unsupported file is, from its first bytes, and what to do instead; None if it is
    unknown.
    """
    if data[4:8] == b"ftyp":
        brands = data[8:12] + data[16 : max(16, min(64, int.from_bytes(data[:4])))]
        if b"avif" in brands or b"avis" in brands:
            return "AVIF; save it as PNG, JPEG or WebP"
        if any(brand in brands for brand in _HEIC):
            return "HEIC, as iPhones save photographs; export it as JPEG"
        return "a video or a similar file; send one picture of it as PNG or JPEG"
    for at, magic, name in _OTHERS:
        if data.startswith(magic, at):
            return name
    text = data[:1024].removeprefix(b"\xef\xbb\xbf").lstrip()
    return next((name for begins, name in _TEXTS if re.match(begins, text)), None)


def pixels_of(data: bytes) -> Pixels | None:
    """The file without the pieces that its pixels do not need; None if its first bytes are those of
    another format.

    Raises ValueError for a damaged or unreasonable file.
    """
    try:
        if data.startswith(_PNG):
            return _png(data)
        if data.startswith(b"\xff\xd8\xff"):
            return _jpeg(data)
        return _webp(data) if data.startswith(b"WEBP", 8) else None
    except struct.error as error:
        raise ValueError(f"truncated: {error}") from error


def _png(data: bytes) -> Pixels:
    view, at = memoryview(data), len(_PNG)
    first: dict[bytes, memoryview] = {}  # the first chunk of each name before the pixels
    rows: list[memoryview] = []
    frames, exif = 0, memoryview(b"")
    for _ in range(MAX_PIECES):
        length, name = struct.unpack_from(">I4s", data, at)
        body, end = view[at + 8 : at + 8 + length], at + 8 + length
        [checksum] = struct.unpack_from(">I", data, end)
        if zlib.crc32(view[at + 4 : end]) != checksum:
            raise ValueError(f"the checksum of {name!r} is wrong")
        if name == b"IEND":
            break
        if not first and (name != b"IHDR" or length != 13):
            raise ValueError(
                f"the first chunk is {name!r} of {length} bytes, expected IHDR of 13 bytes"
            )
        if name == b"IDAT":
            rows.append(body)
        elif not rows:
            first.setdefault(name, body)
        if name == b"eXIf":
            exif = body
        at = end + 4
    else:
        raise ValueError(f"more than {MAX_PIECES} chunks")
    if b"acTL" in first:  # an animation; pixels before its first fcTL are one picture more
        frames = struct.unpack_from(">I", first[b"acTL"])[0] + (b"fcTL" not in first)
    kept = [(name, bytes(first[name])) for name in (b"IHDR", b"PLTE", b"tRNS") if name in first]
    whole = [_PNG]
    for name, piece in (*kept, (b"IDAT", b"".join(rows)), (b"IEND", b"")):
        whole += (
            struct.pack(">I", len(piece)),
            name,
            piece,
            struct.pack(">I", zlib.crc32(piece, zlib.crc32(name))),
        )
    return Pixels(
        "PNG",
        b"".join(whole),
        frames=max(1, frames),
        orientation=orientation(exif),
        profile=_inflated(first[b"iCCP"]) if b"iCCP" in first else b"",
    )


def _inflated(body: bytes | memoryview) -> bytes:
    """The profile in an iCCP chunk: its name, a zero, the method of compression, and the compressed
    profile.
    """
    _, _, packed = bytes(body).partition(b"\0")
    try:
        profile = zlib.decompressobj().decompress(packed[1:], MAX_PROFILE + 1)
    except zlib.error:
        return b""
    return profile if len(profile) <= MAX_PROFILE else b""


def _jpeg(data: bytes) -> Pixels:
    """The first of several pictures: in a phone's file, the photograph comes before its previews or
    film.
    """
    at, scans, kept = 2, 0, [b"\xff\xd8"]
    profile, exif = b"", list[bytes]()
    for _ in range(MAX_PIECES):
        found = _MARKER.search(data, at)
        if scans:  # the pixels themselves
            kept.append(data[at : found.start() if found else None])
        if found is None or found[1][0] == _END:
            break
        marker, at = found[1][0], found.end()
        if marker in _ALONE:
            continue
        [length] = struct.unpack_from(">H", data, at)
        if length < 2 or at + length > len(data):
            raise ValueError(f"a segment has the wrong length of {length} bytes")
        # long data have several segments
        if marker == _EXIF and not scans and data.startswith(EXIF_MARK, at + 2):
            exif.append(data[at + 2 + len(EXIF_MARK) : at + length])
        # the first part of one
        if marker == _PROFILE and data.startswith(b"ICC_PROFILE\0\1\1", at + 2):
            profile = profile or data[at + 16 : at + length]
        if marker not in _LEFT_OUT:
            kept.append(data[at - 2 : at + length])
        scans += marker == _SCAN
        at += length
    else:
        raise ValueError(f"more than {MAX_PIECES} segments")
    if not scans:
        raise ValueError("the file ends before the pixels")
    return Pixels(
        "JPEG",
        b"".join([*kept, data[found.start() : found.end()] if found else b""]),
        scans=scans,
        orientation=orientation(b"".join(exif)),
        profile=profile,
    )


def _webp(data: bytes) -> Pixels:
    end, at, kept, frames = struct.unpack_from("<I", data, 4)[0] + 8, 12, [], 0
    profile = exif = b""
    if end > len(data):
        raise ValueError(f"the header says {end} bytes, but the file has {len(data)}")
    for _ in range(MAX_PIECES):
        if at + 8 > end:
            break
        name, length = struct.unpack_from("<4sI", data, at)
        body, whole = data[at + 8 : at + 8 + length], length + (length & 1)
        if at + 8 + whole > end:
            raise ValueError(
                f"the chunk {name!r} should have {length} bytes, but the file ends earlier"
            )
        if name == b"VP8X":
            if length < 10:
                raise ValueError(f"the VP8X header has only {length} bytes")
            # keeps alpha and animation
            kept.append(struct.pack("<4sIB", name, 10, body[0] & 0b00010010) + body[1:10])
        elif name in _WEBP_PIXELS:
            kept.append(data[at : at + 8 + whole])
        elif name == b"EXIF":
            exif = exif or body
        elif name == b"ICCP" and length <= MAX_PROFILE:
            profile = body
        frames += name == b"ANMF"
        at += 8 + whole
    else:
        raise ValueError(f"more than {MAX_PIECES} chunks")
    body = b"WEBP" + b"".join(kept)
    return Pixels(
        "WEBP",
        b"RIFF" + struct.pack("<I", len(body)) + body,
        frames=max(1, frames),
        orientation=orientation(exif),
        profile=profile,
    )
