"""Comparisons in the service: off the engine thread, one at a time; only numbers are kept of an
ended one.
"""

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from linpix.model import checkpoint as checkpoints
from linpix.server.compare import jobs
from linpix.server.compare.backends import ATTENTION
from linpix.server.compare.comparison import Comparison, ComparisonPlan
from linpix.server.compare.jobs import Comparisons, Run
from linpix.server.engine.admission import Admission
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.engine import Engine
from linpix.server.engine.thread import EngineThread
from linpix.server.errors import ServiceError
from linpix.server.metrics import Metrics
from tests.server.compare.test_comparison import kept, make
from tools.harness.servers import HANG_S, eventually, here

PLAN = ComparisonPlan(backends=("linear", "softmax"), batches=(1,), budget_s=0.2)
LONG = ComparisonPlan(backends=("linear", "softmax"), batches=(1,), budget_s=60.0)


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """A model and its twin."""
    kept(tmp_path, make(), make("softmax", "small-softmax", twin_of="small"))
    return tmp_path


@contextlib.asynccontextmanager
async def beginning(
    family: Path,
) -> AsyncIterator[tuple[Comparisons, Callable[[ComparisonPlan], Run]]]:
    """Comparisons of an engine thread that serves the model, and how one is begun."""
    checkpoint = checkpoints.read(family / "small")
    engine, thread = Engine(new_decoder(checkpoint, 1)), EngineThread()
    metrics = Metrics(ATTENTION, "eager")
    admission = Admission({"small": engine}, metrics, thread, max_queue=8)
    admission.start()
    under_way = Comparisons(admission, thread)
    try:
        yield under_way, lambda plan: under_way.begin(admission.models["small"], plan)
    finally:
        under_way.stop()
        await admission.stop()


async def until(true: Callable[[], bool]) -> None:
    assert await asyncio.to_thread(eventually, true)


def alive() -> int:
    gc.collect()
    return sum(type(one) is Comparison for one in gc.get_objects())


@pytest.fixture
def reading(monkeypatch) -> dict:
    """find_twins as it is, but that it waits until it may go on, and says on which thread it was
    called.
    """
    seen: dict = {"go on": threading.Event(), "thread": None, "calls": 0}
    find_twins = jobs.find_twins

    def waiting(*given):
        seen["thread"], seen["calls"] = threading.current_thread(), seen["calls"] + 1
        assert seen["go on"].wait(HANG_S)
        return find_twins(*given)

    monkeypatch.setattr(jobs, "find_twins", waiting)
    return seen


async def test_a_comparison_is_made_on_a_thread_that_neither_steps_nor_answers(family, reading):
    async with beginning(family) as (_, begin):
        job = begin(PLAN)
        await until(lambda: reading["thread"] is not None)
        assert (
            reading["thread"].name != "engine" and reading["thread"] is not threading.main_thread()
        )
        assert job.report is None
        reading["go on"].set()
        await until(lambda: job.status == "completed")
        assert {result["weights"] for result in job.report["results"]} == {"small", "small-softmax"}


async def test_what_is_cancelled_while_it_is_made_goes_no_further_and_no_other_is_begun_before(
    family, reading, monkeypatch
):
    built: list = []
    monkeypatch.setattr(jobs, "Comparison", lambda *given: built.append(given))
    async with beginning(family) as (under_way, begin):
        job = begin(LONG)
        await until(lambda: reading["thread"] is not None)
        under_way.cancel(job.id)
        await asyncio.sleep(jobs.PAUSE_S + 0.1)
        with pytest.raises(ServiceError, match="was just cancelled"):
            begin(LONG)
        reading["go on"].set()
        await until(under_way._making.done)
        assert (job.status, job.report, reading["calls"], built) == ("cancelled", None, 1, [])


async def test_a_cancelled_comparison_is_followed_by_a_pause(family, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(jobs, "time", clock)
    async with beginning(family) as (under_way, begin):
        first = begin(LONG)
        with pytest.raises(ServiceError, match="still running") as running:
            begin(LONG)
        assert running.value.retry_after_s is None
        await until(lambda: first.report is not None)
        under_way.cancel(first.id)
        with pytest.raises(ServiceError, match="cmp-1 was just cancelled") as paused:
            begin(LONG)
        assert paused.value.retry_after_s == jobs.PAUSE_S
        clock.monotonic = lambda: 100.0 + jobs.PAUSE_S
        assert (begin(LONG)).id == "cmp-2"


async def test_a_comparison_of_an_engine_that_is_gone_has_failed_when_the_service_stops(family):
    async with beginning(family) as (under_way, begin):
        job = begin(LONG)
        under_way._admission.gone = "the engine hung"
        under_way.stop()
        assert (job.status, job.error) == ("failed", "the engine hung")
        under_way._admission.gone = ""


async def test_of_an_ended_comparison_numbers_stay_and_no_network_does(family):
    async with beginning(family) as (under_way, begin):
        for plan in (PLAN, LONG):
            job = begin(plan)
            await until(lambda job=job: job.report is not None)
            assert plan is PLAN or alive() == 1
            if plan is LONG:
                under_way.cancel(job.id)
            await until(
                lambda job=job: job.status != "running" and not under_way._thread._background
            )
            assert len(job.report["results"]) >= 2
        assert alive() == 0


def test_an_error_about_a_twin_does_not_reveal_the_folder_of_checkpoints(family, caplog):
    with (family / "small-softmax" / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with here(family, models="small") as server, server.client() as client:
        id = client.post("/v1/compare", json={"batch": [1], "budget": 1}).json()["id"]
        assert eventually(lambda: client.get(f"/v1/compare/{id}").json()["status"] == "failed")
        error = client.get(f"/v1/compare/{id}").json()["error"]
        assert error.startswith("CheckpointError: small-softmax/model.safetensors has SHA-256")
        assert str(family) not in error
        assert f"{family}/small-softmax" in caplog.text
