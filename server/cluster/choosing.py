"""Which replica will be done first: the one whose known work, and the order's own, take the least time."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from .messages import Load, Order

ORDER_S = 0.002  # that an order takes at least, beside its images: an event loop's time, which no replica tells of
LOADS: dict[str, Load] = {}  # what each replica last said, by its name: the router of this process writes it


class Backlogs:
    """What replicas have to do, as one front knows it: what each last said of all fronts' orders, and what this front
    has given it since.

    What was said is some tenths of a second old, in which images were finished: of many that began together, all of
    them. So it counts as done at the replica's pace. If it did not, all fronts would find a replica full that has just
    become empty, and give all that they have to another.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        # by replica and order, those not answered: when it was given, its work, and when it ends at the latest
        self._open: dict[str, dict[str, tuple[float, float, float]]] = defaultdict(dict)

    def give(self, replica: str, order: str, work: float, timeout_s: float) -> None:
        """The order goes there, and to no other that it was given to before."""
        for name, orders in self._open.items():
            if name != replica:
                orders.pop(order, None)
        now = self._clock()
        self._open[replica].setdefault(order, (now, work, now + timeout_s))

    def take(self, replica: str, order: str) -> None:
        """The order has ended there."""
        self._open[replica].pop(order, None)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all others."""
        for gone in self._open.keys() - set(replicas):
            del self._open[gone]

    def seconds(self, replica: str, load: Load, pace: float) -> float:
        """Until all is done that a replica has. pace: of one that has measured none."""
        pace, now, orders = load.pace or pace, self._clock(), self._open[replica]
        for over in [order for order, (_, _, until) in orders.items() if until < now]:
            del orders[over]  # it was cancelled while it was being sent
        left, at = load.ahead / pace, load.at
        for given_at, work, _ in orders.values():
            if given_at > load.at:  # else the replica has told of it
                left, at = max(0.0, left - (given_at - at)) + work / pace, given_at
        return max(left - (now - at), len(orders) * ORDER_S)


def heard(said: Mapping[str, Any]) -> Load:
    """What a replica says now, whose clock may be ahead of ours: what we give it from now on, it has not told of."""
    load = Load(**said)
    return replace(load, at=min(load.at, time.time()))


def oldest_first(names: Iterable[str]) -> list[str]:
    """Replicas in the order in which they began. Those that have not said anything yet are new."""
    return sorted(names, key=lambda name: (LOADS[name].since if name in LOADS else math.inf, name))


def by_end(loads: Mapping[str, Load], backlogs: Backlogs, order: Order) -> list[str]:
    """Replicas in the order in which they would be done with an order, those without room last.

    Replicas that serve another model, or it with other weights or another precision, are left out, unless there are no
    others. Equal ones come in the order of their names, so that one replica alone gets what little there is.
    """
    backlogs.keep(loads)
    known = [load.pace for load in loads.values() if load.pace]
    usual = sum(known) / len(known) if known else 1.0
    ends = {name: backlogs.seconds(name, load, usual) + order.work / (load.pace or usual)
            for name, load in loads.items()}
    right = [name for name, load in loads.items() if not load.facts or load.facts.get(order.model) == order.facts]
    return sorted(right or loads, key=lambda name: (not loads[name].room, not loads[name].facts, ends[name], name))
