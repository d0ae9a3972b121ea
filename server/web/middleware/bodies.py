"""Request bodies: limits of their size, time and number, and what happens to a body that is not
read; and headers that every answer has.
"""

import asyncio
import math
import re
import sys
import time
from collections import Counter
from contextlib import suppress

from python_multipart.multipart import parse_options_header
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from ... import errors
from ...engine.request import Requests
from ...errors import ClientLeft, ServiceError, shown
from ...settings import Settings
from ..request_schemas import TIMEOUT_HEADER, timeout_of

IMAGES = "/v1/images/"
EDITS = "/v1/images/edits"  # which takes JSON too
UPLOADS = (
    EDITS,
    "/v1/images/likelihoods",
    "/v1/images/inside",
)  # the routes whose bodies may be large
JSON = ("/v1/images/generations", "/v1/compare")
# largest body of every other route: while it waits, its JSON may take 30 times as much memory
PLAIN_BYTES = 2**17
CLIENT_SHARE = 4  # one client may have 1/CLIENT_SHARE of what all clients share
# longest that a refused client may go on sending: if closed at once, it would lose the answer
LINGER_S = 2.0
REQUESTS, BYTES = "requests", "bytes of uploads and answers"  # what is shared, as errors name it
PIECE_BYTES = 2**16  # of an answer, given to the connection at once
UTF8 = ("utf-8", "utf8", "us-ascii")
JSON_MEDIA = re.compile(r"\s*application/([^/;\s]+\+)?json\s*(;.*)?", re.IGNORECASE)


class Bodies:
    """Limits that all bodies share; one client may use a part of each. For the event loop only."""

    def __init__(self, settings: Settings, requests: Requests) -> None:
        self.settings, self.reading_now = settings, requests.metrics.bodies_reading
        self.check_room = requests.drawer.check_room
        self.closed = False  # the server drains
        self.reading: set[asyncio.Timeout] = set()  # the time limit of each body being read
        # by unit: what there is, what one client may have, and what each client has taken
        requests_max = settings.max_requests or sys.maxsize
        space = max(settings.upload_space, settings.max_upload)
        self.budgets = {
            REQUESTS: (requests_max, max(1, requests_max // CLIENT_SHARE), Counter[str]()),
            BYTES: (space, max(settings.max_upload, space // CLIENT_SHARE), Counter[str]()),
        }

    def close(self) -> None:
        """When the server drains: end bodies that are still being read, since their requests would
        be refused.
        """
        self.closed = True
        for limit in self.reading:
            if not limit.expired():
                limit.reschedule(0.0)  # long past: now


class Exchange:
    """One request's body and its answer: `receive` and `send` stand in for the server's."""

    def __init__(self, bodies: Bodies, scope: Scope, receive: Receive, send: Send) -> None:
        # the first header of each name, as in Starlette's Headers, which search all of them on each
        # access
        headers = self.headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
        self.began = time.monotonic()  # when the head was read
        self.added: list[tuple[bytes, bytes]] = []  # headers of the answer, unless it has them
        self.status = 0  # of the answer; 0: it has not begun
        self._bodies, self._receive, self._send, self._client = bodies, receive, send, ""
        declared = headers.get("content-length", "")
        chunked = "transfer-encoding" in headers
        self._declared = int(declared) if declared.isdecimal() and not chunked else None
        self._whole = not (chunked or self._declared)  # all of the body has been received
        self._path = scope["path"] if scope["method"] == "POST" else ""
        self._upload = self._path in UPLOADS
        self._max_bytes = bodies.settings.max_upload
        if not self._upload:
            self._max_bytes = min(self._max_bytes, PLAIN_BYTES)
        self._large = (
            self._upload and not self._whole and (self._declared or math.inf) > PLAIN_BYTES
        )
        self._timeout_s, self._received = math.inf, 0  # seconds until the request's deadline; bytes
        self._held = {REQUESTS: 0, BYTES: 0}  # what it has taken of the budgets

    def check(self, client: str) -> float:
        """Check what the head shows; returns the seconds that it gives the request. Raises
        ServiceError.

        client: the client to whose limits the body counts.
        """
        self._client, timeout_s = client, math.inf
        if self._path.startswith(IMAGES):
            if (text := self.headers.get(TIMEOUT_HEADER.lower())) is not None:
                timeout_s = timeout_of(text)
            self._timeout_s = min(timeout_s, self._bodies.settings.request_timeout)
        coding = self.headers.get("content-encoding", "identity")
        kind = self.headers.get("content-type", "none")
        if coding.lower() != "identity" and (self._upload or self._path in JSON):
            raise ServiceError(
                "the body must be sent uncompressed, without a Content-Encoding, got"
                f" {shown(coding)}",
                415,
            )
        if self._upload:
            media, options = parse_options_header(kind)
            charset = options.get(b"charset", b"utf-8").decode("latin-1")
            json = self._path == EDITS and JSON_MEDIA.fullmatch(kind)
            if media != b"multipart/form-data" and not json:
                raise ServiceError(
                    "the body must be a form: send the header 'Content-Type: multipart/form-data; "
                    f"boundary=...', got {shown(kind)}",
                    415,
                )
            # fields are decoded on the event loop: some codecs take quadratic time
            if charset.lower() not in UTF8:
                raise ServiceError(
                    "a form must be in UTF-8: send a Content-Type without charset, got "
                    f"{shown(charset)}",
                    415,
                )
        elif self._path in JSON and not JSON_MEDIA.fullmatch(kind):
            raise errors.not_json(kind)
        if self._declared is not None and self._declared > self._max_bytes:
            raise errors.body_too_large(self._declared, self._max_bytes)
        if self._large:  # no megabytes are received for a request that would get 429
            self._bodies.check_room(client)
            self.hold(self._declared or 0)
        return timeout_s

    def hold(self, space: int, *, reading: bool = False) -> None:
        """Hold room for so many bytes, in memory or in a file, and for reading them. Raises
        ServiceError if the client, or all clients, would have too much.

        A small answer is not refused because of what others have: it needs next to nothing.
        """
        client = self._client
        for unit, amount in ((REQUESTS, int(reading)), (BYTES, space)):
            if more := amount - self._held[unit]:
                allowed, each, taken = self._bodies.budgets[unit]
                if more > 0 and taken[client] + more > each:
                    raise errors.too_many_of_client(each, unit)
                small = unit == BYTES and self._whole and amount <= PLAIN_BYTES
                if more > 0 and not small and taken.total() + more > allowed:
                    raise errors.too_many_bodies(allowed, unit)
                taken[client] += more
                if not taken[client]:
                    del taken[client]
                self._held[unit] = amount
                if unit == REQUESTS:
                    self._bodies.reading_now.inc(more)

    async def receive(self) -> Message:
        """ASGI's receive. Raises ServiceError."""
        if self._whole:
            return await self._receive()
        self.hold(self._held[BYTES], reading=True)
        bodies, body_s = self._bodies, self._bodies.settings.body_timeout
        ends = self.began + min(self._timeout_s, body_s)
        try:
            async with asyncio.timeout_at(0.0 if bodies.closed else ends) as limit:
                bodies.reading.add(limit)
                try:
                    message = await self._receive()
                finally:
                    bodies.reading.discard(limit)
        except TimeoutError:
            if bodies.closed:
                raise errors.draining() from None
            if self._timeout_s <= body_s:
                raise errors.deadline_passed(self._timeout_s) from None
            raise errors.body_timeout(self._received, body_s) from None
        if message["type"] == "http.disconnect":
            raise ClientLeft(f"the client disconnected after {self._received:,} bytes of its body")
        self._received += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._received > self._max_bytes:
            raise errors.body_too_large(self._received, self._max_bytes)
        # an upload that is there as a whole still waits to be decoded
        self.hold(
            max(self._held[BYTES], self._received) if self._large else 0,
            reading=self._upload or not self._whole,
        )
        return message

    async def send(self, message: Message) -> None:
        """ASGI's send. The end of an answer is sent once all before it is written, so that until
        then it counts to its client. If the answer begins before the body has ended, the rest of
        the body is thrown away for up to LINGER_S, and the connection is then closed.
        """
        if message["type"] == "http.response.start":
            self.status = message["status"]
            given = {name for name, _ in message["headers"]}
            message["headers"] = [
                *message["headers"],
                *(header for header in self.added if header[0] not in given),
            ]
            # closed: a process that ends gets no further request
            if self._bodies.closed or not self._whole:
                MutableHeaders(scope=message)["connection"] = "close"
            if not self._whole:
                self.hold(self._held[BYTES])
        else:
            body = message.get("body", b"")
            for start in range(0, len(body), PIECE_BYTES):
                piece = body[start : start + PIECE_BYTES]
                await self._send({**message, "body": piece, "more_body": True})
            if message.get("more_body", False):
                return
            if not self._whole:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        while (more := await self._receive())[
                            "type"
                        ] == "http.request" and more.get("more_body"):
                            pass
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)
