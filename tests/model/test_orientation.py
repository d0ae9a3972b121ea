"""How a picture is held is read from its EXIF data alike wherever a picture is read."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from linpix.cli.pictures import read_given
from linpix.model.config import ModelConfig
from linpix.model.orientation import orientation
from linpix.server.pictures.pictures import opened
from linpix.training.readers import read_picture
from tests.fuzz.pictures import noise

MARK = b"Exif\0\0"
GREY = noise(8, 12)
TURNED = np.rot90(GREY, -1)  # as orientation 6 asks for
SIZE = ModelConfig(height=12, width=8)


def exif(kind: int, form: str, *numbers: float, order: str = "<", count: int = 1) -> bytes:
    """EXIF data with an orientation of this type, its number in its form of `struct`."""
    value = struct.pack(order + form, *numbers)
    entry = struct.pack(order + "HHI", 0x0112, kind, count)
    start = {"<": b"II", ">": b"MM"}[order] + struct.pack(order + "HIH", 42, 8, 1)
    if len(value) <= 4:
        return start + entry + value.ljust(4, b"\0") + bytes(4)
    return start + entry + struct.pack(order + "II", 26, 0) + value


SIX = exif(3, "H", 6)
FORMS = {
    "byte": exif(1, "B", 6),
    "short": SIX,
    "long": exif(4, "I", 6, order=">"),
    "rational": exif(5, "II", 12, 2),
    "signed byte": exif(6, "b", 6),
    "signed short": exif(8, "h", 6, order=">"),
    "signed long": exif(9, "i", 6),
    "signed rational": exif(10, "ii", -6, -1, order=">"),
    "float": exif(11, "f", 6),
    "double": exif(12, "d", 6, order=">"),
    "two numbers": exif(3, "HH", 6, 1, count=2),
    "marked twice": MARK + SIX,
    "marked thrice": MARK + MARK + SIX,
}
ODD = {
    "half": exif(11, "f", 6.5),
    "nan": exif(12, "d", np.nan),
    "infinite": exif(11, "f", np.inf),
    "divided by nothing": exif(5, "II", 6, 0),
    "too large": exif(4, "I", 9),
    "cut": exif(12, "d", 6)[:-1],
    "text": exif(2, "2s", b"6"),
}


def files(data: bytes) -> dict[str, bytes]:
    """GREY as files with these EXIF data, whatever they are; JPEG's pixels differ a little."""
    found = {}
    for kind in ("PNG", "JPEG", "WEBP"):
        out = io.BytesIO()
        Image.fromarray(GREY).save(out, kind, quality=100, lossless=True)
        found[kind] = out.getvalue()
    chunk = struct.pack(">I", len(data)) + b"eXIf" + data
    chunk += struct.pack(">I", zlib.crc32(chunk[4:]))
    segment = b"\xff\xe1" + struct.pack(">H", 2 + len(MARK + data)) + MARK + data
    png, jpeg = found["PNG"], found["JPEG"]
    found["PNG"], found["PNG, at its end"] = (
        png[:33] + chunk + png[33:],
        png[:-12] + chunk + png[-12:],
    )
    found["JPEG"] = jpeg[:2] + segment + jpeg[2:]
    pixels = Image.open(io.BytesIO(found["WEBP"])).convert("RGB")
    out = io.BytesIO()
    pixels.save(out, "WEBP", lossless=True, exif=data)
    found["WEBP"] = out.getvalue()
    return found


def assert_held(file: bytes, expected: np.ndarray) -> None:
    """In training, as an upload, and as a PIL image in Python."""
    height, width = expected.shape
    config = ModelConfig(height=height, width=width)
    learnt = read_picture(file, "a picture", (height, width, 1)).reshape(height, width)
    uploaded = opened(file, "image").colours(1, flat=False)[..., 0]
    given = read_given(Image.open(io.BytesIO(file)), height, config).canvas.reshape(height, width)
    for found in (learnt, uploaded, given):
        assert found.shape == expected.shape
        assert np.abs(found.astype(int) - expected).max() <= 3


@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
def test_a_picture_is_turned_alike_where_it_is_learnt_uploaded_and_given(data):
    assert orientation(data) == 6
    for file in files(data).values():
        assert_held(file, TURNED)


@pytest.mark.parametrize("data", ODD.values(), ids=ODD)
def test_an_odd_orientation_leaves_a_picture_as_it_lies_in_all_of_them(data):
    assert orientation(data) == 1
    for file in files(data).values():
        assert_held(file, GREY)


def test_of_two_segments_the_second_continues_the_first():
    jpeg = files(SIX)["JPEG"]
    cut = 2 + 4 + len(MARK) + 10  # within the data
    length = struct.pack(">H", 2 + len(MARK) + 10)
    parts = jpeg[:4] + length + jpeg[6:cut]
    rest = b"\xff\xe1" + struct.pack(">H", 2 + len(MARK + SIX[10:])) + MARK
    assert_held(parts + rest + jpeg[cut:], TURNED)
    plain = exif(2, "2s", b"6")
    first = b"\xff\xe1" + struct.pack(">H", 2 + len(MARK + plain)) + MARK + plain
    assert_held(jpeg[:2] + first + jpeg[2:], GREY)
    assert_held(jpeg[:2] + first.replace(MARK, b"http:/") + jpeg[2:], TURNED)
