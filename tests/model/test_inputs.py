import pytest
import torch

from model.config import ModelConfig
from model.inputs import OUTSIDE, START, InputEmbedding

CONFIG = ModelConfig(height=4, width=5, channels=3, d_model=8, classes=2,
                     look_ups=("previous", "position", "row", "column", "channel"),
                     neighbours=((-1, 0, 0), (0, -1, 2), (-1, 4, -1), (-2, -1, 1)))
T = CONFIG.subpixels


@pytest.fixture
def inputs() -> InputEmbedding:
    torch.manual_seed(0)
    return InputEmbedding(CONFIG)


def images(count: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, T), generator=random, dtype=torch.uint8)


def naive(table: torch.Tensor, image: list[int], t: int, start: int) -> torch.Tensor:
    """The sum of look-ups at t as the module's first lines describe it, block after block."""
    pixels = {(t // 15, t // 3 % 5, t % 3): value for t, value in enumerate(image)}  # by row, column, channel
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
    canvas, start = images(2), torch.tensor([START, START + 2])
    found = inputs(canvas, torch.arange(T).expand(2, -1), start)
    expected = torch.stack([torch.stack([naive(inputs.table, canvas[b].tolist(), t, int(start[b]))
                                         for t in range(T)]) for b in range(2)])
    torch.testing.assert_close(found, expected)


def test_rows_at_different_positions_are_looked_up_each_at_its_own(inputs):
    canvas, start = images(3), torch.tensor([START, START + 1, START + 2])
    t = torch.tensor([[0], [17], [T - 1]])
    together, everywhere = inputs(canvas, t, start), inputs(canvas, torch.arange(T).expand(3, -1), start)
    for row in range(3):
        assert torch.equal(together[row, 0], everywhere[row, t[row, 0]])


def test_nothing_from_t_on_is_looked_up(inputs):
    canvas, t = images(1).expand(T, -1), torch.arange(T)[:, None]
    start = torch.full((T,), START)
    unknown = torch.where(torch.arange(T) >= t, 255 - canvas, canvas)
    assert torch.equal(inputs.indices(canvas, t, start), inputs.indices(unknown, t, start))
    earlier = torch.where(torch.arange(T) < t, 255 - canvas, canvas)
    assert not torch.equal(inputs.indices(canvas, t, start), inputs.indices(earlier, t, start))


def test_the_start_is_seen_at_position_0_only(inputs):
    canvas, t = images(1).expand(3, -1), torch.arange(T).expand(3, -1)
    found = inputs.indices(canvas, t, torch.tensor([START, START + 1, START + 2]))
    assert found[:, 0, 0].tolist() == [256, 257, 258]
    assert torch.equal(found[0, 1:], found[1, 1:])


def test_no_two_look_ups_share_a_row_of_the_table(inputs):
    t = torch.arange(T).expand(256, -1)
    canvas = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, T).contiguous()
    found = inputs.indices(canvas, t, torch.full((256,), START))
    blocks = [set(found[..., column].flatten().tolist()) for column in range(found.shape[-1])]
    assert sum(map(len, blocks)) == len(set().union(*blocks))
    assert max(map(max, blocks)) == len(inputs.table) - 1


def test_similar_values_of_a_colour_begin_with_similar_rows(inputs):
    for first in inputs.base[0].tolist():
        rows = inputs.table[first:first + 256].detach()
        assert float((rows[1:] - rows[:-1]).std()) < 0.3 * float(rows.std())
        assert float(rows.std()) == pytest.approx(0.5)
        assert float((rows[0] - rows[255]).std()) > float(rows.std())
