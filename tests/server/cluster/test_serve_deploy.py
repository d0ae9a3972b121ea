"""deploy/ray.yaml on a real cluster of `ray start --head` and `serve deploy`: replicas come and go
with the load.
"""

import asyncio
import contextlib
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from linpix.server.cluster.local import QUIET, STORE_BYTES, TRIES
from tests.server.cluster.test_local import Cluster, no_process_comes_after_other_programs
from tests.server.test_listening import free_port
from tests.soak.service import Oracle
from tools.harness.client import Ask, Connection, Record
from tools.harness.commands import ROOT, ran, words_of
from tools.harness.servers import HANG_S, eventually, fetch

pytest.importorskip("ray.serve", reason="the extra is not installed: pip install '.[ray]'")
pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
SLOTS, SEEDS = 2, 20
MANY, FEW = 3 * SLOTS, SLOTS  # clients with one image each: many need three replicas, few need one
# a tiny image takes 1.6 s, but next to nothing of the cores, which new replicas need
PACE = "slow:every=1:ms=25"


def config(port: int, checkpoints: Path, **settings: Any) -> dict[str, Any]:
    """deploy/ray.yaml with other settings, and with what is smaller and quicker here."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "deploy/ray.yaml").read_text())
    [app] = found["applications"]
    app["args"] |= {
        "host": "127.0.0.1",
        "port": port,
        "allowed_hosts": "",
        "checkpoints": str(checkpoints),
        "replica_threads": 1,
        "slots": SLOTS,
        "faults": PACE,
        **settings,
    }
    engine, front = app["deployments"]
    engine["autoscaling_config"] |= {
        "min_replicas": 1,
        "max_replicas": 2,
        "upscale_delay_s": 1,
        "downscale_delay_s": 1,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2,
    }
    front["num_replicas"] = 1
    return found


class Head(Cluster):
    """`ray start --head`, on ports and in a folder of its own."""

    def __init__(self, checkpoints: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="linpix-ray-"))  # sockets need a short path
        self.log = self.folder / "head.log"
        self.checkpoints, self.server, token = checkpoints, self, secrets.token_hex(32)
        self.targets = self.folder / "targets"
        self.token = {"authorization": f"Bearer {token}"}
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("LINPIX_")
        } | QUIET
        self.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}

    def start(self) -> None:
        for _ in range(TRIES):  # Ray gives itself 30 s, which a machine that is busy may need
            self._start()
            if self.comes_to(lambda: self.told() == {}):
                return
            self.kill()
        raise RuntimeError(self.log.read_text())

    def _start(self) -> None:
        self.port, api = free_port(), free_port()
        self.url, self.api = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{api}"
        ports = {
            "port": free_port(),
            "dashboard-port": api,
            "dashboard-agent-listen-port": free_port(),
            "ray-client-server-port": free_port(),
            "min-worker-port": 0,
            "max-worker-port": 0,  # 0: any that are free
        }
        command = [
            f"{BIN}/ray start --head --block --node-ip-address 127.0.0.1 --num-cpus 4",
            f"--temp-dir {self.folder} --object-store-memory {STORE_BYTES}",
            *(f"--{name} {port}" for name, port in ports.items()),
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words_of(command),
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self) -> None:
        """Ask it to end, and wait for it."""
        self.process.terminate()
        self.process.wait(HANG_S)

    def family(self) -> list[int]:
        """Its processes, which are a session of their own: those too whose parents have ended."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(ValueError, ProcessLookupError):
                if os.getsid(int(folder.name)) == self.process.pid:
                    found.append(int(folder.name))
        return found

    def kill(self) -> None:
        """End it, and what did not end with it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.end()
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(HANG_S)

    def deploy(self, **settings: Any) -> None:
        path = self.folder / "ray.yaml"
        settings["metrics_targets"] = str(self.targets)
        path.write_text(yaml.safe_dump(config(self.port, self.checkpoints, **settings)))
        ended = ran(f"{BIN}/serve deploy {path} --address {self.api}", env=self.environment)
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def shut_down(self) -> None:
        """As `serve shutdown` does, whose start takes longest."""
        fetch(
            f"{self.api}/api/serve/applications/", "DELETE", headers=self.token
        ).raise_for_status()

    def told(self) -> dict[str, Any]:
        """What Ray says of the applications."""
        answer = fetch(f"{self.api}/api/serve/applications/", headers=self.token)
        return dict(answer.raise_for_status().json()["applications"])

    def get(self, path: str) -> httpx.Response:
        return fetch(self.url + path).raise_for_status()

    def engines(self) -> Counter[str]:
        """How many replicas there are in each of Serve's states."""
        return Counter(
            replica["state"]
            for replica in self.told()["linpix"]["deployments"]["Engine"]["replicas"]
        )

    def comes_to(self, true: Callable[[], bool]) -> bool:
        """Whether something becomes true before Ray ends. It is not, as long as the cluster does
        not answer.
        """

        def asked() -> bool:
            try:
                return self.process.poll() is not None or true()
            except httpx.HTTPError:
                return False

        return eventually(asked) and self.process.poll() is None

    async def load(self, *phases: tuple[int, Callable[[], bool]]) -> list[Record]:
        """What becomes of the requests of clients that ask again and again.

        phases: how many clients there are until something is true; in each no more than in the one
                before.
        """
        seeds, wanted, records = itertools.count(), phases[0][0], list[Record]()

        async def client(number: int) -> None:
            connection = Connection("127.0.0.1", self.port)
            while number < wanted:
                seed = next(seeds)
                records.append(await connection.ask(Ask(seed=seed % SEEDS, stream=seed % 3 > 0)))
            connection.close()

        async with asyncio.TaskGroup() as group:
            for number in range(wanted):
                group.create_task(client(number))
            for clients, until in phases:
                wanted = clients
                if not (came := await asyncio.to_thread(self.comes_to, until)):
                    break
            wanted = 0
        assert came, self.told()
        return records


@pytest.fixture
def head(tiny: Path) -> Iterator[Head]:
    head = Head(tiny.parent)
    try:
        head.start()
        yield head
    finally:
        print(head.log.read_text())  # pytest shows it where the test failed
        head.kill()
        shutil.rmtree(head.folder, ignore_errors=True)


def test_serve_deploy_runs_the_file_and_its_replicas_come_and_go_with_the_load(head, tiny):
    # one test, since to start a cluster takes longer than all of this
    def wrong(records: list[Record]) -> list[Record]:
        return [
            record for record in records if record.outcome != "completed" or oracle.wrong(record)
        ]

    def both_draw() -> bool:
        return sum(map(bool, head.of_engines("linpix_state_slots_used"))) == 2

    head.deploy()
    assert head.comes_to(lambda: head.get("/readyz").is_success), head.told()
    oracle = Oracle(tiny, head.get("/v1/models").json()["data"][0])
    assert oracle.promised and head.engines() == {"RUNNING": 1}
    no_process_comes_after_other_programs(head)
    [pid] = head.pids("Engine")
    assert b"OMP_NUM_THREADS=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")

    # a stream of which something was sent cannot run again elsewhere: the removed replica itself
    # must finish it
    assert not wrong(
        asyncio.run(head.load((MANY, both_draw), (FEW, lambda: head.engines() == {"RUNNING": 1})))
    )

    head.deploy(slots=SLOTS + 1)
    assert head.comes_to(lambda: head.of_engines("linpix_state_slots") == [SLOTS + 1])

    assert len(head.family()) > 10
    head.shut_down()
    assert head.comes_to(lambda: head.told() == {})
    head.end()
    assert eventually(lambda: not head.family())
