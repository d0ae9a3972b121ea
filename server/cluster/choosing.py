"""The choice of the replica that will be done first: its known work and the order's own take the least time."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from .messages import Load, Order

ORDER_S = 0.002  # seconds that an order takes at least, beside its images: an event loop's time, which loads leave out
LOADS: dict[str, Load] = {}  # the last report of each replica, by its name; written by the router of this process


class Backlogs:
    """The work of each replica, as one front knows it: the replica's last report of all fronts' orders, and what this
    front has given it since.

    A report is some tenths of a second old, and images were finished meanwhile: possibly all, if they began together.
    So the work reported counts as done at the replica's pace. Otherwise all fronts would take a replica for full that
    has just become empty, and give all their orders to another.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        # orders not answered yet, by replica and id: when it was given, its work, and when it ends at the latest
        self._open: dict[str, dict[str, tuple[float, float, float]]] = defaultdict(dict)
        self._early: set[tuple[str, str]] = set()  # replicas and orders that ended before they are said to have arrived

    def give(self, replica: str, order: str, work: float, timeout_s: float) -> None:
        """The order goes to this replica, and no longer to one that it was given to before."""
        for name, orders in self._open.items():
            if name != replica:
                orders.pop(order, None)
        now = self._clock()
        self._open[replica].setdefault(order, (now, work, now + timeout_s))

    def move(self, replica: str, order: str) -> None:
        """The order has arrived at this replica. If it has ended already, it stays ended."""
        given = None
        for orders in self._open.values():
            given = orders.pop(order, given)
        if (replica, order) in self._early:
            self._early.discard((replica, order))
        elif given is not None:
            self._open[replica][order] = given

    def take(self, replica: str, order: str) -> None:
        """The order has ended at this replica."""
        if self._open[replica].pop(order, None) is None and any(order in orders for orders in self._open.values()):
            self._early.add((replica, order))

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all other replicas."""
        for gone in self._open.keys() - set(replicas):
            del self._open[gone]
        self._early = {(replica, order) for replica, order in self._early if replica in self._open}

    def seconds(self, replica: str, load: Load, pace: float) -> float:
        """Seconds until a replica has done all its work. pace: for a replica that has measured none."""
        pace, now, orders = load.pace or pace, self._clock(), self._open[replica]
        for over in [order for order, (_, _, until) in orders.items() if until < now]:
            del orders[over]  # it was cancelled while it was being sent
        left, at = load.ahead / pace, load.at
        for given_at, work, _ in orders.values():
            if given_at > load.at:  # else the replica's report has it
                left, at = max(0.0, left - (given_at - at)) + work / pace, given_at
        return max(left - (now - at), len(orders) * ORDER_S)


def load_of(stats: Mapping[str, Any]) -> Load:
    """The Load in a report received now. It is dated now at the latest, though the replica's clock may be ahead: orders
    given from now on are not in it."""
    load = Load(**stats)
    return replace(load, at=min(load.at, time.time()))


def oldest_first(names: Iterable[str]) -> list[str]:
    """Replicas in the order in which they began. Those that have not reported yet are the newest."""
    return sorted(names, key=lambda name: (LOADS[name].since if name in LOADS else math.inf, name))


def by_end(loads: Mapping[str, Load], backlogs: Backlogs, order: Order) -> list[str]:
    """Replicas in the order in which they would be done with an order, those without room for it last.

    Replicas that do not serve the model, or serve it with other weights or another precision, are left out, unless
    there are no others. Equal ones come in the order of their names, so that few orders all go to one replica.
    """
    backlogs.keep(loads)
    known = [load.pace for load in loads.values() if load.pace]
    usual = sum(known) / len(known) if known else 1.0
    ends = {name: backlogs.seconds(name, load, usual) + order.work / (load.pace or usual)
            for name, load in loads.items()}
    right = [name for name, load in loads.items() if not load.facts or load.facts.get(order.model) == order.facts]
    return sorted(right or loads, key=lambda name: (loads[name].room < order.demand.images, not loads[name].facts,
                                                    ends[name], name))
