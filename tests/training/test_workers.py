"""Several processes that train one model: what they compute, how they stop, and what is left when one of them dies."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from linpix.model.config import PRESETS
from linpix.training.datasets import Dataset
from linpix.training.loop import train
from linpix.training.run import Run, TrainConfig
from linpix.training.workers import count_for

TINY = PRESETS["tiny"]
SETTINGS = TrainConfig(images=80, batch=8, warmup_images=40, compile=False, validation=0, bf16=False)


@pytest.fixture(scope="module")
def noise() -> Dataset:
    random = np.random.default_rng(0)
    return Dataset("noise", random.integers(256, size=(100, 64), dtype=np.uint8), np.arange(100) % 10,
                   tuple("0123456789"))


@pytest.mark.parametrize(("threads", "batch", "wanted", "device", "count"), [
    (2, 16, None, "cpu", 2), (1, 16, None, "cpu", 1), (64, 16, None, "cpu", 4), (4, 18, None, "cpu", 3),
    (2, 4, None, "cpu", 1), (2, 1, None, "cpu", 1), (8, 16, None, "cuda", 1), (1, 16, 8, "cpu", 8),
    (8, 16, 1, "cuda", 1)])
def test_a_batch_is_shared_by_as_many_processes_as_there_are_threads_and_images_for(
        monkeypatch, threads, batch, wanted, device, count):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert count_for(batch, wanted, device) == count


@pytest.mark.parametrize(("batch", "wanted", "device", "message"), [
    (16, 3, "cpu", "--processes 3.*--batch of 16"), (16, 2, "cuda", "--processes 2.*leave the flag out")])
def test_a_number_of_processes_that_cannot_be_is_refused(batch, wanted, device, message):
    with pytest.raises(ValueError, match=message):
        count_for(batch, wanted, device)


def weights(run: Run) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in run.exported.parameters()])


@pytest.mark.slow
def test_two_processes_compute_what_one_does_and_a_resumed_run_goes_on(noise, tmp_path):
    """To rounding: the sums of a batch are taken in another order. A part may have no image with a condition."""
    model = dataclasses.replace(TINY, patch=2, background=0)
    settings = dataclasses.replace(SETTINGS, conditional=0.1)
    alone, first = Run(model, settings), Run(model, settings)
    began = weights(alone)
    assert train(alone, noise, tmp_path / "alone", command="test")
    assert not train(first, noise, tmp_path / "shared", command="test", max_images=40, processes=2)
    shared = Run.resumed(tmp_path / "shared.training" / "state.pt", model, {})
    assert shared.images == 40
    assert train(shared, noise, tmp_path / "shared", command="test", processes=2)
    moved = (weights(alone) - began).norm()
    assert moved > 0.1
    assert (weights(shared) - weights(alone)).norm() < 0.01 * moved


def others(first: subprocess.Popen[str]) -> list[int]:
    """The processes that train beside the first one."""
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def within(seconds: float, condition: Callable[[], object]) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "status", "lines"), [("first", -9, 3), ("other", 2, 3), ("first", -9, 0),
                                                         ("other", 2, 0), ("Ctrl-C", 0, 0)])
def test_when_one_process_ends_so_does_the_other_and_the_last_save_is_there(tmp_path, killed, status, lines):
    """lines: of the log, by then; 0: while the other begins."""
    for index in range(40):
        (tmp_path / "pictures" / str(index % 4)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 60 * (index % 4), np.uint8)).save(
            tmp_path / "pictures" / str(index % 4) / f"{index}.png")
    command = [sys.executable, "-m", "linpix", "train", "tiny", "--data", str(tmp_path / "pictures"), "--out",
               str(tmp_path / "run"), "--no-compile", "--batch", "8", "--save-minutes", "0.01", "--processes", "2"]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True,
                             env=os.environ | {"OMP_NUM_THREADS": "2"})
    state, log = tmp_path / "run.training" / "state.pt", tmp_path / "run.training" / "log.csv"
    assert within(60, lambda: others(first) and (not lines or len(log.read_text().splitlines()) > lines))
    [other] = others(first)
    if killed == "Ctrl-C":
        os.killpg(first.pid, signal.SIGINT)
    else:
        os.kill(first.pid if killed == "first" else other, signal.SIGKILL)
    _, printed = first.communicate(timeout=60)
    assert first.returncode == status, printed
    assert within(20, lambda: not Path(f"/proc/{other}").exists())
    assert status < 0 or "--resume" in printed.splitlines()[-1]
    trained = Run.resumed(state, dataclasses.replace(TINY, classes=4), {}).images
    assert (trained > 0) == (lines > 0 or killed == "Ctrl-C")
