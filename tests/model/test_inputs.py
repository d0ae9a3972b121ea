import dataclasses

import numpy as np
import pytest
import torch

from linpix.model.config import ModelConfig
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


PIXELS = dataclasses.replace(
    CONDITIONAL,
    tokens="pixel",
    look_ups=("previous", "position", "row", "column", "class"),
    neighbours=((0, -1, 0), (-1, 0, 2), (-1, 5, 1)),
    following=((0, 1, 1), (1, -2, 0)),
)
CONFIGS = {"sub-pixels": CONFIG, "conditional": CONDITIONAL, "pixels": PIXELS}


@pytest.fixture
def inputs() -> InputEmbedding:
    torch.manual_seed(0)
    return InputEmbedding(CONFIG)


def naive(
    table: torch.Tensor,
    config: ModelConfig,
    image: torch.Tensor,
    known: torch.Tensor,
    t: int,
    start: int,
) -> torch.Tensor:
    """The sum of look-ups of token t as the module's first lines describe it, block after block. A
    pixel's neighbours are those of its first channel.
    """
    shape = config.height, config.width, config.channels
    at = {tuple(map(int, np.unravel_index(i, shape))): i for i in range(config.subpixels)}
    here = t * config.token_size
    y, x, c = map(int, np.unravel_index(here, shape))
    places = {
        "position": (t, config.length),
        "row": (y, config.height),
        "column": (x, config.width),
        "channel": (c, config.channels),
        "class": (start - START, config.classes + 1),
    }
    total = table[int(image[here - 1]) if t else start].clone()
    first = 256 + 1 + config.classes
    for name in config.look_ups[1:]:
        place, size = places[name]
        total += table[first + place]
        first += size
    for dy, dx, dc in config.neighbours:
        earlier = at.get((y + dy, x + dx, c + dc))
        total += table[first + (OUTSIDE if earlier is None else int(image[earlier]))]
        first += 257
    for dy, dx, dc in config.following:
        later = at.get((y + dy, x + dx, c + dc))
        value = FOLLOWING_OUTSIDE
        if later is not None:
            value = int(image[later]) if known[later] else UNKNOWN
        total += table[first + value]
        first += 258
    assert first == len(table)
    return total


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_input_is_the_sum_of_its_look_ups(config):
    torch.manual_seed(0)
    inputs, canvas = InputEmbedding(config), noise(2, config.subpixels)
    known, start = torch.rand(2, config.subpixels) < 0.5, torch.tensor([START, START + 2])
    given = (known,) if config.following else ()
    found = inputs(canvas, torch.arange(config.length).expand(2, -1), start, *given)
    for row in range(2):
        for t in range(config.length):
            expected = naive(inputs.table, config, canvas[row], known[row], t, int(start[row]))
            torch.testing.assert_close(found[row, t], expected)


def test_rows_at_different_positions_are_looked_up_each_at_its_own(inputs):
    canvas, start = noise(3, T), torch.tensor([START, START + 1, START + 2])
    t = torch.tensor([[0], [17], [T - 1]])
    together, everywhere = (
        inputs(canvas, t, start),
        inputs(canvas, torch.arange(T).expand(3, -1), start),
    )
    for row in range(3):
        assert torch.equal(together[row, 0], everywhere[row, t[row, 0]])


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
