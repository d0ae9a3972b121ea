"""Which forms are accepted, by a real server process."""

import asyncio
import base64
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from fastapi import Request

from linpix.server.web.request_schemas import FORM_FIELDS
from linpix.server.web.service import DECODERS
from linpix.server.web.uploads import MAX_FIELDS, TEXT_BYTES, Form
from tests.server.web.routes.test_images import generate, images_of, occluded
from tests.server.web.test_admission import (
    BOUNDARY,
    Raw,
    commented,
    error_of,
    part,
    rejected,
    unnamed_files,
)
from tools.harness.commands import ROOT
from tools.harness.servers import eventually, here, serving

EDIT = "/v1/images/edits"
END = f"--{BOUNDARY}--\r\n".encode()
IMAGE = part("image", occluded(), "a.png")


def send(client, body: bytes, charset: str = "", **headers: str):
    kind = f"multipart/form-data; boundary={BOUNDARY}{charset}"
    return client.post(EDIT, content=body, headers={"content-type": kind, **headers})


SHARED = {
    "image",
    "mask",
    "keep_rows",
    "model",
    "prompt",
    "size",
    "response_format",
    "label",
    "timeout",
}


@pytest.mark.parametrize(
    ("path", "others"),
    [
        (
            EDIT,
            {
                "n",
                "candidates",
                "attempts",
                "output_format",
                "stream",
                "partial_images",
                "seed",
                "temperature",
                "priority",
                "prepare",
                "lay_back",
                "conditioning",
            },
        ),
        ("/v1/images/likelihoods", {"labels", "classes"}),
        ("/v1/images/inside", {"seed", "token", "layer", "head", "array"}),
    ],
)
def test_the_fields_of_a_form_are_known_and_documented(client, path, others):
    schema = client.get("/openapi.json").json()
    form = schema["paths"][path]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"][
        "$ref"
    ]
    assert (
        schema["components"]["schemas"][form.rsplit("/", 1)[1]]["properties"].keys()
        == SHARED | others
    )
    assert SHARED | others <= FORM_FIELDS


@pytest.mark.parametrize(
    ("charset", "name"),
    [
        ("", "gr\u00fc\u00dfe"),
        ("; charset=utf-8", "gr\u00fc\u00dfe"),
        ('; CHARSET="UTF-8"', "gr\u00fc\u00dfe"),
        ("; charset=us-ascii", "greetings"),
    ],
)
def test_a_form_is_read_in_utf8(client, charset, name):
    answer = send(client, IMAGE + part(name, b"x") + END, charset)
    assert answer.status_code == 200 and answer.json()["warnings"] == [f"ignored: {name}"]


@pytest.mark.parametrize(
    "charset", ["punycode", "unicode_escape", "latin-1", "utf-16", "utf-7", "x" * 1000, "\xff"]
)
def test_a_form_in_any_other_charset_is_refused_by_its_head(server, client, charset):
    before = rejected(server, "invalid")
    answer = client.post(
        EDIT,
        content=IMAGE + END,
        headers={
            "content-type": f"multipart/form-data; boundary={BOUNDARY}; charset={charset}".encode(
                "latin-1"
            )
        },
    )
    assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")
    assert "UTF-8" in error_of(answer)["message"] and len(error_of(answer)["message"]) < 200
    assert rejected(server, "invalid") == before + 1


@pytest.mark.parametrize(
    ("path", "kind", "coding", "says"),
    [
        (EDIT, None, None, "multipart/form-data"),
        ("/v1/images/likelihoods", "application/json", None, "got 'application/json'"),
        (EDIT, "application/x-www-form-urlencoded", None, "multipart/form-data"),
        (EDIT, "multipart/x", None, "multipart"),
        (EDIT, "multipart/form-data; boundary=x", "gzip", "without a Content-Encoding, got 'gzip'"),
        ("/v1/images/generations", "multipart/x", None, "Content-Type: application/json"),
        ("/v1/images/generations", "text/plain", None, "json"),
        ("/v1/images/generations", None, None, "json"),
        ("/v1/compare", "multipart/x", None, "json"),
        ("/v1/compare", "application/jsonp", None, "json"),
        ("/v1/compare", None, None, "json"),
        (
            "/v1/images/generations",
            "application/json",
            "gzip",
            "without a Content-Encoding, got 'gzip'",
        ),
        ("/v1/compare", "application/json", "br", "got 'br'"),
    ],
)
def test_a_body_of_another_kind_is_415_before_it_is_read(server, path, kind, coding, says):
    before = rejected(server, "invalid")
    with Raw(
        server,
        path,
        "content-length: 1000000000",
        "expect: 100-continue",
        *([f"content-encoding: {coding}"] if coding else []),
        kind=kind,
    ) as refused:
        status, headers, error = refused.answer()
    assert (status, error["code"], headers["connection"]) == (
        415,
        "unsupported_media_type",
        "close",
    )
    assert says in error["message"]
    assert rejected(server, "invalid") == before + 1


@pytest.mark.parametrize(
    "kind", ["application/json", "APPLICATION/JSON;charset=utf-8", "application/vnd.x+json"]
)
def test_json_by_any_of_its_names_is_read(client, kind):
    answer = client.post(
        "/v1/images/generations",
        content=b"{}",
        headers={"content-type": kind, "content-encoding": "identity"},
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("cut", [1, 4, 9, 10, 11, 14, 40])
def test_a_form_without_its_end_is_refused(client, cut):
    body = IMAGE + part("seed", b"1") + f"--{BOUNDARY}--".encode()
    assert send(client, body).json()["data"][0]["seed"] == 1
    answer = send(client, body[:-cut])
    assert answer.status_code == 400 and "form" in error_of(answer)["message"]


@pytest.mark.parametrize("name", ["image", "mask", "seed", "n", "prompt"])
def test_a_field_that_is_given_twice_is_refused_rather_than_half_ignored(client, name):
    twice = part(
        name,
        occluded() if name in ("image", "mask") else b"1",
        "a.png" if name in ("image", "mask") else "",
    )
    answer = send(client, (IMAGE if name != "image" else b"") + twice * 2 + END)
    assert (answer.status_code, error_of(answer)["param"]) == (400, name)
    assert f"2 fields {name}" in error_of(answer)["message"]


def test_unknown_fields_and_files_are_ignored_and_named_and_too_many_are_refused(client):
    one = IMAGE + part("label", b"4") + part("seed", b"3")
    answer = send(
        client,
        one
        + part("user", bytes(10**6))
        + part("y" * 500, b"")
        + part("spare", bytes(10**6), "x")
        + END,
    )
    assert answer.json()["warnings"] == [f"ignored: spare, user, {'y' * 40}"]
    assert np.array_equal(images_of(answer), images_of(send(client, one + END)))
    many = b"".join(part(f"f{number}", b"") for number in range(MAX_FIELDS - 1))
    for body, says in (
        (one + many + END, "Too many fields"),
        (IMAGE + part("spare", b"", "x") * 3 + END, "Too many files"),
        (one + part("prompt", b"x" * TEXT_BYTES) + END, "131,072 bytes together; shorten prompt"),
        (one + part("seed", b"7" * TEXT_BYTES) + END, "131,072 bytes together; shorten seed"),
    ):
        assert says in error_of(send(client, body))["message"]


@pytest.mark.parametrize("prompt", ["7 " * 16_000, "7 " + "\u8bf7\U0001f642" * 15_999])
def test_a_prompt_may_be_as_long_in_a_form_as_in_json(client, prompt):
    """OpenAI allows 32,000 characters, some of which have four bytes."""
    read = send(client, IMAGE + part("prompt", prompt.encode()) + END).json()
    assert read["data"][0]["revised_prompt"] == "7"
    assert generate(client, prompt=prompt).status_code == 200
    assert client.post(EDIT, json={"prompt": prompt, "images": [REFERENCE]}).status_code == 200


DATA_URL = f"data:image/png;base64,{base64.b64encode(occluded()).decode()}"
REFERENCE = {"image_url": DATA_URL}


def test_an_edit_as_json_is_the_edit_of_its_form(client):
    """With openai's fields, and with ours; an alpha channel or a mask says what is hidden."""
    drawn = images_of(send(client, IMAGE + part("seed", b"3") + part("n", b"2") + END))
    body = {"images": [REFERENCE], "seed": 3, "n": 2, "mask": None, "quality": "high"}
    answer = client.post(EDIT, json=body)
    assert np.array_equal(images_of(answer), drawn)
    assert answer.json()["warnings"] == ["ignored: quality"]
    masked = {"images": [REFERENCE], "mask": REFERENCE, "seed": 3, "n": 2}
    assert np.array_equal(images_of(client.post(EDIT, json=masked)), drawn)
    streamed = client.post(EDIT, json={"images": [REFERENCE], "stream": True, "label": 7})
    assert "event: image_edit.completed" in streamed.text


def test_a_data_url_is_read_as_programs_escape_it(client):
    """PHP escapes each slash, .NET each plus sign, and some quote what has a meaning in URLs."""
    escapes = ({"/": "\\/"}, {"/": "\\u002f", "+": "\\u002B", "=": "\\u003D"}, {"=": "%3D"})
    head, data = DATA_URL.split(",")
    for escaped in escapes:
        literal = f"{head},{data.translate(str.maketrans(escaped))}"
        body = f'{{"images" :[ {{"image_url"\n: "{literal}"}}]}}'
        answer = client.post(EDIT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "images", "field required"),
        ({"images": []}, "images", "exactly one picture in images, got 0"),
        ({"images": [REFERENCE] * 2}, "images", "got 2"),
        ({"images": [REFERENCE] * 20}, "images", "got 20"),
        ({"images": [REFERENCE], "image": DATA_URL}, "image", '"images": [{"image_url"'),
        ({"images": DATA_URL}, "images", "list"),
        ({"images": [DATA_URL]}, "images.0", "PictureReference"),
        ({"images": [{}]}, "images.0", "either image_url or file_id"),
        ({"images": [REFERENCE | {"file_id": "file-1"}]}, "images.0", "either"),
        ({"images": [{"file_id": "file-1"}]}, "images.0.file_id", "no file 'file-1'"),
        ({"images": [REFERENCE], "mask": {"file_id": "f"}}, "mask.file_id", "no file 'f'"),
        ({"images": [{"image_url": "https://a/b"}]}, "images.0.image_url", "no other address"),
        ({"images": [{"image_url": "#0"}]}, "images.0.image_url", "got '#0'"),
        ({"images": [{"image_url": "data:,x"}]}, "images.0.image_url", "got 'data:,x'"),
        ({"images": [{"image_url": DATA_URL[:-1]}]}, "images.0.image_url", "padding"),
        ({"images": [{"image_url": 'data:"x"'}]}, None, "not JSON"),
        ({"images": [{"image_url": DATA_URL[:22]}]}, "image", "has 0 bytes"),
        ({"images": [REFERENCE], "n": "2"}, "n", "valid integer, got '2'"),
        ({"images": [REFERENCE], "stream": "true"}, "stream", "valid boolean"),
        ({"images": [REFERENCE], "user": "x" * 2**17}, None, "131,"),
        ([REFERENCE], None, "must be a JSON object"),
    ],
)
def test_an_edit_as_json_that_is_wrong_is_told_what_is_right(client, fields, param, says):
    answer = client.post(EDIT, json=fields)
    assert 400 <= answer.status_code < 500
    assert error_of(answer)["param"] == param and says in error_of(answer)["message"]


def test_json_of_megabytes_is_not_parsed_apart_from_its_pictures(client):
    """As lists in lists it would take 30 times its memory; a picture may have them all."""
    deep = {"images": [REFERENCE], "x": [[]] * 2**18}
    assert client.post(EDIT, json=deep).status_code == 413
    large = {"images": [{"image_url": DATA_URL + "A" * 2**21}]}
    assert client.post(EDIT, json=large).status_code == 200


def test_of_unknown_fields_little_is_kept():
    many = b"".join(
        part(f"{number:02}" + "x" * 4000, bytes(10_000)) for number in range(MAX_FIELDS)
    )

    async def receive():
        return {"type": "http.request", "body": many + END}

    request = Request(
        {
            "type": "http",
            "headers": [(b"content-type", f"multipart/form-data; boundary={BOUNDARY}".encode())],
        },
        receive,
    )
    kept = asyncio.run(
        Form(request.headers, request.stream(), max_fields=MAX_FIELDS).parse()
    ).multi_items()
    assert (
        len(kept) == MAX_FIELDS
        and sum(len(name) + len(value) for name, value in kept) < 100 * MAX_FIELDS
    )


@pytest.mark.slow
def test_errors_of_a_form_are_not_logged_as_warnings(tiny):
    with serving(tiny.parent) as process, process.client() as client:
        for body in (
            b"nothing",
            b"--boundary\r\n\0: \x00\r\n\r\n",
            IMAGE + b"--boundaryx",
            IMAGE[:60] + b"\r\n" + IMAGE,
        ):
            assert send(client, body).status_code == 400
        assert eventually(lambda: sum(f"POST {EDIT} 400" in line for line in process.printed) == 4)
        assert not [line for line in process.printed if "WARNING" in line or "ERROR" in line]


@pytest.mark.slow
def test_a_full_disk_is_reported_as_the_servers_failure_and_logged(tiny):
    def small_files(process: int) -> None:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (100_000, 100_000))

    body = part("image", commented(8, 2 * 2**20), "a.png") + END
    with serving(tiny.parent, begun=small_files) as process, process.client() as client:
        for _ in range(2):
            answer = send(client, body)
            assert (answer.status_code, error_of(answer)["code"]) == (503, "resources_exhausted")
            assert answer.headers["retry-after"] == "5"
        assert process.metric('linpix_requests_total{endpoint="edits",outcome="failed"}') == 2
        assert rejected(process, "invalid") == 0
        assert eventually(
            lambda: (
                sum("ERROR linpix an upload could not be read" in line for line in process.printed)
                == 2
            )
        )
        assert send(client, IMAGE + END).status_code == 200
        assert eventually(lambda: process.quiet("tiny"))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode"), [("PNG", "RGBA"), ("JPEG", "CMYK"), ("WEBP", "RGBA")])
@pytest.mark.parametrize("left", [4, 16, 48, 100, 180])
def test_memory_that_is_short_is_not_the_fault_of_the_picture(kind, mode, left):
    """left: MiB of it. A decoder may fail at its first or its last allocation, or have enough."""
    program = f"""
import io, resource
from PIL import Image
from linpix.server.pictures.pictures import opened
buffer = io.BytesIO()
Image.new("{mode}", (4000, 4000)).save(buffer, "{kind}", lossless=True)
opened(buffer.getvalue(), "image")
[size] = [line for line in open("/proc/self/status") if line.startswith("VmSize")]
resource.setrlimit(resource.RLIMIT_AS, (int(size.split()[1]) * 1024 + {left} * 2**20, -1))
try:
    opened(buffer.getvalue(), "image")
except MemoryError:
    pass
print("out of memory, or not")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "out of memory, or not\n", done.stderr


def test_an_upload_that_waits_to_be_decoded_ends_at_its_deadline_and_frees_what_it_held(tiny):
    def waiting() -> int:
        return sum(not turn.done() for _, turn in decoders._waiting)

    others, body = threading.Event(), {"image": ("a.png", commented(8, 2 * 2**20))}
    with here(tiny.parent) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        decoders = client.app.state.service.decoders
        for _ in range(DECODERS):  # uploads of others, which are being decoded
            client.portal.start_task_soon(decoders.run, "others", partial(others.wait, 60))
        assert eventually(lambda: decoders._running.total() == DECODERS)
        before = unnamed_files("self")
        try:
            for number, path in enumerate((EDIT, "/v1/images/likelihoods"), 1):
                late = pool.submit(client.post, path, files=body | {"timeout": (None, "1.5")})
                assert eventually(lambda: waiting() == 1)
                assert (
                    server.metric("linpix_request_bodies_reading") == 1
                    and unnamed_files("self") == before + 1
                )
                assert (late.result().status_code, error_of(late.result())["code"]) == (
                    504,
                    "deadline_passed",
                )
                assert "within 1.5 s" in error_of(late.result())["message"]
                assert waiting() == 0 and unnamed_files("self") == before
                assert server.metric("linpix_request_bodies_reading") == 0
                assert server.metric('linpix_deadlines_passed_total{state="reading"}') == number
        finally:
            others.set()
        assert client.post(EDIT, files=body).status_code == 200
        assert eventually(lambda: not decoders._running) and not decoders._waiting
