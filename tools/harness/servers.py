"""Servers: real processes on a socket, and the application in this process."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tools.harness.commands import words_of

# The longest wait for anything. It only names what hangs: no outcome depends on how busy the
# machine is.
HANG_S = 300.0
EAGER = ("--engine", "eager")  # flags that make the checkpoint `slow` slow


def fetch(url: str, method: str = "GET", **options) -> httpx.Response:
    """One request on a connection of its own."""
    # reading certificates would take longest
    return httpx.request(method, url, timeout=HANG_S, verify=False, **options)


class Server:
    """What tests ask of a server, wherever it runs."""

    def get(self, path: str) -> httpx.Response:
        raise NotImplementedError

    def metric(self, name: str) -> float:
        """The value of one sample of /metrics, named with its labels."""
        text = self.get("/metrics").text
        [value] = [
            line.rsplit(" ", 1)[1] for line in text.splitlines() if line.rsplit(" ", 1)[0] == name
        ]
        return float(value)

    def becomes(self, name: str, value: float) -> bool:
        """Whether a metric comes to a value at all."""
        return eventually(lambda: self.metric(name) == value)

    def quiet(self, *models: str) -> bool:
        """Whether every gauge is back to 0, and these models' slots are free."""
        gauges = [
            "linpix_requests_running",
            "linpix_requests_waiting",
            "linpix_engine_heartbeat_age_seconds",
        ]
        gauges += [f'linpix_state_slots_used{{model="{model}"}}' for model in models]
        return all(self.metric(gauge) == 0 for gauge in gauges)


class Process(Server):
    """`linpix serve` and what it printed. before: words of a command that runs it, and becomes
    it.
    """

    def __init__(
        self,
        checkpoints: Path,
        *flags: str,
        before: Sequence[str] = (),
        program: Sequence[str] = ("-m", "linpix"),
        begun: Callable[[int], None] = lambda pid: None,
    ) -> None:
        """flags: one or several in a word, as a shell divides it · program: how Python is asked for
        it · begun: called while it starts.
        """
        serve = ["serve", "--port=0", f"--checkpoints={checkpoints}", *words_of(flags)]
        command = [*before, sys.executable, *program, *serve]
        environment = {
            name: value
            for name, value in os.environ.items()
            # a benchmark's own engine and its servers use the same kernels
            if not name.startswith("LINPIX_") or name == "LINPIX_KERNEL"
        }
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        begun(self.process.pid)
        self.printed: list[str] = []
        self.url = ""
        self._ready = threading.Event()  # it has printed its address, or ended
        # read on, so that the server never blocks on a full pipe
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        begins = self._ready.wait(HANG_S)
        if not self.url:
            self.process.kill()
            self.process.wait()
            late = "" if begins else f"it has not begun within {HANG_S:g} s"
            raise RuntimeError("".join(self.printed) + late)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.printed.append(line)
            found = re.search(r"at (https?://[^\s\"]+)", line)
            if found and not self.url:
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=HANG_S, **options)

    def get(self, path: str, **options) -> httpx.Response:
        return fetch(self.url + path, **options)

    def post(self, path: str, **options) -> httpx.Response:
        return fetch(self.url + path, "POST", **options)

    def delete(self, path: str) -> httpx.Response:
        return fetch(self.url + path, "DELETE")

    def connect(self) -> socket.socket:
        """A bare connection, which the test closes when it likes."""
        port = int(self.url.rsplit(":", 1)[1])
        return socket.create_connection(("127.0.0.1", port), timeout=HANG_S)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(HANG_S)
        finally:
            self.process.kill()
            self._reader.join()  # then all that it said is in printed


@contextlib.contextmanager
def serving(checkpoints: Path, *flags: str, **options) -> Iterator[Process]:
    process = Process(checkpoints, *flags, **options)
    try:
        yield process
    finally:
        process.stop()


class Here(Server):
    """The application in this process."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def get(self, path: str) -> httpx.Response:
        return self._client.get(path)

    def client(self) -> contextlib.AbstractContextManager[httpx.Client]:
        return contextlib.nullcontext(self._client)


@contextlib.contextmanager
def here(checkpoints: Path, **settings) -> Iterator[Here]:
    """For what needs no socket: it starts in a tenth of a second."""
    from fastapi.testclient import TestClient

    from linpix.server.app import create_app
    from linpix.server.settings import Settings

    app = create_app(Settings(checkpoints=checkpoints, **settings))
    with TestClient(
        app, base_url="http://localhost", client=("127.0.0.1", 5), follow_redirects=False
    ) as client:
        yield Here(client)


class Quiet(BaseHTTPRequestHandler):
    """Answers as a test says, and prints nothing."""

    def answer(
        self,
        body: bytes = b"",
        kind: str = "text/html",
        status: int = 200,
        length: int | None = None,
    ) -> None:
        """length: that it announces, if not the body's own."""
        if length is None:
            length = len(body)
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of somebody else's server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def when_possible(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """Ask, and again when the answer says: after a cancelled comparison there is a pause."""
    while True:
        answer = ask()
        if answer.status_code != 409 or "retry-after-ms" not in answer.headers:
            return answer
        time.sleep(int(answer.headers["retry-after-ms"]) / 1000)


def eventually(true: Callable[[], bool]) -> bool:
    """Whether something becomes true at all."""
    end = time.monotonic() + HANG_S
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
