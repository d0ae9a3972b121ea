import dataclasses

import pytest
import torch

from linpix.model.inputs import (
    FOLLOWING_OUTSIDE,
    OUTSIDE,
    START,
    UNKNOWN,
    InputEmbedding,
    PatchEmbedding,
)
from tests.model.test_transformer import SMALL
from tests.nets import noise

CONFIG = dataclasses.replace(
    SMALL,
    look_ups=("previous", "position", "row", "column", "channel"),
    neighbours=((-1, 0, 0), (0, -1, 2), (-1, 4, -1), (-2, -1, 1)),
)
T = CONFIG.subpixels
CONDITIONAL = dataclasses.replace(
    CONFIG,
    look_ups=("previous", "row", "class", "channel"),
    width=6,
    patch=2,
    following=((0, 0, 1), (0, 1, -1), (1, 0, 0), (1, -2, 1)),
)


@pytest.fixture
def inputs() -> InputEmbedding:
    torch.manual_seed(0)
    return InputEmbedding(CONFIG)


def naive(table: torch.Tensor, image: list[int], t: int, start: int) -> torch.Tensor:
    """The sum of look-ups at t as the module's first lines describe it, block after block."""
    # by row, column, channel
    pixels = {(t // 15, t // 3 % 5, t % 3): value for t, value in enumerate(image)}
    y, x, c = t // 15, t // 3 % 5, t % 3
    total = table[image[t - 1] if t else start].clone()
    first = 256 + 1 + CONFIG.classes
    for place, size in ((t, T), (y, 4), (x, 5), (c, 3)):
        total += table[first + place]
        first += size
    for dy, dx, dc in CONFIG.neighbours:
        total += table[first + pixels.get((y + dy, x + dx, c + dc), OUTSIDE)]
        first += 257
    assert first == len(table)
    return total


def test_the_input_is_the_sum_of_its_look_ups(inputs):
    canvas, start = noise(2, T), torch.tensor([START, START + 2])
    found = inputs(canvas, torch.arange(T).expand(2, -1), start)
    expected = torch.stack(
        [
            torch.stack(
                [naive(inputs.table, canvas[b].tolist(), t, int(start[b])) for t in range(T)]
            )
            for b in range(2)
        ]
    )
    torch.testing.assert_close(found, expected)


def test_rows_at_different_positions_are_looked_up_each_at_its_own(inputs):
    canvas, start = noise(3, T), torch.tensor([START, START + 1, START + 2])
    t = torch.tensor([[0], [17], [T - 1]])
    together, everywhere = (
        inputs(canvas, t, start),
        inputs(canvas, torch.arange(T).expand(3, -1), start),
    )
    for row in range(3):
        assert torch.equal(together[row, 0], everywhere[row, t[row, 0]])


def test_a_conditional_input_looks_up_the_class_and_what_follows_where_it_is_known():
    torch.manual_seed(0)
    inputs, T = InputEmbedding(CONDITIONAL), CONDITIONAL.subpixels
    random = torch.Generator().manual_seed(1)
    canvas = torch.randint(0, 256, (2, T), generator=random, dtype=torch.uint8)
    known, start = torch.rand(2, T, generator=random) < 0.5, torch.tensor([START, START + 2])
    found = inputs(canvas, torch.arange(T).expand(2, -1), start, known)
    at = {t: (t // 18, t // 3 % 6, t % 3) for t in range(T)}
    where = {place: t for t, place in at.items()}
    for b in range(2):
        for t, (y, x, c) in at.items():
            table, first = inputs.table, 256 + 1 + CONDITIONAL.classes
            total = table[int(canvas[b, t - 1]) if t else int(start[b])].clone()
            for place, size in ((y, 4), (int(start[b]) - START, 3), (c, 3)):
                total += table[first + place]
                first += size
            for dy, dx, dc in CONDITIONAL.neighbours:
                earlier = where.get((y + dy, x + dx, c + dc))
                total += table[first + (OUTSIDE if earlier is None else int(canvas[b, earlier]))]
                first += 257
            for dy, dx, dc in CONDITIONAL.following:
                later = where.get((y + dy, x + dx, c + dc))
                total += table[
                    first
                    + (
                        FOLLOWING_OUTSIDE
                        if later is None
                        else int(canvas[b, later])
                        if known[b, later]
                        else UNKNOWN
                    )
                ]
                first += 258
            assert first == len(table)
            torch.testing.assert_close(found[b, t], total)


def test_the_input_of_a_pixel_is_looked_up_beside_its_first_channel():
    torch.manual_seed(0)
    config = dataclasses.replace(
        CONDITIONAL,
        tokens="pixel",
        look_ups=("previous", "position", "row", "column", "class"),
        neighbours=((0, -1, 0), (-1, 0, 2), (-1, 5, 1)),
        following=((0, 1, 1), (1, -2, 0)),
    )
    inputs, canvas = InputEmbedding(config), noise(6, T)[:2].repeat(1, 2)[:, : config.subpixels]
    known, start = torch.rand(2, config.subpixels) < 0.5, torch.tensor([START, START + 2])
    found = inputs(canvas, torch.arange(24).expand(2, -1), start, known)
    for b in range(2):
        for y in range(4):
            for x in range(6):

                def value(dy, dx, dc, outside, known=None, *, b=b, y=y, x=x):
                    if not (0 <= y + dy < 4 and 0 <= x + dx < 6):
                        return outside
                    place = (y + dy) * 18 + (x + dx) * 3 + dc
                    return int(canvas[b, place]) if known is None or known[b, place] else UNKNOWN

                t = y * 6 + x
                # blue, or the start
                total = inputs.table[int(canvas[b, 3 * t - 1]) if t else int(start[b])].clone()
                first = 256 + 1 + config.classes
                for place, size in ((t, 24), (y, 4), (x, 6), (int(start[b]) - START, 3)):
                    total += inputs.table[first + place]
                    first += size
                for neighbour in config.neighbours:
                    total += inputs.table[first + value(*neighbour, OUTSIDE)]
                    first += 257
                for neighbour in config.following:
                    total += inputs.table[first + value(*neighbour, FOLLOWING_OUTSIDE, known)]
                    first += 258
                assert first == len(inputs.table)
                torch.testing.assert_close(found[b, t], total)


def test_every_sub_pixel_belongs_to_one_patch_and_a_patch_to_one_square():
    patches = PatchEmbedding(CONDITIONAL)
    assert sorted(patches.members.flatten().tolist()) == list(range(CONDITIONAL.subpixels))
    assert patches.members[4].tolist() == [
        18 * y + 3 * x + c for y in (2, 3) for x in (2, 3) for c in range(3)
    ]


def test_a_patch_holds_what_is_known_and_nothing_else():
    torch.manual_seed(0)
    patches = PatchEmbedding(CONDITIONAL)
    canvas = torch.randint(0, 256, (1, CONDITIONAL.subpixels), dtype=torch.uint8)
    known = torch.rand(1, CONDITIONAL.subpixels) < 0.5
    at = torch.arange(CONDITIONAL.patches)
    found = patches(canvas, known, torch.zeros_like(at), at)
    hidden = torch.where(known, canvas, 255 - canvas)
    assert torch.equal(found, patches(hidden, known, torch.zeros_like(at), at))
    assert not torch.equal(
        found, patches(torch.where(known, 255 - canvas, canvas), known, torch.zeros_like(at), at)
    )
    assert not torch.equal(found, patches(canvas, ~known, torch.zeros_like(at), at))
