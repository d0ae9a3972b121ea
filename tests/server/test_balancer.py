"""The real nginx with deploy/nginx.conf in front of two real servers, one of which is killed."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.server.test_listening import free_port
from tools.harness.commands import ROOT, ran
from tools.harness.servers import HANG_S, eventually, fetch, serving

CONFIG = (ROOT / "deploy/nginx.conf").read_text()
GENERATIONS = "/v1/images/generations"
# an image takes four seconds, but next to nothing of the processor
FLAGS = "--faults slow:every=1:ms=60 --trusted-proxies 127.0.0.1 --allowed-hosts images.test"


@contextlib.contextmanager
def nginx(folder: Path, *urls: str, limit: int = 100) -> Iterator[str]:
    """nginx as the shipped configuration has it, but for ports and paths, and the limit of requests
    of a client; gives its address."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed; on Debian and Ubuntu: apt-get install nginx-light")
    port, text = free_port(), CONFIG
    assert text.count("listen 8080;") == 1
    for old, new in (
        ("listen 8080;", f"listen 127.0.0.1:{port};"),
        ("/var/log/nginx/linpix.log", f"{folder}/linpix.log"),
        ("limit_conn linpix_clients 100;", f"limit_conn linpix_clients {limit};"),
        *(
            (f"127.0.0.1:800{number}", url.removeprefix("http://"))
            for number, url in enumerate(urls, 1)
        ),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "linpix.conf").write_text(text)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;"
        f"events {{}} http {{ {temporary} include {folder}/linpix.conf; }}"
    )
    command = f"nginx -p {folder} -c {folder}/nginx.conf"
    checked = ran(command, "-t")
    assert checked.returncode == 0, checked.stderr
    process = subprocess.Popen(command.split(), stderr=subprocess.DEVNULL)
    try:
        assert eventually(
            lambda: (folder / "pid").exists() and bool((folder / "pid").read_text().strip())
        )
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGQUIT)  # it finishes what it has begun
        try:
            process.wait(HANG_S)
        finally:
            process.kill()


def ask(url: str, *, seed: int, stream: bool = False, n: int = 1) -> SimpleNamespace:
    """One answer: its status, its bytes in base64 if it came whole, the events of a stream, and
    whether it was cut.
    """
    answer = SimpleNamespace(status=0, image=None, events=[], cut=False, headers=httpx.Headers())
    body = {"seed": seed, "stream": stream, "partial_images": 3}
    try:
        with httpx.stream(
            "POST",
            url + GENERATIONS,
            json=body if stream else {"seed": seed, "n": n},
            timeout=HANG_S,
            headers={"host": "images.test"},
        ) as response:
            answer.status, answer.headers = response.status_code, response.headers
            if not stream or response.status_code != 200:
                answer.body = json.loads(response.read())
                answer.image = (
                    answer.body["data"][0]["b64_json"] if response.status_code == 200 else None
                )
                return answer
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    answer.events.append(json.loads(line.removeprefix("data: ")))
            if answer.events[-1]["type"] == "image_generation.completed":
                answer.image = answer.events[-1]["b64_json"]
    except httpx.RemoteProtocolError:
        answer.cut = True
    return answer


@pytest.mark.slow
def test_one_of_two_servers_is_killed_under_load_and_every_request_is_answered(tiny, tmp_path):
    flags = f"{FLAGS} --slots 8"
    with (
        serving(tiny.parent, flags) as first,
        serving(tiny.parent, flags) as second,
        nginx(tmp_path, first.url, second.url) as url,
    ):
        todo, lock, answers = iter(range(60)), threading.Lock(), {}

        def client(_: int) -> None:
            while True:
                with lock:
                    seed = next(todo, None)
                if seed is None:
                    return
                answers[seed] = ask(url, seed=seed, stream=seed % 2 == 0)

        def running(server: Any) -> int:
            return int(server.metric("linpix_requests_running"))

        with ThreadPoolExecutor(10) as pool:
            clients = [pool.submit(client, number) for number in range(10)]
            assert eventually(
                lambda: len(answers) > 10 and running(first) >= 3 and running(second) >= 3
            )
            first.process.kill()
            for one in clients:
                one.result()
        assert len(answers) == 60
        plain = {seed: answer for seed, answer in answers.items() if seed % 2}
        streamed = {seed: answer for seed, answer in answers.items() if not seed % 2}
        assert all(answer.status == 200 and answer.image for answer in plain.values()), (
            "drawn again elsewhere"
        )
        cut = [answer for answer in streamed.values() if answer.image is None]
        assert len(cut) <= 10 and all(answer.cut for answer in cut), (
            "the client of a stream that broke can see it"
        )
        assert all(answer.status == 200 for answer in streamed.values())
        log = (tmp_path / "linpix.log").read_text()
        assert re.search(r"\(502, 200\) x-request-id [0-9a-f]{32}$", log, re.M), (
            "some were handed on"
        )
        for seed in (1, 2, 59, 58):  # whichever server drew it
            if answers[seed].image:
                assert ask(second.url, seed=seed).image == answers[seed].image
        assert eventually(lambda: second.quiet("tiny"))


@pytest.mark.slow
def test_events_pass_at_once_ids_and_retry_after_are_kept_and_a_client_that_leaves_is_noticed(
    tiny, tmp_path
):
    flags = f"{FLAGS} --slots 1 --max-queue 16"
    with serving(tiny.parent, flags) as only, nginx(tmp_path, only.url, only.url) as url:
        drawn = 'linpix_images_completed_total{backend="linear",model="tiny",outcome="completed"}'
        with httpx.stream(
            "POST",
            url + GENERATIONS,
            json={"seed": 1, "n": 16, "stream": True, "partial_images": 0},
            headers={"x-request-id": "mine", "traceparent": f"00-{'1' * 32}-{'1' * 16}-01"},
            timeout=HANG_S,
        ) as stream:
            assert eventually(lambda: only.metric(drawn) >= 1)
            # it sends nothing more: the event must be here, or on its way
            only.process.send_signal(signal.SIGSTOP)
            try:
                lines = stream.iter_lines()  # kept: without it the client would leave here
                while not (first := next(lines)).startswith("data: "):
                    pass
            finally:
                only.process.send_signal(signal.SIGCONT)
            assert json.loads(first.removeprefix("data: "))["type"] == "image_generation.completed"
            assert re.fullmatch("[0-9a-f]{32}", stream.headers["x-request-id"]), (
                "nginx's, not the client's"
            )
            assert "traceparent" not in stream.headers
            with httpx.stream(
                "POST", url + GENERATIONS, json={"seed": 2, "stream": True}, timeout=HANG_S
            ):
                assert only.becomes("linpix_requests_waiting", 1)
                full = ask(url, seed=3, n=16)
                assert (
                    full.status == 429
                    and int(full.headers["retry-after"]) >= 1
                    and full.body["error"]["code"]
                )
        assert eventually(lambda: only.quiet("tiny")), "both have left"
        log = (tmp_path / "linpix.log").read_text()
        assert f"x-request-id {stream.headers['x-request-id']}" in log and "(429)" in log
        assert eventually(
            lambda: any(
                f"request_id={stream.headers['x-request-id']}" in line for line in only.printed
            )
        )


@pytest.mark.slow
def test_a_draining_server_hands_on_and_where_there_is_none_nginx_says_when_to_try_again(
    tiny, tmp_path
):
    flags = f"{FLAGS} --slots 4"
    with (
        serving(tiny.parent, flags) as first,
        serving(tiny.parent, flags) as second,
        nginx(tmp_path, first.url, second.url) as url,
        ThreadPoolExecutor(8) as pool,
    ):
        begun = [pool.submit(ask, url, seed=seed) for seed in range(8)]
        assert eventually(
            lambda: (
                min(server.metric("linpix_requests_running") for server in (first, second)) >= 2
            ),
        )
        first.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: first.get("/readyz").status_code == 503)
        later = [ask(url, seed=seed) for seed in range(20, 24)]
        assert all(answer.result().status == 200 for answer in begun), (
            "what it had begun it has finished"
        )
        assert all(answer.status == 200 for answer in later)
        assert first.process.wait(HANG_S) == 0
        waiting = pool.submit(ask, url, seed=30)
        assert second.becomes("linpix_requests_running", 1)
        second.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: second.get("/readyz").status_code == 503)
        refused = ask(url, seed=31)
        assert refused.status == 503 and refused.headers["retry-after"] == "5"
        assert waiting.result().status == 200
        second.process.wait(HANG_S)
        time.sleep(0.1)
        nobody = ask(url, seed=32)
        assert (nobody.status, nobody.headers["retry-after"], nobody.body["error"]["code"]) == (
            503,
            "5",
            "unreachable",
        )
        assert (
            nobody.headers["x-request-id"] and nobody.headers["content-type"] == "application/json"
        )


@pytest.mark.slow
def test_comparisons_stay_on_one_server_and_metrics_are_not_shown(tiny, tmp_path):
    with (
        serving(tiny.parent, FLAGS) as first,
        serving(tiny.parent, FLAGS) as second,
        nginx(tmp_path, first.url, second.url) as url,
    ):
        begun = fetch(url + "/v1/compare", "POST", json={"batch": [1], "budget": 1})
        assert begun.status_code == 202, begun.text
        found = [fetch(f"{url}/v1/compare/{begun.json()['id']}").status_code for _ in range(6)]
        assert found == [200] * 6
        assert fetch(f"{url}/v1/compare/{begun.json()['id']}", "DELETE").is_success
        assert fetch(url + "/metrics").status_code == 404
        assert fetch(url + "/v1/models").json()["data"][0]["id"] == "tiny"


@pytest.mark.slow
def test_a_client_with_too_many_requests_at_once_is_told_so_in_the_envelope(tiny, tmp_path):
    with (
        serving(tiny.parent, FLAGS) as only,
        nginx(tmp_path, only.url, only.url, limit=2) as url,
        ThreadPoolExecutor(2) as pool,
    ):
        begun = [pool.submit(ask, url, seed=seed) for seed in range(2)]
        assert only.becomes("linpix_requests_running", 2)
        refused = ask(url, seed=3)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.body["error"]["code"] == "client_limit"
        assert [one.result().status for one in begun] == [200, 200]
        assert ask(url, seed=3).status == 200
