"""Which replica will be done first, and how many there should be."""

import time
from types import SimpleNamespace

from linpix.server.cluster.choosing import LOADS, Outstanding, by_end, oldest_first
from linpix.server.cluster.messages import Load, Order
from linpix.server.cluster.scaling import by_images

FOREVER = time.monotonic() + 3600


def order(work: float = 1.0, facts: dict[str, str] | None = None) -> Order:
    return Order(id="1", endpoint="generations", client="", front="here", model="tiny", facts=facts or {}, images=1,
                 work=work, timeout_s=60.0, spent_s=0.0)


def test_an_order_goes_where_the_least_work_is_and_not_where_the_fewest_orders_are():
    given = Outstanding()
    given.give("a", "one long one", 100.0, FOREVER)
    given.give("b", "a short one", 20.0, FOREVER)
    given.give("b", "another", 20.0, FOREVER)
    loads = {"a": Load(room=9), "b": Load(room=9)}
    assert by_end(loads, given, order()) == ["b", "a"]
    given.take("a", "one long one")
    assert by_end(loads, given, order()) == ["a", "b"]


def test_what_other_fronts_have_given_counts_and_our_own_is_not_counted_twice():
    given = Outstanding()
    given.give("a", "ours", 50.0, FOREVER)
    loads = {"a": Load(room=9, ahead={"here": 5000.0}), "b": Load(room=9, ahead={"there": 60.0})}
    assert by_end(loads, given, order()) == ["a", "b"]


def test_a_faster_replica_gets_more_and_one_that_measured_nothing_counts_as_usual():
    loads = {"slow": Load(room=9, pace=1.0), "fast": Load(room=9, pace=4.0, ahead={"there": 30.0}), "new": Load(room=9)}
    assert by_end(loads, Outstanding(), order(20.0)) == ["new", "fast", "slow"]


def test_a_replica_without_room_is_the_last_resort():
    loads = {"full": Load(room=0), "busy": Load(room=1, ahead={"there": 1e9})}
    assert by_end(loads, Outstanding(), order()) == ["busy", "full"]


def test_an_order_goes_to_a_replica_that_serves_what_the_front_tells_of():
    old, new = {"checkpoint": "old"}, {"checkpoint": "new"}
    loads = {"a": Load(room=9, facts={"tiny": new}), "b": Load(room=9), "c": Load(room=9, facts={"tiny": old}),
             "d": Load(room=9, facts={"other": old})}
    assert by_end(loads, Outstanding(), order(facts=old)) == ["c", "b"]
    loads["c"] = Load(room=0, facts={"tiny": old})
    assert by_end(loads, Outstanding(), order(facts=old)) == ["b", "c"], "what is full refuses"
    del loads["b"], loads["c"]
    assert by_end(loads, Outstanding(), order(facts=old)) == ["a", "d"], "they say why not"


def test_what_one_replica_has_alone_stays_there_when_others_come(monkeypatch):
    for name, load in {"c": Load(since=1.0), "b": Load(since=2.0), "a": Load(room=1)}.items():
        monkeypatch.setitem(LOADS, name, load)
    assert oldest_first({"a", "b", "c"}) == ["c", "b", "a"]


def test_an_order_that_was_never_sent_is_forgotten_when_its_time_is_up():
    given = Outstanding()
    given.give("a", "cancelled", 100.0, time.monotonic() - 1)
    assert by_end({"a": Load(room=1), "b": Load(room=1, ahead={"there": 1.0})}, given, order()) == ["a", "b"]


def test_a_replica_that_is_gone_leaves_nothing_behind():
    given = Outstanding()
    given.give("a", "lost", 100.0, FOREVER)
    by_end({"b": Load(room=1)}, given, order())
    assert by_end({"a": Load(room=1), "b": Load(room=1, ahead={"there": 1.0})}, given, order()) == ["a", "b"]


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
