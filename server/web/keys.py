"""API keys: a file of their digests, one a line, each with a rate if it has a limit. `linpix key`
makes such lines.

    # a name, the key's SHA-256, and how many requests it may make
    alice  sha256:0f3c...  rate=10/s
    batch  sha256:99b1...  rate=600/min

The digests have no salt and are not stretched: keys are 256 random bits, which no dictionary holds.
"""

import hashlib
import hmac
import logging
import math
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("linpix")

_SECONDS = {"s": 1, "min": 60, "h": 3600}
_RATE = re.compile(r"([1-9]\d{0,8})/(s|min|h)")
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LINE = re.compile(rf"({KEY_NAME.pattern})\s+sha256:([0-9A-Fa-f]{{64}})(?:\s+rate=(\S+))?")


@dataclass(slots=True)
class Key:
    """A key, and its token bucket: `size` requests at once, filled again evenly within
    `seconds`.
    """

    name: str
    digest: bytes
    rate: str = ""  # as written; empty: no limit
    size: int = 0  # 0: no limit
    seconds: float = 0.0
    tokens: float = 0.0
    at: float = -math.inf  # long enough ago that the bucket is full

    def take(self, now: float) -> float:
        """Take a token, for a request. Returns 0, or the seconds until there is one. now: by
        time.monotonic.
        """
        if not self.size:
            return 0.0
        self.tokens = min(self.size, self.tokens + (now - self.at) * self.size / self.seconds)
        self.at = now
        if self.tokens < 1.0:
            return (1.0 - self.tokens) * self.seconds / self.size
        self.tokens -= 1.0
        return 0.0


def bucket_of(rate: str) -> tuple[int, float]:
    """Size and seconds of the bucket for a rate such as 10/s, 600/min or 5000/h. Raises
    ValueError.
    """
    found = _RATE.fullmatch(rate)
    if not found:
        raise ValueError(
            "a rate must be a whole number of requests per s, min or h, such as 10/s or 600/min"
        )
    return int(found[1]), _SECONDS[found[2]]


def parse(text: str, source: object) -> tuple[Key, ...]:
    """The keys of a file's text. Raises ValueError that names source and line, but shows none of
    the line's text.
    """
    keys: list[Key] = []
    lines: dict[str | bytes, int] = {}  # of each name and digest
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line[0] == "#":
            continue
        found = _LINE.fullmatch(line)
        if not found:
            raise ValueError(
                f"{source}, line {number}: expected 'NAME sha256:DIGEST [rate=10/s]'; linpix key"
                " NAME makes such a line"
            )
        name, digest, rate = found[1], bytes.fromhex(found[2]), found[3] or ""
        try:
            bucket = bucket_of(rate) if rate else (0, 0.0)
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}") from None
        for what, value in (("name", name), ("key", digest)):
            if (other := lines.setdefault(value, number)) != number:
                raise ValueError(
                    f"{source}, line {number}: has the same {what} as line {other}; every line"
                    " needs its own"
                )
        keys.append(Key(name, digest, rate, *bucket))
    return tuple(keys)


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a regular file that only its owner may use, or its group read if nobody may
    write it.

    So Kubernetes mounts a Secret for the group of a pod. Raises OSError or ValueError with the
    cure.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    status = os.fstat(descriptor)  # of the opened file: the name may mean another one by now
    try:
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file; give the file of keys")
        mode = stat.S_IMODE(status.st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO) and mode != stat.S_IRUSR | stat.S_IRGRP:
            raise ValueError(
                f"{path} holds keys, but other users have access to it (mode "
                f"{mode:04o}); run: chmod 600 {path}"
            )
    except ValueError:
        os.close(descriptor)
        raise
    return descriptor


def read(path: Path) -> tuple[Key, ...]:
    """The keys of a file. Raises OSError or ValueError."""
    with open(open_private(path, os.O_RDONLY), encoding="utf-8-sig", errors="replace") as file:
        keys = parse(file.read(), path)
    if not keys:
        raise ValueError(
            f"{path} has no key; add one with linpix key NAME --file {path}, or leave out"
            " --api-keys"
        )
    return keys


class Keys:
    """The keys of a file, read again when it changes. If the file is then bad, the keys stay, and
    the log says so.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError or ValueError if the file cannot be used."""
        self._path = path
        self._stamp = self._look()
        if self._stamp is None:  # it may be a key, given by mistake
            raise ValueError(
                "--api-keys (LINPIX_API_KEYS) must be the path of a file of keys, made with linpix"
                " key, and no such file can be found; what was given may be a secret, so it is not"
                " shown here"
            )
        self._keys = read(path)

    def _look(self) -> tuple[int, ...] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        # ctime also shows a change of owner, and a change by a tool that restores the old mtime
        return status.st_ctime_ns, status.st_mtime_ns, status.st_size, status.st_ino

    def _reload(self) -> None:
        """Read the file again. Keys whose rate stays the same keep their buckets."""
        self._stamp = self._look()
        try:
            keys = read(self._path)
        except (OSError, ValueError) as error:
            logger.error("the API keys were not changed: %s", error)
            return
        known = {(key.name, key.rate): key for key in self._keys}
        for key in keys:
            if (old := known.get((key.name, key.rate))) is not None:
                key.tokens, key.at = old.tokens, old.at
        self._keys = keys
        logger.info("API keys were read again: %s", ", ".join(key.name for key in keys))

    def find(self, presented: str) -> Key | None:
        """The key that was presented, if it is one of the file's."""
        if self._look() != self._stamp:
            self._reload()
        digest = hashlib.sha256(presented.encode()).digest()
        matches = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        # after a comparison with every key: the time reveals nothing
        return matches[0] if matches else None
