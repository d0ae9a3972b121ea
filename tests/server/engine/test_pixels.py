"""Models that draw one pixel per step, in slots: positions, rows and remaining work are counted in
pixels.
"""

import dataclasses

import numpy as np
import pytest
import torch

from linpix.model import checkpoint
from linpix.model.choice import choose
from linpix.model.config import PRESETS
from linpix.model.generate import generate
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.engine import Engine
from linpix.server.engine.image import State
from linpix.server.engine.job import Job
from tests.nets import perturbed_net
from tests.server.engine import drawn, submit, take

PLAIN = dataclasses.replace(
    PRESETS["tiny"],
    channels=3,
    tokens="pixel",
    look_ups=("previous", "row", "column"),
    neighbours=((0, -1, 0), (-1, 0, 1), (-1, 1, 2)),
)
KINDS = {
    "linear": PLAIN,
    "softmax": dataclasses.replace(PLAIN, attention="softmax"),
    "conditional": dataclasses.replace(
        PLAIN,
        look_ups=("previous", "row", "column", "class"),
        patch=4,
        following=((0, 1, 0), (1, 0, 1), (1, -1, 2)),
    ),
}
RANDOM = np.random.default_rng(0)
PICTURE = RANDOM.integers(0, 256, 192, dtype=np.uint8)
PREFIX, SCATTERED = np.arange(64) < 37, RANDOM.random(64) < 0.5
SCATTERED[:3] = True, True, False


def source_of(kind: str) -> checkpoint.Checkpoint:
    return checkpoint.Checkpoint(kind, perturbed_net(KINDS[kind]), {}, "", tuple("0123456789"))


ENGINES = [
    (kind, engine)
    for kind, config in KINDS.items()
    for engine in sorted({"eager", choose(config).engine})
]


@pytest.fixture(params=ENGINES, ids="-".join)
def engines(request):
    kind, engine = request.param
    source = source_of(kind)
    return lambda slots: Engine(new_decoder(source, slots, engine, "fp32"))


def completions(*seeds: int, known=PREFIX, picture=PICTURE) -> list[Job]:
    return [Job(seed=seed, canvas=picture, known=known.repeat(3)) for seed in seeds]


def test_images_are_those_of_the_plain_decode_loop(engines):
    """Drawn from the start, after a prefix, and around known pixels."""
    engine, seeds = engines(8), list(range(8))
    net, given = engine.decoder.net, torch.from_numpy(PICTURE).expand(8, -1)
    [found] = drawn(engine, [Job(seed=seed) for seed in seeds])
    # batches of another size round otherwise
    assert (found == generate(net, seeds).numpy()).mean() > 0.95
    if not net.config.patch:
        [found] = drawn(engines(8), completions(*seeds))
        expected = generate(net, seeds, known=given, prefix=37).numpy()
        known = PREFIX.repeat(3)
    else:
        [found] = drawn(engines(8), completions(*seeds, known=SCATTERED))
        known = SCATTERED.repeat(3)
        expected = generate(
            net, seeds, known=given, given=torch.from_numpy(known).expand(8, -1)
        ).numpy()
    assert np.array_equal(found[:, known], np.broadcast_to(PICTURE[known], (8, known.sum())))
    assert (found == expected).mean() > 0.95
    # other seeds are other images
    assert (found[:, ~known] == expected[:, ~known][::-1]).mean() < 0.5


def test_no_hidden_sub_pixel_is_used(engines):
    for known in (PREFIX, SCATTERED):
        hidden = np.where(known.repeat(3), PICTURE, 255 - PICTURE)
        assert np.array_equal(
            drawn(engines(1), completions(5, known=known))[0],
            drawn(engines(1), completions(5, known=known, picture=hidden))[0],
        )


def test_an_image_is_the_same_in_any_company(engines):
    a, b, c = completions(1, 2, 3), [Job(seed=9, label=4)], completions(5, known=SCATTERED)
    together = drawn(engines(6), a, b, c)
    in_turns = drawn(engines(2), a, b, c)
    alone = [
        np.concatenate([drawn(engines(1), [spec])[0] for spec in specs]) for specs in (a, b, c)
    ]
    exact = engines(1).decoder.kind == "compiled"
    for found in (*zip(together, alone, strict=True), *zip(in_turns, alone, strict=True)):
        assert np.array_equal(*found) if exact else (found[0] == found[1]).mean() > 0.9


def test_what_is_left_is_counted_in_pixels(engines):
    engine = engines(1)
    patches = engine.decoder.config.patch
    hidden = ~SCATTERED
    [image] = submit(
        engine,
        "a",
        [dataclasses.replace(job, stream=True) for job in completions(1, known=SCATTERED)],
    )
    # two pixels are known before the first hole
    slots, position, decoded, shown = engine.slots, 2, 0, []
    while engine.busy:
        report = engine.run_quantum()
        decoded += report.subpixels
        if image.state is State.DRAWING:
            now = int(slots.position[1])
            assert slots.left[1] == (hidden[now:].sum() if patches else 64 - now)
            # at most those of an image row; read ones may be passed
            assert hidden[position:now].sum() <= 8
            position = now
        shown += [(rows, canvas) for _, rows, canvas in report.rows]
    assert slots.left.tolist() == [0, 0]
    assert decoded == 3 * (64 - 2)
    assert [row for rows, _ in shown for row in rows] == [*range(1, 9)]
    for rows, canvas in shown:
        assert np.array_equal(canvas[: rows[-1] * 24], image.canvas[: rows[-1] * 24])


def test_a_pixel_of_which_only_some_channels_are_known_is_refused(engines):
    known = SCATTERED.repeat(3)
    known[0] = False
    with pytest.raises(ValueError, match="either all channels or none must be known"):
        take(engines(1).decoder, 1, Job(seed=0, canvas=PICTURE, known=known))
