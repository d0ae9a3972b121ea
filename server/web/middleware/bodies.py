"""Request bodies: limits of their size, time and number, and what happens to a body that is not read."""

import asyncio
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

from python_multipart.multipart import parse_options_header
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from ...errors import (
    ClientLeft,
    DeadlinePassed,
    Draining,
    InvalidRequest,
    ServiceError,
    body_timeout,
    body_too_large,
    not_json,
    shown,
    too_many_bodies,
    too_many_of_client,
)
from ...metrics import Metrics
from ...settings import Settings
from ..request_schemas import TIMEOUT_HEADER, timeout_of

IMAGES = "/v1/images/"
UPLOADS = ("/v1/images/edits", "/v1/images/likelihoods")  # the routes whose bodies may be large
JSON = ("/v1/images/generations", "/v1/compare")
PLAIN_BYTES = 2**17  # largest body of every other route: while it waits, its JSON may take 30 times as much memory
CLIENT_SHARE = 4     # one client may have 1/CLIENT_SHARE of what all clients share
LINGER_S = 2.0       # longest that a refused client may go on sending: if closed at once, it would lose the answer
UTF8 = ("utf-8", "utf8", "us-ascii")
JSON_MEDIA = re.compile(r"\s*application/([^;\s]+\+)?json\s*(;.*)?", re.IGNORECASE)


class Share:
    """An amount that all clients share, and of which each may take a part. For the event loop only."""

    def __init__(self, allowed: int, least: int = 1, unit: str = "requests") -> None:
        """allowed: for all clients together; one of them may take a quarter of it, or `least` if that is more."""
        self._allowed, self._each, self._unit = allowed, max(least, allowed // CLIENT_SHARE), unit
        self._taken: Counter[str] = Counter()

    def hold(self, client: str, before: int, after: int) -> ServiceError | None:
        """Have a client hold an amount instead of what it held before. Returns the error if too little is left."""
        if (more := after - before) > 0:
            if self._taken[client] + more > self._each:
                return too_many_of_client(self._each, self._unit)
            if self._taken.total() + more > self._allowed:
                return too_many_bodies(self._allowed, self._unit)
        self._taken[client] += more
        if not self._taken[client]:
            del self._taken[client]
        return None


class BodyDrain:
    """Ends bodies that are still being read when the server drains: their requests would be refused anyway."""

    def __init__(self) -> None:
        self.closed = False
        self.reading: set[asyncio.Timeout] = set()  # the time limit of each body being read

    def close(self) -> None:
        self.closed = True
        for limit in self.reading:
            if not limit.expired():
                limit.reschedule(0.0)  # long past: now


class BodyBudget:
    """The limits, and what bodies hold while they are read. For the event loop only."""

    def __init__(self, settings: Settings, metrics: Metrics, drain: BodyDrain,
                 full: Callable[[str], ServiceError | None] = lambda client: None) -> None:
        """full: the error that one more image of a client would get, so that it need not send megabytes first."""
        self.settings, self.metrics, self.drain, self.full = settings, metrics, drain, full
        self.reading = Share(settings.max_requests or sys.maxsize)
        self.space = Share(max(settings.upload_space, settings.max_upload), settings.max_upload, "bytes of uploads")


class Body:
    """One request's body, between the server and the application: `receive` and `send` stand in for the server's."""

    def __init__(self, bodies: BodyBudget, scope: Scope, receive: Receive, send: Send) -> None:
        # the first header of each name, as in Starlette's Headers, which search all of them on each access
        headers = self.headers = {name.decode("latin-1"): value.decode("latin-1")
                                  for name, value in reversed(scope["headers"])}
        self._bodies, self._receive, self._send, self._client = bodies, receive, send, ""
        declared = headers.get("content-length", "")
        chunked = "transfer-encoding" in headers
        self.declared = int(declared) if declared.isdecimal() and not chunked else None
        self.whole = not (chunked or self.declared)  # all of it has been received
        self._path = scope["path"] if scope["method"] == "POST" else ""
        self._upload = self._path in UPLOADS
        self._max_bytes = bodies.settings.max_upload if self._upload else min(bodies.settings.max_upload, PLAIN_BYTES)
        self.large = self._upload and not self.whole and (self.declared is None or self.declared > PLAIN_BYTES)
        self._received = 0
        self._loop = asyncio.get_running_loop()
        self._ends = math.inf                            # when --body-timeout is over
        self.deadline = self.timeout_s = math.inf        # of its request; timeout_s: in seconds after its head
        self._reading, self._space = False, 0            # what it holds of BodyBudget's shares
        self._late = False

    def check(self, client: str, began: float) -> float:
        """Check what the head shows; returns the seconds that it gives the request. Raises ServiceError.

        client: the client to whose limits the body counts · began: when the head was read.
        """
        self._client, timeout_s = client, math.inf
        if self._path.startswith(IMAGES):
            try:
                if (text := self.headers.get(TIMEOUT_HEADER.lower())) is not None:
                    timeout_s = timeout_of(text)
            except InvalidRequest as error:
                raise self._refused(error, "invalid") from None
            self.timeout_s = min(timeout_s, self._bodies.settings.request_timeout)
            self.deadline = began + self.timeout_s  # reading ends then, too
        if wrong := _media(self._path, self.headers):
            raise self._refused(wrong, "invalid")
        if self.declared is not None and self.declared > self._max_bytes:
            raise self._refused(body_too_large(self.declared, self._max_bytes), "too_large")
        if self.large:
            if refusal := self._bodies.full(client):
                raise self._refused(refusal, refusal.code)
            self.hold(self.declared or 0)
        return timeout_s

    def hold(self, space: int, *, reading: bool = False) -> None:
        """Hold room for so many bytes, in memory or in a file, and for reading them. Raises ServiceError."""
        shares = self._bodies
        for share, before, after in ((shares.reading, self._reading, reading), (shares.space, self._space, space)):
            if before != after and (refusal := share.hold(self._client, before, after)):
                raise self._refused(refusal, refusal.code)
            if share is shares.reading:
                shares.metrics.bodies_reading.inc(reading - self._reading)
                self._reading = reading
        self._space = space

    async def receive(self) -> Message:
        """ASGI's receive. Raises ServiceError."""
        if self.whole:
            return await self._receive()
        if not self._reading:
            self.hold(self._space, reading=True)
            self._ends = self._loop.time() + self._bodies.settings.body_timeout
        drain = self._bodies.drain
        try:
            async with asyncio.timeout_at(0.0 if drain.closed else min(self._ends, self.deadline)) as limit:
                drain.reading.add(limit)
                try:
                    message = await self._receive()
                finally:
                    drain.reading.discard(limit)
        except TimeoutError:
            if drain.closed:
                raise self._refused(Draining(), "draining") from None
            self._late = True
            if self.deadline <= self._ends:
                self._bodies.metrics.deadlines_passed.labels("reading").inc()
                raise DeadlinePassed(self.timeout_s) from None
            late = body_timeout(self._received, self._bodies.settings.body_timeout)
            raise self._refused(late, "body_timeout") from None
        if message["type"] == "http.disconnect":
            raise ClientLeft(f"the client disconnected after {self._received:,} bytes of its body")
        self._received += len(message.get("body", b""))
        self.whole = not message.get("more_body", False)
        if self._received > self._max_bytes:
            raise body_too_large(self._received, self._max_bytes)  # counted when it is answered
        # an upload that is there as a whole still waits to be decoded
        self.hold(max(self._space, self._received) if self.large else 0, reading=self._upload or not self.whole)
        return message

    async def send(self, message: Message) -> None:
        """ASGI's send. If the body has not ended when the answer begins, its rest is thrown away for up to LINGER_S. If
        much of it is left, the connection is then closed; if the body was late, at once.
        """
        if self.whole or (message["type"] == "http.response.body" and message.get("more_body", False)):
            await self._send(message)
        elif message["type"] == "http.response.start":
            self.hold(self._space)
            # reading chunks costs more than their size suggests: not for a client without a key
            self._late |= self.declared is None and message["status"] == 401
            if self._late or (self.declared or math.inf) - self._received > PLAIN_BYTES:
                MutableHeaders(scope=message)["connection"] = "close"
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(0 if self._late else LINGER_S):
                    while (more := await self._receive())["type"] == "http.request" and more.get("more_body"):
                        pass
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _refused(self, error: ServiceError, reason: str) -> ServiceError:
        self._bodies.metrics.requests_rejected.labels(reason).inc()
        return error


def _media(path: str, headers: Mapping[str, str]) -> ServiceError | None:
    """The error for a body whose headers name a format that is not accepted; None if they are right.

    A form's fields are decoded on the event loop, with the charset that the form names. So only UTF-8 is accepted: some
    of Python's codecs take a time that grows with the square of the length.
    """
    if path not in (*UPLOADS, *JSON):
        return None
    coding, kind = headers.get("content-encoding", "identity"), headers.get("content-type", "none")
    if coding.lower() != "identity":
        return ServiceError(f"the body must be sent uncompressed, without a Content-Encoding, got {shown(coding)}", 415)
    if path in UPLOADS:
        media, options = parse_options_header(kind)
        charset = options.get(b"charset", b"utf-8").decode("latin-1")
        if media != b"multipart/form-data":
            return ServiceError("the body must be a form: send the header 'Content-Type: multipart/form-data; "
                                f"boundary=...', got {shown(kind)}", 415)
        return None if charset.lower() in UTF8 else ServiceError(
            f"a form must be in UTF-8: send a Content-Type without charset, got {shown(charset)}", 415)
    return None if JSON_MEDIA.fullmatch(kind) else not_json(kind)
