"""Images/s that `linpix serve` answers to many clients, which are processes of plain sockets: wrk
need not be there.

    python -m tools.benchmarks.service [--model mnist-large] [--load 64x1,64x16,16x256] [--seconds
    8]
                                       [--reload] [--results FILE] [flags of linpix serve]

A load is CLIENTSxN: so many clients ask for N images each, and again when they have them, as
application/x-npy. What is under way in the first seconds, while the load becomes steady, is not
counted. --reload: then, while the first load runs, SIGHUP replaces the model's weights and adds a
second model. At the end both are asked.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from linpix.model import checkpoint, folders
from tools.harness.arguments import new_parser
from tools.harness.servers import Process, eventually, serving
from tools.results import Found, Results

PROCESSES = 8  # of clients


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--results", type=Path, default=Path("build/gpu-check/results.jsonl"))
    parser.add_argument("--model", default="mnist-large")
    parser.add_argument(
        "--load",
        type=lambda text: [[*map(int, each.split("x"))] for each in text.split(",")],
        default=[[64, 1], [64, 16], [64, 64], [256, 16], [16, 256]],
    )
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--reload", action="store_true")
    given, flags = parser.parse_known_args()
    folder, results = folders.find(given.model).resolve(), Results(given.results)
    variables = [
        f"{name}={value}" for name, value in os.environ.items() if name.startswith("LINPIX_")
    ]
    with serving(
        folder.parent, f"--models {folder.name}", *flags, before=("env", *variables)
    ) as server:
        for clients, n in given.load:
            results.measure(
                partial(loaded, server, clients, n, given.seconds),
                part="service",
                model=folder.name,
                flags=flags,
                clients=clients,
                n=n,
            )

    if not given.reload:
        return
    with tempfile.TemporaryDirectory() as others:
        shutil.copytree(folder, Path(others) / folder.name)
        with serving(Path(others), *flags, before=("env", *variables)) as server:
            work = partial(reloaded, server, Path(others) / folder.name, given)
            results.measure(work, part="reload", model=folder.name, flags=flags)


def reloaded(server: Process, folder: Path, given: argparse.Namespace) -> Found:
    """Raises RuntimeError if the server does not do it."""
    [clients, n], *_ = given.load
    with ThreadPoolExecutor(1) as thread:
        reloading = thread.submit(_reload, server, folder)
        found = loaded(server, clients, n, 4 * given.seconds)
        found["seconds_until_reloaded"] = reloading.result()
    with_both = loaded(server, clients, n, given.seconds, (folder.name, "second"))
    return found | {f"{name}, with two models": value for name, value in with_both.items()}


def _reload(server: Process, folder: Path) -> float:
    """Seconds until other weights and a second model are served."""
    shutil.copytree(folder, folder.with_name("second"))
    net = checkpoint.load(folder)
    for parameter in net.parameters():
        parameter.mul_(0.999)
    checkpoint.save(folder, net, {}, "")
    began = time.monotonic()
    server.process.send_signal(signal.SIGHUP)
    for outcome in ("replaced", "added"):
        metric = f'linpix_checkpoint_reloads_total{{outcome="{outcome}"}}'
        if not eventually(lambda metric=metric: server.metric(metric) == 1):
            raise RuntimeError(f"no model was {outcome} after SIGHUP")
    return time.monotonic() - began


def loaded(
    server: Process, clients: int, n: int, seconds: float, models: tuple[str, ...] = ("",)
) -> Found:
    """models: that are asked in turn, client by client; "" is the usual one."""
    processes, steady = min(PROCESSES, clients), time.monotonic() + seconds / 2
    answers = multiprocessing.Queue()
    each = [
        multiprocessing.Process(
            target=_clients,
            args=(
                server.url,
                [models[i % len(models)] for i in range(index, clients, processes)],
                n,
                steady,
                steady + seconds,
                answers,
            ),
        )
        for index in range(processes)
    ]
    for process in each:
        process.start()
    found = []
    for _ in each:
        found += answers.get()
    for process in each:
        process.join()
    return {
        "images_per_second": found.count(200) * n / seconds,
        "refused": sorted({*found} - {200}),
    }


def _clients(
    url: str,
    asking: list[str],
    n: int,
    steady: float,
    end: float,
    answers: multiprocessing.Queue,
) -> None:
    """A client for each model in `asking`. Puts a list of the statuses of answers that came between
    the two times.
    """
    where, found = urllib.parse.urlsplit(url), list[int]()

    def ask(model: str) -> None:
        asked = {"n": n, "model": model} if model else {"n": n}
        body = json.dumps(asked).encode()
        request = (
            f"POST /v1/images/generations HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type:"
            " application/json\r\naccept: application/x-npy\r\ncontent-length:"
            f" {len(body)}\r\n\r\n"
        ).encode() + body
        with socket.create_connection((where.hostname, where.port), 600) as connection:
            answer = connection.makefile("rb")
            while time.monotonic() < end:
                connection.sendall(request)
                status, length = int(answer.readline().split()[1]), 0
                while (line := answer.readline()) != b"\r\n":
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                answer.read(length)
                if steady < time.monotonic() < end:
                    found.append(status)

    threads = [threading.Thread(target=ask, args=(model,)) for model in asking]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.put(found)


if __name__ == "__main__":
    main()
