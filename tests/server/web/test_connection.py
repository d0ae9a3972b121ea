"""h11 with our rules, without a socket."""

import h11

from linpix.server.web.middleware.connection import Reader


def answering(*headers: tuple[str, str]) -> tuple[Reader, bytes]:
    """A connection that was asked for something, and what it sends of the head of its answer."""
    reader = Reader(h11.SERVER)
    reader.receive_data(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert isinstance(reader.next_event(), h11.Request)
    return reader, reader.send(h11.Response(status_code=200, headers=headers))


def test_the_head_of_an_answer_of_known_length_goes_out_with_its_body():
    reader, head = answering(("content-length", "4"))
    assert head == b""
    assert reader.send(h11.Data(data=b"1234")) == b"HTTP/1.1 200 \r\ncontent-length: 4\r\n\r\n1234"
    assert reader.send(h11.EndOfMessage()) == b""


def test_an_answer_without_a_body_is_its_head():
    reader, head = answering(("content-length", "0"))
    assert head + reader.send(h11.EndOfMessage()) == b"HTTP/1.1 200 \r\ncontent-length: 0\r\n\r\n"


def test_the_head_of_a_stream_does_not_wait_for_its_first_event():
    reader, head = answering(("transfer-encoding", "chunked"))
    assert head.startswith(b"HTTP/1.1 200 ") and head.endswith(b"\r\n\r\n")
    assert reader.send(h11.Data(data=b"1234")) == b"4\r\n1234\r\n"
