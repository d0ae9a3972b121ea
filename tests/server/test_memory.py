"""Free memory, and when garbage is collected."""

import gc
import os
import weakref
from pathlib import Path

import pytest

from linpix.server import memory
from tools.harness.commands import python

pytestmark = pytest.mark.slow

MIB = 2**20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": f"MemAvailable: {900 * 2**10} kB\n"} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "mib"),
    [
        ({}, 900),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "max\n",
                "sys/fs/cgroup/memory.current": "5\n",
            },
            900,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{500 * MIB}\n",
                "sys/fs/cgroup/memory.current": f"{300 * MIB}\n",
                "sys/fs/cgroup/memory.stat": f"inactive_file {50 * MIB}\n",
            },
            250,
        ),
        (
            {
                "proc/self/cgroup": "0::/system.slice/linpix.service\n",
                "sys/fs/cgroup/system.slice/linpix.service/memory.max": "max\n",
                "sys/fs/cgroup/system.slice/linpix.service/memory.current": "1\n",
                "sys/fs/cgroup/system.slice/memory.max": f"{500 * MIB}\n",
                "sys/fs/cgroup/system.slice/memory.current": f"{100 * MIB}\n",
                "sys/fs/cgroup/system.slice/memory.stat": "anon 1\ninactive_file 0\n",
            },
            400,
        ),
        (
            {
                "proc/self/cgroup": "5:devices:/\n4:cpu,memory:/jobs/one\n0::/\n",
                "sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes": f"{200 * MIB}\n",
                "sys/fs/cgroup/memory/jobs/one/memory.usage_in_bytes": f"{80 * MIB}\n",
                "sys/fs/cgroup/memory/jobs/one/memory.stat": f"total_inactive_file {5 * MIB}\n",
            },
            125,
        ),
        # a container sees its own group at the root, and may be told where the host has it
        (
            {
                "proc/self/cgroup": "4:memory:/docker/1234\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{200 * MIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{80 * MIB}\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
            },
            120,
        ),
    ],
    ids=[
        "no group",
        "no limit",
        "version 2",
        "version 2, above",
        "version 1",
        "version 1, in a container",
    ],
)
def test_free_memory_is_what_every_group_around_us_leaves(tmp_path, files, mib):
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.free_bytes(tree(tmp_path, files)) == min(mib * MIB, machine)


def test_free_memory_is_what_the_address_space_leaves():
    code = (
        "import resource; from linpix.server.memory import free_bytes\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (used + {100 * MIB},) * 2)\n"
        "print(free_bytes())"
    )
    found = python(code)
    assert 90 * MIB < int(found.stdout) <= 100 * MIB


def test_surviving_objects_are_excluded_from_collections_until_the_next_collect():
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    kept, late = Cycle(), Cycle()
    seen = weakref.ref(kept), weakref.ref(late)
    del late
    try:
        memory.collect()
        assert seen[1]() is None
        del kept
        gc.collect()
        assert seen[0]() is not None
        memory.collect()
        assert seen[0]() is None
    finally:
        gc.unfreeze()
