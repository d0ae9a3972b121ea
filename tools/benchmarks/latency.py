"""How long completions take over HTTP, by what is hidden and n, beside plain samples; and what they
cost others.

    python -m tools.benchmarks.latency [--model mnist-conditional] [--clients 1,16,64] [--n 1,4]
    [--seconds 3]
                                       [--rounds 3]

A client asks again as soon as it has its answer; what is completed are digits that the model drew
itself. Cells of the first table are the median and the 99 % quantile of all rounds, in ms. In the
second, 8 clients have plain samples drawn while 8 more do something else: their latency, and the
mean step of the engine with its mean number of images. Rounds take turns, so that all lines see the
machine alike.
"""

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain, product

import numpy as np

from linpix.model import ops, provenance
from tools.benchmarks.occlusion import Asked, masks, upload
from tools.harness.arguments import new_parser, numbers
from tools.harness.client import EVERYBODY, Ask, Connection, Picture
from tools.harness.commands import ROOT
from tools.harness.machine import machine
from tools.harness.servers import Process, serving

PICTURES, HALF = 20, 8
PLAIN = "plain sample"


Pictures = list[Picture | None]  # what is completed in turn; None: samples


def asking(pictures: Pictures, n: int) -> Callable[[int], Ask]:
    return lambda index: Ask(index, n=n, picture=pictures[index % len(pictures)])


Asking = Sequence[Callable[[int], Ask]]  # what each client asks for, by number


async def latencies(
    server: Process, clients: Asking, seconds: float, others: Asking = ()
) -> list[float]:
    """Seconds of each answer that clients get while others ask too. Raises RuntimeError for one
    that is not a completed image.
    """
    host, port = re.fullmatch(r"http://(.+):(\d+)", server.url).groups()
    end = time.monotonic() + seconds

    async def client(index: int, make: Callable[[int], Ask]) -> list[float]:
        connection, found = Connection(host, int(port)), []
        while time.monotonic() < end:
            record = await connection.ask(make(1000 * index + len(found)))
            if record.outcome != "completed":
                raise RuntimeError(
                    f"a request was {record.outcome}: {record.code or record.broken}"
                )
            found.append(record.seconds)
        connection.close()
        return found

    running = [client(index, make) for index, make in enumerate([*clients, *others])]
    by_client = await asyncio.gather(*running)
    return [*chain.from_iterable(by_client[: len(clients)])]


def cell(seconds: list[float]) -> str:
    return " / ".join(f"{1000 * np.quantile(seconds, share):.0f}" for share in (0.5, 0.99))


class Steps:
    """The engine's steps since this was made: their mean duration in us and number of images."""

    def __init__(self, server: Process) -> None:
        self.server, self.before = server, self._read(server)

    @staticmethod
    def _read(server: Process) -> dict[str, float]:
        text, found = server.get("/metrics").text, {}
        for metric, value in product(("step_seconds", "step_batch_size"), ("sum", "count")):
            name = f"{metric}_{value}"
            samples = re.findall(rf"^linpix_engine_{name}(?:{{.*}})? (\S+)$", text, re.M)
            found[name] = sum(map(float, samples))
        return found

    def taken(self) -> tuple[float, float]:
        now = {name: value - self.before[name] for name, value in self._read(self.server).items()}
        return (
            1e6 * now["step_seconds_sum"] / now["step_seconds_count"],
            now["step_batch_size_sum"] / now["step_batch_size_count"],
        )


def kinds_of(server: Process, model: str) -> dict[str, Pictures]:
    digits = Asked(server.url, model).drawn([index % 10 for index in range(PICTURES)])
    kinds: dict[str, Pictures] = {PLAIN: [None]}
    for name, hidden in masks(PICTURES).items():
        pairs = zip(digits, hidden, strict=True)
        kinds[f"{name} hidden"] = [Picture(upload(*pair)) for pair in pairs]
    return kinds


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--model", default="mnist-conditional", help="a checkpoint of 28x28 grey pixels, by name"
    )
    parser.add_argument("--clients", type=numbers, default=[1, 16, 64])
    parser.add_argument("--n", type=numbers, default=[1, 4])
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        help="of each line and number of clients, in each round",
    )
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with serving(
        ROOT / "checkpoints", f"--models {given.model} --max-queue 1024", *EVERYBODY
    ) as server:
        kinds = kinds_of(server, given.model)
        lines = {"nothing": [], **{name: [asking(kinds[name], 1)] * HALF for name in kinds}}
        for turn in range(given.rounds + 1):
            if turn < 2:  # the first one was to warm up
                alone, beside, steps = (defaultdict(list) for _ in range(3))
            seconds = given.seconds if turn else 0.1
            for n, clients, name in product(given.n, given.clients, kinds):
                asked = [asking(kinds[name], n)] * clients
                alone[name, n, clients] += asyncio.run(latencies(server, asked, seconds))
            for name, others in lines.items():
                taken = Steps(server)
                sampling = [asking([None], 1)] * HALF
                beside[name] += asyncio.run(latencies(server, sampling, seconds, others))
                steps[name].append(taken.taken())
    print(f"{machine()}; kernel {ops.kernel()}, commit {provenance.commit()}; {given.model}\n")
    heads = [f"{clients} client{'s' * (clients > 1)}" for clients in given.clients]
    print(f"| | n | {' | '.join(heads)} |")
    print("|---" * (2 + len(heads)) + "|")
    for name, n in product(kinds, given.n):
        cells = [cell(alone[name, n, clients]) for clients in given.clients]
        print(f"| {name} | {n} | {' | '.join(cells)} |")
    print(
        "\n| beside 8 clients that sample, 8 more | their latency, ms | a step, us | images in it |"
    )
    print("|---|---|---|---|")
    for name in lines:
        step, images = np.median(steps[name], 0)
        print(f"| {name} | {cell(beside[name])} | {step:.0f} | {images:.1f} |")


if __name__ == "__main__":
    main()
