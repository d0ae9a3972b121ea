"""Requests on /docs work as the page fills them in."""

import numpy as np
import pytest
from playwright.sync_api import expect

from tests.browser.conftest import WAIT_MS
from tests.server.conftest import ROOT, serving
from tests.server.web.routes.test_images import encode

pytestmark = pytest.mark.slow

PICTURE = {"name": "seven.png", "mimeType": "image/png", "buffer": encode(np.full((28, 28), 7, np.uint8))}


@pytest.fixture(scope="module")
def docs(chromium):
    with serving(ROOT / "checkpoints", "--models", "mnist-small") as process:
        yield from opened(chromium, process)


def opened(chromium, process):
    page = chromium.new_page(viewport={"width": 1280, "height": 1600})
    page.set_default_timeout(WAIT_MS)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{process.url}/docs")
    yield page
    page.close()
    assert errors == []


@pytest.mark.parametrize("operations", [
    {"images-generate": 200}, {"images-edit": 200}, {"models-describe_model": 200},
    {"compare-begin_comparison": 202, "compare-watch_comparison": 200, "compare-cancel_comparison": 200}])
def test_a_request_works_with_what_it_must_have(docs, operations):
    for operation, status in operations.items():
        shown = docs.locator(f"#operations-{operation}")
        shown.locator(".opblock-summary-control").click()
        shown.get_by_role("button", name="Try it out").click()
        if operation == "images-edit":
            shown.locator("input[type=file]").first.set_input_files(PICTURE)
            shown.locator("tr[data-property-name=keep_rows] input").first.fill("14")  # forms begin empty
        shown.get_by_role("button", name="Execute").click()
        expect(shown.locator(".live-responses-table tbody .response-col_status")).to_have_text(str(status))
        shown.locator(".opblock-summary-control").click()
