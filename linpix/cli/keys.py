"""`linpix key`: make an API key and append it to the file."""

import argparse
import hashlib
import json
import os
import secrets
import sys
from pathlib import Path

from linpix.server.web.keys import KEY_NAME, bucket_of, open_private, parse


def key(given: argparse.Namespace) -> None:
    """`linpix key`: make a key, and its line for the file of --api-keys."""
    if not KEY_NAME.fullmatch(given.name):
        raise ValueError(
            "a name must have 1 to 64 letters, digits, dots, dashes and underscores, got"
            f" {given.name!r}"
        )
    secret = f"lpx_{secrets.token_urlsafe(32)}"
    line = f"{given.name} sha256:{hashlib.sha256(secret.encode()).hexdigest()}"
    if given.rate:
        bucket_of(given.rate)
        line += f" rate={given.rate}"
    if given.file:
        append(Path(given.file), line)
    if given.json:
        print(json.dumps({"name": given.name, "key": secret, "line": line, "file": given.file}))
        return
    where = ", followed by its line for the file of --api-keys:"
    if given.file:
        where = f", and its line was added to {given.file}"
    print(secret)
    print(f"this is the key; it is shown only once{where}", file=sys.stderr)
    if not given.file:
        print(line)


def append(path: Path, line: str) -> None:
    """Add a line to a file of keys; a new file is its owner's alone. Raises OSError or
    ValueError.
    """
    with open(
        open_private(path, os.O_RDWR | os.O_CREAT | os.O_APPEND),
        "r+",
        encoding="utf-8",
        errors="replace",
    ) as file:
        text = file.read()
        added = f"{line}\n"
        if text and not text.endswith("\n"):
            added = "\n" + added
        # before writing: the file may be invalid, or already have this name
        parse(text + added, path)
        file.write(added)
