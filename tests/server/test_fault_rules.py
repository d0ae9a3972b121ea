"""Rules of faults, and what is wrong with a bad one."""

import pytest

from linpix.server.fault_rules import Rule, parse
from linpix.server.settings import Settings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "text",
    [
        "throw",
        "throw:",
        "throw:at",
        "throw:at=0",
        "throw:at=1:every=2",
        "throw:at=1:at=2",
        "throw:every=-1",
        "throw:every=1.5",
        "throw:every=¹",
        "burn:at=1",
        "hang:image=1",
        "slow:at=1",
        "nan:at=1:ms=5",
        "slow:at=1:ms=0",
        "seed=x",
        "",
        "throw:to=1",
        "slow:ms=5",
    ],
)
def test_a_fault_that_is_not_well_formed_is_refused_with_the_item_and_all_that_may_be_given(text):
    with pytest.raises(ValueError) as refused:
        parse(f"nan:image=0,{text},slow:from=2:ms=5")
    for words in (
        f"{text!r}: expected KIND:WHEN=N",
        "one of throw, glitch",
        "at least 1",
        "only with throw, nan",
        "slow:every=10:ms=200",
        "seed=N",
    ):
        assert words in str(refused.value)
    with pytest.raises(ValueError, match="faults"):
        Settings(faults=text or "seed")


def test_rules_are_read_with_their_seed():
    assert parse("throw:at=1, slow:every=2:ms=50,nan:image=0,seed=7") == (
        [Rule("throw", "at", 1), Rule("slow", "every", 2, 50), Rule("nan", "image", 0)],
        7,
    )
