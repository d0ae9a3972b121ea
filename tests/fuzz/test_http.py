"""Uploads as clients send them, to a real server: each answer is an image or the error envelope."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from hypothesis import strategies as st

from tests.fuzz.harness import Target
from tests.fuzz.pictures import pictures
from tools.harness.servers import serving

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Sent:
    files: tuple[tuple[str, bytes], ...]
    fields: tuple[tuple[str, str], ...]
    accept: str


class Refused(Exception):
    """Status, field to blame and message of an envelope."""


FIELDS = {
    "keep_rows": ["0", "4", "8", "9", "-1", "9" * 5000, "x", ""],
    "n": ["1", "2", "0", "10000", "9" * 400, "1.0"],
    "label": ["3", "x", "\U0001f600", "9" * 400],
    "seed": ["0", "7", str(2**53 - 1), str(2**53), "-1", "9" * 5000, "nan"],
    "temperature": ["0", "1", "nan", "inf", "1e400", "-1"],
    "size": ["16x16", "native", "9x9", "x" * 3000],
    "model": ["tiny", "../tiny", "\0", "x" * 3000],
    "stream": ["true", "false", "2"],
    "prompt": ["7", "", "x" * 5000],
    "partial_images": ["0", "3", "-1", "9" * 400],
    "response_format": ["b64_json", "url"],
    '\u00fc"\r\n': ["x"],
}
fields = st.sampled_from(sorted(FIELDS)).flatmap(
    lambda name: st.tuples(st.just(name), st.sampled_from(FIELDS[name]))
)
CASES = st.builds(
    Sent,
    st.one_of(
        pictures.map(lambda image: (("image", image),)),
        st.tuples(pictures, pictures).map(lambda both: (("image", both[0]), ("mask", both[1]))),
        pictures.map(lambda image: (("image[]", image),)),
        st.just(()),
        pictures.map(lambda image: (("image", image), ("image[]", image))),
    ),
    st.lists(fields, max_size=3).map(lambda some: (("keep_rows", "4"), *some)),
    st.sampled_from(["*/*", "*/*", "image/png", "text/event-stream", "x" * 300]),
)
STATUSES = {400, 404, 413, 415}


@pytest.fixture(scope="module")
def uploads(tiny: Path) -> Iterator[tuple[Target[Sent], int]]:
    with serving(tiny.parent) as server, server.client() as client:

        def send(case: Sent) -> None:
            answer = client.post(
                "/v1/images/edits",
                files=[(name, (name, body)) for name, body in case.files],
                data=dict(case.fields),
                headers={"accept": case.accept},
            )
            judge(answer)

        yield (
            Target(
                "uploads over HTTP",
                CASES,
                send,
                (Refused,),
                {str(status): rf"{status}: .*" for status in sorted(STATUSES)},
                share=10,
            ),
            server.process.pid,
        )
        odd = [
            line
            for line in server.printed[2:]
            if " INFO linpix.access POST /v1/images/edits " not in line
        ]
        # what it is, that it serves, a line a request, and nothing of what was sent
        assert not odd, odd


def judge(answer: httpx.Response) -> None:
    """Raise Refused for an envelope. Everything else that is no answer of an image is an
    AssertionError.
    """
    if answer.status_code == 200:
        kind = answer.headers["content-type"].partition(";")[0]
        if kind == "application/json":
            assert answer.json()["data"]
        elif kind == "image/png":
            assert answer.content.startswith(b"\x89PNG")
        else:
            assert (
                kind == "text/event-stream"
                and answer.text.count("event: image_edit.completed") >= 1
            )
        return
    assert answer.status_code in STATUSES, f"{answer.status_code}: {answer.text[:400]}"
    error = answer.json()["error"]
    assert (
        set(error) == {"message", "type", "param", "code"}
        and error["message"]
        and len(error["message"]) < 4000
    )
    raise Refused(f"{answer.status_code}: {error['param']}: {error['message']}")


def test_any_upload_is_answered_with_images_or_the_envelope(run, uploads):
    target, process = uploads
    run(target, process=process)
