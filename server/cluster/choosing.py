"""Which replica will be done first: the one whose known work, and the order's own, take the least time."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

from .messages import Load, Order

LOADS: dict[str, Load] = {}  # what each replica last said, by its name: the router of this process writes it


class Outstanding:
    """What one front has given to each replica and has no answer to yet. It knows this at once, and exactly;
    of other fronts' orders it knows what the replica last said."""

    def __init__(self) -> None:
        self._given: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)  # by replica and order: work, until

    def give(self, replica: str, order: str, work: float, until: float) -> None:
        """until: when the order ends at the latest, of time.monotonic."""
        self._given[replica][order] = work, until

    def take(self, replica: str, order: str) -> None:
        """The order has ended there."""
        self._given[replica].pop(order, None)

    def keep(self, replicas: set[str]) -> None:
        """Forget all others."""
        for gone in self._given.keys() - replicas:
            del self._given[gone]

    def seconds(self, replica: str, front: str, load: Load, work: float, pace: float) -> float:
        """Until an order of so much work would be done there. pace: of a replica that has measured none."""
        others = sum(ahead for name, ahead in load.ahead.items() if name != front)
        now, given = time.monotonic(), self._given[replica]
        for over in [order for order, (_, until) in given.items() if until < now]:
            del given[over]  # it was cancelled while it was being sent
        return (others + sum(work for work, _ in given.values()) + work) / (load.pace or pace)


def oldest_first(names: Iterable[str]) -> list[str]:
    """Replicas in the order in which they began. Those that have not said anything yet are new."""
    return sorted(names, key=lambda name: (LOADS[name].since if name in LOADS else math.inf, name))


def by_end(loads: Mapping[str, Load], outstanding: Outstanding, order: Order) -> list[str]:
    """Replicas in the order in which they would be done with an order, those without room last.

    Replicas that serve another model, or it with other weights or another precision, are left out, unless there are no
    others. Equal ones come in the order of their names, so that one replica alone gets what little there is.
    """
    outstanding.keep(set(loads))
    known = [load.pace for load in loads.values() if load.pace]
    usual = sum(known) / len(known) if known else 1.0
    ends = {name: outstanding.seconds(name, order.front, load, order.work, usual) for name, load in loads.items()}
    right = [name for name, load in loads.items() if not load.facts or load.facts.get(order.model) == order.facts]
    return sorted(right or loads, key=lambda name: (not loads[name].room, not loads[name].facts, ends[name], name))
