"""A real Ray cluster on this machine: two fronts and two replicas under load, some of which are
killed.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.model.nets import net_for
from linpix.model.sharing import PREFIX
from linpix.server.engine.thread import LOST
from tests.fuzz.pictures import noise
from tests.nets import net_of, saved
from tests.server.test_dashboard import ALERTS, ASKED, WINDOW, watching
from tests.server.web.routes.test_images import encode, generate
from tests.soak.service import Oracle
from tools.harness.client import Ask, Connection, Picture, Record
from tools.harness.servers import HANG_S, Process, eventually, fetch, serving

pytest.importorskip("ray.serve", reason="the extra is not installed: pip install '.[ray]'")
pytestmark = pytest.mark.slow

REQUESTS, CLIENTS, SEEDS = 300, 24, 20
FLAGS = "--replicas 2 --fronts 2 --replica-threads 1 --drain-timeout 60"


def processes(driver: int) -> dict[int, str]:
    """The command lines of the processes that a driver began, and those that these began, by
    process id.
    """
    parents, commands = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int(
                    (folder / "stat").read_text().rpartition(")")[2].split()[1]
                )
                commands[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                )
            except OSError:
                continue  # it has ended
    family = {driver}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return {pid: commands[pid] for pid in family - {driver}}


class Cluster(SimpleNamespace):
    server: Process
    oracle: Oracle
    picture: Picture
    targets: Path

    def scraped(self) -> dict[str, str]:
        """What each process measures, by its label `replica`: as Prometheus finds and scrapes
        them.
        """
        found = {}
        for file in self.targets.glob("*.json"):
            # of a process that was killed
            with contextlib.suppress(httpx.TransportError, FileNotFoundError):
                [target] = json.loads(file.read_text())
                # reading certificates would take longest
                answer = fetch(f"http://{target['targets'][0]}/metrics")
                found[target["labels"]["replica"]] = answer.text
        return found

    def pids(self, deployment: str) -> list[int]:
        title = re.compile(rf"ray::ServeReplica:\w+:{deployment}")
        return [
            pid
            for pid, command in processes(self.server.process.pid).items()
            if title.match(command)
        ]

    def whole(self) -> bool:
        return Counter(name.split("-")[0] for name in self.scraped()) == {"engine": 2, "front": 2}

    def asks(self, count: int) -> list[Ask]:
        """Samples and completions, in one piece and streamed."""
        return [
            Ask(
                seed=at % SEEDS,
                stream=at % 3 == 0,
                n=1 + at % 2,
                picture=self.picture if at % 5 == 0 else None,
            )
            for at in range(count)
        ]

    def samples(self, name: str) -> list[tuple[str, Sample]]:
        """A metric of all processes, each with the process."""
        return [
            (replica, sample)
            for replica, text in self.scraped().items()
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        ]

    def total(self, name: str) -> float:
        """The sum of a metric over all processes."""
        return sum(sample.value for _, sample in self.samples(name))

    def of_engines(self, name: str, **labels: str) -> list[float]:
        """A metric of each replica, where it has these labels."""
        return [
            sample.value
            for replica, sample in self.samples(name)
            if replica.startswith("engine") and labels.items() <= sample.labels.items()
        ]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster") / "small"
    # its weights are no other test's, whose processes would share them
    saved(folder, net_of(PRESETS["mnist-small"], seed=os.getpid()))
    targets = tmp_path_factory.mktemp("targets")
    server = Process(folder.parent, FLAGS, f"--metrics-targets {targets}")
    try:
        card = server.get("/v1/models").json()["data"][0]
        drawn = noise(28, 28)
        yield Cluster(
            server=server,
            oracle=Oracle(folder, card),
            picture=Picture(encode(drawn), keep_rows=14),
            targets=targets,
        )
    finally:
        server.stop()


async def load(
    cluster: Cluster, asks: list[Ask], events: dict[int, tuple[str, int]]
) -> list[Record]:
    """Ask them all, CLIENTS at a time. events: (deployment, which) to kill once so many are
    answered.
    """
    waiting, answered = list(reversed(asks)), []
    address = urlsplit(cluster.server.url)

    async def client() -> None:
        connection = Connection(str(address.hostname), int(address.port or 0))
        while waiting:
            answered.append(record := await connection.ask(waiting.pop()))
            if (event := events.pop(len(answered), None)) is not None:
                os.kill(cluster.pids(event[0])[event[1]], signal.SIGKILL)
            # what was killed takes connections until its last socket is closed
            if record.outcome == "lost":
                await asyncio.sleep(0.1)
        connection.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return answered


def every_image_is_that_of_the_plain_server(cluster: Cluster) -> None:
    records = asyncio.run(load(cluster, cluster.asks(60), {}))
    assert Counter(record.outcome for record in records) == {"completed": 60}
    assert not [record for record in records if cluster.oracle.wrong(record)]
    assert cluster.whole()


def replicas_share_the_requests_in_progress(cluster: Cluster) -> None:
    """Not the images that they have drawn: another program may take one's core, and then it rightly
    draws fewer.
    """

    async def least() -> float:
        at_work = asyncio.ensure_future(
            load(cluster, [Ask(seed=seed, n=4) for seed in range(2 * CLIENTS)], {})
        )
        seen = [0.0]
        while not at_work.done():
            running = await asyncio.to_thread(cluster.of_engines, "linpix_requests_running")
            seen.append(min(running) if len(running) == 2 else 0.0)
        assert Counter(record.outcome for record in await at_work) == {"completed": 2 * CLIENTS}
        return max(seen)

    # a busy machine looks seldom
    assert eventually(lambda: asyncio.run(least()) >= CLIENTS / 4)


def errors_are_those_of_one_service(cluster: Cluster) -> None:
    refused = generate(cluster.server, n=1000)
    assert refused.json()["error"]["param"] == "n"
    late = generate(cluster.server, n=16, timeout=0.001)
    assert late.status_code == 504, late.text


def a_client_that_leaves_frees_its_slots(cluster: Cluster) -> None:
    def cancelled() -> float:
        return sum(cluster.of_engines("linpix_images_completed_total", outcome="cancelled"))

    def noticed() -> bool:
        """A busy front may not have asked a replica yet; then the next client leaves."""
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(url, json={"n": 16, "seed": 1}, timeout=0.1)
        return cancelled() > before

    url, before = cluster.server.url + "/v1/images/generations", cancelled()
    assert eventually(noticed)
    assert eventually(lambda: cluster.total("linpix_state_slots_used") == 0)


def a_real_prometheus_finds_every_process(cluster: Cluster, folder: Path) -> None:
    with watching(cluster.server, folder, targets=cluster.targets) as prometheus:
        asyncio.run(load(cluster, cluster.asks(30), {}))

        def asked(query: str) -> list[dict]:
            return prometheus.ask("query", query=query.replace("$__rate_interval", WINDOW))

        assert eventually(lambda: len(asked("linpix_requests_running")) == 4)
        total = "linpix_requests_total"
        assert eventually(
            lambda: float(asked(f"sum({total})")[0]["value"][1]) == cluster.total(total) >= 30
        )
        for name, query in ASKED.items():
            asked(query)  # of several replicas, a match that takes one for many is an error
            assert name not in ALERTS or not asked(query), f"{name} fires"


def what_is_killed_is_replaced_and_every_request_is_answered(cluster: Cluster) -> None:
    events = {REQUESTS // 3: ("Engine", 0), 2 * REQUESTS // 3: ("Front", 0)}
    records = asyncio.run(load(cluster, cluster.asks(REQUESTS), events))
    assert not events and len(records) == REQUESTS
    assert not [record for record in records if cluster.oracle.wrong(record)]
    ends = Counter(record.outcome for record in records)
    assert ends["completed"] >= REQUESTS - 2 * CLIENTS, (
        "two were killed, and no other request ends by that"
    )
    for record in records:
        # a stream of which something had been sent says that it ends
        if record.outcome == "failed":
            assert record.code == "engine_gone" and record.ask.stream
        elif record.outcome != "completed":  # a dead front can say nothing: its connections end
            assert record.outcome == "lost" and record.broken
    assert ends["lost"] < CLIENTS, "the other front goes on"
    assert eventually(cluster.whole)


def weights_of(pid: int) -> set[str]:
    """Files of shared weights that a process has in its memory."""
    return {
        line.split(maxsplit=5)[5]
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if f"/{PREFIX}" in line
    }


def replicas_have_their_weights_in_common(cluster: Cluster) -> set[str]:
    def files() -> list[set[str]]:
        return [weights_of(pid) for pid in cluster.pids("Engine")]

    assert eventually(lambda: len(found := files()) == 2 and all(found)), (
        "a replica begins, and has its weights"
    )
    one, other = files()
    assert one == other and len(one) == 1 and all(Path(file).exists() for file in one)
    return one


def it_drains_and_leaves_nothing_behind(cluster: Cluster) -> None:
    server = cluster.server
    [weights] = replicas_have_their_weights_in_common(cluster)
    family = processes(server.process.pid)
    assert any("gcs_server" in command for command in family.values())

    async def last() -> Record:
        address = urlsplit(server.url)

        def ask() -> asyncio.Future[Record]:
            connection = Connection(str(address.hostname), int(address.port or 0))
            return asyncio.ensure_future(connection.ask(Ask(seed=3, n=16)))

        asked, busy = ask(), 0.0
        while not busy:
            await asyncio.sleep(0.05)
            busy = cluster.total("linpix_images_waiting") + cluster.total("linpix_state_slots_used")
            if not busy and asked.done():  # drawn before a replica told what it does
                asked = ask()
        server.process.send_signal(signal.SIGTERM)
        return await asked

    record = asyncio.run(last())
    assert record.outcome == "completed" and not cluster.oracle.wrong(record)
    assert server.process.wait(HANG_S) == 0
    assert eventually(lambda: not [pid for pid in family if Path(f"/proc/{pid}").exists()])
    assert not Path(weights).exists()


def no_process_comes_after_other_programs(cluster: Cluster) -> None:
    """Ray's own workers have a niceness of 15, with which they get 3 % of a core that another
    program wants.
    """
    own = os.getpriority(os.PRIO_PROCESS, cluster.server.process.pid)
    for deployment in ("Engine", "Front"):
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in cluster.pids(deployment)} == {own}


def test_two_fronts_and_two_replicas_serve_as_one_while_some_are_killed(cluster, tmp_path):
    # one test, since to start a cluster takes longer than all of this, and pytest-xdist may divide
    # several
    no_process_comes_after_other_programs(cluster)
    replicas_have_their_weights_in_common(cluster)
    every_image_is_that_of_the_plain_server(cluster)
    replicas_share_the_requests_in_progress(cluster)
    errors_are_those_of_one_service(cluster)
    a_client_that_leaves_frees_its_slots(cluster)
    if shutil.which("prometheus"):
        a_real_prometheus_finds_every_process(cluster, tmp_path)
    what_is_killed_is_replaced_and_every_request_is_answered(cluster)
    it_drains_and_leaves_nothing_behind(cluster)


def test_a_second_signal_ends_everything_at_once(tmp_path):
    checkpoint.save(
        tmp_path / "large", net_for(PRESETS["cifar10"]), {"data": "random weights"}, "# large\n"
    )
    server = Process(
        tmp_path,
        "--replicas 1 --fronts 1 --replica-threads 1 --drain-timeout 300",
        f"--metrics-targets {tmp_path}/targets",
        # which is for others: nothing listens there
        before=("env", "http_proxy=http://127.0.0.1:9"),
    )
    family = processes(server.process.pid)
    with ThreadPoolExecutor(1) as others:  # some minutes of work
        asked = others.submit(generate, server, n=16)
        cluster = Cluster(targets=tmp_path / "targets")
        assert eventually(lambda: cluster.total("linpix_state_slots_used") == 16)
        server.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: "SIGHUP: ignored" in "".join(server.printed)), "and it goes on"
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        assert server.process.poll() is None and not asked.done(), "the first one lets it finish"
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(HANG_S)
        assert isinstance(asked.exception(), httpx.HTTPError), "it was not finished"
    assert eventually(lambda: not [pid for pid in family if Path(f"/proc/{pid}").exists()])
    server.stop()


@pytest.mark.parametrize(
    ("program", "sent", "why"),
    [
        ("/raylet ", signal.SIGKILL, "raylet has died"),
        ("/gcs_server ", signal.SIGKILL, "gcs_server has died"),
        ("ServeController", signal.SIGSTOP, "Ray did not end in time"),
    ],
)
def test_it_ends_and_leaves_nothing_when_a_process_of_ray_fails(program, sent, why, tmp_path):
    saved(tmp_path / "small", net_of(PRESETS["mnist-small"], seed=os.getpid()))
    flags = "--replicas 1 --fronts 1 --replica-threads 1 --drain-timeout 1"
    with serving(tmp_path, flags) as server:
        family = processes(server.process.pid)
        [engine] = [pid for pid, command in family.items() if ":Engine" in command]
        weights = weights_of(engine)
        [failing] = [pid for pid, command in family.items() if program in command]
        os.kill(failing, sent)
        if sent == signal.SIGSTOP:
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(HANG_S) == LOST
    assert why in "".join(server.printed)
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]
    assert weights and not any(Path(file).exists() for file in weights)
