"""Load and faults, against real server processes on this machine: `make soak`, or python -m
tests.soak --help.

Prints a Markdown table; ends with status 1 if anything went wrong, or was slower than it should be.
"""

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from pathlib import Path

from linpix.model import folders
from linpix.model.config import PRESETS
from tests.nets import saved
from tests.soak import report
from tests.soak.loads import Plan, Result, Soak
from tests.soak.phases import PHASES

OVERHEAD_S = 20.0  # of a phase: starting a server, warming it up, comparing images


def raise_file_limit(clients: int) -> None:
    """A connection is an open file, here and in the servers, which inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * clients + 256
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise SystemExit(
            f"{clients} clients take {wanted} open files; raise the hard limit, {hard} (ulimit -Hn)"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def run(soak: Soak, names: list[str]) -> list[Result]:
    results = []
    for name in names:
        began = time.monotonic()
        try:
            found = await PHASES[name][0](soak)
        except Exception as error:  # the other phases still tell something
            found = [Result(name, failures=[f"{type(error).__name__}: {error}"])]
        for result in found:
            print(f"{name}: {report.line(result)}", file=sys.stderr, flush=True)
        print(f"{name} took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        results += found
    if ended := soak.close():
        results.append(Result("the end of the servers", failures=ended))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument(
        "--phases", default=",".join(PHASES), help=f"comma-separated, of {', '.join(PHASES)}"
    )
    parser.add_argument("--minutes", type=float, default=12.0, help="for all of it, about")
    parser.add_argument("--model", default="mnist-small", help="a checkpoint, by name or folder")
    parser.add_argument(
        "--slo", type=float, default=2.0, help="seconds in which an answer still counts as good"
    )
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    given = parser.parse_args()
    names = given.phases.split(",")
    if unknown := set(names) - PHASES.keys():
        parser.error(
            f"--phases: there is no {', '.join(sorted(unknown))}; choose of {', '.join(PHASES)}"
        )
    stretches = sum(PHASES[name][1] for name in names)
    seconds = max(2.0, (given.minutes * 60 - OVERHEAD_S * len(names)) / stretches)
    with tempfile.TemporaryDirectory() as made:
        # its speed does not depend on its weights
        batching = saved(Path(made) / "mnist", PRESETS["mnist"])
        plan = Plan(
            model=folders.find(given.model).resolve(),
            batching=batching,
            seconds=seconds,
            slo_s=given.slo,
        )
        raise_file_limit(max(*plan.clients, plan.storm))
        began = time.monotonic()
        results = asyncio.run(run(Soak(plan), names))
    text = report.table(results, plan, time.monotonic() - began)
    print(text)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text)
    return int(any(result.failures or result.missed for result in results))


if __name__ == "__main__":
    sys.exit(main())
