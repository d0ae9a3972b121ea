"""Which rows of a quantum that threw are to blame: those that throw alone, found by halving.

Plain Python: what a run is, and how to put back what it changed, is the caller's.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ...errors import EngineLost
from ..schedule.scheduler import ScheduledImage

Plan = list[tuple[ScheduledImage, int]]  # each row with its number of steps, most steps first


@dataclass(slots=True)
class Outcome:
    """What became of a quantum, in one run or in many."""

    lost: list[int] = field(default_factory=list)               # slots whose parameters were not finite
    failed: dict[int, Exception] = field(default_factory=dict)  # slots that could not be decoded, and why
    retries: int = 0                                            # runs after the first


def most_retries(rows: int) -> int:
    """Runs after the first, at most: one row to blame takes two a level of halving, two of them up to four."""
    return max(1, 4 * (rows - 1).bit_length())


def isolate(plan: Plan, run: Callable[[Plan], list[int]], restore: Callable[[Plan], None],
            error: Exception) -> Outcome:
    """Carry out a plan whose first run threw, without the rows that make it throw.

    run returns the slots that were not finite · restore undoes what a run that threw has done to its rows. Whoever is
    undecided when the runs are used up counts as failed: what throws for everybody must come to an end. Raises what run
    or restore raise of EngineLost.
    """
    outcome = Outcome()
    restore(plan)
    groups = deque(_halves(plan))
    while groups:
        group = groups.popleft()  # all of one size before the smaller ones: blame is spread as evenly as it can be
        if outcome.retries < most_retries(len(plan)):
            outcome.retries += 1
            try:
                outcome.lost += run(group)
                continue
            except EngineLost:
                raise
            except Exception as again:
                error = again
            if len(group) > 1:
                restore(group)
                groups.extend(_halves(group))
                continue
        outcome.failed |= dict.fromkeys((row.slot for row, _ in group), error)
    return outcome


def _halves(plan: Plan) -> list[Plan]:
    middle = len(plan) // 2
    return [half for half in (plan[:middle], plan[middle:]) if half]
