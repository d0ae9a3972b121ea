"""How many cores a process may use, by made-up control groups."""

import os
from pathlib import Path

import pytest

from linpix.model.machine import usable_cores


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


def group(root: Path, name: str, **files: str) -> None:
    folder = root / "sys/fs/cgroup" / name.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file.replace("__", ".")).write_text(text + "\n")


def of_groups(root: Path, lines: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    return root


def test_a_quota_of_any_group_around_the_process_limits_its_cores(tmp_path):
    root = of_groups(tmp_path, "0::/outer/inner\n")
    assert usable_cores(root) == 16
    group(root, "/outer/inner", cpu__max="max 100000")
    assert usable_cores(root) == 16
    group(root, "/outer", cpu__max="350000 100000")
    assert usable_cores(root) == 4, "part of a core is one more thread"
    group(root, "/outer/inner", cpu__max="20000 100000")
    assert usable_cores(root) == 1


def test_the_older_version_of_control_groups_limits_cores_too(tmp_path):
    root = of_groups(tmp_path, "4:memory:/x\n3:cpu,cpuacct:/box\n")
    group(root, "cpu/box", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    assert usable_cores(root) == 2
    group(root, "cpu/box", cpu__cfs_quota_us="-1")
    assert usable_cores(root) == 16
