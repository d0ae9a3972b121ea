"""Only the pixels of a picture's file are kept, and a file of endless pieces is refused before they
are read.
"""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from linpix.server.pictures.sanitise import MAX_PIECES, pixels_of
from tests.fuzz.pictures import bombs, chunk, encode, valid

GREY = np.arange(64, dtype=np.uint8).reshape(8, 8)
PNG, JPEG, WEBP = encode(GREY), encode(GREY, "JPEG"), encode(GREY, "WEBP", lossless=True)


def with_chunks(*more: bytes) -> bytes:
    """A PNG with chunks between its header and its pixels."""
    return PNG[:33] + b"".join(more) + PNG[33:]


def with_segments(*more: bytes) -> bytes:
    """A JPEG with segments before all of its own."""
    return JPEG[:2] + b"".join(more) + JPEG[2:]


def segment(marker: int, body: bytes) -> bytes:
    return b"\xff" + bytes([marker]) + struct.pack(">H", 2 + len(body)) + body


def with_riff(*more: tuple[bytes, bytes]) -> bytes:
    """A WebP with chunks after its pixels."""
    body = WEBP[8:] + b"".join(
        name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2) for name, body in more
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))


@pytest.mark.parametrize("data", valid(), ids=lambda data: f"{pixels_of(data).kind}-{len(data)}")
def test_pixels_are_the_same_without_the_rest(data):
    found = pixels_of(data)
    if found.frames == 1:
        assert np.array_equal(pixels(found.data), pixels(data))
    for word in (b"Exif", b"LinPix", b"ICC", b"iCCP", b"pHYs", b"MPF"):
        assert word not in found.data


def test_what_a_bomb_is_made_of_does_not_reach_the_decoder():
    zeros, overlapping = bombs()["zeros"], bombs()["exif"]
    files = {
        PNG: with_chunks(
            chunk(b"zTXt", b"a\0\0" + zeros),
            chunk(b"iCCP", b"a\0\0" + zeros),
            chunk(b"iTXt", b"a\0\1\0\0\0" + zeros),
            chunk(b"eXIf", overlapping),
        ),
        JPEG: with_segments(
            segment(0xE1, b"Exif\0\0" + overlapping),
            segment(0xE2, b"MPF\0" + overlapping),
            segment(0xED, b"Photoshop 3.0\0" + zeros),
            segment(0xFE, zeros),
        ),
        WEBP: with_riff((b"EXIF", overlapping), (b"ICCP", zeros)),
    }
    for plain, data in files.items():
        assert len(data) > 30_000
        assert pixels_of(data).data == pixels_of(plain).data


@pytest.mark.parametrize(
    "data",
    [
        with_chunks(chunk(b"abCD", b"") * MAX_PIECES),
        with_segments(segment(0xFE, b"") * MAX_PIECES),
        with_segments(b"\xff\1" * MAX_PIECES),
        with_riff(*[(b"abcd", b"")] * MAX_PIECES),
    ],
    ids=["PNG", "JPEG", "markers", "WEBP"],
)
def test_a_file_of_endless_pieces_is_refused(data):
    with pytest.raises(ValueError, match=f"more than {MAX_PIECES}"):
        pixels_of(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_small_colour_profile_is_read_and_a_large_or_damaged_one_is_not(kind):
    def profile_of(profile):
        return pixels_of(encode(np.zeros((8, 8, 3), np.uint8), kind, icc_profile=profile)).profile

    small = np.random.default_rng(0).bytes(3000)
    assert profile_of(small) == small
    assert profile_of(bytes(200_000)) == profile_of(None) == b""


def test_a_profile_that_is_no_profile_is_none():
    for body in (b"", b"name", b"name\0\0", b"name\0\0junk", b"\0\0" + zlib.compress(bytes(10**7))):
        assert pixels_of(with_chunks(chunk(b"iCCP", body))).profile == b""
    for body in (
        b"ICC_PROFILE\0",
        b"ICC_PROFILE\0\1",
        b"ICC_PROFILE\0\1\1",
        b"ICC_PROFILE\0\1\2abc",
    ):
        assert pixels_of(with_segments(segment(0xE2, body))).profile == b""


def test_scans_are_counted_where_they_are_and_not_where_bytes_look_alike():
    progressive = encode(np.zeros((64, 64), np.uint8), "JPEG", progressive=True)
    scans = pixels_of(progressive).scans
    assert 2 < scans < 12
    film = np.random.default_rng(0).bytes(1000) + b"\xff\xda" * 1000
    found = pixels_of(progressive + film)
    assert found.scans == scans and found.data == progressive
    scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    table = segment(0xC4, b"\x10\1" + bytes(15) + b"\xff") + b"\xd9"  # ends as if the picture did
    assert pixels_of(progressive[:-2] + table + scan * 50 + b"\xff\xd9").scans == scans + 50


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (PNG[:-12], "truncated"),
        (PNG[:8] + PNG[33:], "first chunk is b'IDAT'"),
        (PNG[:45] + b"\0" + PNG[46:], "checksum of b'IDAT' is wrong"),
        (JPEG[:30], "a segment has"),
        (JPEG[:2] + JPEG[-2:], "ends before"),
        (WEBP[:-2], "the header says"),
        (with_riff()[:4] + struct.pack("<I", 2**32 - 1) + WEBP[8:], "the header says"),
        (with_riff((b"VP8X", b"x")), "header has only 1 bytes"),
    ],
)
def test_what_is_damaged_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        pixels_of(data)
