"""Plans of fronts and replicas for a number of images a day, by made-up costs."""

import argparse
import dataclasses

import pytest

from tests.benchmarks.capacity import Measured, compared, plan, planned
from tests.benchmarks.simulation import Served

COSTS = Measured(machine="none", preset="mnist", steps_s={1: 1e-4, 64: 6.4e-3}, length=784, row=28, front_s=0.004,
                 replica_s=0.002, client_s=0.001, desk_s=0.001, beat_s=0.001, idle=0.1, sent_bytes=1000.0)


@pytest.mark.parametrize("rate", [10.0, 50.0])
def test_what_is_planned_serves_what_was_asked(rate):
    found = planned(COSTS, rate, 0.7, slots=64)
    assert found.served.rate * found.clusters == pytest.approx(rate, rel=0.15)
    # an image is 78.4 ms of an engine and 2 of a replica, a request 4 ms of a front and the choice of a replica
    assert found.replicas == pytest.approx(max(2, rate * 0.0804 / 0.7), abs=1)
    assert found.fronts == pytest.approx(max(2, rate * 0.004 / 0.7), abs=1)


def test_no_desk_has_more_to_do_than_was_asked_for():
    """A desk that takes 10 ms a request is full at 100 requests a second."""
    found = planned(dataclasses.replace(COSTS, desk_s=0.01), 150.0, 0.7, slots=64)
    assert found.clusters >= 3 and found.desk <= 0.7


def test_an_image_costs_what_all_processes_take_all_day():
    """1e6 images a day on 2 fronts, 2 replicas and a desk: 5 cores, so 0.432 s of a core an image."""
    given = argparse.Namespace(images=[1e6], utilisation=0.7, peak=1.0, slots=64, core_hour=0.05, gpu_hour=3.0)
    cells = [line.strip("| ").split(" | ") for line in plan(COSTS, given).splitlines() if line.startswith("|")]
    lines = dict(pair for pair in cells if len(pair) == 2)
    assert (lines["cores"], lines["core-seconds an image"]) == ("5", "0.43")
    assert float(lines["a million images on processors, price"]) == pytest.approx(5 * 24 * 0.05)
    assert float(lines["a million images on H200s, price"]) == pytest.approx(3 * 24 * 0.05 + 24 * 3.0, rel=0.01)


def test_errors_are_of_what_was_measured():
    text = compared(Served(11.0, 1.0, 2.0), Served(10.0, 1.0, 2.5))
    assert [line.split(" | ")[-1].strip(" |") for line in text.splitlines()[2:]] == ["+10.0%", "+0.0%", "-20.0%"]
