"""Sequential Monte Carlo: answers have the distribution that enumeration gives, and depend only on their seeds."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from linpix.cli.draw import Produced, produce
from linpix.model import checkpoint, mixture, ops
from linpix.model.config import PRESETS
from linpix.model.transformer import Transformer
from linpix.server.engine.answers.plan import Plan
from linpix.server.engine.batch import Batcher
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.decoder import Decoder
from linpix.server.engine.decode.faults import Faults, with_faults
from linpix.server.engine.decode.image_spec import ImageSpec
from linpix.server.engine.decode.particles import (
    MAX_PARTICLES,
    OptionError,
    answer_seed,
    check_filter,
    effective_sample_size,
    log_mean,
    normalised,
    resampled,
)
from linpix.server.engine.messages import Submission
from linpix.server.engine.schedule.quantum import QuantumLength
from linpix.server.pictures.pictures import Occluded

CANVAS = np.array([0, 255, 0, 0, 0, 255, 0, 0], np.uint8)
KNOWN = np.array([False, True] * 4)  # the right column of 2 x 4 pixels
OUTCOMES = 9                         # that 400 answers should have five times, all others as one
QUANTILE = 26.1                      # 0.999 of chi-square with 8 degrees of freedom


def black_or_white(attention="linear") -> checkpoint.Checkpoint:
    """A model of 2 x 4 pixels whose logistics are so wide that all mass but 1 part in 100,000 lies on 0 and 255."""
    config = dataclasses.replace(PRESETS["tiny"], height=4, width=2, classes=0, attention=attention,
                                 neighbours=((-1, 0, 0), (-1, -1, 0), (-2, 0, 0)))
    wide, means = 12.0, slice(config.mixtures, 2 * config.mixtures)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(9)
        net = Transformer(config).eval()
        for parameter in net.parameters():
            parameter += 0.6 * torch.randn_like(parameter)
        net.inputs.table *= 3  # so that pixels depend on each other
        net.norm.bias.zero_()
        net.head.weight[means] *= 2 * math.exp(wide)
        net.head.bias[means] = 0
        net.head.weight[means.stop:], net.head.bias[means.stop:] = 0, wide
    return checkpoint.Checkpoint("tiny", net, {}, "", ())


def decoder(engine="compiled", slots=1024, attention="linear") -> Decoder:
    if engine == "compiled" and not ops.compiled:
        pytest.skip(ops.why())
    return new_decoder(black_or_white(attention), slots, engine, "fp32")


def planned(answers: int, particles: int, first=0) -> Plan:
    return Plan(answers=answers, seed=first, temperature=1.0, attempts=0, particles=particles)


def specs(answers: int, particles: int, first=0) -> list[ImageSpec]:
    return planned(answers, particles, first).specs(Occluded(CANVAS * KNOWN, KNOWN))


def answers_of(drawn: Produced) -> list[tuple[bytes, float, float]]:
    return [(drawn.images[index].tobytes(), *estimate) for index, estimate in drawn.estimates.items()]


def enumerated(net: Transformer) -> tuple[dict[bytes, float], float]:
    """The probability of each completion given all known pixels, and the log-probability of these."""
    hidden = np.flatnonzero(~KNOWN)
    images = np.tile(CANVAS, (2**len(hidden), 1))
    images[:, hidden] = np.array(list(itertools.product((0, 255), repeat=len(hidden))), np.uint8)
    with torch.inference_mode():
        log_probs = mixture.log_likelihood(net(torch.from_numpy(images)), torch.from_numpy(images)).double().numpy()
    assert np.exp(log_probs[:, ~KNOWN].sum(1)).sum() > 1 - 1e-5, "other values have next to no probability"
    joint = np.exp(log_probs.sum(1))
    shares = dict(zip([image.tobytes() for image in images], joint / joint.sum(), strict=True))
    return shares, math.log(joint.sum())


def chi_square(drawn: list[bytes], shares: dict[bytes, float]) -> float:
    """Outcomes that are expected less than five times count as one."""
    expected = np.array([*shares.values()]) * len(drawn)
    seen = np.array([drawn.count(image) for image in shares])
    rare = expected < 5
    expected, seen = (np.append(part[~rare], part[rare].sum()) for part in (expected, seen))
    assert len(seen) == OUTCOMES and len(drawn) == seen.sum()
    return float(((seen - expected) ** 2 / expected).sum())


# --- the distribution ---

def test_answers_are_distributed_as_enumeration_says_and_those_in_raster_order_are_not():
    """Of 64 particles the bias, of order 1/64, is far below what 400 answers show."""
    model = decoder(slots=2048)
    shares, _ = enumerated(model.net)
    drawn = produce(Batcher(model), specs(400, 64))
    sizes = [size for _, size, _ in answers_of(drawn)]
    assert np.mean(sizes) < 32, "most of them were resampled"
    assert chi_square([image for image, *_ in answers_of(drawn)], shares) < QUANTILE
    plain = produce(Batcher(model), specs(400, 0))
    assert chi_square([image.tobytes() for image in plain.images], shares) > 10 * QUANTILE


@pytest.mark.parametrize(("engine", "attention"), [("compiled", "linear"), ("eager", "linear"), ("eager", "softmax")])
@pytest.mark.parametrize("particles", [2, 8])
def test_the_evidence_is_unbiased(engine, attention, particles):
    model = decoder(engine, attention=attention)
    _, log_evidence = enumerated(model.net)
    drawn = produce(Batcher(model), specs(2000 // particles * 2, particles))
    found = np.exp([evidence for _, _, evidence in answers_of(drawn)] - np.array(log_evidence))
    assert found.std() > 0.05, "it is an estimate"
    assert abs(found.mean() - 1) < 3 * found.std() / math.sqrt(len(found))


# --- what an answer depends on ---

@pytest.mark.parametrize(("engine", "attention"), [("compiled", "linear"), ("eager", "linear"), ("eager", "softmax")])
def test_the_length_of_a_quantum_changes_nothing(engine, attention, monkeypatch):
    model, found = decoder(engine, 64, attention), []
    for quantum in (1, 2, 8):
        monkeypatch.setattr(QuantumLength, "steps", lambda self, images, quantum=quantum: quantum)
        found.append(answers_of(produce(Batcher(model), specs(8, 8))))
    assert found[0] == found[1] == found[2]
    assert len({evidence for *_, evidence in found[0]}) == 8


def finish(batcher: Batcher, arrivals: list[Submission], quanta=1) -> dict[str, list[tuple[bytes, float, float]]]:
    """The answers of each request; one request arrives after so many quanta."""
    found: dict[str, list[tuple[bytes, float, float]]] = {}
    waiting, count = list(arrivals), 0
    while waiting or batcher.busy:
        if waiting and count % quanta == 0:
            batcher.submit(waiting.pop(0))
        report = batcher.run_quantum()
        assert not report.failed
        for image in sorted(report.finished, key=lambda image: image.index):
            if image.estimate is not None:
                found.setdefault(image.request, []).append((image.canvas.tobytes(), *image.estimate))
        count += 1
    assert not batcher.scheduler.running and not batcher._filters
    return found


@pytest.mark.parametrize("quanta", [1, 3])
def test_the_same_bytes_in_any_company(quanta, monkeypatch):
    """Of filters that begin at other times, and wait for slots, beside images that are drawn in raster order."""
    monkeypatch.setattr(QuantumLength, "steps", lambda self, images: 1)
    requests = {"a": specs(2, 6), "b": specs(3, 0, 50), "c": specs(1, 12, 9), "d": specs(4, 2, 70), "e": specs(2, 5, 3)}
    alone = {name: answers_of(produce(Batcher(decoder(slots=12)), given)) for name, given in requests.items()}
    found = finish(Batcher(decoder(slots=12)), [Submission(name, given) for name, given in requests.items()], quanta)
    assert found == {name: answers for name, answers in alone.items() if answers}
    assert {name: len(answers) for name, answers in found.items()} == {"a": 2, "c": 1, "d": 4, "e": 2}


@pytest.mark.parametrize("engine", ["compiled", "eager"])
def test_quanta_that_throw_are_run_again_from_where_resampling_has_put_the_particles(engine, monkeypatch):
    monkeypatch.setattr(QuantumLength, "steps", lambda self, images: 1)
    expected = answers_of(produce(Batcher(decoder(engine, 64)), specs(4, 8)))
    broken = Batcher(with_faults(decoder(engine, 64), Faults("glitch:every=2")))
    found = answers_of(produce(broken, specs(4, 8)))
    if engine == "compiled":
        assert found == expected
    else:  # parts of a batch round differently
        assert [image for image, *_ in found] == [image for image, *_ in expected]
        np.testing.assert_allclose([rest for _, *rest in found], [rest for _, *rest in expected], rtol=1e-3)


def test_a_particle_whose_quantum_throws_ends_its_request_alone():
    batcher = Batcher(with_faults(decoder(slots=16), Faults(f"throw:image={specs(1, 8)[0].seed}")))
    batcher.submit(Submission("bad", specs(1, 8)))
    batcher.submit(Submission("good", specs(1, 8, 1)))
    reports = []
    while batcher.busy:
        reports.append(batcher.run_quantum())
    assert [request for report in reports for request in report.failed] == ["bad"]
    assert [image.request for report in reports for image in report.finished if image.estimate] == ["good"]
    assert not batcher.scheduler.running and not batcher._filters


def test_cancelling_frees_all_slots_of_a_filter_and_the_next_one_is_not_disturbed(monkeypatch):
    monkeypatch.setattr(QuantumLength, "steps", lambda self, images: 1)
    batcher = Batcher(decoder(slots=8))
    expected = answers_of(produce(Batcher(decoder(slots=8)), specs(1, 8, 5)))
    for quanta in range(1, 8):
        batcher.submit(Submission("left", specs(2, 8)))
        for _ in range(quanta):
            batcher.run_quantum()
        batcher.cancel("left")
        assert finish(batcher, [Submission("next", specs(1, 8, 5))]) == {"next": expected}
        assert len(batcher.scheduler.free) == 8


# --- the parts ---

@pytest.mark.parametrize(("engine", "attention"), [("compiled", "linear"), ("eager", "linear"), ("eager", "softmax")])
def test_a_branch_goes_on_as_its_source_would(engine, attention):
    model = decoder(engine, 3, attention)
    model.take([1, 2, 3], [ImageSpec(seed=seed) for seed in (1, 2, 3)])
    model.quantum([1, 2, 3], [0] * 3, [5] * 3)
    model.branch(1, [2, 3])
    model.seed[2] = 1
    model.quantum([1, 2, 3], [5] * 3, [3] * 3)
    assert np.array_equal(model.image(1), model.image(2))
    assert np.array_equal(model.image(1)[:5], model.image(3)[:5])


def test_resampling_draws_each_as_often_as_its_weight_says_within_one():
    rng = np.random.default_rng(0)
    for _ in range(50):
        weights = normalised(rng.normal(0, 3, 12))
        counts = np.array([np.bincount(resampled(weights, u, 12), minlength=12) for u in (np.arange(200) + 0.5) / 200])
        assert (counts.sum(1) == 12).all() and (np.abs(counts - 12 * weights) < 1).all()
        np.testing.assert_allclose(counts.mean(0), 12 * weights, atol=0.01)


def test_a_particle_without_weight_is_never_drawn():
    for u in (2**-24, 0.5, 1 - 2**-24):
        assert resampled(np.array([0.0, 0.5, 0.0, 0.5, 0.0]), u, 4).tolist() == [1, 1, 3, 3]
        assert resampled(np.array([0.0, 0.0, 1.0]), u, 1).tolist() == [2]


def test_sizes_and_means_of_weights():
    assert effective_sample_size(normalised(np.zeros(7))) == pytest.approx(7)
    assert effective_sample_size(normalised(np.array([0.0, -1e4, -1e4]))) == pytest.approx(1)
    assert log_mean(np.log([1e-300, 3e-300])) == pytest.approx(math.log(2e-300))


def test_particles_have_seeds_that_nothing_else_has():
    drawn = [one for seed in (0, 7, 2**53 - 1) for one in planned(1, MAX_PARTICLES, seed).specs()]
    seeds = [one.seed for one in drawn]
    assert len(set(seeds)) == 3 * MAX_PARTICLES and min(seeds) >= 2**53 and max(seeds) < 2**63
    assert {answer_seed(one) for one in drawn} == {0, 7, 2**53 - 1}


def test_models_and_pictures_that_need_no_filter_are_told_so():
    model = decoder(slots=1).checkpoint
    check_filter(model, "cpu", KNOWN)
    for known in (np.ones(8, bool), np.zeros(8, bool), np.arange(8) < 5):
        with pytest.raises(OptionError, match="known pixels after the first hole, but there are none"):
            check_filter(model, "cpu", known)
    background = {"background": 0, "background_dim": 16, "look_ups": ("previous", "row", "column", "class")}
    for options, words in ((background, "skips the background"), ({**background, "patch": 4, "following": ((0, 1, 0),)},
                                                                  "reads all known pixels before it draws")):
        net = Transformer(dataclasses.replace(PRESETS["tiny"], **options))
        source = checkpoint.Checkpoint("other", net, {}, "", tuple("0123456789"))
        with pytest.raises(OptionError, match=words):
            check_filter(source, "cpu", np.arange(64) % 2 > 0)
    with pytest.raises(OptionError, match="decodes on a GPU"):
        check_filter(model, "cuda", KNOWN)
