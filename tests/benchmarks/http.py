"""What HTTP costs: images/s of many clients at once, over that of `linpix sample` at the same batch size.

    python -m tests.benchmarks.http [--model mnist-small | --preset mnist] [--batch 64] [--rounds 4] [--repeat 3]

So many clients as fill the batch each send `--rounds` requests, one after the other; sample makes as many images. One
round is a single burst, most of which may be its beginning and its end. A preset has random weights, which does not
change its speed.
Both are measured in turn, as whole processes of this machine; the ratio is of medians.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import torch

from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.model.transformer import Transformer
from tests.server.conftest import serving


def sampled(model: str, batch: int, rounds: int, folder: Path) -> float:
    command = [sys.executable, "-m", "linpix", "sample", "--model", model, "--count", str(batch * rounds),
               "--batch", str(batch), "--out", str(folder), "--json"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(json.loads(printed)["images_per_second"])


def served(url: str, clients: int, rounds: int, n: int) -> float:
    with httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=clients)) as http, \
            ThreadPoolExecutor(clients) as pool:

        def ask(_: int) -> list[int]:
            return [http.post("/v1/images/generations", json={"n": n}).status_code for _ in range(rounds)]

        began = time.perf_counter()
        answers = list(pool.map(ask, range(clients)))
        seconds = time.perf_counter() - began
    assert all(status == 200 for statuses in answers for status in statuses)
    return clients * rounds * n / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mnist-small", help="a checkpoint, by name or folder")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="instead of a checkpoint, with random weights")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4, help="requests of each client")
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if given.preset:
            folder = Path(made) / given.preset
            torch.manual_seed(0)
            source = {"data": "random weights", "class_names": [str(label) for label in range(10)]}
            checkpoint.save(folder, Transformer(PRESETS[given.preset]), source, "# random\n")
        else:
            folder = checkpoint.find(given.model).resolve()
        measure(folder, given.batch, given.rounds, given.repeat)


def measure(folder: Path, batch: int, rounds: int, repeat: int) -> None:
    rates: dict[str, list[float]] = {"sample": [], "http, n=1": [], "http, n=8": []}
    with serving(folder.parent, "--models", folder.name, "--slots", str(batch)) as server, \
            tempfile.TemporaryDirectory() as out:
        served(server.url, 1, 1, 1)  # warm
        for _ in range(repeat):
            rates["sample"].append(sampled(str(folder), batch, rounds, Path(out)))
            rates["http, n=1"].append(served(server.url, batch, rounds, 1))
            rates["http, n=8"].append(served(server.url, batch // 8, rounds, 8))
    base = statistics.median(rates["sample"])
    print(f"| {folder.name}, batch {batch} | images/s | of `linpix sample` |\n|---|---|---|")
    for name, values in rates.items():
        print(f"| {name} | {statistics.median(values):.1f} ({min(values):.1f}..{max(values):.1f}) "
              f"| {statistics.median(values) / base:.2f} |")


if __name__ == "__main__":
    main()
