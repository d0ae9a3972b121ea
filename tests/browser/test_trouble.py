"""What the page shows and does when the service is full, gone, needs a key, or comes back."""

import shutil
import signal
import string
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import downloaded, press, says, turn_to
from tests.server.web.test_keys import line, private
from tools.harness.commands import ROOT
from tools.harness.servers import EAGER, serving

pytestmark = pytest.mark.slow

LASTING = "--faults slow:every=1:ms=20"  # seconds an image: the page is seen while it is drawn


def test_a_full_queue_shows_its_wait_and_is_tried_again_after_it(slow, visit):
    with (
        serving(slow, *EAGER, "--slots 2 --max-queue 0") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        visitor = visit(server.url, panel="now")
        page = visitor.ready()
        # to know the speed
        server.post("/v1/images/generations", json={"n": 2})
        asked = pool.submit(lambda: server.post("/v1/images/generations", json={"n": 2}))
        assert server.becomes('linpix_state_slots_used{model="slow"}', 2)
        refusals: list[tuple[int, str]] = []
        page.on(
            "response",
            lambda answer: (
                refusals.append((answer.status, answer.headers.get("retry-after", "")))
                if answer.url.endswith("/generations")
                else None
            ),
        )
        page.goto(f"{server.url}/#/samples?n=2")
        shown = says(
            page, "#samples .notice", r"The queue is full\. This page tries again in \d+ s\."
        )
        visitor.keep("samples-full-1280-light")
        assert refusals[0][0] == 429
        assert f"in {refusals[0][1]} s" in shown
        assert asked.result().status_code == 200
        says(page, "#samples .status", "2 images in")
        expect(page.locator("#samples .notice")).to_be_hidden()
        assert refusals[-1][0] == 200


def test_a_dropped_connection_is_shown_and_the_servers_return_is_noticed(slow, visit):
    with serving(slow, *EAGER, LASTING) as server:
        visitor = visit(server.url, panel="samples?n=8")
        page = visitor.ready()
        page.get_by_role("button", name="being drawn").first.wait_for()
        server.stop(signal.SIGKILL)
        says(
            page,
            "#samples .notice",
            "The connection to the server broke off. Check that it still runs, then try",
        )
        says(
            page, "#page-notice", "The server does not answer. This page continues when it is back."
        )
        says(page, "#pulse", "No connection")
        visitor.keep("samples-dropped-1280-light")
        press(page, "Try again")
        says(page, "#samples .notice", "The server does not answer. Try again in a moment.")
        assert page.locator("#samples .unfinished").count() == 8
        with serving(slow, *EAGER, f"--port {server.url.rsplit(':')[-1]}"):
            expect(page.locator("#page-notice")).to_be_hidden()
            # by itself, as it is true no longer
            expect(page.locator("#samples .notice")).to_be_hidden()
            says(page, "#samples .status", "The server is back. Try again.")
            says(page, "#pulse", "Ready")
            press(page, "Draw", exact=True)
            says(page, "#samples .status", "8 images in")


def test_a_server_that_shuts_down_says_so(slow, visit):
    with serving(slow, *EAGER, LASTING, "--drain-timeout 300") as server:
        page = visit(server.url).ready()
        page.get_by_role("button", name="being drawn").first.wait_for()
        server.process.send_signal(signal.SIGTERM)
        says(page, "#pulse", "Shutting down")
        says(page, "#samples .status", "16 images in")


def test_a_key_is_asked_for_and_kept_in_this_tab_only(tiny, tmp_path, visit):
    keys = private(tmp_path / "keys", line("visitor", "right"))
    with serving(tiny.parent, f"--api-keys {keys}") as server:
        visitor = visit(server.url)
        page = visitor.page
        says(page, "#key", "Enter one of its API keys")
        visitor.keep("key-1280-light")
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        says(page, "#key", "The server does not know that key")
        page.get_by_label("API key").fill("right")
        press(page, "Use this key")
        visitor.ready()
        expect(page.locator("#key")).to_be_hidden()
        says(page, "#samples .status", "16 images in")
        press(page, "Image 1,")
        press(page, "Copy as curl")
        command = page.locator("#viewer-command").inner_text()
        assert "Bearer $LINPIX_KEY" in command and "right" not in command
        kept = page.evaluate(
            "[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]"
        )
        assert ["right" in place for place in kept] == [True, False, False]
        page.reload()
        visitor.ready()
        expect(page.locator("#key")).to_be_hidden()


LACKING = {
    "storage": """for (const name of ['sessionStorage', 'localStorage'])
        Object.defineProperty(window, name, {
            get() { throw new DOMException('', 'SecurityError'); }
        });""",
    "newer classes": "delete window.OffscreenCanvas; delete AbortSignal.any;",
}


@pytest.mark.parametrize("script", LACKING.values(), ids=LACKING)
def test_the_page_works_where_the_browser_denies_storage_or_is_older(tiny, tmp_path, visit, script):
    keys = private(tmp_path / "keys", line("visitor", "right"))
    with serving(tiny.parent, f"--api-keys {keys}") as server:
        visitor = visit(server.url, script=script)
        visitor.page.get_by_label("API key").fill("right")
        visitor.page.keyboard.press("Enter")
        page = visitor.ready()
        says(page, "#samples .status", "16 images in")
        press(page, "Image 1,")
        downloaded(page, "Ten times as large")
        press(page, "Complete it")
        says(page, "#completion .status", "6 completions in")


def test_a_browser_in_which_the_page_fails_is_told_which_one_it_needs(shipped, chromium):
    context = chromium.new_context()
    context.add_init_script("delete window.ResizeObserver")
    page = context.new_page()
    page.goto(shipped.url)
    says(page, "#needs", "This page needs JavaScript, and Chrome or Edge 105, ")
    context.close()


def test_one_of_each_class_asks_for_a_few_at_once_and_again_for_those_that_a_limit_refuses(
    tmp_path, visit
):
    keys = private(tmp_path / "keys", line("visitor", "right", "3/s"))
    with serving(ROOT / "checkpoints", f"--models letters-conditional --api-keys {keys}") as server:
        page = visit(server.url).page
        page.get_by_label("API key").fill("right")
        page.keyboard.press("Enter")
        says(page, "#samples .status", "16 images in")
        answers: list[int] = []
        page.on(
            "response",
            lambda one: answers.append(one.status) if one.url.endswith("/generations") else None,
        )
        page.evaluate("""() => {
          const asked = fetch;
          Object.assign(window, {waiting: 0, most: 0, fetch: (...given) => {
            window.most = Math.max(window.most, ++window.waiting);
            return asked(...given).finally(() => window.waiting--);
          }});
        }""")
        page.locator("#samples-form .chips label:has([value='each'])").click()
        press(page, "Draw", exact=True)
        says(page, "#samples .status", "52 images in")
        assert answers.count(200) == 52 and set(answers) == {200, 429}, answers
        assert page.evaluate("window.most") <= 5  # with that for the status
        expect(page.locator("#samples .notice")).to_be_hidden()
        captions = page.locator("#samples .caption").all_inner_texts()
        assert (
            "".join(caption[0] for caption in captions)
            == string.ascii_uppercase + string.ascii_lowercase
        )


def test_an_error_of_one_of_several_requests_ends_the_others_and_stays(shipped, visit):
    page, asked = visit(shipped.url).ready(), []
    says(page, "#samples .status", "16 images in")

    def answer(route):
        asked.append(route)
        status, message, headers = (
            (429, "full", {"retry-after": "2"}) if asked[1:] else (500, "the engine failed", {})
        )
        route.fulfill(status=status, headers=headers, json={"error": {"message": message}})

    page.route("**/generations", answer)
    page.locator("#samples-form .chips label:has([value='each'])").click()
    press(page, "Draw", exact=True)
    says(page, "#samples .notice", "The engine failed.")
    page.wait_for_timeout(4_000)  # twice the wait of the refused ones
    says(page, "#samples .notice", "The engine failed.")
    assert len(asked) <= 4


def test_what_the_service_refuses_is_said_in_its_own_words(shipped, visit):
    page = visit(shipped.url).ready()
    page.locator("#samples-form [name=seed]").fill("9007199254740990")
    press(page, "Draw", exact=True)
    says(
        page,
        "#samples .notice",
        r"Image i uses seed \+ i, which must be at least 0 and below 2\^53: .*\.",
    )


def test_an_image_of_a_model_that_is_no_longer_served_leaves_the_page_usable(tiny, tmp_path, visit):
    for name in ("first", "second"):
        shutil.copytree(tiny, tmp_path / name)
    with serving(tmp_path, *EAGER, "--models first,second") as server:
        page = visit(server.url).ready()
        says(page, "#samples .status", "16 images in")
    with serving(tmp_path, *EAGER, f"--models second --port {server.url.rsplit(':')[-1]}"):
        expect(page.locator("#models :checked")).to_have_value("second")
        says(page, "#samples .notice", "first is no longer served. second is chosen now.")
        for button, panel in (("Complete it", "completion"), ("Reuse its settings", "samples")):
            turn_to(page, "Samples")
            press(page, "Image 1,")
            press(page, button)
            says(page, f"#{panel} .notice", "first is no longer served. Choose another model.")
        turn_to(page, "Completion")
        press(page, "Lower half")
        press(page, "Complete", exact=True)
        says(page, "#completion .status", "completions? in")
