"""The log on standard error: text for people, or one JSON object a line. It never holds keys or pictures."""

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

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)  # of the current task's request

STDERR = 2
WRITE_S = 0.1        # delay before lines are written, many of them in one write
PATIENCE_S = 1.0     # longest wait for a slow reader, before an announcement and at the end of the process
MAX_LINES = 10_000

_access = logging.getLogger("linpix.access")
# Our own messages hold no keys or pictures; the text of another library's exception might.
_CONTROL = re.compile(r"[\0-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")  # they move a terminal's cursor; newlines are kept
_SECRETS = re.compile(r"(?i:\bbearer\s+)[^\s\"',;]+|\blpx_[\w-]+|[A-Za-z0-9+/_-]{200,}={0,2}")


def redacted(text: str) -> str:
    """The text without keys, and without runs of 200 or more characters, which only encoded data has."""
    return _SECRETS.sub(lambda found: f"[{len(found[0])} characters left out]", text)


def access(*, method: str, route: str | None, status: int, **facts: object) -> None:
    """Write a line of the access log. route: the template, never the path or the query; None if no route was found."""
    _access.info("%s %s %s", method, route or "(no route)", status or "no answer",
                 extra={"fields": {"method": method, "route": route, "status": status or None, **facts}})


class Formatter(logging.Formatter):
    """Formats a record as one line, or one JSON object. A traceback becomes more lines, indented, or a field."""

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
    """Writes lines to a file descriptor in a thread, many at once: log calls wait neither for it nor for the reader.

    If the reader has stopped, up to MAX_LINES wait for it, and further ones are lost. Their number is written after
    the lines that waited.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor, self._lost = descriptor, 0
        self._counting = threading.RLock()  # not the handler's lock: logging.shutdown() holds that while it flushes
        # SimpleQueue, since its put is reentrant: anywhere, the garbage collector may run a __del__ that logs.
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
        """Wait until all lines logged so far are written, but at most PATIENCE_S."""
        written = threading.Event()
        self._queue.put(written)
        written.wait(PATIENCE_S)

    def _write_for_ever(self) -> None:
        while True:
            entries = [self._queue.get()]
            with contextlib.suppress(Exception):  # whatever fails, such as a closed pipe: the log goes on
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
            lines.append(f"{lost} lines of this log are lost because the reader was too slow\n")
        rest = "".join(lines).encode("utf-8", "backslashreplace")
        while rest:
            rest = rest[os.write(self._descriptor, rest):]
        self._count_lost(-lost)


def of(request_id: str) -> dict[str, Any]:
    """The `extra` of a log call about a request that is made outside the task that answers it."""
    return {"fields": {"request_id": request_id}}


def announce(text: str, form: Literal["text", "json"]) -> None:
    """Announce what is ready: with text a plain line, for people and scripts; with json an entry of the log.

    Whatever was logged before comes before it: whoever waits for this line has then seen all warnings of the start.
    """
    if form == "json":
        logging.getLogger("linpix").info("%s", text)
    else:
        for handler in logging.getLogger().handlers:
            handler.flush()
        with contextlib.suppress(OSError):  # as for the log: an output that is closed must not end the service
            os.write(STDERR, f"{text}\n".encode("utf-8", "backslashreplace"))


def configure(form: Literal["text", "json"]) -> None:
    """Log to standard error: messages of LinPix from level info, those of other libraries from warning."""
    handler = Lines(STDERR)
    handler.setFormatter(Formatter(form))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("linpix").setLevel(logging.INFO)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # its warnings are about what clients send
    logging.captureWarnings(True)
