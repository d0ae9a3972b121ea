"""make gpu-check without a GPU: what it writes down, how it goes on after it was ended, and all of
it in tiny form.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from linpix.model import ops
from tools.benchmarks import cuda
from tools.gpu_check import (
    OLDER,
    Check,
    Step,
    calls,
    decision,
    examine,
    newer_than_driver,
    report,
)
from tools.harness.commands import ROOT
from tools.harness.servers import HANG_S, eventually
from tools.results import Results

pytestmark = pytest.mark.slow

WELL, BADLY = [
    [sys.executable, "-c", f"print('one'); print('two'); raise SystemExit({status})"]
    for status in (0, 3)
]
WITHOUT_OVERLAP_ONLY = [
    sys.executable,
    "-c",
    "import os; raise SystemExit(os.environ['LINPIX_OVERLAP'] != '0')",
]
TELL = [sys.executable, "-c", "import os; print('LINPIX_OVERLAP is', os.environ['LINPIX_OVERLAP'])"]


def steps(check: Check) -> dict[str, tuple[str, str]]:
    """How each step ended, and its last line."""
    return {
        line["step"]: (line["ended"], line["printed"])
        for line in Results(check.results.path).known
        if "step" in line
    }


def test_a_measurement_is_a_line_at_once_and_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "out/results.jsonl"
    results = Results(path)
    results.measure(lambda: {"us": 1.5}, part="machine")
    results.measure(lambda: {"us": {64: 2.5}}, part="decode", batch=64)
    assert [json.loads(line) for line in path.read_text().splitlines()] == results.known
    path.write_bytes(path.read_bytes() + b'{"part": "decode", "batch": 40')
    later = Results(path)
    assert later.known == results.known == Results(path).known
    later.measure(lambda: pytest.fail("it is known"), part="decode", batch=64)
    later.measure(lambda: {"us": 3.5}, part="decode", batch=4096)
    assert Results(path).find(part="decode", batch=4096) == {
        "part": "decode",
        "batch": 4096,
        "us": 3.5,
    }


def test_each_step_is_written_down_when_it_ends_and_one_that_ended_well_is_not_repeated(tmp_path):
    check = Check(tmp_path)
    assert check.run(Step("first", WELL, 60))
    assert steps(check) == {"first": ("well", "two")}
    assert not check.run(Step("second", BADLY, 60))
    assert steps(check)["second"] == ("exit status 3", "two")
    assert check.failed == ["second: exit status 3"]
    assert "| second | exit status 3 |" in (tmp_path / "report.md").read_text()
    again = Check(tmp_path)
    assert (
        again.run(Step("first", BADLY, 60))
        and again.run(Step("second", WELL, 60))
        and not again.failed
    )
    assert (tmp_path / "log.txt").read_text() == "one\ntwo\n" * 3


def test_a_step_that_hangs_is_ended_with_what_it_started_and_the_next_one_runs(tmp_path):
    check = Check(tmp_path)
    hangs = (
        "import subprocess, sys, time; child = subprocess.Popen(['sleep', '600']); print(child.pid,"
        " flush=True);time.sleep(600)"
    )
    assert not check.run(Step("hangs", [sys.executable, "-c", hangs], 3))
    ended, child = steps(check)["hangs"]
    assert ended == "ran out of time, 3 s"
    assert eventually(lambda: not running(int(child)))
    assert check.run(Step("next", WELL, 60))
    check.until = time.monotonic()
    assert not check.run(Step("late", WELL, 60)) and steps(check)["late"] == (
        "no time was left for it",
        "",
    )


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("decoding", "told"), [(WITHOUT_OVERLAP_ONLY, "0"), (WELL, "1")])
def test_where_decoding_fails_only_with_overlap_all_that_follows_runs_without(
    tmp_path, monkeypatch, decoding, told
):
    """In later calls too."""
    monkeypatch.setenv("LINPIX_OVERLAP", "1")
    older = [Step(f"decoding {how}", decoding, 60, variables) for how, variables in OLDER.items()]
    examine(Check(tmp_path), [Step("decoding", decoding, 60), *older, Step("measure", TELL, 60)])
    check = Check(tmp_path)
    examine(check, [Step("measure in a later call", TELL, 60)])
    found = steps(check)
    assert found["measure"][1] == found["measure in a later call"][1] == f"LINPIX_OVERLAP is {told}"
    assert ("decoding without overlap" in found) == (
        told == "0"
    ) and "decoding in tiles of few rows" not in found


def test_without_a_gpu_a_call_ends_after_saying_why(tmp_path):
    """With the real look for one."""
    if ops.gpu:
        pytest.skip("there is one")
    check = Check(tmp_path)
    examine(
        check,
        [
            Step(step.name, step.command if step.name == "look" else WELL, step.limit_s)
            for step in calls(tmp_path, tmp_path)[0]
        ],
    )
    assert [*steps(check)] == ["build", "look"] and steps(check)["look"][1] == ops.why_no_gpu()


def test_every_test_of_a_kernel_that_wants_a_gpu_is_run(tmp_path):
    run = {
        word
        for step in calls(tmp_path, tmp_path)[0]
        for word in step.command
        if word.startswith("tests/")
    }
    assert run == {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests/model").rglob("test_*.py")
        if "mark.cuda" in path.read_text()
    }


def test_all_of_it_runs_in_tiny_form_and_goes_on_after_it_was_ended(tmp_path, emulated):
    """On this processor, by the emulated kernels. It is ended amid measurements, and a half line is
    left.
    """
    command = [
        sys.executable,
        "-m",
        "tools.gpu_check",
        "--emulated",
        str(emulated.library),
        "--out",
        str(tmp_path / "out"),
    ]
    file = tmp_path / "out/results.jsonl"
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        assert eventually(
            lambda: (
                process.poll() is not None
                or (file.exists() and '"part": "variants"' in file.read_text())
            ),
        )
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 1
    finally:
        process.kill()
    before = Results(file).known
    assert not Results(file).find(step="decode", ended="well")
    file.write_text(file.read_text() + '{"part": "decode", "pre')
    for call in ("1,2", "3"):
        subprocess.run([*command, "--call", call], cwd=ROOT, check=True)
    found = Results(file).known
    assert found[: len(before)] == before
    names = ("part", "step", "preset", "state", "batch", "product", "clients", "n")
    names += "tiles", "overlaps"
    keys = [tuple(line.get(name) for name in names) for line in found]
    assert len(set(keys)) == len(keys), "measured twice"
    assert {line["ended"] for line in found if "step" in line} == {"well"}
    assert {line.get("part") for line in found} == {
        None,
        "machine",
        "variants",
        "decode",
        "digests",
        "likelihood",
        "kernels",
        "products",
        "training",
        "service",
        "reload",
    }
    scores = [line["bits_per_dim"] for line in found if line.get("part") == "likelihood"]
    assert len(scores) == 2 and abs(scores[0] - scores[1]) < 0.01  # the processor's, and its state
    tables = file.with_name("report.md").read_text()
    assert {path.name for path in file.parent.iterdir()} == {
        "results.jsonl",
        "report.md",
        "log.txt",
    }
    assert "| tiny | fp32 | 2 |" in tables and tables == report(found)
    assert all(
        line["images_per_second"] > 0
        for line in found
        if line.get("part") in ("decode", "training", "service", "reload")
    )


def test_pictures_that_depend_on_the_kernels_end_the_step_badly(tmp_path, monkeypatch, emulated):
    """Here by a line that is known from an earlier run."""
    given = argparse.Namespace(preset=["tiny"], state=["fp32"], batch=[1, 2], emulated=True)
    results = Results(tmp_path / "results.jsonl")
    cuda.digests(given, partial(results.measure, part="digests"))
    lines = [line["digests"] for line in results.known]
    assert len(lines) == 2 * 6 and {*map(len, lines)} == {1, 2}
    results.add(**results.known[0] | {"digests": {"1": "other"}})
    with pytest.raises(SystemExit, match=r"depend on .*: the first 1 of tiny, fp32"):
        cuda.digests(given, partial(results.measure, part="digests"))


@pytest.mark.parametrize(("gain", "said"), [(1.31, "stays"), (1.29, "delete it")])
def test_a_float16_state_stays_only_if_some_model_gains_enough(tmp_path, gain, said):
    check = Check(tmp_path)
    check.decide()
    assert check.results.known == []
    for state, batch, speed in (("fp32", 1024, 100), ("fp16", 1024, 100 * gain), ("fp16", 64, 900)):
        check.results.add(
            part="decode", preset="mnist", state=state, batch=batch, images_per_second=speed
        )
    found = decision(check.results.known)
    assert found["--state fp16"].startswith(said) and found["gain"] == {"mnist": gain}
    check.decide()
    assert len(check.results.known) == 3, "other models may gain more"
    check.results.add(step="decode others", ended="well")
    for _ in range(2):
        check.decide()
    assert len(check.results.known) == 5
    assert said in (tmp_path / "report.md").read_text()


@pytest.mark.nvcc
def test_the_program_of_exchanges_compiles_and_says_why_it_does_not_run():
    if ops.gpu:
        assert min(cuda.exchanged().values()) > 0
        return
    with pytest.raises(RuntimeError, match=r"CUDA driver|no CUDA-capable device"):
        cuda.exchanged()


def test_a_toolkit_that_is_newer_than_the_driver_is_named():
    told = newer_than_driver((13, 0), 12080)
    assert told.startswith("nvcc is of CUDA 13.0, and the driver runs kernels up to CUDA 12.8: ")
    assert newer_than_driver((12, 9), 12040) == newer_than_driver((), 12040) == ""
