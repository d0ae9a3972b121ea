"""What keeps the house from growing. What is not bounded grows: lower these numbers with every simplification."""

import json
import subprocess
import sys

import pytest

from linpix.model import ops
from tests.test_structure import FILES, room_of

LINES = 15_100  # of Python in server/ and linpix/ together
WAYS = {
    "image": (86, 20),
    "edit": (109, 25),
}  # functions and files of server/ and linpix/ that run for one request


def test_the_house_has_no_more_lines_than_before():
    lines = sum(
        len(path.read_text().splitlines())
        for path in FILES
        if room_of(path) in ("server", "linpix")
    )
    assert lines <= LINES, "remove as much as you add"


@pytest.mark.skipif(
    not ops.compiled, reason="counted with the compiled engine, which needs a compiler"
)
def test_the_way_of_a_request_is_no_longer_than_before():
    """`python -m tools.way` lists it."""
    told = subprocess.run(
        [sys.executable, "-m", "tools.way", "--json"], capture_output=True, text=True, check=True
    )
    for request, way in json.loads(told.stdout).items():
        ours = {
            file: names for file, names in way.items() if file.startswith(("server/", "linpix/"))
        }
        functions, files = WAYS[request]
        assert sum(map(len, ours.values())) <= functions and len(ours) <= files, (request, ours)
