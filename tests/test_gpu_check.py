"""make gpu-check without a GPU: its steps, their limits, and what it does when one fails."""

import sys
import time
from pathlib import Path

import pytest

from linpix.model import checkpoint, ops
from tools.gpu_check import ROOT, Check, commands, examine, training, write_pictures

pytestmark = pytest.mark.slow

WELL, BADLY = [[sys.executable, "-c", f"print('one'); print('two'); raise SystemExit({status})"] for status in (0, 3)]
WITHOUT_OVERLAP_ONLY = [sys.executable, "-c", "import os; raise SystemExit(os.environ['LINPIX_OVERLAP'] != '0')"]
TELL = [sys.executable, "-c", "import os; print('LINPIX_OVERLAP is', os.environ['LINPIX_OVERLAP'])"]


def rows(check: Check) -> dict[str, list[str]]:
    """Of report.md: each step's ending, seconds and last line."""
    lines = (check.out / "report.md").read_text().splitlines()
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in
            (line.split("|")[1:-1] for line in lines[2:] if "|" in line)}


def test_each_step_is_written_down_when_it_ends(tmp_path):
    check = Check(tmp_path)
    assert check.step("first", WELL, 60)
    assert list(rows(check)) == ["first"]
    assert not check.step("second", BADLY, 60)
    assert [(name, row[0], row[2]) for name, row in rows(check).items()] == [
        ("first", "well", "two"), ("second", "exit status 3", "two")]
    assert check.failed == ["second: exit status 3"]
    assert (tmp_path / "log.txt").read_text() == "one\ntwo\n" * 2


def test_a_step_that_hangs_is_ended_with_what_it_started_and_the_next_one_runs(tmp_path):
    check = Check(tmp_path)
    hangs = ("import subprocess, sys, time; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True);"
             "time.sleep(600)")
    assert not check.step("hangs", [sys.executable, "-c", hangs], 3)
    assert rows(check)["hangs"][0] == "ran out of time, 3 s"
    child = int(rows(check)["hangs"][2])
    for _ in range(200):
        if not running(child):
            break
        time.sleep(0.05)
    assert not running(child)
    assert check.step("next", WELL, 60)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_where_decoding_fails_only_with_overlap_the_rest_runs_without(tmp_path, monkeypatch):
    monkeypatch.setenv("LINPIX_OVERLAP", "1")
    run = dict.fromkeys(commands(sys.executable, tmp_path, tmp_path), WELL) | {
        "decoding": WITHOUT_OVERLAP_ONLY, "benchmark": TELL}
    check = Check(tmp_path)
    examine(check, run)
    found = rows(check)
    assert (found["decoding"][0], found["decoding without overlap"][0]) == ("exit status 1", "well")
    assert found["benchmark"][2] == "LINPIX_OVERLAP is 0"
    assert list(found)[-1] == "memory"  # all that follows runs


def test_without_a_gpu_it_ends_after_saying_why(tmp_path):
    """With the real look for one."""
    if ops.gpu:
        pytest.skip("there is one")
    run = commands(sys.executable, tmp_path, tmp_path)
    check = Check(tmp_path)
    examine(check, dict.fromkeys(run, WELL) | {"look": run["look"]})
    assert list(rows(check)) == ["build", "a GPU and kernels for it"]
    assert rows(check)["a GPU and kernels for it"][2] == ops.why_no_gpu()


def test_every_test_of_a_kernel_that_wants_a_gpu_is_run(tmp_path):
    run = commands(sys.executable, tmp_path, tmp_path)
    marked = {str(path.relative_to(ROOT)) for path in (ROOT / "tests/model").rglob("test_*.py")
              if "mark.cuda" in path.read_text()}
    assert marked == {run["attention"][-1], run["decoding"][-1]}


def test_training_runs_as_the_check_runs_it(tmp_path):
    """Of the tiny preset, on this processor; it wants nothing that serving does."""
    write_pictures(tmp_path / "pictures", 8)
    check = Check(tmp_path)
    command = training(sys.executable, "tiny", "cpu", tmp_path, tmp_path / "run", "--no-compile")
    hide = "import sys; sys.modules |= dict.fromkeys(('fastapi', 'pydantic', 'pydantic_settings', 'uvicorn')); "
    as_module = [*command[:1], "-c", f"{hide}from linpix.__main__ import main; sys.exit(main())", *command[3:]]
    assert check.step("training", as_module, 120), (tmp_path / "log.txt").read_text()
    assert "160 images" in rows(check)["training"][2]
    assert checkpoint.read(tmp_path / "run").provenance["images"] == 160
