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
    """What all bodies share, and of which one client may have a part. For the event loop only."""

    def __init__(self, settings: Settings, metrics: Metrics, drain: BodyDrain,
                 full: Callable[[str], ServiceError | None] = lambda client: None) -> None:
        """full: the error that one more image of a client would get, so that it need not send megabytes first."""
        self.settings, self.metrics, self.drain, self.full = settings, metrics, drain, full
        # by unit: what there is, and what has been taken of it by each client
        self._budgets = {"requests": (settings.max_requests or sys.maxsize, Counter[str]()),
                         "bytes of uploads": (max(settings.upload_space, settings.max_upload), Counter[str]())}

    def take(self, unit: str, client: str, more: int) -> None:
        """Have a client take more; or less, if it is below 0. Raises ServiceError if too little is left."""
        allowed, taken = self._budgets[unit]
        each = max(1 if unit == "requests" else self.settings.max_upload, allowed // CLIENT_SHARE)
        if more > 0 and taken[client] + more > each:
            raise self.metrics.refused(too_many_of_client(each, unit))
        if more > 0 and taken.total() + more > allowed:
            raise self.metrics.refused(too_many_bodies(allowed, unit))
        taken[client] += more
        if not taken[client]:
            del taken[client]


class Body:
    """One request's body, between the server and the application: `receive` and `send` stand in for the server's."""

    def __init__(self, bodies: BodyBudget, scope: Scope, receive: Receive, send: Send) -> None:
        # the first header of each name, as in Starlette's Headers, which search all of them on each access
        headers = self.headers = {name.decode("latin-1"): value.decode("latin-1")
                                  for name, value in reversed(scope["headers"])}
        self._bodies, self._receive, self._send, self._client = bodies, receive, send, ""
        declared = headers.get("content-length", "")
        chunked = "transfer-encoding" in headers
        self._declared = int(declared) if declared.isdecimal() and not chunked else None
        self._whole = not (chunked or self._declared)  # all of it has been received
        self._path = scope["path"] if scope["method"] == "POST" else ""
        self._upload = self._path in UPLOADS
        self._max_bytes = bodies.settings.max_upload if self._upload else min(bodies.settings.max_upload, PLAIN_BYTES)
        self._large = self._upload and not self._whole and (self._declared or math.inf) > PLAIN_BYTES
        self._began, self._timeout_s = 0.0, math.inf  # when the head was read, and seconds until the request's deadline
        self._received = 0
        self._reading, self._space = False, 0         # what it has taken of the budget

    def check(self, client: str, began: float) -> float:
        """Check what the head shows; returns the seconds that it gives the request. Raises ServiceError.

        client: the client to whose limits the body counts · began: when the head was read.
        """
        self._client, self._began, timeout_s, refused = client, began, math.inf, self._bodies.metrics.refused
        if self._path.startswith(IMAGES):
            if (text := self.headers.get(TIMEOUT_HEADER.lower())) is not None:
                try:
                    timeout_s = timeout_of(text)
                except InvalidRequest as error:
                    raise refused(error) from None
            self._timeout_s = min(timeout_s, self._bodies.settings.request_timeout)
        if wrong := _media(self._path, self.headers):
            raise refused(wrong)
        if self._declared is not None and self._declared > self._max_bytes:
            raise refused(body_too_large(self._declared, self._max_bytes))
        if self._large:
            if refusal := self._bodies.full(client):
                raise refused(refusal)
            self.hold(self._declared or 0)
        return timeout_s

    def hold(self, space: int, *, reading: bool = False) -> None:
        """Hold room for so many bytes, in memory or in a file, and for reading them. Raises ServiceError."""
        if reading != self._reading:
            self._bodies.take("requests", self._client, reading - self._reading)
            self._bodies.metrics.bodies_reading.inc(reading - self._reading)
            self._reading = reading
        if space != self._space:
            self._bodies.take("bytes of uploads", self._client, space - self._space)
            self._space = space

    async def receive(self) -> Message:
        """ASGI's receive. Raises ServiceError."""
        if self._whole:
            return await self._receive()
        self.hold(self._space, reading=True)
        metrics, drain, body_s = self._bodies.metrics, self._bodies.drain, self._bodies.settings.body_timeout
        ends = self._began + min(self._timeout_s, body_s)
        try:
            async with asyncio.timeout_at(0.0 if drain.closed else ends) as limit:
                drain.reading.add(limit)
                try:
                    message = await self._receive()
                finally:
                    drain.reading.discard(limit)
        except TimeoutError:
            if drain.closed:
                raise metrics.refused(Draining()) from None
            if self._timeout_s <= body_s:
                metrics.deadlines_passed.labels("reading").inc()
                raise DeadlinePassed(self._timeout_s) from None
            raise metrics.refused(body_timeout(self._received, body_s)) from None
        if message["type"] == "http.disconnect":
            raise ClientLeft(f"the client disconnected after {self._received:,} bytes of its body")
        self._received += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._received > self._max_bytes:
            raise body_too_large(self._received, self._max_bytes)  # counted when it is answered
        # an upload that is there as a whole still waits to be decoded
        self.hold(max(self._space, self._received) if self._large else 0, reading=self._upload or not self._whole)
        return message

    async def send(self, message: Message) -> None:
        """ASGI's send. If the answer begins before the body has ended, the rest of the body is thrown away for up to
        LINGER_S, and the connection is then closed.
        """
        if self._whole or message.get("more_body", False):
            await self._send(message)
        elif message["type"] == "http.response.start":
            self.hold(self._space)
            MutableHeaders(scope=message)["connection"] = "close"
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while (more := await self._receive())["type"] == "http.request" and more.get("more_body"):
                        pass
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


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
