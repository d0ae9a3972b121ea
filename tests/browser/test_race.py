"""The race: measured by /v1/compare, and replayed at the measured speeds."""

import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from playwright.sync_api import Page, expect

from linpix.server.compare.report import ENGINES
from tests.browser.conftest import ROOT, chosen, press, says, turn_to
from tools.harness.servers import HANG_S, eventually, serving

pytestmark = pytest.mark.slow

LANES = """items => items.map(item => [item.querySelector('h3').innerText.replace(/\\s+/g, ' '),
                                       item.querySelector('.count').innerText])"""
# of tiny's slowest lane in less than a second
RACED = r"Every lane draws the same images|The race is over"


@pytest.fixture(scope="module")
def racing(tiny):
    """A server whose comparisons take seconds."""
    with serving(tiny.parent, "--compare-budget 5") as server:
        yield server


def kind_of(name: str) -> tuple[str, str]:
    """Backend and engine of what a lane or a row is called."""
    backend, engine = name.split()
    return backend, {told: engine for engine, told in ENGINES.items()}[engine]


def race(page: Page) -> None:
    press(page, "Measure and race")
    says(page, "#race .status", r"Measuring: \d+ %")


def told(server, path: str) -> dict:
    return server.get(f"/v1/{path}").json()


def begun(server, budget: float) -> str:
    """The id of a comparison that somebody else has asked for."""
    body = {"batch": [1], "budget": budget}
    return server.post("/v1/compare", json=body).json()["id"]


COMPARED = {
    ("linear", "eager"),
    ("softmax", "eager"),
    ("stateful-softmax", "eager"),
    ("linear", "compiled"),
}


def disturbed(report) -> bool:
    """Whether the headline has to be that of an earlier measurement, as on a busy machine."""
    return any(
        one["disturbed"]
        for one in report["results"]
        if one["batch"] == 1 and (one["backend"], one["engine"]) in COMPARED
    )


def test_the_race_is_measured_shown_and_replayed_at_the_measured_speeds(racing, visit):
    visitor = visit(racing.url, panel="race")
    page = visitor.ready()  # and nobody has measured on this server
    says(page, "#race .status", RACED)
    id = told(racing, "status")["comparison"]["id"]
    report = told(racing, f"compare/{id}")["report"]
    alone = {(one["backend"], one["engine"]): one for one in report["results"] if one["batch"] == 1}
    says(page, "#race .status", "The race is over")
    total = {
        kind: one["seconds_per_image"] for kind, one in alone.items() if one["seconds_per_image"]
    }
    slowest = max(total.values())
    linear, softmax = (total.get((backend, "eager")) for backend in ("linear", "softmax"))
    assert page.locator("#headline-bad").is_visible() == disturbed(report)
    if linear and softmax and not disturbed(report):
        slow, fast = ("softmax", "linear") if softmax >= linear else ("linear", "softmax")
        words = says(
            page, "#headline", f"While {slow} attention draws 1 picture, {fast} attention draws "
        )
        assert int(words.split()[-1].strip(".").replace(",", "")) == pytest.approx(
            max(softmax, linear) / min(softmax, linear), abs=1
        )
        says(page, "#headline-more", "Both run in plain torch.* Measured with tiny, ")
    counts = {}
    for name, count in page.locator(".lane").evaluate_all(LANES):
        kind = kind_of(name)
        counts[kind] = int(count.split()[0].replace(",", "")) if kind in total else None
    assert set(counts) == set(alone)
    for kind, seconds in total.items():
        assert counts[kind] == pytest.approx(slowest / seconds, abs=1), kind

    table, memory = (
        page.locator("#figures tbody tr"),
        page.locator(".lane .memory span").all_inner_texts(),
    )
    assert table.count() == len(alone)
    for row in range(len(alone)):
        cells = table.nth(row).locator("th, td").all_inner_texts()
        one = alone[kind_of(cells[0])]
        base = alone.get(("softmax", one["engine"]), {"images_per_second": None})
        assert ("(" in cells[1]) == bool(one["images_per_second"] and base["images_per_second"]), (
            cells
        )
        if one["images_per_second"]:
            assert float(re.match(r"~?([\d.,]+)", cells[1])[1].replace(",", "")) == pytest.approx(
                one["images_per_second"], rel=0.006
            )
        assert memory[row] == cells[-1], "a finished image needs what the table says"
    expect(page.get_by_role("button", name="Race again")).to_be_enabled()
    drawn = [visitor.pixels(".lane .frame canvas", index) for index in range(len(alone))]
    assert all(pixels == drawn[0] for pixels in drawn) and min(drawn[0][3::4]) == 255, (
        "all end with the same, whole"
    )


def test_the_race_begins_at_once_at_the_speeds_of_another_machine_and_corrects_itself(tiny, visit):
    with serving(tiny.parent, "--compare-budget 5") as server:
        page = visit(server.url, panel="now").ready()
        held: list = []
        page.route("**/v1/compare", lambda route: held.append(route))
        turn_to(page, "Race")
        says(page, ".clock", "^[1-9]")  # it runs, and the server was not even asked to measure
        assert len(held) == 1
        says(
            page, "#headline", "While softmax attention draws 1 picture, linear attention draws 10."
        )
        says(
            page,
            "#headline-more",
            "not measured here yet are those of mnist-small on two cores of an AMD EPYC",
        )
        before = page.locator(".lane .time").all_inner_texts()
        assert before[1:3] == ["~882 ms each", "~837 ms each"]
        assert int(page.locator(".lane .count strong").nth(1).inner_text()) >= 1
        held[0].continue_()
        says(page, "#race .status", "The race is over")
        report = told(server, "compare/cmp-1")["report"]
        lanes, times = (
            page.locator(".lane").evaluate_all(LANES),
            page.locator(".lane .time").all_inner_texts(),
        )
        for (name, _), shown in zip(lanes, times, strict=True):
            one = next(
                one
                for one in report["results"]
                if one["batch"] == 1 and (one["backend"], one["engine"]) == kind_of(name)
            )
            assert ("not measured" in shown) == (one["seconds_per_image"] is None), name
        assert not set(before) & set(page.locator(".lane .time").all_inner_texts())
        assert (
            "not measured here yet" in page.locator("#headline-more").inner_text()
        ) == disturbed(report)


def test_a_row_that_other_work_disturbed_says_so_on_the_page(racing, visit):
    """The report is the server's own, in which two rows are said to have been disturbed."""
    id = begun(racing, 2.0)
    assert eventually(lambda: told(racing, f"compare/{id}")["status"] == "completed")
    busy, why, note = (
        True,
        "other work used its processor",
        "Disturbed by other work (†): two rows.",
    )

    def answered(route) -> None:
        state = route.fetch().json()
        for one in state["report"]["results"]:
            one["disturbed"] = (
                busy and one["backend"] == "linear" and one["images_per_second"] is not None
            )
            one["note"] = why if one["disturbed"] else None
        state["report"]["notes"] = [note]
        route.fulfill(json=state)

    visitor = visit(racing.url, panel="race")
    visitor.ready().route(f"**/v1/compare/{id}", answered)
    visitor.page.reload()
    page = visitor.ready()
    says(page, "#race .status", "Measured before, with tiny")
    rows = page.locator("#figures tbody tr").evaluate_all("all => all.map(one => one.innerText)")
    assert {row.split()[0]: "†" in row for row in rows} == {
        backend: backend == "linear"
        for backend in ("linear", "stateful-softmax", "softmax", "lsh-1", "lsh-4")
    }
    lane = page.locator(".lane .time", has_text="†").first
    assert lane.get_attribute("title") == why
    expect(page.locator("#remarks > p", has_text=note)).to_be_visible()
    if "not measured" not in page.locator(".lane .time").first.inner_text():
        expect(page.locator("#headline-bad")).to_be_visible()
        # the headline is still that of other speeds
        says(page, "#headline-more", "are those of mnist-small")
    busy = False
    page.reload()
    says(page, "#race .status", "Measured before, with tiny")
    expect(page.locator("#headline-bad")).to_be_hidden()


def test_measuring_again_right_after_a_stop_waits_for_the_server(racing, visit):
    """It says how long in its 409; the page asks again by itself."""
    page = visit(racing.url, panel="race").ready()
    race(page)
    press(page.locator("#race-form"), "Stop")
    says(page, "#race .status", "Stopped")
    before, refused = told(racing, "status")["comparison"]["id"], []
    page.on("response", lambda answer: refused.append(answer.url) if answer.status == 409 else None)
    race(page)
    assert len(refused) <= 2, "it asked when it was told to, and not all the time"
    assert told(racing, "status")["comparison"]["id"] != before


def test_stop_ends_the_measuring_on_the_server_too(tiny, visit):
    with serving(tiny.parent, "--compare-budget 300") as server:  # it does not end by itself
        page = visit(server.url, panel="race").ready()
        says(page, "#race .status", r"Measuring: \d+ %")
        latest = told(server, "status")["comparison"]
        assert latest["status"] == "running"
        press(page.locator("#race-form"), "Stop")
        says(page, "#race .status", "Stopped")
        assert eventually(lambda: told(server, f"compare/{latest['id']}")["status"] == "cancelled")


def test_a_comparison_that_another_client_stopped_is_measured_and_raced_on_retry(racing, visit):
    # a visitor that has just left is still being measured, and would only be watched
    assert eventually(
        lambda: (told(racing, "status")["comparison"] or {}).get("status") != "running"
    )
    page = visit(racing.url, panel="race").ready()
    race(page)
    id = told(racing, "status")["comparison"]["id"]
    assert racing.delete(f"/v1/compare/{id}").status_code == 200
    says(page, "#race .notice", "This comparison was stopped")
    press(page, "Try again")
    says(page, "#race .status", r"Measuring: \d+ %")
    says(page, "#race .status", RACED)
    assert told(racing, "status")["comparison"]["id"] != id


def test_a_comparison_of_another_client_is_watched(tiny, visit):
    with serving(tiny.parent, "--compare-budget 15") as server:
        page = visit(server.url, panel="now").ready()
        id = begun(server, 12.0)
        turn_to(page, "Race")
        says(page, "#race .status", f"Watching {id}, which another visitor started")
        says(page, "#race .status", RACED)
        assert told(server, "status")["comparison"]["id"] == id, "no second one was begun"


def test_a_full_queue_is_waited_for_before_anything_is_measured(tiny, visit):
    options = "--slots 1 --max-queue 0 --max-n 2 --compare-budget 5"
    with (
        serving(tiny.parent, options, "--faults slow:every=1:ms=50") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        visitor = visit(server.url, panel="now")
        page, others, asked = visitor.ready(), [], []

        def overtaken(route) -> None:  # somebody else's image, of seconds, takes the slot first
            others.append(pool.submit(httpx.post, route.request.url, json={}, timeout=HANG_S))
            assert server.becomes('linpix_state_slots_used{model="tiny"}', 1)
            route.continue_()

        page.route("**/v1/images/generations", overtaken, times=1)
        page.on("request", lambda one: asked.append(one.url) if one.method == "POST" else None)
        turn_to(page, "Race")
        says(page, "#race .notice", "The queue is full")
        says(page, "#race .status", RACED)
        assert [other.result().status_code for other in others] == [200]
        assert sum(url.endswith("/v1/compare") for url in asked) == 1
        # disabled if the race is over by now
        page.get_by_role("button", name="Skip to the end").click(force=True)
        says(page, "#race .status", "The race is over")
        expect(page.get_by_role("button", name="Race again")).to_be_enabled()


def test_a_model_that_can_be_compared_races_while_a_conditional_one_is_chosen_elsewhere(visit):
    models = "mnist-small,cifar10-small,mnist-conditional"
    with serving(ROOT / "checkpoints", f"--compare-budget 10 --models {models}") as server:
        page = visit(server.url, panel="race").ready()
        assert page.locator("#race-form [name=model] option").all_inner_texts() == [
            "mnist-small",
            "cifar10-small",
        ]
        assert chosen(page) == "mnist-conditional"
        assert page.locator("#race-form [name=model]").input_value() == "mnist-small"
        says(page, "#race .status", "Every lane draws the same images")
        latest = told(server, "status")["comparison"]
        assert told(server, f"compare/{latest['id']}")["report"]["model"] == "mnist-small"
        assert chosen(page) == "mnist-conditional"
