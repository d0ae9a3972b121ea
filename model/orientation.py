"""How EXIF says that a picture is held: one reading for pictures to learn from and for uploads."""

import struct

# by orientation, the name of what Pillow does to turn a picture upright
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
EXIF_MARK = b"Exif\0\0"  # before the data; some programs write it twice
_ORIENTATION = 0x0112
# forms of numbers, by their type in EXIF; orientations should be of type 3
_FORMS = {1: "B", 3: "H", 4: "I", 5: "II", 6: "b", 8: "h", 9: "i", 10: "ii", 11: "f", 12: "d"}


def orientation(exif: bytes | memoryview) -> int:
    """The orientation, 1 to 8; 1, upright, if it is missing or unreadable: odd EXIF is not a reason
    to refuse a picture.
    """
    tiff = bytes(exif)
    while tiff.startswith(EXIF_MARK):
        tiff = tiff.removeprefix(EXIF_MARK)
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    try:
        if order is None or struct.unpack_from(order + "H", tiff, 2) != (42,):
            return 1
        [start] = struct.unpack_from(order + "I", tiff, 4)
        [count] = struct.unpack_from(order + "H", tiff, start)
        for at in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, _, place = struct.unpack_from(order + "HHII", tiff, at)
            if tag == _ORIENTATION:
                form = order + _FORMS.get(kind, "H")
                short = struct.calcsize(form) <= 4  # it is in the entry itself
                number, *below = struct.unpack_from(form, tiff, at + 8 if short else place)
                found = number / below[0] if below else number
                return int(found) if found in range(1, 9) else 1
    except (struct.error, ZeroDivisionError):
        pass
    return 1
