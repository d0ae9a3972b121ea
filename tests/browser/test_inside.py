"""The tab Inside: one head's state while a picture is drawn, and what each pixel looked at."""

import base64
import io
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.browser.conftest import DESKTOP, PHONE, findings, press, says
from tools.harness.servers import HANG_S

pytestmark = pytest.mark.slow

FIELDS = {"model": "mnist-small", "label": "4", "layer": "1", "head": "1"}
LOOKED, TINT = (255, 122, 24), 0.85  # as in inside.js
DRAWN = "mnist-small draws class 4 from seed 6"


def seen(server, image: bytes | None = None, **fields: str) -> dict[str, Any]:
    """What the API says of a picture, else of the one that the tab shows first."""
    form = {name: (None, value) for name, value in (FIELDS | fields).items()}
    form |= {"image": ("picture.png", image)} if image else {"seed": (None, "6")}
    answer = httpx.post(f"{server.url}/v1/images/inside", files=form, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def least_sure(server, steps: int) -> int:
    """The pixel, from 1, of the highest entropy among the first ones of that picture."""
    form = {name: (None, value) for name, value in (FIELDS | {"seed": "6"}).items()}
    form["array"] = (None, "distributions")
    answer = httpx.post(
        f"{server.url}/v1/images/inside",
        files=form,
        headers={"accept": "application/x-npy"},
        timeout=HANG_S,
    )
    chances = np.load(io.BytesIO(answer.content)).reshape(784, 256)[:steps].astype(float)
    entropies = -(chances * np.log2(chances, where=chances > 0, out=np.zeros_like(chances))).sum(1)
    return int(entropies.argmax()) + 1


def tinted(looked: dict[str, Any]) -> np.ndarray:
    """The picture up to the token that is looked at, as the page shows it: RGB."""
    picture = np.repeat(np.array(looked["picture"], float), 3, -1)
    looks = np.array(looked["attention"]).reshape(28, 28, 1)
    return picture + (np.array(LOOKED) - picture) * TINT * looks / looks.max()


def assert_shows(visitor, expected: np.ndarray, pixels: int) -> None:
    """These pixels are drawn, and the others are not."""
    shown = np.array(visitor.pixels("#inside-picture")).reshape(-1, 4)
    assert (shown[:pixels, 3] == 255).all() and (shown[pixels:] == 0).all()
    expected = expected.reshape(-1, 3)[:pixels]
    np.testing.assert_allclose(shown[:pixels, :3], expected, atol=2)  # weights are float16


def stopped(visitor, step: int) -> Page:
    """The page, stopped at a step, from 0, of the first picture."""
    page = visitor.ready()
    says(page, "#inside .status", DRAWN)
    page.get_by_role("button", name="Pause").click()
    page.locator("#inside-step").fill(str(step))
    return page


def test_it_plays_and_the_slider_moves_a_state_that_never_grows(shipped, visit):
    visitor = visit(shipped.url, panel="samples")
    page = visitor.ready()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_role("tab", name="Race").click()
    assert not any("inside" in url for url in asked), "its script is loaded when it is opened"
    page.locator("#race-form").get_by_role("button", name="Stop").click()  # measuring
    page.get_by_role("link", name="why the last pixel takes no longer").click()
    says(page, "#inside .status", DRAWN)
    begun = page.locator("#inside-step-words").inner_text()
    expect(page.locator("#inside-step-words")).not_to_have_text(begun)
    page.get_by_role("button", name="Pause").click()
    asked.clear()
    states, kept = set(), []
    for step in (9, 300, 783):
        page.locator("#inside-step").fill(str(step))
        says(page, "#inside-step-words", f"Step {step + 1} of 784")
        states.add(visitor.picture("#inside-state"))
        assert page.locator("#inside-state-size").inner_text() == "4.13 KiB"  # 32 x 33 x 4 bytes
        assert page.locator("#inside-state-work").inner_text() == "2,080"
        kept.append(page.locator("#inside-kept-size").inner_text())
        lines = np.array(visitor.pixels("#inside-kept")).reshape(784, 4)
        assert (lines[:, 3] > 0).sum() == step + 1
    assert len(states) == 3
    assert kept == ["2.50 KiB", "75.3 KiB", "196 KiB"]
    assert page.locator("#inside-kept-work").inner_text() == "50,176"
    assert not any("images" in url for url in asked), "all of this was there"


def test_a_pixel_that_is_pointed_at_shows_where_it_looked_and_what_it_expected(shipped, visit):
    visitor = visit(shipped.url, panel="inside")
    page = stopped(visitor, 600)
    before = visitor.picture("#inside-picture")
    box = page.locator("#inside-picture").bounding_box()
    place = box["x"] + 10.5 / 28 * box["width"], box["y"] + 15.5 / 28 * box["height"]
    page.mouse.move(*place)  # row 16, column 11
    says(page, "#inside-pixel", "Pixel 431: row 16, column 11")
    looked = seen(shipped, token="430")
    assert_shows(visitor, tinted(looked), 601)
    value, bits = looked["picture"][15][10][0], looked["bits"][15][10][0]
    said = says(page, "#inside-words", f"value drawn, {value}, had a chance of")
    assert f"{bits:.2f}"[:3] in said
    page.mouse.move(0, 0)
    says(page, "#inside-pixel", "Pixel 601")
    assert visitor.picture("#inside-picture") == before
    page.mouse.click(*place)
    page.mouse.move(0, 0)
    says(page, "#inside-pixel", "Pixel 431")
    page.locator("#inside [name=head]").select_option("3")
    says(page, "#inside .status", "in another head")
    page.mouse.move(*place)
    says(page, "#inside-pixel", "Pixel 431")
    assert_shows(visitor, tinted(seen(shipped, token="430", head="3")), 601)


def test_another_value_keeps_the_pixels_before_it_and_draws_on_as_the_api_does(shipped, visit):
    visitor = visit(shipped.url, panel="inside")
    page = stopped(visitor, 400)
    box = page.locator("#inside-histogram").bounding_box()
    places = [{"x": x / 256 * box["width"], "y": box["height"] / 2} for x in (9.5, 200.5)]
    page.locator("#inside-histogram").hover(position=places[0])
    says(page, "#inside-range", "Red: 9, a chance of")
    for place in places:  # the second replaces the first, which is on its way
        page.locator("#inside-histogram").click(position=place)
    says(page, "#inside .status", "Pixel 401 is 200 now")
    says(page, "#inside-pixel", "Pixel 401")  # it stays while the others are drawn
    says(page, "#inside-words", "The value chosen, 200, had a chance of")
    page.get_by_role("button", name="Pause").click()
    page.locator("#inside-step").fill("783")
    first = np.array(seen(shipped)["picture"], np.uint8)[..., 0]
    given = np.dstack([first, np.full((28, 28), 255, np.uint8)])
    given.reshape(-1, 2)[400, 0] = 200
    given.reshape(-1, 2)[401:, 1] = 0
    file = io.BytesIO()
    Image.fromarray(given, "LA").save(file, "PNG")
    answer = shipped.post(
        "/v1/images/edits",
        data={"model": "mnist-small", "label": "4", "seed": "6"},
        files={"image": ("picture.png", file.getvalue())},
    )
    png = base64.b64decode(answer.json()["data"][0]["b64_json"])
    drawn = np.array(Image.open(io.BytesIO(png))).reshape(-1)
    assert (drawn[:400] == first.reshape(-1)[:400]).all() and drawn[400] == 200
    assert (drawn[401:] != first.reshape(-1)[401:]).any()
    assert_shows(visitor, tinted(seen(shipped, png)), 784)
    press(page, "Play", exact=True)
    page.locator("#inside-value").focus()
    expect(page.locator("#inside-play")).to_have_text("Play")  # it waits for the visitor
    page.get_by_role("button", name="Undo changes").click()
    says(page, "#inside .status", DRAWN)
    assert page.get_by_role("button", name="Undo changes").is_disabled()


def test_it_is_used_by_keyboard_alone_and_does_not_move_for_those_who_want_that(shipped, visit):
    visitor = visit(shipped.url, panel="inside", reduced_motion="reduce")
    page = visitor.ready()
    says(page, "#inside .status", DRAWN)
    says(page, "#inside-step-words", "Step 471 of 784")
    assert page.get_by_role("button", name="Play", exact=True).is_visible()

    def reach(selector: str) -> None:
        """Press Tab until something has the focus."""
        while not page.locator(selector).evaluate("one => one === document.activeElement"):
            page.keyboard.press("Tab")

    page.locator("#tab-inside").focus()
    reach("#inside-picture")
    page.keyboard.press("ArrowUp")
    says(page, "#inside-pixel", "Pixel 443: row 16, column 23")
    page.keyboard.press("ArrowLeft")
    says(page, "#inside-pixel", "Pixel 442: row 16, column 22")
    reach("#inside-step")
    page.keyboard.press("End")
    says(page, "#inside-step-words", "Step 784 of 784")
    says(page, "#inside-pixel", "Pixel 784")
    reach("#inside-most")
    page.keyboard.press("Enter")
    unsure = least_sure(shipped, 784)
    says(page, "#inside-pixel", f"Pixel {unsure}:")
    reach("#inside-value")
    page.keyboard.press("Home")
    reach("#inside-on")
    page.keyboard.press("Enter")
    says(page, "#inside .status", f"Pixel {unsure} is 0 now")
    says(page, "#inside-step-words", "Step 784 of 784")


@pytest.mark.parametrize(
    ("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["1280-light", "390-dark"]
)
def test_everybody_can_use_it_with_any_model(shipped, visit, size, scheme):
    visitor = visit(shipped.url, panel="inside", size=size, scheme=scheme)
    page = stopped(visitor, 600)
    page.get_by_role("button", name="Where was it least sure?").click()
    visitor.keep(f"inside-{size[0]}-{scheme}")
    assert findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    for model in ("cifar10-small", "mnist-conditional"):
        page.locator("#inside [name=model]").select_option(model)
        says(page, "#inside .status", f"{model} draws")
        page.get_by_role("button", name="Pause").click()
        begun = int(says(page, "#inside-step-words", "Step").split()[1].replace(",", ""))
        assert model == "cifar10-small" or begun > 100, "it begins where there is something to see"
        page.locator("#inside-step").press("End")
        says(page, "#inside-words", "bits of surprise")
        visitor.keep(f"inside-{model}-{size[0]}-{scheme}")
        assert findings(page) == []
    says(page, "#inside-words", "It lies amid background")
    says(page, "#inside-state-work", "^2,080$")  # of the last one that did not skip
    lines = says(page, "#inside-kept-lines", "lines for 784 pixels: those amid background skip")
    assert page.locator("#inside-kept-work").inner_text() == f"{int(lines.split()[0]) * 64:,}"
    tops = set()
    for step in (170, 400, 783):
        page.locator("#inside-step").fill(str(step))
        tops.add(page.locator("#inside-histogram").evaluate("one => one.offsetTop"))
    assert len(tops) == 1, "the page does not jump while it plays"
    page.locator("#inside-on").click()
    says(page, "#inside .status", "Pixel 784 is 255 now")
    expect(page.locator("#inside-picture")).to_be_in_viewport(ratio=0.99)


def test_a_model_with_a_palette_shows_its_colours_and_draws_on_with_one_of_them(varied, visit):
    visitor = visit(varied.url, panel="inside")
    page = visitor.ready()
    page.locator("#inside [name=model]").select_option("avatars")
    says(page, "#inside .status", "avatars draws")
    press(page, "Pause")
    page.locator("#inside-step").fill("100")
    assert visitor.pixels("#inside-picture")[:4] == [254, 254, 254, 255], "its first colour"
    page.locator("#inside-value").fill("7")
    press(page, "Draw on with 7")
    says(page, "#inside .status", "Pixel 101 is 7 now")
    press(page, "Pause")
    page.locator("#inside-step").fill("100")
    says(page, "#inside-words", "The value chosen, 7,")
    assert findings(page) == []
