"""Completion: the example, real strokes, own models, photographs; uploads by file, paste and
drop.
"""

import base64
import dataclasses
import re

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from linpix.model import checkpoint
from linpix.model.nets import net_for
from linpix.training.init import inverted, negative
from tests.browser.conftest import (
    DESKTOP,
    PHONE,
    Visit,
    chosen,
    downloaded,
    press,
    says,
    take,
    written,
)
from tests.browser.test_samples import asked, rgb
from tests.fuzz.pictures import encode as png
from tests.nets import CONDITIONAL, saved
from tools.harness.commands import ROOT
from tools.harness.servers import serving

pytestmark = pytest.mark.slow

TOP_OF_SEVEN = [(8, 5), (20, 5), (17, 13)]  # in pixels of a 28 x 28 image


def stroke(
    page: Page, points: list[tuple[float, float]], size: int = 28, within: str = "#editor"
) -> None:
    """The mouse, pressed along these points."""
    page.locator(within).scroll_into_view_if_needed()
    box = page.locator(within).bounding_box()
    assert box
    places = [
        (box["x"] + x / size * box["width"], box["y"] + y / size * box["height"]) for x, y in points
    ]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=12)
    page.mouse.up()


def complete(page: Page, n: int) -> None:
    page.locator("#completion-form [name=n]").fill(str(n))
    press(page, "Complete", exact=True)
    says(page, "#completion .status", f"{n} completions? in")


def results(page: Page, within: str = "#alternatives") -> np.ndarray:
    """(n, H, W, 3), as the page shows them, without the photographs around them."""
    found = page.locator(f"{within} .picture canvas:not(.around)").evaluate_all(
        "all => all.map(c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data])"
    )
    pixels = np.array(found, np.uint8)
    side = round((pixels.shape[1] / 4) ** 0.5)
    pixels = pixels.reshape(-1, side, side, 4)
    assert (pixels[..., 3] == 255).all(), "every frame is full"
    return pixels[..., :3]


def sent(page: Page, results: str = "#alternatives .picture") -> np.ndarray:
    """RGBA of the picture that went out, as the first result's dialog offers it."""
    page.locator(results).first.click()
    expect(page.locator("#viewer-sent")).to_have_attribute("href", re.compile("^blob:"))
    with page.expect_download() as download:
        page.locator("#viewer-sent").click()
    picture = Image.open(download.value.path())
    page.keyboard.press("Escape")  # which takes the address of the download away
    assert picture.mode == "RGBA"
    return np.array(picture)


def digit(url: str, label: int) -> np.ndarray:
    return asked(url, label=label, seed=3, temperature=0.7)[..., 0]


def begin(visit, server, *, model: str = "", live: bool = False, **options) -> tuple[Visit, Page]:
    """An empty board. model: to be chosen instead of the page's own choice, mnist-conditional."""
    visitor = visit(server.url, panel="completion", **options)
    page = visitor.ready()
    says(page, "#completion .status", "An example, completed")
    page.locator("#options summary").click()
    page.get_by_label("Complete after each stroke").set_checked(live)
    if model:
        take(page, model)
    press(page, "Clear")
    return visitor, page


def photograph(pixels: np.ndarray) -> np.ndarray:
    """A digit in ink on yellowish paper, off its centre: 600 x 400, in RGB."""
    paper = np.full((400, 600, 3), (226, 220, 190), np.uint8)
    ink = (
        np.asarray(Image.fromarray(pixels).resize((224, 224), Image.Resampling.BICUBIC))[..., None]
        / 255
    )
    paper[100:324, 40:264] = paper[100:324, 40:264] * (1 - ink) + np.array([40, 40, 80]) * ink
    return paper


def test_it_opens_with_an_example_and_completes_after_each_stroke_and_after_undo(shipped, visit):
    visitor = visit(shipped.url, panel="completion")
    page = visitor.ready()
    says(page, "#completion .status", "An example, completed")
    visitor.keep("completion-example-1280-light")
    assert len(results(page)) == 6
    assert all(
        re.search(r"^\d( · (?!99)\d+ %)?$", words)
        for words in page.locator("#completion .caption").all_inner_texts()
    )
    stroke(page, TOP_OF_SEVEN)  # which takes the place of the example
    says(page, "#completion .status", "6 completions in")
    picture = sent(page)
    assert (
        picture[5, 9:20, 0].min() == 255
        and (picture[:3, :, :3] == 0).all()
        and (picture[:14, :, 3] == 255).all()
    )
    draws = page.locator("#completion .draw")
    stroke(page, [(14, 8), (20, 8)])
    expect(draws).to_have_count(3)
    press(page, "Undo")
    expect(draws).to_have_count(4)
    says(page, "#completion .status", "6 completions in")
    np.testing.assert_array_equal(sent(page), picture)
    page.locator("#editor").focus()
    page.keyboard.press("Enter")
    expect(draws).to_have_count(5)
    says(page, "#completion .status", "6 completions in")
    press(page, "One of each that fits")
    says(page, "#completion .status", r"\d class(es)? of 10 fit in")
    captions = page.locator("#completion .caption").all_inner_texts()
    assert len({words[0] for words in captions}) == len(captions) >= 1, captions
    shares = [re.findall(r"\d+(?= %)", words) for words in captions]
    sure = [int(share[0]) if share else 99 for share in shares]
    assert sure == sorted(sure, reverse=True) and min(sure) >= 50, sure
    visitor.keep("completion-each-1280-light")


def test_a_model_of_dark_ink_on_paper_has_paper_and_a_dark_pen_and_takes_pictures_as_they_are(
    visit, tmp_path
):
    found = checkpoint.read(ROOT / "checkpoints/mnist-conditional")
    net = net_for(negative(found.net.config))
    net.load_state_dict(inverted(found.net.state_dict(), found.net.config))
    source = {
        name: found.provenance[name] for name in ("temperature_range", "class_names", "attempts")
    }
    checkpoint.save(
        tmp_path / "mine",
        net,
        source | {"data": "photos", "board": {"ground": [255], "ink": [20], "prepare": None}},
        "",
    )
    with serving(tmp_path, "--models mine") as server:
        visitor, page = begin(visit, server)
        stroke(page, TOP_OF_SEVEN)
        complete(page, 6)
        visitor.keep("completion-own-1280-light")
        picture = sent(page)
        assert (picture[:3, :, :3] == 255).all() and picture[5, 9:20, 0].max() == 20
        assert (results(page)[:, 14:, :, 0] > 200).mean() > 0.7, "paper below"
        shape = 255 - digit(server.url, 3)
        assert shape.mean() < 128, "the model draws dark on light"
        page.locator("#file").set_input_files(written(tmp_path, "shape.png", png(255 - shape)))
        says(page, "#completion .status", "^shape.png is loaded, 28 . 28. Its lower half")
        expect(page.locator("#preparing")).to_be_hidden()
        complete(page, 1)
        np.testing.assert_array_equal(sent(page)[:14, :, 0], 255 - shape[:14])


def test_a_preparation_that_fails_says_why_and_the_frame_and_the_colour_model_help(
    shipped, visit, tmp_path
):
    visitor, page = begin(visit, shipped, live=True)
    sheet = np.full((240, 320, 3), (226, 220, 190), np.uint8)
    for left, label in ((20, 7), (190, 3)):
        ink = digit(shipped.url, label).repeat(4, 0).repeat(4, 1)[:112, :112] > 128
        sheet[60:172, left : left + 112][ink] = (30, 30, 80)
    page.locator("#file").set_input_files(written(tmp_path, "two.png", png(sheet)))
    says(
        page,
        "#upload-words",
        "^Not prepared: 2 separate shapes were found; crop the picture to one of them",
    )
    expect(page.locator("#completion .picture")).to_have_count(0)
    visitor.keep("completion-reason-1280-light")
    stroke(page, [(0.86, 0.98), (0.5, 0.6)], size=1, within="#upload-canvas")
    says(page, "#upload-words", "^The model sees what is in the frame")
    says(page, "#completion .status", "6 completions in")
    expect(page.get_by_label("Prepare (find the ink)")).to_be_checked()
    assert page.locator("#completion .laid").count() == 6, "they are shown on the photograph"
    visitor.keep("completion-frame-1280-light")
    before = visitor.picture("#editor")
    page.locator("#upload-canvas").focus()
    page.keyboard.press("-")  # a smaller frame, by the keyboard
    says(page, "#completion .status", "6 completions in")
    press(page, "Undo")
    assert visitor.picture("#editor") == before
    boat = np.full((90, 120, 3), (120, 180, 235), np.uint8)
    boat[60:], boat[20:60, 60:80] = (30, 80, 150), (220, 60, 40)
    page.locator("#file").set_input_files(written(tmp_path, "boat.png", png(boat)))
    press(page, "In colour: Textures, smaller")
    says(page, "#completion .status", "6 completions in")
    assert chosen(page) == "cifar10-small"


def test_quick_strokes_leave_one_draw_of_each_and_clear_takes_the_completions_away(shipped, visit):
    _, page = begin(visit, shipped, live=True)
    expect(page.locator("#completion .picture")).to_have_count(0)
    expect(page.locator("#completion .status")).to_be_empty()
    before = page.locator("#completion .draw").count()
    page.locator("#editor").focus()
    for key in ["Space", *["Shift+ArrowRight"] * 5]:
        page.keyboard.press(key)
    says(page, "#completion .status", "6 completions in")
    draws = page.locator("#completion .draw")
    words = draws.evaluate_all("all => all.map(one => one.ariaLabel)")
    assert len(set(words)) == len(words) > before
    expect(page.locator("#completion .draw[aria-current=true]")).to_have_count(1)


def test_a_photographed_letter_is_prepared_and_completed_by_the_model_of_letters(
    varied, visit, tmp_path
):
    visitor, page = begin(visit, varied, live=True)
    shapes = {
        "letter": asked(varied.url, model="letters-conditional", label="R", seed=5)[..., 0],
        "digit": digit(varied.url, 7),
    }
    files = {
        name: written(tmp_path, f"{name}.png", png(photograph(shape)))
        for name, shape in shapes.items()
    }

    def load(name: str, words: str, model: str) -> None:
        page.locator("#file").set_input_files(files[name])
        says(page, "#upload-words", words)
        says(page, "#completion .status", "6 completions in")
        expect(page.get_by_label("Prepare (find the ink)")).to_be_checked()
        assert chosen(page) == model

    load("letter", "^It looks like a letter, and Letters knows these", "letters-conditional")
    captions = page.locator("#completion .caption").all_inner_texts()
    assert captions and all(re.match("[A-Za-z]( |$)", words) for words in captions), captions
    assert page.locator("#completion .laid").count() == 6
    visitor.keep("completion-letter-1280-light")
    requests: list[str] = []
    page.on("request", lambda one: requests.append(one.url) if "edits" in one.url else None)
    press(page, "One of each that fits")
    says(page, "#completion .status", r"class(es)? in 16 tries in")
    assert len(requests) == 16, "of 52 classes"
    load("digit", "^It looks like a digit, and Digits knows these", "mnist-conditional")
    take(page, "letters-conditional")  # the visitor decides, and the page only offers
    says(page, "#completion .status", "6 completions in")
    load("digit", "^It looks like a digit", "letters-conditional")
    press(page, "Use Digits")
    assert chosen(page) == "mnist-conditional"


def test_a_large_photograph_is_sent_small_and_a_file_that_is_no_picture_leaves_the_board(
    shipped, visit, tmp_path
):
    visitor, page = begin(visit, shipped)
    large = np.asarray(
        Image.fromarray(photograph(digit(shipped.url, 7))).resize((1800, 1200))
    ).astype(int)
    large = png(
        (large + np.random.default_rng(0).integers(-3, 4, large.shape))
        .clip(0, 255)
        .astype(np.uint8)
    )
    with page.expect_request_finished(
        lambda request: request.url.endswith("/v1/images/edits")
    ) as asked_for:
        page.locator("#file").set_input_files(written(tmp_path, "large.png", large))
    assert (
        1000
        < int(asked_for.value.all_headers()["content-length"])
        < 400_000
        < 2_000_000
        < len(large)
    )
    says(
        page,
        "#completion .status",
        "^large.png is loaded and prepared, cropped and shrunk to 28 . 28.",
    )
    before = visitor.picture("#editor")
    page.locator("#file").set_input_files(written(tmp_path, "photo.heic", b"ftypheic" * 100))
    says(
        page,
        "#completion .notice",
        "^This browser cannot read photo.heic. Save it as PNG or JPEG.$",
    )
    assert visitor.picture("#editor") == before


@pytest.mark.parametrize("way", ["file", "paste", "drop"])
def test_a_picture_comes_by_file_by_paste_and_by_drop(shipped, visit, tmp_path, way):
    _, page = begin(visit, shipped)
    pixels = digit(shipped.url, 3)
    picture = png(pixels)
    if way == "file":
        with page.expect_file_chooser() as chooser:
            press(page, "Load picture")
        chooser.value.set_files(written(tmp_path, "three.png", picture))
    else:
        page.evaluate(
            """([way, base64]) => {
            const bytes = Uint8Array.from(atob(base64), letter => letter.charCodeAt(0));
            const files = new DataTransfer();
            files.items.add(new File([bytes], 'three.png', {type: 'image/png'}));
            const target = document.getElementById('editor');
            target.dispatchEvent(way === 'paste'
                ? new ClipboardEvent('paste', {clipboardData: files, bubbles: true, cancelable: true})
                : new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true}));
        }""",  # noqa: E501
            [way, base64.b64encode(picture).decode()],
        )
    says(page, "#completion .status", "three.png is loaded")
    complete(page, 2)
    went = sent(page)
    np.testing.assert_array_equal(went[:14, :, 0], pixels[:14])
    assert (went[14:, :, 3] == 0).all()


def test_the_page_lays_a_completion_back_over_its_photograph(shipped, visit, tmp_path):
    visitor, page = begin(visit, shipped)
    upload = photograph(digit(shipped.url, 7))
    page.locator("#file").set_input_files(written(tmp_path, "photo.png", png(upload)))
    says(page, "#completion .status", "photo.png is loaded and prepared")
    complete(page, 1)
    known = sent(page)[..., 3] > 0
    drawn = results(page)[0][..., 0]
    for _ in range(2):  # as it was completed, and once it is pinned and some of it drawn again
        page.locator("#alternatives .picture").first.click()
        download = downloaded(page, "Save photograph")
        laid = np.asarray(Image.open(download.path()).convert("RGB")).astype(int)
        visitor.keep("completion-photograph-1280-light")
        press(page, "Pin it")
        answer = shipped.post(
            "/v1/images/edits",
            files={"image": png(upload)},
            data={"prepare": "mnist", "keep_rows": 28},
        ).json()
        left, top, right, _ = answer["crop"]
        side = (right - left) / 28
        rows, columns = ((np.arange(28) + 0.5) * side + start for start in (top, left))
        cells = laid[rows.astype(int)][:, columns.astype(int)]
        ink = cells.sum(-1) < 350
        assert (ink == (drawn > 128))[~known & ((drawn < 20) | (drawn > 235))].mean() > 0.97, (
            "ink where the model drew"
        )
        assert (np.abs(cells[~known & (drawn < 5) & ~ink] - (226, 220, 190)) <= 12).mean() > 0.99, (
            "and paper elsewhere"
        )
        outside = np.ones(upload.shape[:2], bool)
        outside[int(top) :, int(left) : int(right) + 1] = False
        np.testing.assert_array_equal(laid[outside], upload[outside])
        np.testing.assert_array_equal(
            cells[:10], upload[rows.astype(int)][:, columns.astype(int)][:10]
        )
        press(page, "Rectangle")
        stroke(page, [(4, 20), (24, 24)])
        complete(page, 1)
        known[...] = True
        known[20:25, 4:25] = False
        drawn = results(page)[0][..., 0]


@pytest.mark.parametrize("ink", [(20, 20, 120), (255, 255, 255)], ids=["dark", "white"])
def test_a_transparent_picture_is_laid_back_on_transparency_and_is_not_in_colour(
    shipped, visit, tmp_path, ink
):
    visitor, page = begin(visit, shipped)
    seven = digit(shipped.url, 7).repeat(20, 0).repeat(20, 1)
    alpha = np.where(seven > 127, 255, 0).astype(np.uint8)
    sticker = np.dstack([np.full((*alpha.shape, 3), ink, np.uint8), alpha])
    page.locator("#file").set_input_files(written(tmp_path, "sticker.png", png(sticker)))
    says(page, "#completion .status", "sticker.png is loaded and prepared")
    expect(page.locator("#upload-words button")).to_have_count(0)
    complete(page, 1)
    page.locator("#alternatives .picture").first.click()
    download = downloaded(page, "Save photograph")
    visitor.keep("completion-sticker-1280-light")
    laid = np.asarray(Image.open(download.path()).convert("RGBA")).astype(int)
    shown = laid[..., 3] > 128
    assert np.abs(laid[shown][:, :3] - ink).max() <= 12, "nothing but ink is shown"
    upper = np.s_[: shown.shape[0] // 4]
    assert (shown[upper] == (alpha[upper] > 0)).all(), "the known part stays"
    assert 0.02 < shown[shown.shape[0] // 2 :].mean() < 0.3, "ink is drawn in the erased half"


def test_a_completion_can_be_pinned_erased_again_and_taken_back(shipped, visit):
    visitor, page = begin(visit, shipped)
    stroke(page, TOP_OF_SEVEN)
    before = visitor.picture("#editor")
    complete(page, 3)
    expect(page.locator("#known")).to_be_empty()
    images = results(page)
    page.locator("#alternatives .picture").nth(1).click()
    press(page, "Pin it")
    says(page, "#completion .status", "Image 2 is your picture now")
    expect(page.get_by_role("button", name=re.compile("Image 2, .*, pinned"))).to_be_visible()
    expect(page.get_by_role("button", name="Erase", exact=True)).to_have_attribute(
        "aria-pressed", "true"
    )
    visitor.keep("completion-pinned-1280-light")
    press(page, "Undo")
    assert visitor.picture("#editor") == before, "the way back"
    expect(page.get_by_role("button", name=re.compile("pinned"))).to_have_count(0)
    press(page, "Redo")
    press(page, "Rectangle")
    stroke(page, [(8.5, 18.5), (18.5, 22.5)])
    complete(page, 2)
    again = results(page)
    kept = np.ones((28, 28), bool)
    kept[18:23, 8:19] = False
    for image in again:
        np.testing.assert_array_equal(image[kept], images[1][kept])
    np.testing.assert_array_equal(sent(page)[..., 3] > 0, kept)


def test_the_same_hole_is_completed_by_the_prefix_and_by_all_that_is_known(shipped, visit):
    visitor, page = begin(visit, shipped, model="mnist-small")
    stroke(page, TOP_OF_SEVEN)
    press(page, "Prefix or all")
    says(page, "#completion .notice", "All known pixels come before the first hole.* Press Inverse")
    # trying again would not help
    expect(page.locator("#completion .notice button")).to_have_count(0)
    press(page, "Take a sample")
    says(page, "#completion .status", "A sample, completed")
    press(page, "Keep all")
    press(page, "Rectangle")
    stroke(page, [(6.5, 8.5), (20.5, 17.5)])
    page.locator("#completion-form [name=n]").fill("2")
    press(page, "Prefix or all")
    says(page, "#completion .status", "The same hole and seeds")
    says(page, "#strip-prefix", "Digits, smaller · 230 pixels")
    says(page, "#strip-all", "Digits · 634 pixels")
    visitor.keep("completion-strip-1280-light")
    shown = results(page, "#strip")
    seeds = []
    for at, (side, model) in enumerate(
        (("#strip-prefix", "mnist-small"), ("#strip-all", "mnist-conditional"))
    ):
        picture = sent(page, f"{side} .picture")
        seeds.append(
            page.locator(f"{side} .picture").first.get_attribute("aria-label").split("seed ")[1]
        )
        known = np.ones((28, 28), bool)
        known[8:18, 6:21] = False
        np.testing.assert_array_equal(picture[..., 3] > 0, known)
        if side == "#strip-prefix":
            picture[np.arange(784).reshape(28, 28) >= 230] = 0
        answer = shipped.post(
            "/v1/images/edits",
            files={"image": png(picture)},
            data={"model": model, "seed": seeds[-1]},
        ).json()["data"][0]
        alone = rgb(base64.b64decode(answer["b64_json"]))
        np.testing.assert_array_equal(
            shown[2 * at][~known], alone[~known], "in the hole, what the model draws alone"
        )
    assert seeds[0] == seeds[1]
    page.locator("#strip-prefix .picture").first.click()
    expect(page.locator("#viewer-save")).to_have_attribute("href", re.compile("^blob:"))
    download = downloaded(page, "Download PNG")
    np.testing.assert_array_equal(np.asarray(Image.open(download.path()).convert("RGB")), shown[0])
    with page.expect_download() as saved:
        press(page, "Save as animation")
    with Image.open(saved.value.path()) as drawing:
        drawing.seek(drawing.n_frames - 1)
        last = np.asarray(drawing.convert("RGB"))
    np.testing.assert_array_equal(last[18::18, 18::18][:28, :28], shown[0])
    press(page, "Pin it")
    says(page, "#completion .status", "Image 1 is your picture now")
    press(page, "Rectangle")
    stroke(page, [(2.5, 24.5), (4.5, 25.5)])
    press(page, "Prefix or all")
    says(page, "#completion .status", "The same hole and seeds")
    pinned = sent(page, "#strip-all .picture")
    assert (pinned[..., 3] == 0).sum() == 6
    np.testing.assert_array_equal(
        np.where(pinned[..., 3:] > 0, pinned[..., :3], shown[0]), shown[0]
    )
    press(page, "Back to the completions")
    expect(page.locator("#strip")).to_be_hidden()
    take(page, "cifar10-small")
    press(page, "Prefix or all")
    says(
        page,
        "#completion .notice",
        "No loaded model uses all known pixels of 32 . 32 pictures. Load a conditional",
    )


def test_pictures_to_try_are_loaded_as_uploads_and_offered_where_a_model_can_take_them(
    shipped, varied, visit
):
    visitor, page = begin(visit, varied, live=True)
    for name, model in (
        ("Half a 4", "mnist-conditional"),
        ("A letter", "letters-conditional"),
        ("A photographed 7", "mnist-conditional"),
        ("A boat", "cifar10-conditional"),
        ("A sticker", "avatars"),
    ):
        page.get_by_role("button", name=name).focus()
        page.keyboard.press("Enter")
        says(page, "#completion .status", "6 completions in")
        assert chosen(page) == model, name
        expect(page.locator("#tries")).to_be_hidden()
        expect(page.locator("#editor")).to_be_focused()
        if name != "A sticker":
            press(page, "Clear")
    assert visitor.pixels("#alternatives .around")[3] == 0, "laid back on transparency"
    few = visit(shipped.url, panel="completion", size=PHONE).ready()
    expect(few.locator("#tries button")).to_have_count(3)  # for digits and colours


def test_a_link_to_completions_has_their_settings_and_says_that_it_has_no_picture(shipped, visit):
    _, page = begin(visit, shipped, model="mnist-small")
    stroke(page, TOP_OF_SEVEN)
    page.locator("#completion-form [name=seed]").fill("5")
    complete(page, 3)
    press(page.locator("#completion"), "Copy link")
    says(page, "#completion .status", "The link is copied. It has these settings, and not your")
    link = page.evaluate("navigator.clipboard.readText()")
    other = visit(shipped.url, panel=link.split("#/")[1]).ready()
    says(other, "#completion .status", "no picture. Draw, load or choose one")
    assert chosen(other) == "mnist-small"
    expect(other.locator("#tries")).to_be_visible()
    stroke(other, TOP_OF_SEVEN)
    says(other, "#completion .status", "3 completions in")
    np.testing.assert_array_equal(results(other), results(page))


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_a_tall_model_of_odd_sides_draws_completes_and_takes_pictures(visit, tmp_path, size):
    """Random weights of 9 x 23: the page is looked at, not the pictures."""
    config = dataclasses.replace(CONDITIONAL, width=9, height=23, patch=1)
    saved(tmp_path / "models/tall", config)
    given = np.zeros((23, 9), np.uint8)  # the dark edge says that it is not to be inverted
    given[2:-2, 2:-2] = np.random.default_rng(0).integers(0, 256, (19, 5))
    photo = written(tmp_path, "photo.png", png(given.repeat(10, 0).repeat(10, 1)))
    with serving(tmp_path / "models") as server:
        visitor, page = begin(visit, server, size=size)
        page.locator("#file").set_input_files(photo)
        says(page, "#completion .status", "^photo.png is loaded, cropped and shrunk to 9 . 23")
        complete(page, 6)
        for shown in ("#editor", "#alternatives .picture canvas"):
            box = page.locator(shown).first.bounding_box()
            assert box and box["width"] / 9 == pytest.approx(box["height"] / 23, rel=0.05)
            assert box["height"] < 0.7 * size[1]
        visitor.keep(f"completion-tall-{size[0]}")
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        known = sent(page)
        assert known.shape == (23, 9, 4)
        assert np.array_equal(known[:11, :, 0], given[:11]) and not known[12:, :, 3].any()
        page.locator("#alternatives .picture").first.click()
        with page.expect_download() as drawing:
            press(page, "Save as animation")
        with Image.open(drawing.value.path()) as film:
            film.seek(film.n_frames - 1)
            last = np.asarray(film.convert("L"))
        cell = len(last) // 25  # a pixel's side; a border of one is around the picture
        assert np.array_equal(last[cell::cell, cell::cell][:11, :9], given[:11])
