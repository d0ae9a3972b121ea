"""Which replica will be done first, and how many replicas there should be."""

import time
from collections import Counter
from types import SimpleNamespace

from linpix.server.cluster.choosing import LOADS, ORDER_S, Backlogs, by_end, load_of, oldest_first
from linpix.server.cluster.messages import Load, Order
from linpix.server.cluster.scaling import by_images
from linpix.server.engine.ledger.ticket import Demand


class Clock:
    """Time that stands still until it is changed."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def order(work: float = 1.0, facts: dict[str, str] | None = None, images: int = 1) -> Order:
    return Order(id="1", endpoint="generations", client="", model="tiny", facts=facts or {}, demand=Demand(images),
                 work=work, timeout_s=60.0, spent_s=0.0)


def given(loads: dict[str, Load], backlogs: Backlogs, count: int, work: float = 1.0) -> Counter[str]:
    """How many of so many orders each replica gets, one after the other."""
    counted: Counter[str] = Counter()
    for number in range(count):
        first = by_end(loads, backlogs, order(work))[0]
        backlogs.give(first, f"{id(counted)}-{number}", work, 60.0)
        counted[first] += 1
    return counted


def test_an_order_goes_where_the_least_work_is_and_not_where_the_fewest_orders_are():
    backlogs, loads = Backlogs(), {"a": Load(room=9), "b": Load(room=9)}
    backlogs.give("a", "one long one", 100.0, 60.0)
    backlogs.give("b", "a short one", 20.0, 60.0)
    backlogs.give("b", "another", 20.0, 60.0)
    assert by_end(loads, backlogs, order()) == ["b", "a"]
    backlogs.take("a", "one long one")
    assert by_end(loads, backlogs, order()) == ["a", "b"]


def test_orders_that_a_replica_has_reported_are_not_counted_twice():
    clock = Clock()
    backlogs = Backlogs(clock)
    backlogs.give("a", "ours", 50.0, 60.0)
    clock.now += 1
    loads = {"a": Load(at=clock.now, room=9, ahead=55.0), "b": Load(at=clock.now, room=9, ahead=60.0)}
    assert by_end(loads, backlogs, order()) == ["a", "b"]


def test_what_was_said_is_done_at_the_pace_of_the_replica():
    """4 s of work that a replica told of 3 s ago are less than 2 s of work that another tells of now."""
    clock = Clock()
    loads = {"a": Load(at=clock.now, room=9, pace=1.0, ahead=4.0),
             "b": Load(at=clock.now + 3, room=9, pace=1.0, ahead=2.0)}
    backlogs = Backlogs(clock)
    clock.now += 3
    assert by_end(loads, backlogs, order()) == ["a", "b"]
    assert backlogs.seconds("a", loads["a"], 1.0) == 1.0
    clock.now += 7
    assert backlogs.seconds("a", loads["a"], 1.0) == 0.0, "it has rested since, and has not worked ahead"
    backlogs.give("a", "new", 2.0, 60.0)
    clock.now += 0.5
    assert backlogs.seconds("a", loads["a"], 1.0) == 1.5


def test_fronts_do_not_all_leave_a_replica_whose_images_end_together():
    """64 images of two fronts were half a second before their end when replicas last said what they have to do. Now
    they are done, and their clients ask for 64 more. Half of these are for the replica that had them."""
    clock, counted = Clock(), Counter()
    fronts = [Backlogs(clock) for _ in range(2)]
    loads = {"a": Load(at=clock.now, room=300, pace=32.0, ahead=16.0), "b": Load(at=clock.now, room=300, pace=32.0)}
    clock.now += 0.5
    for backlogs in fronts:
        counted += given(loads, backlogs, 32)
    assert counted == {"a": 32, "b": 32}


def test_a_faster_replica_gets_more_and_one_that_measured_nothing_counts_as_usual():
    loads = {"slow": Load(room=9, pace=1.0), "fast": Load(room=9, pace=4.0, ahead=30.0), "new": Load(room=9)}
    backlogs = Backlogs(lambda: 1.0)
    assert by_end(loads, backlogs, order(20.0)) == ["new", "fast", "slow"]
    assert given(loads | {"fast": Load(room=9, pace=4.0)}, backlogs, 15) == {"fast": 8, "new": 5, "slow": 2}


def test_a_replica_without_room_is_the_last_resort():
    clock = Clock()
    loads = {"a, full": Load(at=clock.now, room=0), "b, busy": Load(at=clock.now, room=1, ahead=1e9)}
    assert by_end(loads, Backlogs(clock), order()) == ["b, busy", "a, full"]


def test_an_order_goes_to_a_replica_with_the_fronts_weights():
    old, new = {"checkpoint": "old"}, {"checkpoint": "new"}
    loads = {"a": Load(room=9, facts={"tiny": new}), "b": Load(room=9), "c": Load(room=9, facts={"tiny": old}),
             "d": Load(room=9, facts={"other": old})}
    assert by_end(loads, Backlogs(), order(facts=old)) == ["c", "b"]
    loads["c"] = Load(room=0, facts={"tiny": old})
    assert by_end(loads, Backlogs(), order(facts=old)) == ["b", "c"], "what is full refuses"
    del loads["b"], loads["c"]
    assert by_end(loads, Backlogs(), order(facts=old)) == ["a", "d"], "they say why not"


def test_what_one_replica_has_alone_stays_there_when_others_come(monkeypatch):
    for name, load in {"c": Load(since=1.0), "b": Load(since=2.0), "a": Load(room=1)}.items():
        monkeypatch.setitem(LOADS, name, load)
    assert oldest_first({"a", "b", "c"}) == ["c", "b", "a"]


def test_an_order_that_went_elsewhere_is_counted_there_alone():
    backlogs, loads = Backlogs(), {"a": Load(room=9), "b": Load(room=9)}
    backlogs.give("a", "1", 5.0, 60.0)
    backlogs.give("b", "1", 5.0, 60.0)
    assert by_end(loads, backlogs, order()) == ["a", "b"]
    backlogs.take("a", "1")  # as a replica that died does, late
    assert by_end(loads, backlogs, order()) == ["a", "b"]


def test_an_order_that_arrived_is_as_old_as_it_was():
    """A replica may report an order before its front learns that it has arrived there."""
    clock = Clock()
    backlogs = Backlogs(clock)
    backlogs.give("b", "1", 5.0, 60.0)
    clock.now += 2
    backlogs.move("a", "1")
    load = Load(at=clock.now - 1, room=9, pace=1.0, ahead=5.0)
    assert backlogs.seconds("a", load, 1.0) == 4.0


def test_an_answered_order_does_not_come_back_when_it_is_said_to_have_arrived():
    """gRPC says so of an answer in one piece only once it is there, and the router hears of the end before."""
    backlogs, idle = Backlogs(), Load(room=9, pace=1.0)
    for number in range(100):
        backlogs.give("a", str(number), 5.0, 600.0)
        backlogs.take("a", str(number))
        backlogs.move("a", str(number))
    assert backlogs.seconds("a", idle, 1.0) == 0.0


def test_an_order_that_another_replica_has_answered_is_open_at_none():
    """The first choice could not be reached, so Serve took the second one."""
    backlogs, idle = Backlogs(), Load(room=9, pace=1.0)
    backlogs.give("a", "1", 5.0, 600.0)
    backlogs.take("b", "1")
    backlogs.move("b", "1")
    assert backlogs.seconds("a", idle, 1.0) == backlogs.seconds("b", idle, 1.0) == 0.0
    assert not backlogs._early


def test_a_replica_with_room_for_some_images_comes_after_one_with_room_for_all():
    loads = {"a": Load(room=1, pace=9.0), "b": Load(room=4, pace=1.0)}
    assert by_end(loads, Backlogs(), order(images=2)) == ["b", "a"]
    assert by_end(loads, Backlogs(), order(images=1)) == ["a", "b"]


def test_a_replica_whose_clock_is_ahead_gets_no_more_than_the_others():
    ahead, right = load_of({"at": time.time() + 9, "room": 9, "pace": 1.0}), load_of({"room": 9, "pace": 1.0})
    assert right.at == 0.0
    assert given({"a": ahead, "b": right}, Backlogs(), 16) == {"a": 8, "b": 8}


def test_an_order_that_was_never_sent_is_forgotten_when_its_time_is_up():
    clock = Clock()
    backlogs, loads = Backlogs(clock), {"a": Load(room=1), "b": Load(at=clock.now, room=1, ahead=1.0)}
    backlogs.give("a", "cancelled", 100.0, 60.0)
    assert by_end(loads, backlogs, order()) == ["b", "a"]
    clock.now += 61
    loads["b"] = Load(at=clock.now, room=1, ahead=1.0)
    assert by_end(loads, backlogs, order()) == ["a", "b"]


def test_images_that_take_no_time_are_shared_by_the_orders_that_are_not_answered():
    loads = {name: Load(room=300, pace=1e12) for name in "ab"}
    assert given(loads, backlogs := Backlogs(), 16) == {"a": 8, "b": 8}
    assert backlogs.seconds("a", loads["a"], 1.0) == 8 * ORDER_S


def test_a_replica_that_is_gone_leaves_nothing_behind():
    clock = Clock()
    backlogs = Backlogs(clock)
    backlogs.give("a", "lost", 100.0, 60.0)
    by_end({"b": Load(room=1)}, backlogs, order())
    loads = {"a": Load(room=1), "b": Load(at=clock.now, room=1, ahead=1.0)}
    assert by_end(loads, backlogs, order()) == ["a", "b"]


def scaled(images: list[int], slots: int = 64, least: int = 1, most: int = 8) -> int:
    told = {"images": dict(enumerate(images)), "slots": dict.fromkeys(range(len(images)), slots)}
    return by_images(SimpleNamespace(aggregated_metrics=told, target_num_replicas=3,
                                     capacity_adjusted_min_replicas=least, capacity_adjusted_max_replicas=most))[0]


def test_there_are_as_many_replicas_as_the_images_need_slots_of():
    assert scaled([64, 64]) == 2
    assert scaled([64, 65]) == 3, "one image waits"
    assert scaled([10, 10]) == 1
    assert scaled([0]) == 1 and scaled([0], least=2) == 2
    assert scaled([64 * 100]) == 8
    assert by_images(SimpleNamespace(aggregated_metrics={}, target_num_replicas=3))[0] == 3
