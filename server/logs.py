"""The log on standard error: text for people, or one JSON object a line, without keys or pictures.
And traces.
"""

import contextlib
import json
import logging
import os
import re
import threading
import time
from contextvars import ContextVar
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any, Literal

try:
    from opentelemetry import trace
except ImportError:
    TRACED = False
else:
    TRACED = not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)

# of the current task's request
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)

STDERR = 2
WRITE_S = 0.1  # delay before lines are written, many of them in one write
PATIENCE_S = 1.0  # longest wait for a slow reader at the end of the process
MAX_LINES = 10_000

# asked for all the time: logged at level debug
QUIET = {"/static", "/healthz", "/readyz", "/metrics", "/v1/status"}

_access = logging.getLogger("linpix.access")
# they move a terminal's cursor; newlines are kept
_CONTROL = re.compile(r"[\0-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")
# Keys, and runs of 200 or more characters, which only encoded data has. Our own messages hold none
# of them; the text of another library's exception might.
_SECRETS = re.compile(r"(?i:\bbearer\s+)[^\s\"',;]+|\blpx_[\w-]+|[A-Za-z0-9+/_-]{200,}={0,2}")


def access(*, method: str, route: str | None, status: int, **facts: object) -> None:
    """Write a line of the access log. route: the template, never the path or the query; None if no
    route was found.
    """
    level = logging.DEBUG if route in QUIET and 0 < status < 400 else logging.INFO
    _access.log(
        level,
        "%s %s %s",
        method,
        route or "(no route)",
        status or "no answer",
        extra={"fields": {"method": method, "route": route, "status": status or None, **facts}},
    )


class Formatter(logging.Formatter):
    """Formats a record as one line, or one JSON object. A traceback becomes more lines, indented,
    or a field.
    """

    def __init__(self, form: Literal["text", "json"]) -> None:
        super().__init__()
        self.form = form

    def format(self, record: logging.LogRecord) -> str:
        if self.form == "text" and getattr(record, "plain", False):
            return record.getMessage()
        message, trace = _SECRETS.sub(_left_out, record.getMessage()), ""
        if record.exc_info:
            trace = _SECRETS.sub(_left_out, self.formatException(record.exc_info))
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if request_id := REQUEST_ID.get():
            fields["request_id"] = request_id
        extra: dict[str, Any] = getattr(record, "fields", {})
        if self.form == "json":
            fields |= extra
            if trace:
                fields["traceback"] = trace
            return json.dumps(fields, default=str)
        words = [fields["time"], fields["level"].upper(), record.name, message]
        for name, value in {"request_id": request_id, **extra}.items():
            if value is not None and name not in ("method", "route", "status"):
                words.append(f"{name}={value}")
        text = " ".join(words)
        if trace:
            text += f"\n{trace}"
        text = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
        return text.replace("\n", "\n    ")  # so that no message looks like a record of its own


def _left_out(secret: re.Match[str]) -> str:
    return f"[{len(secret[0])} characters left out]"


class Lines(QueueHandler):
    """Hands lines to a thread that writes them to a file descriptor: log calls wait neither for it
    nor for the reader.

    If the reader has stopped, up to MAX_LINES wait for it, and further ones are lost. The log says
    how many once there is room again.
    """

    # of lines, and of Events that are to be set once all lines before them are written
    queue: SimpleQueue[Any]

    def __init__(self, descriptor: int) -> None:
        # SimpleQueue, since its put is reentrant: anywhere, the garbage collector may run a __del__
        # that logs.
        super().__init__(SimpleQueue())
        self._descriptor, self._lost = descriptor, 0  # _lost is changed under the handler's lock
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def enqueue(self, record: logging.LogRecord) -> None:
        if self.queue.qsize() >= MAX_LINES:
            self._lost += 1
            return
        if self._lost:
            self.queue.put(
                f"{self._lost} lines of this log are lost because the reader was too slow\n"
            )
            self._lost = 0
        self.queue.put(f"{record.msg}\n")

    def flush(self) -> None:
        """At the end of the process: wait until all lines are written, but at most PATIENCE_S."""
        written = threading.Event()
        self.queue.put(written)
        written.wait(PATIENCE_S)

    def _write(self) -> None:
        """Write lines in groups: each write may wake the reader, which takes the processor from the
        event loop.
        """
        while True:
            entries = [self.queue.get()]
            time.sleep(WRITE_S)
            while not self.queue.empty():
                entries.append(self.queue.get())
            # whatever fails, such as a closed pipe: the log goes on
            with contextlib.suppress(Exception):
                rest = "".join(line for line in entries if isinstance(line, str)).encode(
                    "utf-8", "backslashreplace"
                )
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            for entry in entries:
                if isinstance(entry, threading.Event):
                    entry.set()


def of(request_id: str) -> dict[str, Any]:
    """The `extra` of a log call about a request that is made outside the task that answers it."""
    return {"fields": {"request_id": request_id}}


def announce(text: str) -> None:
    """Announce what is ready: with text a plain line, for people and scripts; with json an entry of
    the log.

    It follows what was logged before it: whoever waits for this line has then seen all warnings of
    the start. It is written when this returns, even if a signal then ends the process at once, and
    whatever --log-level is.
    """
    logger = logging.getLogger("linpix")
    logger.handle(
        logger.makeRecord("linpix", logging.INFO, "", 0, text, (), None, extra={"plain": True})
    )
    for handler in logging.getLogger().handlers:
        handler.flush()


def configure(form: Literal["text", "json"], level: str = "info") -> None:
    """Log to standard error: messages of LinPix from this level, those of other libraries from
    warning.
    """
    handler = Lines(STDERR)
    handler.setFormatter(Formatter(form))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("linpix").setLevel(level.upper())
    # its warnings are about clients that have left
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    # its warnings are about what clients send
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    logging.captureWarnings(True)
    if not TRACED:
        return
    # FastAPI's instrumentation records a span for each piece of an answer, so a stream would have
    # hundreds; no variable prevents it
    with contextlib.suppress(ImportError):
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor

        instrumentor = FastAPIInstrumentor()
        if instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.uninstrument()
            instrumentor.instrument(exclude_spans=["receive", "send"])


def spans(*parts: tuple[str, float, float]) -> None:
    """Record parts of the current request that are over: name, begin and end, by time.monotonic.
    Only if TRACED.
    """
    shift, tracer = time.time() - time.monotonic(), trace.get_tracer("linpix")
    for name, began, ended in parts:
        if ended > began:
            tracer.start_span(name, start_time=round((began + shift) * 1e9)).end(
                round((ended + shift) * 1e9)
            )
