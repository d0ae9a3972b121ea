"""One HTTP/1.1 connection: uvicorn's protocol, with limits of time and size for the head of a
request.

The only file that subclasses private parts of uvicorn, which is why pyproject.toml bounds its
version.
"""

import re
import secrets
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...errors import ServiceError
from ...logs import access
from ..error_handlers import response_of
from .stack import SECURITY_HEADERS

HEAD_BYTES = 2**14  # largest head of a request; also of headers after a body
# largest read of a connection: asyncio's 256 KiB may be 43,000 chunks, 60 ms of the event loop
READ_BYTES = 2**14
MAX_AHEAD = 8  # a client may send so many requests ahead, and its leaving is still noticed
AHEAD_BYTES = 2**16  # and so much of the last one's body, which nothing reads yet
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]+)(.*)")
# the parser would take the body for another protocol
_UPGRADE = re.compile(rb"(?i)(?<=\r\n)upgrade:[^\r\n]*\r\n")


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, but a connection is closed if its next head is not complete within
    timeout_keep_alive.

    Large heads are refused, and wishes for another protocol ignored. What is not HTTP is answered
    with our envelope. Reads are small, so that other connections have their turn. scope["state"]
    says as `trusted` whether the peer is a proxy to be believed.
    """

    app: Any  # uvicorn's ProxyHeadersMiddleware
    # requests that were not yet answered when the last head came, and that one
    _cycles: Sequence[Any] = ()
    _unread = 0  # bytes since the last whole head or piece of a body

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.max_size = READ_BYTES
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._cycles:  # uvicorn tells only the last of several requests
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        cycle, body_bytes = self.cycle, len(self.cycle.body) if self.cycle else 0
        # uvicorn would stop it
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        # two requests
        between = not isinstance(self.headers, list) and not (cycle and cycle.more_body)
        if between and (end := data.find(b"\r\n\r\n") + 2) > 1:
            data = _UPGRADE.sub(b"", data[:end]) + data[end:]
        super().data_received(data)
        if self.cycle is cycle:  # no head was completed
            self.timeout_keep_alive_task = timer
        elif timer is not None:
            timer.cancel()
        read = self.cycle is not cycle or (cycle and len(cycle.body) > body_bytes)
        self._unread = 0 if read else self._unread + len(data)
        if self._unread > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(
                f"the head is too large; at most {HEAD_BYTES:,} bytes are allowed"
            )
        if 0 < len(self.pipeline) <= MAX_AHEAD and len(self.cycle.body) <= AHEAD_BYTES:
            # uvicorn has paused it, and would not notice that the client leaves
            self.flow.resume_reading()

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES:
            raise HttpParserError(
                f"the head is too large; at most {HEAD_BYTES:,} bytes are allowed"
            )
        hosts = [name for name, _ in self.headers].count(b"host")
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            raise HttpParserError("send exactly one Host header")
        if any(
            name == b"transfer-encoding" and value.lower() != b"chunked"
            for name, value in self.headers
        ):
            raise HttpParserError("Transfer-Encoding must be chunked")
        if self.parser.should_upgrade():
            raise HttpParserError("this server speaks HTTP/1.1 only; leave out the Upgrade header")
        # a target with a host, which replaces the Host header
        if whole := _ABSOLUTE.fullmatch(self.url):
            self.headers[:] = [
                (b"host", whole[1]),
                *(each for each in self.headers if each[0] != b"host"),
            ]
            self.url = whole[2] if whole[2].startswith(b"/") else b"/" + whole[2]
        elif not self.url.startswith((b"/", b"*")):
            raise HttpParserError("the target of a request must be a path")
        self.scope["state"]["trusted"] = (
            self.client[0] if self.client else None
        ) in self.app.trusted_hosts
        super().on_headers_complete()
        self._cycles = [
            *(cycle for cycle in self._cycles if not cycle.response_complete),
            self.cycle,
        ]
        self.headers = deque(maxlen=0)  # type: ignore[assignment]  # headers after a body are thrown away

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read; if an answer has already begun, end that one instead."""
        running = next((cycle for cycle in self._cycles if not cycle.response_complete), None)
        if running:
            running.disconnected = True  # its answer can no longer be sent
        if running is None or not running.response_started:
            error, request_id = sys.exception(), secrets.token_hex(8)
            cause = error and error.__context__  # httptools wraps what its callbacks raise
            why = cause if isinstance(cause, HttpParserError) else error or msg
            answer = response_of(
                ServiceError(f"the request cannot be read: {str(why)[:200]}", 400, "invalid_http")
            )
            answer.headers.update(
                {"connection": "close", "x-request-id": request_id, **SECURITY_HEADERS}
            )
            self.transport.write(
                b"".join(
                    [
                        b"HTTP/1.1 400 Bad Request\r\n",
                        *(b"%s: %s\r\n" % header for header in answer.raw_headers),
                        b"\r\n",
                        bytes(answer.body),
                    ]
                )
            )
            access(
                method="OTHER",
                route=None,
                status=answer.status_code,
                request_id=request_id,
                client=self.client[0] if self.client else "unknown",
            )
        self.transport.close()
