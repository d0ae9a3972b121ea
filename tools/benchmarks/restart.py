"""How soon a service is ready again after SIGKILL: from the new process's start until /readyz
answers 200.

    python -m tools.benchmarks.restart [--rounds 5] [flags of linpix serve]

Each round asks for images in a stream, kills the server in the middle of them, and starts it again
on the same port. Without --models all shipped checkpoints are served. The processor's seconds,
which other work does not add to, are told where the system has /proc.
"""

import contextlib
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tools.harness.arguments import new_parser


def processor_seconds(pid: int) -> float:
    """That a process has taken so far; NaN where there is no /proc."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return math.nan


def ready_after(command: list[str], url: str) -> tuple[subprocess.Popen[bytes], float]:
    """A new process, and the seconds until it was ready."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url + "/readyz", timeout=5, verify=False).status_code == 200:
                return process, time.perf_counter() - began
        time.sleep(0.01)
    raise RuntimeError(f"the server ended with {process.returncode}: {' '.join(command)}")


def kill_at_work(process: subprocess.Popen[bytes], url: str) -> None:
    with (
        contextlib.suppress(httpx.TransportError),
        httpx.stream(
            "POST", url + "/v1/images/generations", json={"n": 16, "stream": True}, timeout=60
        ) as stream,
    ):
        for _ in stream.iter_lines():
            process.send_signal(signal.SIGKILL)
    process.kill()
    process.wait()


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    given, flags = parser.parse_known_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "linpix", "serve", "--port", str(port), *flags]
    process, first = ready_after(command, url)
    served = [card["id"] for card in httpx.get(url + "/v1/models").json()["data"]]
    seconds: list[float] = []
    processor: list[float] = []
    try:
        for _ in range(given.rounds):
            kill_at_work(process, url)
            process, again = ready_after(command, url)
            seconds.append(again)
            processor.append(processor_seconds(process.pid))
    finally:
        process.kill()
        process.wait()
    print(
        f"{', '.join(served)}: first start {first:.2f} s; ready again after SIGKILL in"
        f" {statistics.median(seconds):.2f} s (median of {len(seconds)},"
        f" {min(seconds):.2f}..{max(seconds):.2f}), {statistics.median(processor):.2f} s of a"
        " processor"
    )


if __name__ == "__main__":
    main()
