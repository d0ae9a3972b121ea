"""The experiment `speech` in a form that takes seconds: recordings by espeak-ng, models, error
rates, and resuming.
"""

import json
import re
from dataclasses import replace
from shutil import which
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from linpix.__main__ import main
from linpix.training.experiments import speech as speaking
from linpix.training.experiments.lengths import in_a_process
from linpix.training.experiments.speech import BothWays, Listener, Recogniser, Speech
from linpix.training.experiments.utterances import (
    BANDS,
    OTHER_VOICES,
    RATE,
    VOICES,
    edits,
    spoken,
    utterance,
    utterances,
)
from tests.training.test_experiments import Steps, rows, run, work

pytestmark = pytest.mark.slow
speaks = pytest.mark.skipif(
    which("espeak-ng") is None, reason="needs espeak-ng: apt-get install espeak-ng"
)

KINDS = ("linear", "softmax", "lsh-2", "lstm")
TINY = speaking.Settings(
    kinds=("linear", "lstm"),
    recordings=12,
    held_out=4,
    epochs=3,
    batch=4,
    layers=1,
    heads=2,
    width=16,
    hidden=8,
    shortest=16,
    longest=32,
    rounds=1,
)


# recordings


@speaks
def test_phonemes_are_those_spoken_without_marks_of_stress_and_length():
    samples, phonemes = spoken("the tiny bird", "m1", 160, 50)
    assert phonemes == ["ð", "ə", "t", "aɪ", "n", "i", "b", "ɜ", "d"]  # noqa: RUF001
    assert 0.5 < len(samples) / RATE < 2
    assert 0.1 < samples.abs().max() <= 1


@speaks
def test_a_recording_is_a_function_of_its_key_and_voices_differ():
    (one, said), (again, _) = (utterance(7, 0, 3, voices=VOICES) for _ in range(2))
    assert torch.equal(one, again)
    other, said_by_other = utterance(7, 0, 3, voices=OTHER_VOICES)
    assert said == said_by_other
    assert one.shape != other.shape or not torch.equal(one, other)
    assert not set(VOICES) & set(OTHER_VOICES)
    many = utterances(3, 7, 0, voices=VOICES)
    assert torch.equal(utterance(7, 0, 2, voices=VOICES)[0], many[2][0])
    assert len({tuple(said) for _, said in many}) == 3


def test_error_rates_count_the_fewest_edits():
    assert edits([1, 2, 3], [1, 2, 3]) == 0
    assert edits([1, 2, 3], [1, 3]) == edits([1, 3], [1, 2, 3]) == edits([1, 2, 3], [1, 4, 3]) == 1
    assert edits([], [1, 2]) == edits([1, 2], []) == 2
    assert edits([1, 2, 3, 4, 5], [2, 3, 6, 5, 7]) == 3


# models


def test_both_ways_is_a_bidirectional_lstm_over_packed_sequences():
    torch.manual_seed(0)
    ours, theirs = BothWays(3, 5), nn.LSTM(3, 5, bidirectional=True, batch_first=True)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            own = ours.back if name.endswith("_reverse") else ours.ahead
            weight.copy_(dict(own.named_parameters())[name.removesuffix("_reverse")])
    x, lengths = torch.randn(3, 9, 3), torch.tensor([9, 1, 6])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    expected, _ = nn.utils.rnn.pad_packed_sequence(theirs(packed)[0], batch_first=True)
    real = (torch.arange(9) < lengths[:, None])[..., None]
    torch.testing.assert_close(ours(x, lengths) * real, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind):
    torch.manual_seed(0)
    net = Recogniser(TINY, kind, 7).eval()
    frames, lengths = torch.randn(2, 90, BANDS), torch.tensor([90, 41])
    frames[1, 41:] = 0
    scores, tokens = net(frames, lengths)
    assert tokens.tolist() == [45, 21]
    alone, _ = net(frames[1:, :41], lengths[1:])
    torch.testing.assert_close(scores[1:, :21], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "softmax", "lstm"])
def test_the_first_token_hears_the_last_frame_and_the_last_token_the_first_one(kind):
    torch.manual_seed(0)
    net = Recogniser(TINY, kind, 7).eval()
    frames, lengths = torch.randn(1, 40, BANDS), torch.tensor([40])
    before, _ = net(frames, lengths)
    for changed, hearing in ((-1, 0), (0, -1)):
        other = frames.clone()
        other[:, changed] += 10
        assert not torch.equal(net(other, lengths)[0][:, hearing], before[:, hearing])


def test_the_loss_is_of_all_ways_to_say_the_phonemes():
    """Three tokens, uniform over blank and one phoneme: said once in 6 of 8 paths."""
    net = Recogniser(TINY, "linear", 1)
    net.forward = lambda frames, lengths: (torch.full((1, 3, 2), 0.5).log(), torch.tensor([3]))
    loss = net.loss((torch.zeros(1, 6, BANDS), torch.tensor([6]), [[1]]))
    assert float(loss) == pytest.approx(-np.log(6 / 8), rel=1e-5)


@speaks
def test_an_epoch_has_every_recording_once_in_another_order_and_held_out_sentences_are_others():
    speech = Speech(TINY)
    first, second = (
        [id(one) for batch in speech.batches(epoch) for one in batch] for epoch in (0, 1)
    )
    assert sorted(first) == sorted(second) == sorted(map(id, speech.train))
    assert first != second
    assert [list(map(id, batch)) for batch in speech.batches(0)] == [
        first[at : at + 4] for at in (0, 4, 8)
    ]
    sets = [{tuple(said) for _, said in some} for some in (speech.train, *speech.held_out)]
    assert len(set.union(*sets)) == sum(map(len, sets)) == 20


# conducting


@speaks
def test_a_tiny_run_learns(tmp_path):
    settings = replace(
        TINY,
        kinds=("linear",),
        recordings=96,
        held_out=8,
        epochs=20,
        batch=8,
        layers=2,
        width=64,
        learning_rate=3e-3,
    )
    assert run("speech", settings, tmp_path / "out")
    errors = [float(row["sentences"]) for row in rows(tmp_path / "out", "results")]
    assert errors[-1] < 0.8 < errors[9]


def test_a_sequence_of_twice_the_length_needs_twice_the_memory_of_linear_attention():
    """Measured in processes of their own, as the experiment does. One sequence of 3,200 frames,
    then two of 1,600.
    """
    settings = replace(TINY, width=64, layers=2, longest=3200)
    long, short = (
        in_a_process(speaking.update_of, (settings, "linear", length), Steps(1), "linear")[1]
        for length in (3200, 1600)
    )
    assert 2**20 < short < long
    assert 1.5 < long / short < 2.5


@speaks
def test_it_leaves_tables_a_plot_and_a_summary_with_the_papers_figures(tmp_path):
    settings = replace(TINY, kinds=("linear", "lsh-2", "lstm"))
    assert run("speech", settings, tmp_path / "out")
    summary, plot = ((tmp_path / "out" / name).read_text() for name in ("summary.md", "plot.svg"))
    for kind, paper in (("linear", "8.08 | 824"), ("lsh-2", "- | -"), ("lstm", "10.94 | 1,047")):
        assert re.search(
            rf"^\| {kind} \| 0.0\d million \| 3 \| [\d.]+ \| [\d.]+ \| \d+ \|"
            rf" {re.escape(paper)} \|",
            summary,
            re.MULTILINE,
        ), summary
        assert kind in plot
    assert [(row["kind"], row["length"]) for row in rows(tmp_path / "out", "lengths")] == [
        (kind, length) for length in ("16", "32") for kind in settings.kinds
    ]
    assert [row["epoch"] for row in rows(tmp_path / "out", "results")] == ["1", "2", "3"] * 3
    assert not (tmp_path / "out.training").exists()


@speaks
def test_one_that_is_interrupted_ends_as_one_that_is_not(tmp_path):
    assert work("speech", TINY, tmp_path / "whole", Steps(10**6))
    # between two lengths, in the first epoch, at its end, in a later one
    for steps in (2, 3, 6, 9):
        assert not work("speech", TINY, tmp_path / "parts", Steps(steps))
    assert run("speech", TINY, tmp_path / "parts")
    for table in ("learning", "results", "lengths"):
        assert rows(tmp_path / "whole", table) == rows(tmp_path / "parts", table)
    assert len(json.loads((tmp_path / "parts/experiment.json").read_text())["sittings"]) == 5


@pytest.mark.parametrize(("kind", "of_adam"), [("linear", 1), ("lstm", 0.5)])
def test_the_learning_rate_is_halved_and_falls_to_zero_at_the_end(kind, of_adam):
    settings = replace(TINY, epochs=9, learning_rate=1.0)
    learner = Listener(kind, SimpleNamespace(settings=settings, numbers={"a": 1}, batches=len))
    learner.halvings = 2
    rates = []
    for learner.update in (0, 17, 18, 26, 27):
        rates.append(learner.learning_rate)
    assert rates == pytest.approx([of_adam * rate for rate in (0.25, 0.25, 0.25, 0.25 / 9, 0)])


@speaks
def test_halvings_are_counted_from_the_rows(tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr(
        speaking, "learn", lambda kind, learner, *_: counted.append(learner.halvings) or True
    )
    errors = iter([0.4, 0.1, 0.4, 0.1, 0.3, 0.1, 0.3, 0.1])  # of sentences, and of voices
    monkeypatch.setattr(Speech, "error_rate", lambda *_: next(errors))
    settings = replace(TINY, kinds=("linear",), epochs=4, shortest=32)
    assert work("speech", settings, tmp_path / "out", Steps(10**6))
    assert counted == [0, 0, 1, 1]


def test_without_espeak_the_error_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["experiment", "speech", "--out", str(tmp_path / "out"), "--device", "cpu"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.endswith("and it is not installed; run: apt-get install espeak-ng")
