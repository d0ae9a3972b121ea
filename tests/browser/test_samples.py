"""Samples, as a person draws them: the button, the grid that fills, the stop, and what one image is good for."""

import base64
import io
import subprocess

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.browser.conftest import PHONE, says
from tests.server.conftest import EAGER, eventually, serving

# for each frame, the rows that have pixels
ROWS = """canvases => canvases.map(canvas => {
    const {data, width, height} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    return Array.from({length: height}, (_, y) => data[4 * y * width + 3]).filter(Boolean).length;
})"""


def rows(page: Page) -> list[int]:
    return page.locator("#samples canvas").evaluate_all(ROWS)


def drawn(page: Page, index: int = 0) -> np.ndarray:
    """RGB of an image of the grid."""
    canvas = page.locator("#samples .picture canvas").nth(index)
    data, width, height = canvas.evaluate("c => [[...c.getContext('2d').getImageData(0, 0, c.width, c.height).data],"
                                          " c.width, c.height]")
    pixels = np.array(data, np.uint8).reshape(height, width, 4)
    assert (pixels[..., 3] == 255).all()
    return pixels[..., :3]


def asked(url: str, **body) -> np.ndarray:
    """The first image that the service itself gives for these fields."""
    answer = httpx.post(f"{url}/v1/images/generations", json=body, timeout=60).json()
    return rgb(base64.b64decode(answer["data"][0]["b64_json"]))


def rgb(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def draw(page: Page, **fields) -> None:
    for name, value in fields.items():
        page.locator(f"#samples-form [name={name}]").fill(str(value))
    page.get_by_role("button", name="Draw", exact=True).and_(page.locator("#samples-form button")).click()


def test_a_new_visitor_has_images_after_one_click(shipped, visit):
    visitor = visit(shipped.url)
    page = visitor.ready()
    visitor.keep("samples-invitation-1280-light")
    page.get_by_role("button", name="Draw 16 images").click()
    says(page, "#samples .status", "16 images in")
    assert rows(page) == [28] * 16
    seed = int(page.locator("#samples .status").inner_text().split("seed ")[1].split(".")[0])
    np.testing.assert_array_equal(drawn(page, 3), asked(shipped.url, seed=seed + 3))
    visitor.keep("samples-1280-light")


def test_a_grid_fills_row_by_row_while_the_service_draws(slow, visit):
    with serving(slow, *EAGER) as server:
        visitor = visit(server.url)
        page = visitor.ready()
        draw(page, n=4)
        seen: list[int] = []
        kept = False
        while page.locator("#samples-form[data-running]").count():
            seen.append(sum(rows(page)))
            if 40 < seen[-1] < 90 and not kept:
                kept = True
                visitor.keep("samples-filling-1280-light")
        seen.append(sum(rows(page)))
        assert seen == sorted(seen), "rows never go away"
        assert seen[-1] == 4 * 28
        assert len(set(seen)) > 5, seen
        says(page, "#samples .status", "4 images in")


def test_stop_frees_the_slots_and_says_what_was_finished(slow, visit):
    with serving(slow, *EAGER, "--slots", "8") as server:
        visitor = visit(server.url)
        page = visitor.ready()
        draw(page, n=16)
        assert eventually(lambda: server.metric('linpix_state_slots_used{model="slow"}') == 8)
        page.get_by_role("button", name="being drawn").first.wait_for()
        page.get_by_role("button", name="Stop").click()
        says(page, "#samples .status", r"Stopped\. \d+ of 16 images finished\.")
        assert eventually(lambda: server.metric('linpix_state_slots_used{model="slow"}') == 0)
        assert server.metric('linpix_requests_total{endpoint="generations",outcome="cancelled"}') == 1
        expect(page.get_by_role("button", name="Image 16, not begun")).to_be_visible()
        assert page.locator("#samples .unfinished").count() > 7
        visitor.keep("samples-stopped-1280-light")
        draw(page, n=1)  # and the next one begins at once
        says(page, "#samples .status", "1 image in")


def test_class_temperature_and_seed_reach_the_service(shipped, visit):
    page = visit(shipped.url).ready()
    page.locator("#samples-form [name=label]").select_option("7")
    draw(page, n=2, seed=1234, temperature=0.5)
    says(page, "#samples .status", "2 images in .* from seed 1234")
    expect(page.locator("#samples output")).to_have_text("0.50")
    np.testing.assert_array_equal(drawn(page, 1), asked(shipped.url, seed=1235, temperature=0.5, label=7))
    page.locator("#samples-form [name=model]").select_option("cifar10-small")
    draw(page, n=1, seed=" 9 ", temperature=1)
    says(page, "#samples .status", "1 image in .* from seed 9")
    np.testing.assert_array_equal(drawn(page), asked(shipped.url, seed=9, model="cifar10-small"))


def test_an_image_can_be_enlarged_downloaded_told_as_curl_and_drawn_again(shipped, visit, tmp_path):
    visitor = visit(shipped.url)
    page = visitor.ready()
    page.locator("#samples-form [name=label]").select_option("3")
    draw(page, n=6, seed=40)
    says(page, "#samples .status", "6 images in")
    expected = drawn(page, 2)
    page.get_by_role("button", name="Image 3, seed 42").click()
    expect(page.get_by_role("heading", name="Seed 42")).to_be_visible()
    says(page, "#viewer-facts", "mnist-small · class 3 · temperature 1")

    with page.expect_download() as native:
        page.get_by_role("link", name="Download PNG").click()
    assert native.value.suggested_filename == "linpix-42.png"
    np.testing.assert_array_equal(rgb(native.value.path().read_bytes()), expected)
    with page.expect_download() as large:
        page.get_by_role("link", name="Ten times as large").click()
    np.testing.assert_array_equal(rgb(large.value.path().read_bytes()), expected.repeat(10, 0).repeat(10, 1))

    page.get_by_role("button", name="Copy as curl").click()
    says(page, "#viewer .status", "Copied")
    command = page.evaluate("navigator.clipboard.readText()")
    assert command == page.locator("#viewer-command").inner_text()
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    np.testing.assert_array_equal(rgb((tmp_path / "linpix-42.png").read_bytes()), expected)
    visitor.keep("samples-viewer-1280-light")

    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("heading", name="Seed 43")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="Reuse its seed").click()
    expect(page.locator("#samples-form [name=seed]")).to_have_value("42")
    draw(page, n=1)
    says(page, "#samples .status", "1 image in .* from seed 42")
    np.testing.assert_array_equal(drawn(page), expected)


def test_the_keyboard_alone_is_enough(shipped, visit):
    page = visit(shipped.url, size=PHONE).ready()
    page.keyboard.press("Tab")
    expect(page.get_by_role("tab", name="Samples")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tabpanel", name="Completion")).to_be_visible()
    expect(page.get_by_role("tab", name="Completion")).to_be_focused()
    page.keyboard.press("Home")
    expect(page.get_by_role("tabpanel", name="Samples")).to_be_visible()
    page.locator("#samples-form [name=n]").focus()
    page.keyboard.press("Enter")
    says(page, "#samples .status", "images in")
    picture = page.get_by_role("button", name="Image 1,")
    picture.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#viewer")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#viewer")).to_be_hidden()
    expect(picture).to_be_focused()


@pytest.mark.slow
def test_drawing_anew_while_drawing_stops_the_earlier_request(slow, visit):
    with serving(slow, *EAGER, "--slots", "8") as server:
        page = visit(server.url).ready()
        draw(page, n=8)
        assert eventually(lambda: server.metric('linpix_state_slots_used{model="slow"}') == 8)
        draw(page, n=1, seed=5)
        says(page, "#samples .status", "1 image in .* from seed 5")
        assert len(rows(page)) == 1
        assert eventually(lambda: server.metric('linpix_state_slots_used{model="slow"}') == 0)
        assert server.metric('linpix_requests_total{endpoint="generations",outcome="cancelled"}') == 1


def test_the_grid_shows_whole_pixels_and_fits_its_screen(shipped, visit):
    for size in ((1280, 800), PHONE):
        page = visit(shipped.url, size=size).ready()
        for count in (1, 5, 16):
            draw(page, n=count)
            says(page, "#samples .status", f"{count} images? in")
            boxes = page.locator("#samples canvas").evaluate_all(
                "all => all.map(canvas => canvas.getBoundingClientRect().toJSON())")
            assert {box["width"] % 28 for box in boxes} == {0}
            assert all(box["left"] >= 0 and box["right"] <= size[0] for box in boxes)
            assert max(box["bottom"] for box in boxes) <= size[1]
