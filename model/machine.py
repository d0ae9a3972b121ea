"""The machine that a process is on: its processor, and what control groups let the process have of
it.
"""

import math
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use, given its affinity and the CPU quotas of its control
    groups.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, _quotas(root))]))


def processor_name() -> str:
    """The model of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _quotas(root: Path) -> Iterator[float]:
    """Cores that each control group of this process, and each of its parent groups, allows."""
    for version, group in control_groups("cpu", root):
        with suppress(OSError, ValueError):  # not mounted here, or no limit
            if version == 2:
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota = (group / "cpu.cfs_quota_us").read_text().strip()
                period = (group / "cpu.cfs_period_us").read_text()
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)


def control_groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Where the limits of this process are: version and folder of its control groups, and of all
    groups around them.
    """
    with suppress(OSError, ValueError):  # not Linux
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or controller in controllers.split(","):
                mounted = root / "sys/fs/cgroup" / (controller if controllers else "")
                for group in (Path(path), *Path(path).parents):
                    yield 1 if controllers else 2, mounted / group.relative_to("/")
