"""Logs of a real server: one object per line, with the fields operators need, and without keys or
pictures.
"""

import base64
import io
import json
import logging
import os
import re
import select
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi.testclient import TestClient

from linpix.model import checkpoint
from linpix.server import logs
from linpix.server.app import create_app
from linpix.server.settings import Settings
from tests.server.web.routes.test_images import generate, occluded
from tests.server.web.test_keys import bearer, line, private
from tools.harness.servers import EAGER, Process, eventually, serving

pytestmark = pytest.mark.slow

KEY, OTHER, PROMPT, QUERY, PATH = (
    "lpx_the-key-of-the-test",
    "lpx_a-key-of-nobody",
    "a prompt of somebody's",
    "query-secret",
    "path-secret",
)


def use(server: Process) -> tuple[list, list[str]]:
    """Requests of many kinds; their answers, and what may not be in the log."""
    with server.client(headers=bearer(KEY)) as client:
        answers = [
            generate(client, prompt=PROMPT, n=2, seed=8172635),
            generate(client, prompt=PROMPT, n=0),
            generate(client, stream=True),
            client.post(
                "/v1/images/generations",
                content=b"{" + PROMPT.encode(),
                headers={"content-type": "application/json"},
            ),
            client.post(
                "/v1/images/edits",
                files={"image": ("picture-secret.png", occluded())},
                data={"prompt": PROMPT},
            ),
            client.post(
                "/v1/images/edits", files={"image": ("picture-secret.png", b"x" + occluded())}
            ),
            client.get(f"/v1/models?api_key={QUERY}"),
            client.get(f"/v1/models/{PATH}?api_key={QUERY}"),
            client.get(f"/{PATH}?api_key={QUERY}"),
            client.get("/v1/models", headers=bearer(OTHER)),
            client.get("/", headers={"host": f"{PATH}.example"}),
            generate(client, headers={"origin": f"https://{PATH}.example"}),
            client.get("/healthz", headers={"cookie": QUERY}),
            client.head("/healthz", headers={"cookie": QUERY}),
            client.get(f"/static/{PATH}"),
        ]
    assert [answer.status_code for answer in answers] == [
        200,
        400,
        200,
        400,
        200,
        415,
        200,
        404,
        404,
        401,
        403,
        403,
        200,
        200,
        404,
    ]
    picture = base64.b64encode(occluded()).decode()
    images = re.findall(r'"b64_json":\s*"([^"]+)"', "".join(answer.text for answer in answers))
    assert len(images) > 3
    return answers, [
        KEY,
        OTHER,
        PROMPT,
        QUERY,
        PATH,
        "-secret",
        "8172635",
        picture[20:60],
        *(image[:40] for image in images),
        *(image[-40:] for image in images),
    ]


@pytest.fixture(params=["json", "text"])
def logged(request, tiny, tmp_path) -> tuple[str, list, list[str], list[str]]:
    """The form of a log, the answers of a server, what it printed, and what may not be in it."""
    path = private(tmp_path / "keys", line("alice", KEY, "1000/s"))
    with serving(
        tiny.parent, f"--api-keys {path} --log-format {request.param} --log-level debug"
    ) as server:
        answers, forbidden = use(server)
        assert eventually(lambda: len(server.printed) > len(answers) + 1)
        server.stop()
    return request.param, answers, [text.rstrip("\n") for text in server.printed], forbidden


def test_every_request_is_a_line_of_the_log_and_none_has_a_secret_or_a_picture_in_it(logged):
    form, answers, printed, forbidden = logged
    for text in printed:
        for secret in forbidden:
            assert secret not in text
        assert not re.search(r"[A-Za-z0-9+/]{40}", text), text
    for answer in answers:
        assert sum(answer.headers["x-request-id"] in text for text in printed) == 1
    if form == "text":
        accesses = [text for text in printed if " linpix.access " in text]
        assert re.fullmatch(
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO linpix\.access "
            r"POST /v1/images/generations 200 request_id=[0-9a-f]{16} duration_s=[\d.e-]+ "
            r"client=alice model=tiny images=2",
            accesses[0],
        )
        assert len(accesses) == len(answers)
        return
    entries = [json.loads(text) for text in printed]
    assert entries[1]["message"].startswith("LinPix serves tiny at http://127.0.0.1:")
    entries = [entry for entry in entries if entry["logger"] == "linpix.access"]
    assert len(entries) == len(answers)
    for entry, answer in zip(entries, answers, strict=True):
        assert entry["request_id"] == answer.headers["x-request-id"]
        quiet = entry["route"] == "/healthz"
        assert (entry["status"], entry["method"]) == (answer.status_code, answer.request.method)
        assert entry["level"] == ("debug" if quiet else "info")
        assert 0 < entry["duration_s"] < 60
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["time"])
    generations, edits = "/v1/images/generations", "/v1/images/edits"
    assert [
        (entry["route"], entry["client"], entry["model"], entry["images"]) for entry in entries
    ] == [
        (generations, "alice", "tiny", 2),
        (generations, "alice", None, None),
        (generations, "alice", "tiny", 1),
        (generations, "alice", None, None),
        (edits, "alice", "tiny", 1),
        (edits, "alice", "tiny", 1),
        ("/v1/models", "alice", None, None),
        ("/v1/models/{model}", "alice", None, None),
        (None, "127.0.0.1", None, None),
        ("/v1/models", "127.0.0.1", None, None),
        ("/", "127.0.0.1", None, None),
        (generations, "127.0.0.1", None, None),
        *[("/healthz", "127.0.0.1", None, None)] * 2,
        ("/static", "127.0.0.1", None, None),
    ]


def test_what_is_asked_for_all_the_time_is_logged_at_level_debug_unless_it_fails(tiny):
    def routes(*flags: str) -> list[str]:
        with serving(tiny.parent, *flags) as server, server.client() as client:
            for path in (
                "/healthz",
                "/metrics",
                "/v1/status",
                "/static/page.js",
                "/static/nothing.js",
                "/",
                "/v1/models",
            ):
                client.get(path)
        return [" ".join(line.split()[1:6:2]) for line in server.printed if "linpix.access" in line]

    loud = ["INFO GET 404", "INFO GET 200", "INFO GET 200"]
    assert routes() == loud
    assert routes("--log-level", "debug") == ["DEBUG GET 200"] * 4 + loud
    assert routes("--log-level", "warning") == []


def test_a_server_says_what_it_is_and_how_it_ends(slow):
    flags = (*EAGER, "--slots", "2", "--drain-timeout", "500ms")
    with serving(slow, *flags) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, client, n=8)
        assert server.becomes("linpix_requests_running", 1)
        assert server.stop() == 0
        assert answer.result().status_code == 503
    said = [line.split(" linpix ")[1] for line in server.printed if " INFO linpix " in line]
    digest = checkpoint.digest_of(next(slow.iterdir()))[:16]
    assert re.match(r"LinPix \d[\d.]+, kernel eager: slow \(eager", said[0])
    assert said[0].endswith(f", fp32, cpu, checkpoint {digest})\n")
    assert said[1] == "SIGTERM: draining, for up to 0.5 s; requests in progress: 1\n"
    assert re.fullmatch(r"drained in 0\.\d s; requests that were not finished: 1\n", said[2])


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_ids_of_a_trusted_proxy_are_kept_sent_back_and_logged(tiny):
    sent = {"x-request-id": "edge-7f:1", "traceparent": TRACE}
    with serving(tiny.parent, "--trusted-proxies 127.0.0.1 --log-format json") as server:
        with server.client() as client:
            answers = [generate(client, headers=sent, n=n) for n in (1, 0)]
            odd = [
                client.get("/v1/models", headers={"x-request-id": id, "traceparent": trace})
                for id, trace in (
                    ("a b", TRACE.upper()),
                    ("x" * 129, TRACE.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32)),
                    ("-", f"{TRACE}-more"),
                    ('"', "ff" + TRACE[2:]),
                )
            ]
        server.stop()
    for answer in answers:
        assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == (
            "edge-7f:1",
            TRACE,
        )
    for answer in odd:
        assert (
            re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"])
            and "traceparent" not in answer.headers
        )
    lines = [json.loads(line) for line in server.printed if "linpix.access" in line]
    assert [(line["request_id"], line["traceparent"]) for line in lines[:2]] == [
        ("edge-7f:1", TRACE)
    ] * 2
    assert all(line["traceparent"] is None for line in lines[2:])


def test_an_id_that_a_request_in_progress_has_is_not_given_twice(slow):
    with serving(slow, *EAGER, "--trusted-proxies '*'") as server, server.client() as client:
        with ThreadPoolExecutor(2) as pool:
            both = list(
                pool.map(
                    lambda _: generate(client, headers={"x-request-id": "twice"}),
                    range(2),
                )
            )
        assert [answer.status_code for answer in both] == [200, 200]
        assert sorted(answer.headers["x-request-id"] == "twice" for answer in both) == [False, True]
        again = client.get("/v1/models", headers={"x-request-id": "twice"})
        assert again.headers["x-request-id"] == "twice"


def test_ids_of_others_are_not_believed(client):
    answer = client.get("/v1/models", headers={"x-request-id": "mine", "traceparent": TRACE})
    assert answer.headers["x-request-id"] != "mine" and "traceparent" not in answer.headers


def test_a_client_is_not_believed_where_it_comes_from_unless_its_proxy_is_trusted(tiny):
    for flags, client in (((), "127.0.0.1"), (("--trusted-proxies", "127.0.0.1"), "10.1.2.3")):
        with serving(tiny.parent, "--log-format json", *flags) as server:
            server.client().get("/v1/models", headers={"x-forwarded-for": "10.1.2.3"})
            assert eventually(lambda: len(server.printed) > 2)
        assert json.loads(server.printed[2])["client"] == client


def test_what_an_unexpected_exception_says_is_logged_without_keys_and_pictures(tiny):
    app = create_app(Settings(checkpoints=tiny.parent))
    picture = base64.b64encode(bytes(range(256))).decode()

    @app.get("/v1/broken/{secret}")
    async def broken(secret: str):
        raise RuntimeError(f"Bearer {secret} of lpx_abc-def sent {picture}")

    for form in ("text", "json"):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logs.Formatter(form))
        logging.getLogger("linpix").addHandler(handler)
        try:
            with TestClient(app, base_url="http://localhost") as client:
                answer = client.get("/v1/broken/path-secret")
        finally:
            logging.getLogger("linpix").removeHandler(handler)
        assert answer.status_code == 500
        text = stream.getvalue()
        assert "RuntimeError" in text and "in broken" in text
        assert answer.headers["x-request-id"] in text
        for secret in ("path-secret", "lpx_abc", picture[:60], picture[-60:]):
            assert secret not in text
        if form == "json":
            [entry] = [json.loads(each) for each in text.splitlines()]
            assert (entry["level"], entry["request_id"]) == (
                "error",
                answer.headers["x-request-id"],
            )
            assert "/v1/broken/{secret}" in entry["message"]
        app = create_app(Settings(checkpoints=tiny.parent))
        app.add_api_route("/v1/broken/{secret}", broken)


@pytest.mark.parametrize("fault", ["throw:image=5", "prefill:image=5", "die:at=1"])
def test_the_engines_lines_about_a_request_have_the_id_that_its_client_was_given(tiny, fault):
    with (
        serving(tiny.parent, f"--log-format json --faults {fault}") as server,
        server.client() as client,
    ):
        answer = generate(client, seed=5)
        assert answer.status_code == 500

        def found() -> list[str]:
            lines = [json.loads(text) for text in server.printed]
            return [
                line["message"]
                for line in lines
                if line.get("request_id") == answer.headers["x-request-id"]
                and line["logger"] == "linpix"
            ]

        assert eventually(lambda: any("a request of tiny failed" in message for message in found()))


def test_whatever_a_message_holds_it_is_one_record_of_the_text():
    record = logging.LogRecord(
        "linpix",
        logging.ERROR,
        __file__,
        1,
        "no tensor %s",
        ("a\n2026-11-21T00:00:00.000Z INFO linpix.access GET / 200\r\x1b[2J\u2028b",),
        None,
    )
    [first, second] = logs.Formatter("text").format(record).split("\n")
    assert first.endswith("ERROR linpix no tensor a")
    assert second == "    2026-11-21T00:00:00.000Z INFO linpix.access GET / 200\\r\\x1b[2J\\u2028b"
    assert json.loads(logs.Formatter("json").format(record))["message"].startswith(
        "no tensor a\n2026"
    )


def info(text: str) -> logging.LogRecord:
    return logging.LogRecord("linpix", logging.INFO, "", 0, text, (), None)


def test_logging_does_not_wait_for_a_stopped_reader_and_lost_lines_are_counted(monkeypatch):
    monkeypatch.setattr(logs, "MAX_LINES", 3_000)
    reading, writing = os.pipe()
    handler = logs.Lines(writing)
    # the first is several times what a pipe holds
    texts = ["x" * 2_000_000, *map(str, range(1, 5_000))]
    handler.handle(info(texts[0]))
    # until the pipe is full: no more is taken before somebody reads
    while select.select([], [writing], [], 0)[1]:
        time.sleep(0.001)
    for text in texts[1:]:
        handler.handle(info(text))
    with open(reading) as reader:
        assert [reader.readline() for _ in range(3_001)] == [f"{text}\n" for text in texts[:3_001]]
        handler.handle(info("heard again"))
        assert (
            reader.readline() == "1999 lines of this log are lost because the reader was too slow\n"
        )
        assert reader.readline() == "heard again\n"
    os.close(writing)


def test_a_closed_pipe_for_the_log_is_not_an_error():
    reading, writing = os.pipe()
    handler = logs.Lines(writing)
    os.close(reading)
    for _ in range(2):
        handler.emit(info("unheard"))
        handler.flush()
    os.close(writing)
