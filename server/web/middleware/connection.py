"""One HTTP/1.1 connection: uvicorn's protocol, with limits of time and size for the head of a
request.

The only file that subclasses private parts of uvicorn, which is why pyproject.toml bounds its
version.
"""

import asyncio
import re
import secrets
import sys
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...errors import ServiceError
from ...logs import access
from ..error_handlers import response_of
from .stack import SECURITY_HEADERS

HEAD_BYTES = 2**14  # largest head of a request; also of headers after a body
# largest read of a connection: asyncio's 256 KiB may be 43,000 chunks, 60 ms of the event loop
READ_BYTES = 2**14
MAX_AHEAD = 8  # a client may send so many requests ahead, and its leaving is still noticed
AHEAD_BYTES = 2**14  # and so much of their bodies, which nothing reads yet
WRITE_S = 30.0  # within which a client must take what has been written, a piece of its answer
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]+)(.*)")


class Parser(HttpRequestParser):
    """httptools' parser, but a request that asks for another protocol is read as if it did not."""

    def __init__(self, connection: "Connection") -> None:
        super().__init__(connection)
        self._connection = connection
        # for requests that are sent ahead of an answer that closes the connection
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # uvicorn gives bytes
        while data:
            try:
                super().feed_data(data)
                return
            except HttpParserUpgrade as upgrade:
                head_end = upgrade.args[0]
            data = self._connection.head_without_upgrade() + data[head_end:]
            self.__init__(self._connection)  # type: ignore[misc]  # it may have seen "close"


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, but a connection is closed if its next head is not complete within
    timeout_keep_alive, or if its client takes nothing of an answer for WRITE_S.

    Large heads are refused, and wishes for another protocol ignored. What is not HTTP is answered
    with our envelope, after the requests before it. HTTP/1.0 gets neither chunks nor 100 Continue.
    Reads are small, so that other connections have their turn. scope["state"] says as `trusted`
    whether the peer is a proxy to be believed.
    """

    app: Any  # uvicorn's ProxyHeadersMiddleware
    # requests that were not yet answered when the last head came, and that one
    _cycles: Sequence[Any] = ()
    _unread = 0  # bytes since the last whole head or piece of a body
    _writing: asyncio.TimerHandle | None = None  # ends a connection that takes nothing
    _refusal = b""  # the answer to what cannot be read; from then on, nothing more is read

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.parser = Parser(self)
        transport.max_size = READ_BYTES
        # what the system has not taken counts as unwritten; a transport of TLS pauses at its limit,
        # not above it, and 0 would pause it for good
        transport.set_write_buffer_limits(1 if transport.get_extra_info("sslcontext") else 0)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def pause_writing(self) -> None:
        self._writing = self.loop.call_later(WRITE_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.resume_writing()
        for cycle in self._cycles:  # uvicorn tells only the last of several requests
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal:
            return
        cycle, body_bytes = self.cycle, len(self.cycle.body) if self.cycle else 0
        # uvicorn would stop it
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if self.cycle is cycle:  # no head was completed
            self.timeout_keep_alive_task = timer
        elif timer is not None:
            timer.cancel()
        read = self.cycle is not cycle or (cycle and len(cycle.body) > body_bytes)
        self._unread = 0 if read else self._unread + len(data)
        if self._unread > HEAD_BYTES and not self.transport.is_closing() and not self._refusal:
            self.send_400_response(
                f"the head is too large; at most {HEAD_BYTES:,} bytes are allowed"
            )
        ahead_bytes = sum(len(waiting.body) for waiting in self._cycles)
        if 0 < len(self.pipeline) <= MAX_AHEAD and ahead_bytes <= AHEAD_BYTES:
            # uvicorn has paused it, and would not notice that the client leaves
            self.flow.resume_reading()

    def _should_upgrade(self) -> bool:
        """uvicorn's callbacks then skip a head that asks for another protocol; Parser reads it
        again.
        """
        return True

    def head_without_upgrade(self) -> bytes:
        """The last head, as it was sent, but without its Upgrade headers."""
        first = self.parser.get_method() + b" " + self.url
        lines = [first + b" HTTP/" + self.parser.get_http_version().encode()]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES:
            raise HttpParserError(
                f"the head is too large; at most {HEAD_BYTES:,} bytes are allowed"
            )
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise HttpParserError("CONNECT is for proxies, and this server is not one")
            return
        version = self.parser.get_http_version()
        hosts = [name for name, _ in self.headers].count(b"host")
        if hosts > 1 or (not hosts and version == "1.1"):
            raise HttpParserError("send exactly one Host header")
        if any(
            name == b"transfer-encoding" and value.lower() != b"chunked"
            for name, value in self.headers
        ):
            raise HttpParserError("Transfer-Encoding must be chunked")
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
        if version < "1.1":
            self.expect_100_continue = False
        super().on_headers_complete()
        self._cycles = [
            *(cycle for cycle in self._cycles if not cycle.response_complete),
            self.cycle,
        ]
        self.headers = deque(maxlen=0)  # type: ignore[assignment]  # headers after a body are thrown away

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if cycle.scope["http_version"] < "1.1":
            cycle.keep_alive = cycle.chunked_encoding = False
            app = partial(_without_chunks, app, cycle)
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read, once the requests before it are answered. If it is the body
        of a request, that request gets this answer; if its own has begun, that one is ended.
        """
        waiting = [cycle for cycle in self._cycles if not cycle.response_complete]
        broken = waiting.pop() if waiting and waiting[-1].more_body else None
        self._cycles = waiting
        if broken and waiting:
            self.pipeline.popleft()  # it has not begun
        elif broken:
            broken.disconnected = True  # its answer can no longer be sent
        error, request_id = sys.exception(), secrets.token_hex(8)
        cause = error and error.__context__  # httptools wraps what its callbacks raise
        why = cause if isinstance(cause, HttpParserError) else error or msg
        answer = response_of(
            ServiceError(f"the request cannot be read: {str(why)[:200]}", 400, "invalid_http")
        )
        answer.headers.update(
            {"connection": "close", "x-request-id": request_id, **SECURITY_HEADERS}
        )
        lines = [b"HTTP/1.1 400 Bad Request"]
        lines += [name + b": " + value for name, value in answer.raw_headers]
        self._refusal = b"\r\n".join([*lines, b"", bytes(answer.body)])
        if broken and broken.response_started:
            self.transport.close()
            return
        access(
            method="OTHER",
            route=None,
            status=answer.status_code,
            request_id=request_id,
            client=self.client[0] if self.client else "unknown",
        )
        self._refuse()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refusal:
            self._refuse()

    def _refuse(self) -> None:
        """Send the refusal, if all requests before it are answered."""
        answered = all(cycle.response_complete for cycle in self._cycles)
        if answered and not self.transport.is_closing():
            self.transport.write(self._refusal)
            self.transport.close()


async def _without_chunks(
    app: ASGIApp, cycle: Any, scope: Scope, receive: Receive, send: Send
) -> None:
    """Call an app, whose answer then ends when the connection is closed."""

    async def send_piece(message: Message) -> None:
        # uvicorn checks the length of an answer that has no chunks; this one's is not known
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_piece)
