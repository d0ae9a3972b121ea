"""Errors: one sentence for requests and commands; values and seconds as people read them."""

import pickle

import pytest
from fastapi.testclient import TestClient

from linpix.__main__ import main
from linpix.server.app import create_app
from linpix.server.errors import queue_full, shown
from linpix.server.settings import Settings
from tests.server.web.routes.test_images import PICTURE, encode


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("keep_rows", "9", "keep_rows must be from 0 to 8, the height of the model's image, got 9"),
        ("prepare", "mnist", "prepare=mnist works only with models of 28x28 grey pixels"),
        ("label", "ten", "label must be a class of tiny"),
        ("candidates", "4", "candidates need a model that"),
    ],
)
def test_an_invalid_option_is_the_same_sentence_over_http_and_on_the_command_line(
    tiny, tmp_path, capsys, name, value, told
):
    path, rows = tmp_path / "picture.png", {} if name == "keep_rows" else {"keep_rows": "4"}
    path.write_bytes(encode(PICTURE))
    flags = [
        f"--{field.replace('_', '-')}={given}" for field, given in ({name: value} | rows).items()
    ]
    assert (
        main(["complete", str(path), "--model", str(tiny), "--out", str(tmp_path / "out"), *flags])
        == 2
    )
    with TestClient(
        create_app(Settings(checkpoints=tiny.parent)), base_url="http://localhost"
    ) as client:
        error = client.post(
            "/v1/images/edits", files={"image": path.read_bytes()}, data={name: value} | rows
        ).json()["error"]
    assert error["message"].startswith(told) and error["param"] == name
    # a server names only models that it has, the command line also those that come with LinPix
    said = capsys.readouterr().err.replace(", such as mnist-conditional", "")
    assert said == f"linpix complete: {error['message']}\n"


def test_a_long_value_is_shortened():
    assert shown("ten") == "'ten'"
    assert len(shown("x" * 1_000)) == 80 and shown("x" * 1_000).endswith("...")


def test_an_error_can_be_pickled_with_what_it_says_and_carries():
    error = pickle.loads(pickle.dumps(queue_full(7, 2, 8, 1.4)))
    assert (error.code, str(error), error.retry_after_s) == (
        "queue_full",
        str(queue_full(7, 2, 8, 1.4)),
        1.4,
    )
