"""What comes over a connection beside a proper request: bytes ahead of time, what is no HTTP, and no bytes at all."""

import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.guard import SECURITY_HEADERS
from tests.server.conftest import Process, eventually, serving
from tests.server.test_exposure import probes_of
from tests.server.test_leaving import GENERATIONS, SLOW, head, post, rest_of

HOST = b"host: localhost\r\n"


@pytest.fixture(scope="module")
def process(tiny: Path) -> Iterator[Process]:
    """An image takes two seconds here, by quanta of 30 ms."""
    with serving(tiny.parent, "--slots", "2", "--faults", SLOW) as process:
        yield process


def leave(connection: socket.socket, how: str) -> None:
    if how == "half closed":
        connection.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("how", ["closed", "half closed", "reset"])
@pytest.mark.parametrize("more", [b"\r\n", b"G", b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n", b"x" * 2000],
                         ids=["a line break", "a letter", "a request", "no request"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_who_leaves_is_seen_to_leave_whatever_was_sent_ahead_of_the_answer(process, how, more, stream):
    """Of 16 images, which take 16 seconds."""
    with process.connect() as leaving:
        leaving.sendall(post(n=16, stream=stream))
        assert eventually(lambda: process.metric("linpix_requests_running") == 1)
        for _ in range(2):  # the second time on a connection that waits for its answer with a request begun
            leaving.sendall(more)
            time.sleep(0.1)
        leave(leaving, how)
        assert eventually(lambda: process.quiet("tiny"), 8)


def test_a_client_that_asks_for_another_protocol_and_leaves_is_seen_to_leave(process):
    body = json.dumps({"n": 16}).encode()
    with process.connect() as leaving:
        leaving.sendall(head(GENERATIONS, len(body))[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n" + body)
        assert eventually(lambda: process.metric("linpix_requests_running") == 1)
        leaving.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        time.sleep(0.1)
        leaving.close()
        assert eventually(lambda: process.quiet("tiny"), 8)


def test_requests_that_are_sent_ahead_are_answered_one_after_the_other(process):
    with process.connect() as connection:
        last = b"GET /v1/models HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n"
        connection.sendall(post(stream=True) + post(n=2) + last)
        received = rest_of(connection)
    places = [received.index(words) for words in (b"image_generation.completed", b'"data":[{"b64', b'"object":"list"')]
    assert places == sorted(places)
    assert received.count(b"HTTP/1.1 200 OK\r\n") == 3


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_line_break_after_the_last_request_spoils_nothing(process, version):
    """As clients of old send it."""
    with process.connect() as connection:
        connection.sendall(f"POST {GENERATIONS} HTTP/".encode() + version + b"\r\n" + HOST + b"connection: close\r\n"
                           b"content-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        assert eventually(lambda: process.metric("linpix_requests_running") == 1)
        connection.sendall(b"\r\n")
        received = rest_of(connection)
    assert received.startswith(b"HTTP/1.1 200 OK\r\n") and received.count(b"HTTP/1.1") == 1
    assert len(json.loads(received.split(b"\r\n\r\n", 1)[1])["data"]) == 1


NO_HTTP = {
    "two lengths": (head(GENERATIONS, 2)[:-2] + b"content-length: 3\r\n\r\n{}", "conflicting Content-Length"),
    "a negative length": (head(GENERATIONS, -2) + b"{}", "bad Content-Length"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", "Missing mandatory Host"),
    "two hosts": (b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n", "multiple Host"),
    "another coding": (b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n",
                       "Transfer-Encoding"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "no HTTP request"),
    "a chunk without a size": (head(GENERATIONS, 0).replace(b"content-length: 0", b"transfer-encoding: chunked")
                               + b"size\r\n{}", "illegal chunk header"),
}


@pytest.mark.parametrize("name", NO_HTTP)
def test_what_is_no_http_is_answered_with_the_envelope_and_is_a_line_of_the_log(process, name):
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


def test_a_body_that_turns_out_to_be_none_ends_an_answer_under_way_and_nothing_else(process):
    said = len(process.printed)
    with process.connect() as connection:
        connection.sendall(b"POST /v1/nothing HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n")
        received = connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 404 ")
        connection.sendall(b"size\r\n")
        assert rest_of(connection).count(b"HTTP/1.1") == 0
    assert eventually(lambda: any("404" in line for line in process.printed[said:]))
    assert not any("Fatal error" in line or "Traceback" in line for line in process.printed[said:])


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_another_protocol_that_is_asked_for_is_left_alone_and_not_a_matter_for_the_log(process, protocol):
    said = len(process.printed)
    with process.connect() as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\n" + HOST + b"connection: upgrade, close\r\n"
                           b"upgrade: " + protocol.encode() + b"\r\nsec-websocket-version: 13\r\n"
                           b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
        assert rest_of(connection).startswith(b"HTTP/1.1 200 OK\r\n")
    assert eventually(lambda: any("/v1/models 200" in line for line in process.printed[said:]))
    assert not any("WARNING" in line for line in process.printed[said:])


def test_a_head_has_its_time_at_the_port_of_the_probes_too(tiny):
    with serving(tiny.parent, "--head-timeout", "1", "--metrics-port", "0") as process:
        port = int(probes_of(process).rsplit(":", 1)[1])
        for sent in (b"", b"GET /met"):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(sent)
                assert rest_of(connection) == b""
