"""`linpix key`: the key that it prints, and the line that it adds to a file."""

import json
import re

import pytest

from linpix.server.web import keys
from linpix.server.web.keys import Keys
from tests.linpix.test_main import inside
from tests.server.web.test_keys import line, private


def test_the_command_makes_a_key_once_and_a_line_for_its_file(tmp_path):
    path = tmp_path / "keys"
    made = inside(f"key alice --rate 600/min --file {path}")
    assert made.returncode == 0, made.stderr
    secret = made.stdout.strip()
    assert re.fullmatch(r"lpx_[\w-]{43}", secret)
    assert path.read_text() == line("alice", secret, "600/min")
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(path.read_text().rstrip("\n"))  # as some editors leave it
    second = json.loads(inside(f"key bob --file {path} --json").stdout)
    assert [(key.name, key.rate) for key in keys.read(path)] == [("alice", "600/min"), ("bob", "")]
    assert Keys(path).find(second["key"]).name == "bob"
    printed = inside("key carol").stdout.splitlines()
    assert printed[1] + "\n" == line("carol", printed[0])
    assert len({secret, second["key"], printed[0]}) == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("alice", "has the same name as line 1"),
        ("'a b'", "letters, digits"),
        ("../x", "letters, digits"),
        ("bob --rate often", "such as 10/s"),
    ],
)
def test_the_command_refuses_what_would_spoil_the_file_and_leaves_it_as_it_is(
    tmp_path, words, told
):
    path = private(tmp_path / "keys", line("alice", "first"))
    refused = inside("key", words, f"--file {path}")
    assert refused.returncode == 2
    assert told in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert refused.stdout == ""
    assert path.read_text() == line("alice", "first")


def test_the_command_adds_nothing_to_a_file_that_others_may_read(tmp_path):
    path = private(tmp_path / "keys", "")
    path.chmod(0o644)
    refused = inside(f"key alice --file {path}")
    assert refused.returncode == 2 and "chmod 600" in refused.stderr
    assert path.read_text() == ""
