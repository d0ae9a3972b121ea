"""What one client's large answers cost another client, and the server's memory.

    python -m tools.benchmarks.neighbours [--trees FOLDER,FOLDER] [--streams 16,32] [--rounds 5]

The first table: how long a draw and an edit of one client take, alone and beside streams of another
client, each of one image of 2044 x 2044 as WebP. The second: memory while four answers of up to
64 MiB are not read, and 30 s after their clients left. --trees: checkouts to compare; default: this
one. Processor seconds are the whole server's, from the request to its answer: other programs do not
add to them, but the streams do. They are beside the seconds of the clock.
"""

import contextlib
import io
import json
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

from tools.benchmarks.restart import processor_seconds
from tools.harness.arguments import new_parser, numbers, words
from tools.harness.servers import ROOT, Process, serving

STREAM = {"size": "2044x2044", "output_format": "webp", "stream": True}
NOISE, LEFT_S = 1000, 30.0
WARM_S = 8.0  # of the processor, after which encoding and not drawing is what the streams wait for


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--trees", type=words, default=[str(ROOT)])
    parser.add_argument("--streams", type=numbers, default=[16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(
        "| tree | streams | draw, s | processor | edit, s | processor |\n|---|---|---|---|---|---|"
    )
    for streams in (0, *given.streams):
        for tree in given.trees:
            with served(tree) as server, streaming(server, streams):
                rounds = [timed(server, draw) + timed(server, edit) for _ in range(given.rounds)]
                medians = np.median(rounds, axis=0)
            print(f"| {tree} | {streams} |", *(f"{median:.2f} |" for median in medians), flush=True)
    print("\n| tree | answers | before, MiB | unread | 30 s after |\n|---|---|---|---|---|")
    for tree in given.trees:
        with served(tree) as server:
            print(f"| {tree} |", unread(server), flush=True)


@contextlib.contextmanager
def served(tree: str) -> Iterator[Process]:
    """`linpix serve` of a checkout, warmed up."""
    # safe path: not the linpix of this folder
    variables = ("env", f"PYTHONPATH={tree}", "PYTHONSAFEPATH=1", "OMP_WAIT_POLICY=PASSIVE")
    with serving(Path(tree) / "checkpoints", "--models", "mnist-small", before=variables) as server:
        for ask in (draw, edit):
            ask(server)
        yield server


def timed(server: Process, ask: Callable[[Process], httpx.Response]) -> tuple[float, float]:
    """Seconds of one request by the clock, and of the server's processor."""
    pid = server.process.pid
    began, used = time.monotonic(), processor_seconds(pid)
    ask(server).raise_for_status()
    return time.monotonic() - began, processor_seconds(pid) - used


def draw(server: Process) -> httpx.Response:
    return httpx.post(server.url + "/v1/images/generations", json={}, timeout=600)


def edit(server: Process, picture: bytes = b"", **fields: str) -> httpx.Response:
    files = {"image": ("a.png", picture or noise(28))}
    fields = fields or {"keep_rows": "14"}
    return httpx.post(server.url + "/v1/images/edits", data=fields, files=files, timeout=600)


def noise(side: int) -> bytes:
    """A picture that does not compress, with a small hole, as a PNG."""
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 4), np.uint8)
    pixels[..., 3] = 255
    pixels[side // 2 :, side // 2 : side // 2 + 20, 3] = 0 if side > 28 else 255
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png", compress_level=1)
    return file.getvalue()


@contextlib.contextmanager
def streaming(server: Process, streams: int) -> Iterator[None]:
    """Another client, which has so many streams all the time."""
    ended, body = threading.Event(), json.dumps(STREAM).encode()
    where = urllib.parse.urlsplit(server.url)
    head = (
        f"POST /v1/images/generations HTTP/1.1\r\nhost: {where.netloc}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )

    def ask() -> None:
        while not ended.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(
                    (where.hostname, where.port), 1, source_address=("127.0.0.2", 0)
                ) as connection,
            ):
                connection.sendall(head.encode() + body)
                received = b"first"
                while received and not ended.is_set():
                    with contextlib.suppress(TimeoutError):
                        received = connection.recv(2**16)

    threads = [threading.Thread(target=ask) for _ in range(streams)]
    for thread in threads:
        thread.start()
    warm_s = processor_seconds(server.process.pid) + WARM_S
    while streams and processor_seconds(server.process.pid) < warm_s:
        time.sleep(0.1)
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def unread(server: Process) -> str:
    """The memory of answers that clients do not read."""
    request = httpx.Request(
        "POST",
        server.url + "/v1/images/edits",
        data={"lay_back": "true", "n": "14"},
        files={"image": ("a.png", noise(NOISE))},
        headers={"connection": "close"},
    )
    where = urllib.parse.urlsplit(server.url)
    lines = [f"{name}: {value}\r\n" for name, value in request.headers.items()]
    sent = f"POST /v1/images/edits HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + request.read()
    before, statuses = resident_mib(server), list[str]()
    with contextlib.ExitStack() as held:
        clients = []
        for number in (3, 3, 4, 5):  # two of one client
            client = socket.create_connection(
                (where.hostname, where.port), 600, source_address=(f"127.0.0.{number}", 0)
            )
            clients.append(held.enter_context(client))
            client.sendall(sent)
        statuses = [client.recv(12).decode()[9:] for client in clients]
        time.sleep(2)
        held_mib = resident_mib(server)
    time.sleep(LEFT_S)
    after = resident_mib(server)
    return f"{' '.join(statuses)} | {before:.0f} | {held_mib:.0f} | {after:.0f} |"


def resident_mib(server: Process) -> float:
    """Memory of a server's process."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
