"""The panel Now shows the numbers of /metrics, both while images are drawn and when idle."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import says
from tools.harness.servers import EAGER, fetch, serving

pytestmark = pytest.mark.slow


def test_now_follows_what_the_service_does(slow, visit):
    drawn, seen = [], threading.Event()

    def keep_busy(url):  # until the page has been looked at, however long that takes
        while not seen.is_set():
            drawn.extend(
                fetch(f"{url}/v1/images/generations", "POST", json={"n": 12}).json()["data"]
            )

    with (
        serving(slow, *EAGER, "--slots 4 --max-queue 32") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        visitor = visit(server.url, panel="now")
        page = visitor.ready()
        says(page, "#pulse", "Ready")
        expect(page.locator(".squares .used")).to_have_count(0)
        asked = pool.submit(keep_busy, server.url)
        try:
            expect(page.locator(".squares .used")).to_have_count(4)
            says(page, "#pulse", "Drawing 4 images")
            says(page, "#slots", "4 of 4 slots in use, [1-8] waiting")
            expect(page.locator("#tile-waiting .value")).to_have_text(re.compile("[1-8]"))
            says(page, "#tile-batch .value", "4.00")
            says(page, "#tile-pixels .value", "[1-9]")
            says(page, "#tile-step .value", r"[\d.]+ (ms|µs)")
            visitor.keep("now-busy-1280-light")
        finally:
            seen.set()
        asked.result()
        says(page, "#slots", f"0 of 4 slots in use, 0 waiting, {len(drawn)} images drawn")
        says(page, "#pulse", "Ready")
        completed = (
            'linpix_images_completed_total{backend="linear",model="slow",outcome="completed"}'
        )
        assert server.metric(completed) == len(drawn)
        says(page, "#tile-images .value", "^0$|0.00")
        points = page.locator("#tile-pixels polyline").get_attribute("points")
        assert points and len({point.split(",")[1] for point in points.split()}) > 1, (
            "the line has a hill"
        )


def test_now_names_the_kernel_in_use(shipped, visit):
    page = visit(shipped.url, panel="now").ready()
    text = shipped.get("/metrics").text
    [kernel] = re.findall(r'linpix_kernel_info{kernel="([^"]+)"', text)
    says(page, "#tile-kernel .value", f"^{kernel}$")
    for card in shipped.get("/v1/models").json()["data"]:
        size = f"{card['state_bytes'] / 1024:#.3g} KiB"  # three digits
        says(
            page,
            f"#slots .slots:has-text('{card['id']}') .quiet",
            f"{size.replace('. ', ' ')} a slot",
        )
