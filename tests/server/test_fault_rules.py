"""Rules of faults, and what is wrong with a bad one."""

import pytest

from linpix.server.fault_rules import parse
from linpix.server.settings import Settings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("text", "words"), [
    ("throw", "give exactly one of"), ("throw:", "give exactly one of"), ("throw:at", "integer of at least 1"),
    ("throw:at=0", "at least 1, got '0'"), ("throw:at=1:every=2", "give exactly one of"),
    ("throw:at=1:at=2", "give exactly one of"), ("throw:every=-1", "got '-1'"), ("throw:every=1.5", "got '1.5'"),
    ("throw:every=¹", "got '¹'"),
    ("burn:at=1", "'burn:at=1': expected one of throw, glitch"), ("hang:image=1", "image works only with throw, nan"),
    ("slow:at=1", "ms works only with slow"), ("nan:at=1:ms=5", "ms works only with slow"),
    ("slow:at=1:ms=0", "got '0'"),
    ("seed=x", "at least 0, got 'x'"), ("throw:at=1,", "'': expected one of"), ("throw:to=1", "give exactly one of"),
    ("slow:ms=5", "give exactly one of")])
def test_a_fault_that_is_not_well_formed_is_refused_with_the_item(text, words):
    with pytest.raises(ValueError) as refused:
        parse(text)
    assert words in str(refused.value)
    with pytest.raises(ValueError, match="faults"):
        Settings(faults=text)
