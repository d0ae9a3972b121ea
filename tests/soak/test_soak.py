"""The soak suite at its smallest: every phase, tens of clients, and that it notices the faults it
looks for.
"""

import asyncio
import re
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from linpix.model import ops
from linpix.model.config import PRESETS
from tests.nets import net_of, saved
from tests.soak import report
from tests.soak.checks import accounted, measured
from tests.soak.loads import Plan, Soak, closed_loop
from tests.soak.phases import PHASES
from tests.soak.service import Oracle

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def soak(tiny: Path) -> Iterator[Soak]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # its servers have one less than they may
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1, before[1]))
    running = Soak(
        Plan(
            model=tiny,
            batching=tiny,
            seconds=0.6,
            clients=(1, 8, 32),
            few_and_many=(4, 16),
            rounds=1,
            storm=60,
            slow=4,
            fault_every=20,
            seeds=16,
        )
    )
    yield running
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert running.close() == []


@pytest.mark.parametrize("name", PHASES)
async def test_a_phase_ends_well(soak, name):
    results = await PHASES[name][0](soak)
    assert [failure for result in results for failure in result.failures] == []
    for result in results:  # speeds are told, and not asserted
        assert result.outcomes or result.skipped or name == "kill", result.name
        assert report.row(result)[-1] != "failed"
    assert report.table(results, soak.plan, 1.0).count("\n| ") >= 1 + len(results)


async def test_images_of_other_weights_are_noticed(soak, tmp_path):
    saved(tmp_path / "tiny", net_of(PRESETS["tiny"], seed=1))

    async def load(served_as: str) -> str:
        service, own = await soak.crowded()
        others = Oracle(tmp_path / "tiny", service.card)
        others.digest = own.digest if served_as == "own" else others.digest
        async with measured(soak, "others", service, [others]) as (result, records):
            records += await closed_loop(soak, service, 2, seconds=0.1)
        return " ".join(result.failures)

    assert "which nobody served" in await load("others")
    assert ("not what their seed gives" in await load("own")) == ops.compiled


async def test_a_request_that_does_not_end_and_a_file_that_stays_open_are_noticed(
    soak, monkeypatch
):
    service, _ = await soak.crowded()
    monkeypatch.setattr("tests.soak.service.SETTLE_S", 0.5)
    hold = asyncio.Event()
    working = asyncio.ensure_future(
        service.connection(hold=hold, slow="reading").ask(
            soak.draw(n=14, size=service.card["sizes"][-1], stream=True)
        )
    )
    await asyncio.sleep(0.5)
    held = await service.settle()
    hold.set()
    assert "linpix_requests_running is 1, not 0" in held
    assert any("files are open" in text for text in held)
    assert (await working).outcome == "completed"


@pytest.mark.parametrize(
    ("counted", "words"),
    [
        ({"completed": 8}, ""),
        ({"completed": 7, "cancelled": 1}, ""),
        ({"completed": 7, "cancelled": 1, "failed": 1}, ""),
        (
            {"completed": 6, "cancelled": 1},
            "counted 6 requests as completed, its clients saw 7 to 9",
        ),
        ({"completed": 10}, "counted 10 requests as completed"),
        ({"completed": 7, "cancelled": 3}, "as cancelled"),
        ({"completed": 9, "cancelled": 2}, "ended 11 requests of 9"),
    ],
)
def test_the_services_counters_are_held_against_what_its_clients_saw(counted, words):
    change = {
        f'linpix_requests_total{{endpoint="edits",outcome="{name}"}}': value
        for name, value in counted.items()
    }
    said = accounted(Counter(completed=7, left=2), change)
    assert words in " ".join(said) if words else said == []


async def test_a_server_raises_its_limit_of_open_files_which_are_connections(soak):
    service, _ = await soak.crowded()
    limits = Path(f"/proc/{service.pid}/limits").read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert re.search(r"Max open files +(\d+)", limits)[1] == str(hard) != str(soft)
