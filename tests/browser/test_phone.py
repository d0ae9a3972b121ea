"""The page on phones, at the heights that their browsers leave, and enlarged to 200 %."""

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import says, turn_to
from tests.browser.test_completion import TOP_OF_SEVEN

PHONES = [(390, 664), (412, 732), (375, 553)]
ENLARGED = (640, 400)  # a screen of 1280 x 800 at 200 %

# what a finger hits in the middle of each button, field and tile that is on the screen
HIT = """() => [...document.querySelectorAll('button, a, input, select, summary, .chips span')]
    .filter(one => one.checkVisibility() && !one.disabled && !one.closest('.chips label input'))
    .filter(one => !one.matches('.chips input'))
    .map(one => [one, one.getBoundingClientRect()])
    .map(([one, box]) => [one, box.left + box.width / 2, box.top + box.height / 2])
    .filter(([, x, y]) => x > 0 && y > 0 && x < innerWidth - 1 && y < innerHeight - 1)
    .map(([one, x, y]) => [one, document.elementFromPoint(x, y)])
    .filter(([one, hit]) => !one.contains(hit) && !hit.closest('.buttons, .chips'))
    .map(([one, hit]) => `${one.outerHTML.slice(0, 60)} is under ${hit.outerHTML.slice(0, 60)}`)"""


def touch(page: Page, points: list[tuple[float, float]]) -> None:
    """A finger along these points, in pixels of a 28 x 28 image."""
    box = page.locator("#editor").bounding_box()
    session = page.context.new_cdp_session(page)
    for number, (x, y) in enumerate([*points, points[-1]]):
        place = {"x": box["x"] + x / 28 * box["width"], "y": box["y"] + y / 28 * box["height"]}
        kind = "touchMove" if number else "touchStart"
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [place]})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def visible(page: Page, selector: str) -> float:
    """The share of an element's height that is on the screen."""
    return page.locator(selector).first.evaluate(
        "one => { const {top, bottom, height} = one.getBoundingClientRect();"
        " return (Math.min(bottom, innerHeight) - Math.max(top, 0)) / height; }"
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", PHONES, ids=str)
def test_a_finger_draws_two_strokes_while_the_page_stays_where_it_is(shipped, visit, size):
    visitor = visit(shipped.url, panel="completion", size=size, touch=True, is_mobile=True)
    page = visitor.ready()
    says(page, "#completion .status", "An example, completed")
    assert page.evaluate("scrollY") == 0 and visible(page, "#editor") == 1
    assert visible(page, "#alternatives .picture") == 1, "the board, and what becomes of it"
    before = visitor.picture("#editor")
    for scrolled, points in ((0, TOP_OF_SEVEN[:2]), (40, TOP_OF_SEVEN[1:])):
        page.evaluate(f"scrollTo(0, {scrolled})")
        touch(page, points)
        says(page, "#completion .status", "6 completions in")
        page.locator("#completion-form:not([data-running])").wait_for()
        assert page.evaluate("scrollY") == scrolled
        assert visitor.picture("#editor") != before
        before = visitor.picture("#editor")
    visitor.keep(f"completion-touch-{size[0]}")


@pytest.mark.slow
@pytest.mark.parametrize("size", [*PHONES, ENLARGED], ids=str)
def test_nothing_lies_over_what_a_finger_wants_to_hit(shipped, visit, size):
    page = visit(shipped.url, size=size, touch=True, is_mobile=size in PHONES).ready()
    says(page, "#samples .status", "16 images in")
    for panel in ("Samples", "Completion", "Now"):
        turn_to(page, panel)
        for scrolled in range(0, 1000, 100):
            page.evaluate(f"scrollTo(0, {scrolled})")
            assert page.evaluate(HIT) == [], (panel, scrolled)
        page.evaluate("scrollTo(0, 0)")
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0], panel


@pytest.mark.slow
def test_a_press_of_draw_brings_pictures_into_view(shipped, visit):
    page = visit(shipped.url, size=PHONES[2], touch=True, is_mobile=True).ready()
    says(page, "#samples .status", "16 images in")
    page.locator("#samples-form [name=n]").fill("1")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.get_by_role("button", name="Draw", exact=True).first.tap()
    says(page, "#samples .status", "1 image in")
    assert visible(page, "#samples .picture") == 1


@pytest.mark.slow
def test_the_board_and_its_completions_are_side_by_side_on_a_low_screen(shipped, visit):
    page = visit(shipped.url, panel="completion", size=ENLARGED).ready()
    says(page, "#completion .status", "An example, completed")
    board = page.locator("#editor").bounding_box()
    first = page.locator("#alternatives .picture").first.bounding_box()
    assert board["x"] + board["width"] < first["x"] and first["y"] < board["y"] + board["height"]
    page.locator("#editor").scroll_into_view_if_needed()
    assert visible(page, "#editor") == 1


@pytest.mark.slow
def test_back_leads_through_tabs_and_the_large_view_and_stays_on_the_page(shipped, visit):
    page = visit(shipped.url, size=PHONES[0], touch=True, is_mobile=True).ready()
    says(page, "#samples .status", "16 images in")
    viewer = page.locator("#viewer")
    for close in (page.go_back, lambda: page.keyboard.press("Escape")):
        page.get_by_role("button", name="Image 2,").tap()
        expect(viewer).to_be_visible()
        close()
        expect(viewer).to_be_hidden()
        expect(page.get_by_role("tabpanel", name="Samples")).to_be_visible()
    page.get_by_role("tab", name="Now").tap()
    page.get_by_role("tab", name="Samples").tap()
    page.get_by_role("button", name="Image 2,").tap()
    page.get_by_role("button", name="Complete it").tap()  # in place of the large view
    expect(page.get_by_role("tabpanel", name="Completion")).to_be_visible()
    says(page, "#completion .status", "6 completions in")
    for panel in ("Samples", "Now", "Samples"):
        page.go_back()
        expect(page.get_by_role("tabpanel", name=panel)).to_be_visible()
        expect(viewer).to_be_hidden()
    page.go_forward()
    expect(page.get_by_role("tabpanel", name="Now")).to_be_visible()
