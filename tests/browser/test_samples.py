"""Drawing samples: the button, the grid that fills, the stop, and the actions on one image."""

import base64
import io
import re
import subprocess
import time

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from linpix.model import checkpoint
from linpix.server.pictures.animation import UNDRAWN
from tests.browser.conftest import (
    PHONE,
    WAIT_MS,
    chosen,
    downloaded,
    findings,
    press,
    says,
    take,
)
from tools.harness.commands import ROOT
from tools.harness.servers import EAGER, fetch, serving

# for each frame, the rows that have pixels
ROWS = """canvases => canvases.map(canvas => {
    const {data, width, height} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    return Array.from({length: height}, (_, y) => data[4 * y * width + 3]).filter(Boolean).length;
})"""  # noqa: E501


def rows(page: Page) -> list[int]:
    return page.locator("#samples .picture canvas").evaluate_all(ROWS)


def drawn(page: Page, index: int = 0) -> np.ndarray:
    """RGB of an image of the grid."""
    canvas = page.locator("#samples .picture canvas").nth(index)
    data, width, height = canvas.evaluate(
        "c => [[...c.getContext('2d').getImageData(0, 0, c.width, c.height).data],"
        " c.width, c.height]"
    )
    pixels = np.array(data, np.uint8).reshape(height, width, 4)
    assert (pixels[..., 3] == 255).all()
    return pixels[..., :3]


def asked(url: str, **body) -> np.ndarray:
    """The first image that the service itself gives for these fields."""
    answer = fetch(f"{url}/v1/images/generations", "POST", json=body).json()
    return rgb(base64.b64decode(answer["data"][0]["b64_json"]))


def rgb(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def choose(page: Page, **fields: str) -> None:
    for name, value in fields.items():
        if name == "label":
            page.locator(f"#samples-form .chips label:has([value='{value}'])").click()
        else:
            take(page, value)


def draw(page: Page, **fields) -> None:
    for name, value in fields.items():
        page.locator(f"#samples-form [name={name}]").fill(str(value))
    page.get_by_role("button", name="Draw", exact=True).and_(
        page.locator("#samples-form button")
    ).click()


def test_a_new_visitor_sees_images_and_an_explanation_without_a_click(shipped, visit):
    visitor = visit(shipped.url)
    page = visitor.ready()
    says(page, "#samples .status", "16 images in")
    assert rows(page) == [28] * 16
    assert chosen(page) == "mnist-conditional"
    says(page, "#samples .facts", "draws a chosen class in 99 % of cases")
    seed = int(page.locator("#samples .status").inner_text().split("seed ")[1].split(".")[0])
    np.testing.assert_array_equal(
        drawn(page, 3), asked(shipped.url, seed=seed + 3, model="mnist-conditional")
    )
    says(page, ".intro", "^LinPix writes pictures pixel by pixel")
    expect(page.get_by_role("link", name="paper")).to_have_attribute(
        "href", "https://arxiv.org/abs/2006.16236"
    )
    assert page.locator("a[href='docs']").all_inner_texts() == ["API"]
    visitor.keep("samples-1280-light")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agreement", "begins"),
    [
        # of the same shape
        (
            {"mnist-small": None, "cifar10-small": 0.9, "mnist-conditional": 0.1},
            "mnist-conditional",
        ),
        # of equals the first
        ({"mnist-small": 0.5, "cifar10-small": 0.9, "mnist-conditional": 0.5}, "mnist-small"),
        ({"mnist-small": None, "cifar10-small": 0.9, "mnist-conditional": None}, "mnist-small"),
    ],
)
def test_the_page_begins_with_the_model_that_has_most_images_of_the_class_asked_for(
    shipped, visit, agreement, begins
):
    def told(route) -> None:
        cards = route.fetch().json()
        for card in cards["data"]:
            card["class_agreement"] = agreement[card["id"]]
        route.fulfill(json=cards)

    visitor = visit(shipped.url, panel="now")
    visitor.page.route("**/v1/models", told)
    visitor.page.reload()
    expect(visitor.ready().locator("#models :checked")).to_have_value(begins)


@pytest.mark.slow
def test_a_grid_fills_row_by_row_while_the_service_draws(slow, visit):
    with serving(slow, *EAGER) as server:
        visitor = visit(server.url)
        page = visitor.ready()
        page.locator("#samples .picture").first.wait_for()
        seen: list[int] = []
        kept, end = False, time.monotonic() + WAIT_MS / 1000
        while page.locator("#samples-form[data-running]").count():
            assert time.monotonic() < end, f"{seen[-1]} rows"
            seen.append(sum(rows(page)))
            if 160 < seen[-1] < 360 and not kept:
                kept = True
                visitor.keep("samples-filling-1280-light")
        seen.append(sum(rows(page)))
        assert seen == sorted(seen), "rows never go away"
        assert seen[-1] == 16 * 28
        assert any(0 < filled < 16 * 28 for filled in seen), seen
        says(page, "#samples .status", "16 images in")


@pytest.mark.slow
def test_stop_frees_the_slots_and_says_what_was_finished(slow, visit):
    with serving(slow, *EAGER, "--slots 8") as server:
        visitor = visit(server.url)
        page = visitor.ready()
        assert server.becomes('linpix_state_slots_used{model="slow"}', 8)
        page.get_by_role("button", name="being drawn").first.wait_for()
        press(page, "Stop")
        says(page, "#samples .status", r"Stopped\. \d+ of 16 images finished\.")
        assert server.becomes(
            'linpix_requests_total{endpoint="generations",outcome="cancelled"}', 1
        )
        assert server.becomes('linpix_state_slots_used{model="slow"}', 0)
        expect(page.get_by_role("button", name="Image 16, not begun")).to_be_visible()
        assert page.locator("#samples .unfinished").count() > 7
        visitor.keep("samples-stopped-1280-light")
        draw(page, n=1)  # and the next one begins at once
        says(page, "#samples .status", "1 image in")


@pytest.mark.slow
def test_class_temperature_and_seed_reach_the_service(shipped, visit):
    page = visit(shipped.url).ready()
    choose(page, model="mnist-small", label="7")
    draw(page, n=2, seed=1234, temperature=0.5)
    says(page, "#samples .status", "2 images in .* from seed 1234")
    expect(page.locator("#samples output")).to_have_text("0.50")
    np.testing.assert_array_equal(
        drawn(page, 1), asked(shipped.url, seed=1235, temperature=0.5, label=7)
    )
    take(page, "cifar10-small")
    draw(page, n=1, seed=" 9 ", temperature=1)
    says(page, "#samples .status", "1 image in .* from seed 9")
    np.testing.assert_array_equal(
        drawn(page), asked(shipped.url, seed=9, model="cifar10-small", temperature=1)
    )


@pytest.mark.slow
def test_an_image_can_be_enlarged_downloaded_shown_as_curl_and_drawn_again(
    shipped, visit, tmp_path
):
    visitor = visit(shipped.url)
    page = visitor.ready()
    choose(page, model="mnist-small", label="3")
    draw(page, n=6, seed=40, temperature=0.9)
    says(page, "#samples .status", "6 images in")
    expected = drawn(page, 2)
    press(page, "Image 3, seed 42")
    expect(page.get_by_role("heading", name="Image 3")).to_be_visible()
    says(page, "#viewer-facts", "mnist-small · class 3 · seed 42 · temperature 0.9")

    native = downloaded(page, "Download PNG")
    assert native.suggested_filename == "linpix-42.png"
    np.testing.assert_array_equal(rgb(native.path().read_bytes()), expected)
    large = downloaded(page, "Ten times as large")
    np.testing.assert_array_equal(
        rgb(large.path().read_bytes()), expected.repeat(10, 0).repeat(10, 1)
    )
    with page.expect_download() as saved:
        press(page, "Save as animation")
    says(page, "#viewer .status", "Saved")
    assert saved.value.suggested_filename == "linpix-42.gif"
    with Image.open(saved.value.path()) as drawing:
        assert (drawing.format, drawing.n_frames) == ("GIF", 29)
        for rows in (0, 14, 28):
            drawing.seek(rows)
            shown = np.asarray(drawing.convert("RGB"))[18::18, 18::18][:28, :28]
            np.testing.assert_array_equal(shown[:rows], expected[:rows])
            assert (shown[rows:] == UNDRAWN).all()

    press(page, "Copy as curl")
    says(page, "#viewer .status", "Copied")
    command = page.evaluate("navigator.clipboard.readText()")
    assert command == page.locator("#viewer-command").inner_text()
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    np.testing.assert_array_equal(rgb((tmp_path / "linpix-42.png").read_bytes()), expected)
    visitor.keep("samples-viewer-1280-light")

    page.keyboard.press("ArrowRight")
    says(page, "#viewer-facts", "seed 43")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Escape")
    choose(page, label="", model="cifar10-small")  # something else meanwhile
    press(page, "Image 3, seed 42")
    press(page, "Reuse its settings")
    expect(page.locator("#viewer")).to_be_hidden()
    for name, value in (
        ("seed", "42"),
        ("label", "3"),
        ("temperature", "0.9"),
    ):
        expect(
            page.locator(f"#samples-form [name={name}]{':checked' * (name == 'label')}")
        ).to_have_value(value)
    assert chosen(page) == "mnist-small"
    draw(page, n=1)
    says(page, "#samples .status", "1 image in .* from seed 42")
    np.testing.assert_array_equal(drawn(page), expected)

    for download in (native, large):  # a picture brings its settings back
        choose(page, model="cifar10-small")
        draw(page, n=2, seed=5, temperature=1)
        says(page, "#samples .status", "2 images in .* from seed 5")
        page.locator("#file").set_input_files(download.path())
        says(page, "#samples .status", "1 image in .* from seed 42")
        np.testing.assert_array_equal(drawn(page), expected)


@pytest.mark.slow
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
def test_one_of_each_class_is_drawn_named_and_kept_in_one_picture_that_draws_them_again(
    shipped, visit
):
    page = visit(shipped.url).ready()
    says(page, "#samples .status", "16 images in")
    choose(page, label="each")
    draw(page, seed=70)
    says(page, "#samples .status", "10 images in .* from seed 70")
    captions = page.locator("#samples .caption").all_inner_texts()
    assert [caption.split(" · ")[0] for caption in captions] == list("0123456789"), captions
    assert all(re.search(r"^\d( · (?!99)\d+ %)?$", caption) for caption in captions), captions
    expect(page.get_by_role("button", name="Image 8, a 7, seed 77")).to_be_visible()
    images = [drawn(page, index) for index in range(10)]
    np.testing.assert_array_equal(
        images[7], asked(shipped.url, model="mnist-conditional", seed=77, label=7)
    )
    with page.expect_download() as download:
        page.get_by_role("button", name="Save all").first.click()
    assert download.value.suggested_filename == "linpix-70-all.png"
    sheet = rgb(download.value.path().read_bytes())
    # four across, each four times as large
    np.testing.assert_array_equal(sheet[112:224:4, 112:224:4], images[5])
    draw(page, n=1, seed=2)
    says(page, "#samples .status", "from seed 2")
    page.locator("#file").set_input_files(download.value.path())
    says(page, "#samples .status", "10 images in .* from seed 70")
    np.testing.assert_array_equal(drawn(page, 9), images[9])


@pytest.mark.slow
def test_classes_whose_names_are_numbers_of_others_are_the_ones_chosen(visit, tmp_path):
    found = checkpoint.read(ROOT / "checkpoints/mnist-conditional")
    names = [str(number) for number in range(1, 11)]  # "1" is the class of index 0, a nought
    checkpoint.save(
        tmp_path / "counted", found.net, {"class_names": names, "attempts": found.attempts}, ""
    )
    # of a request; one of each is drawn by one for each
    with serving(tmp_path, "--max-n 4") as server:
        page = visit(server.url).ready()
        says(page, "#samples .status", "4 images in")
        choose(page, label="4")
        draw(page, n=1, seed=5)
        says(page, "#samples .status", "1 image in .* from seed 5")
        np.testing.assert_array_equal(drawn(page), asked(server.url, seed=5, label="4"))
        expect(page.locator("#samples .caption")).to_have_text(re.compile("^4( \u00b7 .*)?$"))
        choose(page, label="each")
        draw(page, seed=70)
        says(page, "#samples .status", "10 images in .* from seed 70")
        captions = page.locator("#samples .caption").all_inner_texts()
        assert [caption.split(" \u00b7 ")[0] for caption in captions] == names
        # an index, not a name
        old = visit(server.url, panel="samples?model=counted&label=0&seed=5&n=1").ready()
        says(old, "#samples .status", "1 image in")
        np.testing.assert_array_equal(drawn(old), asked(server.url, seed=5, label="1"))


@pytest.mark.slow
def test_a_link_brings_model_class_seed_and_temperature_back(shipped, visit):
    page = visit(shipped.url).ready()
    choose(page, model="mnist-small", label="4")
    draw(page, n=4, temperature=0.8)  # with a seed of its own
    says(page, "#samples .status", "4 images in")
    press(page, "Copy link")
    says(page, "#samples .status", "The link is copied")
    link, pictures = (
        page.evaluate("navigator.clipboard.readText()"),
        [drawn(page, index) for index in range(4)],
    )
    assert link.startswith(f"{shipped.url}/#/samples?")
    other = visit(shipped.url, panel=link.split("#/")[1]).ready()
    seed = re.search(r"seed=(\d+)", link)[1]
    says(other, "#samples .status", f"4 images in .* from seed {seed}")
    for name, value in (
        ("label", "4"),
        ("temperature", "0.8"),
        ("seed", seed),
    ):
        expect(
            other.locator(f"#samples-form [name={name}]{':checked' * (name == 'label')}")
        ).to_have_value(value)
    assert chosen(other) == "mnist-small"
    for index, picture in enumerate(pictures):
        np.testing.assert_array_equal(drawn(other, index), picture)
    missing = visit(shipped.url, panel="samples?model=none&seed=5").ready()
    says(missing, "#samples .notice", "none is no longer served. Choose another model.")
    bad = visit(shipped.url, panel="samples?n=0").ready()
    says(
        bad,
        "#samples .notice",
        "This link cannot be drawn: its n is 0. Value must be greater than or equal to 1.",
    )


@pytest.mark.slow
def test_the_grid_shows_whole_pixels_and_fits_its_screen(shipped, visit):
    for size in ((1280, 800), PHONE):
        page = visit(shipped.url, size=size).ready()
        for count in (1, 5, 16):
            draw(page, n=count)
            says(page, "#samples .status", f"{count} images? in")
            boxes = page.locator("#samples .picture canvas").evaluate_all(
                "all => all.map(canvas => canvas.getBoundingClientRect().toJSON())"
            )
            assert {box["width"] % 28 for box in boxes} == {0}
            assert all(box["left"] >= 0 and box["right"] <= size[0] for box in boxes)
            assert max(box["bottom"] for box in boxes) <= size[1]


@pytest.mark.slow
def test_a_word_is_one_picture_of_letters_from_one_seed_and_its_link_writes_it_again(
    shipped, varied, visit
):
    visitor = visit(varied.url)
    page = visitor.ready()
    press(page, "Write a word")
    expect(page.locator("#word [name=word]")).to_be_focused()
    page.keyboard.type("Hi5")
    page.keyboard.press("Tab")
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    says(page, "#word .status", "Hi5, each letter from seed 3")
    canvas = page.locator("#word canvas")
    width = canvas.evaluate("canvas => canvas.width")
    shown = np.array(visitor.pixels("#word canvas"), np.uint8).reshape(-1, width, 4)[3:-3, :, 0]
    expected = [np.zeros((28, 3), np.uint8)]
    for label, model in (("H", "letters"), ("i", "letters"), ("5", "mnist")):
        letter = asked(varied.url, model=f"{model}-conditional", label=label, seed=3)[..., 0]
        inked = np.flatnonzero((letter > 32).any(0))
        expected += [letter[:, inked[0] : inked[-1] + 1], expected[0]]
    np.testing.assert_array_equal(shown, np.hstack(expected))
    assert findings(page) == []
    press(page.locator("#word"), "Copy link")
    says(page, "#word .status", "The link is copied")
    link = page.evaluate("navigator.clipboard.readText()")
    other = visit(varied.url, panel=link.split("#/")[1], size=PHONE, touch=True)
    other.ready()
    says(other.page, "#word .status", "Hi5, each letter from seed 3")
    assert other.picture("#word canvas") == visitor.picture("#word canvas")
    assert other.page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    press(other.page, "Close")
    says(other.page, "#samples .status", "16 images in")
    expect(visit(shipped.url).ready().locator("#write")).to_be_hidden()  # it has no letters
