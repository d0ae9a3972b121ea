"""How many threads a decoder uses, by made-up times."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch

from linpix.model.team import ALONE_EVERY, FIRST, MAX_PAUSE, PAUSE, SHARED, Team, limit_threads


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def run(team: Team, calls: int, alone_s: float, together_s: float, rows: int = 1) -> list[int]:
    """The threads of so many calls when a step takes so long on one thread, or on both."""
    chosen = []
    for _ in range(calls):
        threads, _ = team.choose(rows)
        team.learn(rows, threads, 1, alone_s if threads == 1 else together_s)
        chosen.append(threads)
    return chosen


def test_threads_that_pay_are_used_but_for_a_call_now_and_then():
    chosen = run(Team(), 4 * ALONE_EVERY, alone_s=2.0, together_s=1.2)
    assert chosen[: FIRST + 1] == [1] * FIRST + [2], "the time of one thread is measured first"
    assert chosen.count(1) == FIRST + 3


def test_threads_that_do_not_pay_are_tried_ever_more_rarely():
    chosen = run(Team(), 3000, alone_s=1.0, together_s=10.0)
    tried = [call for call, threads in enumerate(chosen) if threads == 2]
    pauses = [after - before - 1 for before, after in itertools.pairwise(tried)]
    assert pauses[0] == PAUSE
    assert all(after == min(2 * before, MAX_PAUSE) for before, after in itertools.pairwise(pauses))
    assert pauses[-1] == MAX_PAUSE


def test_threads_are_used_again_once_they_pay_and_then_forget_that_they_did_not():
    team = Team()
    run(team, 3000, alone_s=1.0, together_s=10.0)
    assert run(team, 2 * MAX_PAUSE, alone_s=1.0, together_s=0.6)[-1] == 2
    chosen = run(team, 3 * PAUSE, alone_s=1.0, together_s=10.0)
    assert chosen.count(2) == 3, (
        "a new neighbour costs two calls, and another after the first pause"
    )


def test_rows_enough_for_every_thread_are_not_measured():
    threads, team = torch.get_num_threads(), Team()
    assert team.choose(SHARED * threads + 1) == (threads, math.inf)
    team.learn(SHARED * threads + 1, threads, 28, 1.0)
    assert not team._sizes


@pytest.mark.parametrize(("wanted", "left"), [("", 1), ("7", 7)])
def test_threads_are_limited_unless_the_user_says_how_many(monkeypatch, wanted, left):
    monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    monkeypatch.setattr("linpix.model.team.usable_cores", lambda: 1)
    torch.set_num_threads(7)
    limit_threads()
    assert torch.get_num_threads() == left
