"""Connections: how answers are cut into packets, and what clients send that is not a proper
request.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from linpix.server.web.middleware.bodies import PIECE_BYTES
from linpix.server.web.middleware.connection import (
    AHEAD_BYTES,
    HEAD_BYTES,
    READ_BYTES,
    Connection,
)
from linpix.server.web.middleware.stack import SECURITY_HEADERS
from tests.server.web.middleware.test_stack import probes_of
from tests.server.web.test_leaving import GENERATIONS, SLOW, head, post, rest_of
from tools.harness.servers import HANG_S, Process, eventually, serving

HOST = b"host: localhost\r\n"


@pytest.fixture(scope="module")
def process(tiny: Path) -> Iterator[Process]:
    """An image takes two seconds here, by quanta of 30 ms."""
    with serving(tiny.parent, f"--slots 2 --faults {SLOW}") as process:
        yield process


def completed(process: Process) -> float:
    return process.metric(
        'linpix_images_completed_total{backend="linear",model="tiny",outcome="completed"}'
    )


def leave(connection: socket.socket, how: str) -> None:
    if how == "half closed":
        with contextlib.suppress(OSError):  # the server was first: what was sent was not a request
            connection.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closed", "half closed", "reset"])
@pytest.mark.parametrize(
    "more",
    [b"\r\n", b"G", b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n", b"x" * 2000],
    ids=["a line break", "a letter", "a request", "no request"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_client_that_leaves_is_noticed_whatever_it_sent_ahead_of_the_answer(
    process, how, more, stream
):
    """Of 16 images, which take 16 seconds."""
    with process.connect() as leaving:
        leaving.sendall(post(n=16, stream=stream))
        assert process.becomes("linpix_requests_running", 1)
        # the second time on a connection that waits for its answer with a request begun
        for _ in range(2):
            leaving.sendall(more)
            time.sleep(0.1)
        drawn = completed(process)
        leave(leaving, how)
        assert eventually(lambda: process.quiet("tiny"))
        assert completed(process) < drawn + 16, "some were not drawn"


UPGRADE = b"upgrade: h2c\r\n"  # in a body, where it is no header


@pytest.mark.slow
@pytest.mark.parametrize(
    "pieces", ["head, its end", "a head as long as a read", "a request and a head, its end"]
)
def test_no_byte_of_a_body_is_taken_for_a_header(process, pieces):
    """However a head is cut: a body that became shorter would be filled up with the next
    request.
    """
    body = b'{"n": 2}\r\n' + UPGRADE
    first = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
    begun = head(GENERATIONS, len(body))[:-2]
    if pieces == "a head as long as a read":
        begun += b"x: " + b"x" * (READ_BYTES - len(begun) - 5) + b"\r\n"
        assert len(begun) == READ_BYTES
    with process.connect() as connection:
        connection.sendall(first + begun if pieces.startswith("a request") else begun)
        time.sleep(0.2)
        connection.sendall(b"\r\n" + body)
        connection.sendall(b"GET /v1/models HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n")
        received = rest_of(connection)
    assert b"HTTP/1.1 400" in received and b'"object":"list"' in received, (
        "the body is no JSON, and the next is whole"
    )


WISH = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n"
DRAW_TWO = head(GENERATIONS, 8)[:-2] + WISH + b'\r\n{"n": 0}'
LIST = b"GET /v1/models HTTP/1.1\r\n" + HOST + WISH + b"\r\n"


@pytest.mark.slow
@pytest.mark.parametrize("pieces", ["whole", "in two reads", "byte by byte"])
def test_a_wish_for_another_protocol_is_ignored_however_its_head_arrives(process, pieces):
    """Its body counts, and so do requests that follow in the same read, with the same wish."""
    sent = DRAW_TWO + LIST + LIST.replace(WISH, WISH + b"connection: close\r\n")
    cuts = {"whole": [len(sent)], "in two reads": [60], "byte by byte": range(1, len(sent))}
    with process.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begin = 0
        for end in [*cuts[pieces], len(sent)]:
            connection.sendall(sent[begin:end])
            time.sleep(0.2 if pieces == "in two reads" else 0.001)
            begin = end
        received = rest_of(connection)
    statuses = [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"400", b"200", b"200"]
    assert b"n: input should be greater than or equal to 1, got 0" in received


@pytest.mark.slow
@pytest.mark.parametrize("target", [b"localhost:80", b"/v1/models"])
def test_a_tunnel_is_refused(process, target):
    with process.connect() as connection:
        connection.sendall(b"CONNECT " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n")
        assert rest_of(connection).startswith(b"HTTP/1.1 400")


@pytest.mark.slow
@pytest.mark.parametrize("version", [b"1.0", b"0.9"])
@pytest.mark.parametrize("more", [b"", b"connection: keep-alive\r\n"], ids=["closed", "kept"])
def test_an_answer_to_http_1_0_has_no_chunks_and_ends_with_its_connection(process, version, more):
    sent = post(n=1, stream=True, partial_images=0).replace(b"HTTP/1.1", b"HTTP/" + version, 1)
    with process.connect() as connection:
        connection.sendall(sent.replace(b"\r\n", b"\r\nexpect: 100-continue\r\n" + more, 1))
        top, body = rest_of(connection).split(b"\r\n\r\n", 1)
    assert top.startswith(b"HTTP/1.1 200") and b"connection: close" in top
    assert b"transfer-encoding" not in top
    assert body.startswith(b"event: image_generation.completed\n") and body.endswith(b"}\n\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad",
    [
        b"rubbish\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        head(GENERATIONS, 0).replace(b"content-length: 0", b"transfer-encoding: chunked") + b"x",
    ],
    ids=["not HTTP", "without a host", "a body without a size"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_read_is_refused_after_the_answers_before_it(process, bad, stream):
    """Further bytes, which no parser reads any more, do not bring a second refusal."""
    with process.connect() as connection:
        connection.sendall(post(n=1, stream=stream) + post(n=0) + bad)
        time.sleep(0.2)
        connection.sendall(bad)
        received = rest_of(connection)
    answers = received.split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"400", b"400"]
    assert b"b64_json" in answers[0] and b'"n: input' in answers[1]
    assert b"invalid_http" in answers[2] and b"connection: close" in answers[2]
    assert eventually(lambda: process.quiet("tiny"))


@pytest.mark.slow
def test_a_bare_line_feed_in_a_wish_for_another_protocol_hides_no_header(process):
    """A proxy may take it for the end of a line, and the request after it for a body."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    with process.connect() as connection:
        connection.sendall(
            head(GENERATIONS, 2).split(b"\r\n")[0]
            + b"\r\nHost: x\r\nUpgrade: x\nContent-Length: "
            + str(len(hidden)).encode()
            + b"\r\n\r\n"
            + hidden
        )
        received = rest_of(connection)
    assert received.startswith(b"HTTP/1.1 400") and b'"object":"list"' not in received


@pytest.mark.slow
def test_a_body_that_is_sent_ahead_waits_in_the_network(process):
    """Nothing reads it yet, so nothing limits it, until the request before it is answered."""
    with process.connect() as connection:
        connection.sendall(post(n=1) * 2 + head(GENERATIONS, 10**11))
        connection.settimeout(1.0)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 2**27:
                sent += connection.send(bytes(2**20))
    assert sent < 2**24, "the buffers of both sockets, and a little"
    assert eventually(lambda: process.quiet("tiny"))


@pytest.mark.slow
def test_headers_after_a_body_have_a_limit(process):
    with process.connect() as connection, pytest.raises(OSError):
        connection.sendall(
            head(GENERATIONS, 0).replace(b"content-length: 0", b"transfer-encoding: chunked")
            + b"2\r\n{}\r\n0\r\n"
        )
        for _ in range(64):
            connection.sendall(b"a: b\r\n" * HEAD_BYTES)
            time.sleep(0.01)
    assert eventually(lambda: process.quiet("tiny"))


NO_HTTP = {
    "a length and chunks": (
        head(GENERATIONS, 2)[:-2] + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        "Transfer-Encoding can't be present with Content-Length",
    ),
    "a large head": (
        b"GET / HTTP/1.1\r\n" + HOST + b"x: " + b"x" * HEAD_BYTES + b"\r\n\r\n",
        "at most 16,384 bytes",
    ),
    "a large head without an end": (
        b"GET / HTTP/1.1\r\n" + HOST + b"x: " + b"x" * HEAD_BYTES,
        "at most 16,384 bytes",
    ),
    "two lengths": (
        head(GENERATIONS, 2)[:-2] + b"content-length: 3\r\n\r\n{}",
        "Duplicate Content-Length",
    ),
    "a negative length": (head(GENERATIONS, -2) + b"{}", "Invalid character in Content-Length"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", "exactly one Host header"),
    "two hosts": (b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n", "exactly one Host header"),
    "another coding": (
        b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n",
        "Transfer-Encoding",
    ),
    "a bare line feed": (
        b"GET / HTTP/1.1\r\n" + HOST + b"x: y\nz: 1\r\n\r\n",
        "Missing expected CR",
    ),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "the request cannot be read"),
    "a chunk without a size": (
        head(GENERATIONS, 0).replace(b"content-length: 0", b"transfer-encoding: chunked")
        + b"size\r\n{}",
        "Invalid character in chunk size",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NO_HTTP)
def test_a_malformed_request_is_answered_with_the_envelope_and_logged(process, name):
    sent, words = NO_HTTP[name]
    with process.connect() as connection:
        connection.sendall(sent)
        top, body = rest_of(connection).split(b"\r\n\r\n", 1)
    headers = dict(line.lower().split(": ", 1) for line in top.decode().split("\r\n")[1:])
    error = json.loads(body)["error"]
    assert top.startswith(b"HTTP/1.1 400 ")
    assert (error["code"], error["type"]) == ("invalid_http", "invalid_request_error")
    assert words in error["message"]
    assert headers["connection"] == "close"
    assert headers["x-content-type-options"] == SECURITY_HEADERS["x-content-type-options"]
    said = lambda: [line for line in process.printed if headers["x-request-id"] in line]  # noqa: E731
    assert eventually(lambda: len(said()) == 1)
    assert "OTHER (no route) 400" in said()[0]


@pytest.mark.slow
def test_bytes_after_a_body_of_two_lengths_are_not_read_as_a_request(process):
    with process.connect() as connection:
        connection.sendall(
            NO_HTTP["a length and chunks"][0] + b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n"
        )
        assert rest_of(connection).count(b"HTTP/1.1") == 1


@contextlib.contextmanager
def connected(
    protocol: type[Connection], length: int
) -> Iterator[tuple[uvicorn.Server, socket.socket]]:
    """A server in this process whose answers have so many bytes, and a client of it."""

    async def answer(scope, receive, send) -> None:
        while (await receive())["more_body"]:
            pass
        headers = [(b"content-length", b"%d" % length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(length // PIECE_BYTES):
            piece = bytes(PIECE_BYTES)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})

    server = uvicorn.Server(
        uvicorn.Config(
            answer, port=0, lifespan="off", log_config=None, loop="asyncio", http=protocol
        )
    )
    serving_it = threading.Thread(target=server.run, daemon=True)
    serving_it.start()
    try:
        assert eventually(lambda: server.started)
        with socket.create_connection(
            server.servers[0].sockets[0].getsockname(), timeout=HANG_S
        ) as client:
            yield server, client
    finally:
        server.should_exit = True
        serving_it.join()


@pytest.mark.slow
def test_connections_are_read_in_small_pieces_so_that_others_are_served_in_between():
    seen: list[int] = []

    class Seen(Connection):
        def data_received(self, data: bytes) -> None:
            seen.append(len(data))
            super().data_received(data)

    with connected(Seen, 0) as (_, client):
        client.sendall(head("/", 2**21) + bytes(2**21))
        assert client.recv(12) == b"HTTP/1.1 200"
    assert sum(seen) > 2**21 and max(seen) <= READ_BYTES


@pytest.mark.slow
def test_a_client_that_does_not_read_loses_its_connection_and_one_that_reads_does_not(monkeypatch):
    length = 2**26  # more than both sockets hold
    with connected(Connection, length) as (server, client):
        client.sendall(head("/", 0))
        received = 0
        while received < length:
            piece = client.recv(2**20)
            assert piece, f"the connection ended after {received:,} bytes"
            received += len(piece)
        monkeypatch.setattr("linpix.server.web.middleware.connection.WRITE_S", 0.2)
        client.sendall(head("/", 0))
        assert eventually(lambda: not server.server_state.connections)


@pytest.mark.slow
def test_all_bodies_that_are_sent_ahead_of_an_unread_answer_have_one_limit():
    held: list[int] = []

    class Held(Connection):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            held.append(sum(len(cycle.body) for cycle in self._cycles))

    with connected(Held, 2**26) as (_, client):
        client.sendall(head("/", 0))
        assert client.recv(12) == b"HTTP/1.1 200"
        client.settimeout(3.0)
        with contextlib.suppress(TimeoutError):
            for _ in range(1000):
                client.sendall(head("/", 4000) + bytes(4000))
    assert AHEAD_BYTES < max(held) <= AHEAD_BYTES + READ_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://localhost/v1/models", b"200"),
        (b"HTTP://localhost:80/v1/models?x=/", b"200"),
        (b"http://localhost", b"200"),
        (b"http://localhost?x", b"200"),
        (b"http://rebound.example/v1/models", b"403"),
        (b"ftp://localhost/v1/models", b"400"),
        (b"/http://localhost/v1/models", b"404"),
    ],
)
def test_a_target_with_a_host_is_that_of_its_path_and_the_host_counts(process, target, status):
    with process.connect() as connection:
        connection.sendall(
            b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n"
        )
        assert rest_of(connection).startswith(b"HTTP/1.1 " + status)


@pytest.mark.slow
def test_a_head_has_its_time_at_the_port_of_the_probes_too(tiny):
    with serving(tiny.parent, "--head-timeout 1 --metrics-port 0") as process:
        port = int(probes_of(process).rsplit(":", 1)[1])
        for sent in (b"", b"GET /met"):
            with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
                connection.sendall(sent)
                assert rest_of(connection) == b""
