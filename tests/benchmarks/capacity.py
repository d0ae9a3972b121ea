"""How many fronts and replicas a load needs: measured costs, a simulation, and the simulation against a real run.

    python -m tests.benchmarks.capacity measure [--preset mnist] [--check] [--costs FILE]
    python -m tests.benchmarks.capacity plan [--costs FILE] [--images 1e6,1e9] [--utilisation 0.7] [--peak 1]
                                             [--core-hour PRICE] [--gpu-hour PRICE]

`measure` writes seconds of processor time: a step of the engine by the number of images, in two processes at once; then
what requests of eight clients cost fronts, replicas (apart from the engine thread) and the desk of `--replicas 2
--fronts 2`, beyond what these spend when nothing is asked; and the client's own time, for it has the same cores.
With --check 64 clients then ask in earnest, and it prints what the simulation said beside what came.

`plan` says what a number of images a day needs. Utilisation is that of fronts and engines at the mean rate, times
--peak; a replica is an engine of one thread on one core.
"""

import argparse
import json
import math
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.model.team import usable_cores
from linpix.model.transformer import Transformer
from linpix.server.cluster.choosing import Backlogs, by_end
from linpix.server.cluster.messages import Load, Order
from linpix.server.engine.ledger.ticket import Demand
from tests.benchmarks.decode import machine
from tests.benchmarks.simulation import Costs, Served, served, simulate
from tests.benchmarks.spending import Spent, ask, steps_of_all
from tests.server.conftest import serving

IDLE_S, FEW_S, WARM_S, CHECK_S = 4.0, 10.0, 6.0, 24.0
FEW, CLIENTS = 8, 64  # of costs, and of the check
BEATS = 2.0           # of each process to the desk in a second: server/cluster/deployments.py
H200 = {"mnist": 2_600.0}  # images/s of the engine alone, 4,096 at once: docs/numbers.md


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What `measure` writes, seconds of one core where nothing else is said."""

    machine: str
    preset: str
    steps_s: dict[int, float]
    length: int
    row: int
    front_s: float
    replica_s: float
    client_s: float
    desk_s: float         # a request
    beat_s: float         # of the desk, a message of a process
    idle: float           # cores that all processes of the cluster use when nothing is asked
    sent_bytes: float     # of an answer, its head included

    @property
    def costs(self) -> Costs:
        return Costs(front_s=self.front_s, replica_s=self.replica_s, client_s=self.client_s, steps_s=self.steps_s,
                     length=self.length, row=self.row)


# --- what is measured ---

def measure(preset: str, check: bool, file: Path) -> None:
    steps_s = steps_of_all(preset, 2)
    print(f"ms of a step: { {rows: round(seconds * 1e3, 3) for rows, seconds in steps_s.items()} }", flush=True)
    torch.manual_seed(0)
    net = Transformer(PRESETS[preset])
    config = net.config
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / preset
        checkpoint.save(folder, net, {"data": "random weights", "class_names": list("0123456789")}, "# random\n")
        with serving(folder.parent, "--models", preset, "--replicas", "2", "--fronts", "2", "--replica-threads", "1"
                     ) as server:
            driver = server.process.pid
            ask(server.url, FEW, 2.0)  # warm
            time.sleep(1.0)
            spending = Spent(driver)
            time.sleep(IDLE_S)
            idle = spending.end()
            print(f"cores when nothing is asked: {amounts(idle, 1 / IDLE_S)}")
            spending = Spent(driver)
            took, size = ask(server.url, FEW, FEW_S)
            some = spending.end()
            each = {kind: (seconds - idle[kind] * FEW_S / IDLE_S) / len(took) for kind, seconds in some.items()}
            print(f"{FEW} clients, beyond that, ms of a core a request: {amounts(each, 1e3)}", flush=True)
            found = Measured(
                machine=machine(), preset=preset, steps_s=steps_s, length=config.length, row=config.row_length,
                front_s=each["Front"], replica_s=each["Engine"], client_s=each["client"], desk_s=each["Desk"],
                beat_s=idle["Desk"] / IDLE_S / (4 * BEATS), idle=sum(idle.values()) / IDLE_S, sent_bytes=size)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(asdict(found), indent=1) + "\n")
            if check:
                checked(server.url, driver, found, idle)


def amounts(each: Mapping[str, float], times: float) -> str:
    return ", ".join(f"{kind} {value * times:.3g}" for kind, value in sorted(each.items()))


# --- the simulation against reality ---

def checked(url: str, driver: int, found: Measured, idle: Mapping[str, float]) -> None:
    spending = Spent(driver)
    took, _ = ask(url, CLIENTS, CHECK_S, WARM_S)
    real, all_of_it = served(took, CHECK_S), spending.end()
    seconds = CHECK_S + WARM_S
    each = {kind: (spent - idle[kind] * seconds / IDLE_S) / seconds / real.rate for kind, spent in all_of_it.items()}
    print(f"{CLIENTS} clients, ms of a core a request: {amounts(each, 1e3)}; of all cores "
          f"{sum(all_of_it.values()) / seconds:.2f} in use")
    print(compared(predicted(found), real), flush=True)


def predicted(found: Measured) -> Served:
    """2 replicas and 2 fronts, and clients on the same cores as they."""
    return simulate(found.costs, replicas=2, fronts=2, clients=CLIENTS, cores=usable_cores() - found.idle,
                    seconds=CHECK_S, warm_s=WARM_S)


def compared(said: Served, real: Served) -> str:
    lines = ["| | simulated | measured | error |", "|---|---|---|---|"]
    for name, unit, a, b in (("images/s", 1.0, said.rate, real.rate), ("p50, ms", 1e3, said.p50_s, real.p50_s),
                             ("p99, ms", 1e3, said.p99_s, real.p99_s)):
        lines.append(f"| {name} | {a * unit:.4g} | {b * unit:.4g} | {a / b - 1:+.1%} |")
    return "\n".join(lines)


# --- what a load needs ---

def choice_s(replicas: int) -> float:
    """Seconds in which a front chooses among so many replicas."""
    order = Order(id="1", endpoint="generations", client="", model="mnist", facts={"engine": "compiled"},
                  demand=Demand(1), work=1.0, timeout_s=60.0, spent_s=0.0)
    loads = {f"r{at}": Load(ahead=1.0, pace=1.0, room=1, facts={order.model: order.facts}) for at in range(replicas)}
    backlogs, taken = Backlogs(), []
    for at in range(30):
        began = time.perf_counter()
        first = by_end(loads, backlogs, order)[0]
        taken.append(time.perf_counter() - began)
        backlogs.give(first, str(at), order.work, order.timeout_s)
    return statistics.median(taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a rate needs, and what that gives."""

    rate: float          # images/s
    clusters: int        # each with a desk of its own
    replicas: int        # of one thread, in all
    fronts: int
    served: Served       # of one cluster, simulated
    desk: float          # utilisation of each desk
    gpus_by_engine: int  # H200s whose engines do nothing else
    gpus_by_loop: int    # replicas whose event loops pass on requests of one image

    @property
    def cores(self) -> int:
        return self.replicas + self.fronts + self.clusters


def planned(found: Measured, rate: float, utilisation: float, slots: int) -> Plan:
    """Fewest processes at that utilisation, two of each kind at least; as many clusters as desks are needed."""
    image_s = found.costs.step_s(slots) * found.length / slots + found.replica_s
    replicas = max(2, math.ceil(rate * image_s / utilisation))
    fronts = max(2, math.ceil(rate * found.front_s / utilisation))
    desks = rate * found.desk_s + (replicas + fronts) * BEATS * found.beat_s
    clusters = math.ceil(desks / utilisation)
    here = math.ceil(replicas / clusters)
    fronts = max(2, math.ceil(rate * (found.front_s + choice_s(here)) / utilisation))
    a_cluster = simulate(found.costs, replicas=here, fronts=math.ceil(fronts / clusters), slots=slots,
                         rate=rate / clusters, seconds=30.0, warm_s=10.0)
    return Plan(rate=rate, clusters=clusters, replicas=replicas, fronts=fronts, served=a_cluster, desk=desks / clusters,
                gpus_by_engine=max(1, math.ceil(rate / utilisation / H200.get(found.preset, math.inf))),
                gpus_by_loop=math.ceil(rate * found.replica_s / utilisation))


def plan(found: Measured, given: argparse.Namespace) -> str:
    columns = [column(found, images, given) for images in given.images]
    heads = " | ".join(f"{images:g} images a day" for images in given.images)
    lines = [f"{found.preset}, {found.machine}; {given.utilisation:.0%} in use at {given.peak:g} times the mean", "",
             f"| | {heads} |", "|---" * (1 + len(columns)) + "|"]
    lines += [f"| {name} | " + " | ".join(each[name] for each in columns) + " |" for name in columns[0]]
    image_s = found.costs.step_s(given.slots) * found.length / given.slots
    return "\n".join([*lines, "", (
        f"One image, ms of a core: engine {image_s * 1e3:.1f}, replica {found.replica_s * 1e3:.1f}, front "
        f"{found.front_s * 1e3:.1f}, desk {found.desk_s * 1e3:.1f}. Full, a second: engine {1 / image_s:.0f} images, "
        f"front {1 / found.front_s:.0f} requests, replica's event loop {1 / found.replica_s:.0f}, desk "
        f"{1 / found.desk_s:.0f} requests, or the beats of {1 / (BEATS * found.beat_s):.0f} processes.")])


def column(found: Measured, images: float, given: argparse.Namespace) -> dict[str, str]:
    """images: a day."""
    rate = images / 86_400 * given.peak
    p = planned(found, rate, given.utilisation, given.slots)
    core_s = p.cores * 86_400 / images  # machines are there all day
    gpus = max(p.gpus_by_engine, p.gpus_by_loop)
    on_gpus = (gpus * given.gpu_hour + (p.fronts + p.clusters) * given.core_hour) * 24 / images * 1e6
    return {"images/s": f"{rate:.4g}", "replicas of one thread": str(p.replicas), "fronts": str(p.fronts),
            "clusters, each with a desk": str(p.clusters), "cores": str(p.cores),
            "p50, p99 of a cluster, simulated": f"{p.served.p50_s:.2f} s, {p.served.p99_s:.2f} s",
            "of each desk in use": f"{p.desk:.0%}", "answers": f"{rate * found.sent_bytes / 1e6:.2g} MB/s",
            "core-seconds an image": f"{core_s:.2f}",
            "a million images on processors, price": f"{core_s / 3600 * 1e6 * given.core_hour:.3g}",
            "H200s, by their engines": str(p.gpus_by_engine),
            "H200s, by the event loop of their replica": str(p.gpus_by_loop),
            "a million images on H200s, price": f"{on_gpus:.3g}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "plan"))
    parser.add_argument("--costs", type=Path, default=Path("build/capacity.json"), help="written, or read")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="mnist")
    parser.add_argument("--check", action="store_true", help="compare the simulation with a real run")
    parser.add_argument("--images", type=lambda text: [float(word) for word in text.split(",")], default=[1e6, 1e9],
                        help="a day")
    parser.add_argument("--utilisation", type=float, default=0.7)
    parser.add_argument("--peak", type=float, default=1.0, help="the busiest hour's rate over the mean")
    parser.add_argument("--slots", type=int, default=64, help="of each replica")
    parser.add_argument("--core-hour", type=float, default=0.0, help="price")
    parser.add_argument("--gpu-hour", type=float, default=0.0, help="price")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and the server with it
    if given.what == "measure":
        measure(given.preset, given.check, given.costs)
    else:
        read = json.loads(given.costs.read_text())
        read["steps_s"] = {int(images): seconds for images, seconds in read["steps_s"].items()}
        print(plan(Measured(**read), given))


if __name__ == "__main__":
    main()
