"""Every error can be sent as the envelope, whatever the request contained."""

import shutil

import pytest

from linpix.server.web.service import preferred
from tests.server.web.routes.test_images import assert_refused, generate, message_of, refusal
from tools.harness.servers import here

JSON = {"content-type": "application/json"}
LONE = "\\ud800"  # as JSON writes half of a pair; no UTF-8 can


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/images/generations", f'{{"{LONE}": 1}}', 400),
        ("/v1/images/generations", f'{{"model": "{LONE}"}}', 404),
        ("/v1/images/generations", f'{{"label": "{LONE}"}}', 400),
        ("/v1/images/generations", f'{{"size": "{LONE}"}}', 400),
        ("/v1/images/generations", f'{{"{LONE}": 1, "n": 0}}', 400),
        ("/v1/compare", f'{{"{LONE}": 1}}', 400),
        ("/v1/compare", f'{{"backends": ["{LONE}"]}}', 400),
        ("/v1/images/generations", "[" * 100_000, 400),
        ("/v1/images/generations", f'{{"n": {"9" * 5000}}}', 400),
        ("/v1/images/generations", '{"n": 1e999}', 400),
        ("/v1/images/generations", '{"temperature": NaN}', 400),
        ("/v1/images/generations", '{"seed": NaN}', 400),
    ],
)
def test_json_that_no_answer_could_say_again_is_refused(client, path, body, status):
    answer = client.post(path, content=body.encode(), headers=JSON)
    assert answer.status_code == status, answer.text
    assert message_of(answer)


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/images/edits"])
@pytest.mark.parametrize("field", ["model", "label", "response_format", "size", "n", "temperature"])
def test_what_is_wrong_is_said_again_in_part_if_it_is_long(server, path, field):
    long = "9" * 4000
    with server.client() as client:
        answer = (
            client.post(path, json={field: int(long) if field == "n" else long})
            if path.endswith("generations")
            else client.post(path, files={"image": b"x"}, data={field: long})
        )
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == field
    assert "9" * 40 in message_of(answer) and "9" * 100 not in message_of(answer)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/images/generations", "use /v1/images/generations"),
        ("/v1/v1/images/edits", "use /v1/images/edits"),
        ("/chat", "/docs lists the routes"),
    ],
)
def test_a_base_address_without_v1_or_with_two_is_told_the_route(client, path, words):
    message = message_of(client.post(path, json={}))
    assert message == f"there is no route {path}; {words}"


def test_a_probe_of_the_wrong_port_is_told_the_right_one(tiny):
    with here(tiny.parent, metrics_port=0) as asked, asked.client() as client:
        for path in ("/healthz", "/readyz", "/metrics"):
            message = message_of(client.get(path))
            assert message == f"there is no route {path}; it is on the port of --metrics-port"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "a JSON object, such as {}, got None"),
        (b"null", "a JSON object, such as"),
        (b"[]", "got []"),
        (b'"x"', "got 'x'"),
        (b"[" * 100_000, "too many levels"),
        (b'{"seed": ' + b"7" * 5000 + b"}", "a whole number in it may have up to 4,300 digits"),
        (b'{"x": [{"y": -' + b"7" * 5000 + b"}]}", "up to 4,300 digits"),
        (b'{"\\ud83d": 1, "seed": 1}', "a field named '\\ud83d', which is half a surrogate pair"),
        (b"{", "the body is not JSON"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b"\xff", "UTF-8"),
    ],
)
def test_a_body_that_is_not_an_object_is_told_to_be_one(client, body, words):
    assert_refused(client.post("/v1/images/generations", content=body, headers=JSON), None, words)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("image/png", "image/png"),
        ("image/webp;q=0.5,image/png", "image/png"),
        ("image/png;q=0", ""),
        ("application/json, image/png", "application/json"),
        ("IMAGE/PNG ; q=0.9, text/html;q=x", "image/png"),
        ("", ""),
    ],
)
def test_the_preferred_media_type_is_the_one_with_the_highest_weight(accept, expected):
    assert preferred(accept) == expected


def test_a_path_of_any_length_is_said_again_in_part(client):
    answer = client.get("/" + "x" * 5000)
    assert answer.status_code == 404 and len(message_of(answer)) < 400


def test_a_request_for_an_unknown_model_counts_as_invalid_and_a_question_about_one_does_not(server):
    name = 'linpix_requests_rejected_total{reason="invalid"}'
    before = server.metric(name)
    with server.client() as client:
        assert generate(client, model="big").status_code == 404
        assert (
            client.post(
                "/v1/images/edits", files={"image": b"x"}, data={"model": "big"}
            ).status_code
            == 404
        )
        assert client.post("/v1/compare", json={"model": "big"}).status_code == 404
        assert client.get("/v1/models/big").status_code == 404
    assert server.metric(name) == before + 3


def test_of_endless_fields_that_are_ignored_some_are_named(server):
    fields = {f"{index:04}" + "x" * 100: 0 for index in range(1000)}
    with server.client() as client:
        [warning] = generate(client, **fields).json()["warnings"]
    assert (
        warning.startswith("ignored: 0000xxx")
        and warning.endswith(" and 980 more")
        and len(warning) < 1000
    )


@pytest.mark.parametrize(
    "origin", ["http://[", "http://]", "http://[::1", "\\", "http://\xff", "null", "x" * 3000]
)
def test_an_origin_that_is_not_an_address_is_a_foreign_one(client, origin):
    answer = generate(client, headers={"origin": origin.encode("latin-1")})
    assert refusal(answer) == (403, "foreign_origin")


def test_a_model_of_any_name_answers_with_a_png(tiny, tmp_path):
    name = "gr\u00f6\u00dfe \u6570"
    shutil.copytree(tiny, tmp_path / name)
    with here(tmp_path) as server, server.client() as client:
        answer = generate(client, headers={"accept": "image/png"}, model=name, seed=1)
    assert answer.status_code == 200 and answer.content.startswith(b"\x89PNG")
    assert answer.headers["x-linpix-model"] == "gr%C3%B6%C3%9Fe%20%E6%95%B0"
