"""What a run writes is whole or not there, and a folder has one writer."""

import os
import signal

import pytest
import torch

from linpix.model.config import PRESETS
from linpix.training.files import load_state, locked, put, save_state, writing
from tests.conftest import files_of_at_most
from tests.nets import saved

STATE = {"step": 3, "net": {"weight": torch.arange(200.0)}}


def flipped(raw: bytes, at: int, bit: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]


def test_no_flipped_bit_of_a_state_is_believed(tmp_path):
    save_state(tmp_path / "state.pt", STATE)
    good = (tmp_path / "state.pt").read_bytes()
    torch.testing.assert_close(load_state(good), STATE)
    damaged = [flipped(good, at, at % 8) for at in range(0, len(good), 3)]
    damaged += [good[:end] for end in (0, 1, len(good) // 2, len(good) - 100)]
    for raw in damaged:
        with pytest.raises(ValueError, match="digest"):
            load_state(raw)


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    put(path, b"before")
    (tmp_path / "file.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"file cannot be written \(no space left on device\); free"):
        put(path, b"after")
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["file"]
    with pytest.raises(OSError, match="check the disk and the folder's permissions"):
        put(tmp_path / "missing" / "file", b"")


@pytest.mark.parametrize("size", [0, 400, 4_000])
def test_a_checkpoint_that_does_not_fit_on_the_disk_leaves_the_last_one(tmp_path, size):
    folder = tmp_path / "run"
    saved(folder, PRESETS["tiny"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with files_of_at_most(size), pytest.raises(OSError) as failed, writing(folder):
        saved(folder, PRESETS["tiny"])
    assert str(failed.value).startswith(f"{folder} cannot be written (file too large); free some")
    assert os.listdir(tmp_path) == ["run"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_is_held_by_one_until_its_process_ends_in_any_way(tmp_path):
    folder = tmp_path / "run.training"
    with locked(folder, tmp_path / "run", "wait"):
        with (
            pytest.raises(ValueError, match=r"another process is writing to .*run; wait$"),
            locked(folder, tmp_path / "run", "wait"),
        ):
            pass
        (folder / "state.pt").touch()
    reading, writer = os.pipe()
    child = os.fork()
    if not child:
        with locked(folder, tmp_path / "run", "wait"):
            os.write(writer, b"held")
            signal.pause()
    assert os.read(reading, 4) == b"held"
    try:
        with pytest.raises(ValueError, match="another process"), locked(folder, tmp_path, ""):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with locked(folder, tmp_path / "run", "wait"):
        pass
    assert (folder / "state.pt").exists()


def test_a_folder_in_which_nothing_was_written_is_removed(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path / "a" / "b", tmp_path, ""):
        raise KeyError
    assert os.listdir(tmp_path / "a") == []
