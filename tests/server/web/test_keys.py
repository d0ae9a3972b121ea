"""API keys: their file, their rates, and how a server uses them."""

import hashlib
import hmac
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi import Request
from fastapi.testclient import TestClient

from linpix.server.app import create_app
from linpix.server.settings import Settings
from linpix.server.web import keys
from linpix.server.web.keys import Keys
from tests.linpix.test_main import inside, linpix
from tests.server.web.routes.test_images import generate, message_of
from tools.harness.servers import eventually, here, serving


def line(name, secret, rate=""):
    return (
        f"{name}"
        f" sha256:{hashlib.sha256(secret.encode()).hexdigest()}{f' rate={rate}' if rate else ''}\n"
    )


def private(path, text):
    path.write_text(text)
    path.chmod(0o600)
    return path


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


# --- the file ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plain-secret\n", "line 1: expected 'NAME sha256:DIGEST [rate=10/s]'; linpix key NAME"),
        (line("a", "x") + "b sha256:secret\n", "line 2: expected 'NAME"),
        (line("a", "x") + "\n# rest\nb sha512:" + "0" * 64, "line 4: expected 'NAME"),
        (line("a", "x").strip() + " secret\n", "line 1: expected 'NAME"),
        (
            line("a", "x", "secret"),
            "line 1: a rate must be a whole number of requests per s, min or h, such as 10/s",
        ),
        (line("a", "x", "0/s"), "line 1: a rate"),
        (line("a", "x", "1.5/s"), "line 1: a rate"),
        (line("secret", "x") + line("secret", "y"), "line 2: has the same name as line 1"),
        (line("a", "x") + line("secret", "x"), "line 2: has the same key as line 1"),
        ("a sha256:" + "0" * 63 + "secret\n", "line 1: expected 'NAME"),
        ("# nothing\n\n", "has no key; add one with linpix key NAME --file"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number_and_never_printed(tmp_path, text, words):
    path = private(tmp_path / "file", text)
    with pytest.raises(ValueError, match="^" + re.escape(str(path))) as refused:
        keys.read(path)
    assert words in str(refused.value)
    assert "secret" not in str(refused.value)
    assert not re.search(r"[0-9a-f]{16}", str(refused.value).replace(str(path), ""))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o666, 0o444])
def test_no_file_that_others_may_touch_is_accepted(tmp_path, mode):
    path = private(tmp_path / "file", line("a", "x"))
    path.chmod(mode)
    with pytest.raises(
        ValueError,
        match=rf"other users have access to it \(mode {mode:04o}\); run: chmod 600 "
        rf"{re.escape(str(path))}",
    ):
        keys.read(path)
    for mode in (0o400, 0o440):  # as Kubernetes mounts a Secret for a pod's group
        path.chmod(mode)
        assert [key.name for key in keys.read(path)] == ["a"]


@pytest.mark.parametrize(
    "given", ["a sha256:secret\n", pytest.param("secret" * 100, marks=pytest.mark.slow)]
)
def test_a_key_in_the_place_of_its_file_is_not_printed(given):
    ended = linpix("serve", "--port", "0", LINPIX_API_KEYS=given)
    assert ended.returncode == 2
    assert "--api-keys (LINPIX_API_KEYS) must be the path of a file" in ended.stderr
    # the word of the message
    assert "secret," in ended.stderr and ended.stderr.count("secret") == 1


def test_a_link_is_as_private_as_what_it_names_and_what_is_no_file_is_refused(tmp_path):
    path = private(tmp_path / "file", line("a", "x"))
    (tmp_path / "link").symlink_to(path)
    assert [key.name for key in keys.read(tmp_path / "link")] == ["a"]
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        keys.read(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in (".", "pipe"):
        with pytest.raises(ValueError, match="not a regular file"):
            keys.read(tmp_path / name)


def test_what_is_presented_is_compared_as_a_digest_with_every_key_whichever_fits(
    tmp_path, monkeypatch
):
    known = Keys(
        private(tmp_path / "file", line("a", "first") + line("b", "second") + line("c", "third"))
    )
    compared = []

    def compare_digest(one, other):
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    class Spy:
        pass

    Spy.compare_digest = staticmethod(compare_digest)
    monkeypatch.setattr(keys, "hmac", Spy)
    for presented, name in (
        ("first", "a"),
        ("third", "c"),
        ("fourth", None),
        ("", None),
        ("ü\x80", None),
    ):
        compared.clear()
        found = known.find(presented)
        assert (found and found.name) == name
        assert {len(digest) for pair in compared for digest in pair} == {32}
        assert [one for one, _ in compared] == [hashlib.sha256(presented.encode()).digest()] * 3
        assert len({other for _, other in compared}) == 3


# --- rates ---


@pytest.mark.parametrize(
    ("rate", "size", "seconds"), [("10/s", 10, 1), ("600/min", 600, 60), ("2/h", 2, 3600)]
)
def test_a_bucket_gives_its_size_at_once_and_then_as_many_as_its_rate(rate, size, seconds):
    bucket, now = keys.Key("a", b"", rate, *keys.bucket_of(rate)), 1e6
    assert [bucket.take(now) for _ in range(size)] == [0.0] * size
    wait = bucket.take(now)
    assert wait == pytest.approx(seconds / size)
    assert bucket.take(now + wait / 2) == pytest.approx(wait / 2)
    taken, steps = 0, 40 * size
    for step in range(1, steps + 1):  # ten times the interval, in steps of a quarter of a request
        taken += bucket.take(now + step * seconds / size / 4) == 0.0
    assert 10 * size - 1 <= taken <= 10 * size
    assert [bucket.take(now + 1e9) for _ in range(size + 1)].count(0.0) == size, (
        "it never holds more than its size"
    )


# --- a changed file ---


def test_a_changed_file_is_read_again_a_bad_one_is_not_and_says_so(tmp_path, caplog):
    path = private(tmp_path / "file", line("a", "first", "2/h") + line("b", "second"))
    known = Keys(path)
    for _ in range(2):
        assert not known.find("first").take(time.monotonic())
    path.write_text(line("a", "renewed", "2/h") + line("c", "third"))
    assert known.find("first") is known.find("second") is None
    assert known.find("third").name == "c"
    assert known.find("renewed").take(time.monotonic()), "a new file is no new allowance"
    for text, mode in (("secret stuff\n", 0o600), (line("d", "fourth"), 0o644), ("", 0o600)):
        path.write_text(text)
        path.chmod(mode)
        assert known.find("third") and not known.find("fourth")
    path.unlink()
    assert known.find("third")
    assert "secret" not in caplog.text
    # once for each change; then it is gone
    assert caplog.text.count("the API keys were not changed") == 4
    private(path, line("d", "fourth", "5/s"))
    assert known.find("fourth").rate == "5/s" and not known.find("third")


def test_a_file_that_changed_is_read_again_whatever_its_time_and_size_say(tmp_path):
    """As after chown, or a copy that keeps times: the file may have been somebody else's until
    then.
    """
    path = private(tmp_path / "file", line("a", "first"))
    known, before = Keys(path), path.stat()
    time.sleep(0.05)  # as coarse as the clock of a file system may be
    with path.open("r+") as file:
        file.write(line("a", "other"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns
    assert known.find("other") and not known.find("first")


def test_a_running_service_reads_the_keys_again_and_requests_know_their_client(tiny, tmp_path):
    path = private(tmp_path / "file", line("alice", "first"))
    app = create_app(Settings(checkpoints=tiny.parent, api_keys=path))

    @app.get("/v1/me")
    async def me(request: Request) -> dict:
        return {"client": request.scope["state"]["client"]}

    @app.get("/me")
    async def peer(request: Request) -> dict:
        return {"client": request.scope["state"]["client"]}

    with TestClient(app, base_url="http://localhost", client=("10.1.2.3", 5)) as client:
        assert client.get("/v1/me", headers=bearer("first")).json() == {"client": "alice"}
        assert client.get("/me", headers=bearer("first")).json() == {"client": "10.1.2.3"}
        path.write_text(line("bob", "second"))
        assert client.get("/v1/me", headers=bearer("first")).status_code == 401
        assert client.get("/v1/me", headers=bearer("second")).json() == {"client": "bob"}
        path.chmod(0o640)
        assert client.get("/v1/me", headers=bearer("second")).status_code == 200


# --- the server ---


def test_a_server_with_keys_asks_for_one(tiny, tmp_path):
    path = private(
        tmp_path / "keys", "# of the test\n\n" + line("a", "first") + line("b", "second")
    )
    with here(tiny.parent, api_keys=path) as server, server.client() as client:
        for headers in (
            {},
            bearer("third"),
            {"authorization": "Basic first"},
            bearer("# of the test"),
            bearer("' '"),
            bearer(hashlib.sha256(b"first").hexdigest()),
            {"authorization": "first"},
            {"x-api-key": "first"},
        ):
            for method, route in (
                ("GET", "/v1/models"),
                ("POST", "/v1/images/generations"),
                ("DELETE", "/v1/compare/cmp-1"),
                ("GET", "/v1/nothing"),
            ):
                answer = client.request(method, route, headers=headers)
                assert answer.status_code == 401, headers
                assert answer.json()["error"]["type"] == "authentication_error"
                assert answer.headers["www-authenticate"] == "Bearer"
        for secret in ("first", "second"):
            assert client.get("/v1/models", headers=bearer(secret)).status_code == 200
        assert generate(client, headers={"authorization": "bearer first"}).status_code == 200
        for open_to_all in (
            "/",
            "/docs",
            "/openapi.json",
            "/healthz",
            "/readyz",
            "/metrics",
            "/static/favicon.svg",
        ):
            assert client.get(open_to_all).status_code == 200
        schema = client.get("/openapi.json").json()
        assert schema["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                assert operation["security"] == ([{"key": []}] if path.startswith("/v1/") else [])
                assert {"401", "429"} <= operation["responses"].keys() or not path.startswith(
                    "/v1/"
                )
                assert "403" in operation["responses"]
        assert server.metric('linpix_requests_rejected_total{reason="unauthorized"}') == 32


def test_a_key_has_the_requests_of_its_rate_and_no_other_key_pays_for_it(tiny, tmp_path):
    path = private(tmp_path / "keys", line("slow", "first", "3/h") + line("free", "second"))
    with (
        here(tiny.parent, api_keys=path) as server,
        ThreadPoolExecutor(8) as pool,
        server.client() as client,
    ):

        def ask(secret):
            return generate(client, headers=bearer(secret))

        answers = list(pool.map(ask, ["first"] * 8))
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 5
        for answer in answers:
            if answer.status_code == 429:
                assert answer.json()["error"]["code"] == "rate_limited"
                assert answer.json()["error"]["type"] == "rate_limit_error"
                assert 1 <= int(answer.headers["retry-after"]) <= 1200
                assert "API key 'slow' is over its limit of 3/h" in message_of(answer)
        assert {answer.status_code for answer in pool.map(ask, ["second"] * 8)} == {200}
        assert client.get("/readyz").status_code == 200
        assert server.metric('linpix_requests_rejected_total{reason="rate_limited"}') == 5


@pytest.mark.slow
def test_a_running_server_takes_new_keys_and_drops_old_ones_with_the_file(tiny, tmp_path):
    path = private(tmp_path / "keys", line("a", "first"))
    with serving(tiny.parent, f"--api-keys {path}") as server, server.client() as client:

        def status(secret):
            return client.get("/v1/models", headers=bearer(secret)).status_code

        made = inside("key", "b", "--file", path).stdout.strip()
        assert eventually(lambda: status(made) == 200)
        assert status("first") == 200
        path.write_text(line("b", made))
        assert eventually(lambda: status("first") == 401)
        path.write_text("broken secret\n")
        assert eventually(
            lambda: status(made) == 200 and "API keys were not changed" in "".join(server.printed)
        )
        assert status(made) == 200 and status("broken") == 401
        assert "secret" not in "".join(server.printed)
