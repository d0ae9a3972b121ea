"""What a comparison reports, and that it stays within its budget. Clocks are made up; the networks
really run.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from linpix.model import checkpoint as checkpoints
from linpix.model import ops
from linpix.model.attention import attention_for
from linpix.model.checkpoint import Checkpoint
from linpix.model.choice import choose
from linpix.model.config import ModelConfig
from linpix.model.generate import generate, noise_of
from linpix.server.compare import comparison as compare
from linpix.server.compare.backends import Backend, CompiledBackend
from linpix.server.compare.checkpoints import find_twins
from linpix.server.compare.comparison import Comparison, ComparisonPlan
from tests.nets import net_of

pytestmark = pytest.mark.slow

CONFIG = ModelConfig(
    height=4,
    width=5,
    layers=2,
    heads=2,
    key_dim=4,
    value_dim=4,
    d_model=16,
    d_ff=16,
    mixtures=2,
    classes=3,
    neighbours=((-1, 0, 0),),
)
PIXELS = {"channels": 3, "tokens": "pixel", "neighbours": ((0, -1, 1), (-1, 0, 2))}
TICK = 0.001


class Ticks:
    """A clock that goes on by a little each time it is asked, so that every step takes as long as
    another.
    """

    def __init__(self, tick: float = TICK) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def ticking(clock: Callable[[], float] | None = None) -> dict:
    """With a processor that is never taken away: by its own clock, it has always worked longer."""
    return {"clock": clock or Ticks(), "processor": Ticks(1.0)}


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    monkeypatch.setattr(compare, "ROUNDS", 2)


def make(attention: str = "linear", name: str = "small", **changes) -> Checkpoint:
    config = dataclasses.replace(CONFIG, attention=attention, **changes)
    net = net_of(config)
    return Checkpoint(
        name,
        net,
        {"bits_per_dim": {"validation": 3.0, "test_1000": 2.0, "test_10000": 1.0}},
        "d" * 64,
        (),
    )


def finished(comparison: Comparison) -> dict:
    for _ in comparison.run():
        pass
    json.dumps(comparison.report, allow_nan=False)
    return comparison.report


def plan(**changes) -> ComparisonPlan:
    return ComparisonPlan(**{"batches": (3,), "budget_s": 1000.0} | changes)


def compared(source: Checkpoint | None = None, twins: Sequence[Checkpoint] = (), **changes) -> dict:
    """The report of a comparison on a clock that ticks. changes: of the plan."""
    return finished(Comparison(source or make(), twins, plan(**changes), **ticking()))


def kept(folder: Path, *family: Checkpoint) -> None:
    for one in family:
        checkpoints.save(folder / one.name, one.net, one.provenance, "# card\n")


def test_a_report_has_a_line_for_every_backend_and_batch():
    report = finished(Comparison(make(), (), plan(), **ticking(), command="linpix compare"))
    assert {
        "model",
        "digest",
        "machine",
        "budget_s",
        "created",
        "paper",
        "largest_logit_difference",
        "results",
    } <= report.keys()
    assert {"cpu", "cores", "threads", "torch", "platform"} <= report["machine"].keys()
    compiled = [("linear", "compiled", choose(CONFIG).precision)] if ops.compiled else []
    kinds = [
        *compiled,
        *(
            (backend, "eager", "fp32")
            for backend in ("linear", "stateful-softmax", "softmax", "lsh-1", "lsh-4")
        ),
    ]
    assert [(r["backend"], r["engine"], r["precision"], r["batch"]) for r in report["results"]] == [
        (*kind, batch) for batch in (1, 3) for kind in kinds
    ]
    for result in report["results"]:
        assert {
            "backend",
            "engine",
            "batch",
            "images_per_second",
            "seconds_per_image",
            "state_bytes",
            "step_seconds",
            "estimated",
            "positions",
            "bits_per_dim",
            "tail_over_head",
        } <= result.keys()
        rate = result["batch"] / result["seconds_per_image"]
        assert result["images_per_second"] == pytest.approx(rate, rel=1e-3)


def test_the_softmax_forms_agree():
    report = compared(backends=("softmax", "stateful-softmax"))
    assert 0 < report["largest_logit_difference"] < 1e-5


@pytest.mark.parametrize(
    "kind", [("linear", "compiled"), ("linear", "eager"), ("softmax", "eager")], ids="-".join
)
def test_a_row_that_other_work_disturbed_says_so_itself(kind, monkeypatch):
    """Another program has had its processor for two fifths of the time; the other rows say
    nothing.
    """
    if kind[1] == "compiled" and not ops.compiled:
        pytest.skip(ops.why())
    on = [0.0]  # seconds on the processor; by this clock each call of a step takes one tick

    def watched(step):
        def stepped(self, canvas, t, u):
            work = step(self, canvas, t, u)
            while True:
                on[0] += TICK * (0.6 if (self.name, self.engine) == kind else 1.0)
                try:
                    next(work)
                except StopIteration:
                    return
                yield

        return stepped

    for one in (Backend, CompiledBackend):
        monkeypatch.setattr(one, "step", watched(one.step))
    report = finished(Comparison(make(), (), plan(), clock=Ticks(), processor=lambda: on[0]))
    disturbed = {
        (result["backend"], result["engine"]) for result in report["results"] if result["disturbed"]
    }
    assert disturbed == {kind}
    for result in report["results"]:
        assert (result["note"] is not None) == result["disturbed"]
        if result["disturbed"]:
            assert result["note"] == "other work used its processor for 40% of the time"
    assert [
        note for note in report["notes"] if "of the rows marked † for up to 40% of the time" in note
    ]


def test_a_decode_that_took_longer_than_its_steps_add_up_to_is_disturbed():
    class Busy(Ticks):
        def __call__(self) -> float:
            self.tick = 2 * TICK if any(cell.decodes for cell in comparison.cells) else TICK
            return super().__call__()

    comparison = Comparison(
        make(), (), plan(backends=("stateful-softmax", "linear")), **ticking(Busy())
    )
    report = finished(comparison)
    told = {(r["engine"], r["backend"], r["batch"]) for r in report["results"] if r["disturbed"]}
    assert ("eager", "stateful-softmax", 3) in told
    assert any("a whole decode took" in (result["note"] or "") for result in report["results"])


@pytest.mark.parametrize("tokens", [{}, PIXELS], ids=["sub-pixels", "pixels"])
def test_the_baseline_draws_the_images_that_generate_draws(tokens):
    """So the decode that is timed is the real one: with the same noise, and in groups of rows as
    well.
    """
    net = make("softmax", **tokens).net
    for name, group in (("softmax", 2), ("stateful-softmax", 3)):
        backend, canvas = (
            Backend(name, net, 3),
            torch.zeros(3, net.config.subpixels, dtype=torch.uint8),
        )
        noise = noise_of(net.config, np.arange(3), np.arange(20))
        for t in range(20):
            for begin in range(0, 3, group):
                some = slice(begin, begin + group)
                for _ in backend.step(canvas[some], t, noise[some, t]):
                    pass
        assert torch.equal(canvas, generate(net, [0, 1, 2]))


@pytest.mark.kernels
def test_the_compiled_engine_draws_the_images_that_generate_draws():
    """Rows of sub-pixels at a time, and nearly everywhere the same: it rounds in another order."""
    net = make().net
    backend, canvas = CompiledBackend(net, 3), torch.zeros(3, 20, dtype=torch.uint8)
    for t in range(0, 20, backend.stride):
        list(backend.step(canvas, t, torch.zeros(3, 1, 2)))
    assert backend.stride == 5
    assert float((canvas == generate(net, [0, 1, 2])).float().mean()) > 0.8


def test_models_that_draw_pixels_are_compared_by_steps_of_a_pixel():
    report = compared(make(**PIXELS), [make("lsh", "twin", twin_of="small", **PIXELS)])
    assert (report["subpixels"], report["tokens"]) == (60, 20)
    assert all(result["images_per_second"] for result in report["results"])
    assert {
        point["position"] for result in report["results"] for point in result["step_seconds"]
    } <= set(range(20))


def test_with_less_time_the_figure_comes_from_some_positions():
    report = compared(budget_s=TICK * 2000)
    estimated = [result for result in report["results"] if result["estimated"]]
    assert estimated
    for result in estimated:
        assert result["positions"] == [step["position"] for step in result["step_seconds"]]
        assert len(result["positions"]) >= 5
        seconds = [step["seconds"] for step in result["step_seconds"]]
        estimate = np.interp(range(20), result["positions"], seconds).sum()
        assert result["seconds_per_image"] == pytest.approx(estimate, rel=1e-3)


def test_with_too_little_time_there_is_no_figure_and_the_report_says_so():
    report = compared(budget_s=TICK)
    for result in report["results"]:
        assert (
            result["images_per_second"]
            is result["seconds_per_image"]
            is result["tail_over_head"]
            is None
        )
        assert any(
            f"{result['backend']} at batch {result['batch']}" in note for note in report["notes"]
        )


@pytest.mark.parametrize("budget_s", [0.05, 0.3, 1.0])
def test_work_ends_with_the_budget(budget_s):
    clock = Ticks()
    comparison = Comparison(make(), (), plan(budget_s=budget_s), **ticking(clock))
    set_up = None
    for _ in comparison.run():
        if set_up is None and comparison.progress > 0:
            set_up = clock.now
    assert clock.now - set_up <= budget_s + 2 * compare.UNIT_S


def test_time_between_units_does_not_count():
    """A service runs live requests there."""
    clock = Ticks()
    comparison = Comparison(make(), (), plan(budget_s=20.0), **ticking(clock))
    for _ in comparison.run():
        clock.now += 1000.0
    for result in comparison.report["results"]:
        assert (
            result["images_per_second"]
            and not result["estimated"]
            and result["seconds_per_image"] < 1.0
        )


def test_units_are_short():
    clock = Ticks()
    before = clock.now
    for _ in Comparison(make(), (), plan(budget_s=5.0), **ticking(clock)).run():
        assert clock.now - before < 2 * compare.UNIT_S
        before = clock.now


def test_a_report_on_the_way_lacks_figures_and_not_keys():
    comparison = Comparison(make(), (), plan(budget_s=1.0), **ticking())
    first = comparison.report
    last = finished(comparison)
    assert first.keys() == last.keys() and first is not last
    assert all(result["images_per_second"] is None for result in first["results"])


def test_backends_that_recompute_prefixes_keep_nothing_and_stateful_softmax_keeps_all():
    report = Comparison(make(), (), plan()).report
    sizes = {result["backend"]: result["state_bytes"] for result in report["results"]}
    assert sizes == {
        "softmax": 0,
        "lsh-1": 0,
        "lsh-4": 0,
        "stateful-softmax": 4 * 2 * 2 * 20 * (4 + 4),
        "linear": 4 * 2 * 2 * 4 * (4 + 1),
    }


def test_states_that_do_not_fit_in_memory_are_refused(monkeypatch):
    keys_and_values = attention_for(dataclasses.replace(CONFIG, attention="softmax")).state_bytes
    monkeypatch.setattr(
        compare, "free_bytes", lambda: int(2 * keys_and_values / compare.MEMORY_SHARE)
    )
    report = compared(backends=("linear", "stateful-softmax"))
    missing = [
        (r["backend"], r["batch"]) for r in report["results"] if r["images_per_second"] is None
    ]
    assert missing == [("stateful-softmax", 3)]


def test_a_checkpoint_that_is_not_a_twin_is_refused():
    with pytest.raises(ValueError, match="differ in layers, d_ff"):
        Comparison(make(), [make("softmax", "other", d_ff=32, layers=3)], plan())


def test_a_model_that_skips_background_is_not_compared_and_is_never_a_twin(tmp_path):
    skips = make(name="skips", twin_of="small", background=0)
    with pytest.raises(
        ValueError, match="skips background, which other kinds of attention cannot do"
    ):
        Comparison(skips, (), plan())
    kept(tmp_path, make(), skips)
    assert find_twins(checkpoints.read(tmp_path / "small")) == []


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"backends": ("linear", "reformer")},
            "linear, stateful-softmax, softmax, lsh-1, lsh-4, got 'reformer'",
        ),
        ({"budget_s": 0.0}, "above 0, got 0.0"),
        ({"budget_s": float("nan")}, "above 0, got nan"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_its_value(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_the_twins_are_found_from_either_side(tmp_path):
    softmax = make("softmax", "small-softmax", twin_of="small")
    kept(tmp_path, make(), softmax, make("softmax", "unrelated"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("[")

    def found(name: str) -> list[str]:
        return [twin.name for twin in find_twins(checkpoints.read(tmp_path / name))]

    assert (found("small"), found("unrelated")) == (["small-softmax"], [])
    assert found("small-softmax") == ["small"]
    # trained as long as the other twin: it stands for linear
    kept(tmp_path, make("linear", "small-linear", twin_of="small"))
    assert found("small") == ["small-linear", "small-softmax"]
    assert found("small-softmax") == ["small", "small-linear"]
    softmax = checkpoints.read(tmp_path / "small-softmax")
    report = Comparison(softmax, find_twins(softmax), plan()).report
    assert report["twins"] == ["small-linear"]


def test_a_linear_twin_takes_the_place_of_the_model_so_that_bits_per_dim_are_of_equal_training():
    linear, softmax = (
        make("linear", "small-linear", twin_of="small"),
        make("softmax", "small-softmax", twin_of="small"),
    )
    linear.provenance.update(bits_per_dim={"test_10000": 0.9}, images=76_000, minutes=45.0)
    report = Comparison(make(), [linear, softmax], plan()).report
    assert {(r["backend"], r["weights"], r["bits_per_dim"]) for r in report["results"]} == {
        ("linear", "small-linear", 0.9),
        ("softmax", "small-softmax", 1.0),
        ("stateful-softmax", "small-softmax", 1.0),
        ("lsh-1", None, None),
        ("lsh-4", None, None),
    }
    assert any("small-linear saw 76,000 images in 45 minutes" in note for note in report["notes"])
    assert (
        "bits/dim was measured on 10,000 test images for small-linear and small-softmax."
        in report["notes"]
    )
    linear.provenance["bits_per_dim"] = {"validation": 0.8}
    assert any(
        "validation images for small-linear, on 10,000 test images for small-softmax" in note
        for note in Comparison(make(), [linear, softmax], plan()).report["notes"]
    )


def test_each_number_of_rounds_has_a_twin_of_its_own_found_from_every_side(tmp_path):
    family = [
        make(),
        *(
            make("lsh", f"small-lsh-{rounds}", twin_of="small", lsh_rounds=rounds)
            for rounds in (1, 4)
        ),
        make("lsh", "small-lsh-8", twin_of="small", lsh_rounds=8),
        make("lsh", "small-coarse", twin_of="small", lsh_rounds=4, lsh_chunk=10),
    ]
    kept(tmp_path, *family)
    for asked in ("small", "small-lsh-1", "small-lsh-4"):
        checkpoint = checkpoints.read(tmp_path / asked)
        report = Comparison(checkpoint, find_twins(checkpoint), plan()).report
        assert {(result["backend"], result["weights"]) for result in report["results"]} == {
            ("linear", "small"),
            ("softmax", None),
            ("stateful-softmax", None),
            ("lsh-1", "small-lsh-1"),
            ("lsh-4", "small-lsh-4"),
        }
        assert report["twins"] == sorted({"small", "small-lsh-1", "small-lsh-4"} - {asked})
    with pytest.raises(ValueError, match="lsh attention of 8 rounds, which cannot be compared"):
        Comparison(family[3], (), plan())


def test_bits_per_dim_of_lsh_come_with_the_reason_why_they_are_not_strictly_autoregressive():
    twin = make("lsh", "small-lsh-1", twin_of="small")
    report = Comparison(make(), [twin], plan()).report
    for result in report["results"]:
        assert bool(result["exception"]) == result["backend"].startswith("lsh")
    [note] = [note for note in report["notes"] if "not strictly autoregressive" in note]
    assert (
        twin.net.attention.exception in note and "lsh-1 and lsh-4" in note and "softmax" not in note
    )


def test_lsh_attention_of_a_prefix_sees_nothing_later_and_is_always_hashed_alike():
    """So what is timed could draw: parameters at t depend on what stands before t, and on nothing
    else.
    """
    net = make("lsh", lsh_rounds=4, lsh_buckets=4, lsh_chunk=3).net
    backend, noise = Backend("lsh-4", net, 2), noise_of(net.config, np.arange(2), np.arange(20))
    drawn = []
    for beyond in (0, 255):
        canvas = torch.full((2, 20), beyond, dtype=torch.uint8)
        for t in range(20):
            list(backend.step(canvas, t, noise[:, t]))
        drawn.append(canvas)
    assert torch.equal(*drawn) and len(drawn[0].unique()) > 2


def test_a_comparison_leaves_the_checkpoint_and_the_random_numbers_alone(tmp_path: Path):
    ours = make()
    before = {name: tensor.clone() for name, tensor in ours.net.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    compared(ours, budget_s=0.5)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.net.state_dict().items())
