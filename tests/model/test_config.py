import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linpix.model.attention import attention_for
from linpix.model.config import PRESETS, ModelConfig, bits_per_dim

COIN = (0.5, 0.5) + (0.0,) * 254
PIXEL = {"channels": 3, "tokens": "pixel", "look_ups": ("previous",)}


@pytest.mark.parametrize(
    "config",
    [*PRESETS.values(), ModelConfig(first_marginal=COIN, twin_of="mnist")],
    ids=[*PRESETS, "imported"],
)
def test_a_configuration_survives_json(config):
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("name", "kibibytes"),
    [
        ("mnist", 264),
        ("cifar10", 528),
        ("mnist-small", 66),
        ("mnist-large", 264),
        ("cifar10-small", 66),
        ("cifar10-conditional", 66),
        ("cifar10-large", 396),
        ("tiny", 1.125),
    ],
)
def test_the_state_of_a_preset_is_as_large_as_the_design_says(name, kibibytes):
    assert attention_for(PRESETS[name]).state_bytes == kibibytes * 1024


def test_tokens_are_sub_pixels_or_pixels():
    config = PRESETS["cifar10-conditional"]
    assert (config.subpixels, config.token_size, config.length) == (3072, 3, 1024)
    # by sub-pixels all the same
    assert bits_per_dim(3072 * math.log(256), config) == pytest.approx(8)


def test_fields_that_a_checkpoint_does_not_know_yet_have_their_defaults():
    fields = PRESETS["tiny"].to_json()
    for name in ("twin_of", "first_marginal", "scale_transform", "neighbours"):
        del fields[name]
    assert ModelConfig.from_json(fields) == dataclasses.replace(PRESETS["tiny"], neighbours=())


def test_fields_that_we_do_not_know_yet_are_refused_by_name():
    with pytest.raises(ValueError, match=r"\['depth'\].*LinPix release"):
        ModelConfig.from_json(PRESETS["tiny"].to_json() | {"depth": 3})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be an integer of at least 1, got 0"),
        ({"heads": 2.0}, "heads must be an integer of at least 1, got 2.0"),
        ({"height": True}, "height must be an integer of at least 1, got True"),
        ({"d_ff": 2**21}, "d_ff must be at most 1048576, got 2097152"),
        (
            {"height": 2**15, "width": 2**15},
            r"height \* width \* channels .* must be at most 16777216, got 1073741824",
        ),
        ({"classes": 2**21}, "classes must be at most 1048576, got 2097152"),
        (
            {"neighbours": ((-1, 0, 0),) * 300},
            "neighbours and following may have up to 256 entries together, got 300",
        ),
        ({"neighbours": ((0, -(2**21), 0),)}, "a neighbour must be at most 1048576 away"),
        ({"tokens": "word"}, "tokens must be one of sub-pixel, pixel, got 'word'"),
        ({"tokens": "pixel"}, "need 3 channels, .* got channels=1, background=None, a start token"),
        (PIXEL | {"background": 0}, "got channels=3, background=0"),
        (PIXEL | {"first_marginal": COIN}, "got .* no start token"),
        (
            PIXEL | {"look_ups": ("previous", "channel")},
            r"no look-up 'channel'; got .*\['previous', 'channel'\]",
        ),
        (
            PIXEL | {"neighbours": ((0, 0, -1),)},
            r"a channel \(dc 0..2\) of another pixel; got \(0, 0, -1\)",
        ),
        (PIXEL | {"neighbours": ((-1, 0, 3),)}, r"of another pixel; got \(-1, 0, 3\)"),
        (PIXEL | {"neighbours": ((0, 1, 0),)}, "not strictly earlier in raster order"),
        (PIXEL | {"following": ((0, 0, 1),), "patch": 4}, r"of another pixel; got \(0, 0, 1\)"),
        (PIXEL | {"following": ((0, -1, 0),), "patch": 4}, "not strictly later in raster order"),
        ({"following": ((1, 0, 0),)}, "give a patch, or leave following out"),
        ({"following": ((-1, 0, 0),), "patch": 4}, "not strictly later in raster order"),
        ({"patch": 5}, "patch must divide height 28 and width 28, or be 0; got 5"),
        ({"background": 256}, "background must be a value 0..255, or null, got 256"),
        ({"background": 0, "background_dim": 0}, "background_dim must be an integer of"),
        ({"background": 0, "attention": "softmax"}, "need linear attention"),
        ({"look_ups": ("previous", "class")}, "needs classes, got classes=0"),
        ({"neighbours": (-1,)}, "a neighbour must be three integers"),
        (
            {"feature_map": "random", "random_features": 5000},
            "random_features of at most 4096 and key_dim of at most 512, got 5000 and 32",
        ),
        ({"twin_of": 3}, "twin_of must be a name, got 3"),
        (
            {"first_marginal": (10**400,) * 256},
            r"256 probabilities that sum to 1, got \(1000.*\.\.\.$",
        ),
        ({"channels": 2}, "channels must be 1 .* or 3 .*, got 2"),
        ({"classes": -1}, "classes must be an integer of at least 0, got -1"),
        ({"attention": "linaer"}, "attention must be one of linear, .*got 'linaer'"),
        ({"norm": "layer"}, "norm must be one of post, pre, got 'layer'"),
        ({"activation": "silu"}, "activation must be one of relu, gelu, got 'silu'"),
        ({"scale_transform": "log"}, "scale_transform must be one of exp, elu, got 'log'"),
        ({"eps": 0.0}, "eps must be a number between 0 and 1, got 0.0"),
        ({"eps": math.nan}, "eps must be a number between 0 and 1, got nan"),
        ({"look_ups": ("position",)}, r"look_ups must contain 'previous'.*got \['position'\]"),
        ({"look_ups": ("previous", "previous")}, "once each"),
        ({"look_ups": ("previous", "depth")}, r"got \['previous', 'depth'\]"),
        ({"neighbours": ((-1, 0),)}, r"three integers \(dy, dx, dc\), got \(-1, 0\)"),
        ({"neighbours": ((-1.0, 0, 0),)}, "three integers"),
        ({"neighbours": ((0, 0, 0),)}, r"\(0, 0, 0\) is not strictly earlier"),
        ({"first_marginal": COIN[:-1]}, "256 probabilities that sum to 1, got 255"),
        ({"first_marginal": (0.5, *COIN[1:-1], 0.5)}, "sum to 1.5"),
        ({"first_marginal": (1.5, -0.5, *COIN[2:])}, "least -0.5"),
        ({"first_marginal": (math.nan, *COIN[1:])}, "sum to nan"),
        ({"first_marginal": COIN, "classes": 10}, "cannot have classes, got classes=10"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_was_got(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**change)


@given(st.integers(-4, 4), st.integers(-40, 40), st.integers(-3, 3), st.sampled_from([1, 3]))
def test_a_neighbour_is_accepted_only_if_it_is_earlier_wherever_it_is_inside(dy, dx, dc, channels):
    height, width = 5, 6
    try:
        config = ModelConfig(
            height=height, width=width, channels=channels, neighbours=((dy, dx, dc),)
        )
    except ValueError as error:
        assert "is not strictly earlier in raster order" in str(error)
        accepted = False
    else:
        accepted = True
        assert config.offset((dy, dx, dc)) < 0
    inside = abs(dy) < height and abs(dx) < width and abs(dc) < channels
    if inside:
        assert accepted == ((dy, dx, dc) < (0, 0, 0))
