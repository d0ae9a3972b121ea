"""The log on standard error, for people or one JSON object a line; it never holds keys or pictures."""

import contextlib
import json
import logging
import os
import re
import threading
import time
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import Any, Literal

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)  # of the request that a task works for

STDERR = 2
WRITE_S = 0.1        # what is logged is written so much later
PATIENCE_S = 1.0     # the end of the process waits so long for a reader that is slow
MAX_LINES = 10_000

_access = logging.getLogger("linpix.access")
# What we log has no keys and no pictures in it; the words of somebody else's exception might.
_CONTROL = re.compile(r"[\0-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")  # what moves a terminal's cursor; not a line's end
_SECRETS = re.compile(r"(?i:\bbearer\s+)[^\s\"',;]+|\blpx_[\w-]+|[A-Za-z0-9+/_-]{200,}={0,2}")


def redacted(text: str) -> str:
    """The text without keys, and without runs of characters as long as only encoded data has them."""
    return _SECRETS.sub(lambda found: f"[{len(found[0])} characters left out]", text)


def access(*, method: str, route: str | None, status: int, **facts: object) -> None:
    """A line of the access log. route: the template, never the path or the query; None where no route was found."""
    _access.info("%s %s %s", method, route or "(no route)", status or "no answer",
                 extra={"fields": {"method": method, "route": route, "status": status or None, **facts}})


class Formatter(logging.Formatter):
    """One line, or one JSON object, a record; a traceback is a field of the object, or more lines, indented."""

    def __init__(self, form: Literal["text", "json"]) -> None:
        super().__init__()
        self.form = form

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {"time": f"{seconds}.{int(record.msecs):03}Z", "level": record.levelname.lower(),
                                  "logger": record.name, "message": redacted(record.getMessage())}
        if request_id := REQUEST_ID.get():
            fields["request_id"] = request_id
        extra: dict[str, Any] = getattr(record, "fields", {})
        trace = redacted(self.formatException(record.exc_info)) if record.exc_info else ""
        if self.form == "json":
            return json.dumps(fields | extra | ({"traceback": trace} if trace else {}), default=str)
        facts = {"request_id": request_id} | {name: value for name, value in extra.items()
                                              if name not in ("method", "route", "status")}
        words = [fields["time"], fields["level"].upper(), record.name, fields["message"],
                 *(f"{name}={value}" for name, value in facts.items() if value is not None)]
        text = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], " ".join(words) + (f"\n{trace}" if trace else ""))
        return text.replace("\n", "\n    ")  # so that no message looks like a record of its own


class Lines(logging.Handler):
    """Lines to a file descriptor, many in one write, by a thread: whoever logs waits neither for it nor for its reader.

    Of what a reader that has stopped leaves, MAX_LINES wait for it; how many were lost is told before the next.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor, self._lost = descriptor, 0
        self._counting = threading.RLock()  # not the handler's, which logging.shutdown() holds while it flushes
        # Its put may be called in the middle of itself: the collector may run a __del__ that logs, anywhere.
        self._queue: SimpleQueue[str | threading.Event] = SimpleQueue()
        threading.Thread(target=self._write_for_ever, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record) + "\n"
        except Exception:
            self.handleError(record)
            return
        if self._queue.qsize() < MAX_LINES:
            self._queue.put(text)
        else:
            self._count_lost(1)

    def _count_lost(self, lines: int) -> None:
        with self._counting:
            self._lost += lines

    def flush(self) -> None:
        """Wait until all is written that was logged before, or for a moment."""
        written = threading.Event()
        self._queue.put(written)
        written.wait(PATIENCE_S)

    def _write_for_ever(self) -> None:
        while True:
            entries = [self._queue.get()]
            with contextlib.suppress(Exception):  # nobody reads any more, or whatever else: the log goes on
                time.sleep(WRITE_S)
                with contextlib.suppress(Empty):
                    while True:
                        entries.append(self._queue.get_nowait())
                self._write([entry for entry in entries if isinstance(entry, str)])
            for entry in entries:
                if isinstance(entry, threading.Event):
                    entry.set()

    def _write(self, lines: list[str]) -> None:
        if lost := self._lost:
            lines.append(f"{lost} lines of this log are lost: they were not read in time\n")
        rest = "".join(lines).encode("utf-8", "backslashreplace")
        while rest:
            rest = rest[os.write(self._descriptor, rest):]
        self._count_lost(-lost)


def of(request_id: str) -> dict[str, Any]:
    """`extra` of a log call for a request, outside of the task that answers it."""
    return {"fields": {"request_id": request_id}}


def announce(text: str, form: Literal["text", "json"]) -> None:
    """Say to whoever started this what is there now: a plain line for people and scripts, or an entry of the log."""
    if form == "json":
        logging.getLogger("linpix").info("%s", text)
    else:
        with contextlib.suppress(OSError):  # as for the log: that nobody can read it ends no service
            os.write(STDERR, f"{text}\n".encode("utf-8", "backslashreplace"))


def configure(form: Literal["text", "json"]) -> None:
    """Log to standard error: what LinPix says from info on, and others from warning on."""
    handler = Lines(STDERR)
    handler.setFormatter(Formatter(form))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("linpix").setLevel(logging.INFO)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # its warnings are about what clients send
    logging.captureWarnings(True)
