"""One HTTP/1.1 connection: uvicorn's protocol with time limits, and h11 with stricter rules.

The only file that subclasses private parts of uvicorn, which is why pyproject.toml bounds its version.
"""

import asyncio
import re
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...errors import NotHTTP
from ...logs import access
from ..error_handlers import response_of

AHEAD_BYTES = 2**16  # a client may send so much after an unanswered request, and its leaving is still noticed
STALLED_S = 60.0     # longest time in which a client may take nothing of its answer
READ_BYTES = 2**14   # largest read of a connection: asyncio's 256 KiB may be 43,000 chunks, 0.2 s of the event loop
HEAD_BYTES = 2**14   # largest head; h11 measures only those that arrive in pieces
TINY_BYTES, MAX_TINY = 64, 500  # if a body has more than MAX_TINY chunks, they must have TINY_BYTES on average


class Reader(h11.Connection):
    """h11, but it refuses requests that mislead proxies or hold up the event loop.

    It also accepts empty lines before a request, and a target with a host.
    """

    _chunks = _bytes = 0  # of the current body
    _head = b""           # of the current answer, not sent yet

    def receive_data(self, data: bytes) -> None:
        if self.their_state is h11.IDLE and not self.trailing_data[0] and data:
            data = data.lstrip(b"\r\n")  # empty lines before a request
            if not data:
                return
        super().receive_data(data)

    def next_event(self) -> Any:
        """As h11's. Also raises RemoteProtocolError for too large a head, two lengths of a body, and tiny chunks."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            return self._checked(event)
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > MAX_TINY and self._bytes < (self._chunks - 1) * TINY_BYTES:  # the last may be incomplete
                raise h11.RemoteProtocolError(f"the body came in {self._chunks} chunks with {self._bytes} bytes in "
                                              f"all; send larger chunks, of at least {TINY_BYTES} bytes on average")
        return event

    def send(self, event: Any) -> Any:
        """As h11's, but the head of an answer of known length is sent with its body: in one system call, not two.

        Such a body follows at once. The head of a stream is sent immediately.
        """
        data = super().send(event)
        if isinstance(event, h11.Response) and any(name == b"content-length" for name, _ in event.headers):
            self._head, data = data or b"", b""
        elif self._head and data is not None:
            self._head, data = b"", self._head + data
        return data

    def _checked(self, request: h11.Request) -> h11.Request:
        size = len(request.target) + sum(len(name) + len(value) for name, value in request.headers)
        if size > HEAD_BYTES:
            raise h11.RemoteProtocolError(f"the head has {size:,} bytes; at most {HEAD_BYTES:,} are allowed")
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
            raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding contradict each other; send one")
        if not (whole := re.fullmatch(rb"(?i:https?)://([^/?#]+)(.*)", request.target)):
            return request
        # a target with a host, which replaces the Host header
        headers = [(b"host", whole[1]), *((name, value) for name, value in request.headers if name != b"host")]
        return h11.Request(method=request.method, http_version=request.http_version, headers=headers,
                           target=whole[2] if whole[2].startswith(b"/") else b"/" + whole[2])


def connection(head_timeout_s: float, headers: Mapping[str, str], stalled_s: float = STALLED_S) -> type[H11Protocol]:
    """uvicorn's protocol, but with time limits, and it notices when clients leave.

    A connection is closed if the head of a request is not complete in time: the first head, one that has begun, or one
    after a body that is not read. It is also closed if its client takes nothing of its answer for stalled_s seconds.
    Clients that leave are noticed even if they have sent more than their request. What is not HTTP is answered with our
    envelope. Reads are small, so that other connections have their turn. headers: of answers to what is not HTTP.
    """

    class Connection(H11Protocol):
        _late: asyncio.TimerHandle | None = None
        _stalled: asyncio.TimerHandle | None = None
        _left = 0  # bytes of an answer that the system had not taken at the last check

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.conn = Reader(h11.SERVER)
            with suppress(AttributeError):  # uvloop's transport has no such limit to set
                transport.max_size = READ_BYTES
            transport.set_write_buffer_limits(high=0)  # so that pause_writing is called for any bytes left over
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            if self.conn.their_state is h11.MUST_CLOSE:  # it has said that nothing follows: an old client's line break
                return
            super().data_received(data)
            self._expect_head()

        def handle_events(self) -> None:
            super().handle_events()
            # uvicorn stops reading when a next request begins, and so would not notice the end of the connection
            if (self.conn.their_state in (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL)  # type: ignore[attr-defined]
                    and len(self.conn.trailing_data[0]) <= AHEAD_BYTES):
                self.flow.resume_reading()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            self.resume_writing()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """Answer a request that h11 could not read; if an answer has already begun, end that one instead."""
            if self.cycle is not None:
                self.cycle.disconnected = True  # its answer can no longer be sent
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                request_id = secrets.token_hex(8)
                answer = response_of(NotHTTP(f"the request cannot be read: {str(sys.exception())[:200]}"))
                sent = [*answer.raw_headers, (b"connection", b"close"), (b"x-request-id", request_id.encode()),
                        *((name.encode(), value.encode()) for name, value in headers.items())]
                for event in (h11.Response(status_code=answer.status_code, headers=sent, reason=b"Bad Request"),
                              h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
                access(method="OTHER", route=None, status=answer.status_code, request_id=request_id,
                       client=self.client[0] if self.client else "unknown")
            self.transport.close()

        def _expect_head(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget()
            elif self._late is None:
                self._late = self.loop.call_later(head_timeout_s, self.timeout_keep_alive_handler)

        def _forget(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._expect_reading()

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

        def _expect_reading(self) -> None:
            self._left = self.transport.get_write_buffer_size()
            self._stalled = self.loop.call_later(stalled_s, self._look_again)

        def _look_again(self) -> None:
            if self.transport.get_write_buffer_size() < self._left:
                self._expect_reading()
            else:
                self.transport.abort()  # close() would wait for the client to read

    return Connection
