"""Bisection finds the failing images, and runs the others once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linpix.server.engine.decode.failures import EngineLost, Outcome, isolate, most_retries


class Rows:
    """Rows whose work is to be done once each, some of which throw."""

    def __init__(self, count: int, poison: set[int]) -> None:
        self.plan = np.array([(slot, 8) for slot in range(1, count + 1)], np.int64).reshape(
            count, 2
        )
        self.poison, self.done, self.runs = poison, dict.fromkeys(range(1, count + 1), 0), 0

    def run(self, plan) -> list[int]:
        self.runs += 1
        for slot in plan[:, 0]:
            self.done[slot] += 1  # state changes before it shows that something is wrong
        if throwing := self.poison & {*plan[:, 0].tolist()}:
            raise RuntimeError(f"slots {sorted(throwing)}")
        return [slot for slot in plan[:, 0].tolist() if slot % 5 == 0]

    def restore(self, plan) -> None:
        for slot in plan[:, 0]:
            assert self.done[slot] == 1, "only what a run has changed is put back"
            self.done[slot] = 0

    def isolate(self) -> Outcome:
        with pytest.raises(RuntimeError) as first:
            self.run(self.plan)
        self.runs = 0
        return isolate(self.plan, self.run, self.restore, first.value)


@settings(deadline=None)
@given(st.data())
def test_up_to_two_failing_rows_are_found_and_all_others_are_decoded_once(data):
    count = data.draw(st.integers(1, 200))
    poison = data.draw(st.sets(st.integers(1, count), max_size=2))
    rows = Rows(count, set(poison))
    if not poison:  # what threw once does not throw again
        rows.poison = {1}
        with pytest.raises(RuntimeError):
            rows.run(rows.plan)
        rows.poison, rows.runs = set(), 0
        outcome = isolate(rows.plan, rows.run, rows.restore, RuntimeError("once"))
    else:
        outcome = rows.isolate()
    assert outcome.failed.keys() == poison
    assert all(rows.done[slot] == 1 for slot in rows.done.keys() - poison)
    assert sorted(outcome.not_finite) == [
        slot for slot in rows.done if slot % 5 == 0 and slot not in poison
    ]
    assert rows.runs == outcome.retries <= most_retries(count)


@settings(deadline=None)
@given(st.integers(1, 500), st.data())
def test_errors_for_many_images_come_to_an_end_and_no_image_is_left_out(count, data):
    poison = data.draw(st.sets(st.integers(1, count), min_size=1))
    rows = Rows(count, set(poison))
    outcome = rows.isolate()
    assert rows.runs == outcome.retries <= most_retries(count)
    assert poison <= outcome.failed.keys()
    assert all(rows.done[slot] == 1 for slot in rows.done.keys() - outcome.failed.keys())


def test_the_retries_are_four_for_each_halving():
    assert [most_retries(rows) for rows in (1, 2, 3, 4, 5, 64, 65, 4096)] == [
        1,
        4,
        8,
        8,
        12,
        24,
        28,
        48,
    ]


def test_a_lone_row_is_run_once_more():
    assert Rows(1, {1}).isolate().retries == 1


def test_an_engine_that_is_lost_is_not_run_again():
    runs = []

    def lose(plan):
        runs.append(plan)
        raise EngineLost("gone")

    with pytest.raises(EngineLost):
        isolate(Rows(8, set()).plan, lose, lambda plan: None, RuntimeError("first"))
    assert len(runs) == 1
