"""Request bodies: their limits of size, time and number, and what is done with a body that is not read."""

import asyncio
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from python_multipart.multipart import parse_options_header
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from ...errors import (
    BodyTimeout,
    BodyTooLarge,
    ClientLeft,
    DeadlinePassed,
    Draining,
    Encoded,
    NotForm,
    NotJson,
    NotUtf8,
    ServiceError,
    TooManyBodies,
    TooManyOfClient,
)
from ...metrics import Metrics
from ...settings import Settings

LIKELIHOODS = "/v1/images/likelihoods"
UPLOADS = ("/v1/images/edits", LIKELIHOODS)  # the routes whose bodies may be large
JSON = ("/v1/images/generations", "/v1/compare")
PLAIN_BYTES = 2**17  # largest body of every other route: while it waits, its JSON may take 30 times as much memory
CLIENT_SHARE = 4     # one client may have one part in so many of what all clients share
QUEUE_SHARE = 8      # and uploads that are still being read hold one place in so many of the queue
STALL_SHARE = 6      # a body of which nothing comes for one part in so many of --body-timeout is given up
KEPT_BYTES = 2**16   # what is left of a refused body is read for the sake of the connection, if it is so little
LINGER_S = 2.0       # how long a client that is refused may go on sending: closed at once, it would lose the answer
UTF8 = ("utf-8", "utf8", "us-ascii")
JSON_MEDIA = re.compile(r"\s*application/([^;\s]+\+)?json\s*(;.*)?", re.IGNORECASE)


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


class UploadDrain:
    """Ends bodies that are still being read when the server drains: nothing would come of them."""

    def __init__(self) -> None:
        self.closed = False
        self.reading: set[asyncio.Timeout] = set()  # when each of them is given up

    def close(self) -> None:
        self.closed = True
        for limit in self.reading:
            if not limit.expired():
                limit.reschedule(0.0)  # long past: now


class BodyBudget:
    """The limits, and what bodies hold while they are being read. Of the event loop only."""

    def __init__(self, settings: Settings, metrics: Metrics, drain: UploadDrain) -> None:
        self.settings, self.metrics, self.drain = settings, metrics, drain
        self.reading = Share(settings.max_requests or sys.maxsize)
        self.space = Share(max(settings.upload_space, settings.max_upload), settings.max_upload, "bytes of uploads")
        self.places = Share(settings.max_queue // QUEUE_SHARE)


class Body:
    """One request's body, between the server and the application: `receive` and `send` stand in for the server's."""

    def __init__(self, bodies: BodyBudget, scope: Scope, receive: Receive, send: Send) -> None:
        # the first of each name, as Starlette's Headers, which look through all of them every time
        headers = self.headers = {name.decode("latin-1"): value.decode("latin-1")
                                  for name, value in reversed(scope["headers"])}
        self._bodies, self._receive, self._send, self._client = bodies, receive, send, ""
        declared = headers.get("content-length", "")
        chunked = "transfer-encoding" in headers
        self.declared = int(declared) if declared.isdecimal() and not chunked else None
        self.whole = not (chunked or self.declared)  # all of it has been received
        self._path = scope["path"] if scope["method"] == "POST" else ""
        self._upload = self._path in UPLOADS
        self._most = bodies.settings.max_upload if self._upload else min(bodies.settings.max_upload, PLAIN_BYTES)
        # a small body arrives in a moment, and needs no place in the queue until then
        self.large = self._upload and not self.whole and (self.declared is None or self.declared > PLAIN_BYTES)
        self._received = 0
        self._loop = asyncio.get_running_loop()
        self._ends, self._deadline = math.inf, math.inf  # by --body-timeout, and of its request,
        self._timeout_s = math.inf                       # which has so long
        self._reading = self._place = False              # what it has of the shares of BodyBudget
        self._space = 0
        self._closing = False

    def check(self, client: str) -> None:
        """Raise what is wrong by its head alone: UnsupportedMedia, BodyTooLarge, or no room for an upload.

        client: whose it is, as far as limits are concerned.
        """
        self._client = client
        if wrong := _media(self._path, self.headers):
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

    def until(self, deadline: float, timeout_s: float) -> None:
        """Reading it raises DeadlinePassed at this time of the loop's clock, if there is more to come then."""
        self._deadline, self._timeout_s = deadline, timeout_s

    def end(self) -> None:
        """Nothing more of it is read."""
        if self._reading:
            self._bodies.reading.give_back(self._client)
            self._bodies.metrics.bodies_reading.dec()
        if self._place:
            self._bodies.places.give_back(self._client)
        self._reading = self._place = False

    def keep(self, size: int) -> None:
        """It is no longer kept, but so many bytes that were made of it. Raises ServiceError if there is no room."""
        self.end()
        if size < self._space:
            self._bodies.space.give_back(self._client, self._space - size)
            self._space = size
        self._take_space(size)

    def let_go(self) -> None:
        """Nothing of it is kept any more, in memory or in a file."""
        self.end()
        if self._space:
            self._bodies.space.give_back(self._client, self._space)
            self._space = 0

    async def receive(self) -> Message:
        """As ASGI's. Raises ClientLeft, BodyTimeout, BodyTooLarge, TooManyBodies, DeadlinePassed or Draining."""
        if self.whole:
            return await self._receive()
        if not self._reading:
            if refusal := self._bodies.reading.take(self._client):
                raise self._refused(refusal, refusal.code)
            self._reading = True
            self._bodies.metrics.bodies_reading.inc()
            self._ends = self._loop.time() + self._bodies.settings.body_timeout
        stalls, drain = self._loop.time() + self._bodies.settings.body_timeout / STALL_SHARE, self._bodies.drain
        try:
            async with asyncio.timeout_at(0.0 if drain.closed else min(stalls, self._ends, self._deadline)) as limit:
                drain.reading.add(limit)
                try:
                    message = await self._receive()
                finally:
                    drain.reading.discard(limit)
        except TimeoutError:
            self.end()
            if drain.closed:
                raise self._refused(Draining(), "draining") from None
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
        if self._deadline <= min(stalls, self._ends):
            self._bodies.metrics.deadlines_passed.labels("reading").inc()
            return DeadlinePassed(self._timeout_s)
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


def _media(path: str, headers: Mapping[str, str]) -> ServiceError | None:
    """What is wrong with the form of a body, as far as its head tells.

    A form has its fields decoded on the event loop, by the charset that it names, and some of Python's take a time
    that grows with the square of the length.
    """
    if path not in (*UPLOADS, *JSON):
        return None
    coding, kind = headers.get("content-encoding", "identity"), headers.get("content-type", "none")
    if coding.lower() != "identity":
        return Encoded(coding)
    if path in UPLOADS:
        media, options = parse_options_header(kind)
        charset = options.get(b"charset", b"utf-8").decode("latin-1")
        if media != b"multipart/form-data":
            return NotForm(kind)
        return None if charset.lower() in UTF8 else NotUtf8(charset)
    return None if JSON_MEDIA.fullmatch(kind) else NotJson(kind)


def body_of(scope: Scope) -> Body:
    body = scope["linpix.body"]
    assert isinstance(body, Body)
    return body
