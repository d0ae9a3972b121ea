"""Images/s that `linpix serve` answers to many clients, which are processes of plain sockets: wrk
need not be there.

    python -m tools.benchmarks.service [--model mnist-large] [--load 64x1,64x16,16x256] [--seconds
    8]
                                       [--results FILE] [flags of linpix serve]

A load is CLIENTSxN: so many clients ask for N images each, and again when they have them, as
application/x-npy. What is under way in the first seconds, while the load becomes steady, is not
counted.
"""

import json
import multiprocessing
import os
import socket
import threading
import time
import urllib.parse
from functools import partial
from pathlib import Path

from linpix.model import folders
from tools.harness.arguments import new_parser
from tools.harness.servers import Process, serving
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


def loaded(server: Process, clients: int, n: int, seconds: float) -> Found:
    processes, steady = min(PROCESSES, clients), time.monotonic() + seconds / 2
    answers = multiprocessing.Queue()
    each = [
        multiprocessing.Process(
            target=_clients,
            args=(server.url, clients // processes, n, steady, steady + seconds, answers),
        )
        for _ in range(processes)
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
    url: str, count: int, n: int, steady: float, end: float, answers: multiprocessing.Queue
) -> None:
    """Puts a list of the statuses of answers that came between the two times."""
    where, body, found = urllib.parse.urlsplit(url), json.dumps({"n": n}).encode(), list[int]()
    request = (
        f"POST /v1/images/generations HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type:"
        f" application/json\r\naccept: application/x-npy\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body

    def ask() -> None:
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

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.put(found)


if __name__ == "__main__":
    main()
