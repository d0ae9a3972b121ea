"""Clients that disconnect in every phase of a request, and servers that shut down, with real
processes.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.web.routes.test_images import events_of, generate, message_of, occluded, refusal
from tools.harness.commands import ROOT
from tools.harness.servers import HANG_S, Process, eventually, serving

pytestmark = pytest.mark.slow

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
SLOW = "slow:every=1:ms=30"  # so a quantum is one step, and an image of `tiny` takes two seconds


def head(path: str, length: int, kind: str = "application/json") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


def post(**body) -> bytes:
    content = json.dumps(body).encode()
    return head(GENERATIONS, len(content)) + content


def upload(picture: bytes, **fields: str) -> bytes:
    """An edit as multipart."""
    parts = b"".join(
        f'--limit\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    )
    content = (
        parts
        + b'--limit\r\ncontent-disposition: form-data; name="image"; filename="p.png"\r\n\r\n'
        + picture
        + b"\r\n--limit--\r\n"
    )
    return head(EDITS, len(content), "multipart/form-data; boundary=limit") + content


def rest_of(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def received_error(received: bytes) -> dict:
    """The error of a plain answer."""
    return json.loads(received.split(b"\r\n\r\n", 1)[1])["error"]


def counted(process: Process, name: str, **labels: str) -> float:
    """The sum of a counter's samples that have these labels."""
    lines = process.get("/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(name + "{")
        and all(f'{label}="{value}"' in line for label, value in labels.items())
    )


def alone(process: Process, **body) -> list[str]:
    answer = generate(process, **body)
    assert answer.status_code == 200, answer.text
    return [item["b64_json"] for item in answer.json()["data"]]


@pytest.fixture(scope="module")
def process(tiny: Path) -> Iterator[Process]:
    """Two slots; each test leaves it quiet."""
    with serving(tiny.parent, f"--slots 2 --max-queue 64 --faults {SLOW}") as process:
        yield process


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "process" in request.fixturenames:
        assert eventually(lambda: request.getfixturevalue("process").quiet("tiny"))


# --- clients that leave ---


@pytest.mark.parametrize("size", [10_000, 3_000_000], ids=["in memory", "in a file"])
@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=limit"])
def test_leaving_in_the_middle_of_an_upload_leaves_nothing_behind(process, kind, size):
    def files() -> int:
        return len(os.listdir(f"/proc/{process.process.pid}/fd"))

    # what is held in memory has a limit of 128 KiB
    size = size if "multipart" in kind else min(size, 50_000)
    before, refused = files(), counted(process, "linpix_requests_rejected_total")
    begin = b'--limit\r\ncontent-disposition: form-data; name="image"; filename="p.png"\r\n\r\n'
    for _ in range(5):
        with process.connect() as connection:
            connection.sendall(
                head(EDITS if "multipart" in kind else GENERATIONS, 2 * size, kind)
                + (begin if "multipart" in kind else b"[")
                + b" " * size
            )
            time.sleep(0.05)
    assert eventually(lambda: files() <= before)
    # nobody was refused: they left
    assert counted(process, "linpix_requests_rejected_total") == refused
    assert process.quiet("tiny")


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_leaving_the_queue_does_not_disturb_running_requests(process, stream):
    expected = alone(process, n=4, seed=5)
    cancelled = counted(process, "linpix_images_completed_total", outcome="cancelled")
    with ThreadPoolExecutor(1) as pool, process.connect() as waiting:
        running = pool.submit(alone, process, n=4, seed=5)
        assert process.becomes('linpix_state_slots_used{model="tiny"}', 2)
        waiting.sendall(post(n=2, stream=stream))
        assert process.becomes("linpix_requests_waiting", 1)
        waiting.close()
        assert process.becomes("linpix_requests_waiting", 0)
        assert running.result() == expected
    assert counted(process, "linpix_images_completed_total", outcome="cancelled") == cancelled + 2


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_leaving_while_it_runs_frees_the_slots_for_waiting_requests(process, stream):
    expected = alone(process, seed=7)
    with ThreadPoolExecutor(1) as pool, process.connect() as leaving:
        leaving.sendall(post(n=16, stream=stream))
        assert process.becomes('linpix_state_slots_used{model="tiny"}', 2)
        waiting = pool.submit(alone, process, seed=7)
        assert process.becomes("linpix_requests_waiting", 1)
        leaving.close()
        assert waiting.result() == expected


def test_a_client_that_leaves_at_any_moment_is_counted_once_with_all_its_images(tiny):
    """An image takes some 45 ms here: some leave before it is begun, some just as it is finished,
    some after that.
    """
    with serving(tiny.parent, "--slots 4 --faults slow:every=1:ms=5") as process:
        chance = random.Random(0)
        delays = [chance.uniform(0, 0.15) for _ in range(200)]

        def leave(delay: float) -> None:
            with process.connect() as connection:
                connection.sendall(post(n=2, stream=delay < 0.05))
                time.sleep(delay)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(leave, delays))
        assert eventually(lambda: process.quiet("tiny"))
        ended = counted(process, "linpix_requests_total")
        assert 0 < ended <= 200  # some left before they were seen
        assert counted(process, "linpix_images_completed_total") == 2 * ended
        assert counted(process, "linpix_requests_total", outcome="cancelled") > 0
        assert counted(process, "linpix_requests_total", outcome="failed") == 0


def stalled(process: Process) -> socket.socket:
    """The connection of a client that asks for a long stream and reads nothing of it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    # else the server's socket takes all of it
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    connection.connect(("127.0.0.1", int(process.url.rsplit(":", 1)[1])))
    connection.sendall(post(n=64, stream=True, size="128x128"))
    assert eventually(
        lambda: counted(process, "linpix_images_completed_total", outcome="completed") == 64
    )
    assert process.metric("linpix_requests_running") == 1  # what is drawn has not reached anybody
    return connection


def test_a_client_that_does_not_read_its_stream_loses_it_some_time_after_the_deadline(tiny):
    with (
        serving(tiny.parent, "--max-n 64 --request-timeout 5") as process,
        stalled(process),
    ):
        assert eventually(lambda: process.quiet("tiny"))
        assert counted(process, "linpix_requests_total", outcome="cancelled") == 1
        assert eventually(
            lambda: any("does not read the answer" in line for line in process.printed)
        )


# --- a server that stops ---


# a start is mostly imports of native modules
@pytest.mark.parametrize("ms", [0, 5, 8, 10, 12, 15, 20, 50, 200])
def test_sigterm_before_it_serves_ends_it_with_0(tiny, ms):
    with subprocess.Popen(
        [sys.executable, "-m", "linpix", "serve", "--port", "0", "--checkpoints", str(tiny.parent)],
        stderr=subprocess.PIPE,
        text=True,
    ) as starting:
        status = Path(f"/proc/{starting.pid}/status")
        caught = 1 << signal.SIGTERM - 1
        assert eventually(
            lambda: bool(int(re.search(r"SigCgt:\s+(\S+)", status.read_text())[1], 16) & caught)
        )
        time.sleep(ms / 1000)
        starting.terminate()
        try:
            _, said = starting.communicate()
        finally:
            starting.kill()  # else one that goes on would be waited for without end
        assert (starting.returncode, said) == (0, "")


def test_sigterm_under_load_answers_or_ends_every_request_and_exits_with_0(tiny):
    """Clients that come again and again until they are refused; the drain is too short for all that
    wait.
    """
    with (
        serving(
            tiny.parent,
            f"--slots 4 --max-queue 64 --drain-timeout 1.5 --faults {SLOW}",
        ) as process,
        ThreadPoolExecutor(24) as pool,
    ):
        answers: list[httpx.Response] = []

        def come(index: int) -> None:
            with process.client(limits=httpx.Limits(max_keepalive_connections=0)) as client:
                while True:
                    try:
                        if index % 3 == 2:
                            answer = client.post(EDITS, files={"image": occluded()})
                        else:
                            answer = generate(client, n=1 + index % 2, stream=index % 3 == 1)
                    # the process has ended since this client's last answer
                    except httpx.ConnectError:
                        return
                    answers.append(answer)
                    if answer.status_code != 200 or '"code":"draining"' in answer.text:
                        return

        clients = [pool.submit(come, index) for index in range(24)]
        assert eventually(
            lambda: counted(process, "linpix_requests_total", outcome="completed") >= 4
        )
        process.process.send_signal(signal.SIGTERM)
        for client in clients:
            client.result()  # no connection was cut: that would raise here
        assert process.process.wait(HANG_S) == 0
    ended = {"completed": 0, "refused": 0, "cut off": 0}
    for answer in answers:
        if answer.headers["content-type"].startswith("text/event-stream"):
            last = events_of(answer.text)[-1]
            ended["cut off" if "error" in last else "completed"] += 1
            assert last.get("error", {"code": "draining"})["code"] == "draining"
            assert "error" in last or last["type"] == "image_generation.completed"
        elif answer.status_code == 200:
            ended["completed"] += 1
            assert answer.json()["data"]
        else:
            assert refusal(answer) == (503, "draining")
            assert answer.headers["retry-after"]
            ended["cut off" if "in time" in message_of(answer) else "refused"] += 1
    assert ended["completed"] and ended["cut off"]


def test_an_upload_that_is_not_whole_when_the_drain_begins_is_refused_at_once(tiny):
    """While others finish: it would be refused once it is whole."""
    with (
        serving(tiny.parent, f"--faults {SLOW}") as process,
        ThreadPoolExecutor(1) as pool,
        process.connect() as edit,
        process.connect() as generation,
    ):
        running = pool.submit(alone, process, n=4)
        edit.sendall(upload(occluded())[:-40])
        generation.sendall(post(n=2)[:-3])
        assert process.becomes("linpix_requests_running", 1)
        process.process.send_signal(signal.SIGTERM)
        for connection in (edit, generation):
            received = rest_of(connection)
            assert received.startswith(b"HTTP/1.1 503")
            assert b"connection: close\r\n" in received
            assert received_error(received)["code"] == "draining"
        assert len(running.result()) == 4
        assert process.process.wait(HANG_S) == 0


def test_connections_kept_alive_are_closed_while_it_drains_and_do_not_hold_the_exit_back(tiny):
    with (
        serving(tiny.parent, f"--faults {SLOW}") as process,
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor(1) as pool,
    ):
        idle = [stack.enter_context(process.connect()) for _ in range(3)]
        for connection in idle:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            received = b""
            while b"alive" not in received:
                received += (some := connection.recv(65536))
                assert some, "it was closed"
        silent = stack.enter_context(process.connect())  # never says a word
        silent.sendall(b"GET /hea")
        running = pool.submit(alone, process, n=4)
        assert process.becomes("linpix_requests_running", 1)
        process.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: process.get("/readyz").status_code == 503)
        idle[0].sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        received = rest_of(idle[0])  # so it is closed
        assert b"connection: close\r\n" in received
        assert b"alive" in received
        running.result()
        assert process.process.wait(HANG_S) == 0
        for connection in (*idle[1:], silent):
            assert rest_of(connection) == b""
        process._reader.join()
        assert not any("timeout graceful shutdown exceeded" in line for line in process.printed)


def test_a_second_sigterm_ends_what_runs_at_once(tiny):
    with (
        serving(tiny.parent, "--drain-timeout 600 --faults slow:every=1:ms=1000") as process,
        ThreadPoolExecutor(2) as pool,
    ):
        asked = [
            pool.submit(
                httpx.post,
                process.url + GENERATIONS,
                json={"n": 16, "stream": stream},
                timeout=HANG_S,
            )
            for stream in (False, True)
        ]
        assert process.becomes("linpix_requests_running", 2)
        process.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: process.get("/readyz").status_code == 503)
        process.process.send_signal(signal.SIGTERM)
        plain, streamed = (answer.result() for answer in asked)
        assert refusal(plain) == (503, "draining")
        assert events_of(streamed.text)[-1]["error"]["code"] == "draining"
        assert process.process.wait(HANG_S) == 0


TOLD_WHILE_IT_BEGINS = """
import asyncio, os, signal, sys
from asyncio.base_events import BaseEventLoop

create = BaseEventLoop.create_server

async def late(*given, **named):
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(1)
    return await create(*given, **named)

BaseEventLoop.create_server = late
from linpix.__main__ import main
sys.exit(main())
"""


def test_sigterm_just_before_it_listens_ends_it_too(tiny):
    """On a machine with much to do the name that it listens on takes that long to be looked up."""
    with serving(tiny.parent, program=("-c", TOLD_WHILE_IT_BEGINS)) as process:
        assert process.process.wait(HANG_S) == 0
        process._reader.join()
        assert "Traceback" not in "".join(process.printed)


def test_after_sigkill_it_serves_again_on_the_same_port_what_it_served_before(tiny):
    with serving(ROOT / "checkpoints", "--slots 8 --faults slow:every=1:ms=60") as process:
        port = process.url.rsplit(":", 1)[1]
        before = process.get("/v1/models").json()
        expected = alone(process, seed=11)
        with ThreadPoolExecutor(4) as pool:
            asked = [
                pool.submit(
                    httpx.post,
                    process.url + GENERATIONS,
                    json={"n": 2, "stream": True},
                    timeout=HANG_S,
                )
                for _ in range(4)
            ]
            assert process.becomes("linpix_requests_running", 4)
            process.process.kill()
            assert process.process.wait(HANG_S) == -signal.SIGKILL
            for answer in asked:
                with pytest.raises(httpx.TransportError):  # nothing looks whole that is not
                    answer.result()
    # how soon is measured by tools/benchmarks/restart.py
    with serving(ROOT / "checkpoints", f"--slots 8 --port {port}") as process:
        assert process.get("/readyz").status_code == 200
        assert process.get("/v1/models").json() == before
        assert alone(process, seed=11) == expected
        assert process.quiet("mnist-small")
