"""What can go wrong while images are decoded, and the search for those at fault: images that raise
alone, by halving.

Plain Python: the caller defines what a run is, and how to undo what it changed.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .slots import Plan


class EngineLost(OSError):
    """The decoder and all images in it are lost: only a new process helps. Commands show it in one
    line.
    """


@dataclass(slots=True)
class Outcome:
    """What became of a quantum, in one run or in many."""

    not_finite: list[int] = field(default_factory=list)  # slots whose parameters were not finite
    # slots that could not be decoded, and why
    failed: dict[int, Exception] = field(default_factory=dict)
    retries: int = 0  # runs after the first


def most_retries(batch: int) -> int:
    """The most runs after the first: one bad image takes two per level of halving, two bad images
    up to four.
    """
    return max(1, 4 * (batch - 1).bit_length())


def isolate(
    plan: Plan, run: Callable[[Plan], list[int]], restore: Callable[[Plan], None], error: Exception
) -> Outcome:
    """Carry out a plan whose first run raised, without the images that make it raise.

    run returns the slots that were not finite · restore undoes what a run that raised has done to
    its images. Images that are undecided when the runs are used up count as failed: an error of
    every image must come to an end. Passes on EngineLost from run, and whatever restore raises.
    """
    outcome = Outcome()
    restore(plan)
    groups = deque(_halves(plan))
    while groups:
        # larger groups first, so that all images are narrowed down about equally far
        group = groups.popleft()
        if outcome.retries < most_retries(len(plan)):
            outcome.retries += 1
            try:
                outcome.not_finite += run(group)
                continue
            except EngineLost:
                raise
            except Exception as again:
                error = again
            if len(group) > 1:
                restore(group)
                groups.extend(_halves(group))
                continue
        outcome.failed |= dict.fromkeys(group[:, 0].tolist(), error)
    return outcome


def _halves(plan: Plan) -> list[Plan]:
    return [half for half in (plan[: len(plan) // 2], plan[len(plan) // 2 :]) if len(half)]
