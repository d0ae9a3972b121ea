"""Files of settings in TOML, whose names are those of a command's flags."""

import difflib
import json
import math
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any


def read(path: Path, names: Collection[str], command: str) -> dict[str, Any]:
    """The values of a file by name, with underscores. Raises OSError, or ValueError with the cure
    if a name is not one of these. command: such as "linpix serve".
    """
    try:
        values = tomllib.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    found = {}
    for given, value in values.items():
        name = given.replace("-", "_")
        if name not in names:
            raise ValueError(f"{path}: {given} is not a setting; {nearest(name, names, command)}")
        found[name] = value
    return found


def nearest(name: str, names: Collection[str], command: str) -> str:
    """What a name that does not exist was meant to be."""
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else f"{command} --help lists them"


def line(name: str, value: Any) -> str:
    """A line that `read` reads. A value that TOML cannot have, None or infinity, is a comment."""
    if value is None or value == math.inf:
        return f"# {name} =\n"
    shown = str(value) if isinstance(value, Path) else value
    return f"{name} = {json.dumps(shown, ensure_ascii=False)}\n"
