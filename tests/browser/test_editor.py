"""Masks on the drawing board: rectangle, brush, inverse, undo and redo, by mouse and by keyboard
alone.
"""

import re

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import press, says, written
from tests.browser.test_completion import begin, complete, digit, png, results, sent, stroke
from tools.benchmarks import strokes

pytestmark = pytest.mark.slow


def loaded(visit, server, tmp_path):
    """A page with a digit on its board, all of it known."""
    visitor, page = begin(visit, server)
    page.locator("#file").set_input_files(written(tmp_path, "five.png", png(digit(server.url, 5))))
    says(page, "#completion .status", "five.png is loaded")
    press(page, "Keep all")
    return visitor, page


def mask(page: Page) -> np.ndarray:
    """What is erased, (28, 28), as it is sent."""
    complete(page, 1)
    return sent(page)[..., 3] == 0


def test_a_rectangle_is_erased_and_the_mask_can_be_inverted_undone_and_redone(
    shipped, visit, tmp_path
):
    visitor, page = loaded(visit, shipped, tmp_path)
    press(page, "Rectangle")
    stroke(page, [(20.5, 17.5), (6.5, 8.5)])  # from its lower right corner to the upper left one
    rectangle = np.zeros((28, 28), bool)
    rectangle[8:18, 6:21] = True
    np.testing.assert_array_equal(mask(page), rectangle)
    press(page, "Inverse")
    inverse = visitor.picture("#editor")
    np.testing.assert_array_equal(mask(page), ~rectangle)
    press(page, "Erase", exact=True)
    stroke(page, [(12, 12), (14, 12)])
    undo, redo = page.get_by_role("button", name="Undo"), page.get_by_role("button", name="Redo")
    expect(redo).to_be_disabled()
    both = visitor.picture("#editor")
    undo.click()
    assert visitor.picture("#editor") == inverse
    redo.click()
    assert visitor.picture("#editor") == both
    undo.click()
    undo.click()
    np.testing.assert_array_equal(mask(page), rectangle)
    press(page, "Lower half")
    expect(redo).to_be_disabled()


def test_masks_have_a_button_and_a_key_each(shipped, visit, tmp_path):
    _, page = loaded(visit, shipped, tmp_path)
    rows, columns = np.mgrid[0:28, 0:28]
    inside = (rows > 6) & (rows < 21) & (columns > 6) & (columns < 21)
    for name, key, expected in (
        ("Upper half", "u", rows < 14),
        ("Lower half", "h", rows > 13),
        ("Left half", "l", columns < 14),
        ("Right half", "t", columns > 13),
        ("Middle", "m", inside),
    ):
        press(page, name)
        np.testing.assert_array_equal(mask(page), expected, name)
        press(page, "Keep all")
        page.locator("#editor").focus()
        page.keyboard.press(key)
        np.testing.assert_array_equal(mask(page), expected, key)


def test_the_pen_leaves_the_ink_that_benchmarks_of_drawn_digits_assume(shipped, visit):
    _, page = begin(visit, shipped)
    press(page, "Keep all")
    press(page, "Draw", exact=True)
    way = [(8.5, 6.25), (19.5, 6.25), (12.5, 22.5)]
    stroke(page, way)
    press(page, "Middle")
    complete(page, 1)
    picture, expected = (
        sent(page),
        strokes.drawn([[way[0], way[1], way[1], way[2]]]).reshape(28, 28),
    )
    known = picture[..., 3] > 0
    assert (expected[known] > 0).sum() > 30
    assert np.abs(picture[known][:, 0].astype(int) - expected[known]).max() <= 8


def test_everything_can_be_done_with_the_keyboard_alone(shipped, visit):
    visitor, page = begin(visit, shipped)
    keys = page.keyboard
    page.locator("#tab-completion").focus()
    for _ in range(3):  # past the address of the API, to the board
        if not page.evaluate("document.activeElement.id === 'editor'"):
            keys.press("Tab")
    expect(page.locator("#editor")).to_be_focused()
    for key in (
        "k",
        "d",
        "ArrowDown",
        "Shift+ArrowRight",
        "Shift+ArrowRight",
        "r",
        "ArrowLeft",
        "Space",
    ):
        keys.press(key)
    for _ in range(4):
        keys.press("ArrowDown")
    keys.press("Shift+ArrowRight")
    says(page, "#editor-help", "^2 . 5 pixels: Space erases, Escape lets go.$")
    visitor.keep("completion-keyboard-1280-light")
    keys.press("Escape")
    assert says(page, "#editor-help", "known") == "Column 17, row 13: known."
    for key in (
        "Space",
        "ArrowUp",
        "Space",
        "i",
        "Control+z",
        "Control+z",
        "Control+Shift+Z",
        "e",
        "+",
    ):
        keys.press(key)
    assert page.locator("#brush").input_value() == "3"
    says(page, "#editor-help", "^Column 17, row 12: erased.$")
    page.locator("#completion-form [name=n]").focus()
    keys.press("Enter")
    says(page, "#completion .status", "6 completions in")
    erased = sent(page)[..., 3] == 0
    assert np.argwhere(erased).tolist() == [[11, 16], [12, 16]]
    picture = results(page)[2]
    third = page.get_by_role("button", name="Image 3,")
    third.focus()
    keys.press("Enter")
    expect(page.locator("#viewer")).to_be_visible()
    keys.press("Escape")
    expect(third).to_be_focused()
    keys.press("p")
    expect(page.get_by_role("button", name=re.compile("Image 3, .*, pinned"))).to_be_visible()
    expect(page.locator("#editor")).to_be_focused()
    keys.press("h")
    complete(page, 1)
    np.testing.assert_array_equal(sent(page)[:14, :, :3], picture[:14])
