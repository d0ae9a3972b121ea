"""A discrete-event model of fronts and replicas: what their throughput and latency follow from.

It knows threads that share cores, fronts, and engines whose images take slots between quanta. Fronts choose replicas by
the code of server/cluster/choosing.py. Nothing waits for a disk or a network here. Costs are in seconds of one core;
capacity.py measures them.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from linpix.server.cluster.choosing import Backlogs, by_end
from linpix.server.cluster.messages import Load, Order
from linpix.server.engine.ledger.ticket import Demand
from linpix.server.engine.schedule.quantum import QUANTUM_S

Call = Callable[[], None]
STATS_S = 0.5  # time between two reports of a replica's load to the fronts: server/cluster/deployments.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of one core a request of one image, half of it before the image is drawn and half after."""

    front_s: float
    replica_s: float               # apart from decoding
    client_s: float = 0.0          # where clients have the same cores
    steps_s: dict[int, float]      # a step of the engine by its number of images, what is between quanta included
    length: int                    # steps of an image
    row: int                       # steps of a quantum at most

    def step_s(self, images: int) -> float:
        """Between measured numbers of images on a straight line; beyond the last, as if each cost the same."""
        sizes = sorted(self.steps_s)
        if images >= sizes[-1]:
            return self.steps_s[sizes[-1]] * images / sizes[-1]
        return float(np.interp(images, sizes, [self.steps_s[size] for size in sizes]))


class World:
    """Simulated time, and what happens in it."""

    def __init__(self, seed: int = 0) -> None:
        self.now, self.chance = 0.0, random.Random(seed)
        self._events: list[tuple[float, int, Call]] = []
        self._order = itertools.count()

    def after(self, seconds: float, call: Call) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), call))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
        self.now = until


class Cores:
    """So many cores, which all jobs under way share equally; one job has one core at most.

    All jobs get the same share, so a job is done once each has been served as long as it takes (virtual time).
    """

    def __init__(self, world: World, cores: float) -> None:
        self._world, self._cores = world, cores
        self._served, self._at = 0.0, 0.0  # seconds that a job since the beginning would have had, and when that was so
        self._jobs: list[tuple[float, int, Call]] = []
        self._order, self._looks = itertools.count(), 0

    def start(self, seconds: float, done: Call) -> None:
        self._advance()
        heapq.heappush(self._jobs, (self._served + seconds, next(self._order), done))
        self._look()

    @property
    def _share(self) -> float:
        return min(1.0, self._cores / len(self._jobs)) if self._jobs else 0.0

    def _advance(self) -> None:
        self._served += (self._world.now - self._at) * self._share
        self._at = self._world.now

    def _look(self) -> None:
        """Come back when the first job will be done, unless another begins or ends before."""
        self._looks += 1
        if self._jobs:
            look = self._looks
            self._world.after(max(0.0, self._jobs[0][0] - self._served) / self._share,
                              lambda: self._end() if look == self._looks else None)

    def _end(self) -> None:
        self._advance()
        _, _, done = heapq.heappop(self._jobs)
        self._look()
        done()


class Thread:
    """Does one thing after the other, in the order in which they came."""

    def __init__(self, cores: Cores) -> None:
        self._cores, self._busy = cores, False
        self._todo: deque[tuple[float, Call]] = deque()

    def do(self, seconds: float, then: Call) -> None:
        self._todo.append((seconds, then))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._todo)
        if self._busy:
            seconds, then = self._todo.popleft()
            self._cores.start(seconds, lambda: self._end(then))

    def _end(self, then: Call) -> None:
        then()
        self._next()


@dataclass(slots=True)
class _Image:
    left: int  # steps
    done: Call


class Replica:
    """An event loop and an engine thread. Waiting images take free slots between quanta."""

    def __init__(self, cores: Cores, costs: Costs, slots: int) -> None:
        self._loop, self._engine, self._costs, self._slots = Thread(cores), Thread(cores), costs, slots
        self._waiting: deque[_Image] = deque()
        self._running: list[_Image] = []
        self._drawing = False

    def load(self, now: float) -> Load:
        """In steps of an image."""
        return Load(at=now, ahead=float(len(self._waiting) * self._costs.length + sum(i.left for i in self._running)),
                    pace=self._slots / self._costs.step_s(self._slots), room=1)

    def draw(self, done: Call) -> None:
        half_s = self._costs.replica_s / 2
        self._loop.do(half_s, lambda: self._enqueue(_Image(self._costs.length, lambda: self._loop.do(half_s, done))))

    def _enqueue(self, image: _Image) -> None:
        self._waiting.append(image)
        if not self._drawing:
            self._quantum()

    def _quantum(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            self._running.append(self._waiting.popleft())
        self._drawing = bool(self._running)
        if self._drawing:
            step_s = self._costs.step_s(len(self._running))
            fit = max(1, min(self._costs.row, int(QUANTUM_S / step_s)))
            steps = min(fit, max(image.left for image in self._running))
            self._engine.do(steps * step_s, lambda: self._advance(steps))

    def _advance(self, steps: int) -> None:
        for image in self._running:
            image.left -= steps
        over = [image for image in self._running if image.left <= 0]
        self._running = [image for image in self._running if image.left > 0]
        for image in over:
            image.done()
        self._quantum()


class Front:
    """Gives each request to the replica that will be done first, as far as this front knows."""

    def __init__(self, world: World, cores: Cores, costs: Costs, replicas: Mapping[str, Replica]) -> None:
        self._thread, self._costs, self._replicas = Thread(cores), costs, replicas
        self._backlogs, self._loads, self._numbers = Backlogs(lambda: world.now), dict[str, Load](), itertools.count()
        self._order = Order(id="", endpoint="", client="", model="", facts={}, demand=Demand(1), work=costs.length,
                            timeout_s=math.inf, spent_s=0.0)

    def hear(self, loads: dict[str, Load]) -> None:
        """What each replica has to do."""
        self._loads = loads

    def ask(self, answered: Call) -> None:
        self._thread.do(self._costs.front_s / 2, lambda: self._give(answered))

    def _give(self, answered: Call) -> None:
        at, number = by_end(self._loads, self._backlogs, self._order)[0], str(next(self._numbers))
        self._backlogs.give(at, number, self._order.work, self._order.timeout_s)
        self._replicas[at].draw(lambda: self._take(at, number, answered))

    def _take(self, at: str, number: str, answered: Call) -> None:
        self._backlogs.take(at, number)
        self._thread.do(self._costs.front_s / 2, answered)


@dataclass(slots=True)
class Loads:
    """What was asked of a service, and how long each answer took."""

    world: World
    fronts: Sequence[Front]
    since: float                 # of simulated time: answers before do not count
    took_s: list[float] = field(default_factory=list)

    def ask(self, front: Front, then: Call) -> None:
        began = self.world.now

        def answered() -> None:
            if self.world.now >= self.since:
                self.took_s.append(self.world.now - began)
            then()

        front.ask(answered)

    def closed(self, clients: int, client: Thread, client_s: float) -> None:
        """Each client asks again when it has its answer, over one connection to one front. All share one thread."""
        for _ in range(clients):
            self._again(self.world.chance.choice(self.fronts), client, client_s)

    def _again(self, front: Front, client: Thread, client_s: float) -> None:
        client.do(client_s, lambda: self.ask(front, lambda: self._again(front, client, client_s)))

    def open(self, rate: float) -> None:
        """So many requests a second, at random times, whatever becomes of those before."""
        self.world.after(self.world.chance.expovariate(rate), lambda: self._arrive(rate))

    def _arrive(self, rate: float) -> None:
        self.ask(self.world.chance.choice(self.fronts), lambda: None)
        self.open(rate)


@dataclass(frozen=True, slots=True)
class Served:
    rate: float    # images/s
    p50_s: float
    p99_s: float


def served(took_s: list[float], seconds: float) -> Served:
    ordered = sorted(took_s)
    p50, p99 = (ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0 for part in (0.5, 0.99))
    return Served(len(ordered) / seconds, p50, p99)


def simulate(costs: Costs, *, replicas: int, fronts: int, slots: int = 64, clients: int = 0, rate: float = 0.0,
             cores: float = 0.0, seconds: float = 40.0, warm_s: float = 10.0, seed: int = 0) -> Served:
    """clients, in a closed loop, or rate, of an open one · cores: which all processes share; 0: each has its own."""
    world = World(seed)
    shared = Cores(world, cores)
    own = (lambda: shared) if cores else (lambda: Cores(world, 1))
    engines = {f"r{at}": Replica(own(), costs, slots) for at in range(replicas)}
    doors = [Front(world, own(), costs, engines) for _ in range(fronts)]
    loads = Loads(world, doors, warm_s)

    def tell() -> None:
        told = {name: engine.load(world.now) for name, engine in engines.items()}
        for door in doors:
            door.hear(told)
        world.after(STATS_S, tell)

    tell()
    if clients:
        loads.closed(clients, Thread(own()), costs.client_s)
    if rate:
        loads.open(rate)
    world.run(warm_s + seconds)
    return served(loads.took_s, seconds)
