"""What serving by replicas costs and gains: images/s against one plain server, and the hop from a front to a replica.

    python -m tests.benchmarks.replicas [--preset mnist] [--clients 64] [--seconds 6] [--repeat 5]

On one machine a plain server with all cores, and `--replicas 2 --fronts 2` with half of the cores each, asked in turns:
the pace of a machine that others share changes within minutes. What the idle cluster uses of the cores, it prints: so
much the plain server lacks. The clients, wrk's (Debian: apt install wrk), ask for
one image again and again. The ratio is the median of those of the turns. The hop is what each front measures
(linpix_hop_seconds) of answers in one piece, for 1, 16 and 64 clients: p50 and p95 by the buckets.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.model.transformer import Transformer
from tests.benchmarks.http import by_wrk
from tests.benchmarks.spending import Spent
from tests.server.conftest import Process, serving

HOPS = (1, 16, 64)  # clients
IDLE_S = 4.0


def hops(server: Process) -> dict[float, float]:
    """Answers so far by the upper end of their bucket, of all fronts."""
    time.sleep(1.5)  # for the beats of all fronts
    counts: dict[float, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "linpix_hop_seconds_bucket":
                end = float(sample.labels["le"])
                counts[end] = counts.get(end, 0.0) + sample.value
    return counts


def quantile(before: dict[float, float], after: dict[float, float], part: float) -> float:
    """Seconds, evenly within a bucket."""
    counts = {end: count - before.get(end, 0.0) for end, count in sorted(after.items())}
    wanted, low, below = part * max(counts.values()), 0.0, 0.0
    for end, count in counts.items():
        if count >= wanted:
            return low + (end - low) * (wanted - below) / (count - below) if end < float("inf") else low
        low, below = end, count
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="mnist")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / given.preset
        torch.manual_seed(0)
        checkpoint.save(folder, Transformer(PRESETS[given.preset]),
                        {"data": "random weights", "class_names": list("0123456789")}, "# random\n")
        models = ("--models", folder.name)
        with (serving(folder.parent, *models) as plain,
              serving(folder.parent, *models, "--replicas", "2", "--fronts", "2") as cluster):
            for server in (plain, cluster):
                while httpx.get(server.url + "/readyz").status_code != 200:
                    time.sleep(0.05)
            spent = Spent(cluster.process.pid)
            time.sleep(IDLE_S)
            print(f"the idle cluster uses {sum(spent.end().values()) / IDLE_S:.2f} cores", flush=True)
            ratios = []
            for _ in range(given.repeat):
                rates = [by_wrk(server.url, given.clients, 1, given.seconds, "*/*")[0] for server in (plain, cluster)]
                ratios.append(rates[1] / rates[0])
                print(f"images/s: {rates[0]:.1f} of one plain server, {rates[1]:.1f} of 2 replicas by 2 fronts, "
                      f"{ratios[-1]:.2f}", flush=True)
            print(f"ratio: {statistics.median(ratios):.2f}", flush=True)
            for clients in HOPS:
                before = hops(cluster)
                by_wrk(cluster.url, clients, 1, given.seconds, "*/*")
                after = hops(cluster)
                print(f"hop, {clients} clients: p50 {quantile(before, after, 0.5) * 1e3:.1f} ms, "
                      f"p95 {quantile(before, after, 0.95) * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
