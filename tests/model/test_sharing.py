"""Weights in memory that several processes share, and what remains of it when they have ended."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from linpix.model import sharing
from linpix.model.sharing import PREFIX, SharedWeights, remove_unused
from tools.harness.servers import HANG_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shares them")
OTHER = """
import sys, torch
from pathlib import Path
from linpix.model.sharing import SharedWeights
shared = SharedWeights([torch.arange(1000.0)], Path(sys.argv[1]))
print(shared.weights[0].sum().item(), flush=True)
sys.stdin.readline()
"""


def weights() -> list[torch.Tensor]:
    return [
        torch.arange(1000.0),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        torch.empty(0),
        torch.arange(-4, 5, dtype=torch.int8),
    ]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


def pages(folder: Path) -> list[str]:
    """The mappings of this process of files in a folder: rights and file of each."""
    return [
        " ".join((line.split()[1], line.split()[4]))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(folder) in line
    ]


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
    assert len(both) == 2 and len(set(both)) == 1 and both[0].startswith("rw-p"), (
        "private: a write stays ours"
    )
    first.weights[0][7] = -1.0
    assert second.weights[0][7] == 7.0
    first.close()
    assert files(tmp_path) == [file]
    second.close()
    second.close()
    assert not files(tmp_path) and second.weights[0][7] == 7.0, "they can still be used"


def test_other_weights_have_another_file(tmp_path):
    kept = [
        SharedWeights(weights(), tmp_path),
        SharedWeights(weights()[:2], tmp_path),
        SharedWeights([weights()[0].double()], tmp_path),
    ]
    assert len(files(tmp_path)) == len(kept)


@pytest.mark.slow
def test_processes_that_begin_at_once_have_one_file_and_when_all_are_killed_the_next_removes_it(
    tmp_path,
):
    others = [
        subprocess.Popen(
            [sys.executable, "-c", OTHER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    assert [float(other.stdout.readline()) for other in others] == [499_500.0] * 2
    [file] = files(tmp_path)
    for other in others:
        remove_unused(tmp_path)
        assert files(tmp_path) == [file], "it is used"
        other.send_signal(signal.SIGKILL)
        other.wait(HANG_S)
    assert files(tmp_path) == [file]
    shared = SharedWeights(weights()[1:], tmp_path)
    [left] = files(tmp_path)
    assert left != file
    shared.close()


def test_what_a_killed_process_had_not_finished_is_written_again(tmp_path):
    with_name = SharedWeights(weights(), tmp_path)
    [file] = files(tmp_path)
    with_name.close()
    begun = file.with_name(f"{file.name}.new")
    begun.write_bytes(b"half of it")
    shared = SharedWeights(weights(), tmp_path)
    assert files(tmp_path) == [file] and torch.equal(shared.weights[0], weights()[0])
    del shared
    assert not files(tmp_path), "it is removed with the last that had it, closed or not"


def test_one_that_waits_for_another_to_write_does_not_wait_for_its_end(tmp_path, monkeypatch):
    looked = threading.Event()
    monkeypatch.setattr(time, "sleep", lambda _: looked.set())
    first = SharedWeights(weights(), tmp_path)
    [file] = files(tmp_path)
    content = file.read_bytes()
    first.close()
    with ThreadPoolExecutor(1) as others, file.with_name(f"{file.name}.new").open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        waiting = others.submit(SharedWeights, weights(), tmp_path)
        assert looked.wait(HANG_S) and not waiting.done()
        writer.write(content)
        writer.flush()
        Path(writer.name).rename(file)
        fcntl.flock(writer, fcntl.LOCK_SH)  # it uses them now
        waiting.result()
    assert files(tmp_path) == [file] and torch.equal(waiting.result().weights[0], weights()[0])


def test_files_left_in_the_folder_by_others_delay_no_process(tmp_path):
    os.mkfifo(tmp_path / f"{PREFIX}fifo")
    (tmp_path / f"{PREFIX}link").symlink_to("/dev/zero")
    (tmp_path / f"{PREFIX}folder").mkdir()
    shared = SharedWeights(weights(), tmp_path)
    assert len(files(tmp_path)) == 4 and pages(tmp_path)
    shared.close()
    assert len(files(tmp_path)) == 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("full", "--shm-size"),
        ("foreign", "belongs to another user"),
        ("missing", "No such file"),
        ("unmapped", "unable to mmap"),
    ],
)
def test_where_nothing_can_be_shared_each_has_its_own_and_says_why(
    name, said, tmp_path, monkeypatch, caplog
):
    def fails(error: Exception) -> None:
        raise error

    folder = tmp_path / "missing" if name == "missing" else tmp_path
    if name == "full":
        monkeypatch.setattr(
            sharing, "_write", lambda *_: fails(OSError(errno.ENOSPC, "No space left on device"))
        )
    elif name == "foreign":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    elif name == "unmapped":
        monkeypatch.setattr(
            torch, "from_file", lambda *_, **__: fails(RuntimeError("unable to mmap 4096 bytes"))
        )
    shared = SharedWeights(weights(), folder)
    assert all(
        torch.equal(ours, given) for ours, given in zip(shared.weights, weights(), strict=True)
    )
    monkeypatch.undo()
    remove_unused(tmp_path)
    assert not pages(tmp_path) and not files(tmp_path)
    [record] = caplog.records
    assert said in record.getMessage()
    shared.close()
