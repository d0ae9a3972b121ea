"""What a quantum costs the host: Python, numpy, copies and reports, with a GPU that answers at
once.

    python -m tools.benchmarks.host [--images 64,1024,4096] [--n 16] [--repeat 5] [--profile]

The engine, the decoder for a GPU, its pool and the event loop's part are the server's own. The pool
is in main memory, and its kernels only move positions on, in a time that is left out. A quantum is
one image row of `mnist`. Times are of the processor, in us of a quantum, and medians of --repeat
runs. The first columns are a quantum in which no image joins or ends. The last are all quanta while
requests of n images come and go, as many at a time as there are slots. --profile lists the
functions that take longest. Last comes what it costs the host to have 64 images of
`mnist-conditional` read, to see whether they are recognised, and in one piece.

`python -m tools.benchmarks.host serve FLAGS` is `linpix serve` with such decoders: see
tools/benchmarks/http.py.
"""

import argparse
import asyncio
import cProfile
import dataclasses
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from linpix.__main__ import main as linpix
from linpix.model.checkpoint import Checkpoint, named
from linpix.model.config import PRESETS
from linpix.model.cuda import GpuPool
from linpix.model.nets import net_for
from linpix.model.packing import ROWS
from linpix.server.engine import catalogue
from linpix.server.engine.admission import Admission
from linpix.server.engine.decode import engine
from linpix.server.engine.decode.compiled import CudaDecoder
from linpix.server.engine.decode.engine import Engine
from linpix.server.engine.image import images_of
from linpix.server.engine.job import Job
from linpix.server.engine.request import Request, Requests
from linpix.server.engine.thread import EngineThread
from linpix.server.metrics import Metrics
from tools.harness.arguments import new_parser, numbers
from tools.harness.machine import machine


class Kernels:
    """Kernels that only move positions on. seconds: that this took."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def decode_quantum(self, *given: Any) -> tuple[None, torch.Tensor, torch.Tensor, torch.Tensor]:
        steps, most = given[1][ROWS.index("steps")], given[6][1]
        taken = steps.clamp(max=most)
        return None, torch.ones_like(taken, dtype=torch.bool), taken, taken

    def prefill(self, *given: Any) -> None:
        pass

    def read(self, *given: Any) -> torch.Tensor:
        return torch.zeros(len(given[1]), given[2].shape[1])

    def recorded(self, work: Callable[[], object]) -> Callable[[], None]:
        def replay() -> None:
            began = time.thread_time()
            work()
            self.seconds += time.thread_time() - began

        return replay


class Pool(GpuPool):
    """Its images have a hundred grey pixels each from the start."""

    def put(self, slots: Any, canvas: torch.Tensor | None, known: torch.Tensor | None) -> None:
        super().put(slots, canvas, known)
        if canvas is None:
            self.canvas[slots, 300:400] = torch.arange(100, 200, dtype=torch.uint8)


def instant(
    checkpoint: Checkpoint,
    slots: int,
    *_: object,
    kernels: Kernels | None = None,
    **options: object,
) -> CudaDecoder:
    """The decoder of a GPU that answers at once. Its state has one layer, so that thousands fit
    into main memory.
    """
    config, kernels = dataclasses.replace(checkpoint.net.config, layers=1), kernels or Kernels()
    pool = Pool(
        net_for(config),
        slots,
        precision="fp32",
        device="cpu",
        operators=kernels,
        recorder=kernels.recorded,
    )
    pool.record(slots)
    return CudaDecoder(checkpoint, slots, pool, precision="fp32")


class Times(NamedTuple):
    engine: float  # us of a quantum, on the engine's thread
    loop: float  # and on the event loop


class Host:
    """An engine, and the event loop's part, on one thread."""

    def __init__(self, checkpoint: Checkpoint, slots: int, n: int) -> None:
        self.kernels, self.thread, self.n, self.asked = Kernels(), EngineThread(), n, 0
        self.engine = Engine(instant(checkpoint, slots, kernels=self.kernels))
        metrics = Metrics(["linear"], kernel="none")
        self.admission = Admission(
            {"preset": self.engine}, metrics, self.thread, max_queue=2 * slots
        )
        self.requests = Requests(self.admission, metrics)

    def ask(self, images: int) -> None:
        model = self.admission.models["preset"]
        request = Request(
            str(self.asked),
            "generations",
            "somebody",
            Job(count=images, seed=self.asked),
            model,
            600.0,
        )
        self.asked += images
        model.check_time(request)
        self.requests.in_progress[request.id] = request
        self.admission.begin(request)
        self.thread._take_calls(wait=False)

    def quantum(self) -> Times:
        self.kernels.seconds, began = 0.0, time.thread_time()
        report = self.engine.run_quantum()
        decoded = time.thread_time()
        self.admission.quantum_done(self.engine, report)
        ended = time.thread_time()
        for request in [*self.requests.in_progress.values()]:
            if not request.undone:
                self.requests.release(request, "completed")
        self.thread._take_calls(wait=False)
        return Times(1e6 * (decoded - began - self.kernels.seconds), 1e6 * (ended - decoded))

    def together(self) -> list[Times]:
        """Quanta in which nothing joins or ends, of images that began together: after their first
        image row.
        """
        slots = self.engine.slots.count
        self.ask(slots)
        while self.engine.slots.free or not self.engine.busy:
            self.quantum()
        for _ in range(3):
            self.quantum()
        found = [self.quantum() for _ in range(12)]
        while self.engine.busy:
            self.quantum()
        return found

    def apart(self, profile: cProfile.Profile | None = None) -> list[Times]:
        """All quanta while requests come and go."""
        slots, found, rows = self.engine.slots.count, list[Times](), self.engine.config.height
        for number in range(3 * rows):
            for _ in range(-(-slots // rows // self.n)):
                if self.admission.models["preset"].undone + self.n <= slots:
                    self.ask(self.n)
            if number == 2 * rows and profile:
                profile.enable()
            taken = self.quantum()
            if number >= 2 * rows:
                found.append(taken)
        if profile:
            profile.disable()
        while self.engine.busy:
            self.quantum()
        return found


async def measure(given: argparse.Namespace) -> None:
    net = net_for(dataclasses.replace(PRESETS["mnist"], layers=1)).eval()
    checkpoint = Checkpoint("preset", net, {}, "", tuple("0123456789"))
    print(
        f"{machine()}; mnist, requests of {given.n}\n\n| images | none joins or ends, us a quantum:"
        " engine | event loop | of both, us an image | they come and go: engine | event loop | of"
        " both, us an image |\n|---|---|---|---|---|---|---|"
    )
    for images in given.images:
        host = Host(checkpoint, images, min(given.n, images))
        cells = []
        for kind in (host.together, host.apart):
            runs = [kind() for _ in range(given.repeat)]
            times = np.median([np.mean(run, axis=0) for run in runs], axis=0)
            cells += [f"{times[0]:.0f}", f"{times[1]:.0f}", f"{sum(times) / images:.2f}"]
        print(f"| {images} | {' | '.join(cells)} |", flush=True)
        if given.profile:
            profile = cProfile.Profile()
            host.apart(profile)
            pstats.Stats(profile).sort_stats("tottime").print_stats(20)
    decoder = instant(named("mnist-conditional"), 64)
    slots, images = list(range(1, 65)), images_of(Job(count=64, seed=0), "drawn")
    for slot, image in zip(slots, images, strict=True):
        image.slot = slot
    decoder.take(images)
    times = list[float]()
    for _ in range(10 * given.repeat):
        began = time.thread_time()
        decoder.judge(slots)
        times.append((time.thread_time() - began) / 64)
    print(f"\nto judge an image: {1e6 * statistics.median(times):.0f} us")


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--images", type=numbers, default=[64, 1024, 4096])
    parser.add_argument("--n", type=int, default=16, help="images a request")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    engine.PARTS = PRESETS["mnist"].height  # quanta of one image row
    asyncio.run(measure(given))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        catalogue.__dict__["new_decoder"] = instant
        sys.exit(linpix())
    main()
