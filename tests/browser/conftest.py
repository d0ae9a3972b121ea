"""A real browser against real server processes. Screenshots are kept in build/screenshots."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Download,
    Locator,
    Page,
    expect,
    sync_playwright,
)

from tools.harness.commands import ROOT
from tools.harness.servers import Process, serving

AXE = Path(__file__).with_name("axe.min.js").read_text()
SCREENSHOTS = ROOT / "build/screenshots"
WAIT_MS = 180_000  # what a busy machine may take for what an idle one does in a moment
DESKTOP, PHONE = (1280, 800), (390, 844)

expect.set_options(timeout=WAIT_MS)


# The synchronous driver keeps an event loop of its own on this thread, so it ends with this
# package: tests elsewhere call asyncio.run.
@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip(
            "there is no chromium on the PATH; on Debian: apt-get install chromium fonts-dejavu"
        )
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def shipped() -> Iterator[Process]:
    """A server of shipped checkpoints, for tests that leave it as they found it."""
    with serving(
        ROOT / "checkpoints", "--models mnist-small,cifar10-small,mnist-conditional"
    ) as process:
        yield process


@pytest.fixture(scope="package")
def varied() -> Iterator[Process]:
    """As shipped, but digits, letters, faces and textures."""
    models = "mnist-conditional,letters-conditional,avatars,cifar10-conditional"
    with serving(ROOT / "checkpoints", f"--models {models}") as process:
        yield process


class Visit:
    """A page of a browser without a past, and what went wrong in it."""

    def __init__(
        self,
        browser: Browser,
        url: str,
        *,
        panel: str = "samples",
        size: tuple[int, int] = DESKTOP,
        scheme: str = "light",
        touch: bool = False,
        script: str = "",
        **options: Any,
    ) -> None:
        self.url, self.errors, self.foreign = url, [], []
        self.sizes: dict[str, int] = {}  # bytes of the page's own files, by path
        self.context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,
            has_touch=touch,
            accept_downloads=True,
            permissions=["clipboard-read", "clipboard-write"],
            **options,
        )
        self.context.add_init_script(script)
        self.context.set_default_timeout(WAIT_MS)
        self.page: Page = self.context.new_page()
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "request",
            lambda request: self.foreign.append(request.url) if self._elsewhere(request.url) else 0,
        )
        self.page.goto(f"{url}/#/{panel}")

    def _elsewhere(self, url: str) -> bool:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https", "ws") and parts.netloc != urlsplit(self.url).netloc

    def _heard(self, message: ConsoleMessage) -> None:
        # the browser's own line for an answer that is no success, or none at all; the tests look at
        # what the page says
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.errors.append(message.text)

    def ready(self) -> Page:
        """The page, once it can be used."""
        self.page.wait_for_selector("html[data-ready]")
        return self.page

    def keep(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")

    def pixels(self, selector: str, index: int = 0) -> list[int]:
        """RGBA of a canvas, row by row."""
        return (
            self.page.locator(selector)
            .nth(index)
            .evaluate("c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]")
        )

    def picture(self, selector: str) -> str:
        """A canvas as a data URL, to be compared: much faster than its pixels."""
        return self.page.locator(selector).evaluate("c => c.toDataURL()")


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Any]:
    """visit(url, ...) opens the page. Afterwards nothing may have gone wrong in it, nor been asked
    of other hosts.
    """
    visits: list[Visit] = []

    def begin(url: str, **options: Any) -> Visit:
        visits.append(Visit(chromium, url, **options))
        return visits[-1]

    yield begin
    for one in visits:
        one.context.close()
    assert [one.errors for one in visits] == [[]] * len(visits)
    assert [one.foreign for one in visits] == [[]] * len(visits)


def findings(page: Page) -> list[str]:
    """What axe-core has against the page as it is now."""
    page.evaluate(AXE)
    result = page.evaluate("axe.run(document)")
    assert len(result["passes"]) > 15
    return [
        f"{one['impact']}: {one['id']}: {[node['html'][:120] for node in one['nodes'][:3]]}"
        for one in result["violations"]
    ]


def take(page: Page, model: str) -> None:
    """Choose a model by its tile."""
    page.locator(f"#models label:has([value='{model}'])").click()


def chosen(page: Page) -> str:
    return page.locator("#models :checked").input_value()


def press(within: Page | Locator, name: str, **options: Any) -> None:
    """Click a button."""
    within.get_by_role("button", name=name, **options).click()


def turn_to(page: Page, panel: str) -> None:
    page.get_by_role("tab", name=panel).click()


def downloaded(page: Page, link: str) -> Download:
    with page.expect_download() as download:
        page.get_by_role("link", name=link).click()
    return download.value


def says(page: Page, selector: str, words: str) -> str:
    """The text of an element once it has these words (a pattern)."""
    found = page.locator(selector).filter(has_text=re.compile(words))
    found.wait_for()
    return found.inner_text()


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path
