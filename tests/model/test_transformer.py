import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from linpix.model.attention import PADDING_SLOT, State, attention_for
from linpix.model.config import PRESETS, ModelConfig
from linpix.model.inputs import START
from linpix.model.nets import net_for
from linpix.model.transformer import Transformer
from tests.nets import net_of, noise

ATTENTIONS = {"linear": {"attention": "linear"}, "softmax": {"attention": "softmax"}}
ATTENTIONS |= {
    f"linear, {name}": {"feature_map": name, "random_features": 5}
    for name in ("relu", "polynomial", "random")
}
REVERSIBLE = {
    f"{kind}, reversible": {"attention": kind, "residual": "reversible"}
    for kind in ("linear", "softmax")
}
COIN = (0.5, 0.5) + (0.0,) * 254

# 60 sub-pixels of three channels: more than one chunk of attention, and the last one not full
SMALL = ModelConfig(
    height=4,
    width=5,
    channels=3,
    layers=2,
    heads=2,
    key_dim=4,
    value_dim=3,
    d_model=8,
    d_ff=16,
    mixtures=2,
    classes=2,
)
# 784 sub-pixels, as small a network otherwise as can show a mistake
LONG = ModelConfig(
    layers=2,
    heads=2,
    key_dim=8,
    value_dim=6,
    d_model=16,
    d_ff=32,
    mixtures=2,
    classes=2,
    norm="pre",
    look_ups=("previous", "row", "column"),
    neighbours=((-1, 0, 0), (-1, 1, 0)),
)
IMPORTED = dataclasses.replace(SMALL, classes=0, first_marginal=COIN, activation="relu")

INPUTS = {
    "previous": {"look_ups": ("previous",)},
    "position": {"look_ups": ("previous", "position")},
    "row": {"look_ups": ("previous", "row")},
    "column": {"look_ups": ("previous", "column")},
    "channel": {"look_ups": ("previous", "channel")},
    "above": {"neighbours": ((-1, 0, 0), (-1, 1, 0), (-1, -1, 0), (-2, 0, 0))},
    "left": {"neighbours": ((0, -1, 0), (0, -2, 0))},
    "other channels": {
        "neighbours": ((0, 0, -1), (0, 0, -2), (0, -1, 2), (-1, 0, 1), (-1, 4, 2), (-1, 1, -2))
    },
    "everything": {
        "look_ups": ("previous", "position", "row", "column", "channel"),
        "neighbours": ((-1, 0, 0), (0, -1, 2), (0, 0, -1), (-1, 4, 2)),
    },
    "pixels": {
        name: getattr(PRESETS["cifar10-conditional"], name)
        for name in ("tokens", "look_ups", "neighbours")
    },
    "no start token": {"classes": 0, "first_marginal": COIN},
}


def changed_net(config: ModelConfig, **changes) -> Transformer:
    return net_of(dataclasses.replace(config, **changes))


def decode(
    net: Transformer,
    canvas: Tensor,
    start: Tensor,
    state: State,
    slots: Tensor,
    delays: list[int],
    begin: int = 0,
) -> Tensor:
    """Parameters (B, n - begin, P), step by step; row b begins `delays[b]` steps late and ends as
    late.

    Rows that have not begun or have ended are padding. From token t on, the canvas holds rubbish.
    """
    T, token = net.config.length, torch.arange(net.config.subpixels) // net.config.token_size
    found = [[] for _ in delays]
    for tick in range(T - begin + max(delays)):
        t = torch.tensor([begin + tick - delay for delay in delays])
        active = (t >= begin) & (t < T)
        t = torch.where(active, t, 0)
        known = torch.where(token < t[:, None], canvas, 255 - canvas)
        parameters = net.step(known, t, start, state, torch.where(active, slots, PADDING_SLOT))
        for row in active.nonzero()[:, 0].tolist():
            found[row].append(parameters[row])
    return torch.stack([torch.stack(row) for row in found])


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("attention", ["linear", "softmax", "linear, random"])
@pytest.mark.parametrize("inputs", INPUTS)
def test_a_token_leaves_no_trace_in_the_parameters_up_to_its_own(inputs, attention, norm):
    net = changed_net(SMALL, **INPUTS[inputs], **ATTENTIONS[attention], norm=norm)
    T, last = net.config.length, net.config.token_size - 1
    canvas = noise(1, SMALL.subpixels).repeat(T, 1)
    start = torch.full((T,), START)
    before = net(canvas, start)
    rows = torch.arange(T)
    # in row t, the last sub-pixel of token t is another one
    canvas[rows, rows * (last + 1) + last] ^= 255
    after = net(canvas, start)
    same = (before == after).all(-1) | before.isnan().all(-1)  # (T changes, T positions)
    assert bool(same.tril().equal(torch.ones(T, T).bool().tril()))
    assert not bool(
        same[:-1].diagonal(1)[net.config.first :].any()
    )  # and the very next parameters do change


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_step_by_step_equals_the_parallel_form_for_every_look_up(attention, inputs):
    net = changed_net(SMALL, **INPUTS[inputs], **ATTENTIONS[attention]).double()
    canvas, start = noise(2, SMALL.subpixels), torch.full((2,), START)
    state = attention_for(net.config).new_state(2, torch.float64)
    stepped = decode(net, canvas, start, state, torch.tensor([2, 1]), [0, 7])
    torch.testing.assert_close(stepped, net(canvas, start), rtol=0, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize(
    ("attention", "dtype", "tolerance"),
    [
        *((attention, torch.float64, 1e-10) for attention in REVERSIBLE),
        *((attention, torch.float32, 1e-4) for attention in ("linear", "softmax")),
    ],
)
def test_step_by_step_equals_the_parallel_form_over_784_sub_pixels(attention, dtype, tolerance):
    """Three rows that begin at different times, in shuffled slots of a pool whose free slots are
    poisoned.
    """
    net = changed_net(LONG, **(ATTENTIONS | REVERSIBLE)[attention]).to(dtype)
    start, slots = torch.tensor([START, START + 1, START + 2]), torch.tensor([5, 2, 6])
    canvas = noise(3, LONG.subpixels)
    state = attention_for(net.config).new_state(6, dtype)
    for slot in (1, 3, 4):
        state.fill_with_nan(slot)
    stepped = decode(net, canvas, start, state, slots, [0, 11, 100])
    parallel = net(canvas, start)
    torch.testing.assert_close(stepped, parallel, rtol=0, atol=tolerance)
    # rows differ: a mixed-up slot would show
    assert float((parallel[0] - parallel[1]).abs().max()) > 0.1


@cache
def over_784(attention: str) -> tuple[Transformer, Tensor, Tensor, Tensor]:
    """A network, two images, their start tokens, and their parameters by the parallel form."""
    net = changed_net(LONG, **(ATTENTIONS | REVERSIBLE)[attention]).double()
    canvas, start = noise(2, LONG.subpixels), torch.tensor([START, START + 2])
    return net, canvas, start, net(canvas, start)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 400, 783])
@pytest.mark.parametrize("attention", [*ATTENTIONS, *REVERSIBLE])
def test_prefill_then_step_equals_the_parallel_form(attention, length):
    net, canvas, start, parallel = over_784(attention)
    slots = torch.tensor([3, 1])
    state = attention_for(net.config).new_state(3, torch.float64)
    T = LONG.subpixels
    known = torch.where(torch.arange(T) < length, canvas, 255 - canvas)
    net.prefill(known, length, start, state, slots)
    pieces = attention_for(net.config).new_state(3, torch.float64)
    for begin in range(0, length, 192):
        net.prefill(known, min(begin + 192, length), start, pieces, slots, begin)
    assert all(
        torch.equal(x, y)
        for x, y in zip(vars(pieces).values(), vars(state).values(), strict=True)
        if isinstance(x, Tensor)
    )
    end = min(length + 20, T)
    stepped = torch.stack(
        [net.step(canvas, torch.full((2,), t), start, state, slots) for t in range(length, end)], 1
    )
    torch.testing.assert_close(stepped, parallel[:, length:end], rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [1, 2, 40, 59])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_prefill_then_step_equals_the_parallel_form_without_a_start_token(attention, length):
    net = changed_net(IMPORTED, **ATTENTIONS[attention]).double()
    canvas, start, slots = (
        noise(2, IMPORTED.subpixels),
        torch.full((2,), START),
        torch.tensor([3, 1]),
    )
    state = attention_for(net.config).new_state(3, torch.float64)
    net.prefill(canvas, length, start, state, slots)
    stepped = decode(net, canvas, start, state, slots, [0, 5], begin=length)
    torch.testing.assert_close(stepped, net(canvas, start)[:, length:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_without_a_start_token_position_0_has_no_parameters_and_leaves_its_slot_alone(attention):
    net = changed_net(IMPORTED, **ATTENTIONS[attention])
    canvas, state = noise(2, IMPORTED.subpixels), attention_for(net.config).new_state(2)
    for slot in (1, 2):
        state.fill_with_nan(slot)  # so that reading it would show as well, in row 1
    t = torch.tensor([0, 0])
    assert bool(
        net.step(canvas, t, torch.full((2,), START), state, torch.tensor([1, 2])).isnan().all()
    )
    pools = [x for x in vars(state).values() if isinstance(x, Tensor)]
    assert all(bool(x[1:].isnan().all()) and bool(x[0].isfinite().all()) for x in pools)
    parameters = net.parameters_of(canvas)
    assert bool(parameters[:, 0].isnan().all()) and bool(parameters[:, 1:].isfinite().all())


def test_parameters_are_float32_under_bf16_autocast():
    net, canvas = net_of(SMALL), noise(1, SMALL.subpixels)
    with torch.autocast("cpu", torch.bfloat16):
        assert net(canvas).dtype == torch.float32


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((2, 59), np.uint8), np.zeros((2, 60), np.float32), np.zeros((4, 5, 3), np.uint8)],
)
def test_images_of_another_shape_or_type_are_refused_with_what_was_got(wrong):
    with pytest.raises(ValueError, match=r"must be uint8 of shape \(B, 60\), got torch\.") as error:
        net_of(SMALL).parameters_of(wrong)
    assert str(tuple(wrong.shape)) in str(error.value)


def test_a_label_that_the_model_does_not_know_is_refused():
    assert net_of(SMALL).start_index(None) == START
    assert net_of(SMALL).start_index(1) == START + 2
    for label in (-1, 2):
        with pytest.raises(ValueError, match=rf"label must be one of 0\.\.1; got {label}"):
            net_of(SMALL).start_index(label)
    with pytest.raises(ValueError, match="has no classes"):
        net_of(IMPORTED).start_index(0)


@pytest.mark.parametrize("name", PRESETS)
def test_tensor_names_are_those_of_shipped_checkpoints(name):
    """Renaming one would make every checkpoint unreadable."""
    config = dataclasses.replace(PRESETS[name], layers=2, d_model=8, d_ff=8)
    parts = ["qkv", "out", "norm1", "up", "down", "norm2"]
    modules = [f"layers.{layer}.{part}" for layer in range(2) for part in parts] + ["norm", "head"]
    expected = {"inputs.table"} | {
        f"{module}.{kind}" for module in modules for kind in ("weight", "bias")
    }
    if config.patch:
        expected |= {
            "patches.place",
            "patches.query",
            "patches.linear.weight",
            "patches.linear.bias",
            "class_head.weight",
            "class_head.bias",
        }
    if config.background is not None:
        expected |= {
            "background.project.weight",
            "background.table",
            "background.head.weight",
            "background.head.bias",
        }
    assert set(net_for(config).state_dict()) == expected


def test_lsh_attention_is_hashed_anew_in_training_and_always_alike_after_it():
    net, canvas = (
        changed_net(SMALL, attention="lsh", lsh_buckets=4, lsh_chunk=8),
        noise(1, SMALL.subpixels),
    )
    assert torch.equal(net(canvas), net(canvas))
    net.train()
    assert not torch.equal(net(canvas), net(canvas))


def test_lsh_attention_has_no_step_by_step_form_and_says_so():
    with pytest.raises(ValueError, match="attention lsh has no step-by-step form"):
        attention_for(dataclasses.replace(SMALL, attention="lsh")).new_state(1)
