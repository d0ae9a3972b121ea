"""Faults injected through --faults into real server processes with real clients."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from linpix.model import checkpoint, ops
from linpix.server.engine.decode.decoder import EagerDecoder
from linpix.server.engine.decode.faults import Faults, InjectedFault, with_faults
from linpix.server.engine.thread import RESTARTS
from tests.server.web.routes.test_images import events_of, generate, message_of, refusal
from tools.harness.servers import EAGER, HANG_S, Process, eventually, serving

pytestmark = pytest.mark.slow

PATH = "/v1/images/generations"
BESIDE = "slow:every=1:ms=20"  # so that requests that come together are decoded together


class Recorded(EagerDecoder):
    """An engine that decodes nothing, and notes which slots were filled with NaN."""

    def quantum(self, plan):
        return []


def struck(folder: Path, faults: Faults, quanta: int = 200) -> list[tuple[int, int, str]]:
    """(quantum, slot, kind) of what strikes, of five images."""
    engine, found, quantum = Recorded(checkpoint.read(folder), 5), [], 0
    engine.pool.fill_with_nan = lambda slot: found.append((quantum, slot, "nan"))
    breaking, slots = with_faults(engine, faults), [1, 2, 3, 4, 5]
    engine.slots.seed[1:], engine.slots.position[1:] = [10, 11, 12, 13, 14], 8
    for quantum in range(1, quanta + 1):
        breaking.keep(slots)
        for part in (slots, *([slot] for slot in slots)):  # the first run, and then each alone
            try:
                breaking.quantum(np.array([(slot, 1) for slot in part]))
            except InjectedFault:
                if len(part) == 1:
                    found.append((quantum, part[0], "throw"))
    return found


def test_the_same_faults_strike_again_and_another_seed_strikes_others(tiny):
    text = "throw:every=10,nan:at=7,nan:image=12,throw:from=195,seed={}"
    first = struck(tiny, Faults(text.format(1)))
    assert first == struck(tiny, Faults(text.format(1))) != struck(tiny, Faults(text.format(2)))
    thrown = [quantum for quantum, _, kind in first if kind == "throw"]
    assert set(thrown) == {*range(10, 201, 10), *range(195, 201)}
    assert [(quantum, slot) for quantum, slot, kind in first if kind == "nan" and quantum != 7] == [
        (quantum, 3) for quantum in range(1, 201) if quantum != 7
    ]


PATIENT = """
import os, sys, time
from linpix.server.engine import thread

class Patient:
    def __getattr__(self, name):
        return getattr(time, name)

    def sleep(self, seconds):
        while os.path.exists({waiting!r}):
            time.sleep(0.01)

thread.time = Patient()
from linpix.__main__ import main
sys.exit(main())
"""


@contextlib.contextmanager
def ending(folder: Path, waiting: Path, *flags: str) -> Iterator[Process]:
    """A server whose process ends, once its engine is gone, when the test has asked all."""
    waiting.touch()
    program = ("-c", PATIENT.format(waiting=str(waiting)))
    with serving(folder, *flags, program=program) as process:
        yield process
        waiting.unlink()
        assert process.process.wait(HANG_S) == 70


def ask(process: Process, **body) -> httpx.Response:
    return generate(process, **body)


def test_a_server_without_faults_says_nothing_of_them_and_one_with_them_says_it_loudly(
    tiny, server
):
    assert not any("INJECTS FAULTS" in line for line in server.printed)
    with serving(tiny.parent, "--faults glitch:at=1000") as process:
        assert any(
            "INJECTS FAULTS" in line and "glitch:at=1000" in line for line in process.printed
        )


@pytest.mark.parametrize("flags", [(), EAGER], ids=["auto", "eager"])
@pytest.mark.parametrize(("fault", "counted"), [("throw", "threw"), ("nan", "not_finite")])
def test_the_image_to_blame_ends_its_request_alone_streamed_or_not(
    tiny, server, flags, fault, counted
):
    faults = f"{BESIDE},{fault}:image=13"
    with (
        serving(tiny.parent, *flags, f"--faults {faults}") as process,
        ThreadPoolExecutor(8) as pool,
    ):
        seeds = [10, 12, 14, 15, 12, 16, 20, 22]  # two images each: 12 has 12 and 13
        bodies = [
            {"seed": seed, "n": 2, "stream": index % 4 == 0} for index, seed in enumerate(seeds)
        ]
        answers = list(pool.map(lambda body: ask(process, **body), bodies))
        for body, answer in zip(bodies, answers, strict=True):
            if body["seed"] != 12:
                assert answer.status_code == 200
                images = (
                    [
                        event
                        for event in events_of(answer.text)
                        if event["type"].endswith("completed")
                    ]
                    if body["stream"]
                    else answer.json()["data"]
                )
                assert len(images) == 2
                for image in images if ops.compiled and not flags else []:
                    [alone] = ask(server, seed=image["seed"]).json()["data"]
                    assert image["b64_json"] == alone["b64_json"]
                continue
            assert answer.status_code == (200 if body["stream"] else 500)
            error = (events_of(answer.text)[-1] if body["stream"] else answer.json())["error"]
            assert error["code"] == "engine_failed"
            assert {"nan": "NaN or infinite", "throw": "an image of this request (InjectedFault)"}[
                fault
            ] in error["message"]
        assert (
            process.metric(f'linpix_faults_isolated_total{{fault="{counted}",model="tiny"}}') == 2
        )
        assert (process.metric('linpix_quanta_retried_total{model="tiny"}') > 0) == (
            fault == "throw"
        )
        assert process.metric('linpix_requests_total{endpoint="generations",outcome="failed"}') == 2
        assert process.get("/readyz").status_code == 200
        assert eventually(lambda: process.quiet("tiny"))


def test_a_hanging_engine_is_noticed_and_every_request_answered_before_the_process_ends(
    tiny, tmp_path
):
    faults = ("--watchdog-timeout", "10", "--faults", f"{BESIDE},hang:at=5")
    with (
        ending(tiny.parent, tmp_path / "asking", *EAGER, "--slots", "2", *faults) as process,
        ThreadPoolExecutor(8) as pool,
    ):
        asked = [
            pool.submit(ask, process, n=1, seed=seed, stream=seed % 2 == 0) for seed in range(8)
        ]
        assert eventually(lambda: process.metric("linpix_engine_heartbeat_age_seconds") > 0.5)
        assert process.get("/readyz").status_code == 200
        job = process.post("/v1/compare", json={"budget": 1.0}).json()["id"]
        assert eventually(lambda: process.get("/readyz").status_code == 503)
        compared = process.get(f"/v1/compare/{job}").json()
        late = ask(process)
        for answer in (future.result() for future in asked):
            error = (events_of(answer.text)[-1] if answer.status_code == 200 else answer.json())[
                "error"
            ]
            assert answer.status_code in (200, 503)
            assert error["code"] == "engine_gone"
            assert "made no progress for 10 s" in error["message"]
        assert compared["status"] == "failed"
        assert refusal(late) == (503, "engine_gone")
        assert late.headers["retry-after"]
        assert eventually(lambda: any("engine thread is at" in line for line in process.printed))
        assert eventually(
            lambda: any("in quantum" in line or "faults.py" in line for line in process.printed)
        )


def test_a_server_that_hangs_while_it_drains_ends_all_the_same(tiny):
    with (
        serving(tiny.parent, *EAGER, "--watchdog-timeout 5 --faults hang:at=3") as process,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(ask, process)
        assert eventually(lambda: process.metric("linpix_engine_heartbeat_age_seconds") > 0.2)
        process.process.send_signal(signal.SIGTERM)
        assert asked.result().json()["error"]["code"] == "engine_gone"
        assert process.process.wait(HANG_S) == 70


def test_a_dead_engine_thread_is_restarted_and_waiting_requests_are_kept(tiny):
    with (
        serving(tiny.parent, f"--slots 1 --faults {BESIDE},die:at=4") as process,
        ThreadPoolExecutor(5) as pool,
    ):
        answers = list(pool.map(lambda seed: ask(process, seed=seed), range(5)))
        assert sorted(answer.status_code for answer in answers) == [200] * 4 + [500]
        [failed] = [answer.json()["error"] for answer in answers if answer.status_code == 500]
        assert failed["code"] == "engine_failed"
        assert "InjectedFault" in failed["message"]
        assert process.metric("linpix_engine_restarts_total") == 1
        assert process.get("/readyz").status_code == 200
        assert eventually(lambda: process.quiet("tiny"))


def test_a_request_whose_last_image_was_not_reported_when_the_thread_died_is_answered(tiny):
    """It is decoded when the thread dies, so it has no slot any more."""
    # one step, seven image rows, one row less a step
    with serving(tiny.parent, "--faults die:at=9") as process:
        answer = ask(process, n=2)
        again = ask(process, n=2)
        assert sorted([answer.status_code, again.status_code]) == [200, 500]
        assert eventually(lambda: process.quiet("tiny"))


def test_an_engine_thread_that_keeps_dying_ends_the_process(tiny, tmp_path):
    with ending(tiny.parent, tmp_path / "asking", "--faults", "die:every=1") as process:
        for _ in range(RESTARTS + 1):
            answer = ask(process)
            assert refusal(answer) == (500, "engine_failed")
        assert f"died {RESTARTS + 1} times" in message_of(answer)
        assert process.get("/readyz").status_code == 503


def test_a_process_whose_engine_is_lost_answers_and_ends_with_a_message(tiny, tmp_path):
    """What a sticky CUDA error does."""
    with ending(tiny.parent, tmp_path / "asking", *EAGER, "--faults", "lose:at=1") as process:
        answer = ask(process)
        assert answer.status_code == 500
        assert "injected: lose" in message_of(answer)
        refused = process.get("/readyz")
        assert refused.status_code == 503
        assert "injected: lose" in message_of(refused)
        assert eventually(lambda: any("injected: lose" in line for line in process.printed))


async def test_a_hundred_requests_with_a_fault_in_every_seventh_quantum_are_each_answered_once(
    tiny,
):
    faults = f"{BESIDE},throw:every=7,nan:every=11,glitch:every=13,prefill:every=40,seed=3"
    with serving(tiny.parent, f"--faults {faults} --slots 8") as process:
        async with httpx.AsyncClient(base_url=process.url, timeout=HANG_S) as client:
            answers = await asyncio.gather(*(generate(client, seed=seed) for seed in range(100)))
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 500}
        failed = codes.count(500)
        assert failed == sum(
            process.metric(f'linpix_faults_isolated_total{{fault="{fault}",model="tiny"}}')
            for fault in ("threw", "not_finite")
        )
        assert (
            process.metric('linpix_requests_total{endpoint="generations",outcome="completed"}')
            == 100 - failed
        )
        assert eventually(lambda: process.quiet("tiny"))
