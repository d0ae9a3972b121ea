"""The likelihood of a picture: the map over it, the legend, and the recognised digit."""

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Visit, press, says, written
from tests.browser.test_completion import begin, complete, digit, png, results, sent
from tools.harness.servers import fetch

pytestmark = pytest.mark.slow


def shown(visitor: Visit) -> np.ndarray:
    """RGB of the map, (28, 28, 3)."""
    return (
        np.array(visitor.pixels("#likelihood-canvas"), np.uint8)
        .reshape(28, 28, 4)[..., :3]
        .astype(int)
    )


def asked(url: str, picture: np.ndarray, known: np.ndarray | None = None, **fields: object) -> dict:
    """What the service itself says of a picture of greys."""
    files = {"image": png(picture)}
    if known is not None:
        files["mask"] = png(
            np.dstack([np.zeros((28, 28, 3), np.uint8), 255 * known.astype(np.uint8)])
        )
    return fetch(f"{url}/v1/images/likelihoods", "POST", files=files, data=fields).json()


def judge(page: Page, said: str) -> str:
    page.get_by_role("button", name="How likely?").and_(page.locator("button:visible")).last.click()
    says(page, "#completion .status", said)
    return page.locator("#likelihood-words").inner_text()


def test_the_map_of_a_picture_shows_where_the_model_was_surprised(shipped, visit, tmp_path):
    visitor, page = begin(visit, shipped, model="mnist-small")
    pixels = digit(shipped.url, 7)
    page.locator("#file").set_input_files(written(tmp_path, "seven.png", png(pixels)))
    says(page, "#completion .status", "seven.png is loaded")
    press(page, "Keep all")
    words = judge(page, "The likelihood of the picture")
    visitor.keep("completion-likelihood-1280-light")
    answer = asked(shipped.url, pixels, labels="all")
    bits = np.array(answer["map"])[..., 0]
    row, column = np.unravel_index(bits.argmax(), bits.shape)
    assert words.startswith(
        f"The whole picture: {answer['bits_per_dim']:.3f} bits for each of 784 values."
    )
    assert words.endswith(f" bits in column {column + 1}, row {row + 1}.")
    orange = shown(visitor)[..., 0] - shown(visitor)[..., 2]  # none in greys
    np.testing.assert_allclose(orange, (255 - 24) * np.minimum(1, bits / 8), atol=2)
    best = answer["labels"][0]
    says(page, "#guess-words", f"mnist-small takes it for: {best['label']} ")
    expect(page.locator("#guess-bars li")).to_have_count(3)
    page.get_by_label("Lay the map over the picture").uncheck()
    np.testing.assert_array_equal(shown(visitor)[..., 1], pixels)


def test_of_a_completion_only_what_was_drawn_counts_and_the_way_back_leads_to_the_others(
    shipped, visit, tmp_path
):
    visitor, page = begin(visit, shipped)
    page.locator("#file").set_input_files(
        written(tmp_path, "three.png", png(digit(shipped.url, 3)))
    )
    says(page, "#completion .status", "three.png is loaded")
    complete(page, 2)
    known = sent(page)[..., 3] > 0
    image = results(page)[1][..., 0]
    page.locator("#alternatives .picture").nth(1).click()
    words = judge(page, r"The likelihood of image 2\.$")
    answer = asked(shipped.url, image, known, model="mnist-conditional")
    told = float(words.removeprefix("What was erased, given the rest: ").split()[0])
    assert told == pytest.approx(answer["bits_per_dim"], rel=0.006)  # three figures are told
    assert f"each of {answer['counted']} values" in words and answer["counted"] == (~known).sum()
    blue = shown(visitor)[..., 2] - shown(visitor)[..., 0]
    assert (blue[known] > 20).all() and (blue[~known] <= 0).all(), (
        "what was given is marked as such"
    )
    whole = asked(shipped.url, image, model="mnist-conditional", labels="all")
    says(page, "#guess-words", f"takes it for: {whole['labels'][0]['label']} ")
    press(page, "Back to the completions")
    expect(page.locator("#alternatives .picture")).to_have_count(2)
    expect(page.locator("#likelihood")).to_be_hidden()
