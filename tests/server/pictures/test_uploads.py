"""Warnings about uploads that the model cannot complete well. Other tests: test_prepare.py and test_pictures.py."""

import numpy as np
import pytest
from fastapi.testclient import TestClient

from linpix.server.app import create_app
from linpix.server.settings import Settings
from tests.server.conftest import ROOT
from tests.server.web.routes.test_images import edit, encode


@pytest.fixture(scope="module")
def client():
    with TestClient(create_app(Settings(checkpoints=ROOT / "checkpoints", models="mnist-small")),
                    base_url="http://localhost") as client:
        yield client


def grey(ground: int, *, light: int | None = None) -> bytes:
    """A bar of ink on a ground. light: of the image rows from the 15th on."""
    picture = np.full((28, 28), ground, np.uint8)
    picture[4:24, 12:16] = 255
    if light is not None:
        picture[14:] = light
    return encode(picture)


@pytest.mark.parametrize(("picture", "fields", "warned"), [
    (grey(0), {}, False), (grey(4), {}, False), (grey(12), {}, True), (grey(200), {}, True),
    (grey(0, light=200), {}, False), (grey(200), {"prepare": "mnist"}, False)],
    ids=["black", "nearly black", "dark", "light", "light where it is hidden", "prepared"])
def test_a_model_of_digits_warns_of_a_ground_that_it_does_not_know(client, picture, fields, warned):
    answer = edit(client, picture, keep_rows=14, seed=1, **fields)
    assert answer.status_code == 200, answer.text
    words = [warning for warning in answer.json()["warnings"] if "edge is not black" in warning]
    assert len(words) == warned and all("prepare=mnist" in warning for warning in words)
