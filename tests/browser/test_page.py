"""The page as a whole: its size, its layout at two widths, light and dark, and accessibility."""

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import DESKTOP, PHONE, Visit, findings, press, says, take, turn_to
from tests.browser.test_completion import TOP_OF_SEVEN, complete, stroke
from tools.harness.servers import fetch

# bytes of the page's files in all, and of what a browser is sent of them: compressed
SOURCES, SENT = 185_000, 65_000


@pytest.mark.slow
def test_the_page_weighs_little_and_comes_from_here(shipped, visit):
    asked: set[str] = set()
    visitor: Visit = visit(shipped.url)
    page = visitor.ready()
    page.on("request", lambda request: asked.add(request.url))
    page.reload()
    visitor.ready()
    turn_to(page, "Completion")
    page.locator("#tries button").first.wait_for()  # their script comes with the tab
    turn_to(page, "Now")
    files = {url.split("#")[0] for url in asked if "/v1/" not in url}
    assert len(files) > 8
    answers = {url: fetch(url, headers={"accept-encoding": "gzip"}) for url in files}
    sizes = {
        url: (len(answer.content), answer.num_bytes_downloaded) for url, answer in answers.items()
    }
    assert sum(size for size, _ in sizes.values()) < SOURCES, sizes
    assert sum(sent for _, sent in sizes.values()) < SENT, sizes
    assert all(answer.headers["cache-control"] == "no-cache" for answer in answers.values())


@pytest.mark.slow
def test_nothing_is_wider_than_the_smallest_screen(shipped, visit):
    page = visit(shipped.url, size=(320, 640)).ready()
    for panel in ("Samples", "Completion", "Now", "Inside", "Race"):
        turn_to(page, panel)
        assert page.evaluate("document.documentElement.scrollWidth") <= 320, panel
    press(page.locator("#race-form"), "Stop")  # measuring


SMALL = """() => [...document.querySelectorAll(
    'button, a, select, input, summary, label:has([type=checkbox]), .chips label span')]
    .filter(one => one.checkVisibility() && !one.matches('label input[type=checkbox], p a'))
    .map(one => [one.outerHTML.slice(0, 80), one.getBoundingClientRect()])
    .filter(([, box]) => box.width && (box.height < 43.9 || box.width < 43.9)).map(([html]) => html)"""  # noqa: E501


@pytest.mark.slow
def test_what_a_finger_touches_is_44_pixels_wide_and_high(shipped, visit):
    """Links within a sentence are exempt, as in WCAG 2.5.5."""
    page = visit(shipped.url, size=PHONE, touch=True).ready()
    says(page, "#samples .status", "16 images in")
    for panel in ("Samples", "Completion", "Now", "Inside", "Race"):
        turn_to(page, panel)
        assert page.evaluate(SMALL) == [], panel
    press(page.locator("#race-form"), "Stop")  # measuring


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["1280-light", "390-dark"]
)
def test_everybody_can_use_every_panel(shipped, visit, size, scheme):
    """axe-core, with the panels empty and in use; and nothing is wider than the screen."""
    visitor = visit(shipped.url, size=size, scheme=scheme)
    page = visitor.ready()
    look = f"{size[0]}-{scheme}"

    def check(name: str) -> None:
        visitor.keep(f"{name}-{look}")
        assert findings(page) == [], name
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0], name

    says(page, "#samples .status", "16 images in")
    check("samples")
    press(page, "Image 6,")
    expect(page.locator("#viewer-save")).to_have_attribute("href", re.compile("blob:"))
    press(page, "Copy as curl")
    check("samples-viewer")
    page.keyboard.press("Escape")
    take(page, "cifar10-small")
    page.locator("#samples-form [name=n]").fill("8")
    press(page, "Draw", exact=True)
    says(page, "#samples .status", "8 images in")
    check("samples-colour")
    take(page, "mnist-small")

    turn_to(page, "Completion")
    says(page, "#completion .status", "An example, completed")
    check("completion-example")
    page.locator("#options summary").click()
    page.get_by_label("Complete after each stroke").uncheck()
    stroke(page, TOP_OF_SEVEN)
    complete(page, 6)
    page.get_by_role("heading", name="Complete a digit").scroll_into_view_if_needed()
    check("completion")
    if size == PHONE:
        page.locator("#completion .stage").scroll_into_view_if_needed()
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        visitor.keep(f"completion-results-{look}")
        page.evaluate("scrollTo(0, 0)")
    take(page, "mnist-conditional")
    press(page, "Inverse")
    for button, said in (
        ("How likely?", "likelihood of what was"),
        ("Prefix or all", "The same hole"),
    ):
        press(page, button)
        says(page, "#completion .status", said)
        check(f"completion-{button.split()[0].lower()}")
    page.locator("#strip-all .picture").first.focus()
    page.keyboard.press("p")
    check("completion-pinned")
    turn_to(page, "Race")
    says(page, "#headline", "While softmax attention draws 1 picture, linear attention draws")
    check("race-begun")
    press(page.locator("#race-form"), "Stop")
    turn_to(page, "Now")
    says(page, "#slots", "images? drawn")
    page.wait_for_timeout(1000)
    check("now")


@pytest.mark.slow
def test_forced_colours_show_what_is_pressed_and_how_much_of_a_bar_is_full(shipped, visit):
    visitor = visit(shipped.url, forced_colors="active")
    page = visitor.ready()
    says(page, "#samples .status", "16 images in")

    def looks(selector: str) -> list[str]:
        """The background, of two elements that differ in whether they are pressed, or full."""
        return page.locator(selector).evaluate_all(
            "all => all.slice(0, 2).map(one => getComputedStyle(one).backgroundColor)"
        )

    for panel, selector in (
        ("Samples", "[role=tab]"),
        ("Samples", "#models span"),
        ("Samples", "#samples .chips span"),
        ("Completion", "[data-tool]"),
        ("Race", ".lane:first-child .track, .lane:first-child .track i"),
    ):
        turn_to(page, panel)
        pressed, other = looks(selector)
        assert pressed != other, selector
        visitor.keep(f"{panel.lower()}-forced")
    press(page.locator("#race-form"), "Stop")  # measuring
    turn_to(page, "Now")
    expect(page.locator(".squares").first).to_be_visible()
    used, free = page.evaluate(  # at once: the tab draws its squares anew
        "() => { const box = document.querySelector('.squares');"
        " box.append(Object.assign(document.createElement('i'), {className: 'used'}),"
        " document.createElement('i'));"
        " return [...box.children].slice(-2).map(one => getComputedStyle(one).backgroundColor); }"
    )
    assert used != free
    assert findings(page) == []


@pytest.mark.slow
def test_without_javascript_the_page_points_to_the_api(shipped, chromium):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(shipped.url)
    expect(page.locator("#needs a")).to_have_attribute("href", "docs")
    context.close()
