"""Which requests are accepted: hosts, pages of other sites in a real browser, headers, and the
probe port.
"""

import json
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from linpix.server.settings import Settings
from tests.server.web.routes.test_images import generate, message_of, occluded, refusal
from tests.server.web.test_keys import bearer, line, private
from tools.harness.servers import (
    EAGER,
    HANG_S,
    Process,
    Quiet,
    eventually,
    fetch,
    here,
    listening,
    serving,
)

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)

# --- what a page makes a browser send: headers as Chromium 156 sends them, but for the name of the
# page's origin ---

ELSEWHERE = "https://elsewhere.example"
SENT_BY_PAGES = {
    "fetch of JSON, asked about first": (
        "OPTIONS",
        "/v1/images/generations",
        {
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type",
            "origin": ELSEWHERE,
            "sec-fetch-mode": "cors",
            "sec-fetch-site": "cross-site",
            "sec-fetch-dest": "empty",
        },
    ),
    "fetch without cors, or a beacon": (
        "POST",
        "/v1/compare",
        {
            "content-type": "text/plain;charset=UTF-8",
            "origin": ELSEWHERE,
            "sec-fetch-site": "cross-site",
            "sec-fetch-mode": "no-cors",
            "sec-fetch-dest": "empty",
        },
    ),
    "form": (
        "POST",
        "/v1/images/edits",
        {
            "content-type": "multipart/form-data; boundary=x",
            "origin": ELSEWHERE,
            "upgrade-insecure-requests": "1",
            "sec-fetch-site": "cross-site",
            "sec-fetch-mode": "navigate",
            "sec-fetch-dest": "iframe",
        },
    ),
    "form of a page of another port": (
        "POST",
        "/v1/images/edits",
        {
            "content-type": "multipart/form-data; boundary=x",
            "origin": "http://127.0.0.1:5173",
            "sec-fetch-site": "same-site",
            "sec-fetch-mode": "navigate",
            "sec-fetch-dest": "document",
        },
    ),
    "form of a sandboxed frame": (
        "POST",
        "/v1/images/edits",
        {
            "content-type": "application/x-www-form-urlencoded",
            "origin": "null",
            "sec-fetch-site": "cross-site",
            "sec-fetch-mode": "navigate",
            "sec-fetch-dest": "iframe",
        },
    ),
    "image": (
        "GET",
        "/v1/compare/cmp-1",
        {
            "accept": "image/avif,image/webp,image/apng,*/*;q=0.8",
            "sec-fetch-site": "cross-site",
            "sec-fetch-mode": "no-cors",
            "sec-fetch-dest": "image",
        },
    ),
    "script of a page of another port": (
        "GET",
        "/v1/models",
        {
            "accept": "*/*",
            "sec-fetch-site": "same-site",
            "sec-fetch-mode": "no-cors",
            "sec-fetch-dest": "script",
        },
    ),
    "event source": (
        "GET",
        "/v1/compare/cmp-1",
        {
            "accept": "text/event-stream",
            "origin": ELSEWHERE,
            "sec-fetch-site": "cross-site",
            "sec-fetch-mode": "cors",
            "sec-fetch-dest": "empty",
        },
    ),
    "a browser that says nothing of the site": (
        "POST",
        "/v1/images/generations",
        {"content-type": "text/plain", "origin": ELSEWHERE},
    ),
    "a DELETE": ("DELETE", "/v1/compare/cmp-1", {"origin": ELSEWHERE}),
}


@pytest.mark.parametrize("name", SENT_BY_PAGES)
def test_what_a_page_of_another_origin_sends_is_refused_with_an_envelope(server, name):
    method, path, headers = SENT_BY_PAGES[name]
    before = server.metric('linpix_requests_rejected_total{reason="foreign_origin"}')
    with server.client() as client:
        answer = client.request(
            method, path, headers=headers, content=b"{}" if method == "POST" else None
        )
    assert refusal(answer) == (403, "foreign_origin")
    assert "--allowed-origins" in message_of(answer)
    assert "access-control-allow-origin" not in answer.headers
    assert server.metric('linpix_requests_rejected_total{reason="foreign_origin"}') == before + 1


def test_our_own_page_curl_and_links_from_elsewhere_are_answered(server):
    with server.client() as client:
        own = {"origin": server.url, "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
        assert generate(client, headers=own).status_code == 200
        assert (
            client.post("/v1/images/edits", files={"image": occluded()}, headers=own).status_code
            == 200
        )
        assert (
            client.get("/v1/models", headers={"sec-fetch-site": "same-origin"}).status_code == 200
        )
        assert client.get("/v1/models", headers={"sec-fetch-site": "none"}).status_code == 200
        assert generate(client).status_code == 200
        link = {
            "sec-fetch-site": "cross-site",
            "sec-fetch-mode": "navigate",
            "sec-fetch-dest": "document",
        }
        for path in ("/", "/docs", "/static/favicon.svg", "/healthz"):
            assert client.get(path, headers=link).status_code == 200


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/v1/models", "/metrics", "/static/favicon.svg", "/nothing"]
)
def test_a_name_that_was_rebound_to_this_machine_is_refused_everywhere(server, path):
    port = server.url.rsplit(":", 1)[1]
    with server.client() as client:
        for host in (
            "evil.example",
            f"evil.example:{port}",
            f"127.0.0.1.evil.example:{port}",
            f"linpix:{port}",
        ):
            own = {"origin": f"http://{host}", "sec-fetch-site": "same-origin"}
            answer = client.get(path, headers={"host": host, **own})
            assert refusal(answer) == (403, "foreign_host")
            assert "--allowed-hosts" in message_of(answer)
        for host in (
            f"localhost:{port}",
            f"127.0.0.1:{port}",
            f"[::1]:{port}",
            f"pix.localhost:{port}",
        ):
            assert client.get(path, headers={"host": host}).status_code == (
                404 if path == "/nothing" else 200
            )


def test_by_default_no_other_address_of_this_machine_is_listened_on(server):
    host, port = server.url.removeprefix("http://").split(":")
    assert (host, Settings.model_fields["host"].default) == ("127.0.0.1", "127.0.0.1")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(port)), timeout=HANG_S)


def test_a_listed_origin_may_use_the_service_and_reads_its_errors_too(tiny, tmp_path):
    path = private(tmp_path / "keys", line("page", "first"))
    origin = "https://app.example.com"
    with (
        here(
            tiny.parent,
            allowed_origins=f"{origin},http://localhost:5173",
            api_keys=path,
            allowed_hosts="pix.example,localhost",
        ) as server,
        server.client() as client,
    ):
        asked = client.options(
            "/v1/images/generations",
            headers={
                "origin": origin,
                "access-control-request-method": "POST",
                "sec-fetch-site": "cross-site",
                "access-control-request-headers": "authorization,content-type,x-stainless-os",
            },
        )
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == origin
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert {"authorization", "content-type", "x-stainless-os"} <= set(
            asked.headers["access-control-allow-headers"].lower().split(",")
        )
        assert "origin" in asked.headers["vary"].lower()
        page = {"origin": origin, "sec-fetch-site": "cross-site", "host": "pix.example"}
        for headers, status in ((bearer("first"), 200), (bearer("other"), 401)):
            answer = generate(client, headers=page | headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == origin
            assert "access-control-allow-credentials" not in answer.headers
        for other in (ELSEWHERE, "https://app.example.com.evil", "http://app.example.com", "null"):
            asked = client.options(
                "/v1/images/generations",
                headers={"origin": other, "access-control-request-method": "POST"},
            )
            assert asked.status_code == 403
            assert "access-control-allow-origin" not in asked.headers


# --- a real browser ---

ATTACK = """<!DOCTYPE html><title>attack</title><body><script>
const target = TARGET, frame = name => { const f = document.createElement("iframe"); f.name = name;
                                         document.body.append(f); return f; };
const told = {};
async function attempt(name, action) {
  try { const answer = await action(); told[name] = answer ? `${answer.type} ${answer.status}` : "sent"; }
  catch (error) { told[name] = String(error); }
}
const post = {method: "POST", body: "{}"};
(async () => {
  await attempt("json", () => fetch(target + "/v1/images/generations",
                                    {...post, headers: {"content-type": "application/json"}}));
  await attempt("simple", () => fetch(target + "/v1/images/generations", {...post, mode: "no-cors"}));
  await attempt("read", () => fetch(target + "/v1/models"));
  await attempt("metrics", () => fetch(target + "/metrics"));
  await attempt("delete", () => fetch(target + "/v1/compare/cmp-1", {method: "DELETE"}));
  navigator.sendBeacon(target + "/v1/compare", new Blob(["{}"], {type: "text/plain"}));
  new Image().src = target + "/v1/models";
  const script = document.createElement("script");
  script.src = target + "/v1/models";
  document.body.append(script);
  new EventSource(target + "/v1/compare/cmp-1");
  frame("answer");
  const form = document.createElement("form");
  Object.assign(form, {method: "post", action: target + "/v1/images/edits", enctype: "multipart/form-data",
                       target: "answer"});
  const file = document.createElement("input");
  Object.assign(file, {type: "file", name: "image"});
  const files = new DataTransfer();
  files.items.add(new File([Uint8Array.from(PICTURE)], "p.png", {type: "image/png"}));
  file.files = files.files;
  form.append(file);
  document.body.append(form);
  form.submit();
  const boxed = frame("boxed");
  boxed.sandbox = "allow-scripts allow-forms";
  boxed.srcdoc = `<form method=post action="${target}/v1/images/generations"></form>` +
                 "<script>document.forms[0].submit()<\\/script>";
  await new Promise(done => setTimeout(done, 3000));
  await fetch("/told", {method: "POST", body: JSON.stringify(told)});
})();
</script>"""  # noqa: E501


def visit(page: str, folder: Path) -> dict[str, str]:
    """Let a browser open a page of another origin until the page has told what came of it."""
    told, heard = {}, threading.Event()

    class Site(Quiet):
        def do_GET(self) -> None:
            self.answer(page.encode())

        def do_POST(self) -> None:
            told.update(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.answer()
            heard.set()

    with listening(Site) as url:
        browser = subprocess.Popen(
            [
                BROWSER,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                f"--user-data-dir={folder}",
                "--remote-debugging-port=0",
                url,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert heard.wait(HANG_S), "the page has told nothing"
        finally:
            browser.terminate()
            browser.wait(HANG_S)
    return told


@pytest.fixture
def browser() -> Iterator[None]:
    if BROWSER is None:
        pytest.skip("there is no Chromium; on Debian: apt-get install chromium")
    yield


def drawn(server: Process) -> float:
    return server.metric(
        'linpix_images_completed_total{backend="linear",model="tiny",outcome="completed"}'
    )


@pytest.mark.slow
def test_a_page_of_another_origin_in_a_real_browser_makes_nothing_work_for_it(
    browser, tiny, tmp_path
):
    with serving(tiny.parent) as server:
        page = ATTACK.replace("TARGET", json.dumps(server.url)).replace(
            "PICTURE", str(list(occluded()))
        )
        told = visit(page, tmp_path)
        assert told == dict.fromkeys(
            ("json", "simple", "read", "metrics", "delete"), "TypeError: Failed to fetch"
        )
        assert eventually(
            lambda: server.metric('linpix_requests_rejected_total{reason="foreign_origin"}') >= 10
        )
        assert (
            server.metric("linpix_requests_running")
            == server.metric("linpix_requests_waiting")
            == 0
        )
        assert drawn(server) == 0
        for endpoint in ("generations", "edits"):
            for outcome in ("completed", "failed", "cancelled"):
                assert (
                    server.metric(
                        f'linpix_requests_total{{endpoint="{endpoint}",outcome="{outcome}"}}'
                    )
                    == 0
                )
        assert server.get("/v1/compare/cmp-1").status_code == 404, "no comparison was begun"


# --- headers ---


def test_every_answer_has_the_security_headers(server, tiny, tmp_path):
    path = private(tmp_path / "keys", line("a", "first"))
    assert "server" not in server.get("/").headers  # where uvicorn would put its name
    with here(tiny.parent, api_keys=path) as asked, asked.client() as client:
        answers = [
            client.get(path)
            for path in (
                "/",
                "/docs",
                "/openapi.json",
                "/metrics",
                "/healthz",
                "/nothing",
                "/static/favicon.svg",
                "/static/swagger-ui.css",
                "/v1/models",
            )
        ]
        answers += [
            client.get("/", headers={"host": "evil.example"}),
            client.put("/"),
            generate(client, headers=bearer("first")),
            generate(client, headers=bearer("first") | {"origin": ELSEWHERE}),
            generate(client, headers=bearer("first") | {"accept": "image/png"}),
        ]
        assert {answer.status_code for answer in answers} == {200, 401, 403, 404, 405}
        for answer in answers:
            policy = dict(
                part.strip().split(" ", 1)
                for part in answer.headers["content-security-policy"].split(";")
            )
            assert policy["default-src"] == "'self'"
            assert policy["img-src"] == "'self' data: blob:"
            assert (
                policy["frame-ancestors"] == policy["object-src"] == policy["base-uri"] == "'none'"
            )
            assert "unsafe" not in policy["script-src"]
            assert "unsafe" not in policy["style-src"] or answer.url.path == "/docs"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "same-origin"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            assert answer.headers["cross-origin-opener-policy"] == "same-origin"
            assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"])


# --- the port of the probes ---


def probes_of(server: Process) -> str:
    found = lambda: re.search(r"metrics and health at (http://\S+)", "".join(server.printed))  # noqa: E731
    assert eventually(lambda: found() is not None)
    return found()[1]


@pytest.mark.slow
def test_metrics_and_health_may_have_a_port_of_their_own(tiny):
    with serving(tiny.parent, "--metrics-port 0") as server, server.client() as client:
        there = probes_of(server)
        assert there != server.url
        for path in ("/metrics", "/healthz", "/readyz"):
            assert client.get(path).status_code == 404
            answer = fetch(there + path)
            assert answer.status_code == 200
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert fetch(there + path, headers={"host": "evil.example"}).status_code == 403
        assert generate(client).status_code == 200
        assert (
            'images_completed_total{backend="linear",model="tiny",outcome="completed"} 1.0'
            in fetch(there + "/metrics").text
        )
        for path in ("/", "/v1/models", "/docs", "/openapi.json", "/static/favicon.svg"):
            answer = fetch(there + path)
            assert refusal(answer) == (404, "not_found")
        assert fetch(there + "/v1/images/generations", "POST", json={}).status_code == 404
        assert "/metrics" not in client.get("/openapi.json").json()["paths"]


@pytest.mark.slow
def test_the_port_of_the_probes_answers_until_the_last_image_is_drawn(slow):
    with (
        serving(slow, *EAGER, "--metrics-port 0") as server,
        ThreadPoolExecutor(1) as pool,
        server.client() as client,
    ):
        there = probes_of(server)
        running = pool.submit(generate, client, n=2)
        assert eventually(lambda: "linpix_requests_running 1.0" in fetch(there + "/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: fetch(there + "/readyz").status_code == 503)
        assert fetch(there + "/healthz").status_code == 200
        assert len(running.result().json()["data"]) == 2
        assert server.process.wait(HANG_S) == 0
