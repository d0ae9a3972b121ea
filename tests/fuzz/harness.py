"""A fuzzing case is accepted, or refused with a declared error: in little time and memory, and
without leftovers.

LINPIX_FUZZ_CASES is the number of uploads, 2,000 by default; a dearer target runs a share of it.
Cases come from Hypothesis, in batches that are forgotten, each with its own number as seed: a run
finds what the last one found.
"""

import gc
import os
import re
import resource
import signal
import tarfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("LINPIX_FUZZ_CASES", "2000"))
BATCH = 500  # cases at most; a quarter of a target's where that is less
# of a case; the processor's seconds, which other work on the machine does not add to
MAX_PROCESSOR_S = 2.0
MAX_S = 60.0  # of a case by the clock: it waits for something that will not come
# bytes resident after all cases, over those after the first batch: what malloc keeps
MAX_GROWTH = 96 * 2**20
MAX_PEAK = 640 * 2**20  # bytes resident at the worst moment of a batch, over those at its beginning
MAX_MEMORY = 3 * 2**30  # bytes of addresses, resident or not, that a case may ask for

Case = TypeVar("Case")


@dataclass(frozen=True)
class Target(Generic[Case]):
    name: str
    cases: st.SearchStrategy[Case]
    run: Callable[[Case], object]
    refusals: tuple[type[Exception], ...]
    kinds: Mapping[str, str]  # of refusal: what all of its message is, as a regular expression
    share: int = 1  # how many uploads one case stands for


def lay(path: Path, what: str) -> None:
    """Something that is not a file, where one is looked for."""
    match what:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "itself":
            path.symlink_to(path)
        case "elsewhere":
            path.symlink_to("/etc/passwd")


def member(size: int, kind: bytes = tarfile.REGTYPE, name: str = "a.png") -> bytes:
    """A header of a tar archive, its sum right whatever it says; a size that octal digits cannot
    say in base 256.
    """
    raw = bytearray(tarfile.TarInfo("a.png").tobuf(tarfile.GNU_FORMAT))
    raw[:100] = name.encode("utf-8", "surrogateescape")[:100].ljust(100, b"\0")
    raw[124:136] = b"%011o\0" % size if 0 <= size < 8**11 else (size % 2**96 | 1 << 95).to_bytes(12)
    raw[148:157], raw[157:257] = b" " * 8 + kind, b"a.png".ljust(100, b"\0")
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


class Hung(BaseException):
    """Nothing catches it but the test."""


@dataclass
class Tally:
    """What became of the cases of one target."""

    name: str
    cases: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0  # of the processor
    growth: int = 0
    peak: int = 0

    def row(self) -> str:
        refused = ", ".join(f"{kind} {count:,}" for kind, count in self.refused.most_common())
        return (
            f"| {self.name} | {self.cases:,} | {self.accepted:,} | {refused} |"
            f" {1e3 * self.slowest_s:,.0f} | {self.growth / 2**20:.1f} | {self.peak / 2**20:.0f} |"
        )


HEAD = (
    "| target | cases | accepted | refused | slowest, ms of the processor | grown, MiB | peak of a"
    " batch, MiB |\n|---|---|---|---|---|---|---|"
)


def fuzz(target: Target[Case], cases: int | None = None, process: int | None = None) -> Tally:
    """Run a target's cases; an AssertionError, or whatever it raised, shows the smallest case that
    misbehaved.

    process: whose time and memory count, by its id; this one's by default.
    """
    cases = max(1, CASES // target.share) if cases is None else cases
    tally = Tally(target.name)

    def one(case: Case) -> None:
        tally.cases += 1
        began = _processor_s(process)
        try:
            with deadline():
                target.run(case)
        except target.refusals as error:
            tally.refused[kind_of(target, str(error))] += 1
        else:
            tally.accepted += 1
        took = _processor_s(process) - began
        assert took <= MAX_PROCESSOR_S, f"{took:.1f} s of the processor for one case"
        tally.slowest_s = max(tally.slowest_s, took)

    warm, number, batch = 0, 0, max(1, min(BATCH, cases // 4))
    while tally.cases < cases:
        before = _began_anew(process)
        chosen = settings(
            max_examples=min(batch, cases - tally.cases),
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        with loud(), memory_for(MAX_MEMORY):
            seed(number)(chosen(given(case=target.cases)(one)))()
        gc.collect()
        tally.peak = max(tally.peak, _memory("VmHWM", process) - before)
        now = _memory("VmRSS", process)
        warm, number = warm or now, number + 1
        tally.growth = now - warm
    assert tally.growth <= MAX_GROWTH, (
        f"{tally.cases} cases left {tally.growth / 2**20:.0f} MiB behind"
    )
    assert tally.peak <= MAX_PEAK, f"a batch took {tally.peak / 2**20:.0f} MiB at its worst"
    return tally


def kind_of(target: Target[Case], message: str) -> str:
    for kind, pattern in target.kinds.items():
        if re.fullmatch(pattern, message, re.DOTALL):
            return kind
    raise AssertionError(f"a refusal that says something else than declared: {message}")


@contextmanager
def deadline() -> Iterator[None]:
    """Raise Hung in what takes too long by the clock, such as reading a pipe that nobody
    writes to.
    """

    def hung(*_: object) -> None:
        raise Hung(f"no end after {MAX_S:g} s")

    before = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, MAX_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory_for(more: int) -> Iterator[None]:
    """So many bytes more than there are now, and then MemoryError: not a machine without memory."""
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    if now := _memory("VmSize", None):
        resource.setrlimit(resource.RLIMIT_AS, (now + more, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


@contextmanager
def loud() -> Iterator[None]:
    """A warning is an exception, but for those of Pillow that our modules silence."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.filterwarnings("ignore", module=r"hypothesis\.")
        yield


def _processor_s(process: int | None) -> float:
    if process is None:
        return time.process_time()
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _began_anew(process: int | None) -> int:
    """Bytes resident now, from where peaks are counted again."""
    gc.collect()
    with suppress(OSError):  # not Linux, or not allowed: then the peak is that of the whole process
        Path(f"/proc/{process or 'self'}/clear_refs").write_text("5")
    return _memory("VmRSS", process)


def _memory(what: str, process: int | None) -> int:
    """Bytes, of VmRSS or VmHWM; 0 where there is no /proc."""
    try:
        status = Path(f"/proc/{process or 'self'}/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{what}:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
