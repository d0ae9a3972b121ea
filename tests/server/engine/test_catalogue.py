"""Checkpoints that are added, replaced and removed under a running service, by SIGHUP, against real
processes.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.model.provenance import CheckpointError
from linpix.server.engine.catalogue import Catalogue
from linpix.server.metrics import RELOADS
from linpix.server.settings import Settings
from tests.model.test_checkpoint import change_fields, change_tensors, seal
from tests.nets import net_of, saved
from tests.server.web.routes.test_images import events_of, message_of, refusal
from tests.server.web.test_leaving import GENERATIONS, SLOW, alone
from tools.harness.servers import HANG_S, Process, eventually, serving

pytestmark = pytest.mark.slow

bitwise = pytest.mark.kernels


def draw(folder: Path, seed: int, **changes) -> str:
    """Write a checkpoint of the preset `tiny` with random weights; returns its digest."""
    return checkpoint.digest_of(
        saved(folder, net_of(dataclasses.replace(PRESETS["tiny"], **changes), seed=seed))
    )


def outcomes(process: Process) -> dict[str, float]:
    return {
        outcome: process.metric(f'linpix_checkpoint_reloads_total{{outcome="{outcome}"}}')
        for outcome in RELOADS
    }


def reload(process: Process, checkpoints: int = 1) -> dict[str, float]:
    """Send SIGHUP and wait until so many checkpoints were looked at; returns how many came out
    how.
    """
    before = outcomes(process)
    process.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: sum(outcomes(process).values()) >= sum(before.values()) + checkpoints)
    return {
        outcome: count - before[outcome]
        for outcome, count in outcomes(process).items()
        if count > before[outcome]
    }


def served(process: Process) -> dict[str, str]:
    """Digests by model, in the order of the list."""
    return {card["id"]: card["checkpoint"] for card in process.get("/v1/models").json()["data"]}


def slots(process: Process) -> dict[str, float]:
    text = process.get("/metrics").text
    return {
        name: float(value)
        for name, value in re.findall(r'^linpix_state_slots\{model="(.*)"\} (\S+)$', text, re.M)
    }


def mapped(process: Process) -> int:
    """Bytes of address space: a pool of slots that nobody has used yet counts here, and in no other
    figure.
    """
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return int(re.search(r"^VmSize:\s+(\d+) kB", status, re.M)[1]) * 1024


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny, tmp_path / "models" / "tiny")
    return tmp_path / "models"


@contextlib.contextmanager
def left_quiet(folder: Path, *flags: str) -> Iterator[Process]:
    """A server that is quiet at the end, with a pool of slots for each model it serves and none
    beside them.
    """
    with serving(folder, *flags) as process:
        yield process
        assert eventually(lambda: process.quiet(*served(process)))
        assert slots(process).keys() == served(process).keys()


def test_a_checkpoint_that_is_added_is_listed_and_draws(folder):
    with left_quiet(folder) as process:
        assert reload(process) == {"unchanged": 1}
        digest = draw(folder / "fresh", 1)
        assert reload(process, 2) == {"unchanged": 1, "added": 1}
        assert served(process)["fresh"] == digest
        assert list(served(process)) == ["fresh", "tiny"]  # as after a restart: by name
        assert (
            process.metric(
                'linpix_images_completed_total{backend="linear",model="fresh",outcome="completed"}'
            )
            == 0
        )
        drawn = alone(process, model="fresh", seed=3)
        assert eventually(lambda: "is now fresh; before, it was tiny" in str(process.printed))
        assert drawn != alone(process, model="tiny", seed=3)
    with serving(folder) as again:
        assert list(served(again)) == ["fresh", "tiny"]
        assert alone(again, model="fresh", seed=3) == drawn


@bitwise
def test_images_under_way_are_drawn_by_the_weights_that_they_began_with(folder):
    """Streamed, plain and still waiting for a slot when the new checkpoint comes; then new requests
    get the new one.
    """
    seeds = [10, 20, 30, 40, 50, 60]
    with serving(folder) as process:
        expected = {seed: alone(process, seed=seed, n=2) for seed in seeds}
    with (
        left_quiet(folder, f"--slots 4 --faults {SLOW}") as process,
        ThreadPoolExecutor(8) as pool,
    ):
        old = served(process)["tiny"]
        asked = {
            seed: pool.submit(
                httpx.post,
                process.url + GENERATIONS,
                timeout=HANG_S,
                json={"seed": seed, "n": 2, "stream": seed % 20 == 0},
            )
            for seed in seeds
        }
        assert eventually(
            lambda: (
                process.metric("linpix_requests_running") == 2
                and process.metric("linpix_requests_waiting") == 4
            )
        )
        new = draw(folder / "tiny", 1)
        assert reload(process) == {"replaced": 1}
        assert served(process) == {"tiny": new}
        assert not all(answer.done() for answer in asked.values())
        assert slots(process) == {"tiny": 8}  # both pools
        fresh = alone(process, seed=10, n=2)
        for seed, answer in asked.items():
            images = (
                [
                    event
                    for event in events_of(answer.result().text)
                    if event["type"].endswith("completed")
                ]
                if seed % 20 == 0
                else answer.result().json()["data"]
            )
            assert [
                image["b64_json"] for image in sorted(images, key=lambda image: image["seed"])
            ] == expected[seed]
            assert old in answer.result().text
        assert eventually(lambda: slots(process) == {"tiny": 4})
        assert fresh != expected[10]
    with serving(folder) as again:
        assert alone(again, seed=10, n=2) == fresh


@bitwise
def test_no_request_is_dropped_while_a_model_is_replaced_again_and_again(folder, tmp_path):
    digests = [draw(tmp_path / name / "tiny", seed) for seed, name in enumerate(("one", "other"))]
    shutil.rmtree(folder / "tiny")
    shutil.copytree(tmp_path / "one" / "tiny", folder / "tiny")
    with (
        left_quiet(folder, "--slots 4 --max-queue 64") as process,
        ThreadPoolExecutor(8) as pool,
    ):
        over = threading.Event()
        answers: list[httpx.Response] = []

        def come(index: int) -> None:
            with process.client() as client:
                while not over.is_set():
                    answers.append(client.post(GENERATIONS, json={"seed": index}))

        clients = [pool.submit(come, index) for index in range(8)]
        try:
            for turn in range(6):
                shutil.rmtree(folder / "tiny")
                shutil.copytree(tmp_path / ("other", "one")[turn % 2] / "tiny", folder / "tiny")
                assert reload(process) == {"replaced": 1}
                assert served(process)["tiny"] == digests[1 - turn % 2]
                begun = len(answers)
                assert eventually(lambda begun=begun: len(answers) > begun + 16)
        finally:
            over.set()
        for client in clients:
            client.result()
        assert {answer.status_code for answer in answers} == {200}
        bodies = [answer.json() for answer in answers]
        drawn = {
            (body["checkpoint"], body["data"][0]["seed"], body["data"][0]["b64_json"])
            for body in bodies
        }
        assert len(drawn) == 16  # eight seeds of two checkpoints, and of each one image
        assert {digest for digest, _, _ in drawn} == set(digests)


def test_a_model_that_is_removed_finishes_what_it_began_and_gives_its_memory_back(folder):
    draw(folder / "leaving", 1)
    with (
        left_quiet(folder, f"--slots 400000 --faults {SLOW}") as process,
        ThreadPoolExecutor(1) as pool,
    ):
        expected = alone(process, model="leaving", seed=2)
        asked = pool.submit(alone, process, model="leaving", seed=2)
        assert process.becomes('linpix_state_slots_used{model="leaving"}', 1)
        both = mapped(process)
        shutil.rmtree(folder / "leaving")
        assert reload(process, 2) == {"unchanged": 1, "removed": 1}
        refused = process.post(GENERATIONS, json={"model": "leaving"})
        assert refusal(refused) == (404, "model_not_found")
        assert message_of(refused).startswith("model 'leaving' is not loaded; loaded: tiny.")
        assert asked.result() == expected
        assert eventually(lambda: slots(process) == {"tiny": 400_000})
        pool_bytes = 400_000 * 1152  # a quarter of it for threads and their heaps, which came since
        assert eventually(lambda: mapped(process) <= both - 0.75 * pool_bytes), (
            f"{both:,}, now {mapped(process):,}"
        )
        assert alone(process, model="tiny", seed=2)
        assert 'linpix_state_slots_used{model="leaving"}' not in process.get("/metrics").text


def test_the_last_model_is_not_removed(folder):
    with left_quiet(folder) as process:
        before = served(process)
        shutil.move(folder / "tiny", folder.parent / "away")
        assert reload(process) == {"refused": 1}
        assert served(process) == before
        assert alone(process)
        assert eventually(
            lambda: any(
                "tiny is kept" in line and "no model would be left" in line
                for line in process.printed
            )
        )
        folder.rename(folder.parent / "gone")
        assert reload(process) == {"refused": 1}
        assert eventually(lambda: any("is not a folder" in line for line in process.printed))
        assert served(process) == before
        (folder.parent / "gone").rename(folder)
        shutil.move(folder.parent / "away", folder / "tiny")
        assert reload(process) == {"unchanged": 1}


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    seal(folder)


def name_half_a_character(folder: Path) -> None:
    change_fields(folder, "provenance", class_names=["\ud800"])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (flip_a_bit, "model.safetensors has SHA-256"),
        (
            lambda folder: change_tensors(folder, norm__bias=torch.full((16,), torch.nan)),
            "tensor norm.bias holds values",
        ),
        (break_config, "config.json is no JSON: Expecting"),
        (lambda folder: (folder / "SHA256SUMS").unlink(), "SHA256SUMS is missing"),
        (name_half_a_character, "config.json: contains half a surrogate pair"),
    ],
    ids=["bit", "nan", "config", "no sums", "half a character"],
)
def test_a_bad_checkpoint_is_refused_by_name_and_the_old_one_stays(reloading, spoil, words):
    process, folder = reloading
    before, expected = served(process), alone(process, seed=4)
    said = len(process.printed)
    spoil(folder / "tiny")
    assert reload(process) == {"refused": 1}
    assert served(process) == before
    assert alone(process, seed=4) == expected
    assert eventually(
        lambda: any(
            words in line and "tiny" in line and "the loaded one is kept" in line
            for line in process.printed[said:]
        )
    ), process.printed[said:]


@pytest.fixture(scope="module")
def server_of_one(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Process, Path]]:
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(tiny, folder / "tiny")
    with left_quiet(folder) as process:
        yield process, folder


@pytest.fixture
def reloading(server_of_one: tuple[Process, Path], tiny: Path) -> Iterator[tuple[Process, Path]]:
    """A server, and the folder of its checkpoint, which is put back."""
    yield server_of_one
    process, folder = server_of_one
    shutil.rmtree(folder / "tiny")
    shutil.copytree(tiny, folder / "tiny")
    assert reload(process) == {"unchanged": 1}


def test_a_bad_one_does_not_keep_the_others_from_being_read(folder):
    for name in ("a", "b", "c"):
        draw(folder / name, 1)
    with left_quiet(folder) as process:
        flip_a_bit(folder / "a")
        new = draw(folder / "b", 2)
        shutil.rmtree(folder / "c")
        draw(folder / "d", 3)
        flip_a_bit(folder / "d")  # new, and bad from the start
        assert reload(process, 5) == {"refused": 2, "replaced": 1, "unchanged": 1, "removed": 1}
        assert list(served(process)) == ["a", "b", "tiny"]
        assert served(process)["b"] == new


def test_a_model_whose_name_no_answer_can_have_is_refused_when_it_starts_and_when_it_is_added(
    folder,
):
    with left_quiet(folder) as process:
        draw(folder / "caf\udce9", 1)
        assert reload(process, 2) == {"refused": 1, "unchanged": 1}
        assert list(served(process)) == ["tiny"]
    with pytest.raises(CheckpointError, match=r"must be UTF-8.* got 'caf\\udce9'; rename"):
        Catalogue(Settings(checkpoints=folder)).read()
    with pytest.raises(CheckpointError, match="must be UTF-8"):
        Catalogue(Settings(checkpoints=folder)).check()


def test_a_checkpoint_in_the_middle_of_being_written_is_not_taken_for_removed(folder):
    draw(folder / "other", 1)
    with left_quiet(folder) as process:
        before = served(process)
        # what a save does before it renames the new one
        (folder / "other").rename(folder / "other.old")
        assert reload(process, 2) == {"unchanged": 1, "refused": 1}
        (folder / "other").mkdir()  # what a copy begins with
        assert reload(process, 2) == {"unchanged": 1, "refused": 1}
        assert served(process) == before
        (folder / "other").rmdir()
        (folder / "other.old").rename(folder / "other")
        assert reload(process, 2) == {"unchanged": 2}


@pytest.mark.parametrize("flags", [(), ("--models", "tiny,prod")], ids=["all", "named"])
def test_a_link_is_served_by_its_own_name_whatever_it_names(folder, flags):
    digests = [
        draw(folder.parent / "store" / name, seed) for seed, name in enumerate(("first", "second"))
    ]
    (folder / "prod").symlink_to(folder.parent / "store" / "first")
    with left_quiet(folder, *flags) as process:
        assert served(process)["prod"] == digests[0]
        expected = alone(process, model="prod", seed=1)
        (folder / "prod.link").symlink_to(folder.parent / "store" / "second")
        (folder / "prod.link").rename(folder / "prod")
        assert reload(process, 2) == {"unchanged": 1, "replaced": 1}
        assert served(process)["prod"] == digests[1]
        assert alone(process, model="prod", seed=1) != expected
        (folder / "prod").unlink()
        assert reload(process, 2) == {"unchanged": 1, "removed": 1}
        assert list(served(process)) == ["tiny"]


def test_a_comparison_goes_on_with_the_weights_that_it_was_asked_about(folder):
    draw(folder / "compared", 1)
    with left_quiet(folder) as process, process.client() as client:
        old = served(process)["compared"]
        begun = client.post(
            "/v1/compare", json={"model": "compared", "batch": [1], "budget": 3.0}
        ).json()["id"]
        assert eventually(lambda: client.get(f"/v1/compare/{begun}").json()["report"] is not None)
        draw(folder / "compared", 2)
        assert reload(process, 2) == {"unchanged": 1, "replaced": 1}
        shutil.rmtree(folder / "compared")
        assert reload(process, 2) == {"unchanged": 1, "removed": 1}
        assert eventually(lambda: client.get(f"/v1/compare/{begun}").json()["status"] != "running")
        over = client.get(f"/v1/compare/{begun}").json()
        assert over["status"] == "completed", over["error"]
        assert over["report"]["digest"] == old
        assert client.post("/v1/compare", json={"model": "compared"}).status_code == 404


def test_a_hangup_while_it_starts_is_answered_once_it_serves(folder):
    """By default it would end the process."""
    digests: list[str] = []

    def hang_up(pid: int) -> None:
        status = Path(f"/proc/{pid}/status")
        assert eventually(
            lambda: bool(int(re.search(r"SigBlk:\s+(\S+)", status.read_text())[1], 16) & 1)
        )
        digests.append(draw(folder / "tiny", 1))  # perhaps after the server has read it
        for _ in range(3):
            os.kill(pid, signal.SIGHUP)

    with serving(folder, begun=hang_up) as process:
        assert eventually(lambda: sum(outcomes(process).values()) > 0)
        assert served(process) == {"tiny": digests[0]}
