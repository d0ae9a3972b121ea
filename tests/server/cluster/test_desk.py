"""What the desk counts for all fronts, and the metrics of all processes in one answer."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from linpix.server.cluster import desk as desks
from linpix.server.cluster.desk import Desk, Reply, Together
from linpix.server.metrics import Metrics


def reply(desk: Desk, name: str, kind: str = "front", clients=None, drained: bool = False) -> Reply:
    return asyncio.run(desk.beat(name, kind, clients or {}, [], drained))


def beaten(*about, **facts) -> bool:
    """Whether it is to drain."""
    return reply(*about, **facts).draining


def entered(desk: Desk, front: str, client: str, here: int, images: int, limit: int = 10) -> int | None:
    return asyncio.run(desk.enter(front, client, here, images, limit))


def test_the_images_of_a_client_count_at_all_fronts():
    desk = Desk()
    assert entered(desk, "a", "alice", 0, 6) is None
    assert entered(desk, "b", "alice", 0, 4) is None
    assert entered(desk, "b", "alice", 4, 1) == 10, "the number that keeps it out"
    assert entered(desk, "b", "bob", 0, 10) is None
    beaten(desk, "a", clients={"alice": 5})  # one is done
    assert entered(desk, "b", "alice", 4, 1) is None


def test_a_front_learns_what_its_clients_have_at_other_fronts():
    desk = Desk()
    reply(desk, "a", clients={"alice": 5, "bob": 1})
    reply(desk, "b", clients={"alice": 2})
    reply(desk, "engine-1", "engine")
    assert reply(desk, "c").elsewhere == {"alice": 7, "bob": 1}
    assert reply(desk, "a", clients={"alice": 4}).elsewhere == {"alice": 2}
    assert reply(desk, "engine-1", "engine").elsewhere == {}


def test_a_dead_front_holds_nothing_and_a_new_desk_gets_the_counts_again(monkeypatch):
    desk = Desk()
    assert entered(desk, "a", "alice", 0, 10) is None
    monkeypatch.setattr(desks, "SILENT_S", 0.0)
    assert entered(desk, "b", "alice", 0, 10) is None
    monkeypatch.undo()
    another = Desk()
    beaten(another, "b", clients={"alice": 10})
    assert entered(another, "c", "alice", 0, 1) == 10


def test_the_rate_of_a_key_is_one_for_all_fronts():
    desk = Desk()
    waits = [asyncio.run(desk.take("alice", "3/h")) for _ in range(4)]
    assert waits[:3] == [0.0] * 3 and 1100 < waits[3] <= 1200
    assert asyncio.run(desk.take("bob", "3/h")) == 0.0


def test_it_has_drained_when_every_front_says_so():
    desk = Desk()
    assert not beaten(desk, "a") and not beaten(desk, "engine-1", "engine")
    assert asyncio.run(desk.fronts()) == 1
    asyncio.run(desk.drain())
    assert beaten(desk, "a") and not asyncio.run(desk.drained())
    assert beaten(desk, "a", drained=True) and asyncio.run(desk.drained())


def test_one_scrape_has_every_process_apart_and_status_has_the_sums():
    processes = {name: Metrics([("tiny", "linear")], ["linear"], "1.0", "avx2") for name in ("engine-1", "engine-2")}
    processes["engine-1"].images_completed.labels("tiny", "linear", "completed").inc(3)
    processes["engine-2"].images_completed.labels("tiny", "linear", "completed").inc(4)
    processes["engine-2"].queue_wait.observe(0.5)
    together = Together({name: list(one.registry.collect()) for name, one in processes.items()})
    families = {family.name: family for family in text_string_to_metric_families(together.text().decode())}
    found = {sample.labels["replica"]: sample.value for sample in families["linpix_images_completed"].samples
             if sample.labels["outcome"] == "completed"}
    assert found == {"engine-1": 3.0, "engine-2": 4.0}
    assert families["linpix_queue_wait_seconds"].type == "histogram"
    assert families["linpix_kernel_info"].type == "gauge"
    name = "linpix_images_completed_total"
    assert together.values(name)[name, "tiny", "linear", "completed"] == 7.0
    text = together.text().decode()
    assert text.count("# TYPE linpix_images_completed_total counter") == 1
    for one in processes["engine-1"].registry.collect():
        assert all("replica" in sample.labels for sample in families[one.name].samples)


def lost(desk: Desk) -> float:
    return Together(asyncio.run(desk.collected())).values("linpix_processes_lost_total")["linpix_processes_lost_total",]


def test_processes_that_fall_silent_are_counted_unless_they_have_drained(monkeypatch):
    desk = Desk()
    reply(desk, "engine-1", "engine")
    reply(desk, "engine-2", "engine", drained=True)
    reply(desk, "front-1", drained=True)
    assert lost(desk) == 0
    monkeypatch.setattr(desks, "SILENT_S", 0.0)
    assert lost(desk) == lost(desk) == 1
