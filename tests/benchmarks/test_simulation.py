"""The simulation of fronts and replicas against cases whose results are known exactly."""

import numpy as np
import pytest

from tests.benchmarks.simulation import Cores, Costs, Thread, World, served, simulate

COSTS = Costs(front_s=0.002, replica_s=0.001, client_s=0.0005, steps_s={1: 1e-4, 16: 8e-4}, length=784, row=28)


def waits(load: float, service) -> float:
    """Mean wait of a queue with Poisson arrivals, in mean service times. service: seconds of a job, by its world."""
    world = World(1)
    thread, took = Thread(Cores(world, 1)), []

    def arrive() -> None:
        began, takes = world.now, service(world)
        thread.do(takes, lambda: took.append(world.now - began - takes))
        world.after(world.chance.expovariate(load), arrive)

    arrive()
    world.run(60_000)
    return float(np.mean(took))


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_thread_is_the_queue_of_the_textbooks(load):
    """Pollaczek and Khinchine: the mean wait is load / (1 - load) for exponential service, half of it for constant."""
    assert waits(load, lambda world: world.chance.expovariate(1.0)) == pytest.approx(load / (1 - load), rel=0.08)
    assert waits(load, lambda world: 1.0) == pytest.approx(load / (1 - load) / 2, rel=0.08)


@pytest.mark.parametrize(("cores", "ends"), [(1, {"short": 2.0, "long": 4.0}), (2, {"short": 1.0, "long": 3.0}),
                                             (1.5, {"short": 4 / 3, "long": 10 / 3})])
def test_threads_share_cores_equally_and_have_one_at_most(cores, ends):
    world, seen = World(), {}
    machine = Cores(world, cores)
    Thread(machine).do(1.0, lambda: seen.update(short=world.now))
    Thread(machine).do(3.0, lambda: seen.update(long=world.now))
    world.run(10)
    assert seen == pytest.approx(ends)


def test_one_thread_does_one_thing_after_the_other():
    world, seen = World(), []
    thread = Thread(Cores(world, 4))
    for seconds in (3.0, 1.0):
        thread.do(seconds, lambda: seen.append(world.now))
    world.run(10)
    assert seen == [3.0, 4.0]


@pytest.mark.parametrize("cores", [0, 1])
def test_one_client_waits_for_the_sum_of_all_service_times(cores):
    found = simulate(COSTS, replicas=2, fronts=2, clients=1, cores=cores)
    one = COSTS.front_s + COSTS.replica_s + 784 * COSTS.step_s(1)
    assert found.p50_s == pytest.approx(one) == found.p99_s
    assert found.rate == pytest.approx(1 / (one + COSTS.client_s), rel=0.01)


def test_many_clients_of_one_core_use_all_of_it():
    """Little's law, and a rate that follows from the seconds of core an image costs in a full batch."""
    found = simulate(COSTS, replicas=1, fronts=1, slots=16, clients=64, cores=1, seconds=100)
    an_image = COSTS.front_s + COSTS.replica_s + COSTS.client_s + 784 * COSTS.step_s(16) / 16
    assert found.rate == pytest.approx(1 / an_image, rel=0.02)
    assert found.p50_s == pytest.approx(64 / found.rate, rel=0.1)


def test_replicas_get_equal_shares_and_a_second_one_doubles_the_rate():
    one, two = (simulate(COSTS, replicas=count, fronts=2, slots=16, clients=64, seconds=60) for count in (1, 2))
    assert two.rate == pytest.approx(2 * one.rate, rel=0.03)


def test_an_open_stream_is_served_at_its_rate_and_waits_longer_the_fuller_engines_are():
    slow, fast = (simulate(COSTS, replicas=2, fronts=2, slots=16, rate=rate, seconds=60) for rate in (5.0, 45.0))
    assert slow.rate == pytest.approx(5.0, rel=0.2) and fast.rate == pytest.approx(45.0, rel=0.1)
    assert fast.p99_s > 2 * slow.p50_s


def test_a_longer_quantum_than_fifty_milliseconds_is_divided():
    """A request that comes during a quantum waits until its end, so a long one would show."""
    slow = Costs(front_s=0.0, replica_s=0.0, steps_s={1: 0.01, 64: 0.01}, length=280, row=28)
    found = simulate(slow, replicas=1, fronts=1, rate=1.0, seconds=2000)
    assert 2.8 <= found.p50_s <= found.p99_s <= 2.8 + 0.05 + 1e-9


def test_quantiles_are_of_what_was_answered():
    assert served([float(value) for value in range(1, 101)], 10.0) == served(list(range(100, 0, -1)), 10.0)
    assert (served([1.0], 2.0).rate, served([], 2.0).rate) == (0.5, 0.0)
