"""Warnings about uploads that the model cannot complete well. Other tests: test_prepare.py and
test_pictures.py.
"""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from tests.server.web.routes.test_images import edit, encode
from tools.harness.commands import ROOT
from tools.harness.servers import here


@pytest.fixture(scope="module")
def server():
    with here(ROOT / "checkpoints", models="mnist-small") as server:
        yield server


def grey(ground: int, *, light: int | None = None) -> bytes:
    """A bar of ink on a ground. light: of the image rows from the 15th on."""
    picture = np.full((28, 28), ground, np.uint8)
    picture[4:24, 12:16] = 255
    if light is not None:
        picture[14:] = light
    return encode(picture)


def profile(space: bytes) -> bytes:
    """The head of an ICC profile for pictures of these colours."""
    return bytes(16) + space + bytes(16) + b"acsp" + bytes(200)


@pytest.mark.parametrize("form", ["png", "webp", "jpeg"])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_what_is_laid_back_has_the_colour_profile_of_the_upload(client, kind, form):
    answer = edit(
        client,
        encode(np.full((60, 60, 3), 9, np.uint8), kind, icc_profile=profile(b"RGB ")),
        keep_rows=14,
        lay_back=True,
        output_format=form,
    )
    [image] = answer.json()["data"]
    with Image.open(io.BytesIO(base64.b64decode(image["b64_json"]))) as laid:
        assert laid.info["icc_profile"] == profile(b"RGB ") and laid.mode == "RGB"
    assert not any("profile" in warning for warning in answer.json()["warnings"])


@pytest.mark.parametrize(
    ("space", "mode", "kept"),
    [
        (b"GRAY", "L", True),
        (b"GRAY", "RGB", True),
        (b"CMYK", "CMYK", False),
        (b"Lab ", "RGB", False),
    ],
)
def test_a_profile_that_the_answer_cannot_have_is_named(client, space, mode, kept):
    out = io.BytesIO()
    Image.new(mode, (60, 60)).save(out, "JPEG", icc_profile=profile(space))
    answer = edit(client, out.getvalue(), keep_rows=14, lay_back=True)
    with Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))) as laid:
        assert ("icc_profile" in laid.info) == kept
    assert (
        any("colour profile is not one of RGB" in warning for warning in answer.json()["warnings"])
        != kept
    )


@pytest.mark.parametrize(
    ("picture", "fields", "warned"),
    [
        (grey(0), {}, False),
        (grey(4), {}, False),
        (grey(12), {}, True),
        (grey(200), {}, True),
        (grey(0, light=200), {}, False),
        (grey(200), {"prepare": "mnist"}, False),
    ],
    ids=["black", "nearly black", "dark", "light", "light where it is hidden", "prepared"],
)
def test_a_model_of_digits_warns_of_a_ground_that_it_does_not_know(client, picture, fields, warned):
    answer = edit(client, picture, keep_rows=14, seed=1, **fields)
    assert answer.status_code == 200, answer.text
    words = [warning for warning in answer.json()["warnings"] if "edge is not black" in warning]
    assert len(words) == warned and all("prepare=mnist" in warning for warning in words)


@pytest.mark.parametrize(
    ("mask", "warned"),
    [(np.full((28, 28, 4), 255, np.uint8), True), (np.zeros((28, 28, 4), np.uint8), False)],
    ids=["opaque", "transparent"],
)
def test_a_mask_that_hides_nothing_gets_a_warning(client, mask, warned):
    answer = edit(client, grey(0), mask=encode(mask))
    assert any("nothing is drawn" in warning for warning in answer.json()["warnings"]) == warned
    assert (answer.json()["known"] == 28 * 28) == warned


@pytest.mark.parametrize(
    ("image", "mask"), [("image[]", "mask[]"), ("image[0]", "mask[0]"), ("image", "mask[]")]
)
def test_files_that_a_client_names_as_lists_are_the_picture_and_its_mask(client, image, mask):
    half = np.full((28, 28, 4), 255, np.uint8)
    half[14:, :, 3] = 0
    answer = client.post(
        "/v1/images/edits", files=[(image, ("a.png", grey(0))), (mask, ("b.png", encode(half)))]
    )
    assert (
        answer.status_code == 200
        and answer.json()["known"] == 14 * 28
        and not answer.json()["warnings"]
    )
    several = client.post(
        "/v1/images/edits", files=[(f"image[{index}]", ("a.png", grey(0))) for index in range(2)]
    )
    assert "the form has 2 fields image; send one" in several.json()["error"]["message"]
