"""The CUDA engine: on a GPU where there is one, and everywhere by running its kernels thread by
thread on the host.

The same tests run in both places. What only a compiler can say (registers, spills) is asked of nvcc
where it is.
"""

import dataclasses
import gzip
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from linpix.model import checkpoint, choice, mixture, ops
from linpix.model import config as config_module
from linpix.model import cuda as cuda_module
from linpix.model.attention.linear import RecurrentState
from linpix.model.choice import choose
from linpix.model.config import PRESETS
from linpix.model.cuda import BUCKETS, GROUP, HALF_HEAD, OVERLAP, TILES, GpuPool, record_graph
from linpix.model.generate import generate
from linpix.model.inputs import START
from linpix.model.ops import recurrent_step_reference
from linpix.model.packing import POOLS, ROWS, rows_of, state_scale
from tests.model import test_packing
from tests.model.test_ops import assert_near_float64, step_inputs
from tests.model.test_packing import images_of, log_probs_of
from tests.nets import perturbed_net
from tools.harness.commands import ROOT, python

pytestmark = pytest.mark.slow

FAILED_RECORDING = """
import torch
from linpix.model.cuda import record_graph

before = torch.cuda.current_stream()
try:
    record_graph(torch.cuda.synchronize)  # waiting is not allowed while a graph is recorded
except RuntimeError:
    assert torch.cuda.current_stream() == before
else:
    raise AssertionError("the recording did not fail")
"""

CUDA = ROOT / "csrc/cuda"
TORCH = Path(torch.__file__).parent

TINY = PRESETS["tiny"]
# the ones that a processor decodes, but for heads whose keys are as long as their values
SAME = {
    name: dataclasses.replace(config, value_dim=config.key_dim)
    for name, config in test_packing.SHAPES.items()
    if name
    in (
        "tiny",
        "wider",
        "post-norm",
        "relu",
        "position",
        "colour",
        "no classes",
        "no start token",
        "published scale",
        "class",
        "conditional",
        "logits",
    )
}
WIDER = SAME["wider"]
SHAPES = SAME | {
    "heads of 32": dataclasses.replace(
        TINY, d_model=64, d_ff=96, heads=2, key_dim=32, value_dim=32
    ),
    "odd widths": dataclasses.replace(TINY, d_model=40, d_ff=37, heads=1, key_dim=32, value_dim=32),
    "many mixtures": dataclasses.replace(TINY, mixtures=40),
    "background": dataclasses.replace(WIDER, background=0, background_dim=20, norm="post"),
    "background, pre-norm": dataclasses.replace(TINY, background=0, background_dim=70, mixtures=40),
    "patches": dataclasses.replace(TINY, patch=4, following=((0, 1, 0), (1, 0, 0))),
    "pixels": dataclasses.replace(test_packing.SHAPES["pixels"], value_dim=16, mixtures=40),
    "pixels, conditional": dataclasses.replace(
        TINY,
        channels=3,
        tokens="pixel",
        look_ups=("previous", "row", "class"),
        neighbours=((-1, 0, 1),),
        following=((0, 1, 0), (1, 0, 2)),
        patch=4,
    ),
    "logits, conditional": dataclasses.replace(
        test_packing.SHAPES["logits, conditional"], value_dim=16, background_dim=20
    ),
}
# in heads of 32, whose state may be float16 (csrc/cuda/recall.h)
ALL = SHAPES | {
    f"{name}, heads of 32": dataclasses.replace(config, key_dim=32, value_dim=32)
    for name, config in SHAPES.items()
    if config.key_dim != 32
}
STATES = "fp32", "fp16"
FEW = 64  # rows; see csrc/cuda/kernels.h


def shapes_and_states(*shapes: str) -> list[tuple[str, str]]:
    halves = [
        name
        for name, config in ALL.items()
        if name.removesuffix(", heads of 32") in shapes and config.key_dim == 32
    ]
    return [(shape, "fp32") for shape in shapes] + [(shape, "fp16") for shape in halves]


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Where to decode: arguments for GpuPool."""
    return request.getfixturevalue("emulated").place if request.param == "emulated" else {}


def decode(
    pool: GpuPool,
    slots: list[int],
    positions: Any,
    steps: Any,
    seeds: Any,
    *,
    start: int = START,
    temperature: float = 1.0,
) -> NDArray[np.bool_]:
    """A number of positions, steps or seeds is that of all rows."""
    rows = numbers(slots, positions, steps, start=start, seed=seeds)
    return pool.decode(rows, np.full(len(slots), temperature, np.float32))[0]


def numbers(slots: Any, positions: Any, steps: Any, **lines: Any) -> NDArray[np.int64]:
    """What GpuPool takes of its rows."""
    lines.setdefault("start", START)
    return rows_of(slot=slots, position=positions, steps=steps, **lines).numpy()


def said(
    pool: GpuPool, slots: list[int], *, conditioned: bool = False, asked: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probabilities, if asked for, of whole images by the operator itself, and which of the
    images are finite.
    """
    steps = pool.config.length
    rows = rows_of(
        slot=slots,
        steps=steps,
        start=START,
        seed=slots,
        conditioned=conditioned,
    )
    found, finite, *_ = pool._operators.decode_quantum(
        pool.pools,
        rows.to(pool.device),
        torch.ones(len(slots), device=pool.device),
        pool._packed.weights,
        pool._packed.sizes,
        pool._packed.eps,
        [steps, steps, 1],
        math.inf,
        asked,
    )
    return found.cpu(), finite.cpu()


def log_probs(pool: GpuPool, images: Tensor, slots: list[int]) -> tuple[Tensor, Tensor]:
    """Of images whose every sub-pixel is known."""
    for slot, image in zip(slots, images, strict=True):
        pool.put([slot], image, torch.ones(pool.config.subpixels, dtype=torch.bool))
    return said(pool, slots)


def draw(
    pool: GpuPool, slots: list[int], seeds: list[int], *, quantum: int = 0, temperature: float = 1.0
) -> Tensor:
    """Whole images, in quanta of so many steps. With a background, the upper lines are known to be
    nothing else.
    """
    T, length, background = pool.config.subpixels, pool.config.length, pool.config.background
    if background is None:
        pool.put(slots, None, None)
    else:
        pool.put(
            slots,
            torch.full((T,), background, dtype=torch.uint8),
            torch.arange(T) // (pool.config.width * pool.config.channels) % 8 < 4,
        )
    for t in range(0, length, quantum or length):
        decode(
            pool,
            slots,
            t,
            min(quantum or length, length - t),
            seeds,
            temperature=temperature,
        )
    return pool.images(slots)


@pytest.mark.parametrize("size", ops.GPU_HEADS)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_step_agrees_with_the_reference(place, rows, tokens, size):
    """On one layer of a pool of two; the state too, free slots included."""
    device = place.get("device", "cuda")
    operator = place.get("operators", torch.ops.linpix).recurrent_step
    given = [part.to(device) for part in step_inputs(rows, tokens=tokens, D=size, M=size)]
    q, k, v, _, _, slots = given
    for dtype, close in ((torch.float32, {}), (torch.bfloat16, {"rtol": 1e-2, "atol": 1e-2})):
        pools = (
            torch.randn(80, 2, 3, size, size, device=device),
            torch.rand(80, 2, 3, size, device=device) + 1,
        )
        S, z = (pool[:, 1] for pool in pools)
        S_reference, z_reference = S.clone(), z.clone()
        parts = [part.to(dtype) for part in (q, k, v)]
        y = operator(*parts, S, z, slots, 1e-6)
        y_reference = recurrent_step_reference(*parts, S_reference, z_reference, slots, 1e-6)
        assert y.dtype == dtype
        torch.testing.assert_close(y, y_reference, **close)
        torch.testing.assert_close((S, z), (S_reference, z_reference))


@pytest.mark.parametrize("steps", [784, 3072])
def test_the_state_stays_close_to_float64_over_a_whole_image(place, steps):
    operator = place.get("operators", torch.ops.linpix).recurrent_step
    assert_near_float64(operator, steps, at_once=steps, device=place.get("device", "cuda"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("shape", "state"), shapes_and_states(*SHAPES))
def test_forced_decoding_gives_the_transformers_log_probabilities(place, shape, precision, state):
    config = ALL[shape]
    net, images = perturbed_net(config), images_of(config, 5)
    pool = GpuPool(net, 8, precision=precision, state=state, **place)
    pool.fill_with_nan(3)
    found, finite = log_probs(pool, images, [3, 1, 7, 2, 5])
    difference = found.double() - log_probs_of(net, images)
    bound = {"fp32": 1e-5 if state == "fp32" else 2e-2, "bf16": 1e-1}[precision]
    # its ink is unlikely; as on a processor, in tests/model/test_packing.py
    if config.background is not None:
        bound = {"fp32": 1e-4 if state == "fp32" else 1e-1, "bf16": 0.5}[precision]
    assert finite.all()
    assert float(difference.abs().max()) < bound
    assert abs(float(difference.mean())) < bound / 10
    assert pool.saturated() == 0


@pytest.mark.parametrize(
    "name", ["mnist-small", pytest.param("mnist-conditional", marks=pytest.mark.cuda)]
)
def test_a_float16_state_costs_the_shipped_models_nothing_that_shows(place, data, name):
    """bits/dim of a test image over all its 784 steps, where state of float16 has had time to go
    wrong.

    Emulated, one model takes half a minute, so the other one is decoded on a GPU only.
    """
    net = checkpoint.named(name).net
    raw = gzip.decompress((data / "mnist/t10k-images-idx3-ubyte.gz").read_bytes())
    image = torch.frombuffer(bytearray(raw[16 : 16 + 784]), dtype=torch.uint8)[None]
    pool = GpuPool(net, 1, precision="fp32", state="fp16", **place)
    found, _ = log_probs(pool, image, [1])
    difference = found.double().sum() - log_probs_of(net, image).sum()
    assert abs(float(difference)) / 784 / math.log(2) < 1e-4
    assert pool.saturated() == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("shape", "state"), shapes_and_states("post-norm", "background", "pixels"))
def test_an_image_does_not_depend_on_batch_slot_quantum_or_neighbours(
    place, shape, precision, state
):
    """Bit for bit, state and all: alone; among 69 others, in tiles of another shape; in quanta of 5
    and 17 steps.
    """
    pool = GpuPool(perturbed_net(ALL[shape]), 80, precision=precision, state=state, **place)
    pool.fill_with_nan(9)
    alone = draw(pool, [2], [77])[0]
    kept = pool.S[2].clone(), pool.z[2].clone()
    if pool.tokens is not None:
        assert 0 < int(pool.tokens[2]) < pool.config.subpixels
    others = [slot for slot in range(1, 71) if slot != 7]
    crowd = [*others[:30], 7, *others[30:]]
    among = draw(pool, crowd, [77 if slot == 7 else slot for slot in crowd])[30]
    assert torch.equal(among, alone)
    assert torch.equal(pool.S[7], kept[0]) and torch.equal(pool.z[7], kept[1])
    for quantum in (5, 17):
        assert torch.equal(draw(pool, [9], [77], quantum=quantum)[0], alone)
        assert torch.equal(pool.S[9], kept[0])


@pytest.mark.parametrize(
    ("shape", "rows"), [("post-norm", 140), ("relu", 70), ("odd widths", 70), ("tiny", 3)]
)
def test_no_tile_of_products_changes_a_bit(place, monkeypatch, shape, rows):
    """In tiles of 32 x 32 to 128 x 128, and of 16 rows, which each block normalises."""
    config, slots, found = SHAPES[shape], list(range(1, rows + 1)), []
    for tiles in ("few", "medium", "large"):
        monkeypatch.setenv(TILES, tiles)
        pool = GpuPool(perturbed_net(config), rows, **place)
        pool.put(slots, images_of(config, 1)[0], torch.arange(config.subpixels) < 5)
        decode(pool, slots, 0, 8, slots)
        found.append((pool.canvas, pool.S[1:], pool.z[1:]))
    for other in found[1:]:
        assert all(torch.equal(one, another) for one, another in zip(found[0], other, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("preset", ["mnist", "cifar10", "mnist-conditional"])
def test_an_image_is_the_same_in_every_bucket(preset, state):
    pool = GpuPool(perturbed_net(PRESETS[preset]), BUCKETS[-1], state=state)
    T = 2 * PRESETS[preset].width * PRESETS[preset].channels

    def begin(rows: int) -> tuple[Tensor, Tensor]:
        slots = [BUCKETS[-1], *range(1, rows)]
        pool.put(slots, None, None)
        decode(pool, slots, 0, T, [5, *range(100, 99 + rows)])
        return pool.images(slots[:1]), pool.S[BUCKETS[-1]].clone()

    image, state = begin(1)
    for before, bucket in pairwise(BUCKETS):
        for rows in {bucket, before + 1}:
            found = begin(rows)
            assert torch.equal(found[0], image) and torch.equal(found[1], state), rows


@pytest.mark.cuda
@pytest.mark.parametrize("shape", ["wider", "background"])
def test_a_recorded_graph_does_what_the_operator_does_also_after_joins_and_leaves(shape):
    net = perturbed_net(SHAPES[shape])
    recorded = GpuPool(net, 8)
    recorded.record(4)  # in variants that are timed; up to 8 rows when they are decoded first
    directly = GpuPool(net, 8, operators=torch.ops.linpix)
    for pool in (recorded, directly):
        pool.put(list(range(1, 9)), None, None)
        decode(pool, [1, 2], 0, 20, [1, 2])
        decode(pool, [1, 2, 3], [20, 20, 0], [10, 30, 13], [1, 2, 3])
        decode(pool, [3, 5, 1], [13, 0, 30], [51, 64, 34], [3, 5, 1])
    assert torch.equal(recorded.images([1, 2, 3, 5]), directly.images([1, 2, 3, 5]))
    assert all(rows.graph is not None for rows in recorded._rows.values()) and recorded.kernels
    assert all(rows.graph is None for rows in directly._rows.values())


@pytest.mark.cuda
def test_a_second_gpu_draws_what_the_first_one_does():
    """While the first one is the current one, as it is by default."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is only one")
    drawn = []
    for device in ("cuda:0", "cuda:1"):
        pool = GpuPool(perturbed_net(ALL["wider, heads of 32"]), 3, state="fp16", device=device)
        pool.record(3)
        drawn.append(draw(pool, [1, 2, 3], [4, 5, 6], quantum=16))
    assert torch.equal(*drawn)


@pytest.mark.cuda
@pytest.mark.skipif(os.environ[OVERLAP] == "0", reason="LINPIX_OVERLAP=0 forbids it")
@pytest.mark.parametrize("preset", ["mnist", "mnist-conditional"])
def test_kernels_that_overlap_compute_what_kernels_that_wait_do(monkeypatch, preset):
    found = []
    for overlap in ("1", "0"):
        monkeypatch.setenv(OVERLAP, overlap)
        pool = GpuPool(perturbed_net(PRESETS[preset]), 300, state="fp16")
        slots = list(range(1, 301))
        pool.record(300)
        assert os.environ[OVERLAP] == overlap, "no graph could be recorded with it"
        pool.put(slots, None, None)
        for rows in (slots, slots[:1]):
            decode(pool, rows, 0, 56, rows)
            found.append((pool.images(rows), pool.S[rows].clone()))
    for one, other in ((0, 2), (1, 3)):
        assert all(torch.equal(x, y) for x, y in zip(found[one], found[other], strict=True))


class Recorder:
    """In the place of CUDA graphs: what is recorded is done again by doing it again."""

    def __init__(self, fails: Callable[[], Exception | None] = lambda: None) -> None:
        self.fails, self.calls = fails, 0
        self.kept: list[tuple[str, str]] = []  # variants, as they are recorded

    def __call__(self, work: Callable[[], object]) -> Callable[[], object]:
        self.calls += 1
        self.kept.append((os.environ[TILES], os.environ[OVERLAP]))
        if error := self.fails():
            raise error
        return work


@pytest.fixture
def nothing_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has just begun."""
    monkeypatch.setattr(cuda_module, "_timed", {})


@pytest.mark.parametrize(
    ("slots", "buckets"), [(1, 1), (2, 2), (10, 5), (64, 7), (65, 8), (5000, len(BUCKETS))]
)
def test_every_number_of_rows_is_recorded_before_the_first_is_decoded(
    emulated, monkeypatch, nothing_timed, slots, buckets
):
    monkeypatch.setattr(GpuPool, "_time", lambda *_: 1.0)
    recorder = Recorder()
    pool = GpuPool(perturbed_net(TINY), slots, **emulated.place, recorder=recorder)
    pool.record(slots)
    assert recorder.calls == 6 * buckets  # in each variant
    for rows in {1, slots // 3 + 1, min(slots, 64)}:
        many = list(range(1, rows + 1))
        decode(pool, many, 0, 1, many)
    assert recorder.calls == 6 * buckets


def test_each_number_of_rows_gets_its_fastest_kernels_and_keeps_them_for_the_life_of_the_process(
    emulated, monkeypatch, nothing_timed
):
    """With invented times: the order in which tiles gain is that of rows, and up to two rows
    kernels should wait.
    """

    def seconds(pool: GpuPool, rows: Any, graph: object) -> float:
        tiles, overlap = recorder.kept[-1]
        bucket = rows.numbers.shape[1]
        alone = {"few": bucket, "medium": 3 + bucket / 4, "large": 9 + bucket / 9}[tiles]
        return alone + (overlap == "1") * (3 - bucket)

    monkeypatch.setenv(OVERLAP, "1")
    monkeypatch.setattr(GpuPool, "_time", seconds)
    pools = []
    for calls in (6, 1):  # the second time what was chosen is known
        recorder = Recorder()
        pool = GpuPool(perturbed_net(TINY), 200, **emulated.place, recorder=recorder)
        pool.record(200)
        assert recorder.calls == calls * 11
        pools.append(pool)
    assert (
        pools[0].kernels
        == pools[1].kernels
        == "few tiles without overlap up to 2 rows, few tiles up to 4 rows, medium tiles up to 32"
        " rows, large tiles up to 256 rows"
    )
    assert recorder.kept[0] == ("few", "0") and recorder.kept[-1] == ("large", "1")
    assert (os.environ[TILES], os.environ[OVERLAP]) == ("", "1")


@pytest.mark.parametrize(
    ("precision", "variables", "variants"),
    [
        ("fp32", {OVERLAP: "1"}, [("", "1"), ("", "0")]),
        ("fp32", {OVERLAP: "0"}, [("", "0")]),
        ("bf16", {OVERLAP: "1", TILES: "few"}, [("few", "1"), ("few", "0")]),
    ],
)
def test_variables_that_were_given_leave_less_to_choose(
    emulated, monkeypatch, nothing_timed, precision, variables, variants
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    recorder = Recorder()
    pool = GpuPool(perturbed_net(TINY), 1, precision=precision, **emulated.place, recorder=recorder)
    pool.record(1)
    assert recorder.kept == variants


def test_a_graph_that_cannot_be_recorded_is_tried_again_without_overlap_and_the_log_says_so(
    emulated, monkeypatch, caplog, nothing_timed
):
    monkeypatch.setenv(OVERLAP, "1")
    recorder = Recorder(
        lambda: None if os.environ[OVERLAP] == "0" else RuntimeError("invalid handle\nat 0x1")
    )
    pool, directly = (
        GpuPool(perturbed_net(TINY), 4, **emulated.place, recorder=how) for how in (recorder, None)
    )
    pool.record(4)
    assert recorder.kept[:2] == [("few", "1"), ("few", "0")]
    # the others do without it from the start
    assert {overlap for _, overlap in recorder.kept[1:]} == {"0"}
    [record] = caplog.records
    assert "could not be recorded (invalid handle); " in record.getMessage()
    assert "without overlapping kernels" in record.getMessage()
    assert torch.equal(draw(pool, [1, 2, 3], [7, 8, 9]), draw(directly, [1, 2, 3], [7, 8, 9]))


@pytest.mark.cuda
def test_a_recording_that_fails_on_a_gpu_leaves_the_stream_as_it_was():
    """In a process of its own: a failed recording breaks things in torch up to 2.11."""
    ended = python(FAILED_RECORDING)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.cuda
def test_known_pixels_are_read_while_another_model_is_loaded():
    """Waiting for the whole GPU is not allowed while any thread records a graph."""
    serving, loading = (GpuPool(perturbed_net(TINY), 4) for _ in range(2))
    numbers = rows_of(slot=[1, 2], steps=[9, 5], start=[START] * 2, seed=[0, 0]).numpy()
    with ThreadPoolExecutor(1) as thread:
        loaded = thread.submit(lambda: [loading.record(4) for _ in range(20)])
        while not loaded.done():
            serving.prefill(numbers)
        loaded.result()


def test_nothing_waits_for_the_whole_gpu():
    """A reload records graphs beside the engine: see the test above, which needs a GPU."""
    rooms = [*(ROOT / "model").rglob("*.py"), *(ROOT / "server").rglob("*.py")]
    assert [path for path in rooms if "cuda.synchronize(" in path.read_text()] == []


@pytest.mark.cuda
def test_a_graph_is_recorded_while_another_stream_is_busy():
    """A model may be loaded while another one decodes."""
    record_graph(lambda: None)  # what is created at first use may wait
    other, done, numbers = torch.cuda.Stream(), torch.cuda.Event(), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(2**32)  # cycles: some two seconds
        done.record()
    replay = record_graph(lambda: numbers.add_(1))
    assert not done.query()
    replay()
    torch.cuda.synchronize()
    assert numbers.tolist() == [3.0] * 8


@pytest.mark.parametrize(
    ("shape", "state"),
    shapes_and_states("tiny", "no start token", "background", "patches", "pixels"),
)
def test_prefill_leaves_bit_for_bit_what_decoding_leaves(place, shape, state):
    """In pieces, and chunks, that end inside and outside of groups of tokens, for rows of several
    lengths.
    """
    # more tokens than prefill takes at once
    config = dataclasses.replace(ALL[shape], height=16, width=16)
    net = perturbed_net(config)
    images, lengths = images_of(config, 5), [1, 7, 128, 150, 256]
    stepped, filled = (GpuPool(net, 5, state=state, **place) for _ in range(2))
    slots = [1, 2, 3, 4, 5]
    for pool in (stepped, filled):
        pool.fill_with_nan(3)
        for slot, image in zip(slots, images, strict=True):
            pool.put([slot], image, torch.ones(config.subpixels, dtype=torch.bool))
    decode(stepped, slots, 0, lengths, 0)
    middle = [1, 3, 100, 128, 129]  # where a second piece goes on
    filled.prefill(numbers(slots, 0, middle))
    filled.prefill(numbers(slots, middle, np.subtract(lengths, middle)))
    for slot, length in zip(slots, lengths, strict=True):
        if config.first_marginal and length == 1:
            continue  # there is no token yet, so whatever lies there is not looked at
        if pool.tokens is not None:
            assert torch.equal(filled.tokens[slot], stepped.tokens[slot])
            length = int(filled.tokens[slot])
        if config.background is not None and length:
            assert torch.equal(filled.last[slot], stepped.last[slot])
        if length:  # else whatever lies there is not looked at
            assert torch.equal(filled.z[slot], stepped.z[slot])
        if length >= (1 if state == "fp32" else GROUP):
            assert torch.equal(filled.S[slot], stepped.S[slot])
    # what is not compared above, because it is waiting, decides what follows
    for pool in (stepped, filled):
        pool.known[:] = False
        decode(pool, slots[:4], lengths[:4], 30, 3)
    assert torch.equal(filled.images(slots), stepped.images(slots))


def test_prefill_has_buffers_for_a_bounded_number_of_rows(place, monkeypatch):
    """And leaves the same, however many it takes at once."""
    net, slots, rows = perturbed_net(SHAPES["conditional"]), list(range(1, 6)), []
    pools = [GpuPool(net, 5, **place) for _ in range(2)]
    operators = pools[0]._operators
    monkeypatch.setattr(
        pools[1],
        "_operators",
        SimpleNamespace(
            prefill=lambda *given: (rows.append(given[1].shape[1]), operators.prefill(*given))
        ),
    )
    for pool, at_once in zip(pools, (256, 2), strict=True):
        monkeypatch.setattr(cuda_module, "PREFILL_ROWS", at_once)
        pool.put(
            slots, images_of(pool.config, 1)[0], torch.ones(pool.config.subpixels, dtype=torch.bool)
        )
        pool.prefill(numbers(slots, 0, [9, 1, 30, 17, 40]))
    assert rows == [2, 2, 1]
    assert all(
        torch.equal(one[1:], other[1:])
        for one, other in zip(*(pool._parts for pool in pools), strict=True)
    )


def test_log_probabilities_are_computed_only_if_they_are_asked_for(place):
    pool, drawn = GpuPool(perturbed_net(TINY), 3, **place), []
    for asked in (True, False):
        pool.put([1, 2, 3], None, None)
        found, _ = said(pool, [1, 2, 3], asked=asked)
        assert found.shape == (3, 64 if asked else 0)
        drawn.append(pool.images([1, 2, 3]))
    assert torch.equal(*drawn)


@pytest.mark.parametrize(("rows", "reached"), [(64, 256), (70, 64)])
def test_many_rows_do_not_wait_for_one_with_a_long_run_of_background(place, rows, reached):
    """Images of background. In a pass, few rows go on to the end; each of many draws 32 before it,
    and 32 after it.
    """
    config = dataclasses.replace(SHAPES["background"], height=16, width=16)
    pool, slots = GpuPool(perturbed_net(config), rows, **place), list(range(1, rows + 1))
    pool.stride = 1
    pool.put(
        slots,
        torch.full((256,), config.background, dtype=torch.uint8),
        torch.ones(256, dtype=torch.bool),
    )
    _, taken, _ = pool.decode(
        numbers(slots, 0, 256, seed=slots),
        np.ones(rows, np.float32),
        passes=1,
    )
    assert taken.tolist() == [reached] * rows


@pytest.mark.parametrize(("shape", "state"), shapes_and_states("tiny", "background"))
def test_a_taken_slot_begins_empty_whatever_lies_there(place, shape, state):
    pool = GpuPool(perturbed_net(ALL[shape]), 3, state=state, **place)
    clean = draw(pool, [1], [4])
    pool.fill_with_nan(1)
    assert torch.equal(draw(pool, [1], [4]), clean)
    pool.fill_with_nan(2)
    pool.put([2], clean[0], torch.ones(64, dtype=torch.bool))
    pool.prefill(numbers([2], [0], [40]))
    assert decode(pool, [2], [40], [24], [4]).all()


@pytest.mark.parametrize("shape", ["tiny", "background", "patches", "conditional"])
def test_rows_that_stop_after_so_many_passes_go_on_where_they_are(place, shape):
    """With some rows that were conditioned, and skip what is known; and the passes are those of
    tokens.
    """
    config, rows = SHAPES[shape], 5
    T, slots = config.subpixels, list(range(1, rows + 1))
    conditioned = np.array([False, True, False, True, False]) & bool(config.patch)
    whole, parts = (
        GpuPool(perturbed_net(config), rows, precision="fp32", **place) for _ in range(2)
    )
    # background in places, so that rows skip the layers at different times
    for pool in (whole, parts):
        for slot in slots:
            pool.put(
                [slot],
                torch.full((T,), config.background or 0, dtype=torch.uint8),
                slot * 7 > torch.arange(T) % 29,
            )
            if conditioned[slot - 1]:
                pool.read(
                    perturbed_net(config).inputs_read(
                        images_of(config, 1), pool.known[[slot]].cpu()
                    ),
                    pool,
                    torch.tensor([slot]),
                )
    ones = np.ones(rows, np.float32)
    lines = {"seed": slots, "conditioned": conditioned}
    finite, taken, all_passes = whole.decode(numbers(slots, 0, T, **lines), ones)
    assert finite.all() and taken.tolist() == [T] * rows
    at, passes = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    while at.min() < T:
        _, taken, passed = parts.decode(
            numbers(slots, at, T - at, **lines), ones, passes=parts.stride
        )
        assert passed.max() <= parts.stride and (taken >= passed).all()
        assert (taken >= np.minimum(parts.stride, T - at)).all()
        at, passes = at + taken, passes + passed
    assert torch.equal(parts.images(slots), whole.images(slots)) and np.array_equal(
        passes, all_passes
    )
    assert torch.equal(parts.S[1:], whole.S[1:])
    if whole.tokens is not None:
        assert (whole.tokens[1:].cpu().numpy() == passes + conditioned).all()
    assert (passes < T).tolist() == [
        config.background is not None or bool(read) for read in conditioned
    ]


@pytest.mark.parametrize(
    ("shape", "change", "count"),
    [
        ("patches", {}, 40),
        ("pixels, conditional", {}, 40),
        ("logits, conditional", {}, 40),
        # up to 145 inputs, more than are read at once
        ("conditional", {"height": 12, "width": 12, "patch": 1}, 12),
    ],
)
def test_reading_leaves_what_the_transformers_reading_leaves_alone_and_among_others(
    place, shape, change, count
):
    """To rounding; and bit for bit whatever else is read, in tiles of another shape too."""
    config, slots = dataclasses.replace(SHAPES[shape], **change), torch.arange(1, count + 1)
    net, images, known = (
        perturbed_net(config),
        images_of(config, count),
        test_packing.known_of(config, count),
    )
    expected, alone = RecurrentState(config, count), GpuPool(net, 1, **place)
    scores = net.read(images, known, expected, slots)
    exact, among = (
        GpuPool(net, count, precision=precision, **place) for precision in ("fp32", "bf16")
    )
    found, features = (
        pool.read(net.inputs_read(images, known), pool, slots) for pool in (exact, among)
    )
    last = expected.last if exact.last is None else exact.last.cpu()
    torch.testing.assert_close(
        (net.class_scores(found), exact.S.cpu(), exact.z.cpu(), last),
        (scores, expected.S, expected.z, expected.last),
        rtol=1e-4,
        atol=1e-4,
    )
    for row in (0, count // 2, count - 1):
        own = alone.read(net.inputs_read(images[[row]], known[[row]]), alone, torch.tensor([1]))
        assert torch.equal(own[0], features[row])
        assert all(
            torch.equal(one[1], other[row + 1])
            for one, other in zip(alone._parts, among._parts, strict=True)
        )


@pytest.mark.parametrize(
    ("shape", "state"), shapes_and_states("conditional", "pixels, conditional")
)
def test_what_was_read_is_loaded_and_decoded_on(place, shape, state):
    """Log-probabilities of what is drawn after reading, by the parallel form in float64."""
    config = ALL[shape]
    net, images, known = (
        perturbed_net(config),
        images_of(config, 3),
        torch.zeros(3, config.subpixels, dtype=torch.bool),
    )
    known[:, 30:129], known[0, :6] = True, True
    pool, start = GpuPool(net, 3, precision="fp32", state=state, **place), torch.full((3,), START)
    for slot in (1, 2, 3):
        pool.put([slot], images[slot - 1], known[slot - 1])
        pool.fill_with_nan(slot)
    pool.read(net.inputs_read(images, known), pool, torch.tensor([1, 2, 3]))
    found, _ = said(pool, [1, 2, 3], conditioned=True)
    drawn = pool.images([1, 2, 3])
    assert torch.equal(drawn[known], images[known]) and pool.saturated() == 0
    exact = mixture.log_likelihood(
        net.double().predict(net.sequences(drawn, start, known)).parameters, drawn
    )
    assert float((found - exact)[~known].abs().max()) < (1e-4 if state == "fp32" else 1e-1)


@pytest.mark.parametrize(("shape", "state"), shapes_and_states("tiny"))
def test_padding_and_rows_that_are_done_touch_nothing(place, shape, state):
    pool = GpuPool(perturbed_net(ALL[shape]), 6, state=state, **place)
    pool.put(list(range(7)), None, None)
    for part in (pool.S, pool.z):
        part.fill_(3.0)
    before = pool.S.clone(), pool.z.clone(), pool.canvas.clone()
    # one is done after 8 steps
    decode(pool, [0, 4, 0, 2, 5], [0, 0, 0, 9, 0], [8, 8, 8, 0, 24], [1, 2, 3, 4, 5])
    rest = [0, 1, 2, 3, 6]
    assert torch.equal(pool.S[rest], before[0][rest]) and torch.equal(pool.z[rest], before[1][rest])
    assert torch.equal(pool.canvas[rest], before[2][rest])
    alone = GpuPool(perturbed_net(ALL[shape]), 1, state=state, **place)
    decode(alone, [1], [0], [8], [2])
    assert torch.equal(alone.images([1]), pool.images([4]))


def test_more_rows_than_the_largest_graph_are_decoded_in_turn(place):
    slots = BUCKETS[-1] + 3
    pool = GpuPool(perturbed_net(TINY), slots, **place)
    many = list(range(1, slots + 1))
    pool.put(many, None, None)
    assert decode(pool, many, 0, 8, many).all()
    few = GpuPool(perturbed_net(TINY), 1, **place)
    few.put([1], None, None)
    decode(few, [1], [0], [8], [slots])
    assert torch.equal(pool.images([slots]), few.images([1]))


@pytest.mark.parametrize(
    ("shape", "precision", "state", "rows"),
    [
        ("deep", "bf16", "fp32", 3),
        ("deep", "fp32", "fp32", 3),
        ("logits, conditional", "bf16", "fp32", 3),
        ("wider, heads of 32", "bf16", "fp16", 70),
        ("post-norm", "fp32", "fp32", 70),
        ("background", "bf16", "fp32", 70),
        ("conditional, heads of 32", "fp32", "fp16", 70),
        ("post-norm, heads of 32", "bf16", "fp16", 70),
        ("logits, conditional", "bf16", "fp32", 70),
        ("pixels", "bf16", "fp32", 70),
    ],
)
def test_what_threads_compute_does_not_depend_on_their_order(
    emulated, shape, precision, state, rows
):
    """Forwards and backwards: phases that depend on each other have a barrier between them."""
    # a product of more stages than are on their way at once
    deep = dataclasses.replace(TINY, d_ff=600)
    config = deep if shape == "deep" else ALL[shape]
    slots, canvas, found = list(range(1, rows + 1)), images_of(config, 1)[0], []
    if config.background is not None:  # what is drawn from there on is background, too
        canvas[15:30] = config.background
    try:
        for backwards in (False, True):
            emulated.backwards(backwards)
            pool = GpuPool(
                perturbed_net(config), rows, precision=precision, state=state, **emulated.place
            )
            pool.put(slots, canvas, torch.arange(config.subpixels) < 30)
            pool.prefill(numbers([1, 2], 0, [30, 20]))
            # of few rows each draws more background than a warp has lanes
            steps = 34 if rows <= FEW else 20
            decode(pool, slots, [30, 20, *[0] * (rows - 2)], steps, range(rows))
            parts = pool.canvas, pool.S, pool.z, pool.pairs
            found.append([part for part in parts if part is not None])
    finally:
        emulated.backwards(False)
    assert not any(part.isnan().any() for part in found[0])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_scale_of_a_head_is_a_power_of_two_that_no_image_can_pass():
    for config in (
        WIDER,
        SHAPES["post-norm"],
        SHAPES["position"],
        SHAPES["class"],
        SHAPES["background"],
    ):
        net = perturbed_net(config)
        scale = state_scale(net)
        assert torch.equal(torch.exp2(scale.log2().round()), scale)
        with torch.no_grad():
            for parameter in net.inputs.parameters():
                parameter *= 30
        images, state = images_of(config, 8), RecurrentState(config, 8)
        with torch.no_grad():
            net.prefill(
                images, config.subpixels, torch.full((8,), START), state, torch.arange(1, 9)
            )
        assert float((state.S[1:].abs().amax((0, 3, 4)) / state_scale(net)).max()) < 65504


def test_what_float16_cannot_hold_is_clamped_and_counted(place):
    pool = GpuPool(perturbed_net(ALL["tiny, heads of 32"]), 1, state="fp16", **place)
    draw(pool, [1], [0])
    assert pool.saturated() == 0
    pool.scale *= 2.0**-22
    assert decode(pool, [1], [0], [64], [0]).all()
    assert pool.saturated() > 0
    assert bool(pool.S.isfinite().all())


def test_a_row_that_is_not_finite_is_reported_and_changes_no_other_row(place):
    net = perturbed_net(TINY)
    pool = GpuPool(net, 80, **place)
    slots = list(range(1, 81))
    clean = draw(pool, slots, slots)
    pool.put(slots, None, None)
    decode(pool, slots, 0, 8, slots)
    pool.fill_with_nan(40)
    assert decode(pool, slots, 8, 56, slots).tolist() == [slot != 40 for slot in slots]
    rest = [slot - 1 for slot in slots if slot != 40]
    assert torch.equal(pool.images(slots)[rest], clean[rest])


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("shape", ["tiny", "pixels"])
def test_draws_are_those_of_the_reference_engine(place, shape, temperature):
    """Not promised bit for bit: the same noise, and mixtures that agree to rounding."""
    net = perturbed_net(SHAPES[shape])
    found = draw(
        GpuPool(net, 20, precision="fp32", **place),
        list(range(1, 21)),
        list(range(20)),
        temperature=temperature,
    )
    assert (
        float((found == generate(net, seeds=range(20), temperature=temperature)).float().mean())
        > 0.9
    )


def test_slots_beyond_two_gigabytes_are_reached(place):
    """Indices into pools are 64 bits wide."""
    slots = 2**31 // (4 * TINY.layers * TINY.heads * TINY.key_dim * TINY.value_dim) + 100
    pool = GpuPool(perturbed_net(TINY), slots, **place)
    assert pool.S.nbytes > 2**31
    assert torch.equal(draw(pool, [slots], [6]), draw(pool, [1], [6]))


def test_the_limits_that_are_asked_about_are_those_of_the_kernels():
    header = (CUDA / "kernels.h").read_text()
    limits = {
        name: int(value) for name, value in re.findall(r"constexpr int (MAX_\w+) = (\d+);", header)
    }
    assert limits == {
        "MAX_D_MODEL": choice.GPU_D_MODEL,
        "MAX_DEPTH": choice.GPU_DEPTH,
        "MAX_MIXTURES": choice.GPU_MIXTURES,
        "MAX_BACKGROUND_DIM": config_module.MAX_BACKGROUND_DIM,
        "MAX_SEQUENCE_HEAD": ops.GPU_MAX_HEAD,
    }
    [chunk] = re.findall(r"SEQUENCE_CHUNK = (\d+);", (CUDA.parent / "sequence.h").read_text())
    assert int(chunk) == ops.CHUNK  # else the reference rounds otherwise
    groups = re.findall(r"constexpr int GROUP = (\d+), HALF_HEAD = (\d+);", header)
    assert groups == [(str(GROUP), str(HALF_HEAD))]
    sizes = re.findall(r"key_dim == (\d+)", (CUDA / "attention.cu").read_text())
    assert tuple(map(int, sizes)) == ops.GPU_HEADS


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "slot",
            lambda _: [9],
            r"slots must be in 0\.\.8, and only 0 may appear twice, got \[9\]",
        ),
        ("slot", lambda _: [2, 2], "only 0 may appear twice"),
        ("slot", lambda _: [], "only 0 may appear twice"),
        ("position", lambda _: [60], "64 tokens, got 8 steps from 60"),
        ("position", lambda _: [-1], "steps from -1"),
        ("start", lambda _: [267], r"start must be in 256\.\.266"),
        ("temperatures", lambda _: [-1.0], "temperatures must be at least 0"),
    ],
)
def test_rows_that_cannot_be_are_refused(emulated, name, change, message):
    pool = GpuPool(perturbed_net(TINY), 8, **emulated.place)
    slots = change(None) if name == "slot" else [1]
    count = len(slots)
    rows = numbers(slots, 0, 8)
    temperatures = np.ones(count, np.float32)
    if name == "temperatures":
        temperatures[:] = change(None)
    else:
        rows[ROWS.index(name)] = change(None)
    with pytest.raises(ValueError, match=message):
        pool.decode(rows, temperatures)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("fp16", "heads of size 32, but this model has heads of size 8; use --state fp32"),
        ("bf16", "state must be fp32 or fp16, got 'bf16'"),
    ],
)
def test_states_that_cannot_be_are_refused(emulated, state, message):
    with pytest.raises(ValueError, match=message):
        GpuPool(perturbed_net(TINY), 1, **emulated.place, state=state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"S": lambda x: x[:5]}, "S must have shape"),
        ({"S": lambda x: x.bfloat16()}, "S must have dtype Float"),
        ({"S": lambda x: x.half()}, "a float16 S needs pairs, scale and saturated"),
        ({"pairs": lambda _: torch.zeros(9, 2, 2, 8, 16)}, "and a float32 S none of them"),
        (
            {
                "S": lambda x: x.half(),
                **dict.fromkeys(("pairs", "scale", "saturated"), lambda _: torch.zeros(1)),
            },
            "a float16 S must have heads of size 32, got 8",
        ),
        ({"canvas": lambda x: x[:, 1:]}, "canvas must have shape"),
        ({"rows": lambda x: x.int()}, "rows must have dtype"),
        ({"weights": lambda x: x[:-1]}, "weights must hold"),
        ({"limits": lambda _: [65, 4, 1]}, r"most must be in 0\.\.64"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(emulated, change, message):
    pool = GpuPool(perturbed_net(TINY), 8, **emulated.place)
    given = test_packing.arguments() | {
        "pools": pool.pools,
        "weights": pool._packed.weights,
        "sizes": pool._packed.sizes,
    }
    for name, how in change.items():
        if name in POOLS:
            given |= {"pools": test_packing.pool(name, how)(given["pools"])}
        else:
            given |= {name: how(given[name])}
    with pytest.raises(RuntimeError, match=message):
        emulated.operators.decode_quantum(*given.values())


@pytest.mark.parametrize(
    "change",
    [
        {"key_dim": 24, "value_dim": 24},
        {"value_dim": 16},
        {"d_model": 520},
        {"d_model": 20},
        {"d_ff": 2049},
    ],
)
def test_shapes_without_a_kernel_are_refused_by_the_operator(emulated, change):
    config = dataclasses.replace(TINY, **change)
    with pytest.raises(
        RuntimeError, match=r"heads must be of size|d_model must be|must be at most 2048"
    ):
        draw(GpuPool(perturbed_net(config), 1, **emulated.place), [1], [0])


@pytest.mark.parametrize(
    ("shared_kib", "precision", "d_ff", "runs"),
    [
        (99, "fp32", 1056, True),
        (99, "fp32", 1057, False),  # compute capability 8.6 and 8.9
        # 8.0; and what decoding in bf16 wants at most
        (163, "fp32", 2048, True),
        (99, "bf16", 2048, True),
    ],
)
def test_a_shape_is_refused_before_it_is_loaded_where_a_block_has_no_memory_for_it(
    emulated, monkeypatch, request, shared_kib, precision, d_ff, runs
):
    """The sentence comes for what the kernels cannot run, and for nothing else."""
    config = dataclasses.replace(TINY, d_ff=d_ff)
    monkeypatch.setattr(ops, "gpu", True)
    monkeypatch.setattr(ops, "gpu_shared_bytes", lambda: shared_kib << 10)
    request.addfinalizer(lambda: emulated.shared_bytes(163 << 10))
    emulated.shared_bytes(shared_kib << 10)
    pool = GpuPool(perturbed_net(config), 80, precision=precision, **emulated.place)
    slots = list(range(1, 81))
    if runs:
        assert choose(config, precision=precision, device="cuda").device == "cuda"
        assert decode(pool, slots, 0, 1, slots).all()
    else:
        with pytest.raises(
            ValueError,
            match=(
                "cannot run this model: in fp32 it needs d_ff and heads x value_dim "
                "of at most 1056 on this GPU, but this model has 1057; use --precision "
                "bf16; or use --device cpu"
            ),
        ):
            choose(config, precision=precision, device="cuda")
        assert choose(config, precision=precision, device="auto").device == "cpu"
        with pytest.raises(RuntimeError, match="CUDA error: invalid argument"):
            decode(pool, slots, 0, 1, slots)


# --- what the compiler says
# ----------------------------------------------------------------------------------------

CEILINGS = {
    "Attend": 128,
    "Multiply": 128,
    "MultiplyMany": 128,
    "NormaliseRows": 128,
    "Embed": 64,
    "Finish": 64,
    # registers
    "RunAhead": 128,
    "KeepLast": 64,
    "Recall": 80,
    "Causal": 256,
}


NVCC = ["nvcc", "-std=c++17", f"-I{ROOT / 'csrc'}", f"-I{TORCH / 'include'}", "-DUSE_CUDA"]
NO_GPU = {35, 100}  # cudaErrorInsufficientDriver, cudaErrorNoDevice


@pytest.mark.nvcc
def test_every_function_that_the_host_may_call_returns_an_error_of_cuda_where_there_is_no_gpu(
    tmp_path,
):
    """nvcc compiles a host call of a device function without a word, into an end of the process."""
    sources = [*CUDA.glob("*.cu"), CUDA / "pass.cpp"]
    objects = [tmp_path / f"{source.name}.o" for source in sources]
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda source, to: subprocess.run(
                    [*NVCC, "-arch=sm_80", "-c", source, "-o", to], check=True
                ),
                sources,
                objects,
            )
        )
    entries = {
        source.name: set(
            re.findall(
                r" T linpix::(\w+)\(",
                subprocess.run(["nm", "-C", to], capture_output=True, text=True, check=True).stdout,
            )
        )
        for source, to in zip(sources, objects, strict=True)
    }
    assert all(entries.values()), entries
    subprocess.run(
        [*NVCC, ROOT / "csrc/tests/host_entries.cpp", *objects, "-o", tmp_path / "calls"],
        check=True,
    )
    ended = subprocess.run(
        [tmp_path / "calls"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, f"the process ended in {ended.stdout.splitlines()[-1]}"
    returned = [line.split() for line in ended.stdout.splitlines()]
    assert {int(code) for _, code in returned} <= NO_GPU, ended.stdout
    assert {name for name, _ in returned} == set().union(*entries.values()), (
        "csrc/tests/host_entries.cpp calls others"
    )


@pytest.mark.nvcc
@pytest.mark.parametrize("source", sorted(path.name for path in CUDA.glob("*.cu")))
def test_a_source_compiles_alone_without_spills_and_within_its_registers(source, tmp_path):
    """For the GPUs that it is for, and for the next ones."""
    targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in (80, 90, 100)]
    ended = subprocess.run(
        [*NVCC, *targets, "-Xptxas", "-v", "-c", CUDA / source, "-o", tmp_path / "object.o"],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert "warning" not in ended.stderr.lower(), ended.stderr
    report = re.findall(
        r"entry function '(\w+)' for '(sm_\d+)'.*?(\d+) bytes stack frame, (\d+) bytes spill"
        r" stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers",
        ended.stderr,
        re.DOTALL,
    )
    assert {sm for _, sm, *_ in report} == {"sm_80", "sm_90", "sm_100"}
    for name, sm, *bytes_, registers in report:
        [kernel] = [kernel for kernel in CEILINGS if f"{len(kernel)}{kernel}" in name]
        assert [int(n) for n in bytes_] == [0, 0, 0], (name, sm)
        trained = "bfloat16ELi32" in name  # in bfloat16, with heads of 32
        assert int(registers) <= (128 if trained else CEILINGS[kernel]), (name, sm)


@pytest.mark.nvcc
@pytest.mark.parametrize("compiler", ["there", "missing", "broken"])
def test_an_install_beside_a_torch_with_cuda_compiles_the_library_or_says_what_is_missing(
    compiler, tmp_path
):
    """With this torch's headers under the name of one that is made for CUDA; only a GPU can say
    whether it runs.
    """
    torch_folder, home, programs = tmp_path / "site/torch", tmp_path / "cuda", tmp_path / "bin"
    torch_folder.mkdir(parents=True)
    for name in ("include", "lib"):
        (torch_folder / name).symlink_to(TORCH / name)
    (torch_folder / "__init__.py").touch()
    (torch_folder / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    (home / "bin").mkdir(parents=True)
    programs.mkdir()
    for name in ("cc", "c++"):  # what is made here does not run, so it need not be fast
        (programs / name).write_text(f'#!/bin/sh\nexec {name} "$@" -O0\n')
        (programs / name).chmod(0o755)
    # there: for the kind of GPU that no other test compiles for
    nvcc = shutil.which("nvcc")
    knows = f'[ "$1" != --list-gpu-code ] && exec {nvcc} "$@" || {nvcc} "$1" | grep -x sm_120'
    if compiler != "missing":
        (home / "bin/nvcc").write_text(f"#!/bin/sh\n{knows if compiler == 'there' else 'exit 1'}\n")
        (home / "bin/nvcc").chmod(0o755)
    variables = {
        "PYTHONPATH": str(tmp_path / "site"),
        "CC": str(programs / "cc"),
        "CXX": str(programs / "c++"),
        "NVCC_APPEND_FLAGS": "-Xcicc=-O0 -Xptxas=-O0 -Xcompiler=-O0",
    }
    if compiler == "there":
        variables["PATH"] = f"{home}/bin:{os.environ['PATH']}"
    else:
        variables["CUDA_HOME"] = str(home)
    ended = subprocess.run(
        [
            sys.executable,
            "setup.py",
            "-q",
            "build_ext",
            "--build-lib",
            tmp_path / "built",
            "--build-temp",
            tmp_path / "objects",
        ],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    built = {path.name for path in (tmp_path / "built/linpix/model").iterdir()}
    assert f"liblinpix_cpu_{ops.SCHEMAS}.so" in built
    assert (f"liblinpix_cuda_{ops.SCHEMAS}.so" in built) == (compiler == "there")
    warning = re.search(
        r"LinPix will decode on the CPU. Install the CUDA 13.0 toolkit", ended.stderr
    )
    assert bool(warning) == (compiler != "there"), ended.stderr
