"""A light client of the images routes over asyncio streams; it uses little of the processor that
the service needs.
"""

import asyncio
import contextlib
import json
import math
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

BOUNDARY = "boundary-of-a-form"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
# the service closes a connection that has been idle for --head-timeout: by then another is opened
IDLE_S = 3.0
LOST_S = 400.0  # until an answer is given up: more than a stretch of load has for all its answers
# between two bytes of a slow writer: the service gives up a body of which nothing comes for 10 s
SLOW_S = 3.0
# All clients here have one address, so they are one client to a service that limits each.
EVERYBODY = ("--client-images", "0", "--max-requests", "0")


def form(parts: dict[str, bytes]) -> bytes:
    """The body of a form, in which image and mask are files."""
    body = b""
    for name, content in parts.items():
        facts = f'name="{name}"'
        if name in ("image", "mask"):
            facts += f'; filename="{name}.png"\r\ncontent-type: image/png'
        head = f"--{BOUNDARY}\r\ncontent-disposition: form-data; {facts}\r\n\r\n"
        body += head.encode() + content + b"\r\n"
    return body + f"--{BOUNDARY}--\r\n".encode()


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """What is sent to be completed."""

    image: bytes
    mask: bytes | None = None
    keep_rows: int | None = None

    def parts(self, fields: dict[str, object]) -> dict[str, bytes]:
        """The parts of the form that sends it with these fields."""
        parts = {name: str(value).lower().encode() for name, value in fields.items()}
        if self.keep_rows is not None:
            parts["keep_rows"] = str(self.keep_rows).encode()
        parts["image"] = self.image
        if self.mask is not None:
            parts["mask"] = self.mask
        return parts


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, which says all about the images that answer it."""

    seed: int
    n: int = 1
    size: str = "native"
    stream: bool = False
    temperature: float = 1.0
    timeout: float | None = None  # seconds, which the head of the request tells the service
    picture: Picture | None = None  # to complete; else images are drawn

    def encoded(self, host: str) -> bytes:
        """The request as it is sent."""
        fields = {
            "seed": self.seed,
            "n": self.n,
            "size": self.size,
            "stream": self.stream,
            "temperature": self.temperature,
        }
        path, kind = "/v1/images/generations", "application/json"
        body = json.dumps(fields).encode()
        if self.picture is not None:
            path, kind, body = "/v1/images/edits", FORM, form(self.picture.parts(fields))
        deadline = "" if self.timeout is None else f"x-request-timeout: {self.timeout}\r\n"
        return (
            f"POST {path} HTTP/1.1\r\nhost: {host}\r\n{deadline}content-type: {kind}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode() + body


@dataclass(slots=True)
class Record:
    """What became of one request. Times are of time.monotonic."""

    ask: Ask
    began: float  # when it was due, which may be earlier than when it was sent
    ended: float = math.inf
    status: int = 0  # 0: no answer
    code: str = ""  # of the error that ended it
    # index, seed, base64 of the PNG; as they came
    images: list[tuple[int, int, str]] = field(default_factory=list)
    checkpoint: str = ""  # the digest that the answer tells
    left: bool = False  # this client closed the connection before it had its answer
    broken: str = ""  # how the connection failed

    @property
    def outcome(self) -> str:
        """completed, refused (never admitted), failed (with an error that says so), left, or lost:
        none of them.
        """
        if self.left:
            return "left"
        if self.code:
            refused = self.status in (429, 503) or self.code == "deadline_unreachable"
            return "refused" if refused else "failed"
        came = [(index, seed) for index, seed, _ in sorted(self.images)]
        whole = came == [(index, self.ask.seed + index) for index in range(self.ask.n)]
        return "completed" if self.status == 200 and whole and not self.broken else "lost"

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Connection:
    """One keep-alive connection, opened when it is wanted; one request at a time."""

    def __init__(
        self, host: str, port: int, *, hold: asyncio.Event | None = None, slow: str = ""
    ) -> None:
        """slow, until hold is set: `reading` stops after the request, `writing` sends its end a
        byte now and then.
        """
        self.host, self.port, self._hold, self._slow = host, port, hold, slow
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._used = 0.0

    async def ask(
        self, ask: Ask, *, due: float | None = None, leave_after: float | None = None
    ) -> Record:
        """Send a request and read its answer, or leave after so many seconds; one not answered in
        LOST_S is lost.
        """
        if due is None:
            due = time.monotonic()
        record = Record(ask, due)
        patience_s = LOST_S if leave_after is None else leave_after
        try:
            async with asyncio.timeout(patience_s) as patience:
                await self._exchange(record)
        except (OSError, EOFError, ValueError, KeyError) as error:
            record.left = leave_after is not None and patience.expired()
            record.broken = "" if record.left else f"{type(error).__name__}: {error}"
            self.close()
        except asyncio.CancelledError:
            self.close()
            raise
        record.ended = self._used = time.monotonic()
        return record

    def close(self) -> None:
        """At once, whatever is on its way."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def _exchange(self, record: Record) -> None:
        if self._writer is not None and (
            self._writer.is_closing() or time.monotonic() - self._used > IDLE_S
        ):
            self.close()
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await self._open()
        request = record.ask.encoded(f"{self.host}:{self.port}")
        if self._slow == "writing" and self._hold is not None:
            left = 24
            self._writer.write(request[:-left])
            while not self._hold.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hold.wait(), SLOW_S)
                if left > 1:
                    self._writer.write(request[-left:][:1])
                    left -= 1
            request = request[-left:]
        self._writer.write(request)
        await self._writer.drain()
        if self._slow == "reading" and self._hold is not None:
            await self._hold.wait()
        await self._read(self._reader, record)

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._slow != "reading":
            return await asyncio.open_connection(self.host, self.port, limit=2**20)
        narrow = socket.socket()
        # both before it connects: of this size and of
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # segments the kernel makes the other's buffer
        narrow.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        narrow.setblocking(False)
        await asyncio.get_running_loop().sock_connect(narrow, (self.host, self.port))
        return await asyncio.open_connection(sock=narrow, limit=4096)

    async def _read(self, reader: asyncio.StreamReader, record: Record) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").rstrip().split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        status = int(first.split(" ")[1])
        if headers.get("transfer-encoding") == "chunked":
            record.status = status
            async for event in _events(reader):
                _take(record, event, [event])
        else:
            answer = json.loads(await reader.readexactly(int(headers["content-length"])))
            record.status = status  # only now: half an answer is none
            images = [
                {"image_index": index, "type": "completed"} | image
                for index, image in enumerate(answer.get("data", []))
            ]
            _take(record, answer, images)
        if headers.get("connection") == "close":
            self.close()


def _take(record: Record, answer: dict, images: list[dict]) -> None:
    record.code = (answer.get("error") or {}).get("code", record.code)
    record.checkpoint = answer.get("checkpoint", record.checkpoint)
    record.images += [
        (image["image_index"], image["seed"], image["b64_json"])
        for image in images
        if str(image.get("type")).endswith("completed")
    ]


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict]:
    """The JSON of server-sent events, to the end of the chunked body."""
    buffer = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        buffer += await reader.readexactly(size)
        await reader.readexactly(2)
        *events, buffer = buffer.split(b"\n\n")
        for event in events:
            if data := b"".join(
                line[5:] for line in event.split(b"\n") if line.startswith(b"data:")
            ):
                yield json.loads(data)
    await reader.readexactly(2)
