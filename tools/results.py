"""Measurements as lines of a file, each written when it is known, so that a run that is ended early
loses none.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Found = dict[str, Any]


class Results:
    """JSON objects, one a line. Several programs may add to a file, one after the other."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_bytes() if path.exists() else b""
        whole = text.rfind(b"\n") + 1  # behind it: a line whose writer was killed
        if whole < len(text):
            os.truncate(path, whole)
        self.path, self.known = path, [json.loads(line) for line in text[:whole].splitlines()]

    def find(self, **key: Any) -> Found | None:
        """The last line with these values."""
        return next((line for line in reversed(self.known) if key.items() <= line.items()), None)

    def add(self, **found: Any) -> None:
        line = json.dumps(found)
        with self.path.open("a") as file:
            file.write(line + "\n")
        self.known.append(json.loads(line))
        print(line, flush=True)

    def measure(self, work: Callable[[], Found], **key: Any) -> Found:
        """Add what `work` finds, unless it is known from an earlier run. Returns its line."""
        if not self.find(**key):
            self.add(**key, **work())
        return self.find(**key) or {}
