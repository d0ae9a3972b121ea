"""The order of scoring requests, client by client, without a model."""

import time
from dataclasses import dataclass, field

import pytest

from linpix.server.engine.decode.scoring import ScoringJob, ScoringQueue


@dataclass
class Pieces:
    """Stands for a Scoring of so many pieces; notes each in `log`."""

    name: str
    left: int
    log: list[str] = field(repr=False)
    fails: bool = False
    seconds: float = 0.0  # a piece

    def advance(self) -> bool:
        self.log.append(self.name)
        time.sleep(self.seconds)
        if self.fails:
            raise RuntimeError(self.name)
        self.left -= 1
        return self.left > 0


@pytest.fixture
def log() -> list[str]:
    return []


def ended(scores: ScoringQueue) -> list[tuple[str, bool]]:
    """Requests in the order in which they end, and whether each failed."""
    found = []
    while scores.busy:
        if (over := scores.advance(drawing=False)) is not None:
            found.append((over[0].request, over[1] is not None))
    return found


def test_one_request_after_the_other_in_turns_by_client(log):
    scores = ScoringQueue()
    for request, client, pieces in (("a1", "a", 2), ("a2", "a", 1), ("a3", "a", 1), ("b1", "b", 2), ("c1", "c", 1)):
        scores.append(ScoringJob(request, client, Pieces(request, pieces, log)))
    assert [request for request, _ in ended(scores)] == ["a1", "b1", "c1", "a2", "a3"]
    assert log == ["a1", "a1", "b1", "b1", "c1", "a2", "a3"]


def test_a_request_that_fails_ends_alone(log):
    scores = ScoringQueue()
    for request in ("a1", "a2"):
        scores.append(ScoringJob(request, "a", Pieces(request, 2, log, fails=request == "a1")))
    assert ended(scores) == [("a1", True), ("a2", False)]


def test_a_cancelled_request_is_computed_no_further(log):
    scores = ScoringQueue()
    for request, client in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        scores.append(ScoringJob(request, client, Pieces(request, 2, log)))
    assert scores.advance(drawing=False) is None
    scores.cancel("a1")
    scores.cancel("b1")
    scores.cancel("unknown")
    assert ended(scores) == [("a2", False)]
    assert log == ["a1", "a2", "a2"]


def test_beside_images_that_are_drawn_pieces_take_half_of_the_time(log):
    scores, began = ScoringQueue(), time.perf_counter()
    scores.append(ScoringJob("a1", "a", Pieces("a1", 5, log, seconds=0.02)))
    rounds = 0
    while scores.busy:
        scores.advance(drawing=True)
        rounds += 1
        time.sleep(0.002)  # a short quantum
    assert time.perf_counter() - began >= 5 * 0.02 + 4 * 0.02
    assert rounds > 5 == len(log)
