"""Previews in half-block characters, read back to pixels, on emulated terminals."""

import io
import re

import numpy as np
import pyte
import pytest

from linpix.cli import preview
from linpix.cli.preview import TRUE_COLOURS, Progress
from linpix.server.engine.image import Report, images_of
from linpix.server.engine.job import Job
from linpix.server.pictures import animation
from tests.server.pictures.test_animation import COLOURS, DIGITS, RNG, TINY, noise


def read_half_blocks(lines) -> np.ndarray:
    """The pixels (2 * lines, width, 3) that such lines show; -1 is the terminal's own background.
    24 bits, or 256.
    """
    levels = [0, 95, 135, 175, 215, 255]
    rows = []
    for line in lines:
        halves, painted = ([], []), []
        assert line.endswith("\x1b[0m")
        for codes, blocks in re.findall(r"\x1b\[([0-9;]+)m(▀*)", line):
            numbers = [int(number) for number in codes.split(";")]
            while numbers and numbers != [0]:
                half = {38: 0, 48: 1, 49: 1}[numbers[0]]
                if numbers[0] == 49:
                    colour, length = [-1] * 3, 1
                elif numbers[1] == 2:
                    colour, length = numbers[2:5], 5
                else:
                    index, length = numbers[2] - 16, 3
                    colour = (
                        [levels[index // 36], levels[index // 6 % 6], levels[index % 6]]
                        if index < 216
                        else [8 + 10 * (index - 216)] * 3
                    )
                painted = [colour if half == 0 else painted[0] if painted else None, colour]
                halves[half].extend([colour] * len(blocks))
                numbers = numbers[length:]
        rows += halves
    return np.array(rows)


@pytest.mark.parametrize("shape", [(8, 8), (7, 5), (1, 1), (9, 4, 3), (10, 12, 3)])
def test_half_blocks_of_24_bits_read_back_are_the_pixels(shape):
    picture = RNG.integers(0, 256, shape, np.uint8)
    read = read_half_blocks(preview.half_blocks(picture, TRUE_COLOURS))
    expected = np.broadcast_to(picture.reshape(*shape[:2], -1), (*shape[:2], 3))
    assert np.array_equal(read[: shape[0]], expected)
    assert (read[shape[0] :] == -1).all() and len(read) == shape[0] + shape[0] % 2


def test_half_blocks_of_256_colours_are_the_nearest():
    greys = np.arange(256, dtype=np.uint8).reshape(16, 16)
    read = read_half_blocks(preview.half_blocks(greys, 256))
    assert np.abs(read - greys[..., None].astype(int)).max() <= 8
    levels = np.array([0, 95, 135, 175, 215, 255], np.uint8)
    cube = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(18, 12, 3)
    assert np.array_equal(read_half_blocks(preview.half_blocks(cube, 256)), cube)


class Stream(io.TextIOWrapper):
    def __init__(self, terminal: bool, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(
    ("wanted", "terminal", "environment", "colours"),
    [
        ("auto", True, "TERM=xterm-256color", 256),
        ("auto", True, "TERM=xterm-256color COLORTERM=truecolor", TRUE_COLOURS),
        ("auto", True, "TERM=xterm COLORTERM=24bit", TRUE_COLOURS),
        ("auto", False, "TERM=xterm-256color COLORTERM=truecolor", 0),
        ("auto", True, "TERM=dumb", 0),
        ("auto", True, "", 0),
        ("auto", True, "TERM=xterm NO_COLOR=1", 0),
        # as no-color.org has it: set and not empty
        ("auto", True, "TERM=xterm NO_COLOR=", 256),
        ("always", False, "TERM=dumb NO_COLOR=1", 256),
        ("always", False, "COLORTERM=truecolor", TRUE_COLOURS),
        ("never", True, "TERM=xterm-256color", 0),
    ],
)
def test_a_preview_is_for_terminals_that_can_unless_one_says(
    wanted, terminal, environment, colours
):
    variables = dict(word.split("=") for word in environment.split())
    assert preview.colours_of(Stream(terminal), wanted, variables) == colours


def test_a_stream_that_cannot_encode_half_blocks_gets_none():
    assert preview.colours_of(Stream(True, "ascii"), "auto", {"TERM": "xterm"}) == 0
    with pytest.raises(ValueError, match="PYTHONIOENCODING=utf-8"):
        preview.colours_of(Stream(True, "ascii"), "always", {"TERM": "xterm"})


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (30, 24), (20, 10), (7, 4), (1, 1)])
@pytest.mark.parametrize(("count", "config"), [(1, DIGITS), (64, DIGITS), (3, COLOURS), (30, TINY)])
def test_a_preview_fits_whatever_terminal(size, count, config, monkeypatch):
    for name, value in zip(("COLUMNS", "LINES"), size, strict=True):
        monkeypatch.setenv(name, str(value))
    stream = io.StringIO()
    with Progress(Job(count=count), config, stream, colours=TRUE_COLOURS, frames=1):
        pass
    lines = stream.getvalue().splitlines()
    assert lines
    assert max(line.count("▀") for line in lines) <= max(1, size[0] - 1)
    assert len(lines) <= max(1, size[1] - 2)


def screen_pixels(screen, lines: int, width: int) -> np.ndarray:
    """(2 * lines, width) greys of the half blocks in the upper left corner of an emulated
    terminal.
    """
    cells = [[screen.buffer[y][x] for x in range(width)] for y in range(lines)]
    assert {cell.data for row in cells for cell in row} == {"▀"}
    return np.array(
        [
            [int(cell.fg[:2] if half == "fg" else cell.bg[:2], 16) for cell in row]
            for row in cells
            for half in ("fg", "bg")
        ]
    )


def test_a_preview_is_drawn_over_itself_and_leaves_what_is_around_it(monkeypatch):
    monkeypatch.setattr(preview, "REDRAWN_S", 0.0)
    screen, stream, job = pyte.Screen(80, 24), Stream(terminal=True), Job(count=2, stream=True)
    first, second = noise(2, TINY), noise(2, TINY)
    stream.write("before\n")
    with Progress(job, TINY, stream, colours=TRUE_COLOURS, frames=1) as progress:
        for images in (first, second):
            progress.advanced(
                Report(
                    rows=[
                        (image, range(1, 9), canvas)
                        for image, canvas in zip(images_of(job, "all"), images, strict=True)
                    ]
                )
            )
    stream.write("after")
    stream.flush()
    pyte.Stream(screen).feed(stream.buffer.getvalue().decode().replace("\n", "\r\n"))
    assert screen.display[0].strip() == "before" and screen.display[7].strip() == "after"
    assert screen.display[6].startswith("0/2 images: 100%|"), "the bar"
    screen.cursor.y = 0
    screen.delete_lines(1)
    assert np.array_equal(screen_pixels(screen, 5, 19), animation.grid(second, TINY))
