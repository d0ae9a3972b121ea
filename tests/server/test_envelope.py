"""Whatever a request is made of, the answer to it can be sent, and is the envelope."""

import shutil

import numpy as np
import pytest

from tests.fuzz.pictures import encode
from tests.server.conftest import serving

JSON = {"content-type": "application/json"}
LONE = "\\ud800"  # as JSON writes half of a pair; no UTF-8 can


@pytest.mark.parametrize(("path", "body", "status"), [
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
])
def test_json_that_no_answer_could_say_again_is_refused(server, path, body, status):
    with server.client() as client:
        answer = client.post(path, content=body.encode(), headers=JSON)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["x" + LONE, "model", "label", "n"])
def test_a_form_in_a_code_that_makes_half_pairs_is_answered(server, tiny, name):
    """Its own choice of charset decides what its bytes mean."""
    picture = encode(np.zeros((8, 8), np.uint8))
    body = b"".join([b'--x\r\ncontent-disposition: form-data; name="image"; filename="a"\r\n\r\n', picture,
                     b'\r\n--x\r\ncontent-disposition: form-data; name="keep_rows"\r\n\r\n4',
                     f'\r\n--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{LONE}\r\n--x--'.encode()])
    with server.client() as client:
        answer = client.post("/v1/images/edits", content=body, headers={
            "content-type": "multipart/form-data; boundary=x; charset=unicode_escape"})
    if name[0] == "x":
        assert answer.status_code == 200 and answer.json()["warnings"] == [f"ignored: x{LONE}"]
    else:
        assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == name


def test_of_endless_fields_that_are_ignored_some_are_named(server):
    fields = {f"{index:04}" + "x" * 100: 0 for index in range(1000)}
    with server.client() as client:
        [warning] = client.post("/v1/images/generations", json=fields).json()["warnings"]
    assert warning.startswith("ignored: 0000xxx") and warning.endswith(" and 980 more") and len(warning) < 1000


@pytest.mark.parametrize("origin", ["http://[", "http://]", "http://[::1", "\\", "http://\xff", "null", "x" * 3000])
def test_an_origin_that_is_no_address_is_a_foreign_one(server, origin):
    with server.client() as client:
        answer = client.post("/v1/images/generations", json={}, headers={"origin": origin.encode("latin-1")})
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "foreign_origin"


def test_a_model_of_any_name_answers_with_a_png(tiny, tmp_path):
    name = "gr\u00f6\u00dfe \u6570"
    shutil.copytree(tiny, tmp_path / name)
    with serving(tmp_path) as server, server.client() as client:
        answer = client.post("/v1/images/generations", json={"model": name, "seed": 1}, headers={"accept": "image/png"})
    assert answer.status_code == 200 and answer.content.startswith(b"\x89PNG")
    assert answer.headers["x-linpix-model"] == "gr%C3%B6%C3%9Fe%20%E6%95%B0"
