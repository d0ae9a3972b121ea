"""The experiments in a form that takes seconds: what they measure, that they resume, and what they
refuse.
"""

import csv
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
import torch

from linpix.__main__ import main
from linpix.model.attention import attention_for
from linpix.model.attention.lsh import SELF
from linpix.training.experiments import ExperimentName, conduct, scaling, speech, study
from linpix.training.experiments import copy as copying
from linpix.training.experiments import duplication as duplicating
from linpix.training.experiments.learning import learn
from linpix.training.experiments.lengths import exponent
from linpix.training.experiments.record import Record, Sitting
from linpix.training.experiments.words import Duplication, TokenModel, WordLearner
from tools.harness.servers import eventually

pytestmark = pytest.mark.slow

COPY = copying.Settings(
    kinds=("linear", "lsh-2"),
    updates=120,
    drop=80,
    batch=4,
    word=6,
    layers=1,
    heads=2,
    width=16,
    feed_forward=16,
    chunk=4,
    compile=False,
)
DUPLICATION = duplicating.Settings(
    kinds=("full", "lsh-1"),
    updates=60,
    drop=60,
    batch=4,
    word=6,
    symbols=7,
    heads=2,
    width=16,
    chunk=4,
    sequences=10,
    compile=False,
)
SCALING = scaling.Settings(
    kinds=("softmax-matrix", "lsh-1"),
    shortest=64,
    longest=128,
    tokens=256,
    rounds=1,
    oftener=1,
    calls=1,
    heads=2,
    key_dim=8,
)
SPEECH = speech.Settings(width=16)
SMALL = replace(COPY, word=3, symbols=5, layers=2)
TASK = Duplication(word=3, symbols=5)


class Steps(Sitting):
    """A sitting that is over once it was asked a number of times."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    @property
    def over(self) -> bool:
        self.left -= 1
        return self.left < 0


def run(name, settings, folder, max_minutes=math.inf) -> bool:
    return conduct(name, settings, folder, command="test", max_minutes=max_minutes)


def rows(folder, table, *, without=("seconds", "bytes")):
    return [
        {name: value for name, value in row.items() if name not in without}
        for row in csv.DictReader((folder / f"{table}.csv").open())
    ]


def work(name, settings, folder, sitting) -> bool:
    """One sitting of an experiment that ends where it is told to, as by a kill: nothing is written
    at its end.
    """
    kind = study(name)
    record = Record(folder, name, settings, kind.tables)
    record.begin("test", sitting)
    return kind(settings, record).work(sitting)


# the task


def test_a_sequence_is_a_word_and_the_word_again_each_after_a_separator():
    tokens = TASK.batch(50, 1, 2)
    assert tokens.shape == (50, TASK.length) == (50, 8)
    assert torch.equal(tokens[:, :4], tokens[:, 4:])
    assert not tokens[:, 0].any()
    assert set(tokens[:, 1:4].unique().tolist()) == {1, 2, 3, 4, 5}


def test_a_batch_is_a_function_of_its_key():
    assert torch.equal(TASK.batch(4, 7, 0, 3), TASK.batch(4, 7, 0, 3))
    assert not torch.equal(TASK.batch(4, 7, 0, 3), TASK.batch(4, 7, 0, 4))
    assert not torch.equal(TASK.batch(4, 7, 0, 3), TASK.batch(4, 7, 1, 3))


def test_only_the_second_half_counts():
    """Whoever says what was said half a sequence ago is always right there, and would not be in the
    first half.
    """
    net = TokenModel(SMALL.config("linear"), TASK)
    tokens = TASK.batch(9, 0)
    net.forward = lambda given: 30.0 * torch.nn.functional.one_hot(given.roll(-1 - 4, 1), 6).float()
    loss, accuracy = net.score(tokens)
    assert (float(accuracy), float(loss)) == (1.0, pytest.approx(0.0, abs=1e-6))
    net.forward = lambda given: torch.zeros(*given.shape, 6)
    assert float(net.score(tokens)[0]) == pytest.approx(math.log(6))


@pytest.mark.parametrize("kind", ["linear", "softmax", "full"])
def test_what_is_said_next_is_a_function_of_what_was_said_before(kind):
    torch.manual_seed(0)
    net = TokenModel(SMALL.config(kind), TASK)
    tokens = TASK.batch(3, 0)
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 6
    before, after = net(tokens), net(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(-1).any()


# the attention under test is the product's


def test_full_is_softmax_attention_with_shared_queries_and_keys():
    torch.manual_seed(0)
    q, v = torch.randn(2, 3, 2, 8, 8, dtype=torch.float64)
    scores = q @ (q / q.norm(dim=-1, keepdim=True)).mT / 8**0.5 - SELF * torch.eye(8)
    scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    found = attention_for(SMALL.config("full")).parallel(0, q, q, v)
    torch.testing.assert_close(found, scores.softmax(-1) @ v)


def test_softmax_that_keeps_its_matrix_is_softmax():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 33, 8) for _ in range(3))
    torch.testing.assert_close(
        scaling.matrix_attention(q, k, v),
        attention_for(SCALING.config("softmax", 33)).parallel(0, q, k, v),
    )


# what is made of the figures


def test_an_exponent_is_the_slope_of_the_last_two_doublings():
    curve = [(2**x, 7.0 if x < 12 else 3e-9 * (2**x) ** 2) for x in range(9, 15)]
    assert exponent(curve) == "2.00 (N = 4,096 to 16,384)"
    assert exponent([(512, 1.0), (1024, 2.0)]) == "1.00 (N = 512 to 1,024)"
    assert exponent([(512, 1.0)]) == "-"


# conducting


@pytest.mark.parametrize(
    ("name", "settings"), [("copy", COPY), ("duplication", DUPLICATION), ("scaling", SCALING)]
)
def test_an_experiment_leaves_tables_a_plot_and_a_summary(tmp_path, name, settings):
    folder = tmp_path / "out"
    assert run(name, settings, folder)
    summary, plot = (folder / "summary.md").read_text(), (folder / "plot.svg").read_bytes()
    assert ElementTree.fromstring(plot).tag.endswith("svg")
    for kind in settings.kinds:
        assert re.search(rf"^\| {kind} \| [^-]", summary, re.MULTILINE), summary
        assert kind in plot.decode()
    for words in ("torch", "commit", "`test`"):
        assert words in summary
    assert not (tmp_path / "out.training").exists()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "plot.svg").unlink()
    (folder / "summary.md").unlink()
    assert run(name, settings, folder)  # complete already: nothing is measured again
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_learnt_is_in_the_table_row_by_row(tmp_path):
    assert run(
        "copy",
        replace(
            COPY,
            kinds=("softmax",),
            word=2,
            updates=400,
            drop=300,
            batch=32,
            learning_rate=1e-2,
            symbols=3,
        ),
        tmp_path / "out",
    )
    curve = [float(row["loss"]) for row in rows(tmp_path / "out", "learning")]
    assert len(curve) == 8
    assert curve[0] > 0.5 and curve[-1] < 0.05
    assert "softmax ends under 0.05 nats" in (tmp_path / "out" / "summary.md").read_text()


@pytest.mark.parametrize("steps", [1, 30, 95, 121, 200])
def test_copy_that_is_interrupted_ends_as_one_that_is_not(tmp_path, steps):
    assert work("copy", COPY, tmp_path / "whole", Steps(10**6))
    assert not work("copy", COPY, tmp_path / "parts", Steps(steps))
    assert run("copy", COPY, tmp_path / "parts")
    Record(tmp_path / "whole", "copy", COPY, copying.Study.tables)
    assert rows(tmp_path / "whole", "learning") == rows(tmp_path / "parts", "learning")
    assert len(json.loads((tmp_path / "parts/experiment.json").read_text())["sittings"]) == 2


def test_duplication_that_is_interrupted_ends_as_one_that_is_not(tmp_path):
    assert run("duplication", DUPLICATION, tmp_path / "whole")
    for steps in (20, 45, 3):  # in training, between two evaluations, before anything
        assert not work("duplication", DUPLICATION, tmp_path / "parts", Steps(steps))
    assert run("duplication", DUPLICATION, tmp_path / "parts")
    for table in ("learning", "results"):
        assert rows(tmp_path / "whole", table) == rows(tmp_path / "parts", table)


def test_rows_after_the_last_save_of_the_weights_are_made_again(tmp_path):
    """A kill between two saves leaves a table that is ahead of the weights."""

    def sitting(steps: int) -> list[dict[str, object]]:
        record = Record(tmp_path / "out", "copy", COPY, copying.Study.tables)
        record.begin("test", Steps(0))
        learn("linear", WordLearner("linear", COPY), record, Steps(steps))
        return record.tables["learning"]

    sitting(30)
    state = (tmp_path / "out.training" / "linear.pt").read_bytes()
    first = [dict(row) for row in sitting(30)]
    (tmp_path / "out.training" / "linear.pt").write_bytes(state)
    second = sitting(70)
    assert [row["update"] for row in second] == [50, 100]
    assert {**first[0], "seconds": 0} == {**second[0], "seconds": 0}


def test_scaling_goes_on_with_the_points_that_are_missing(tmp_path):
    settings = replace(SCALING, kinds=("linear",), oftener=2)
    assert not work("scaling", settings, tmp_path / "out", Steps(1))
    measured = (tmp_path / "out" / "results.csv").read_text()
    assert len(measured.splitlines()) == 2
    assert run("scaling", settings, tmp_path / "out")
    assert (tmp_path / "out" / "results.csv").read_text().startswith(measured)
    assert [(row["kind"], row["length"]) for row in rows(tmp_path / "out", "results")] == [
        ("linear", "64"),
        ("linear", "128"),
    ] * 2


def test_a_compiled_model_learns_what_the_plain_one_does(tmp_path):
    settings = replace(COPY, kinds=("softmax",), updates=50)
    for name, compile_ in (("plain", False), ("compiled", True)):
        run("copy", replace(settings, compile=compile_), tmp_path / name)
    plain, compiled = (
        float(rows(tmp_path / name, "learning")[0]["loss"]) for name in ("plain", "compiled")
    )
    assert compiled == pytest.approx(plain, rel=1e-4)


def test_a_sitting_of_no_minutes_writes_a_summary_that_says_how_to_go_on(tmp_path):
    assert not run("copy", COPY, tmp_path / "out", max_minutes=0)
    assert "Not complete yet" in (tmp_path / "out" / "summary.md").read_text()
    assert run("copy", COPY, tmp_path / "out")
    assert "Not complete yet" not in (tmp_path / "out" / "summary.md").read_text()


# refusals


def test_another_experiment_or_other_settings_or_something_else_in_the_folder_is_refused(tmp_path):
    run("copy", COPY, tmp_path / "out", max_minutes=0)
    with pytest.raises(
        ValueError,
        match="batch 4, and this one has 8; use the same settings, or give another --out",
    ):
        run("copy", replace(COPY, batch=8), tmp_path / "out")
    with pytest.raises(
        ValueError, match="an experiment with experiment copy, and this one has duplication"
    ):
        run("duplication", DUPLICATION, tmp_path / "out")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="exists and has no experiment; give a new folder"):
        run("copy", COPY, tmp_path / "else")
    with pytest.raises(ValueError, match="is a file; give a folder"):
        run("copy", COPY, tmp_path / "else" / "letter.txt")
    assert (tmp_path / "else" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("out/experiment.json", b"{"),
        ("out/experiment.json", b"{}"),
        ("out/learning.csv", b"kind,update\n"),
        ("out/learning.csv", b""),
        ("out/learning.csv", b"kind,update,seconds,loss,accuracy\nlinear,50\n"),
        ("out.training/linear.pt", b"PK"),
        ("out.training/linear.pt", b""),
    ],
)
def test_a_damaged_file_is_named_with_the_cure(tmp_path, name, content):
    assert not work("copy", COPY, tmp_path / "out", Steps(60))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"{Path(name).name} is damaged .*(another --out|delete it)"
    ):
        run("copy", COPY, tmp_path / "out")


def test_weights_of_other_settings_are_refused(tmp_path):
    work("copy", COPY, tmp_path / "one", Steps(10))
    other = replace(COPY, seed=1)
    work("copy", other, tmp_path / "two", Steps(10))
    (tmp_path / "one.training/linear.pt").replace(tmp_path / "two.training/linear.pt")
    with pytest.raises(ValueError, match="other settings; delete it"):
        run("copy", other, tmp_path / "two")


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        (COPY, {"kinds": ("quantum",)}, "kinds must be a list from .*quantum"),
        (COPY, {"kinds": ("lsh-0",)}, "lsh-0"),
        (COPY, {"kinds": ("linear", "linear")}, "none twice"),
        (COPY, {"kinds": ()}, "none"),
        (COPY, {"width": 15}, "multiple of heads.*15"),
        (COPY, {"batch": 0}, "batch must be at least 1"),
        (COPY, {"seed": 2**31}, "seed must be at least 0 and below 2.31"),
        (COPY, {"learning_rate": math.nan}, "learning_rate must be above 0"),
        (SPEECH, {"kinds": ("full",)}, "kinds must be a list from .*lstm; got 'full'"),
        (SPEECH, {"width": 15}, "multiple of heads"),
        (SPEECH, {"epochs": 0}, "epochs must be at least 1 .*got 0"),
        (SPEECH, {"learning_rate": 0.0}, "above 0, got 0.0"),
        (DUPLICATION, {"kinds": ("linear",)}, "a list from full, lsh-ROUNDS; got 'linear'"),
        (SCALING, {"kinds": ("full",)}, "full"),
        (SCALING, {"longest": 64}, "at least twice shortest"),
        (SCALING, {"memory": 2.0}, "memory.*2.0"),
        (SCALING, {"calls": 0}, "calls must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_value(settings, changes, words):
    with pytest.raises(ValueError, match=words):
        replace(settings, **changes)


def test_without_matplotlib_nothing_begins(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("linpix.training.plots.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install '\.\[train\]'"):
        run("copy", COPY, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# the command


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_command_that_is_killed_goes_on_when_called_again(tmp_path, number):
    asked = (
        "experiment copy --kinds linear --updates 100000 --batch 1 --word 2 --layers 1 --heads 1"
        " --width 4 --feed-forward 4 --chunk 4 --no-compile --device cpu --out"
    )
    command = [sys.executable, "-m", "linpix", *asked.split(), str(tmp_path / "out")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert eventually((tmp_path / "out" / "learning.csv").exists)
    time.sleep(0.5)
    process.send_signal(number)
    _, printed = process.communicate()
    assert process.returncode == (0 if number == signal.SIGTERM else -9), printed
    assert (tmp_path / "out.training" / "linear.pt").exists() == (number == signal.SIGTERM)
    command += ["--max-minutes", "0.01"]
    again = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert again.returncode == 0, again.stderr
    assert "continues it" in again.stderr
    assert len(again.stderr.strip().splitlines()) == 1  # no bar where there is no terminal
    assert "in 2 sittings" in (tmp_path / "out" / "summary.md").read_text()


@pytest.mark.parametrize("name", get_args(ExperimentName))
def test_every_setting_is_a_flag(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["experiment", name, "--help"])
    printed = capsys.readouterr().out
    for field in dataclasses.fields(study(name).settings_type):
        assert f"--{field.name.replace('_', '-')}" in printed
    for flag in ("--out", "--quick", "--max-minutes", "--device"):
        assert flag in printed


def test_flags_are_settings_and_lists_are_comma_separated(tmp_path):
    asked = "--kinds linear,lsh-2 --batch 3 --no-compile --max-minutes 0 --device cpu"
    assert main(["experiment", "copy", "--out", str(tmp_path / "out"), *asked.split()]) == 0
    kept = json.loads((tmp_path / "out/experiment.json").read_text())
    wanted = copying.Settings(kinds=("linear", "lsh-2"), batch=3, compile=False)
    assert kept["settings"] == dataclasses.asdict(wanted) | {"kinds": ["linear", "lsh-2"]}
    assert kept["sittings"][0]["command"].startswith("linpix experiment copy --out")


@pytest.mark.parametrize("name", get_args(ExperimentName))
def test_a_quick_form_has_settings_of_its_own_and_takes_flags(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind = study(name)
    asked = f"experiment {name} --quick --seed 7 --kinds lsh-4 --max-minutes 0 --device cpu"
    assert main(asked.split()) == 0
    kept = json.loads((tmp_path / f"runs/experiment-{name}-quick/experiment.json").read_text())
    wanted = kind.settings_type(**{**kind.quick_form, "seed": 7, "kinds": ("lsh-4",)})
    assert kept["settings"] == dataclasses.asdict(wanted) | {"kinds": ["lsh-4"]}
    assert wanted != kind.settings_type(seed=7, kinds=("lsh-4",))
