"""Admission and refusals, against real server processes."""

import contextlib
import http.client
import io
import itertools
import json
import os
import re
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.server.web.routes.test_images import events_of, generate, occluded
from tools.harness.servers import HANG_S, Process, eventually, serving

pytestmark = pytest.mark.slow

GENERATE, EDIT = "/v1/images/generations", "/v1/images/edits"
# of PACED, which takes one step a quantum: an image of 64 steps takes 9.6 s and more
STEP_S = 0.15
PACED = ("--faults", f"slow:every=1:ms={STEP_S * 1e3:.0f}")
# nothing is known of its pace for six seconds, nor finished in minutes
FROZEN = ("--faults", "slow:every=1:ms=3000")
BOUNDARY = "boundary"
BLACK = np.zeros((8, 8), np.uint8)
PIXELS = 'linpix_pixels_generated_total{backend="linear",model="tiny"}'


@contextlib.contextmanager
def service(checkpoints: Path, *flags: str) -> Iterator[Process]:
    """A server; on exit, asserts that all gauges are back to 0."""
    with serving(checkpoints, "--body-timeout 300", *flags) as process:
        yield process
        gauges = [
            "linpix_requests_running",
            "linpix_requests_waiting",
            "linpix_request_bodies_reading",
            'linpix_state_slots_used{model="tiny"}',
            'linpix_images_waiting{model="tiny",priority="bulk"}',
            'linpix_images_waiting{model="tiny",priority="interactive"}',
        ]
        assert eventually(lambda: all(process.metric(name) == 0 for name in gauges))


def complete(process: Process, rows: int, **fields) -> httpx.Response:
    """A picture whose first rows are known."""
    return process.post(EDIT, files={"image": ("a.png", occluded(rows, BLACK))}, data=fields)


def error_of(answer: httpx.Response) -> dict:
    return answer.json()["error"]


def slots_used(process: Process) -> float:
    return process.metric('linpix_state_slots_used{model="tiny"}')


def waiting(process: Process, priority: str = "interactive") -> float:
    return process.metric(f'linpix_images_waiting{{model="tiny",priority="{priority}"}}')


def rejected(process: Process, reason: str) -> float:
    return process.metric(f'linpix_requests_rejected_total{{reason="{reason}"}}')


class Raw(contextlib.ExitStack):
    """A raw socket, after the head of a request."""

    def __init__(
        self,
        process: Process,
        path: str,
        *headers: str,
        body: bytes = b"",
        kind: str | None = "",
        client: str = "127.0.0.1",
    ) -> None:
        super().__init__()
        address = urlsplit(process.url)
        self.socket = self.enter_context(
            socket.create_connection(
                (address.hostname, address.port), timeout=HANG_S, source_address=(client, 0)
            )
        )
        if kind == "":
            kind = (
                f"multipart/form-data; boundary={BOUNDARY}" if path == EDIT else "application/json"
            )
        head = [
            f"POST {path} HTTP/1.1",
            "host: 127.0.0.1",
            *([f"content-type: {kind}"] if kind else []),
            *headers,
        ]
        self.socket.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)

    def answer(self) -> tuple[int, dict[str, str], dict]:
        """Status, headers and error of what comes, and that is an answer and no 100 Continue."""
        assert self.socket.recv(12, socket.MSG_PEEK | socket.MSG_WAITALL) != b"HTTP/1.1 100", (
            "the body was asked for"
        )
        response = http.client.HTTPResponse(self.socket)
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, headers, json.loads(response.read()).get("error", {})

    def refused(self, status: int, code: str, words: str = "", **expected: str) -> dict[str, str]:
        """Asserts that it is, with these words and headers (`_` for a dash); gives all headers."""
        found, headers, error = self.answer()
        assert (found, error["code"]) == (status, code)
        assert words in error["message"]
        assert {name: headers[name.replace("_", "-")] for name in expected} == expected
        return headers

    def closed(self) -> bool:
        """Whether the server has closed it, and not said anything more."""
        return self.socket.recv(1) == b""


@contextlib.contextmanager
def busy(process: Process) -> Iterator[None]:
    """While an image is in the slot; then its client leaves."""
    with Raw(process, GENERATE, "content-length: 2", body=b"{}"):
        assert eventually(lambda: slots_used(process) == 1)
        yield


def part(name: str, content: bytes, file: str = "") -> bytes:
    filename = f'; filename="{file}"' if file else ""
    return (
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{filename}\r\n\r\n'.encode()
        + content
        + b"\r\n"
    )


# --- before the body ---


def test_a_full_queue_refuses_a_request_by_its_head_and_a_small_body_keeps_the_connection_open(
    tiny,
):
    with (
        service(tiny.parent, *FROZEN, "--slots 1 --max-queue 0") as process,
        busy(process),
        process.client() as client,
    ):
        for length, more in itertools.product(
            ("content-length: 900000", "transfer-encoding: chunked"),
            ((), ("expect: 100-continue",)),
        ):
            with Raw(process, EDIT, length, *more) as refused:
                headers = refused.refused(429, "queue_full", connection="close")
                assert int(headers["retry-after"]) >= 1 and int(headers["retry-after-ms"]) >= 250
                assert refused.closed()
        size = 4 * 2**20
        # sends all before it reads
        with Raw(process, EDIT, f"content-length: {size}", body=bytes(size)) as refused:
            assert refused.answer()[0] == 429
            assert refused.closed()
        for _ in range(3):
            small = generate(client, seed=1)
            assert small.status_code == 429
            assert "connection" not in small.headers
        assert rejected(process, "queue_full") == 4 + 1 + 3


def test_bodies_that_never_arrive_do_not_keep_other_clients_out(tiny):
    """No request holds room in the queue before it is read."""
    with (
        service(tiny.parent, "--slots 1 --max-queue 64") as process,
        contextlib.ExitStack() as silent,
    ):
        for client, (path, length) in itertools.product(
            range(2, 6), [(GENERATE, 20), (EDIT, 1000), (EDIT, 900_000)]
        ):
            for _ in range(16):
                silent.enter_context(
                    Raw(process, path, f"content-length: {length}", client=f"127.0.0.{client}")
                )
        assert eventually(lambda: process.metric("linpix_request_bodies_reading") == 4 * 3 * 16)
        assert waiting(process) == 0
        assert generate(process).status_code == complete(process, 4).status_code == 200


# --- head and body ---


def test_a_connection_without_a_whole_head_is_closed_in_time(tiny):
    begun = (
        b"",
        b"P",
        b"POST /v1/images/edits HTTP/1.1\r\nhost: x\r\n",
        b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 60000\r\n\r\nx",
    )
    with service(tiny.parent, "--head-timeout 1") as process:
        for sent in begun:
            with process.connect() as idle:
                ended = False
                idle.sendall(sent)
                # with a byte now and then, which is no excuse
                while not ended:
                    idle.settimeout(0.3)
                    try:
                        ended = idle.recv(1) == b""
                    except OSError as error:
                        # closed before the last byte was there
                        ended = isinstance(error, ConnectionResetError)
                    if sent and not ended:
                        with contextlib.suppress(OSError):
                            idle.sendall(b"x")
        assert generate(process).status_code == 200


def test_a_body_that_says_it_is_too_large_is_refused_at_once(tiny):
    with service(tiny.parent, "--max-upload 3000000") as process:
        for path, limit in ((EDIT, 3_000_000), (GENERATE, 2**17), ("/v1/compare", 2**17)):
            with Raw(
                process, path, f"content-length: {limit + 1}", "expect: 100-continue"
            ) as refused:
                words = f"{limit + 1:,} bytes or more; at most {limit:,} are allowed"
                refused.refused(413, "payload_too_large", words, connection="close")
                assert refused.closed()
        assert rejected(process, "too_large") == 3


def test_a_body_in_chunks_is_counted_as_it_arrives(tiny):
    with service(tiny.parent, "--max-upload 100000") as process:
        with Raw(process, EDIT, "transfer-encoding: chunked") as sending:
            with contextlib.suppress(OSError):
                for piece in [part("image", bytes(4096), "a.png"), *[bytes(4096)] * 64]:
                    sending.socket.sendall(b"%x\r\n" % len(piece) + piece + b"\r\n")
            sending.refused(
                413, "payload_too_large", "at most 100,000 are allowed", connection="close"
            )
        assert rejected(process, "too_large") == 1


def test_a_body_that_stalls_ends_with_408_and_frees_what_it_held(tiny):
    bodies = (
        (EDIT, "content-length: 900000", b"--boun"),
        (EDIT, "transfer-encoding: chunked", b"6\r\n--boun\r\n"),
        (GENERATE, "content-length: 900", b'{"n": '),
        (GENERATE, "transfer-encoding: chunked", b'6\r\n{"n": \r\n'),
    )
    with (
        service(tiny.parent, "--slots 1 --max-queue 8 --body-timeout 2") as process,
        contextlib.ExitStack() as stack,
    ):
        begun = [
            stack.enter_context(Raw(process, path, header, body=body))
            for path, header, body in bodies
        ]
        assert waiting(process) == 0
        for slow in begun:
            words = "the request body took longer than 2 s (6 bytes received)"
            slow.refused(408, "body_timeout", words, connection="close")
            assert slow.closed()
        assert generate(process).status_code == 200
        assert rejected(process, "body_timeout") == 4


def test_a_body_that_comes_byte_by_byte_ends_with_408(tiny):
    with (
        service(tiny.parent, "--body-timeout 3") as process,
        Raw(process, GENERATE, "content-length: 900") as slow,
        contextlib.suppress(OSError),
    ):
        answered: list[socket.socket] = []
        while not answered:
            slow.socket.sendall(b" ")
            answered = select.select([slow.socket], [], [], 0.1)[0]
        slow.refused(
            408, "body_timeout", "the request body took longer than 3 s", connection="close"
        )


# --- what waits is small ---


def memory(process: Process, kind: str = "VmRSS") -> float:
    """MiB. kind: VmRSS, what is resident now, or VmHWM, the most since `forget_peak`."""
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return int(re.search(rf"{kind}:\s+(\d+)", status)[1]) / 1024


def forget_peak(process: Process) -> None:
    Path(f"/proc/{process.process.pid}/clear_refs").write_text("5")


PATIENT = (*FROZEN, "--request-timeout", "1e6")  # for many images, one after the other
BOMBS = {
    "small": b'{"x": [' + b",".join([b'{"":0}'] * 18_000) + b"]}",
    "large": b'{"x": [' + b",".join([b'{"":0}'] * 149_000) + b"]}",
    "fields": (
        b"".join(part(f"field{i}", "\N{GRINNING FACE}".encode() + bytes(70_000)) for i in range(60))
        + part("image", occluded(4, BLACK), "a.png")
        + f"--{BOUNDARY}--\r\n".encode()
    ),
    "a field": (
        part("prompt", "\N{GRINNING FACE}".encode() + bytes(4_000_000))
        + f"--{BOUNDARY}--\r\n".encode()
    ),
    "files": (
        b"".join(part(f"file{i}", bytes(2**20 - 1), "a.png") for i in range(2))
        + part("image", occluded(4, BLACK), "a.png")
        + f"--{BOUNDARY}--\r\n".encode()
    ),
}


def test_a_request_that_waits_takes_little_memory_whatever_its_body_unfolds_to(tiny):
    with service(tiny.parent, *PATIENT, "--slots 1") as process, busy(process):
        # what a first request loads is no part of it
        generate(process, {"x-request-timeout": "0.1"})
        before = memory(process)
        for kind, body in BOMBS.items():
            refused = rejected(process, "invalid") + rejected(process, "too_large")
            with contextlib.ExitStack() as clients:
                for _ in range(10):
                    clients.enter_context(
                        Raw(
                            process,
                            GENERATE if kind in ("small", "large") else EDIT,
                            f"content-length: {len(body)}",
                            body=body,
                        )
                    )
                assert eventually(
                    lambda refused=refused: (
                        waiting(process)
                        + rejected(process, "invalid")
                        + rejected(process, "too_large")
                        - refused
                        == 10
                    ),
                ), kind
                assert memory(process) - before <= 10 * 8, kind
            assert eventually(lambda: waiting(process) == 0), kind


def commented(side: int, text: int) -> bytes:
    """A transparent PNG with so many bytes of comment."""
    comment, buffer = PngInfo(), io.BytesIO()
    comment.add_text("Comment", "x" * text)
    Image.new("RGBA", (side, side)).save(buffer, "PNG", pnginfo=comment)
    return buffer.getvalue()


def test_uploads_that_wait_to_be_decoded_are_not_in_memory(tiny):
    """Pictures that take long to decode, alone, and then with ten behind them that are large and
    decoded soon.
    """
    slow, large = [commented(3000, 0)] * 6, [commented(8, 14 * 2**20)] * 10
    with service(tiny.parent, "--upload-space 1000000000") as process:

        def peak(pictures: list[bytes]) -> float:
            forget_peak(process)
            with ThreadPoolExecutor(len(pictures)) as clients:
                answers = [
                    clients.submit(
                        httpx.post, process.url + EDIT, files={"image": picture}, timeout=HANG_S
                    )
                    for picture in pictures
                ]
            assert {answer.result().status_code for answer in answers} == {200}
            return memory(process, "VmHWM")

        alone = max(peak(slow) for _ in range(2))
        assert peak(slow + large) - alone < 80  # of the 140 that they have together


def test_large_pictures_are_written_while_others_are_answered(tiny):
    with service(tiny.parent, "--max-n 256") as process, ThreadPoolExecutor(1) as client:
        drawn = 'linpix_images_completed_total{backend="linear",model="tiny",outcome="completed"}'

        def asked_while_it_writes() -> bool:
            before = process.metric(drawn)
            large = client.submit(generate, process, n=256, size="1024x1024")
            assert eventually(lambda: process.metric(drawn) == before + 256)
            writes = not large.done()
            assert len(large.result().json()["data"]) == 256
            return writes

        assert eventually(asked_while_it_writes)


def test_so_many_bodies_are_read_at_once_and_what_has_no_body_is_answered(tiny):
    with service(tiny.parent, "--max-requests 2") as process, process.client() as client:
        with (
            Raw(process, EDIT, "content-length: 1000", client="127.0.0.2"),
            Raw(process, "/v1/compare", "content-length: 1000", client="127.0.0.3"),
        ):
            assert process.becomes("linpix_request_bodies_reading", 2)
            with Raw(process, EDIT, "content-length: 1000", "expect: 100-continue") as refused:
                refused.refused(503, "too_many_bodies", retry_after="1")
            assert client.get("/v1/models").status_code == 200
        assert process.becomes("linpix_request_bodies_reading", 0)
        assert generate(process).status_code == 200
        assert rejected(process, "too_many_bodies") == 1


def test_one_client_has_a_quarter_of_the_bodies_that_are_read_at_once(tiny):
    with service(tiny.parent, "--max-requests 8") as process:
        for number, path in enumerate((EDIT, GENERATE, "/v1/compare"), 1):
            with contextlib.ExitStack() as held:
                for _ in range(2):
                    held.enter_context(Raw(process, path, "content-length: 2", client="127.0.0.2"))
                assert process.becomes("linpix_request_bodies_reading", 2)
                with Raw(process, path, "content-length: 2", client="127.0.0.2") as refused:
                    refused.refused(
                        429,
                        "client_limit",
                        "one client may have 2 requests at once",
                        retry_after="1",
                    )
                assert generate(process).status_code == 200
                assert rejected(process, "client_limit") == number
            assert process.becomes("linpix_request_bodies_reading", 0)


def test_all_uploads_under_way_have_so_much_space_and_one_client_a_quarter_of_it(tiny):
    size = 500_000
    with service(tiny.parent, f"--max-upload {size} --upload-space {4 * size}") as process:
        with contextlib.ExitStack() as held:

            def begin(
                client: str, length: str = f"content-length: {size}", body: bytes = b""
            ) -> Raw:
                return held.enter_context(
                    Raw(process, EDIT, length, "expect: 100-continue", body=body, client=client)
                )

            for number in range(2, 5):
                begin(f"127.0.0.{number}")
            assert process.becomes("linpix_request_bodies_reading", 3)
            begin("127.0.0.2").refused(
                429, "client_limit", f"{size:,} bytes of uploads and answers", retry_after="1"
            )
            assert complete(process, 4).status_code == 200
            begin("127.0.0.5", f"content-length: {size - 1000}")
            assert process.becomes("linpix_request_bodies_reading", 4)
            begin("127.0.0.6").refused(503, "too_many_bodies", retry_after="1")
            piece = bytes(4000)
            with Raw(
                process,
                EDIT,
                "transfer-encoding: chunked",
                body=b"fa0\r\n" + piece + b"\r\n",
                client="127.0.0.6",
            ) as chunked:  # counted as it comes
                assert chunked.answer()[2]["code"] == "too_many_bodies"
        assert process.becomes("linpix_request_bodies_reading", 0)
        large = (
            part("image", occluded(), "a.png")
            + part("x", bytes(size - 2000))
            + f"--{BOUNDARY}--\r\n".encode()
        )
        for _ in range(3):  # the space of one is there for the next
            with Raw(process, EDIT, f"content-length: {len(large)}", body=large) as upload:
                assert upload.answer()[0] == 200


def unnamed_files(process: int | str) -> int:
    """How many files a process has that are in no folder."""
    return sum(
        "(deleted)" in os.readlink(path)
        for path in Path(f"/proc/{process}/fd").iterdir()
        if path.is_symlink()
    )


def test_an_upload_holds_no_file_while_it_waits_for_its_slot(tiny):
    body = part("image", commented(8, 2 * 2**20), "a.png") + f"--{BOUNDARY}--\r\n".encode()
    with service(tiny.parent, *FROZEN, "--slots 1") as process, busy(process):
        before = unnamed_files(process.process.pid)
        with Raw(process, EDIT, f"content-length: {len(body)}", body=body[:-1]) as upload:
            assert eventually(lambda: unnamed_files(process.process.pid) == before + 1)
            upload.socket.sendall(body[-1:])
            assert eventually(lambda: unnamed_files(process.process.pid) == before)
            assert waiting(process) == 1


# --- clients ---


def test_a_client_has_its_share_and_another_one_its_own(tiny):
    with (
        service(tiny.parent, *PACED, "--client-images 2") as process,
        ThreadPoolExecutor(1) as pool,
        httpx.Client(
            base_url=process.url,
            timeout=HANG_S,
            transport=httpx.HTTPTransport(local_address="127.0.0.2"),
        ) as other,
    ):
        running = pool.submit(generate, process, n=2)
        assert eventually(lambda: slots_used(process) == 2)
        assert eventually(lambda: process.metric(PIXELS) >= 8)  # the pace is known by then
        refused = generate(process)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "client_limit")
        assert "2 of your images" in error_of(refused)["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 2 * 64 * STEP_S
        with Raw(process, EDIT, "content-length: 900000") as upload:
            assert upload.answer()[2]["code"] == "client_limit"
        assert generate(other, n=2).status_code == 200
        assert running.result().status_code == 200
        assert generate(process).status_code == 200
        impossible = generate(process, n=3)
        assert (impossible.status_code, error_of(impossible)["param"]) == (400, "n")
        assert other.get("/v1/status").json()["limits"]["max_n"] == 2, (
            "what may be asked for is told"
        )
        assert rejected(process, "client_limit") == 2


# --- deadlines ---


def test_a_deadline_that_cannot_be_met_is_refused_at_once_and_one_that_can_is_met(tiny):
    with service(tiny.parent, *PACED, "--slots 1") as process, ThreadPoolExecutor(2) as pool:
        running = pool.submit(generate, process)
        assert eventually(lambda: process.metric(PIXELS) >= 8)
        patient = pool.submit(generate, process, {"x-request-timeout": "60"})
        assert process.becomes("linpix_requests_waiting", 1)
        for headers, body in (
            ({"x-request-timeout": "4.5"}, {}),
            ({}, {"timeout": 4.5}),
            ({"x-request-timeout": "4.50"}, {"timeout": 4.5}),
            ({}, {"timeout": 4, "stream": True}),
        ):
            refused = generate(process, headers, **body)
            assert (refused.status_code, error_of(refused)["code"]) == (504, "deadline_unreachable")
            assert "images are ahead of it, and it needs about" in error_of(refused)["message"]
        assert not patient.done()
        assert running.result().status_code == patient.result().status_code == 200
        assert rejected(process, "deadline_unreachable") == 4
        assert process.metric('linpix_queue_wait_seconds_count{model="tiny"}') == 2


def test_a_deadline_that_passes_in_the_queue_or_in_a_slot_ends_the_request_there(tiny):
    with service(tiny.parent, *FROZEN, "--slots 1") as process, ThreadPoolExecutor(3) as pool:
        with busy(process):
            queued = [
                pool.submit(generate, process, timeout=1),
                pool.submit(generate, process, timeout=1.5, stream=True),
            ]
            first, second = (future.result() for future in queued)
            assert (first.status_code, error_of(first)["code"]) == (504, "deadline_passed")
            assert "within 1 s" in error_of(first)["message"]
            assert events_of(second.text)[-1]["error"]["code"] == "deadline_passed"
            assert waiting(process) == 0
            assert slots_used(process) == 1
            assert process.metric('linpix_deadlines_passed_total{state="waiting"}') == 2
            # who waited never had a slot
            assert process.metric('linpix_queue_wait_seconds_count{model="tiny"}') == 0
        assert eventually(lambda: slots_used(process) == 0)  # after the quantum of three seconds

        def passed_in_a_slot() -> bool:
            late = generate(process, {"x-request-timeout": "4"})
            assert (late.status_code, error_of(late)["code"]) == (504, "deadline_passed")
            return process.metric('linpix_deadlines_passed_total{state="running"}') == 1

        assert eventually(passed_in_a_slot)


def test_a_deadline_passes_while_the_body_is_read_and_the_server_has_its_own(tiny):
    with service(tiny.parent, *FROZEN, "--request-timeout 2") as process:
        with Raw(process, EDIT, "content-length: 1000", "x-request-timeout: 1") as slow:
            slow.refused(504, "deadline_passed", "within 1 s", connection="close")
        assert process.metric('linpix_deadlines_passed_total{state="reading"}') == 1
        bounded = generate(process, {"x-request-timeout": "100"})
        assert bounded.status_code == 504
        assert "within 2 s" in error_of(bounded)["message"]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "", "1_0"])
def test_an_invalid_deadline_is_refused_before_the_body_is_read(server, text):
    with Raw(server, EDIT, "content-length: 900000", f"x-request-timeout: {text}") as refused:
        status, _, error = refused.answer()
    assert (status, error["param"]) == (400, "X-Request-Timeout")
    assert f"seconds greater than 0, got '{text}'" in error["message"]


# --- classes ---


def test_bulk_that_fills_its_part_of_the_queue_does_not_shut_others_out(tiny):
    with (
        service(tiny.parent, *PACED, "--slots 1 --max-queue 4") as process,
        ThreadPoolExecutor(5) as pool,
    ):
        asked = [pool.submit(complete, process, 0, priority="bulk")]
        assert eventually(lambda: slots_used(process) == 1)
        asked += [pool.submit(complete, process, 7, priority="bulk", n=3)]
        assert eventually(lambda: waiting(process, "bulk") == 3)
        refused = generate(process, priority="bulk")
        assert (
            "3 images are already waiting, and 1 more would exceed the limit of 3"
            in error_of(refused)["message"]
        )
        asked += [pool.submit(complete, process, 7)]
        assert [future.result().status_code for future in asked] == [200] * 3
        assert error_of(generate(process, priority="bulk", n=5))["param"] == "n"
