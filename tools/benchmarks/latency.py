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
from collections.abc import Callable

import numpy as np

from linpix.model import ops, provenance
from tools.benchmarks.occlusion import Asked, masks, upload
from tools.harness.arguments import new_parser, numbers
from tools.harness.client import EVERYBODY, Ask, Connection, Picture
from tools.harness.machine import machine
from tools.harness.servers import ROOT, Process, serving

PICTURES, HALF = 20, 8
PLAIN = "plain sample"


def asking(pictures: list[Picture | None], n: int) -> Callable[[int], Ask]:
    return lambda index: Ask(index, n=n, picture=pictures[index % len(pictures)])


async def latencies(
    server: Process, clients: list[Callable[[int], Ask]], seconds: float
) -> list[list[float]]:
    """Seconds of each answer, by client. Raises RuntimeError for one that is not a completed
    image.
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

    return await asyncio.gather(*(client(index, make) for index, make in enumerate(clients)))


def cell(seconds: list[float]) -> str:
    return " / ".join(f"{1000 * np.quantile(seconds, share):.0f}" for share in (0.5, 0.99))


class Steps:
    """The engine's steps since this was made: their mean duration in us and number of images."""

    def __init__(self, server: Process) -> None:
        self.server, self.before = server, self._read(server)

    @staticmethod
    def _read(server: Process) -> dict[str, float]:
        text = server.get("/metrics").text
        return {
            name: sum(
                float(value)
                for value in re.findall(rf"^linpix_engine_{name}(?:{{.*}})? (\S+)$", text, re.M)
            )
            for name in (
                "step_seconds_sum",
                "step_seconds_count",
                "step_batch_size_sum",
                "step_batch_size_count",
            )
        }

    def taken(self) -> tuple[float, float]:
        now = {name: value - self.before[name] for name, value in self._read(self.server).items()}
        return (
            1e6 * now["step_seconds_sum"] / now["step_seconds_count"],
            now["step_batch_size_sum"] / now["step_batch_size_count"],
        )


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
        ROOT / "checkpoints", "--models", given.model, "--max-queue", "1024", *EVERYBODY
    ) as server:
        digits = Asked(server.url, given.model).drawn([index % 10 for index in range(PICTURES)])
        kinds: dict[str, list[Picture | None]] = {PLAIN: [None]}
        for name, hidden in masks(PICTURES).items():
            kinds[f"{name} hidden"] = [
                Picture(upload(*pair)) for pair in zip(digits, hidden, strict=True)
            ]
        found: dict[tuple[str, int, int], list[float]] = defaultdict(list)
        beside: dict[str, tuple[list[float], list[tuple[float, float]]]] = defaultdict(
            lambda: ([], [])
        )
        for turn in range(given.rounds + 1):  # the first is to warm up
            for n in given.n:
                for clients in given.clients:
                    for name, pictures in kinds.items():
                        by_client = asyncio.run(
                            latencies(
                                server,
                                [asking(pictures, n)] * clients,
                                given.seconds if turn else 0.1,
                            )
                        )
                        found[name, n, clients] += (
                            [each for one in by_client for each in one] if turn else []
                        )
            for name, others in {
                "nothing": [],
                **{name: [asking(kinds[name], 1)] * HALF for name in kinds},
            }.items():
                steps = Steps(server)
                by_client = asyncio.run(
                    latencies(
                        server, [asking([None], 1)] * HALF + others, given.seconds if turn else 0.1
                    )
                )
                if turn:
                    beside[name][0].extend(each for one in by_client[:HALF] for each in one)
                    beside[name][1].append(steps.taken())
    print(f"{machine()}; kernel {ops.kernel()}, commit {provenance.commit()}; {given.model}\n")
    print(
        "| | n | "
        + " | ".join(f"{clients} client{'s' * (clients > 1)}" for clients in given.clients)
        + " |"
    )
    print("|---" * (2 + len(given.clients)) + "|")
    for name in kinds:
        for n in given.n:
            cells = [cell(found[name, n, clients]) for clients in given.clients]
            print(f"| {name} | {n} | {' | '.join(cells)} |")
    print(
        "\n| beside 8 clients that sample, 8 more | their latency, ms | a step, us | images in it |"
    )
    print("|---|---|---|---|")
    for name, (seconds, taken) in beside.items():
        step, images = np.median(taken, 0)
        print(f"| {name} | {cell(seconds)} | {step:.0f} | {images:.1f} |")


if __name__ == "__main__":
    main()
