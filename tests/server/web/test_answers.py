"""Answers that are large: who encodes them, how many bytes they may have, and until when they
count to their client.
"""

import contextlib
import io
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from PIL import Image

from linpix.model.machine import usable_cores
from linpix.server.web.service import ENCODERS
from tests.server.web.routes.test_images import (
    assert_refused,
    edit,
    events_of,
    generate,
    message_of,
)
from tests.server.web.test_leaving import head
from tools.harness.servers import Process, eventually, here, serving

LARGE = {"size": "512x512", "output_format": "webp"}
COMPLETED = 'linpix_images_completed_total{backend="linear",model="tiny",outcome="completed"}'


@contextlib.contextmanager
def encoding(client) -> Iterator[threading.Event]:
    """Another client has all threads that encode, until the event is set."""
    encoders, ended = client.app.state.service.encoders, threading.Event()
    for _ in range(ENCODERS + 3):
        client.portal.start_task_soon(encoders.run, "others", partial(ended.wait, 60))
    assert eventually(lambda: encoders._running.total() == ENCODERS)
    try:
        yield ended
    finally:
        ended.set()
        assert eventually(lambda: encoders._free == ENCODERS)


def test_uploads_and_small_answers_do_not_wait_for_answers_that_are_encoded(tiny):
    assert 1 <= ENCODERS <= max(1, usable_cores() - 1)
    with here(tiny.parent) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        with encoding(client):
            assert edit(client).status_code == 200
            assert generate(client, n=4, stream=True).status_code == 200
            assert generate(client, **LARGE, timeout=0.5).status_code == 504
            large = pool.submit(generate, client, **LARGE)
            assert eventually(lambda: client.app.state.service.encoders._waiting)
        assert large.result().status_code == 200


def test_of_rows_that_wait_to_be_encoded_only_the_last_is(tiny):
    with here(tiny.parent) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        with encoding(client):
            before = server.metric(COMPLETED)
            stream = pool.submit(generate, client, **LARGE, n=2, stream=True)
            assert eventually(lambda: server.metric(COMPLETED) == before + 2)
        events = events_of(stream.result().text)
    for image in range(2):
        partial_image, completed = (each for each in events if each["image_index"] == image)
        assert partial_image["rows"] == partial_image["partial_image_index"] + 1 == 8
        assert completed["type"].endswith("completed")


def noise(side: int) -> bytes:
    """A picture that does not compress, with a hole."""
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 4), np.uint8)
    pixels[..., 3] = 255
    pixels[side // 2 :, side // 2 :, 3] = 0
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png", compress_level=1)
    return file.getvalue()


@pytest.mark.parametrize("output_format", ["png", "webp", "jpeg"])
def test_an_answer_has_a_largest_size_whatever_its_format(tiny, output_format):
    with here(tiny.parent) as server, server.client() as client:
        most = {"n": 16, "size": "2048x2048", "output_format": output_format}
        assert generate(client, **most).status_code == 200
        body = {"lay_back": "true", "n": "16", "output_format": output_format}
        answer = client.post("/v1/images/edits", data=body, files={"image": ("a.png", noise(1024))})
        assert_refused(answer, "n", "at most 67,108,864 bytes")


@contextlib.contextmanager
def unread(process: Process, client: str) -> Iterator[None]:
    """A client that has not read its answer, an array of 16 MB."""
    address, body = urlsplit(process.url), json.dumps({"n": 4, "size": "2048x2048"}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.bind((client, 0))
        connection.connect((address.hostname, address.port))
        sent = head("/v1/images/generations", len(body))
        sent = sent.replace(b"\r\n", b"\r\naccept: application/x-npy\r\n", 1)
        connection.sendall(sent + body)
        assert connection.recv(12) == b"HTTP/1.1 200"
        yield


@pytest.mark.slow
def test_an_answer_counts_to_its_client_until_it_is_written(tiny):
    def ask(n: int) -> httpx.Response:
        return generate(process, headers={"accept": "application/x-npy"}, n=n, size="2048x2048")

    space = ("--max-upload", "20000000", "--upload-space", "40000000")
    with serving(tiny.parent, *space) as process:
        with unread(process, "127.0.0.1"):
            assert eventually(lambda: process.quiet("tiny"))  # released, but not written
            refused = ask(1)
            assert refused.status_code == 429
            assert "20,000,000 bytes of uploads and answers" in message_of(refused)
            with unread(process, "127.0.0.2"), process.client() as client:
                # all space is taken, but a small answer needs none
                assert generate(client).status_code == 200
        assert eventually(lambda: ask(4).status_code == 200)
