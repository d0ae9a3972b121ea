"""Models that skip layers for some sub-pixels, and that use known sub-pixels wherever they are."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from linpix.model.attention import attention_for
from linpix.model.config import ModelConfig
from linpix.model.generate import draw_class, generate
from linpix.model.inputs import START
from linpix.model.likelihood import Scoring
from linpix.model.transformer import Transformer
from tests.model.test_transformer import LONG
from tests.nets import perturbed_net

BOTH = dataclasses.replace(
    LONG,
    norm="post",
    height=8,
    width=8,
    classes=3,
    look_ups=("previous", "row", "column", "class"),
    neighbours=((-1, 0, 0), (-1, 1, 0), (-1, -1, 0), (-2, 0, 0)),
    following=((0, 1, 0), (1, 0, 0), (1, 1, 0), (2, -1, 0)),
    patch=4,
    background=0,
    background_dim=12,
)
COLOUR = dataclasses.replace(
    BOTH,
    height=4,
    width=4,
    channels=3,
    patch=2,
    background=9,
    neighbours=((-1, 0, 0), (0, -1, 2), (0, 0, -1)),
    following=((0, 0, 1), (0, 1, -1), (1, 0, 0)),
)
PIXELS = dataclasses.replace(
    COLOUR,
    tokens="pixel",
    background=None,
    neighbours=((-1, 0, 0), (0, -1, 1), (-1, 1, 2)),
    following=((0, 1, 0), (1, 0, 2), (1, -1, 1)),
)
KINDS = {
    "pixels": PIXELS,
    "both": BOTH,
    "colour": COLOUR,
    "no background": dataclasses.replace(BOTH, background=None),
    "no patches": dataclasses.replace(BOTH, patch=0, following=()),
}


def pictures(count: int, config: ModelConfig, seed: int = 1) -> Tensor:
    """Background with ink here and there, as digits have it."""
    random = np.random.default_rng(seed)
    images = np.full(
        (count, config.height, config.width, config.channels), config.background or 0, np.uint8
    )
    for image in images:
        for _ in range(2):
            y, x = random.integers(0, config.height - 1), random.integers(0, config.width - 1)
            image[y : y + 2, x : x + 2] = random.integers(0, 256, image[y : y + 2, x : x + 2].shape)
    return torch.from_numpy(images.reshape(count, -1))


def holes(count: int, config: ModelConfig, seed: int = 2) -> Tensor:
    """What is known: of image 0 nothing, of image 1 all but one token, of the others some."""
    share = np.array([0.0, 1.0, *np.linspace(0.2, 0.8, count - 2)])[:count, None]
    known = np.random.default_rng(seed).random((count, config.length)) < share
    known[1:, config.length // 2] = False
    return torch.from_numpy(known.repeat(config.token_size, 1))


def starts(count: int) -> Tensor:
    return START + torch.arange(count) % 4


def stepped(
    net: Transformer, canvas: Tensor, start: Tensor, known: Tensor
) -> tuple[Tensor, Tensor]:
    """Parameters (B, n, P) and class scores step by step; unknown sub-pixels from token t on are
    rubbish.
    """
    count, config = canvas.shape[0], net.config
    state, slots = (
        attention_for(config).new_state(count + 2, torch.float64),
        torch.arange(count, 0, -1),
    )
    state.fill_with_nan(count + 1)
    conditioned = known.any(1) & bool(config.patch)
    scores = torch.zeros(0, config.classes)
    rubbish = torch.where(known, canvas, 255 - canvas)
    if config.patch:
        scores = net.read(rubbish[conditioned], known[conditioned], state, slots[conditioned])
    parameters = torch.zeros(count, config.length, net.head.out_features, dtype=torch.float64)
    for position in range(config.length):
        first = position * config.token_size
        [rows] = (~known[:, first]).nonzero(as_tuple=True)
        seen = torch.where((torch.arange(config.subpixels) < first) | known, canvas, 255 - canvas)
        parameters[rows, position] = net.step(
            seen[rows],
            torch.full((len(rows),), position),
            start[rows],
            state,
            slots[rows],
            known[rows],
        )
    return parameters, scores


@pytest.mark.parametrize("kind", KINDS)
def test_step_by_step_equals_the_parallel_form(kind):
    config = KINDS[kind]
    net, canvas, start = perturbed_net(config).double(), pictures(6, config), starts(6)
    known = holes(6, config) if config.patch else torch.zeros(6, config.subpixels, dtype=torch.bool)
    prediction = net.predict(net.sequences(canvas, start, known))
    parameters, scores = stepped(net, canvas, start, known)
    torch.testing.assert_close(parameters, prediction.parameters, rtol=0, atol=1e-10)
    if config.patch:
        torch.testing.assert_close(scores, prediction.class_scores, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_that_is_prefilled_leaves_what_steps_leave(kind):
    config = KINDS[kind]
    net, canvas, start = perturbed_net(config).double(), pictures(4, config), starts(4)
    whole = net(canvas, start)
    for length in (1, 5, config.length // 2, config.length - 1):
        state, slots = attention_for(config).new_state(4, torch.float64), torch.tensor([3, 1, 4, 2])
        net.prefill(canvas, length, start, state, slots)
        for position in range(length, config.length):
            found = net.step(canvas, torch.full((4,), position), start, state, slots)
            torch.testing.assert_close(found, whole[:, position], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_hidden_leaves_no_trace_before_it_is_drawn(kind):
    """Each row of the batch has another hidden sub-pixel: parameters of earlier tokens and its own
    stay, and so do class scores."""
    config = KINDS[kind]
    net, T = perturbed_net(config).double(), config.subpixels
    for seed in range(3):
        known = holes(3, config, seed)[2] if config.patch else torch.zeros(T, dtype=torch.bool)
        [hidden] = (~known).nonzero(as_tuple=True)
        canvas = pictures(1, config, seed).repeat(len(hidden), 1)
        changed = canvas.clone()
        changed[torch.arange(len(hidden)), hidden] ^= 255
        before, after = (
            net.predict(
                net.sequences(image, starts(1).expand(len(hidden)), known.expand(len(hidden), T))
            )
            for image in (canvas, changed)
        )
        # products of other sizes round otherwise
        same = ((before.parameters - after.parameters).abs() < 1e-12).all(-1)
        assert bool(same[torch.arange(config.length) <= hidden[:, None] // config.token_size].all())
        assert not bool(same.all())  # and later ones do change
        if config.patch:
            torch.testing.assert_close(before.class_scores, after.class_scores, rtol=0, atol=1e-12)


def test_with_nothing_known_an_image_is_what_it_is_without_a_condition():
    net, canvas, nothing = (
        perturbed_net(BOTH),
        pictures(3, BOTH),
        torch.zeros(3, 64, dtype=torch.bool),
    )
    prediction = net.predict(net.sequences(canvas, starts(3), nothing))
    assert torch.equal(prediction.parameters, net(canvas, starts(3)))
    assert len(prediction.class_scores) == 0
    assert torch.equal(
        generate(net, [1, 2, 3], known=canvas, given=nothing), generate(net, [1, 2, 3])
    )


def test_sub_pixels_amid_background_skip_the_layers():
    net, canvas = perturbed_net(BOTH).double(), torch.zeros(2, 64, dtype=torch.uint8)
    canvas[1, 27] = 200
    sequences = net.sequences(canvas, starts(2))
    assert len(sequences.order) == len(sequences.pixel_t) == int(sequences.offsets[-1])
    assert not bool((sequences.pixel_image == 0).any())  # nothing of a blank image
    # the sub-pixels that look at the one with ink: the next one, and those below
    assert sequences.pixel_t.tolist() == [28, 34, 35, 36, 43]
    assert len(sequences.skipped_t) == 128 - 5


def test_heads_are_computed_in_float32_under_autocast():
    """Rounded to bf16, a mean is off by a grey level, and training stands still."""
    net, canvas, known = perturbed_net(BOTH), pictures(6, BOTH), holes(6, BOTH)
    sequences = net.sequences(canvas, starts(6), known)
    with torch.autocast("cpu", torch.bfloat16):
        features, prediction = net.features(sequences), net.predict(sequences)
    assert {features.dtype, prediction.parameters.dtype, prediction.class_scores.dtype} == {
        torch.float32
    }
    at = sequences.pixel_image, sequences.pixel_t
    assert torch.equal(prediction.parameters[at], net.head(features[sequences.pixel_place]))
    assert torch.equal(prediction.class_scores, net.class_head(features[sequences.query_place]))


def test_gradients_flow_through_every_parameter():
    net = perturbed_net(BOTH).double().requires_grad_(True)
    canvas, known = pictures(6, BOTH), holes(6, BOTH)
    prediction = net.predict(net.sequences(canvas, starts(6), known))
    (prediction.parameters.square().sum() + prediction.class_scores.square().sum()).backward()
    assert [
        name for name, p in net.named_parameters() if p.grad is None or not bool(p.grad.any())
    ] == []


@pytest.mark.parametrize("config", [BOTH, PIXELS], ids=["sub-pixels", "pixels"])
def test_what_is_given_is_kept_and_the_rest_is_drawn_by_its_seed(config):
    net, canvas, known = perturbed_net(config), pictures(6, config), holes(6, config)
    drawn = generate(net, list(range(6)), known=canvas, given=known)
    assert torch.equal(torch.where(known, drawn, 0), torch.where(known, canvas, 0))
    assert torch.equal(generate(net, [3, 4], known=canvas[3:5], given=known[3:5]), drawn[3:5])
    hidden = torch.where(known, canvas, 255 - canvas)
    assert torch.equal(generate(net, list(range(6)), known=hidden, given=known), drawn)


def test_a_class_is_drawn_with_its_probability():
    scores = torch.log(torch.tensor([0.2, 0.5, 0.3])).expand(10_000, -1) + 7.0
    u = (torch.arange(10_000) + 0.5) / 10_000
    assert draw_class(scores, u).bincount().tolist() == [2_000, 5_000, 3_000]


def test_a_pixel_known_in_part_is_refused_where_a_pixel_is_one_token():
    net, canvas, known = (
        perturbed_net(PIXELS).double(),
        pictures(1, PIXELS),
        torch.zeros(1, PIXELS.subpixels, dtype=torch.bool),
    )
    known[0, 3:7] = True  # a whole pixel, and the red of the next one
    with pytest.raises(ValueError, match="draws whole pixels"):
        generate(net.float(), [0], known=canvas, given=known)
    with pytest.raises(ValueError, match="draws whole pixels"):
        Scoring(net, canvas[0].numpy(), known[0].numpy())
