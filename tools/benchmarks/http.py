"""What HTTP costs: images/s of 64 clients at once, as a share of what the engine draws in the same
time alone.

    python -m tools.benchmarks.http [--model mnist-small] [--batch 64] [--n 1,8] [--seconds 5]
                                    [--repeat 3] [--other CHECKOUT] [--accept TYPE] [--instant]

The engine alone, in this process, keeps `--batch` images in flight: a loop over the quanta that
`linpix sample` runs. A server has as many images in flight for connections of wrk, a load generator
in C (Debian: apt install wrk), each of which asks for n images again as soon as it has its answer.
All of them take turns, `--repeat` times; a share is the median of the shares within a round. What
comes before a run is steady, and what is under way at its end, is left out. The processor's time is
that of server and clients together: where other programs use the same cores, the share by it, of
the engine's own time for an image, still compares two servers. It leaves out what threads wait for.
--other: another checkout, whose server takes turns too. --accept: of what media type the answers
are to be. --instant: server and engine have a GPU that answers at once (tools/benchmarks/host.py),
so that images/s are the most that HTTP allows.
"""

import argparse
import json
import math
import resource
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from linpix.model import checkpoint, folders, provenance
from linpix.model.team import limit_threads
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.engine import Engine
from linpix.server.engine.image import images_of
from linpix.server.engine.job import Job
from tools.benchmarks.host import instant
from tools.harness.arguments import new_parser, numbers
from tools.harness.commands import ran
from tools.harness.machine import machine
from tools.harness.servers import Process, serving

STEADY_S = 1  # after which the first requests, which came at once, have spread
ROUTE = "/v1/images/generations"
# Each answer must be 200 and, if it is JSON, have n pictures.
SCRIPT = """
local ffi = require("ffi")
ffi.cdef("typedef struct { long s, ns; } span; int clock_gettime(int, span *);")
local clock = ffi.new("span")
local function now() ffi.C.clock_gettime(1, clock) return tonumber(clock.s) + tonumber(clock.ns) * 1e-9 end
wrk.method, wrk.body = "POST", '{"n": %(n)d}'
wrk.headers["content-type"], wrk.headers["accept"] = "application/json", "%(accept)s"
local thread
function setup(it) thread = it end
function init() answers, wrong, began, ended = 0, 0, now() + %(steady)d, 0 end
function response(status, headers, body)
  local pictures = %(n)d
  if "%(accept)s" == "*/*" then _, pictures = body:gsub('"b64_json":', "") end
  if status ~= 200 or pictures ~= %(n)d or #body == 0 then wrong = wrong + 1 end
  ended = now()
  if ended > began then answers = answers + 1 end
end
function done(summary)
  local lost = summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout
  io.write(string.format('\\n{"answers": %%d, "wrong": %%d, "seconds": %%.6f}\\n', thread:get("answers"),
                         thread:get("wrong") + lost, thread:get("ended") - thread:get("began")))
end
"""  # noqa: E501


class Result(NamedTuple):
    rate: float  # images/s
    processor_s: float  # of the processor for an image: of the engine, or of server and clients
    loop_s: float = 0  # of it a request's on the event loop's thread


def bare(engine: Engine, batch: int, seconds: float) -> Result:
    """The engine alone with so many images always in flight."""
    began, used, subpixels, asked = time.perf_counter(), time.process_time(), 0, 0
    while (passed := time.perf_counter() - began) < seconds:
        running = len(engine.slots.running) + len(engine.scheduler.interactive)
        for _ in range(batch - running):
            engine.scheduler.submit(images_of(Job(seed=asked), str(asked)))
            asked += 1
        subpixels += engine.run_quantum().subpixels
    images, used = subpixels / engine.decoder.config.subpixels, time.process_time() - used
    for image in engine.slots.running.copy().values():
        engine.scheduler.cancel(image.request)
    while engine.busy:
        engine.run_quantum()
    return Result(images / passed, used / images)


def by_wrk(url: str, connections: int, n: int, seconds: float, accept: str) -> tuple[float, int]:
    """Images/s, and the number of requests they took."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(SCRIPT % {"n": n, "accept": accept, "steady": STEADY_S})
        script.flush()
        asked = f"-t1 -c{connections} -d{math.ceil(STEADY_S + seconds)}s --timeout 60s"
        ended = ran(f"wrk {asked} -s {script.name} {url}{ROUTE}")
    ended.check_returncode()
    printed = ended.stdout
    found = json.loads(printed.splitlines()[-1])
    assert not found["wrong"], printed
    return found["answers"] * n / found["seconds"], found["answers"]


def used_s(server: Process) -> tuple[float, float]:
    """Seconds that all threads of a server, and clients that have ended, have had a core; and the
    event loop's thread.

    Linux only, as wrk's measurements.
    """
    tasks = Path(f"/proc/{server.process.pid}/task")
    used = {
        task.name: int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in tasks.iterdir()
    }
    clients = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        sum(used.values()) + clients.ru_utime + clients.ru_stime,
        used[str(server.process.pid)],
    )


def served(server: Process, given: argparse.Namespace, n: int) -> Result:
    before = used_s(server)
    rate, answers = by_wrk(server.url, given.batch // n, n, given.seconds, given.accept)
    assert answers, "no answer came once the load was steady; measure for longer, with --seconds"
    all_s, loop_s = (after - at for after, at in zip(used_s(server), before, strict=True))
    # of the answers, which are counted once steady
    part = given.seconds / (given.seconds + STEADY_S)
    return Result(rate, all_s * part / answers / n, loop_s * part / answers)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--model", default="mnist-small", help="a checkpoint, by name or folder")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--n", type=numbers, default=[1, 8])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--other", type=Path, help="another checkout, to compare with")
    parser.add_argument("--accept", default="*/*", help="such as application/x-npy")
    parser.add_argument("--instant", action="store_true", help="with a GPU that answers at once")
    given = parser.parse_args()
    if shutil.which("wrk") is None:
        parser.error("there is no wrk here: install it (Debian: apt install wrk)")
    measure(folders.find(given.model).resolve(), given)


def measure(folder: Path, given: argparse.Namespace) -> None:
    limit_threads()
    made = instant if given.instant else new_decoder
    engine = Engine(made(checkpoint.read(folder), given.batch))
    flags = (
        f"--models={folder.name}",
        f"--slots={given.batch}",
        "--max-n=1024",
        "--client-images=0",
    )
    program = "-m", ("tools.benchmarks.host" if given.instant else "linpix")
    alone: list[Result] = []
    found: dict[str, list[Result]] = {}
    with ExitStack() as stack:
        servers = {"": stack.enter_context(serving(folder.parent, *flags, program=program))}
        if given.other:
            elsewhere = ["env", f"--chdir={given.other.resolve()}"]
            servers[", the other checkout"] = stack.enter_context(
                serving(folder.parent, *flags, before=elsewhere, program=program)
            )
        bare(engine, given.batch, STEADY_S)
        for server in servers.values():
            by_wrk(server.url, given.batch, 1, STEADY_S, given.accept)
        for turn in range(given.repeat):
            alone.append(bare(engine, given.batch, given.seconds))
            for name, server in list(servers.items())[:: 1 if turn % 2 else -1]:
                for n in given.n:
                    found.setdefault(f"n = {n}{name}", []).append(served(server, given, n))
    print(
        f"{machine()}; commit {provenance.commit()}; {given.batch} in flight, {given.repeat} rounds"
        f" of {given.seconds:g} s\n\n| {folder.name} | images/s | of the engine alone | processor,"
        " ms an image | of the engine alone | event loop, ms a request |\n|---|---|---|---|---|---|"
    )
    for name, results in {"the engine alone": alone, **found}.items():
        figures = []  # of each round
        for (rate, processor_s, loop_s), base in zip(results, alone, strict=True):
            shares = rate / base.rate, base.processor_s / processor_s
            figures.append([rate, shares[0], 1e3 * processor_s, shares[1], 1e3 * loop_s])
        cells = [
            f"{np.median(values):.3g} ({min(values):.3g}..{max(values):.3g})"
            for values in np.transpose(figures)
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
