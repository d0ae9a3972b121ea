"""The way of a request: `python -m tools.way` lists our functions that run for one image, and for
one edit, by file.

It serves two shipped models in this process, and records all calls on all threads after two
requests of a kind. So what runs once, at the start, is not counted; nor are comprehensions and
lambdas. `--json` prints one object. It imports nothing of ours before calls can be noted.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

from tools.harness.client import FORM, form

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("server", "linpix", "model")
# the longest time to start; from an answer until its connection is forgotten
START_S, SETTLED_S = 600.0, 0.25

calls: set[CodeType] | None = None  # of the request that is recorded


def note(frame: FrameType, event: str, _: object) -> None:
    if calls is not None and event == "call":
        calls.add(frame.f_code)


def way_of(codes: set[CodeType]) -> dict[str, list[str]]:
    """Names of functions by file, of ours alone."""
    found: dict[str, list[str]] = {}
    for code in codes:
        file = os.path.relpath(os.path.realpath(code.co_filename), ROOT)
        if file.split(os.sep)[0] in ROOMS and not code.co_name.startswith("<"):
            found.setdefault(file, []).append(code.co_qualname)
    return {file: sorted(names) for file, names in sorted(found.items())}


def ask(port: int, path: str, body: bytes, kind: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    connection.request("POST", path, body, {"content-type": kind, "accept": "image/png"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status == 200 and content.startswith(b"\x89PNG"), content
    return content


def recorded(port: int, path: str, body: bytes, kind: str) -> dict[str, list[str]]:
    global calls
    for _ in range(2):
        ask(port, path, body, kind)
        time.sleep(SETTLED_S)
    calls = codes = set()
    ask(port, path, body, kind)
    time.sleep(SETTLED_S)
    calls = None
    return way_of(codes)


def requests(port: int) -> dict[str, dict[str, list[str]]]:
    """The way of each kind of request."""
    image = json.dumps({"model": "mnist-small", "label": 7, "seed": 1}).encode()
    picture = ask(port, "/v1/images/generations", image, "application/json")
    edit = form({"image": picture, "model": b"mnist-small", "keep_rows": b"14", "seed": b"1"})
    return {
        "image": recorded(port, "/v1/images/generations", image, "application/json"),
        "edit": recorded(port, "/v1/images/edits", edit, FORM),
    }


def client(port: int) -> None:
    """Send the requests to the server of this process, print their ways, and end the server."""
    try:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            with (
                contextlib.suppress(ConnectionRefusedError),
                socket.create_connection(("127.0.0.1", port)),
            ):
                break
            time.sleep(0.1)
        show(requests(port))
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def show(ways: dict[str, dict[str, list[str]]]) -> None:
    if "--json" in sys.argv:
        print(json.dumps(ways))
        return
    for request, way in ways.items():
        for room in ROOMS:
            files = {file: names for file, names in way.items() if file.startswith(room)}
            print(
                f"{request}: {sum(map(len, files.values()))} functions in {len(files)} files of"
                f" {room}/"
            )
        for file, names in way.items():
            print(f"  {file} ({len(names)}): {', '.join(names)}")


def serve() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threading.Thread(target=client, args=(port,), daemon=True).start()
    sys.setprofile(note)
    threading.setprofile(note)
    from linpix.__main__ import main

    # no check of the watchdog falls into a request
    return main(
        [
            "serve",
            f"--port={port}",
            "--models=mnist-small",
            f"--checkpoints={ROOT / 'checkpoints'}",
            "--engine=compiled",
            "--device=cpu",
            "--watchdog-timeout=86400",
        ]
    )


if __name__ == "__main__":
    sys.exit(serve())
