"""Requests as they arrive: heads in time; bodies not too large, slow or many; and what becomes of one nobody reads."""

import asyncio
import math
import re
import secrets
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import h11
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.envelope import response_of
from server.errors import (
    BodyTimeout,
    BodyTooLarge,
    ClientLeft,
    Encoded,
    NotForm,
    NotHTTP,
    NotJson,
    NotUtf8,
    ServiceError,
    TooManyBodies,
    TooManyOfClient,
)
from server.logs import access
from server.metrics import Metrics
from server.settings import Settings

UPLOADS = "/v1/images/edits"  # the one route whose bodies may be large
JSON = ("/v1/images/generations", "/v1/compare")
PLAIN_BYTES = 2**17  # largest body of every other route: while it waits, its JSON may take 30 times as much memory
CLIENT_SHARE = 4     # one client may have one part in so many of what all clients share
QUEUE_SHARE = 8      # and uploads that are still being read hold one place in so many of the queue
STALL_SHARE = 6      # a body of which nothing comes for one part in so many of --body-timeout is given up
KEPT_BYTES = 2**16   # what is left of a refused body is read for the sake of the connection, if it is so little
AHEAD_BYTES = 2**16  # that a client may send beyond a request that is not answered yet, and be seen when it leaves
STALLED_S = 60.0     # how long a client may take nothing of an answer that waits for it
LINGER_S = 2.0       # how long a client that is refused may go on sending: closed at once, it would lose the answer
READ_BYTES = 2**14   # read from a connection at once: asyncio's 256 KiB may be 43,000 chunks, 0.2 s of the event loop
HEAD_BYTES = 2**14   # largest head; h11 measures only those that arrive in pieces
UTF8 = ("utf-8", "utf8", "us-ascii")
JSON_MEDIA = re.compile(r"\s*application/([^;\s]+\+)?json\s*(;.*)?", re.IGNORECASE)
TINY_BYTES, MOST_TINY = 64, 500  # a body may have more chunks than this if they have so many bytes in the mean


def client_of(scope: Scope) -> str:
    """Whose request it is, as far as limits are concerned: whoever the guard knows by a key, else an address."""
    known = scope.get("state", {}).get("client")
    return str(known or (scope.get("client") or ("unknown",))[0])


class Share:
    """An amount that all clients share, and of which each may take a part. Of the event loop only."""

    def __init__(self, allowed: int, least: int = 1, unit: str = "requests") -> None:
        """allowed: to all clients together; one of them may take a quarter of it, or `least` if that is more."""
        self._allowed, self._each, self._unit = allowed, max(least, allowed // CLIENT_SHARE), unit
        self._taken: Counter[str] = Counter()

    def take(self, client: str, amount: int = 1) -> ServiceError | None:
        """Take some for a client, or say why it cannot be had."""
        if self._taken[client] + amount > self._each:
            return TooManyOfClient(self._each, self._unit)
        if self._taken.total() + amount > self._allowed:
            return TooManyBodies(self._allowed, self._unit)
        self._taken[client] += amount
        return None

    def give_back(self, client: str, amount: int = 1) -> None:
        self._taken[client] -= amount
        if not self._taken[client]:
            del self._taken[client]


class Bodies:
    """The limits, and what bodies hold while they are being read. Of the event loop only."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.reading = Share(settings.max_requests or sys.maxsize)
        self.space = Share(max(settings.upload_space, settings.max_upload), settings.max_upload, "bytes of uploads")
        self.places = Share(settings.max_queue // QUEUE_SHARE)


class Body:
    """One request's body, between the server and the application: `receive` and `send` stand in for the server's."""

    def __init__(self, bodies: Bodies, scope: Scope, receive: Receive, send: Send) -> None:
        headers = self._headers = Headers(scope=scope)
        self._bodies, self._scope, self._receive, self._send = bodies, scope, receive, send
        declared = headers.get("content-length", "")
        chunked = "transfer-encoding" in headers
        self.declared = int(declared) if declared.isdecimal() and not chunked else None
        self.whole = not (chunked or self.declared)  # all of it has been received
        self._path = scope["path"] if scope["method"] == "POST" else ""
        self._upload = self._path == UPLOADS
        self._most = bodies.settings.max_upload if self._upload else min(bodies.settings.max_upload, PLAIN_BYTES)
        # a small body arrives in a moment, and needs no place in the queue until then
        self.large = self._upload and not self.whole and (self.declared is None or self.declared > PLAIN_BYTES)
        self._received = 0
        self._loop = asyncio.get_running_loop()
        self._ends, self._deadline = math.inf, math.inf  # by --body-timeout, and of its request
        self._passed: ServiceError | None = None         # what is said when the deadline has passed
        self._reading = self._place = False              # what it has of the shares of Bodies
        self._space = 0
        self._closing = False

    @cached_property
    def _client(self) -> str:
        return client_of(self._scope)

    def check(self) -> None:
        """Raise what is wrong by its head alone: UnsupportedMedia, BodyTooLarge, or no room for an upload."""
        if wrong := _media(self._path, self._headers):
            raise self._refused(wrong, "invalid")
        if self.declared is not None and self.declared > self._most:
            raise self._refused(BodyTooLarge(self.declared, self._most), "too_large")
        if self.large:
            self._take_space(self.declared or 0)

    def _take_space(self, size: int) -> None:
        """Have room for so many bytes of an upload, in memory or in a file. Raises ServiceError."""
        if size > self._space:
            if refusal := self._bodies.space.take(self._client, size - self._space):
                self.end()
                raise self._refused(refusal, refusal.code)
            self._space = size

    def take_place(self) -> bool:
        """Whether the queue may keep a place for it while it is being read: for a few uploads only."""
        self._place = self._bodies.places.take(self._client) is None
        return self._place

    def until(self, deadline: float, passed: ServiceError) -> None:
        """Whoever reads it gets this error at this time of the loop's clock, if there is more to come then."""
        self._deadline, self._passed = deadline, passed

    def end(self) -> None:
        """Nothing more of it is read."""
        if self._reading:
            self._bodies.reading.give_back(self._client)
            self._bodies.metrics.bodies_reading.dec()
        if self._place:
            self._bodies.places.give_back(self._client)
        self._reading = self._place = False

    def let_go(self) -> None:
        """Nothing of it is kept any more, in memory or in a file."""
        self.end()
        self._bodies.space.give_back(self._client, self._space)
        self._space = 0

    async def receive(self) -> Message:
        """As ASGI's. Raises ClientLeft, BodyTimeout, BodyTooLarge, TooManyBodies, or what `until` was given."""
        if self.whole:
            return await self._receive()
        if not self._reading:
            if refusal := self._bodies.reading.take(self._client):
                raise self._refused(refusal, refusal.code)
            self._reading = True
            self._bodies.metrics.bodies_reading.inc()
            self._ends = self._loop.time() + self._bodies.settings.body_timeout
        stalls = self._loop.time() + self._bodies.settings.body_timeout / STALL_SHARE
        try:
            async with asyncio.timeout_at(min(stalls, self._ends, self._deadline)):
                message = await self._receive()
        except TimeoutError:
            self.end()
            self._closing = True
            raise self._late(stalls) from None
        if message["type"] == "http.disconnect":
            self.end()
            raise ClientLeft(f"the client left after {self._received:,} bytes of its body")
        self._received += len(message.get("body", b""))
        if not message.get("more_body", False):
            self.whole = True
            self.end()
        if self._received > self._most:
            self.end()
            raise BodyTooLarge(self._received, self._most)  # counted with its answer
        if self.large:
            self._take_space(self._received)
        return message

    def _late(self, stalls: float) -> ServiceError:
        """What is said of the limit that was passed first. stalls: when the next bytes should have come."""
        if self._passed is not None and self._deadline <= min(stalls, self._ends):
            self._bodies.metrics.deadlines_passed.labels("reading").inc()
            return self._passed
        timeout_s, stalled = self._bodies.settings.body_timeout, stalls < self._ends
        return self._refused(BodyTimeout(self._received, timeout_s / STALL_SHARE if stalled else timeout_s,
                                         stalled=stalled), "body_timeout")

    async def send(self, message: Message) -> None:
        """As ASGI's. An answer that comes before the end of the body ends the connection, once the client has it."""
        if self.whole:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self.end()
            left = math.inf if self.declared is None else self.declared - self._received
            # chunks cost more than they weigh, and a client without a key is owed nothing
            self._closing |= self.declared is None and message["status"] == 401
            if self._closing or left > KEPT_BYTES:
                MutableHeaders(scope=message)["connection"] = "close"
            await self._send(message)
        elif message.get("more_body", False):
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            if not self._closing:
                await self._drain()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drain(self) -> None:
        """Throw away what the client still sends, for a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (message := await self._receive())["type"] == "http.request" and message.get("more_body"):
                    pass

    def _refused(self, error: ServiceError, reason: str) -> ServiceError:
        self._bodies.metrics.requests_rejected.labels(reason).inc()
        return error


def _media(path: str, headers: Headers) -> ServiceError | None:
    """What is wrong with the form of a body, as far as its head tells.

    A form has its fields decoded on the event loop, by the charset that it names, and some of Python's take a time
    that grows with the square of the length.
    """
    if path not in (UPLOADS, *JSON):
        return None
    coding, kind = headers.get("content-encoding", "identity"), headers.get("content-type", "none")
    if coding.lower() != "identity":
        return Encoded(coding)
    if path == UPLOADS:
        media, options = parse_options_header(kind)
        charset = options.get(b"charset", b"utf-8").decode("latin-1")
        if media != b"multipart/form-data":
            return NotForm(kind)
        return None if charset.lower() in UTF8 else NotUtf8(charset)
    return None if JSON_MEDIA.fullmatch(kind) else NotJson(kind)


class Arrival:
    """ASGI middleware: every request's body, for whoever comes after it."""

    def __init__(self, app: ASGIApp, bodies: Bodies) -> None:
        self.app, self._bodies = app, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = scope["linpix.body"] = Body(self._bodies, scope, receive, send)
        try:
            await self.app(scope, body.receive, body.send)
        finally:
            body.let_go()


def body_of(scope: Scope) -> Body:
    body = scope["linpix.body"]
    assert isinstance(body, Body)
    return body


class Reader(h11.Connection):
    """h11, but it refuses what misleads proxies or holds up the event loop, and takes two more forms of requests."""

    _chunks = _bytes = 0  # of the body under way

    def receive_data(self, data: bytes) -> None:
        if self.their_state is h11.IDLE and not self.trailing_data[0] and data:
            data = data.lstrip(b"\r\n")  # empty lines before a request
            if not data:
                return
        super().receive_data(data)

    def next_event(self) -> Any:
        """As h11's. Raises RemoteProtocolError also for a large head, two lengths of a body, and tiny chunks."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            return self._checked(event)
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > MOST_TINY and self._bytes < (self._chunks - 1) * TINY_BYTES:  # the last may not be whole
                raise h11.RemoteProtocolError(f"{self._chunks} chunks of {self._bytes} bytes together; send larger "
                                              f"ones, of at least {TINY_BYTES} bytes in the mean")
        return event

    def _checked(self, request: h11.Request) -> h11.Request:
        size = len(request.target) + sum(len(name) + len(value) for name, value in request.headers)
        if size > HEAD_BYTES:
            raise h11.RemoteProtocolError(f"the head has {size:,} bytes; at most {HEAD_BYTES:,} are allowed")
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
            raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding contradict each other; send one")
        if not (whole := re.fullmatch(rb"(?i:https?)://([^/?#]+)(.*)", request.target)):
            return request
        # a target with a host, which then counts and not the header
        headers = [(b"host", whole[1]), *((name, value) for name, value in request.headers if name != b"host")]
        return h11.Request(method=request.method, http_version=request.http_version, headers=headers,
                           target=whole[2] if whole[2].startswith(b"/") else b"/" + whole[2])


def connection(head_timeout_s: float, headers: Mapping[str, str], stalled_s: float = STALLED_S) -> type[H11Protocol]:
    """uvicorn's protocol, but for clients that it would wait for without end, or not see leave.

    A connection is closed on which no head of a request is complete in time, be it the first one, one that has begun,
    or one behind a body that nobody wants; and one whose client takes nothing of its answer for stalled_s seconds.
    Clients that leave are noticed where they have sent something more, and what is no HTTP is answered with our
    envelope. Little is read at once, so that others have their turn. headers: of that answer.
    """

    class Connection(H11Protocol):
        _late: asyncio.TimerHandle | None = None
        _stalled: asyncio.TimerHandle | None = None
        _left = 0  # bytes of an answer that the system had not taken when they were looked at last

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.conn = Reader(h11.SERVER)
            with suppress(AttributeError):  # uvloop's transport has no such limit to set
                transport.max_size = READ_BYTES
            transport.set_write_buffer_limits(high=0)  # so that pause_writing is called for whatever is left over
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            if self.conn.their_state is h11.MUST_CLOSE:  # by its own words nothing follows: a line break of old clients
                return
            super().data_received(data)
            self._expect_head()

        def handle_events(self) -> None:
            super().handle_events()
            # uvicorn reads no further than into a next request, and so would not see the end of the connection
            if (self.conn.their_state in (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL)  # type: ignore[attr-defined]
                    and len(self.conn.trailing_data[0]) <= AHEAD_BYTES):
                self.flow.resume_reading()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            self.resume_writing()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """Answer what h11 could not read, unless an answer is under way, which ends here."""
            if self.cycle is not None:
                self.cycle.disconnected = True  # whatever works for it has nobody to tell any more
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
                self.transport.abort()  # closing would wait for the client to read

    return Connection
