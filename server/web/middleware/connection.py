"""One HTTP/1.1 connection: uvicorn's protocol, with limits of time and size for the head of a request.

The only file that subclasses private parts of uvicorn, which is why pyproject.toml bounds its version.
"""

import asyncio
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from typing import Any

from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...errors import ServiceError
from ...logs import access
from ..error_handlers import response_of

HEAD_BYTES = 2**14   # largest part of a head that is not complete yet
READ_BYTES = 2**14   # largest read of a connection: asyncio's 256 KiB may be 43,000 chunks, 60 ms of the event loop
MAX_AHEAD = 8        # a client may send so many requests ahead, and its leaving is still noticed
AHEAD_BYTES = 2**16  # and so much of the last one's body, which nothing reads yet
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]+)(.*)")
_UPGRADE = re.compile(rb"(?i)(?<=\r\n)upgrade:[^\r]*\r\n")  # the parser would take the body for another protocol


def connection(head_timeout_s: float, headers: Mapping[str, str], trusts: Callable[[str], bool] = lambda peer: False
               ) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, but a connection is closed if the head of its next request is not complete in time.

    Large heads are refused, and wishes for another protocol ignored. What is not HTTP is answered with our envelope.
    Reads are small, so that other connections have their turn.

    headers: of answers to what is not HTTP · trusts: whether a peer is a proxy to be believed; scope["state"] has
    the answer as `trusted`
    """

    class Connection(HttpToolsProtocol):
        _late: asyncio.TimerHandle | None = None
        _running: Any = None  # the request that is being answered; uvicorn's cycle is the last that has come
        _head = 0  # bytes of a head that is not complete yet; -1: a body is being read
        _trailers = 0  # bytes of headers that came after a body
        _inside = False  # a request that has not come as a whole

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.max_size = READ_BYTES
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            if self._running is not None and not self._running.response_complete:
                self._running.disconnected = True  # uvicorn tells only the last of several requests
                self._running.message_event.set()
            self.pipeline.clear()
            super().connection_lost(exc)

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            self._running = cycle
            super()._start_asgi_task(cycle, app)

        def data_received(self, data: bytes) -> None:
            if self._head >= 0:
                self._head += len(data)
            if not self._inside and (end := data.find(b"\r\n\r\n") + 2) > 1:  # a whole head, and nothing before it
                data = _UPGRADE.sub(b"", data[:end]) + data[end:]
            super().data_received(data)
            if self._head > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"the head is too large; at most {HEAD_BYTES:,} bytes are allowed")
            if 0 < len(self.pipeline) <= MAX_AHEAD and len(self.cycle.body) <= AHEAD_BYTES:
                self.flow.resume_reading()  # uvicorn has paused it, and would not notice that the client leaves
            self._expect_head()

        def on_message_begin(self) -> None:
            self._inside = True
            super().on_message_begin()
            self.scope["state"]["trusted"] = self.client is not None and trusts(self.client[0])

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._head >= 0:
                super().on_header(name, value)
                return
            self._trailers += len(name) + len(value)  # which nothing reads
            if self._trailers > HEAD_BYTES:
                raise HttpParserError(f"the headers after a body may have {HEAD_BYTES:,} bytes at most")

        def on_headers_complete(self) -> None:
            self._head, self._trailers = -1, 0
            if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES:
                raise HttpParserError(f"the head is too large; at most {HEAD_BYTES:,} bytes are allowed")
            if [name for name, _ in self.headers].count(b"host") != 1 and self.parser.get_http_version() == "1.1":
                raise HttpParserError("send exactly one Host header")
            if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
                raise HttpParserError("Transfer-Encoding must be chunked")
            if self.parser.should_upgrade():
                raise HttpParserError("this server speaks HTTP/1.1 only; leave out the Upgrade header")
            if whole := _ABSOLUTE.fullmatch(self.url):  # a target with a host, which replaces the Host header
                self.headers[:] = [(b"host", whole[1]), *(each for each in self.headers if each[0] != b"host")]
                self.url = whole[2] if whole[2].startswith(b"/") else b"/" + whole[2]
            elif not self.url.startswith((b"/", b"*")):
                raise HttpParserError("the target of a request must be a path")
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._head, self._inside = 0, False
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            """Answer what cannot be read; if an answer has already begun, end that one instead."""
            running = self._running if self._running and not self._running.response_complete else None
            if running:
                running.disconnected = True  # its answer can no longer be sent
            if running is None or not running.response_started:
                error, request_id = sys.exception(), secrets.token_hex(8)
                why = (error and error.__context__) or error or msg  # httptools wraps what its callbacks raise
                answer = response_of(ServiceError(f"the request cannot be read: {str(why)[:200]}", 400, "invalid_http"))
                sent = [*answer.raw_headers, (b"connection", b"close"), (b"x-request-id", request_id.encode()),
                        *((name.encode(), value.encode()) for name, value in headers.items())]
                self.transport.write(b"".join([b"HTTP/1.1 400 Bad Request\r\n", *(b"%s: %s\r\n" % one for one in sent),
                                               b"\r\n", bytes(answer.body)]))
                access(method="OTHER", route=None, status=answer.status_code, request_id=request_id,
                       client=self.client[0] if self.client else "unknown")
            self.transport.close()

        def _expect_head(self) -> None:
            if self._running is not None and not self._running.response_complete:
                self._forget()
            elif self._late is None:
                self._late = self.loop.call_later(head_timeout_s, self.timeout_keep_alive_handler)

        def _forget(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Connection
