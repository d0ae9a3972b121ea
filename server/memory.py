"""How much memory may still be taken, and garbage collection that does not interrupt decoding."""

import gc
import os
from contextlib import suppress
from pathlib import Path

from linpix.model.machine import control_groups


def free_bytes(root: Path = Path("/")) -> int:
    """Bytes free without swapping: the least of the machine's, of each enclosing control group's
    and of RLIMIT_AS's.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    free = [os.sysconf("SC_PHYS_PAGES") * page]
    with suppress(OSError, LookupError, ValueError):  # not Linux
        free.append(_fields(root / "proc/meminfo")["MemAvailable:"] * 1024)
    for version, group in control_groups("memory", root):
        limit, used, files = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        with suppress(OSError, LookupError, ValueError):  # not mounted here, or no limit ("max")
            most, taken = (int((group / name).read_text()) for name in (limit, used))
            # inactive file pages count as free
            free.append(most - taken + _fields(group / "memory.stat")[files])
    with suppress(ImportError, OSError, ValueError):
        import resource

        if (space := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
            free.append(space - int((root / "proc/self/statm").read_text().split()[0]) * page)
    return max(0, min(free))


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file whose lines are a name and a number, by name."""
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}


def collect() -> None:
    """Collect garbage now, and exclude the objects that survive from all collections until the next
    call.

    Otherwise every full collection, one in 500 requests, would stop all threads for 0.2 s while it
    looks at all objects: torch and FastAPI alone have 350,000.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
