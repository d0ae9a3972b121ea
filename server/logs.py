"""The log on standard error, for people or one JSON object a line; it never holds keys or pictures."""

import contextlib
import json
import logging
import re
import sys
import threading
import time
from collections import deque
from contextvars import ContextVar
from typing import Any, Literal, TextIO

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)  # of the request that a task works for

WRITE_S = 0.1        # what is logged is written so much later, at most
PATIENCE_S = 0.5     # whoever logs waits so long for a reader that is slow
MOST_LINES = 10_000  # wait for one

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
    """Lines to a stream, many in one write: each write wakes who reads them, and the event loop would wait for that.

    Warnings, and what is worse, are written at once, unless the reader takes nothing for a moment: then they wait with
    the rest, of which the last MOST_LINES are kept.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream, self._lines = stream, deque[str](maxlen=MOST_LINES)
        self._writing = threading.Lock()  # not the handler's, which everybody who logs needs
        self._some = threading.Event()
        threading.Thread(target=self._write_now_and_then, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record) + "\n")
            if record.levelno >= logging.WARNING:
                self.flush()
            else:
                self._some.set()
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        # Not without end: the collector may run a __del__ that logs, on the very thread that writes.
        if not self._writing.acquire(timeout=PATIENCE_S):
            self._some.set()
            return
        try:
            lines = []
            while self._lines:
                lines.append(self._lines.popleft())
            self._stream.write("".join(lines))
            self._stream.flush()
        finally:
            self._writing.release()

    def _write_now_and_then(self) -> None:
        while self._some.wait():
            time.sleep(WRITE_S)
            self._some.clear()
            with contextlib.suppress(Exception):  # nobody reads any more, or it is closed
                self.flush()


def of(request_id: str) -> dict[str, Any]:
    """`extra` of a log call for a request, outside of the task that answers it."""
    return {"fields": {"request_id": request_id}}


def announce(text: str, form: Literal["text", "json"]) -> None:
    """Say to whoever started this what is there now: a plain line for people and scripts, or an entry of the log."""
    if form == "json":
        logging.getLogger("linpix").info("%s", text)
    else:
        print(text, file=sys.stderr, flush=True)


def configure(form: Literal["text", "json"]) -> None:
    """Log to standard error: what LinPix says from info on, and others from warning on."""
    handler = Lines(sys.stderr)
    handler.setFormatter(Formatter(form))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("linpix").setLevel(logging.INFO)
    logging.captureWarnings(True)
