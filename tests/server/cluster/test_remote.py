"""A front with a real replica, in one process without Ray: the same answers as a plain server."""

import asyncio
import contextlib
import json
import pickle
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from linpix.model import provenance
from linpix.server.app import application, create_app
from linpix.server.cluster.front import front_server, models_of
from linpix.server.cluster.remote import RUNS, Call, News, Remote, ReplicaLost
from linpix.server.cluster.replica import Replica
from linpix.server.compare.backends import ATTENTION
from linpix.server.engine.request import Requests
from linpix.server.errors import draining
from linpix.server.metrics import Metrics
from linpix.server.serve import LINGER_S
from linpix.server.settings import Settings
from linpix.server.web.middleware.bodies import Bodies
from linpix.server.web.service import Service
from tests.fuzz.pictures import noise
from tests.server.test_listening import free_port
from tests.server.web.routes.test_images import encode, generate, message_of, refusal
from tools.harness.servers import HANG_S

PICTURE = encode(noise(8, 8))
# room is kept while it is read
LARGE = encode(noise(500, 500))
VOLATILE = {"created", "created_at"}


class Near:
    """One replica, reached by calls, which may be lost after so many of its events."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        # events of the next calls, after which their replica is lost
        self.lost_after: list[int] = []
        self.calls: list[Call] = []
        self.there = True
        self.events = 0  # that the front has taken

    async def run(self, call: Call) -> AsyncIterator[News]:
        while not self.there:
            await asyncio.sleep(0.01)
        self.calls.append(call)
        call = pickle.loads(pickle.dumps(call))  # as between processes
        lost, passed = self.lost_after.pop(0) if self.lost_after else None, 0
        async with contextlib.aclosing(self.replica.run(call)) as answers:
            async for news in answers:
                news = pickle.loads(pickle.dumps(news))
                for some in [[event] for event in news] if call.job.stream else [news]:
                    if passed == lost and some != [None]:
                        raise ReplicaLost("a replica was lost (test)")
                    yield some
                    passed += some != [None]
                    self.events += some != [None]


class Front:
    """A front of a replica, and its client."""

    def __init__(self, settings: Settings) -> None:
        self.near = Near(Replica(settings))
        _, kernel, described = self.near.replica.description
        metrics = Metrics(ATTENTION, kernel)
        self.remote = Remote(models_of(described, settings), metrics, self.near.run)
        self.requests = Requests(self.remote, metrics)
        app = application(
            Service(settings, self.requests, None, None, Bodies(settings, self.requests))
        )
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=HANG_S
        )

    @property
    def busy(self) -> bool:
        return bool(self.near.replica.requests.in_progress)


@contextlib.asynccontextmanager
async def fronted(tiny: Path, **flags: Any) -> AsyncIterator[Front]:
    front = Front(Settings(checkpoints=tiny.parent, **flags))
    try:
        yield front
    finally:
        await front.client.aclose()
        await front.near.replica.stop()
        assert not (front.requests.in_progress or front.remote._calls)


def facts(answer: httpx.Response) -> Any:
    return answer.status_code, {
        name: value for name, value in answer.json().items() if name not in VOLATILE
    }


def events(text: str) -> list[dict]:
    """Those of one image after the other: where quanta end decides how they are mixed."""
    found = []
    for line in text.splitlines():
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            found.append({name: event[name] for name in event.keys() - VOLATILE})
    return sorted(found, key=lambda event: event.get("image_index", len(found)))


JSON = [
    {"seed": 3, "n": 3},
    {"seed": 3, "label": 4, "temperature": 0.5, "size": "16x16"},
    {"n": 99},
    {"model": "none"},
    {"seed": 1, "timeout": 1e-9},
]
FORMS = [
    {"keep_rows": 4, "seed": 5},
    {"keep_rows": 4, "seed": 5, "n": 2},
    {"keep_rows": 2, "candidates": 4},
    {"keep_rows": 9},
]


async def assert_same(
    front: Front, settings: Settings, bodies: list[dict], forms: list[dict]
) -> None:
    """What a front answers is what the plain server does. forms: arguments of `post`."""
    client, app = front.client, create_app(settings)
    with TestClient(app, base_url="http://localhost") as plain:
        for body in bodies:
            assert facts(await generate(client, **body)) == facts(generate(plain, **body)), body
            streamed = body | {"stream": True}
            found = events((await generate(client, **streamed)).text)
            assert found == events(generate(plain, **streamed).text), body
        for form in forms:
            assert facts(await client.post(**form)) == facts(plain.post(**form)), form["data"]
        assert (await client.get("/v1/models")).json() == plain.get("/v1/models").json()
        assert (await client.get("/readyz")).status_code == 200


def form(route: str, image: bytes = PICTURE, **data: Any) -> dict:
    return {"url": f"/v1/images/{route}", "data": data, "files": {"image": image}}


async def test_answers_and_errors_are_those_of_the_plain_server(tiny):
    asked = []
    for route in ("edits", "likelihoods"):
        asked += [form(route, **data) for data in FORMS]
        asked.append(form(route, LARGE, **FORMS[-1]))
    async with fronted(tiny) as front:
        await assert_same(front, Settings(checkpoints=tiny.parent), JSON, asked)


@pytest.fixture
def namesake(thrice: Path, tmp_path: Path) -> Path:
    """Of other weights, but also named tiny."""
    return shutil.copytree(thrice, tmp_path / "tiny")


async def test_images_that_are_drawn_again_are_those_of_the_plain_server(namesake):
    bodies = [
        {"seed": 3, "n": 3},
        {"seed": 3, "label": 4, "attempts": 5},
        {"seed": 3, "attempts": 1},
        {"seed": 3, "candidates": 4},
        {"seed": 3, "attempts": 2, "candidates": 4},
    ]
    asked = [form("edits", keep_rows=4, **body) for body in bodies]
    async with fronted(namesake) as front:
        await assert_same(front, Settings(checkpoints=namesake.parent), bodies, asked)
        called = [call.job.attempts for call in front.near.calls]
    assert called == [3, 3, 5, 5, 1, 1, 1, 1, 3, 5, 1, 1], "the last is refused by the front"


async def test_a_request_whose_replica_dies_runs_again_and_has_the_same_image(tiny):
    async with fronted(tiny) as front:
        near, client = front.near, front.client
        for body in ({"seed": 7, "n": 2}, {"seed": 7, "stream": True}):
            whole = await generate(client, **body)
            near.lost_after = [0]  # admitted, and nothing sent
            assert events(whole.text) == events((await generate(client, **body)).text)
        near.lost_after = [0, 0]
        answer = await generate(client, seed=7)
        assert refusal(answer) == (503, "engine_gone")
        assert answer.headers["retry-after"]


async def test_a_replica_with_other_weights_draws_nothing(tiny, namesake):
    async with fronted(tiny) as front:
        near, client = front.near, front.client
        own, near.replica = near.replica, Replica(Settings(checkpoints=namesake.parent))
        try:
            for body in ({"seed": 7}, {"seed": 7, "stream": True}):
                answer = await generate(client, **body)
                assert answer.status_code == 503 and "weights or precisions" in message_of(answer)
                assert answer.headers["retry-after"]
            counted = near.replica.requests.metrics.values("linpix_requests_total")
            assert counted["linpix_requests_total", "generations", "failed"] == 2 * RUNS
        finally:
            await near.replica.stop()
            near.replica = own


async def test_a_front_waits_for_a_replica_with_its_settings_and_weights(tiny, namesake):
    async with fronted(tiny) as front:
        near, settings = front.near, Settings(checkpoints=namesake.parent, port=0)
        new = Replica(settings)
        described = [near.replica.description, near.replica.description, new.description]

        async def describe() -> Any:
            return described.pop(0) if len(described) > 1 else described[0]

        server = await front_server(settings, describe, near.run, patience_s=60)
        await new.stop()
        for listening in server._listening:
            listening.close()
        assert len(described) == 1
        described = [(settings, *near.replica.description[1:])]
        with pytest.raises(provenance.CheckpointError, match="another checkpoint"):
            await front_server(settings, describe, near.run, patience_s=0.05)
        described = [near.replica.description]
        settings = settings.model_copy(update={"checkpoints": tiny.parent, "slots": 3})
        with pytest.raises(LookupError, match="the settings of this front"):
            await front_server(settings, describe, near.run, patience_s=0.05)


async def test_a_replaced_front_leaves_its_port_to_the_others_and_finishes_its_requests(
    tiny,
):
    async with fronted(
        tiny, port=free_port(), faults="slow:every=1:ms=100", client_images=0
    ) as front:
        described = front.near.replica.description

        async def describe() -> Any:
            return described

        servers = [
            await front_server(described[0], describe, front.near.run, patience_s=1)
            for _ in range(2)
        ]
        serving = [asyncio.ensure_future(server.serve_shared()) for server in servers]
        url = f"http://127.0.0.1:{described[0].port}"

        async def ask(method: str, path: str) -> int:
            async with httpx.AsyncClient(timeout=HANG_S) as client:  # a connection of its own
                return (await client.request(method, url + path, json={"n": 2})).status_code

        while not all(server.started for server in servers):
            await asyncio.sleep(0.01)
        asked = [asyncio.ensure_future(ask("POST", "/v1/images/generations")) for _ in range(16)]
        while not all(server._requests.in_progress for server in servers):
            await asyncio.sleep(0.01)
        servers[0].drain()
        await asyncio.sleep(2 * LINGER_S)
        assert not serving[0].done() and servers[0]._requests.in_progress
        assert {await ask("GET", "/readyz") for _ in range(16)} == {200}, "half would be refused"
        assert await asyncio.gather(*asked) == [200] * len(asked)
        await serving[0]
        servers[1].drain()
        await serving[1]


async def test_each_process_says_where_its_metrics_are(tiny, tmp_path):
    (tmp_path / "engine-999999999.json").write_text("[]")  # of a process that was killed
    settings = Settings(checkpoints=tiny.parent, metrics_targets=tmp_path)
    replica = Replica(settings)
    await replica.begin()
    [file] = tmp_path.glob("*.json")
    [found] = json.loads(file.read_text())
    assert found["labels"] == {"replica": file.stem} and file.stem.startswith("engine-")
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://{found['targets'][0]}/metrics")
    assert 'linpix_state_slots{model="tiny"}' in answer.text
    await replica.stop()
    assert not [*tmp_path.iterdir()]


async def test_a_stream_of_which_something_was_sent_ends_with_an_error(tiny):
    async with fronted(tiny) as front:
        front.near.lost_after = [3]
        sent = events((await generate(front.client, seed=7, stream=True)).text)
        assert [event.get("type") for event in sent] == ["image_generation.partial_image"] * 3 + [
            None
        ]
        assert sent[-1]["error"]["code"] == "engine_gone"
        assert len(front.near.calls) == 1
        values = front.requests.metrics.values("linpix_requests_total")
        assert values["linpix_requests_total", "generations", "failed"] == 1


async def test_a_stream_that_a_draining_replica_ends_is_counted_once(tiny):
    async with fronted(tiny, faults="slow:every=1:ms=20") as front:
        asked = asyncio.ensure_future(generate(front.client, n=2, stream=True))
        requests = front.near.replica.requests
        while not front.near.events:
            await asyncio.sleep(0.01)
        requests.fail_all(draining())
        assert (
            events((await asked).text)[-1]["error"]["code"] == "draining"
            and len(front.near.calls) == 1
        )
        assert (
            sum(
                each.metrics.values("linpix_requests_total")[
                    "linpix_requests_total", "generations", "failed"
                ]
                for each in (front.requests, requests)
            )
            == 1
        )


async def test_without_a_replica_requests_wait_until_their_deadline(tiny):
    async with fronted(tiny) as front:
        near, client = front.near, front.client
        near.there = False
        for body in ({"timeout": 0.2}, {"timeout": 0.2, "stream": True}):
            late = await generate(client, **body)
            assert refusal(late) == (504, "deadline_passed")
        values = front.requests.metrics.values(
            "linpix_requests_total", "linpix_deadlines_passed_total"
        )
        assert values["linpix_requests_total", "generations", "failed"] == 2, (
            "no replica has counted them"
        )
        assert values["linpix_deadlines_passed_total", "waiting"] == 2
        waiting = asyncio.ensure_future(generate(client, seed=1))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        near.there = True
        assert (await waiting).status_code == 200
        front.requests.draining = True
        assert (await generate(client)).json()["error"]["code"] == "draining"


async def test_a_client_that_leaves_a_stream_that_no_replica_has_admitted_holds_nothing(tiny):
    async with fronted(tiny) as front:
        front.near.there = False
        body = json.dumps({"stream": True, "n": 4, "timeout": 30}).encode()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/images/generations",
            "scheme": "http",
            "query_string": b"",
            "http_version": "1.1",
            "server": ("localhost", 80),
            "client": ("::1", 1),
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
        }
        left, sent, messages = asyncio.Event(), [], [{"type": "http.request", "body": body}]

        async def receive() -> dict:
            if not messages:
                await left.wait()
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)

        asked = asyncio.ensure_future(front.client._transport.app(scope, receive, send))
        while not front.requests.in_progress:
            await asyncio.sleep(0.005)
        left.set()
        await asked
        assert not front.requests.in_progress and not front.remote._calls
        assert sent[0]["status"] == 499


async def test_a_full_replica_refuses_a_large_upload_as_the_plain_server_does(
    tiny,
):
    async with fronted(tiny, faults="slow:every=1:ms=500", slots=1, max_queue=0) as front:
        client, requests = front.client, front.near.replica.requests
        running = asyncio.ensure_future(generate(client, seed=1))
        while not front.busy:
            await asyncio.sleep(0.01)
        for route, more in (("edits", {}), ("edits", {"stream": "true"}), ("likelihoods", {})):
            answer = await client.post(
                f"/v1/images/{route}", data={"keep_rows": 4} | more, files={"image": LARGE}
            )
            assert refusal(answer) == (429, "queue_full"), (
                route,
                more,
            )
            assert int(answer.headers["retry-after"]) >= 1
        assert len(front.requests.in_progress) == len(requests.in_progress) == 1, (
            "only the image that is drawn"
        )
        assert len(front.near.calls) == 4, "each was asked of one replica, once"
        for each, times in ((front.requests.metrics, 0), (requests.metrics, 3)):
            assert (
                each.values("linpix_requests_rejected_total").get(
                    ("linpix_requests_rejected_total", "queue_full"), 0
                )
                == times
            )
            assert (
                each.values("linpix_request_bodies_reading")["linpix_request_bodies_reading",] == 0
            )
        running.cancel()
        await asyncio.wait([running])


async def test_comparisons_are_refused_with_what_to_do(tiny):
    async with fronted(tiny) as front:
        for answer in (
            await front.client.post("/v1/compare", json={"budget": 1, "batch": [1]}),
            await front.client.get("/v1/compare/cmp-1"),
        ):
            assert answer.status_code == 404 and "without --replicas" in message_of(answer)
        assert (await front.client.get("/v1/status")).json()["comparison"] is None
