"""Palettes: which are allowed, which colours values and pixels have, and what a model reads and
draws of them.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch

from linpix.model import checkpoint
from linpix.model.attention.linear import RecurrentState
from linpix.model.config import PRESETS, ModelConfig
from linpix.model.generate import generate, tile
from linpix.model.packing import pack, pools_of, rows_of
from linpix.model.palette import nearest, pictures_of
from linpix.model.transformer import Transformer
from tests.nets import COLOURS, CONDITIONAL, PALETTE, net_of, saved

OPAQUE = dataclasses.replace(PALETTE, palette=((9, 9, 9, 255), *COLOURS[1:]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"palette": ((0, 0, 0),)}, "colour 0 is"),
        ({"palette": ((0, 0, 0, 256),)}, "colour 0 is"),
        ({"palette": ((0, 0, 0, 255), (1, 1, 1, 0))}, "colour 1 is"),
        ({"palette": ((0, 0, 0, 100),)}, "colour 0 is"),
        ({"palette": ((0, 0, 0, 255),) * 257}, "257 colours"),
        ({"head": "mixture"}, "head=mixture"),
        ({"background": 2}, "got 2"),
        ({"channels": 3, "neighbours": (), "following": ()}, "channels=3"),
    ],
)
def test_a_palette_that_cannot_be_drawn_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PALETTE, **changes)


def test_a_palette_is_read_as_it_was_written_and_older_checkpoints_have_none():
    fields = json.loads(json.dumps(PALETTE.to_json()))
    assert ModelConfig.from_json(fields) == PALETTE
    del fields["palette"]
    assert ModelConfig.from_json(fields).palette == ()


def test_what_transparent_pixels_hide_is_ground_and_others_get_the_nearest_opaque_colour():
    pixels = np.array(
        [
            (200, 30, 20, 127),
            (201, 31, 19, 128),
            (255, 255, 255, 255),  # nearest to the ground's own colour, which only equals it
            (254, 254, 254, 255),
            (0, 0, 100, 255),
        ],
        np.uint8,
    )
    assert nearest(pixels, PALETTE).tolist() == [0, 1, 3, 0, 3]
    assert nearest(pixels, OPAQUE).tolist() == [0, 1, 3, 3, 0]


@pytest.mark.parametrize("config", [PALETTE, OPAQUE])
def test_every_picture_of_a_palette_comes_back_from_its_colours(config):
    values = np.random.default_rng(0).integers(0, 4, (3, 64), dtype=np.uint8)
    pictures = pictures_of(values, config)
    assert pictures.shape == (3, 8, 8, 4)
    assert np.array_equal(nearest(pictures.reshape(-1, 4), config).reshape(3, 64), values)
    sheet = tile(values, config)
    assert sheet.shape == (10, 28, 4) and np.array_equal(sheet[1:9, 1:9], pictures[0])


def test_a_patch_is_read_by_its_colours_not_by_their_numbers():
    swapped = dataclasses.replace(PALETTE, palette=(COLOURS[0], COLOURS[2], COLOURS[1], COLOURS[3]))
    nets = [net_of(config) for config in (PALETTE, swapped)]
    values = torch.randint(0, 4, (1, 64), dtype=torch.uint8)
    renamed = torch.tensor([0, 2, 1, 3], dtype=torch.uint8)[values.int()]
    known = torch.rand(1, 64) < 0.5
    there = torch.zeros(4, dtype=torch.int64), torch.arange(4)
    read, other = (
        net.patches(canvas, known, *there)
        for net, canvas in zip(nets, (values, renamed), strict=True)
    )
    torch.testing.assert_close(read, other, rtol=0, atol=0)
    hidden = torch.where(known, values, 3 - values)
    torch.testing.assert_close(nets[0].patches(hidden, known, *there), read, rtol=0, atol=0)


def trained(config: ModelConfig, steps: int = 3) -> Transformer:
    """A model after a few steps with a far too large learning rate."""
    net = net_of(config, spread=0.05).train().requires_grad_()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    images = torch.randint(0, 4, (8, 64), dtype=torch.uint8)
    for _ in range(steps):
        prediction = net.predict(net.sequences(images, torch.full((8,), 258), None))
        losses = -torch.distributions.Categorical(logits=prediction.parameters).log_prob(images)
        losses.mean().backward()
        optimizer.step()
    return net.eval().requires_grad_(False)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 10.0])
def test_no_value_beyond_the_palette_is_ever_drawn_however_it_was_trained(temperature):
    net = trained(PALETTE)
    labels = [index % 10 for index in range(200)]
    drawn = generate(net, [*range(200)], labels=labels, temperature=temperature)
    assert drawn.max() < 4
    if temperature == 1:
        assert set(drawn.unique().tolist()) == {0, 1, 2, 3}


def test_the_compiled_engine_draws_what_the_eager_one_draws():
    net = net_of(PALETTE, spread=0.1)
    seeds, labels = [*range(16)], [index % 10 for index in range(16)]
    eager = generate(net, seeds, labels=labels)
    canvas = torch.zeros(17, 64, dtype=torch.uint8)
    state = RecurrentState(PALETTE, 16)
    start = torch.tensor([net.start_index(label) for label in labels])
    known = torch.zeros_like(canvas, dtype=torch.bool)
    pack(net, torch.float32).decode(
        pools_of(canvas=canvas, known=known, S=state.S, z=state.z, last=state.last),
        rows_of(slot=range(1, 17), steps=[64] * 16, start=start, seed=seeds),
        torch.ones(16),
    )
    # sums in another order may turn a draw at the very edge between two values
    assert (canvas[1:] == eager).float().mean() > 0.99


def test_a_checkpoint_keeps_its_palette_and_its_board_is_in_colours(tmp_path):
    found = checkpoint.read(saved(tmp_path / "few", PALETTE))
    assert found.net.config == PALETTE
    assert found.board == {"ground": [254, 254, 254], "ink": [200, 30, 20], "prepare": None}
    assert found.torn(np.ones((1, 64), np.uint8), np.zeros((1, 64), np.bool_), [None]) == [False]


def test_values_of_models_without_a_palette_are_read_as_before():
    net = net_of(CONDITIONAL)
    canvas = torch.arange(64, dtype=torch.uint8)[None] * 4
    known = torch.ones(1, 64, dtype=torch.bool)
    parts = net.patches.parts(canvas, known, torch.tensor([0]), torch.tensor([1]))
    rows = canvas.view(8, 8)[:4, 4:].reshape(1, 16)
    assert torch.equal(parts, torch.cat([rows / 255, torch.ones(1, 16)], 1))
    assert PRESETS["mnist-conditional"].grey and not PALETTE.grey
