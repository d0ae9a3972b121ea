"""Several processes that train one model: results, stopping, and what remains when one of them
dies.
"""

import csv
import functools
import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from linpix.__main__ import main
from linpix.model.config import PRESETS
from linpix.training import loop, workers
from linpix.training.datasets import Dataset
from linpix.training.run import Run, TrainConfig
from linpix.training.workers import count_for
from tests.server.test_listening import free_port
from tests.training.conftest import train_command
from tools.harness.servers import eventually

train = functools.partial(loop.train, command="test")
TINY = PRESETS["tiny"]
SETTINGS = TrainConfig(
    images=80, batch=8, warmup_images=40, compile=False, validation=0, bf16=False
)


@pytest.fixture(scope="module")
def noise() -> Dataset:
    random = np.random.default_rng(0)
    return Dataset(
        "noise",
        random.integers(256, size=(100, 64), dtype=np.uint8),
        np.arange(100) % 10,
        tuple("0123456789"),
    )


@pytest.mark.parametrize(
    ("threads", "batch", "wanted", "device", "count"),
    [
        (2, 16, None, "cpu", 2),
        (1, 16, None, "cpu", 1),
        (64, 16, None, "cpu", 4),
        (4, 18, None, "cpu", 3),
        (2, 4, None, "cpu", 1),
        (2, 1, None, "cpu", 1),
        (8, 16, None, "cuda", 1),
        (1, 16, 8, "cpu", 8),
        (8, 16, 1, "cuda", 1),
    ],
)
def test_a_batch_is_shared_by_as_many_processes_as_there_are_threads_and_images_for(
    monkeypatch, threads, batch, wanted, device, count
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert count_for(batch, wanted, device) == count


@pytest.mark.parametrize(
    ("batch", "wanted", "device", "accumulate", "message"),
    [
        (16, 3, "cpu", 1, "--processes 3.*--batch of 16"),
        (16, 2, "cuda", 1, "--processes 2.*torchrun"),
        (16, 8, "cpu", 4, "--processes 8.*--batch of 16.*times --accumulate 4"),
    ],
)
def test_a_number_of_processes_that_cannot_be_is_refused(
    batch, wanted, device, accumulate, message
):
    with pytest.raises(ValueError, match=message):
        count_for(batch, wanted, device, accumulate)


def weights(run: Run) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in run.exported.parameters()])


def saved_images(folder: Path) -> int:
    """The images that the last save in `folder` has seen."""
    state = folder / "run.training" / "state.pt"
    return Run.resumed(state, replace(TINY, classes=4), {}).images


@pytest.mark.slow
def test_two_processes_compute_what_one_does_and_a_resumed_run_goes_on(noise, tmp_path):
    """To rounding: the sums of a batch are taken in another order. A part may have no image with a
    condition.
    """
    model = replace(TINY, patch=2, background=0)
    settings = replace(SETTINGS, conditional=0.1)
    alone, first = Run(model, settings), Run(model, settings)
    began = weights(alone)
    assert train(alone, noise, tmp_path / "alone")
    assert not train(first, noise, tmp_path / "shared", max_images=40, processes=2)
    shared = Run.resumed(tmp_path / "shared.training" / "state.pt", model, {})
    assert shared.images == 40
    assert train(shared, noise, tmp_path / "shared", processes=2)
    moved = (weights(alone) - began).norm()
    assert moved > 0.1
    assert (weights(shared) - weights(alone)).norm() < 0.01 * moved


@pytest.mark.parametrize(
    "model",
    [
        TINY,
        replace(TINY, attention="lsh", lsh_rounds=2),
        replace(TINY, patch=2, background=0),
    ],
    ids=["dense", "lsh", "conditional"],
)
def test_a_gradient_computed_in_parts_is_that_of_the_batch(noise, tmp_path, model):
    settings = replace(SETTINGS, images=40)
    whole, parts = Run(model, settings), Run(model, replace(settings, accumulate=4))
    began = weights(whole)
    for run in (whole, parts):
        assert train(run, noise, tmp_path / f"run{run.config.accumulate}")
    moved = (weights(whole) - began).norm()
    assert moved > 0.1
    assert (weights(parts) - weights(whole)).norm() < 0.01 * moved


# --- torchrun ---

_TRAIN = "linpix train tiny --no-compile --no-bf16 --batch 8 --warmup-images 80"
TRAIN = _TRAIN.split()


def launched_as(rank: str, count: str, port: str) -> dict[str, str]:
    """The variables that a launcher sets."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, (rank, count, "127.0.0.1", port), strict=True))


def torchrun(count: int, *flags: object) -> subprocess.Popen[str]:
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node={count} -m".split()
    command = [sys.executable, *launcher, *TRAIN, *map(str, flags)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def alone(*flags: object) -> None:
    command = [sys.executable, "-m", *TRAIN, *map(str, flags)]
    one = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=one)
    assert ended.returncode == 0, ended.stderr


def curve(out: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of each line of the log."""
    log = out.with_name(f"{out.name}.training") / "log.csv"
    rows = [row for row in csv.DictReader(log.open()) if row["train"]]
    return [(int(row["step"]), float(row["train"]), float(row["norm"])) for row in rows]


@pytest.mark.slow
def test_torchrun_gives_the_loss_curve_of_one_process_and_any_number_goes_on(pictures, tmp_path):
    """To rounding: the sums of a batch are taken in another order."""
    asked = ("--data", pictures, "--images", 2400)
    alone(*asked, "--processes", 1, "--out", tmp_path / "alone")
    shared = (*asked, "--out", tmp_path / "shared")
    for count, flags in (
        (2, ("--max-images", 800, "--accumulate", 2)),
        (4, ("--resume", "--max-images", 800, "--accumulate", 1)),
    ):
        process = torchrun(count, *shared, *flags)
        _, said = process.communicate()
        assert process.returncode == 0, said
        assert said.count("continue with --resume") == 1, "one process speaks"
    alone(*shared, "--resume", "--processes", 1)
    expected, found = curve(tmp_path / "alone"), curve(tmp_path / "shared")
    assert [step for step, _, _ in expected] == [100, 200, 300]
    assert expected[0][1] - expected[-1][1] > 0.3, "it learns"
    assert [step for step, _, _ in found] == [100, 200, 300]
    for (_, loss, norm), (_, expected_loss, expected_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=2e-3)
        assert norm == pytest.approx(expected_norm, rel=0.1)


def ranks(first: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of those that torchrun has started, by rank."""
    found = {}
    for child in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split():
        variables = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
        found |= {
            int(one.removeprefix("RANK=")): int(child)
            for one in variables
            if one.startswith("RANK=")
        }
    return found


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [0, 1, "Ctrl-C"])
def test_a_signal_to_one_process_stops_all_after_a_save(pictures, tmp_path, signalled):
    process = torchrun(2, "--data", pictures, "--out", tmp_path / "run")
    log = tmp_path / "run.training" / "log.csv"
    assert eventually(lambda: log.exists() and len(log.read_text().splitlines()) > 1)
    started = ranks(process)
    assert set(started) == {0, 1}
    if signalled == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(started[signalled], signal.SIGTERM)
    _, said = process.communicate()
    assert "continue with --resume" in said
    assert signalled == "Ctrl-C" or process.returncode == 0, said
    assert eventually(
        lambda: not any(Path(f"/proc/{child}").exists() for child in started.values())
    )
    assert saved_images(tmp_path) >= 800 and (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.slow
def test_when_one_of_torchruns_processes_is_killed_all_end_and_the_last_save_is_there(
    pictures, tmp_path
):
    process = torchrun(2, "--data", pictures, "--out", tmp_path / "run", "--save-minutes", 0.01)
    assert eventually((tmp_path / "run.training" / "state.pt").exists)
    started = ranks(process)
    os.kill(started[1], signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode == 1 and "another training process has ended" in said
    assert eventually(
        lambda: not any(Path(f"/proc/{child}").exists() for child in started.values())
    )
    assert saved_images(tmp_path) > 0


@pytest.mark.slow
def test_processes_that_differ_do_not_train_together(pictures, tmp_path):
    """Started by hand, as another launcher would."""
    port, started = str(free_port()), []
    files = ["--data", pictures, "--out", tmp_path / "run"]
    for rank in ("0", "1"):
        command = [sys.executable, "-m", *TRAIN, *files, "--seed", rank]
        variables = os.environ | launched_as(rank, "2", port) | {"OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables))
    for process in started:
        _, said = process.communicate()
        assert process.returncode == 2
        assert "settings and weights of process 1 and of process 0 differ" in said.splitlines()[-1]
    assert not (tmp_path / "run").exists() and not (tmp_path / "run.training").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--processes", "1"), "--processes 1: torchrun has started 1 processes already"),
        (
            ("--batch", "9", "--accumulate", "2"),
            "batch must be a multiple of accumulate, got 9 images and 2 parts",
        ),
    ],
)
def test_what_torchrun_has_decided_cannot_be_asked_for_again(
    pictures, tmp_path, monkeypatch, capsys, flags, words
):
    for name, value in launched_as("0", "1", str(free_port())).items():
        monkeypatch.setenv(name, value)
    assert main([*TRAIN[1:], "--data", str(pictures), "--out", str(tmp_path / "run"), *flags]) == 2
    assert words in capsys.readouterr().err
    assert not torch.distributed.is_initialized()


def test_processes_that_do_not_come_are_not_waited_for_without_end(
    pictures, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(workers, "ASSEMBLY", timedelta(seconds=2))
    for name, value in launched_as("0", "2", "0").items():
        monkeypatch.setenv(name, value)
    assert main([*TRAIN[1:], "--data", str(pictures), "--out", str(tmp_path / "run")]) == 2
    assert "not all of the 2 processes met at MASTER_ADDR 127.0.0.1" in capsys.readouterr().err


def dies(rank: int, count: int, threads: int, meeting: Path, begun: Any, *_: object) -> None:
    begun.send(True)
    os._exit(1)


def test_a_process_that_ends_before_all_have_met_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(workers, "MEETING", timedelta(seconds=2))
    monkeypatch.setattr(workers, "_other", dies)
    with (
        pytest.raises(ChildProcessError, match="another training process has ended"),
        workers.together(2, print),
    ):
        pass
    assert not torch.distributed.is_initialized()


def others(first: subprocess.Popen[str]) -> list[int]:
    """The processes that train beside the first one."""
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "status", "lines"),
    [("first", -9, 3), ("other", 2, 3), ("first", -9, 0), ("other", 2, 0), ("Ctrl-C", 0, 0)],
)
def test_when_one_process_ends_so_does_the_other_and_the_last_save_is_there(
    pictures, tmp_path, killed, status, lines
):
    """lines: of the log, by then; 0: while the other begins."""
    first = subprocess.Popen(
        [*train_command(pictures, 8), "--processes", "2"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    log = tmp_path / "run.training" / "log.csv"
    assert eventually(
        lambda: others(first) and (not lines or len(log.read_text().splitlines()) > lines)
    )
    [other] = others(first)
    if killed == "Ctrl-C":
        os.killpg(first.pid, signal.SIGINT)
    else:
        os.kill(first.pid if killed == "first" else other, signal.SIGKILL)
    _, printed = first.communicate()
    assert first.returncode == status, printed
    assert eventually(lambda: not Path(f"/proc/{other}").exists())
    assert status < 0 or "--resume" in printed.splitlines()[-1]
    assert (saved_images(tmp_path) > 0) == (lines > 0 or killed == "Ctrl-C")
