"""The compiled engine against the transformer that it was packed from, and against itself, bit for
bit.
"""

import dataclasses
import math
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from linpix.model import heads, ops, packing
from linpix.model.attention.linear import RecurrentState
from linpix.model.config import PRESETS, ModelConfig
from linpix.model.generate import generate
from linpix.model.inputs import START
from linpix.model.packing import (
    LIMITS,
    POOLS,
    PRECISIONS,
    ROWS,
    Packed,
    pack,
    pools_of,
    quantise,
    rows_of,
    sizes_of,
)
from linpix.model.transformer import Transformer
from tests.nets import perturbed_net
from tools.harness.commands import ROOT, python, ran

pytestmark = pytest.mark.kernels

TINY = PRESETS["tiny"]
WIDER = dataclasses.replace(TINY, d_model=48, d_ff=80, heads=3, key_dim=16, value_dim=32, layers=3)
SHAPES = {
    "tiny": TINY,
    "wider": WIDER,
    "post-norm": dataclasses.replace(WIDER, norm="post"),
    "relu": dataclasses.replace(WIDER, activation="relu"),
    "odd sizes": dataclasses.replace(
        TINY, layers=3, heads=3, key_dim=5, value_dim=7, d_ff=37, mixtures=17
    ),
    "odd sides, patches of one pixel": dataclasses.replace(
        TINY, height=9, width=23, patch=1, background=0, norm="post"
    ),
    "many mixtures": dataclasses.replace(TINY, mixtures=300),
    "one head, long keys": dataclasses.replace(TINY, heads=1, key_dim=40, value_dim=33),
    "position": dataclasses.replace(WIDER, look_ups=("previous", "position"), neighbours=()),
    "previous only": dataclasses.replace(TINY, look_ups=("previous",), neighbours=()),
    "colour": dataclasses.replace(
        WIDER,
        channels=3,
        look_ups=("previous", "row", "column", "channel"),
        neighbours=((-1, 0, 0), (0, -1, 0), (0, 0, -2)),
    ),
    "cifar10-conditional, a corner": dataclasses.replace(
        PRESETS["cifar10-conditional"], height=4, width=8, layers=2
    ),
    "pixels": dataclasses.replace(
        WIDER,
        channels=3,
        tokens="pixel",
        look_ups=("previous", "row", "column"),
        neighbours=((-1, 0, 0), (0, -1, 1), (-1, 1, 2)),
        mixtures=17,
    ),
    "pixels, published scale": dataclasses.replace(
        TINY, channels=3, tokens="pixel", neighbours=(), norm="post", scale_transform="elu"
    ),
    "no classes": dataclasses.replace(TINY, classes=0),
    "no start token": dataclasses.replace(
        TINY, classes=0, first_marginal=tuple([0.25, 0.5, 0.25] + [0.0] * 253)
    ),
    "class": dataclasses.replace(TINY, look_ups=("previous", "row", "class", "column")),
    "background": dataclasses.replace(WIDER, background=0, background_dim=48, norm="post"),
    "conditional": dataclasses.replace(
        TINY,
        background=9,
        background_dim=16,
        patch=4,
        channels=3,
        look_ups=("previous", "row", "column", "channel", "class"),
        neighbours=((-1, 0, 0), (0, -1, 2), (0, 0, -1)),
        following=((0, 0, 1), (0, 1, -1), (1, 0, 0)),
    ),
    "published scale": dataclasses.replace(TINY, scale_transform="elu"),
    "logits": dataclasses.replace(TINY, head="categorical"),
    "logits, conditional": dataclasses.replace(
        WIDER,
        head="categorical",
        background=200,
        background_dim=48,
        norm="post",
        patch=4,
        look_ups=("previous", "row", "column", "class"),
        following=((0, 1, 0), (1, 0, 0)),
    ),
}

# those compared bit for bit
EXACT = (
    "tiny",
    "post-norm",
    "odd sizes",
    "no start token",
    "background",
    "conditional",
    "pixels",
    "logits",
    "logits, conditional",
)


class Pool:
    """Slots and images of one packed model, as an engine has them."""

    def __init__(self, config: ModelConfig, packed: Packed, slots: int) -> None:
        self.config, self.packed = config, packed
        state = RecurrentState(config, slots)
        self.S, self.z, self.last = state.S, state.z, state.last
        self.canvas = torch.zeros(slots + 1, config.subpixels, dtype=torch.uint8)
        self.known = torch.zeros(slots + 1, config.subpixels, dtype=torch.bool)

    @property
    def pools(self) -> list[Tensor]:
        return pools_of(canvas=self.canvas, known=self.known, S=self.S, z=self.z, last=self.last)

    def decode(
        self,
        slots: list[int],
        positions: Any,
        steps: Any,
        seeds: Any,
        *,
        start: int = START,
        temperatures: Any = 1.0,
        passes: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A number of positions, steps, seeds or temperatures is that of all rows."""
        rows = rows_of(slot=slots, position=positions, steps=steps, start=start, seed=seeds)
        scales = torch.ones(len(slots)) * torch.as_tensor(temperatures)
        return self.packed.decode(self.pools, rows, scales, passes=passes, log_probs=True)

    def prefill(self, slots: list[int], lengths: list[int], positions: Any = 0) -> None:
        steps = np.subtract(lengths, positions)
        rows = rows_of(slot=slots, position=positions, steps=steps, start=START)
        self.packed.prefill(self.pools, rows)

    def holds(self, slot: int) -> list[Tensor]:
        """All that the model remembers of a slot's image."""
        return [self.S[slot], self.z[slot], self.last[slot]]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def images_of(config: ModelConfig, count: int) -> Tensor:
    images = torch.randint(
        0,
        256,
        (count, config.subpixels),
        generator=torch.Generator().manual_seed(1),
        dtype=torch.uint8,
    )
    if config.first_marginal:
        images[:, 0] = 1
    if config.background is not None:  # ink here and there
        pixels = images.view(count, config.height, config.width, config.channels)
        ink = torch.rand(pixels.shape[:3], generator=torch.Generator().manual_seed(2)) < 0.1
        pixels[~ink] = config.background
    return images


def log_probs_of(net: Transformer, images: Tensor) -> Tensor:
    """By the parallel form in float64."""
    found = heads.log_likelihood(net.config, net.double()(images).double(), images)
    net.float()
    if net.config.first_marginal:
        found[:, 0] = torch.tensor(net.config.first_marginal).double()[images[:, 0].long()].log()
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_forced_decoding_gives_the_transformers_log_probabilities(shape, rows, threads):
    config = SHAPES[shape]
    net, images = perturbed_net(config), images_of(SHAPES[shape], rows)
    exact = log_probs_of(net, images)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # rounding shows more in these: noise is unlikely
        far = bool(config.patch) or config.token_size > 1
        for precision, bound in (
            ("fp32", 1e-4),
            ("bf16", 0.5 if far else 0.1),
            ("int8", 2.0 if far else 0.3),
        ):
            pool = Pool(config, pack(net, PRECISIONS[precision]), rows)
            pool.canvas[1:], pool.known[:] = images, True
            found, finite, *_ = pool.decode(list(range(1, rows + 1)), 0, config.length, 0)
            assert bool(finite.all())
            assert float((found - exact).abs().max()) < bound
            assert torch.equal(pool.canvas[1:], images)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 40])
def test_weights_that_bf16_holds_are_half_as_long_and_give_the_same_bytes(rows, monkeypatch):
    net = perturbed_net(SHAPES["odd sizes"])
    for weight in net.parameters():
        weight.data = weight.data.bfloat16().float()
    narrow = pack(net, torch.float32)
    monkeypatch.setattr(packing, "narrowest", lambda _, dtype: dtype)
    wide = pack(net, torch.float32)
    assert wide.step_bytes == 2 * narrow.step_bytes
    slots, pools = list(range(1, rows + 1)), []
    for packed in (narrow, wide):
        pool = Pool(net.config, packed, rows)
        pool.decode(slots, 0, net.config.length, slots)
        pools.append(pool)
    assert len(pools[0].canvas.unique()) > 10
    assert same([pools[0].canvas, pools[0].S], [pools[1].canvas, pools[1].S])


@pytest.mark.parametrize("shape", SHAPES)
def test_it_draws_what_the_plain_decode_loop_draws(shape):
    """Level (c): engines round differently, so a draw next to a boundary may fall on the other
    side.
    """
    net, seeds = perturbed_net(SHAPES[shape]), [5, 2**53 - 1, 7]
    label = 2 if net.config.class_first else None
    expected = generate(net, seeds, labels=[label] * 3, temperature=0.7)
    pool = Pool(net.config, pack(net, torch.float32), 3)
    pool.decode(
        [1, 2, 3],
        0,
        net.config.length,
        seeds,
        start=net.start_index(label),
        temperatures=0.7,
    )
    assert float((pool.canvas[1:] == expected).float().mean()) > 0.95


def test_temperature_0_draws_the_likeliest_components_mean():
    net = perturbed_net(TINY)
    expected = generate(net, [1, 2], temperature=0.0)
    pool = Pool(TINY, pack(net, torch.float32), 2)
    pool.decode([1, 2], 0, 64, [3, 4], temperatures=0.0)
    assert float((pool.canvas[1:] == expected).float().mean()) > 0.95


def crowded(config, packed, slot, rows):
    """A pool, and the slots of so many images in it. All but that in `slot` have values already,
    and every second one of them is forced to these.
    """
    pool = Pool(config, packed, 80)
    # slots that nobody has must not be read
    pool.S[:], pool.z[:], pool.last[:] = torch.nan, torch.nan, torch.nan
    others = np.delete(np.arange(1, 81), slot - 1)[: rows - 1]
    slots = np.insert(others, rows // 2, slot)
    pool.S[slots], pool.z[slots], pool.last[slots] = 0, 0, 0
    pool.known[others[::2]] = True
    pool.canvas[others] = images_of(config, rows)[: rows - 1]
    return pool, slots


def decoded_in_a_crowd(pool, slots, ours, seed, k):
    """Log-probabilities of the image where `ours` is true, decoded k steps at a time; the others
    begin and go on at random, hot or cold.
    """
    rows, length, random = len(slots), pool.config.length, np.random.default_rng(len(slots))
    seeds = np.where(ours, seed, slots)
    temperatures = np.where(ours, 1, random.choice(np.float32([0, 0.5, 3]), rows))
    joins = np.where(ours, 3, random.integers(0, 20, rows))  # quanta before a row begins
    at, found = np.zeros(rows, int), []
    while at[ours] < length:
        steps = np.minimum(np.where(ours, k, random.integers(0, k + 1, rows)), length - at)
        here = (joins <= 0) & (at < length)
        joins -= 1
        if not here.any():
            continue
        probs, *_ = pool.decode(
            slots[here], at[here], steps[here], seeds[here], temperatures=temperatures[here]
        )
        found += [row[: k * pool.config.token_size] for row in probs[ours[here]]]
        at[here] += steps[here]
    return torch.cat(found)[: pool.config.subpixels]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", EXACT)
def test_an_image_is_the_same_bit_for_bit_whatever_is_in_the_batch(shape, precision):
    """Alone, among 2, 7 or 64, in other slots, in quanta of any length."""
    config = SHAPES[shape]
    packed = pack(perturbed_net(config), PRECISIONS[precision])
    alone = Pool(config, packed, 1)
    log_probs, *_ = alone.decode([1], 0, config.length, 77)
    for rows, k, slot in ((1, 5, 1), (2, 999, 2), (7, 13, 3), (64, 8, 50)):
        pool, slots = crowded(config, packed, slot, rows)
        found = decoded_in_a_crowd(pool, slots, slots == slot, 77, k)
        assert torch.equal(pool.canvas[slot], alone.canvas[1])
        assert torch.equal(found, log_probs[0])
        assert same(pool.holds(slot), alone.holds(1))


@pytest.mark.parametrize("shape", ["tiny", "background", "conditional", "logits, conditional"])
def test_rows_that_stop_after_so_many_passes_go_on_where_they_are(shape):
    config, rows = SHAPES[shape], 5
    T, slots, packed = (
        config.subpixels,
        list(range(1, rows + 1)),
        pack(perturbed_net(config), torch.float32),
    )
    whole, parts = Pool(config, packed, rows), Pool(config, packed, rows)
    # background in places, so that rows skip the layers at different times
    for pool in (whole, parts):
        pool.canvas[1:] = config.background or 0
        pool.known[1:] = torch.arange(rows)[:, None] * 7 > torch.arange(T) % 29
    expected, _, taken, all_passes = whole.decode(slots, 0, T, slots)
    assert taken.tolist() == [T] * rows
    at, passes, found = [0] * rows, torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, T)
    while min(at) < T:
        probs, _, taken, passed = parts.decode(slots, at, [T - t for t in at], slots, passes=3)
        assert int(passed.max()) <= 3 and bool((taken >= passed).all())
        for row, (t, count) in enumerate(zip(at, taken.tolist(), strict=True)):
            assert count >= min(3, T - t)
            found[row, t : t + count] = probs[row, :count]
            at[row] = t + count
        passes += passed
    assert (
        torch.equal(found, expected)
        and torch.equal(parts.canvas, whole.canvas)
        and torch.equal(passes, all_passes)
    )
    assert bool((passes < T).any()) == (config.background is not None)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", EXACT)
def test_prefill_leaves_what_decoding_leaves_bit_for_bit_whatever_is_beside(shape, precision):
    config = SHAPES[shape]
    packed, images = pack(perturbed_net(config), PRECISIONS[precision]), images_of(config, 6)
    lengths = [1, 7, 31, 32, 33, config.length]
    stepped, together = Pool(config, packed, 6), Pool(config, packed, 6)
    for pool in (stepped, together):
        pool.canvas[1:], pool.known[:] = images, True
    stepped.decode(list(range(1, 7)), 0, lengths, 0)
    together.prefill(list(range(1, 7)), lengths)
    assert all(same(together.holds(slot), stepped.holds(slot)) for slot in range(1, 7))
    for slot, length in zip(range(1, 7), lengths, strict=True):
        alone = Pool(config, packed, 6)
        alone.canvas[1:] = images
        alone.prefill([slot], [length])
        assert same(alone.holds(slot), together.holds(slot))
        assert not bool(alone.S[[s for s in range(7) if s != slot]].any())
    pieces = Pool(config, packed, 6)
    pieces.canvas[1:] = images
    for positions, ends in ((0, [1, 0, 20, 32, 5, 40]), ([1, 0, 20, 32, 5, 40], lengths)):
        pieces.prefill(list(range(1, 7)), ends, positions)
    assert all(same(pieces.holds(slot), together.holds(slot)) for slot in range(1, 7))


READERS = [name for name, config in SHAPES.items() if config.patch]


def known_of(config: ModelConfig, count: int) -> Tensor:
    """Of each image another part: of the first one sub-pixel's token, of the last all."""
    tokens = torch.rand(count, config.length, generator=torch.Generator().manual_seed(3))
    known = tokens < torch.linspace(0, 1, count)[:, None]
    known[:, 5], known[-1] = True, True
    return known.repeat_interleave(config.token_size, 1)


@pytest.mark.parametrize("shape", READERS)
def test_reading_leaves_what_the_transformers_reading_leaves(shape):
    net, images = perturbed_net(SHAPES[shape]), images_of(SHAPES[shape], 5)
    known, slots = known_of(net.config, 5), torch.tensor([3, 1, 5, 2, 4])
    pool, state = Pool(net.config, pack(net, torch.float32), 5), RecurrentState(net.config, 5)
    features = pool.packed.read(net.inputs_read(images, known), pool, slots)
    expected = net.read(images, known, state, slots)
    torch.testing.assert_close(net.class_scores(features), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        (pool.S, pool.z, pool.last), (state.S, state.z, state.last), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", READERS)
def test_what_is_read_does_not_depend_on_what_else_is_read_nor_on_the_threads(shape, precision):
    config = SHAPES[shape]
    net, images, known = perturbed_net(config), images_of(config, 7), known_of(config, 7)
    packed = pack(net, PRECISIONS[precision])

    def read(rows: list[int], threads: int) -> tuple[Pool, Tensor]:
        pool, before = Pool(config, packed, 7), torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            inputs = net.inputs_read(images[rows], known[rows])
            return pool, packed.read(inputs, pool, torch.tensor(rows) + 1)
        finally:
            torch.set_num_threads(before)

    together, features = read([*range(7)], 2)
    for row in range(7):
        for threads in (1, 2):
            alone, own = read([row], threads)
            assert torch.equal(own[0], features[row]) and same(
                alone.holds(row + 1), together.holds(row + 1)
            )
            assert not bool(alone.S[[slot for slot in range(8) if slot != row + 1]].any())


def pool(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    """A change of one of the pools."""
    at = POOLS.index(name)
    return lambda pools: [*pools[:at], change(pools[at]), *pools[at + 1 :]]


def line(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change of one line of the rows."""

    def changed(rows: Tensor) -> Tensor:
        rows = rows.clone()
        rows[ROWS.index(name)] = change(rows[ROWS.index(name)])
        return rows

    return changed


def size(name: str, value: int) -> Callable[[list[int]], list[int]]:
    at = list(sizes_of(TINY, 3, 0, bf16=False)).index(name)
    return lambda sizes: [*sizes[:at], value, *sizes[at + 1 :]]


def reading() -> dict[str, Any]:
    """Arguments of `read` for two pictures."""
    net = perturbed_net(SHAPES["conditional"])
    pool = Pool(net.config, pack(net, torch.float32), 2)
    inputs = net.inputs_read(images_of(net.config, 2), known_of(net.config, 2))
    return {
        "pools": pools_of(S=pool.S, z=pool.z, last=pool.last),
        "slots": torch.tensor([1, 2]),
        "inputs": torch.cat(inputs),
        "offsets": torch.tensor([0, len(inputs[0]), len(inputs[0]) + len(inputs[1])]),
        "weights": pool.packed.weights,
        "sizes": pool.packed.sizes,
        "eps": 1e-6,
        "most": 17,
        "threads": 2,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": lambda x: x[:, 1:].contiguous()}, r"inputs must have shape \(\d+, 16\)"),
        ({"inputs": lambda x: x[0]}, r"inputs must have shape \(n, d_model\)"),
        ({"offsets": lambda x: x[1:]}, r"offsets must have shape \(3\)"),
        ({"offsets": lambda x: x + 1}, "offsets must go from 0 to"),
        (
            {"offsets": lambda x: torch.tensor([0, 0, int(x[2])])},
            "row 0 must have an input, but goes from 0 to 0",
        ),
        ({"offsets": lambda x: torch.tensor([0, 2**40, int(x[2])])}, "row 1 must have an input"),
        ({"slots": lambda x: x + 9}, "slots"),
        ({"pools": pool("S", lambda x: x[0])}, "S must have shape"),
        ({"pools": pool("last", lambda x: torch.empty(0))}, "needs the pool `last`, got none"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_invalid_arguments_of_reading_are_an_error_that_says_what_was_given(change, message):
    given, [(name, to)] = reading(), change.items()
    with pytest.raises(RuntimeError, match=message):
        torch.ops.linpix.read(*(given | {name: to(given[name])}).values())


@pytest.mark.parametrize("shape", ["tiny", "pixels", "pixels, published scale", "logits"])
def test_what_is_known_is_kept_and_log_probabilities_are_those_of_the_whole_image(shape):
    """Drawn tokens, and known ones between them: by the parallel form of what came out, in
    float64.
    """
    config = SHAPES[shape]
    net, images = perturbed_net(config), images_of(config, 4)
    pool = Pool(config, pack(net, torch.float32), 4)
    known = (torch.arange(config.length) % 5 < torch.arange(4)[:, None]).repeat_interleave(
        config.token_size, 1
    )
    pool.canvas[1:], pool.known[1:] = images, known
    found, finite, *_ = pool.decode([1, 2, 3, 4], 0, config.length, [9, 8, 7, 6])
    drawn = pool.canvas[1:]
    assert bool(finite.all()) and torch.equal(drawn[known], images[known])
    assert float((drawn[~known] == images[~known]).float().mean()) < 0.1
    assert float((found - log_probs_of(net, drawn)).abs().max()) < 1e-4


@pytest.mark.parametrize("shape", ["tiny", "pixels", "logits"])
def test_every_parameter_that_is_not_finite_is_reported(shape):
    config = SHAPES[shape]
    for parameter in range(0, perturbed_net(config).head.out_features, config.mixtures):
        net = perturbed_net(config)
        net.head.bias[min(parameter + config.mixtures, net.head.out_features) - 1] = torch.nan
        _, finite, *_ = Pool(config, pack(net, torch.float32), 2).decode([1, 2], 0, [1, 0], 0)
        assert finite.tolist() == [False, True]


def test_a_row_that_is_not_finite_is_named_and_the_others_are_as_they_were():
    packed = pack(perturbed_net(TINY), torch.float32)
    clean, sick = Pool(TINY, packed, 20), Pool(TINY, packed, 20)
    sick.S[7] = torch.nan
    slots = list(range(1, 21))
    clean.decode(slots, 0, 10, slots)
    _, finite, *_ = sick.decode(slots, 0, 10, slots)
    assert [slot for slot, fine in zip(slots, finite.tolist(), strict=True) if not fine] == [7]
    others = [slot for slot in slots if slot != 7]
    assert torch.equal(sick.canvas[others], clean.canvas[others]) and torch.equal(
        sick.S[others], clean.S[others]
    )


def test_decoding_holds_no_lock_of_pythons():
    """Another thread counts on while a quantum runs."""
    config = dataclasses.replace(PRESETS["mnist-small"], classes=0)
    pool, beats, over = (
        Pool(config, pack(perturbed_net(config), torch.float32), 64),
        [],
        threading.Event(),
    )

    def count() -> None:
        while not over.wait(0.001):
            beats.append(1)

    thread = threading.Thread(target=count)
    thread.start()
    pool.decode(list(range(1, 65)), 0, 784, 0)
    over.set()
    thread.join()
    assert len(beats) > 10


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["portable", "avx2", "avx512", "avx512vnni", "avx512bf16"])
def test_every_version_of_the_kernels_that_this_processor_runs_is_right(kernel):
    """In a process of its own, since the choice is made once: the forced test above, and the
    bitwise one.
    """
    if kernel == ops.kernel():
        return  # the tests of this file run it
    asked = python("from linpix.model import ops; print(ops.kernel())", LINPIX_KERNEL=kernel)
    if "on this processor" in asked.stderr:
        return  # this machine cannot; another one's test run can
    assert asked.stdout.strip() == kernel, asked.stderr
    chosen = "transformers_log_probabilities or bit_for_bit or plain_decode_loop"
    ended = ran(
        f"{sys.executable} -m pytest -q -x {__file__} -p no:cacheprovider -k '{chosen}'",
        env=os.environ | {"LINPIX_KERNEL": kernel},
    )
    assert ended.returncode == 0, ended.stdout[-3000:]


@pytest.mark.parametrize("shape", ["tiny", "post-norm", "odd sizes", "conditional", "pixels"])
def test_int8_is_the_transformer_with_its_weights_and_activations_rounded_to_bytes(shape):
    """In float64, which nearly always rounds to the same bytes; to bfloat16 or not at all in outer
    feed-forwards.
    """
    config = SHAPES[shape]
    net, images = perturbed_net(config), images_of(config, 3)
    pool = Pool(config, pack(net, torch.int8), 3)
    pool.canvas[1:], pool.known[:] = images, True
    found, *_ = pool.decode([1, 2, 3], 0, config.length, 0)
    exact = log_probs_of(net, images)

    fast_bf16 = bool(torch.ops.linpix.cpu_has_fast_bf16())

    def halved(module: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0].bfloat16().to(inputs[0].dtype),)

    def rounded(module: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        low, high = inputs[0].aminmax(dim=-1, keepdim=True)
        step = (high - low) / 255
        return (low + ((inputs[0] - low) / step).round() * step,)

    for index, layer in enumerate(net.layers):
        wider = (layer.up, layer.down) if index in (0, config.layers - 1) else ()
        for module in (layer.qkv, layer.out, layer.up, layer.down):
            if module not in wider:
                integers, scale = quantise(module.weight)
                module.weight.copy_(integers * scale[:, None])
                module.register_forward_pre_hook(rounded)
            elif fast_bf16:
                module.weight.copy_(module.weight.bfloat16())
                module.register_forward_pre_hook(halved)
    as_bytes = log_probs_of(net, images)
    assert float((found - as_bytes).abs().mean()) < 0.2 * float((found - exact).abs().mean())


def test_weights_as_integers_are_near_and_a_column_of_zeros_stays_one():
    weight = torch.randn(40, 30, generator=torch.Generator().manual_seed(3))
    weight[7] = 0
    integers, scale = quantise(weight)
    assert float(integers.abs().max()) == 127 and torch.equal(integers, integers.round())
    assert bool(((integers * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all())
    assert float(scale[7]) == 0 and not bool(integers[7].any())


@pytest.mark.parametrize("far", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_vanish_among_bytes(far):
    net = perturbed_net(WIDER)
    net.layers[1].up.bias[3] = far  # gelu leaves it in the row that becomes bytes
    _, finite, *_ = Pool(WIDER, pack(net, torch.int8), 1).decode([1], [0], [2], [0])
    assert finite.tolist() == [False]


def arguments(shape="tiny", **changes):
    """Those of decode_quantum for three rows of a pool of five."""
    packed = pack(perturbed_net(SHAPES[shape]), torch.float32)
    pool = Pool(SHAPES[shape], packed, 5)
    given = {
        "pools": pool.pools,
        "rows": rows_of(slot=[1, 5, 3], steps=4, start=START),
        "temperatures": torch.ones(3),
        "weights": packed.weights,
        "sizes": packed.sizes,
        "eps": 1e-6,
        "limits": [4, 4, 2],
        "patience": math.inf,
        "log_probs": True,
    }
    return given | {name: change(given[name]) for name, change in changes.items()}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rows", line("slot", lambda x: x + 3), r"slots must be in 0\.\.5, got 8 in row 1"),
        ("rows", line("slot", lambda x: x * 0 + 2), "slot 2 appears twice"),
        ("rows", lambda x: x[:5], r"rows must have shape \(6, 3\), got \(5, 3\)"),
        ("rows", lambda x: x[0], r"rows must have shape \(6, B\), got \(3\)"),
        ("rows", lambda x: x.int(), "rows must have dtype Long, got Int"),
        (
            "rows",
            line("position", lambda x: x + 62),
            "row 0 goes from 62 by 4 steps, but an image has 64 tokens",
        ),
        ("rows", line("position", lambda x: x - 1), "row 0 goes from -1"),
        ("rows", line("steps", lambda x: x - 5), "by -1 steps"),
        ("rows", line("start", lambda x: x - 1), r"start must be in 256\.\.266, got 255"),
        ("rows", line("start", lambda x: x + 11), r"start must be in 256\.\.266, got 267"),
        ("temperatures", lambda x: -x, "temperatures must be at least 0"),
        ("temperatures", lambda x: x * torch.nan, "temperatures must be at least 0"),
        (
            "pools",
            pool("canvas", lambda x: x[:, :63]),
            r"canvas must have shape \(6, 64\), got",
        ),
        ("pools", pool("canvas", lambda x: x.int()), "canvas must have dtype Byte, got Int"),
        ("pools", pool("known", lambda x: x[:5]), r"known must have shape \(6, 64\)"),
        ("pools", pool("S", lambda x: x[:5]), "S must have shape"),
        ("pools", pool("S", lambda x: x.transpose(3, 4)), "S must be contiguous"),
        ("pools", pool("z", lambda x: x.double()), "z must have dtype Float"),
        ("weights", lambda x: x[:-1], "weights must hold 13 tensors and 12 per layer"),
        ("weights", lambda x: [x[0][:300], *x[1:]], "beyond a table of 300 rows"),
        ("weights", lambda x: [*x[:2], x[2] + 2**31 - 3000, *x[3:]], "beyond a table of"),
        ("weights", lambda x: [x[0], x[1] + 1, *x[2:]], "each source must lie before t"),
        ("weights", lambda x: [*x[:13], x[13][:-1], *x[14:]], "qkv must have shape"),
        (
            "weights",
            lambda x: [*x[:13], x[13].half(), *x[14:]],
            "qkv must have dtype Float, got Half",
        ),
        (
            "weights",
            lambda x: [*x[:13], x[13].char(), *x[14:]],
            r"qkv must have shape \(192\), got \(64\)",
        ),
        (
            "weights",
            lambda x: [*x[:7], x[7].char(), *x[8:]],
            "head must have dtype Float, got Char",
        ),
        ("sizes", lambda x: x[:-1], "sizes must hold 16 integers, got 15"),
        (
            "sizes",
            size("categorical", 1),
            "a categorical head must have 256 logits, .*; got 3 and 1",
        ),
        ("sizes", lambda x: [x[0] + 1, *x[1:]], "must have shape"),
        (
            "sizes",
            lambda x: [2**15, 2**15, *x[2:]],
            "must be at most 2\\^24, got heads 32768, key_dim 32768",
        ),
        ("sizes", lambda x: [-1, *x[1:]], r"sizes\[0\] is -1"),
        (
            "sizes",
            size("following", 11),
            "following, class_rows and background are 11, 0 and -1",
        ),
        (
            "sizes",
            size("background", 0),
            "the background's table must have a multiple of 16 columns",
        ),
        (
            "sizes",
            size("token_size", 2),
            "a token must have 1 sub-pixel, or 3 with a start token and no .*; got 2",
        ),
        ("pools", pool("pairs", lambda x: torch.zeros(1)), "must be empty on the CPU"),
        ("pools", pool("tokens", lambda x: torch.zeros(6)), "must be empty on the CPU"),
        ("pools", lambda x: x[:8], "pools must hold 9 tensors, got 8"),
        ("limits", lambda x: [3, 4, 2], "row 0 takes 4 steps, but the limit is 3"),
        ("limits", lambda x: [4, 4], "limits must hold 3 integers, got 2"),
        ("limits", lambda x: [4, 4, 0], r"threads must be in 1\.\.1024, got 0"),
    ],
    ids=lambda x: x if isinstance(x, str) and x.isidentifier() else "",
)
def test_invalid_arguments_of_decoding_are_an_error_that_says_what_was_given(name, change, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.linpix.decode_quantum(*arguments(**{name: change}).values())


def test_a_pixel_cannot_look_up_its_own_channels():
    with pytest.raises(RuntimeError, match="each source must lie before t"):
        torch.ops.linpix.decode_quantum(
            *arguments("pixels", weights=lambda x: [x[0], x[1] + 1, *x[2:]]).values()
        )


def test_python_and_csrc_hand_things_over_in_the_same_order():
    header = (ROOT / "csrc/order.h").read_text()
    orders = dict(re.findall(r"struct (\w+) {\s*enum {([^}]*)}", header))
    ours = {
        "PoolOrder": POOLS,
        "RowOrder": ROWS,
        "SizeOrder": tuple(sizes_of(TINY, 3, 0, bf16=False)),
        "LimitOrder": LIMITS,
    }
    assert orders.keys() == ours.keys()
    for name, order in ours.items():
        assert (*order, "count") == tuple(re.findall(r"\w+", orders[name])), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_schemas_say_what_the_operators_do():
    given = arguments()
    torch.library.opcheck(torch.ops.linpix.decode_quantum.default, tuple(given.values()))
    shared = (given[name] for name in ("pools", "rows", "weights", "sizes", "eps"))
    torch.library.opcheck(torch.ops.linpix.prefill.default, (*shared, 4, 2))
    torch.library.opcheck(torch.ops.linpix.read.default, tuple(reading().values()))
