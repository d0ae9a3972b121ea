"""The page /docs: forms send exactly what the user filled in; dark mode follows the system;
padlocks only with keys.
"""

import re

import numpy as np
import pytest
from playwright.sync_api import expect

from tests.browser.conftest import press, written
from tests.fuzz.pictures import encode


def docs(visit, url, **options):
    visitor = visit(url, **options)
    visitor.page.goto(f"{url}/docs")
    visitor.page.locator(".opblock").first.wait_for()
    return visitor


@pytest.mark.slow
def test_a_form_sends_what_was_filled_in_and_nothing_else(server, visit, tmp_path):
    page = docs(visit, server.url).page
    block = page.locator("#operations-images-edit")
    expect(block).to_contain_text("Complete a picture")
    block.locator(".opblock-summary-control").click()
    press(block, "Try it out")
    rows = block.locator("tr[data-property-name]")
    values = rows.locator("input[type=text], select").evaluate_all(
        "fields => fields.map((field) => field.value)"
    )
    assert set(values) <= {"", "--"}, values
    picture = written(tmp_path, "p.png", encode(np.full((8, 8), 7, np.uint8)))
    block.locator("tr[data-property-name='image'] input[type=file]").set_input_files(picture)
    block.locator("tr[data-property-name='keep_rows'] input[type=text]").fill("3")
    with page.expect_response(re.compile("/v1/images/edits$")) as answered:
        press(block, "Execute", exact=True)
    assert answered.value.status == 200
    assert answered.value.json()["known"] == 24 and answered.value.json()["warnings"] == []


@pytest.mark.slow
def test_the_page_is_dark_where_the_system_is_and_has_padlocks_only_for_keys(server, visit):
    for scheme, dark in (("light", False), ("dark", True)):
        visitor = docs(visit, server.url, scheme=scheme)
        brightness = visitor.page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
        )
        # transparent, on white
        assert (max(brightness) < 80) is dark or (not dark and brightness == [0, 0, 0])
        visitor.keep(f"docs-1280-{scheme}")
        assert not visitor.page.locator(".authorization__btn, .btn.authorize").count()
