"""What keeps the house from growing. What is not bounded grows: lower these numbers with every
simplification.
"""

import json
import sys

import pytest

from linpix.model import ops
from tools.harness.commands import ran
from tools.house import other_lines, rooms

# `python -m tools.house` prints them
TOKENS = {
    "server + linpix": 98_059,
    "model": 45_161,
    "training": 56_616,
    "tests + tools + examples": 328_528,
}
LINES = {"csrc": 6_903, "server/static": 6_785}
FOLDED = 1.2  # expressions in a hundred statements that a reader has to take apart
# functions and files of server/ and linpix/ that run for one request
WAYS = {"image": (98, 20), "edit": (125, 26)}


def test_no_room_has_more_tokens_or_folded_expressions_than_before():
    found = rooms()
    assert set(found) == set(TOKENS)
    for room, size in found.items():
        assert size.tokens <= TOKENS[room], f"{room}: remove as much as you add"
        assert 100 * size.folded / size.statements <= FOLDED, room


def test_what_is_not_python_has_no_more_lines_than_before():
    found = other_lines()
    assert set(found) == set(LINES)
    for room, lines in found.items():
        assert lines <= LINES[room], f"{room}: remove as much as you add"


@pytest.mark.skipif(
    not ops.compiled, reason="counted with the compiled engine, which needs a compiler"
)
def test_the_way_of_a_request_is_no_longer_than_before():
    """`python -m tools.way` lists it."""
    told = ran(f"{sys.executable} -m tools.way --json")
    for request, way in json.loads(told.stdout).items():
        ours = {
            file: names for file, names in way.items() if file.startswith(("server/", "linpix/"))
        }
        functions, files = WAYS[request]
        assert sum(map(len, ours.values())) <= functions and len(ours) <= files, (request, ours)
