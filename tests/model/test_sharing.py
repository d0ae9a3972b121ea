"""Weights in memory that several processes have in common, and what is left of it when they are gone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from linpix.model import sharing
from linpix.model.sharing import PREFIX, SharedWeights, remove_unused

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shares them")
OTHER = """
import sys, torch
from pathlib import Path
from linpix.model.sharing import SharedWeights
shared = SharedWeights([torch.arange(1000.0)], Path(sys.argv[1]))
print(shared.weights[0].sum().item(), flush=True)
sys.stdin.readline()
shared.close()
"""


def weights() -> list[torch.Tensor]:
    return [torch.arange(1000.0), torch.arange(6, dtype=torch.bfloat16).view(2, 3), torch.empty(0),
            torch.arange(-4, 5, dtype=torch.int8)]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


def pages(folder: Path) -> list[str]:
    """The mappings of this process of files in a folder: rights and file of each."""
    return [" ".join((line.split()[1], line.split()[4])) for line in Path("/proc/self/maps").read_text().splitlines()
            if str(folder) in line]


def test_what_is_shared_is_what_was_given(tmp_path):
    shared = SharedWeights(weights(), tmp_path)
    for ours, given in zip(shared.weights, weights(), strict=True):
        assert ours.dtype == given.dtype and ours.shape == given.shape and torch.equal(ours, given)
        assert (ours.is_contiguous() and ours.data_ptr() % 64 == 0) or not len(given)


def test_processes_with_the_same_weights_map_the_same_file_and_the_last_one_removes_it(tmp_path):
    first, second = SharedWeights(weights(), tmp_path), SharedWeights(weights(), tmp_path)
    [file] = files(tmp_path)
    assert file.name.startswith(PREFIX) and file.stat().st_mode & 0o777 == 0o600
    both = pages(tmp_path)
    assert len(both) == 2 and len(set(both)) == 1 and both[0].startswith("rw-p"), "private: a write stays ours"
    first.weights[0][7] = -1.0
    assert second.weights[0][7] == 7.0
    first.close()
    assert files(tmp_path) == [file]
    second.close()
    second.close()
    assert not files(tmp_path) and second.weights[0][7] == 7.0, "they can still be used"


def test_other_weights_have_another_file(tmp_path):
    kept = [SharedWeights(weights(), tmp_path), SharedWeights(weights()[:2], tmp_path),
            SharedWeights([weights()[0].double()], tmp_path)]
    assert len(files(tmp_path)) == len(kept)


def test_the_file_of_a_process_that_was_killed_is_removed_by_the_next(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", OTHER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert float(other.stdout.readline()) == 499_500.0
    [file] = files(tmp_path)
    remove_unused(tmp_path)
    assert files(tmp_path) == [file], "it is used"
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert files(tmp_path) == [file]
    shared = SharedWeights(weights()[1:], tmp_path)
    [left] = files(tmp_path)
    assert left != file
    shared.close()


def test_processes_that_begin_at_once_end_with_one_file_and_then_with_none(tmp_path):
    others = [subprocess.Popen([sys.executable, "-c", OTHER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
              for _ in range(3)]
    assert [float(other.stdout.readline()) for other in others] == [499_500.0] * 3
    assert len(files(tmp_path)) == 1
    for other in others:
        other.communicate(b"\n")
    assert not files(tmp_path)


@pytest.mark.parametrize("name", ["full", "not ours", "missing"])
def test_where_nothing_can_be_shared_each_has_its_own_and_is_told_the_cure(name, tmp_path, monkeypatch, caplog):
    folder = tmp_path
    if name == "full":
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")
        monkeypatch.setattr(sharing, "_write", full)
    elif name == "not ours":
        SharedWeights(weights(), tmp_path).close()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    else:
        folder = tmp_path / "missing"
    shared = SharedWeights(weights(), folder)
    assert all(torch.equal(ours, given) for ours, given in zip(shared.weights, weights(), strict=True))
    assert not pages(tmp_path) and not files(tmp_path)
    [record] = caplog.records
    assert "--shm-size" in record.getMessage()
    shared.close()
