"""Limits, disconnecting clients and shutdown, against real server processes."""

import base64
import dataclasses
import re
import resource
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urljoin

import httpx
import pytest
from fastapi.testclient import TestClient

from linpix.model.config import PRESETS
from linpix.server.app import create_app
from linpix.server.compare.backends import ATTENTION
from linpix.server.pictures import encode
from linpix.server.settings import Settings
from linpix.server.web.routes import images
from tests.linpix.test_main import linpix, succeeds
from tests.nets import saved
from tests.server.web.routes.test_images import (
    assert_refused,
    events_of,
    generate,
    message_of,
    refusal,
)
from tests.server.web.test_keys import bearer, line, private
from tools.harness.servers import eventually, here, serving


def test_every_route_and_method_that_is_not_there_answers_the_envelope(client):
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/v1/images/generations", 405),
        ("DELETE", "/metrics", 405),
        ("GET", "/v1/models/big", 404),
        ("GET", "/v1/compare/none", 404),
        ("PUT", "/", 405),
        ("GET", "/static/nothing.js", 404),
        ("GET", "/v1/images", 404),
    ):
        answer = client.request(method, path)
        assert answer.status_code == status, path
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]


def test_a_slash_at_the_end_of_a_path_is_too_many_wherever_a_proxy_serves_it(client):
    for asked, found in (
        ("/v1/models/", "../models"),
        ("/docs/", "../docs"),
        ("/%0d%0ax:y/", "../%0D%0Ax%3Ay"),
        ("/v1/models/a%20b/?c=d", "../a%20b?c=d"),
    ):
        answer = client.get(asked)
        assert (answer.status_code, answer.headers["location"]) == (307, found)
    assert client.post("/v1/images/generations/", json={}, follow_redirects=True).status_code == 200


@pytest.mark.parametrize(
    "removed", [False, True], ids=["the proxy keeps the path", "the proxy removes the path"]
)
def test_all_is_found_under_the_path_of_a_proxy(tiny, removed):
    with here(tiny.parent, root_path="/pix/") as server, server.client() as client:

        def ask(url: str) -> httpx.Response:
            assert url.startswith("/pix/"), f"{url} is not under the path"
            return client.get(url.removeprefix("/pix" if removed else ""))

        for page in ("/pix/", "/pix/docs"):
            links = re.findall(r'(?:href|src)="([^"#]+)"|fetch\("([^"]+)"', ask(page).text)
            assert len(links) > 3
            for link in ("".join(pair) for pair in links):
                if not link.startswith("https://"):
                    assert ask(urljoin(page, link)).status_code == 200, link
        assert client.post("/pix/v1/images/generations", json={}).status_code == 200
        assert client.get("/pix").headers["location"] == "pix/"
        assert client.get("/pixels/v1/models").status_code == 404
        [base] = ask("/pix/openapi.json").json()["servers"]
        assert ask(urljoin("/pix/openapi.json", f"{base['url']}/v1/models")).status_code == 200


def test_a_path_of_a_proxy_does_not_lead_past_the_keys(tiny, tmp_path):
    path = private(tmp_path / "keys", line("alice", "secret"))
    with here(tiny.parent, root_path="/pix", api_keys=path) as server, server.client() as client:
        assert client.get("/pix/v1/models").status_code == 401
        assert client.get("/pix/v1/models", headers=bearer("secret")).status_code == 200


def test_HEAD_is_answered_as_GET_is(client):
    for path in (
        "/",
        "/docs",
        "/healthz",
        "/readyz",
        "/static/page.js",
        "/v1/models",
        "/v1/status",
        "/metrics",
        "/openapi.json",
        "/v1/models/nothing",
    ):
        asked, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (asked.status_code, b"")
        assert head.headers["content-type"] == asked.headers["content-type"]


def test_a_405_names_every_method_that_is_allowed(client):
    for path, allowed in (
        ("/v1/compare/cmp-1", "DELETE, GET, HEAD"),
        ("/v1/models/tiny", "GET, HEAD"),
        ("/healthz", "GET, HEAD"),
        ("/openapi.json", "GET, HEAD"),
        ("/static/page.js", "GET, HEAD"),
        ("/", "GET, HEAD"),
        ("/v1/images/edits", "POST"),
    ):
        answer = client.put(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert f"allowed: {allowed}" in message_of(answer)


def test_metrics_are_compressed_if_asked(client):
    for asked, coding in (
        ("gzip, deflate, br", "gzip"),
        ("br;q=1.0, GZIP;q=0.5", "gzip"),
        ("gzip;q=0, identity", None),
        ("", None),
    ):
        answer = client.get("/metrics", headers={"accept-encoding": asked})
        assert answer.headers.get("content-encoding") == coding
        assert answer.headers["vary"] == "accept-encoding"
        assert "linpix_requests_running 0.0" in answer.text


@pytest.mark.slow
def test_without_open_files_a_first_visit_is_told_to_come_again(tiny):
    """The first request may need more than later ones, as modules that are imported for it."""
    with serving(tiny.parent) as server, server.client() as client:
        assert client.get("/healthz").status_code == 200  # this connection stays
        files = resource.RLIMIT_NOFILE
        before = resource.prlimit(server.process.pid, files)
        resource.prlimit(server.process.pid, files, (4, before[1]))
        for path in ("/", "/docs", "/static/page.js"):
            answer = client.get(path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert answer.json()["error"]["code"] == "resources_exhausted"
        assert generate(client).status_code == 200
        resource.prlimit(server.process.pid, files, before)
        assert client.get("/").status_code == 200


def test_poison_reaches_the_decoder(tiny):
    requests = create_app(Settings(checkpoints=tiny.parent, poison=True)).state.service.requests
    assert [
        model.engine.decoder.fill_freed_with_nan for model in requests.drawer.models.values()
    ] == [True]


def test_an_unexpected_failure_is_500_with_its_request_id(tiny):
    app = create_app(Settings(checkpoints=tiny.parent))

    @app.get("/broken")
    async def broken():
        raise RuntimeError("injected")

    with TestClient(app, base_url="http://localhost") as client:
        answer = client.get("/broken")
    assert refusal(answer) == (500, "internal_error")
    assert answer.headers["x-request-id"] in message_of(answer)


def test_a_bug_while_images_are_queued_is_counted_as_a_failed_request_and_bad_input_is_not(
    tiny, monkeypatch
):
    app = create_app(Settings(checkpoints=tiny.parent))
    metrics = app.state.service.requests.metrics

    def counted() -> float:
        return metrics.values("linpix_requests_total")[
            "linpix_requests_total", "generations", "failed"
        ]

    with TestClient(app, base_url="http://localhost") as client:
        for body, status in (
            ({"n": "one"}, 400),
            ({"n": 0}, 400),
            ({"label": "ten"}, 400),
            ({"model": "none"}, 404),
        ):
            assert generate(client, **body).status_code == status
        assert counted() == 0
        monkeypatch.setattr("linpix.server.engine.admission.images_of", None)
        assert generate(client).status_code == 500
        assert counted() == 1


@pytest.mark.parametrize("size", ["native", "1024x1024"])
def test_a_request_lasts_until_its_last_byte_is_made_and_so_does_its_deadline(
    tiny, monkeypatch, size
):
    encoded = encode.encoded

    def slowly(*arguments, **named):
        time.sleep(0.7)
        return encoded(*arguments, **named)

    monkeypatch.setattr(encode, "encoded", slowly)
    body = {"size": size, "partial_images": 0}
    with here(tiny.parent) as server, server.client() as client:
        assert generate(client, **body).status_code == 200
        assert (
            server.metric(
                'linpix_request_duration_seconds_sum{endpoint="generations",model="tiny"}'
            )
            > 0.7
        )
        assert generate(client, **body | {"timeout": 0.5}).status_code == 504
        answer = generate(client, **body | {"timeout": 0.5, "stream": True})
        assert [event["error"]["code"] for event in events_of(answer.text)] == ["deadline_passed"]
        assert server.metric('linpix_requests_total{endpoint="generations",outcome="failed"}') == 2


@pytest.mark.slow
@pytest.mark.kernels
def test_a_softmax_model_is_served_beside_a_linear_one_whatever_engine_that_is_to_have(
    tiny, tmp_path
):
    shutil.copytree(tiny, tmp_path / "tiny")
    saved(tmp_path / "soft", dataclasses.replace(PRESETS["tiny"], attention="softmax"))
    with (
        serving(tmp_path, "--engine compiled --precision bf16") as server,
        server.client() as client,
    ):
        listed = client.get("/v1/models").json()["data"]
        models = {model["id"]: (model["engine"], model["precision"]) for model in listed}
        assert models == {"tiny": ("compiled", "bf16"), "soft": ("eager", "fp32")}
        assert generate(client, model="soft").status_code == 200


@pytest.mark.kernels
def test_a_seed_gives_the_same_bytes_over_http_among_twenty_others_and_from_the_command_line(
    tiny, server, tmp_path
):
    with ThreadPoolExecutor(21) as pool, server.client() as client:
        bodies = [
            {"seed": 100 + i, "n": 1 + i % 3, "temperature": 0.5 + i / 20, "label": i % 10}
            for i in range(20)
        ]
        bodies.insert(11, {"seed": 77, "label": 3})
        answers = list(pool.map(lambda body: generate(client, **body), bodies))
    [served] = answers[11].json()["data"]
    succeeds(f"sample --model {tiny} --seed 77 --label 3 --out {tmp_path}/out")
    assert base64.b64decode(served["b64_json"]) == (tmp_path / "out/00000-77.png").read_bytes()


def test_the_models_are_listed_with_what_they_are(client):
    [card] = client.get("/v1/models").json()["data"]
    assert card == client.get("/v1/models/tiny").json()
    assert (card["id"], card["width"], card["state_bytes"], len(card["classes"])) == (
        "tiny",
        8,
        1152,
        10,
    )


def test_the_status_agrees_with_the_metrics(tiny):
    with here(tiny.parent, slots=5, max_queue=0, max_n=9) as server, server.client() as client:
        generate(client, n=3)
        generate(client, n="three")
        generate(client, n=6)
        at_rest = 'linpix_state_slots_used{model="tiny"}'
        assert eventually(
            lambda: server.metric(at_rest) == server.metric("linpix_requests_running") == 0
        )
        status = client.get("/v1/status").json()
        [model] = status["models"]
        labels = '{backend="linear",model="tiny"}'
        assert (model["id"], model["backend"], model["slots"], model["images_waiting"]) == (
            "tiny",
            "linear",
            5,
            0,
        )
        assert (
            model["images_completed"]
            == 3
            == server.metric(
                'linpix_images_completed_total{backend="linear",model="tiny",outcome="completed"}'
            )
        )
        assert (
            model["pixels_generated"]
            == 3 * 64
            == server.metric(f"linpix_pixels_generated_total{labels}")
        )
        assert model["quanta"] == server.metric(f"linpix_engine_step_seconds_count{labels}") > 0
        assert (
            model["step_seconds_sum"]
            == server.metric(f"linpix_engine_step_seconds_sum{labels}")
            > 0
        )
        assert status["rows_sum"] == server.metric("linpix_engine_step_batch_size_sum") > 0
        assert (
            status["requests_rejected"]["invalid"]
            == 2
            == server.metric('linpix_requests_rejected_total{reason="invalid"}')
        )
        assert f'kernel="{status["kernel"]}"' in client.get("/metrics").text
        assert (status["status"], status["comparison"], status["limits"]["max_n"]) == (
            "ready",
            None,
            5,
        )
        begun = client.post("/v1/compare", json={"budget": 60.0, "batch": [1]}).json()["id"]
        assert client.get("/v1/status").json()["comparison"] == {
            "id": begun,
            "model": "tiny",
            "status": "running",
        }
        client.delete(f"/v1/compare/{begun}")
        assert client.get("/v1/status").json()["comparison"]["status"] == "cancelled"
        assert 0 < status["uptime"] < client.get("/v1/status").json()["uptime"]


def test_sigterm_finishes_what_runs_and_refuses_what_comes_and_hangups_change_nothing(tiny):
    with (
        serving(tiny.parent, "--drain-timeout 300 --faults slow:every=1:ms=100") as server,
        ThreadPoolExecutor(2) as pool,
        server.client() as client,
    ):
        running = pool.submit(generate, client, n=2)
        streaming = pool.submit(generate, client, stream=True)
        assert server.becomes("linpix_requests_running", 2)
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: server.get("/readyz").status_code == 503)
        for refused in (
            generate(server),
            server.get("/v1/models"),
            server.get("/v1/models/tiny"),
        ):
            assert refusal(refused) == (503, "draining")
            assert refused.headers["retry-after"]
        assert server.get("/v1/status").json()["status"] == "draining"

        def ended() -> bool:
            server.process.send_signal(signal.SIGHUP)
            return server.process.poll() is not None

        assert eventually(ended) and server.process.returncode == 0
        assert len(running.result().json()["data"]) == 2
        assert events_of(streaming.result().text)[-1]["type"] == "image_generation.completed"
    assert not any("SIGHUP" in line for line in server.printed), "no checkpoint was read"


def test_a_comparison_runs_beside_requests_and_can_be_watched_and_stopped(tiny):
    with here(tiny.parent) as server, server.client() as client:
        begun = client.post("/v1/compare", json={"batch": [1, 2], "budget": 2.0})
        assert begun.status_code == 202
        at = f"/v1/compare/{begun.json()['id']}"
        again = client.post("/v1/compare", json={})
        assert again.status_code == 409
        assert generate(client).status_code == 200
        assert eventually(lambda: client.get(at).json()["status"] != "running")
        over = client.get(at).json()
        assert over["status"] == "completed", over["error"]
        assert {result["backend"] for result in over["report"]["results"]} == set(ATTENTION)
        assert over["progress"] == 1
        rates = {
            backend: server.metric(f'linpix_comparison_images_per_second{{backend="{backend}"}}')
            for backend in ATTENTION
        }
        measured = {
            result["backend"] for result in over["report"]["results"] if result["images_per_second"]
        }
        # those that were measured last may have had no time
        assert {backend for backend, rate in rates.items() if rate > 0} == measured
        second = f"/v1/compare/{client.post('/v1/compare', json={'budget': 60.0}).json()['id']}"
        watched: list[str] = []

        def watch():
            with client.stream("GET", second, headers={"accept": "text/event-stream"}) as stream:
                watched.extend(line for line in stream.iter_lines() if line.startswith("event:"))

        watching = threading.Thread(target=watch)
        watching.start()
        assert eventually(lambda: client.get(second).json()["report"] is not None)
        assert client.delete(second).json()["status"] == "cancelled"
        watching.join()
        assert watched[0] == "event: comparison.progress"
        assert watched[-1] == "event: comparison.cancelled"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"backends": ["lsh-2"]}, "backends", "lsh-1, lsh-4, got 'lsh-2'"),
        ({"budget": 1e3}, "budget", "at most 120"),
        ({"batch": [0]}, "batch.0", "got 0"),
        ({"speed": 1}, "speed", "got 1"),
    ],
)
def test_a_bad_comparison_is_refused(client, body, param, words):
    assert_refused(client.post("/v1/compare", json=body), param, words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--models big", "there is no model 'big'"),
        ("--slots 0", "--slots"),
        ("--slots x", "--slots"),
        ("--slots 10000000 --models SLOW", "lower --slots"),  # 629 GiB, at 66 KiB a slot
        ("--engine eager --precision bf16", "--precision fp32"),
        ("--state fp16", "leave the flag out"),
        ("--api-keys missing", "no such file can be found"),
        ("--faults burn:at=1", "--faults (LINPIX_FAULTS): 'burn:at=1': expected KIND:WHEN=N"),
        ("--watchdog-timeout 0", "--watchdog-timeout"),
        ("--checkpoints missing", "--checkpoints"),
        ("--host 'no such host'", "give an address"),
    ],
)
def test_a_setting_that_cannot_work_stops_the_server_before_it_listens(tiny, slow, flags, words):
    flags = flags.replace("SLOW", str(slow / "slow"))
    ended = linpix(f"serve --port 0 --checkpoints {tiny.parent} {flags}")
    assert ended.returncode == 2
    assert words in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_a_port_that_is_taken_is_said_in_a_line(tiny, server):
    port = server.url.rsplit(":", 1)[1]
    ended = linpix(f"serve --port {port} --checkpoints {tiny.parent}")
    assert ended.returncode == 2
    assert (
        ended.stderr
        == f"linpix serve: --host 127.0.0.1 and --port {port}: address already in use; choose"
        " another "
        "--port, or stop the program that listens there\n"
    )


@pytest.mark.slow
def test_a_model_with_lsh_attention_is_left_out_of_the_service_and_refused_by_name(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "tiny")
    saved(tmp_path / "hashed", dataclasses.replace(PRESETS["tiny"], attention="lsh"))
    with serving(tmp_path) as process, process.client() as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
    message = "hashed has lsh attention, which cannot draw images; leave it out of --models"
    with pytest.raises(RuntimeError, match=message), serving(tmp_path, "--models hashed"):
        pass
    shutil.rmtree(tmp_path / "tiny")
    with pytest.raises(RuntimeError, match="no checkpoint that draws images"), serving(tmp_path):
        pass


def test_a_stream_that_is_silent_says_now_and_then_that_it_is_there(tiny, monkeypatch):
    monkeypatch.setattr(images, "PING_S", 0.05)
    body = {"stream": True, "partial_images": 0}
    with here(tiny.parent, faults="slow:at=1:ms=2000") as server, server.client() as client:
        text = generate(client, **body).text
    assert text.startswith(": ping\n\n: ping\n\n")
    assert [event["type"] for event in events_of(text)] == ["image_generation.completed"]
