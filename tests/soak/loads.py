"""A run of the suite: its plan, its servers, and the loads that its clients put on them."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.service import Oracle, Service
from tools.harness.client import EVERYBODY, Ask, Connection, Record

STREAMS = 0.1  # of the requests that come at random, and of those that tell capacity
RAMP = 0.2  # of a stretch, before rates are counted
ANSWER_S = 300.0  # for what is under way when a stretch ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of everything."""

    model: Path
    batching: Path  # one that is all arithmetic: few clients and many, and too many
    seconds: float = 15.0  # of each stretch of load
    most: int = 20_000  # requests of a stretch
    clients: tuple[int, ...] = (1, 16, 64, 256, 1000)
    few_and_many: tuple[int, int] = (16, 256)
    rounds: int = 3  # of what is compared, in turn
    storm: int = 2000  # clients, of whom half leave
    rates: tuple[float, ...] = (0.5, 0.9, 1.2)  # of capacity
    slo_s: float = 2.0  # of a whole request
    slow: int = 8  # clients that stop reading, and as many that stop writing
    fault_every: int = 100  # quanta
    seeds: int = 256  # different images; each is drawn alone once, to compare with


@dataclass(slots=True)
class Result:
    """What one stretch of load showed."""

    name: str
    outcomes: Counter = field(default_factory=Counter)
    rate: float | None = None  # images/s
    goodput: float | None = None  # requests/s within the SLO
    # queue, first row, whole: p50, p95, p99 in seconds
    spans: dict[str, list[float]] = field(default_factory=dict)
    growth: float | None = None  # resident memory over that of the warm process
    notes: list[str] = field(default_factory=list)
    skipped: bool = False  # the service lacks what it is about
    failures: list[str] = field(default_factory=list)  # what must not happen, and did
    missed: list[str] = field(default_factory=list)  # speeds that are less than was set out


class Soak:
    """The services and oracles of a run, each begun once."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.random = plan, random.Random(0)
        self._services: dict[tuple[Path, tuple[str, ...]], Service] = {}
        self._oracles: dict[Path, Oracle] = {}

    def oracle(self, model: Path, card: dict) -> Oracle:
        if model not in self._oracles:
            self._oracles[model] = Oracle(model, card)
        return self._oracles[model]

    def draw(self, **fields) -> Ask:
        return Ask(self.random.randrange(self.plan.seeds), **fields)

    async def service(self, model: Path, *flags: str, clients: int) -> tuple[Service, Oracle]:
        """The process with these flags, warmed up by as many clients at once as it will have."""
        if (model, flags) not in self._services:
            service = self._services[model, flags] = Service(model, *flags, *EVERYBODY)
            everybody = await gather(
                self,
                (
                    one_of_many(service, self.draw(stream=index % 16 == 0))
                    for index in range(clients)
                ),
            )
            ends = Counter(record.code or record.outcome for record in everybody)
            if ends.keys() != {"completed"}:
                raise RuntimeError(f"while the service warmed up, {dict(ends)} requests")
            await service.is_warm()
        service = self._services[model, flags]
        return service, self.oracle(model, service.card)

    async def crowded(
        self, model: Path | None = None, clients: int | None = None
    ) -> tuple[Service, Oracle]:
        """With a queue that takes everybody."""
        most = max(*self.plan.clients, self.plan.storm)
        return await self.service(
            model or self.plan.model, f"--max-queue {2 * most}", clients=clients or most
        )

    @contextlib.contextmanager
    def doomed(self, *flags: str, model: Path | None = None) -> Iterator[Service]:
        """A process of its own, which the phase ends."""
        service = Service(model or self.plan.model, *flags, *EVERYBODY)
        try:
            yield service
        finally:
            service.process.stop()

    def close(self) -> list[str]:
        """Ends every process; says which did not end well."""
        ended = {flags: service.process.stop() for (_, flags), service in self._services.items()}
        return [
            f"{' '.join(flags) or 'serve'}: exit status {status}"
            for flags, status in ended.items()
            if status
        ]


async def one_of_many(service: Service, ask: Ask, leave_after: float | None = None) -> Record:
    connection = service.connection()
    record = await connection.ask(ask, leave_after=leave_after)
    connection.close()
    return record


async def closed_loop(
    soak: Soak,
    service: Service,
    clients: int,
    make: Callable[[], Ask] | None = None,
    seconds: float | None = None,
    until: asyncio.Event | None = None,
    begin_s: float = 0.0,
) -> list[Record]:
    """So many clients, each of which asks again as it has its answer; for so long, and on until
    `until` is set.

    They begin within begin_s. Those that begin in the same moment stay in step: their images end
    together, and to answer 64 at once takes less of the processor than as many at random moments.
    """
    end = time.monotonic() + (soak.plan.seconds if seconds is None else seconds)
    records: list[Record] = []
    asked = 0

    async def client() -> None:
        nonlocal asked
        connection = service.connection()
        await asyncio.sleep(soak.random.uniform(0.0, begin_s))
        while asked < soak.plan.most and (
            time.monotonic() < end or not asked or (until and not until.is_set())
        ):
            asked += 1
            records.append(await connection.ask(make() if make else soak.draw()))
            if records[-1].outcome in ("refused", "lost"):
                await asyncio.sleep(0.1)
        connection.close()

    await gather(soak, (client() for _ in range(clients)))
    return records


async def arrivals(
    soak: Soak, service: Service, rate: float, seconds: float, seeds: int
) -> list[Record]:
    """Requests that come at random moments, whether those before them are answered or not; one in
    ten streams.

    They draw so many different images. Each says that it is worth nothing after the SLO, so that
    the service spends nothing on what would come too late.
    """
    idle: list[Connection] = []
    records: list[Record] = []

    async def one(due: float) -> None:
        connection = idle.pop() if idle else service.connection()
        ask = Ask(
            soak.random.randrange(seeds),
            stream=soak.random.random() < STREAMS,
            timeout=soak.plan.slo_s,
        )
        records.append(await connection.ask(ask, due=due))
        idle.append(connection)

    began = due = time.monotonic()
    async with asyncio.timeout(seconds + ANSWER_S), asyncio.TaskGroup() as group:
        for _ in range(soak.plan.most):
            if due > began + seconds:
                break
            await asyncio.sleep(due - time.monotonic())
            group.create_task(one(due))
            # after the first one, which comes at once: a busy machine's rate may be low
            due += soak.random.expovariate(rate)
    for connection in idle:
        connection.close()
    await asyncio.sleep(0)  # they are closed in the loop's next turn
    return records


async def gather(soak: Soak, works: Iterable[Awaitable]) -> list:
    """All of them, or TimeoutError: a client that is never answered does not stop the run."""
    async with asyncio.timeout(soak.plan.seconds + ANSWER_S):
        return await asyncio.gather(*works)


def images_per_second(
    records: list[Record], began: float, seconds: float, within_s: float = float("inf")
) -> float:
    """Of what was completed, and within so long, after the ramp and before the stretch ended."""
    first, last = began + RAMP * seconds, began + seconds
    return sum(
        record.ask.n
        for record in records
        if first <= record.ended < last
        and record.outcome == "completed"
        and record.seconds <= within_s
    ) / (last - first)
