"""Completion with real strokes; uploads by file, paste and drop; what the page says about known pixels."""

import base64
import gzip
import io
import re
import subprocess
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.browser.conftest import DESKTOP, Visit, says, written

pytestmark = pytest.mark.slow

TOP_OF_SEVEN = [(8, 5), (20, 5), (17, 13)]  # in pixels of a 28 x 28 image


def stroke(page: Page, points: list[tuple[float, float]], size: int = 28) -> None:
    """The mouse, pressed along these points."""
    page.locator("#editor").scroll_into_view_if_needed()
    box = page.locator("#editor").bounding_box()
    assert box
    places = [(box["x"] + x / size * box["width"], box["y"] + y / size * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=12)
    page.mouse.up()


def complete(page: Page, n: int) -> None:
    page.locator("#completion-form [name=n]").fill(str(n))
    page.get_by_role("button", name="Complete", exact=True).click()
    says(page, "#completion .status", f"{n} completions? in")


def results(page: Page) -> np.ndarray:
    """(n, H, W, 3), as the page shows them."""
    found = page.locator("#completion .picture canvas").evaluate_all(
        "all => all.map(c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data])")
    pixels = np.array(found, np.uint8)
    side = round((pixels.shape[1] / 4) ** 0.5)
    pixels = pixels.reshape(-1, side, side, 4)
    assert (pixels[..., 3] == 255).all(), "every frame is full"
    return pixels[..., :3]


def sent(page: Page, results: str = "#completion .picture") -> np.ndarray:
    """RGBA of the picture that went out, as the first result's dialog offers it."""
    page.locator(results).first.click()
    expect(page.locator("#viewer-sent")).to_have_attribute("href", re.compile("^blob:"))
    with page.expect_download() as download:
        page.locator("#viewer-sent").click()
    page.keyboard.press("Escape")
    picture = Image.open(download.value.path())
    assert picture.mode == "RGBA"
    return np.array(picture)


def by_curl(page: Page, folder: Path) -> np.ndarray:
    """RGB that the command of the open dialog gets, run in a folder with what it says to download."""
    with page.expect_download() as download:
        page.locator("#viewer-sent").click()
    download.value.save_as(folder / "picture.png")
    page.get_by_role("button", name="Copy as curl").click()
    says(page, "#viewer .status", "It reads picture.png")
    subprocess.run(["bash", "-c", page.locator("#viewer-command").inner_text()], cwd=folder, check=True)
    [answer] = folder.glob("linpix-*.png")
    return np.asarray(Image.open(answer).convert("RGB"))


def edge_of(page: Page, index: int = 0) -> set[tuple[str, ...]]:
    """The lines around the holes of a completion, as (x, y, direction), if they are to be seen."""
    style = page.locator("#completion .picture").nth(index).evaluate(
        "one => getComputedStyle(one, '::after').content === 'none' ? '' : "
        "getComputedStyle(one, '::after').backgroundImage")
    return set(re.findall(r"M(\d+)%20(\d+)([vh])1", style))


def digit(url: str, label: int, seed: int = 3) -> np.ndarray:
    body = {"label": label, "seed": seed, "temperature": 0.7}
    answer = httpx.post(f"{url}/v1/images/generations", json=body, timeout=60)
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))).convert("L"))


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def begin(visit, server, *, model: str = "", **options) -> tuple[Visit, Page]:
    """model: to be chosen instead of the page's own choice, mnist-conditional."""
    visitor = visit(server.url, panel="completion", **options)
    page = visitor.ready()
    if model:
        page.locator("#completion-form [name=model]").select_option(model)
    return visitor, page


def test_a_drawn_half_digit_is_completed_in_several_ways(shipped, visit):
    visitor, page = begin(visit, shipped)
    visitor.keep("completion-invitation-1280-light")
    expect(page.locator("#editor-hint")).to_be_visible()
    stroke(page, TOP_OF_SEVEN)
    expect(page.locator("#editor-hint")).to_be_hidden()
    complete(page, 6)
    visitor.keep("completion-1280-light")
    picture = sent(page)
    assert (picture[:14, :, 3] == 255).all() and (picture[14:, :, 3] == 0).sum() > 13 * 28
    assert picture[5, 9:20, 0].min() == 255, "the stroke is there"
    expect(page.locator("#known")).to_be_empty()  # nothing was ignored
    page.locator("#editor").focus()
    page.locator("#editor").hover()
    assert edge_of(page) == set(), "plain, unless one points at it or it has the focus"
    page.locator("#alternatives .picture").nth(2).hover()
    assert {("5", "14", "h"), ("27", "14", "h")} <= edge_of(page) == edge_of(page, 5)
    images = results(page)
    known = picture[..., 3] == 255
    for image in images:
        np.testing.assert_array_equal(image[known], picture[known][:, :3])
    assert len({image.tobytes() for image in images}) == 6, "six different ways"
    assert (images[:, 14:] > 128).any(axis=(1, 2, 3)).all(), "all of them drew something"


def test_what_is_erased_is_filled_in_and_the_page_tells_what_was_not_used(shipped, visit):
    visitor, page = begin(visit, shipped, model="mnist-small")
    page.get_by_role("button", name="Take a sample").click()
    says(page, "#completion .status", "A sample of seed")
    page.get_by_role("button", name="Keep all").click()
    page.get_by_role("button", name="Erase").click()
    page.locator("#brush").fill("4")
    stroke(page, [(9, 8), (18, 8)])
    stroke(page, [(9, 16), (18, 16)])
    complete(page, 4)
    picture = sent(page)
    answer = httpx.post(f"{shipped.url}/v1/images/edits", files={"image": png(picture)}, timeout=60).json()
    told = {name: count for name, count in answer.items() if name.startswith("known")}
    late = told["known"] - told["known_before_first_hole"]
    assert min(told.values()) > 0 and late > 0
    assert says(page, "#known", "little influence") == (
        f"{late} known pixels had little influence or none: mnist-small draws from the top left to the bottom right, "
        "and they come after its first hole. Choose mnist-conditional, which uses them all.")
    known = picture[..., 3] == 255
    page.locator("#alternatives .picture").first.hover()
    visitor.keep("completion-erased-1280-light")
    across, down = np.argwhere(known[:, 1:] != known[:, :-1]), np.argwhere(known[1:] != known[:-1])
    assert edge_of(page) == ({(str(x + 1), str(y), "v") for y, x in across}
                             | {(str(x), str(y + 1), "h") for y, x in down})
    np.testing.assert_array_equal(results(page)[0][known], picture[known][:, :3])


@pytest.mark.parametrize("way", ["file", "paste", "drop"])
def test_a_picture_comes_by_file_by_paste_and_by_drop(shipped, visit, tmp_path, way):
    _, page = begin(visit, shipped)
    pixels = digit(shipped.url, 3)
    picture = png(pixels.repeat(5, 0).repeat(5, 1))
    if way == "file":
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Load picture").click()
        chooser.value.set_files(written(tmp_path, "three.png", picture))
    else:
        page.evaluate("""([way, base64]) => {
            const bytes = Uint8Array.from(atob(base64), letter => letter.charCodeAt(0));
            const files = new DataTransfer();
            files.items.add(new File([bytes], 'three.png', {type: 'image/png'}));
            const target = document.getElementById('editor');
            target.dispatchEvent(way === 'paste'
                ? new ClipboardEvent('paste', {clipboardData: files, bubbles: true, cancelable: true})
                : new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true}));
        }""", [way, base64.b64encode(picture).decode()])
    says(page, "#completion .status", "three.png is loaded.*lower half")
    complete(page, 2)
    went = sent(page)
    np.testing.assert_array_equal(went[:14, :, 0], pixels[:14])
    assert (went[14:, :, 3] == 0).all()


def test_a_dark_digit_on_white_paper_is_inverted(shipped, visit, tmp_path):
    _, page = begin(visit, shipped)
    pixels = digit(shipped.url, 5)
    paper = png(np.pad(255 - pixels, ((0, 0), (14, 14)), constant_values=255).repeat(10, 0).repeat(10, 1))  # 560 x 280
    page.locator("#file").set_input_files(written(tmp_path, "paper.png", paper))
    says(page, "#completion .status", "paper.png is loaded and prepared")
    page.get_by_label("Prepare as an MNIST digit").uncheck()
    says(page, "#completion .status", "dark on light, so it is inverted")
    complete(page, 1)
    np.testing.assert_allclose(sent(page)[:14, :, 0].astype(int), pixels[:14], atol=2)


def test_transparent_parts_of_a_picture_are_what_is_filled_in(shipped, visit, tmp_path):
    _, page = begin(visit, shipped)
    pixels = digit(shipped.url, 8)
    alpha = np.full((28, 28), 255, np.uint8)
    alpha[10:20, 5:12] = 0
    page.locator("#file").set_input_files(written(tmp_path, "holed.png", png(np.dstack([pixels] * 3 + [alpha]))))
    says(page, "#completion .status", "holed.png is loaded, 28 . 28.$")
    complete(page, 1)
    went = sent(page)
    np.testing.assert_array_equal(went[..., 3], alpha)
    np.testing.assert_array_equal(went[..., 0], np.where(alpha == 255, pixels, 0))


def test_colour_pictures_are_completed_in_colour(shipped, visit, tmp_path):
    visitor, page = begin(visit, shipped)
    page.locator("#completion-form [name=model]").select_option("cifar10-small")
    down, across = np.mgrid[0:32, 0:32]
    picture = np.stack([8 * across, 255 - 8 * down, 4 * (across + down)], -1).astype(np.uint8)
    page.locator("#file").set_input_files(written(tmp_path, "sky.png", png(picture)))
    says(page, "#completion .status", "sky.png is loaded")
    complete(page, 2)
    np.testing.assert_array_equal(sent(page)[:16, :, :3], picture[:16])
    expect(page.locator("#known")).to_be_empty()
    visitor.keep("completion-colour-1280-light")
    page.get_by_role("button", name="Clear").click()
    page.locator("#colour").fill("#20c040")
    stroke(page, [(4, 8), (28, 8)], 32)
    complete(page, 1)
    assert sent(page)[8, 16, :3].tolist() == [32, 192, 64]


def test_a_loaded_picture_goes_along_to_another_model(shipped, visit, tmp_path):
    _, page = begin(visit, shipped)
    choose = page.locator("#completion-form [name=model]").select_option
    down, across = np.mgrid[0:64, 0:64]
    picture = np.stack([4 * across, 255 - 4 * down, 2 * (across + down)], -1).astype(np.uint8)
    says(page, "#editor-hint", "^Draw the top of a digit here$")
    page.locator("#file").set_input_files(written(tmp_path, "sky.png", png(picture)))
    says(page, "#completion .status", "sky.png is loaded, cropped and shrunk to 28 . 28")
    choose("cifar10-small")
    says(page, "#completion .status", "sky.png is loaded, cropped and shrunk to 32 . 32")
    complete(page, 1)
    mean = picture.reshape(32, 2, 32, 2, 3).mean((1, 3))
    np.testing.assert_allclose(sent(page)[:16, :, :3], mean[:16], atol=2)
    page.get_by_role("button", name="Clear").click()
    page.locator("#file").set_input_files(written(tmp_path, "notes.png", b"no picture"))
    says(page, "#completion .notice", "notes.png must be a PNG, JPEG or WebP picture")
    choose("mnist-small")
    expect(page.locator("#editor-hint")).to_be_visible()
    choose("cifar10-small")
    says(page, "#editor-hint", "^Draw the top of a picture here$")


def test_a_completion_goes_on_while_its_picture_goes_along_to_another_model(shipped, visit, tmp_path):
    _, page = begin(visit, shipped, model="mnist-small")
    picture = np.tile(np.arange(64, dtype=np.uint8), (64, 1))
    page.locator("#file").set_input_files(written(tmp_path, "dusk.png", png(picture)))
    says(page, "#completion .status", "dusk.png is loaded, cropped and shrunk to 28 . 28")
    held = []
    page.route("**/v1/images/edits", lambda route: held.append(route), times=1)
    page.locator("#completion-form [type=submit]").click()
    while not held:
        page.wait_for_timeout(50)
    page.locator("#completion-form [name=model]").select_option("cifar10-small")
    says(page, "#completion .status", "dusk.png is loaded, cropped and shrunk to 32 . 32")
    held[0].continue_()
    says(page, "#completion .status", r"completions? in \d")


def test_a_drawing_is_still_there_when_its_model_is_chosen_again(shipped, visit, tmp_path):
    visitor, page = begin(visit, shipped, model="mnist-small")
    stroke(page, TOP_OF_SEVEN)
    drawn = visitor.picture("#editor")
    page.get_by_role("tab", name="Samples").click()
    for model in ("cifar10-small", "mnist-small"):
        page.locator("#samples-form [name=model]").select_option(model)
    page.get_by_role("tab", name="Completion").click()
    assert visitor.picture("#editor") == drawn
    choose = page.locator("#completion-form [name=model]").select_option
    choose("cifar10-small")
    grey = png(np.full((32, 32, 3), 128, np.uint8))
    page.locator("#file").set_input_files(written(tmp_path, "grey.png", grey))
    says(page, "#completion .status", "grey.png is loaded")
    choose("mnist-small")
    assert visitor.picture("#editor") == drawn, "nor does a picture of another model take its place"
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#editor-hint")).to_be_hidden()
    assert visitor.picture("#editor") != drawn


def test_a_sample_of_a_model_that_was_left_meanwhile_replaces_no_drawing(shipped, visit):
    visitor, page = begin(visit, shipped, model="mnist-small")
    stroke(page, TOP_OF_SEVEN)
    drawn, held = visitor.picture("#editor"), []
    choose = page.locator("#completion-form [name=model]").select_option
    choose("cifar10-small")
    page.route("**/v1/images/generations", lambda route: held.append(route), times=1)
    page.get_by_role("button", name="Take a sample").click()
    while not held:
        page.wait_for_timeout(50)
    choose("mnist-small")
    held[0].continue_()
    says(page, "#completion .notice", "Another model was chosen meanwhile")
    assert visitor.picture("#editor") == drawn


def test_nothing_is_said_of_a_picture_that_has_gone_with_its_model(shipped, visit):
    _, page = begin(visit, shipped)
    page.get_by_role("button", name="Take a sample").click()
    says(page, "#completion .status", "A sample of seed")
    page.locator("#completion-form [name=model]").select_option("cifar10-small")
    expect(page.locator("#completion .status")).to_have_text("")


def test_strokes_can_be_taken_back_and_drawn_with_the_keyboard(shipped, visit):
    _, page = begin(visit, shipped)
    inked = """c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height / 2).data]
        .filter((value, at) => at % 4 === 0 && value > 200).length"""
    editor = page.locator("#editor")
    undo = page.get_by_role("button", name="Undo")
    assert editor.evaluate(inked) == 0
    expect(undo).to_be_disabled()
    stroke(page, TOP_OF_SEVEN)
    assert editor.evaluate(inked) > 0
    undo.click()
    assert editor.evaluate(inked) == 0
    editor.focus()
    page.keyboard.press("ArrowUp")
    for _ in range(6):
        page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Tab")
    assert editor.evaluate(inked) > 0
    complete(page, 1)
    went = sent(page)
    assert (went[6, 14:20, 0] > 200).all()


def saved(picture: Image.Image, kind: str, **options) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def refused(digit: np.ndarray) -> dict[str, tuple[bytes, str]]:
    """Files by name, most of which a browser could read, and what the page says of each."""
    still, moved = Image.fromarray(digit), Image.fromarray(np.roll(digit, 3, 0))
    film = {"save_all": True, "append_images": [moved]}
    large = Image.new("L", (8000, 6000), 40)
    animated = "{} is animated (2 frames); it must be one still picture."
    kinds = "{} must be a PNG, JPEG or WebP picture, got"
    return {
        "film.webp": (saved(still, "WEBP", **film), animated),
        "film.png": (saved(still, "PNG", **film), animated),
        "small.png": (saved(still.crop((4, 4, 24, 24)), "PNG"),
                      "{} must have at least the model's 28x28 pixels (width x height), got 20x20."),
        "scans.jpg": (saved(large, "JPEG", progressive=True),
                      "{} may have up to 16777216 pixels .* got 8000x6000. Make it smaller."),
        "heavy.png": (saved(still, "PNG") + bytes(2**24), "{} has .* at most 16,777,216 are allowed. Make it smaller."),
        "seven.gif": (saved(still, "GIF"), kinds + ".* a GIF; save it as PNG."),
        "seven.heic": (b"\0\0\0\x18ftypheic" + bytes(100), kinds + ".* HEIC, as iPhones save .*; export it as JPEG."),
        "notes.png": (b"no picture", kinds + " 10 bytes."),
        "empty.png": (b"", "{} is empty")}


@pytest.mark.parametrize("model", ["mnist-conditional", "cifar10-small"])
def test_a_refused_file_shows_the_error_with_its_cure_and_leaves_the_board_as_it_was(
        shipped, visit, tmp_path, model):
    visitor, page = begin(visit, shipped, model=model)
    pixels = digit(shipped.url, 7)
    page.locator("#file").set_input_files(written(tmp_path, "seven.png", png(pixels.repeat(4, 0).repeat(4, 1))))
    says(page, "#completion .status", "seven.png is loaded")
    board, framed = visitor.picture("#editor"), visitor.picture("#upload-canvas")
    for name, (content, words) in refused(pixels).items():
        page.locator("#file").set_input_files(written(tmp_path, name, content))
        pattern = re.escape(words.format(name)).replace(r"\.\*", ".*")
        says(page, "#completion .notice", "^" + pattern.replace("28x28", r"(28x28|32x32)"))
        expect(page.locator("#completion .notice button")).to_have_count(0)  # trying again would not help
        expect(page.locator("#completion .status")).to_be_empty()
        assert (visitor.picture("#editor"), visitor.picture("#upload-canvas")) == (board, framed), name
        if name == "film.webp":
            visitor.keep("completion-refused-1280-light")
    complete(page, 1)
    expect(page.locator("#completion .notice")).to_be_hidden()


def test_a_small_picture_is_taken_where_the_api_takes_it_prepared(shipped, visit, tmp_path):
    _, page = begin(visit, shipped)
    page.locator("#file").set_input_files(written(tmp_path, "small.png", png(255 - digit(shipped.url, 7)[4:24, 4:24])))
    says(page, "#completion .status", "small.png is loaded and prepared")
    box = page.get_by_label("Prepare as an MNIST digit")
    box.click()
    says(page, "#completion .notice", "small.png must have at least the model's 28x28 pixels")
    expect(box).to_be_checked()  # the board is still that of the prepared picture


def test_a_picture_still_being_read_comes_to_no_board_that_is_in_use_or_was_cleared(shipped, visit, tmp_path):
    visitor, page = begin(visit, shipped, model="mnist-small")
    choose = page.locator("#completion-form [name=model]").select_option
    stroke(page, TOP_OF_SEVEN)
    drawn = visitor.picture("#editor")
    choose("cifar10-small")
    empty = visitor.picture("#editor")
    clear, held = page.get_by_role("button", name="Clear"), []
    for leave, left in ((lambda: choose("mnist-small"), drawn), (clear.click, empty)):
        choose("cifar10-small")
        page.route("**/v1/images/edits", lambda route: held.append(route), times=1)
        page.locator("#file").set_input_files(written(tmp_path, "grey.png", png(np.full((32, 32, 3), 99, np.uint8))))
        says(page, "#completion .status", r"^Reading the picture\.$")
        while not held:
            page.wait_for_timeout(50)
        leave()
        held.pop().continue_()
        expect(page.locator("#completion .status")).to_be_empty()
        page.wait_for_timeout(200)
        assert visitor.picture("#editor") == left
        expect(page.locator("#completion .notice")).to_be_hidden()


def test_what_cannot_be_completed_is_said_with_a_cure(shipped, visit):
    visitor, page = begin(visit, shipped)
    page.get_by_role("button", name="Complete", exact=True).click()
    says(page, "#completion .notice", "Nothing is drawn yet. Draw something, or load a picture.")
    page.get_by_role("button", name="Keep all").click()
    page.get_by_role("button", name="Complete", exact=True).click()
    says(page, "#completion .notice", "Every pixel is known. Erase something, or press Lower half.")
    expect(page.locator("#completion .notice button")).to_have_count(0)  # trying again would not help
    visitor.keep("completion-notice-1280-light")
    page.get_by_role("button", name="Lower half").click()
    complete(page, 1)
    expect(page.locator("#completion .notice")).to_be_hidden()


def test_a_sample_can_be_taken_over_and_completed(shipped, visit):
    page = visit(shipped.url).ready()
    says(page, "#samples .status", "16 images in")
    page.get_by_role("button", name="Image 5,").click()
    page.get_by_role("button", name="Complete it").click()
    expect(page.get_by_role("tabpanel", name="Completion")).to_be_visible()
    says(page, "#completion .status", r"The image of seed \d+, 28 . 28. Its lower half")
    complete(page, 3)
    assert len(results(page)) == 3


def photograph(pixels: np.ndarray) -> np.ndarray:
    """A digit in ink on yellowish paper, off its centre: 600 x 400, in RGB."""
    paper = np.full((400, 600, 3), (226, 220, 190), np.uint8)
    ink = np.asarray(Image.fromarray(pixels).resize((224, 224), Image.Resampling.BICUBIC))[..., None] / 255
    paper[100:324, 40:264] = paper[100:324, 40:264] * (1 - ink) + np.array([40, 40, 80]) * ink
    return paper


def test_a_photographed_digit_is_prepared_by_itself_and_the_page_shows_what_the_model_sees(shipped, visit, tmp_path):
    visitor, page = begin(visit, shipped)
    expect(page.locator("#upload")).to_be_hidden()
    pixels = digit(shipped.url, 7)
    page.locator("#file").set_input_files(written(tmp_path, "photo.png", png(photograph(pixels))))
    says(page, "#completion .status", "photo.png is loaded and prepared, cropped and shrunk to 28 . 28. Its lower half")
    box = page.get_by_label("Prepare as an MNIST digit")
    expect(box).to_be_checked()
    visitor.keep("completion-prepared-1280-light")
    complete(page, 2)
    top = sent(page)[:14, :, 0]
    assert max(np.corrcoef(np.roll(pixels, (down, across), (0, 1))[:14].ravel(), top.ravel())[0, 1]
               for down in (-2, -1, 0, 1, 2) for across in (-2, -1, 0, 1, 2)) > 0.85
    box.uncheck()
    says(page, "#completion .status", "photo.png is loaded, cropped and shrunk to 28 . 28. It was dark on light")
    visitor.keep("completion-cropped-1280-light")
    page.locator("#completion-form [name=model]").select_option("cifar10-small")
    says(page, "#completion .status", "photo.png is loaded, cropped and shrunk to 32 . 32")
    expect(box).to_be_hidden()
    visitor.keep("completion-cropped-colour-1280-light")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#upload")).to_be_hidden()


def test_a_picture_without_a_digit_is_said_with_a_cure(shipped, visit, tmp_path):
    _, page = begin(visit, shipped)
    page.locator("#file").set_input_files(written(tmp_path, "blank.png", png(np.full((300, 300), 220, np.uint8))))
    says(page, "#completion .status", "blank.png is loaded, cropped")
    box = page.get_by_label("Prepare as an MNIST digit")
    expect(box).not_to_be_checked()
    box.click()
    says(page, "#completion .notice", "no ink was found: use a picture with more contrast")
    expect(box).not_to_be_checked()
    complete(page, 1)
    expect(page.locator("#completion .notice")).to_be_hidden()
    assert (sent(page)[14:, :, 3] == 0).all(), "it is completed as a picture that is not prepared"


def test_a_refused_file_leaves_nothing_said_of_the_picture_before(shipped, visit, tmp_path):
    _, page = begin(visit, shipped)
    page.locator("#file").set_input_files(written(tmp_path, "seven.png", png(digit(shipped.url, 7))))
    says(page, "#completion .status", "seven.png is loaded")
    page.locator("#file").set_input_files(written(tmp_path, "notes.png", b"no picture"))
    says(page, "#completion .notice", "notes.png must be a PNG")
    expect(page.locator("#completion .status")).to_have_text("")


def test_a_digit_on_a_transparent_ground_is_prepared_and_its_lower_half_is_hidden(shipped, visit, tmp_path):
    visitor, page = begin(visit, shipped)
    pixels = digit(shipped.url, 3)
    glyph = np.zeros((300, 240, 4), np.uint8)
    glyph[..., :3] = 40, 40, 80
    ink = Image.fromarray(pixels).resize((224, 224), Image.Resampling.BICUBIC)
    glyph[10:234, 8:232, 3] = np.asarray(ink)
    page.locator("#file").set_input_files(written(tmp_path, "glyph.png", png(glyph)))
    box, loaded = page.get_by_label("Prepare as an MNIST digit"), "glyph.png is loaded and prepared.* Its lower half"
    says(page, "#completion .status", loaded)
    expect(box).to_be_checked()
    complete(page, 2)
    visitor.keep("completion-glyph-1280-light")
    went = sent(page)
    assert ((went[..., 3] == 255) == (np.arange(28) < 14)[:, None]).all()
    assert max(np.corrcoef(np.roll(pixels, (down, across), (0, 1))[:14].ravel(), went[:14, :, 0].ravel())[0, 1]
               for down in (-1, 0, 1) for across in (-1, 0, 1)) > 0.85
    box.uncheck()
    says(page, "#completion .status", r"glyph.png is loaded, cropped and shrunk to 28 . 28\.$")
    box.check()
    says(page, "#completion .status", loaded)


def off_standard(digit: np.ndarray) -> dict[str, np.ndarray]:
    """Pictures of a digit that MNIST would not show so."""
    large = np.pad(digit.repeat(5, 0).repeat(5, 1), 60)
    smooth = np.asarray(Image.fromarray(digit[3:25, 3:25]).resize((280, 280), Image.Resampling.BICUBIC))
    return {"grey.png": digit // 2 + 40, "dark.png": 255 - digit, "small.png": large, "large.png": smooth,
            "moved.png": np.roll(large[60:-60, 60:-60], -20, 0), "coloured.png": np.dstack([digit // 2 + 40] * 3)}


def test_pictures_unlike_mnist_are_prepared_by_themselves_and_digits_of_mnist_are_not(shipped, visit, data, tmp_path):
    _, page = begin(visit, shipped)
    raw = gzip.decompress((data / "mnist/t10k-images-idx3-ubyte.gz").read_bytes())
    digits = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 28, 28)
    box = page.get_by_label("Prepare as an MNIST digit")
    for index in range(4):
        for times in (1, 5):
            name = f"digit-{index}-{times}.png"
            enlarged = png(digits[index].repeat(times, 0).repeat(times, 1))
            page.locator("#file").set_input_files(written(tmp_path, name, enlarged))
            says(page, "#completion .status", f"{name} is loaded, .*28 . 28. Its lower half")
            expect(box).not_to_be_checked()
        complete(page, 1)
        np.testing.assert_array_equal(sent(page)[:14, :, 0], digits[index][:14])
    for name, picture in off_standard(digits[0]).items():
        page.locator("#file").set_input_files(written(tmp_path, name, png(picture)))
        says(page, "#completion .status", f"{name} is loaded and prepared")
        expect(box).to_be_checked()


def test_the_name_of_a_model_is_not_cut_on_a_tablet(shipped, visit):
    visitor, page = begin(visit, shipped, size=(768, 1024))
    visitor.keep("completion-768-light")
    assert page.locator("#completion-form [name=model]").evaluate("""select => {
        const width = select.offsetWidth;
        select.style.width = 'max-content';
        return width >= select.offsetWidth;
    }""")


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
        page.get_by_role("button", name="On the photograph").click()
        with page.expect_download() as download:
            page.get_by_role("link", name="Download photograph").click()
        laid = np.asarray(Image.open(download.value.path()).convert("RGB")).astype(int)
        visitor.keep("completion-photograph-1280-light")
        page.get_by_role("button", name="Pin it").click()
        answer = httpx.post(f"{shipped.url}/v1/images/edits", files={"image": png(upload)}, timeout=60,
                            data={"prepare": "mnist", "keep_rows": 28}).json()
        left, top, right, _ = answer["crop"]
        side = (right - left) / 28
        rows, columns = ((np.arange(28) + 0.5) * side + start for start in (top, left))
        cells = laid[rows.astype(int)][:, columns.astype(int)]
        ink = cells.sum(-1) < 350
        assert (ink == (drawn > 128))[~known & ((drawn < 20) | (drawn > 235))].mean() > 0.97, "ink where the model drew"
        assert (np.abs(cells[~known & (drawn < 5) & ~ink] - (226, 220, 190)) <= 12).mean() > 0.99, "and paper elsewhere"
        outside = np.ones(upload.shape[:2], bool)
        outside[int(top):, int(left):int(right) + 1] = False
        np.testing.assert_array_equal(laid[outside], upload[outside])
        np.testing.assert_array_equal(cells[:10], upload[rows.astype(int)][:, columns.astype(int)][:10])
        page.get_by_role("button", name="Rectangle").click()
        stroke(page, [(4, 20), (24, 24)])
        complete(page, 1)
        known[...] = True
        known[20:25, 4:25] = False
        drawn = results(page)[0][..., 0]


def test_a_completion_can_be_pinned_erased_again_and_taken_back(shipped, visit):
    visitor, page = begin(visit, shipped)
    page.locator("#completion-form [name=model]").select_option("mnist-conditional")
    stroke(page, TOP_OF_SEVEN)
    before = visitor.picture("#editor")
    complete(page, 3)
    expect(page.locator("#known")).to_be_empty()
    images = results(page)
    page.locator("#alternatives .picture").nth(1).click()
    page.get_by_role("button", name="Pin it").click()
    says(page, "#completion .status", "Image 2 is pinned")
    expect(page.get_by_role("button", name=re.compile("Image 2, .*, pinned"))).to_be_visible()
    expect(page.get_by_role("button", name="Erase", exact=True)).to_have_attribute("aria-pressed", "true")
    visitor.keep("completion-pinned-1280-light")
    page.get_by_role("button", name="Undo").click()
    assert visitor.picture("#editor") == before, "the way back"
    expect(page.get_by_role("button", name=re.compile("pinned"))).to_have_count(0)
    page.get_by_role("button", name="Redo").click()
    page.get_by_role("button", name="Rectangle").click()
    stroke(page, [(8.5, 18.5), (18.5, 22.5)])
    complete(page, 2)
    again = results(page)
    kept = np.ones((28, 28), bool)
    kept[18:23, 8:19] = False
    for image in again:
        np.testing.assert_array_equal(image[kept], images[1][kept])
    np.testing.assert_array_equal(sent(page)[..., 3] > 0, kept)


def test_the_same_hole_is_completed_by_the_prefix_and_by_all_that_is_known(shipped, visit, tmp_path):
    visitor, page = begin(visit, shipped, model="mnist-small")
    stroke(page, TOP_OF_SEVEN)
    page.get_by_role("button", name="Prefix or all").click()
    says(page, "#completion .notice", "All known pixels come before the first hole.* Erase something above them")
    expect(page.locator("#completion .notice button")).to_have_count(0)  # trying again would not help
    page.get_by_role("button", name="Take a sample").click()
    says(page, "#completion .status", "A sample of seed")
    page.get_by_role("button", name="Keep all").click()
    page.get_by_role("button", name="Rectangle").click()
    stroke(page, [(6.5, 8.5), (20.5, 17.5)])
    page.locator("#completion-form [name=n]").fill("2")
    page.get_by_role("button", name="Prefix or all").click()
    says(page, "#completion .status", "The same hole and seeds")
    says(page, "#strip-prefix", "mnist-small · 230 pixels")
    says(page, "#strip-all", "mnist-conditional · 634 pixels")
    visitor.keep("completion-strip-1280-light")
    shown = results(page)
    seeds = []
    for at, (side, model) in enumerate((("#strip-prefix", "mnist-small"), ("#strip-all", "mnist-conditional"))):
        picture = sent(page, f"{side} .picture")
        seeds.append(page.locator(f"{side} .picture").first.get_attribute("aria-label"))
        known = np.ones((28, 28), bool)
        known[8:18, 6:21] = False
        np.testing.assert_array_equal(picture[..., 3] > 0, known)
        if side == "#strip-prefix":
            picture[np.arange(784).reshape(28, 28) >= 230] = 0
        answer = httpx.post(f"{shipped.url}/v1/images/edits", files={"image": png(picture)}, timeout=60,
                            data={"model": model, "seed": seeds[-1].split("seed ")[1]}).json()["data"][0]
        alone = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["b64_json"]))).convert("RGB"))
        np.testing.assert_array_equal(shown[2 * at][~known], alone[~known], "in the hole, what the model draws alone")
    assert seeds[0] == seeds[1]
    page.locator("#strip-prefix .picture").first.click()
    expect(page.locator("#viewer-save")).to_have_attribute("href", re.compile("^blob:"))
    with page.expect_download() as download:
        page.get_by_role("link", name="Download PNG").click()
    np.testing.assert_array_equal(np.asarray(Image.open(download.value.path()).convert("RGB")), shown[0])
    np.testing.assert_array_equal(by_curl(page, tmp_path), shown[0])
    page.get_by_role("button", name="Pin it").click()
    says(page, "#completion .status", "Image 1 is pinned")
    page.get_by_role("button", name="Rectangle").click()
    stroke(page, [(2.5, 24.5), (4.5, 25.5)])
    page.get_by_role("button", name="Prefix or all").click()
    says(page, "#completion .status", "The same hole and seeds")
    pinned = sent(page, "#strip-all .picture")
    assert (pinned[..., 3] == 0).sum() == 6
    np.testing.assert_array_equal(np.where(pinned[..., 3:] > 0, pinned[..., :3], shown[0]), shown[0])
    page.get_by_role("button", name="Back to the completions").click()
    expect(page.locator("#strip")).to_be_hidden()
    page.locator("#completion-form [name=model]").select_option("cifar10-small")
    page.get_by_role("button", name="Prefix or all").click()
    says(page, "#completion .notice", "No loaded model uses all known pixels of 32 . 32 pictures. Start")


@pytest.mark.parametrize("size", [DESKTOP, (360, 780)], ids=["1280", "360"])
def test_more_can_be_drawn_than_is_shown_by_the_keyboard_alone(shipped, visit, tmp_path, size):
    visitor, page = begin(visit, shipped, size=size)
    page.locator("#completion-form [name=model]").select_option("mnist-conditional")
    stroke(page, TOP_OF_SEVEN)
    count = page.locator("#completion-form [name=n]")
    count.fill("2")
    box = page.get_by_label("Draw 8, show the best 2")
    expect(box).not_to_be_checked()
    page.locator("#completion-form [name=seed]").focus()
    for _ in range(2):  # the temperature comes first
        page.keyboard.press("Tab")
    expect(box).to_be_focused()
    page.keyboard.press("Space")
    count.focus()
    page.keyboard.press("Enter")
    says(page, "#completion .status", "2 completions, the best of 8, in")
    visitor.keep(f"completion-best-{size[0]}-light")
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    shown = results(page)
    assert len(shown) == 2
    picture = sent(page)
    page.locator("#alternatives .picture").first.click()
    np.testing.assert_array_equal(by_curl(page, tmp_path), shown[0], "its seed draws the best one again, alone")
    assert "attempts=1" in page.locator("#viewer-command").inner_text(), "as candidates were drawn"
    page.get_by_role("button", name="Reuse its settings").click()
    page.keyboard.press("Enter")
    says(page, "#completion .status", "2 completions in")
    np.testing.assert_array_equal(results(page)[0], shown[0])
    page.locator("#completion .draw").last.click()
    seeds = [int(one.get_attribute("aria-label").split("seed ")[1]) for one in
             page.locator("#alternatives .picture").all()]
    first = next(seed for seed in range(min(seeds), max(seeds) - 8, -1) if set(seeds) == {
        one["seed"] for one in httpx.post(
            f"{shipped.url}/v1/images/edits", files={"image": png(picture)}, timeout=60,
            data={"model": "mnist-conditional", "seed": seed, "n": 2, "candidates": 8}).json()["data"]})
    assert max(seeds) < first + 8, "these are the best two of eight seeds in a row"


def test_a_completion_gives_its_picture_and_settings_back_where_it_was_pressed(shipped, visit):
    visitor, page = begin(visit, shipped)
    stroke(page, TOP_OF_SEVEN)
    board = visitor.picture("#editor")
    page.locator("#completion-form [name=label]").select_option("7")
    page.locator("#completion-form [name=temperature]").fill("0.9")
    complete(page, 2)
    picture, shown = sent(page), results(page)
    page.locator("#completion-form [name=label]").select_option("")
    page.locator("#completion-form [name=temperature]").fill("1.2")
    page.get_by_role("button", name="Clear").click()
    page.locator("#alternatives .picture").nth(1).click()
    page.get_by_role("button", name="Reuse its settings").click()
    expect(page.get_by_role("tabpanel", name="Completion")).to_be_visible()
    assert visitor.picture("#editor") == board
    for name, value in (("label", "7"), ("temperature", "0.9")):
        expect(page.locator(f"#completion-form [name={name}]")).to_have_value(value)
    complete(page, 1)
    np.testing.assert_array_equal(sent(page), picture)
    np.testing.assert_array_equal(results(page)[0], shown[1])
    earlier = page.locator("#completion .draw")
    expect(earlier).to_have_count(2)
    earlier.nth(1).click()
    np.testing.assert_array_equal(results(page), shown)


def test_both_sides_of_prefix_or_all_have_the_same_hole_when_the_board_is_changed_meanwhile(shipped, visit):
    visitor, page = begin(visit, shipped)
    stroke(page, TOP_OF_SEVEN)
    page.get_by_role("button", name="Keep all").click()
    page.get_by_role("button", name="Rectangle").click()
    stroke(page, [(6.5, 8.5), (20.5, 17.5)])
    page.locator("#completion-form [name=n]").fill("1")
    held: list = []
    page.route("**/v1/images/edits", lambda route: held.append(route), times=1)
    page.get_by_role("button", name="Prefix or all").click()
    while not held:
        page.wait_for_timeout(50)
    before = visitor.picture("#editor")
    stroke(page, [(1.5, 20.5), (26.5, 26.5)])
    assert visitor.picture("#editor") != before
    held[0].continue_()
    says(page, "#completion .status", "The same hole and seeds")
    prefix, whole = (sent(page, f"#strip-{side} .picture")[..., 3].ravel() > 0 for side in ("prefix", "all"))
    np.testing.assert_array_equal(prefix, whole)
    assert whole[21 * 28 + 2:21 * 28 + 26].all(), "what was erased afterwards was told"


def test_a_preparation_that_failed_can_be_tried_again(shipped, visit, tmp_path):
    _, page = begin(visit, shipped)
    page.route("**/v1/images/edits", lambda route: route.abort(), times=1)
    upload = photograph(digit(shipped.url, 7))
    page.locator("#file").set_input_files(written(tmp_path, "photo.png", png(upload)))
    says(page, "#completion .notice", "The server does not answer")
    page.get_by_role("button", name="Try again").click()
    says(page, "#completion .status", "photo.png is loaded and prepared, cropped and shrunk to 28 . 28. Its lower half")
    expect(page.locator("#completion .notice")).to_be_hidden()


def test_undo_takes_back_the_loaded_file_too(shipped, visit, tmp_path):
    visitor, page = begin(visit, shipped)
    first, second = (png(np.pad(digit(shipped.url, label).repeat(5, 0).repeat(5, 1), ((0, 0), (20, 20))))
                     for label in (3, 6))
    page.locator("#file").set_input_files(written(tmp_path, "three.png", first))
    says(page, "#completion .status", "three.png is loaded")
    board, framed = visitor.picture("#editor"), visitor.picture("#upload-canvas")
    page.locator("#file").set_input_files(written(tmp_path, "six.png", second))
    says(page, "#completion .status", "six.png is loaded")
    assert visitor.picture("#upload-canvas") != framed
    page.get_by_role("button", name="Undo").click()
    assert (visitor.picture("#editor"), visitor.picture("#upload-canvas")) == (board, framed)
    page.get_by_label("Prepare as an MNIST digit").check()
    says(page, "#completion .status", "three.png is loaded and prepared")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#upload")).to_be_hidden()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#upload")).to_be_visible()
    expect(page.get_by_label("Prepare as an MNIST digit")).to_be_checked()
