"""What requests cost fronts and replicas, in seconds of processor time; capacity.py says what for."""

import statistics
import threading
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from http.client import HTTPConnection
from multiprocessing import get_context
from pathlib import Path
from urllib.parse import urlsplit

import torch

from linpix.model.checkpoint import Checkpoint
from linpix.model.config import PRESETS
from linpix.model.transformer import Transformer
from linpix.server.cluster.replica import take_cores
from linpix.server.engine.batch import Batcher
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.image_spec import ImageSpec
from linpix.server.engine.messages import Submission
from tests.server.cluster.test_local import processes

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # images of which a step is measured
QUANTA = 6                               # of each


def steps(preset: str, core: int) -> dict[int, float]:
    """Seconds of a step on one thread, and of what comes between quanta, by the number of images."""
    take_cores(core, 1)
    torch.manual_seed(0)
    net = Transformer(PRESETS[preset]).eval().requires_grad_(False)
    batcher, found = Batcher(new_decoder(Checkpoint(preset, net, {}, "", ()), max(ROWS), share=True)), {}
    for rows in ROWS:
        batcher.submit(Submission(str(rows), [ImageSpec(seed=seed) for seed in range(rows)]))
        for _ in range(2):  # to learn how many steps fit
            batcher.run_quantum()
        taken = []
        for _ in range(QUANTA):
            began = time.thread_time()
            done = batcher.run_quantum().passes
            taken.append((time.thread_time() - began) / done)
        found[rows] = statistics.median(taken)
        batcher.cancel(str(rows))
        batcher.run_quantum()
    batcher.decoder.close()
    return found


def steps_of_all(preset: str, replicas: int) -> dict[int, float]:
    """The mean of so many processes at once, which have the caches and the memory of a machine together."""
    with ProcessPoolExecutor(replicas, get_context("spawn")) as pool:
        all_of_them = list(pool.map(steps, [preset] * replicas, range(replicas)))
    return {rows: statistics.mean(found[rows] for found in all_of_them) for rows in ROWS}


def threads(driver: int) -> dict[tuple[str, int, int], float]:
    """Seconds that each thread of a cluster has had of a core, by the kind of its process, process and thread."""
    found = {}
    for pid, command in processes(driver).items():
        kind = command.removeprefix("ray::ServeReplica:linpix:").split(":")[0] if ":linpix:" in command else "others"
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                found[kind, pid, int(task.parent.name)] = int(task.read_text().split()[0]) / 1e9
            except OSError:
                continue  # it has ended
    return found


class Spent:
    """Seconds of a core, from its creation to its end, by the kind of process. Of each replica the busiest thread is
    apart, as `decoding`: it is the engine's, which calls the compiled kernels."""

    def __init__(self, driver: int) -> None:
        self._driver, self._before, self._own = driver, threads(driver), time.process_time()

    def end(self) -> dict[str, float]:
        found = defaultdict[str, float](float, client=time.process_time() - self._own)
        engines: dict[int, float] = {}
        for (kind, pid, thread), seconds in threads(self._driver).items():
            taken = seconds - self._before.get((kind, pid, thread), 0.0)
            found[kind] += taken
            if kind == "Engine":
                engines[pid] = max(engines.get(pid, 0.0), taken)
        found["decoding"] = sum(engines.values())
        found["Engine"] -= found["decoding"]
        return found


def ask(url: str, clients: int, seconds: float, warm_s: float = 0.0) -> tuple[list[float], int]:
    """Clients that ask for one image again and again; seconds that those answered after warm_s took, and the bytes of
    one answer."""
    took: list[float] = []
    sizes: list[int] = []
    where, began = urlsplit(url), time.monotonic()

    def client() -> None:
        there = HTTPConnection(where.hostname or "", where.port, timeout=120)
        while (asked := time.monotonic()) < began + warm_s + seconds:
            there.request("POST", "/v1/images/generations", b'{"n": 1}', {"content-type": "application/json"})
            answer = there.getresponse()
            body = answer.read()
            assert answer.status == 200, body
            if began + warm_s <= (now := time.monotonic()) < began + warm_s + seconds:
                took.append(now - asked)
            sizes.append(len(body) + len(str(answer.headers)))
        there.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took, sizes[-1]
