"""Commands, as a user types them, and what they print."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def words_of(parts: Iterable[object]) -> list[str]:
    """Of a command whose parts are one or several words each, as a shell divides it."""
    return shlex.split(" ".join(map(str, parts)))


def ran(*command: object, **options) -> subprocess.CompletedProcess[str]:
    """How a command ended, and what it printed; options of subprocess.run."""
    return subprocess.run(words_of(command), capture_output=True, text=True, check=False, **options)


def python(code: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """The same of a program in Python; variables of its environment."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | variables,
    )
