"""A front with a real replica and a real desk, in one process without Ray: the same answers as a plain server."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.model.transformer import Transformer
from linpix.server.app import application, create_app
from linpix.server.cluster.desk import Desk
from linpix.server.cluster.front import FrontLedger
from linpix.server.cluster.messages import Answer, Order, ReplicaLost
from linpix.server.cluster.replica import Replica
from linpix.server.cluster.serving import FarComparisons, SharedKeys, front_server, models_of
from linpix.server.compare.backends import BACKENDS
from linpix.server.metrics import Metrics
from linpix.server.serve import LINGER_S
from linpix.server.settings import Settings
from linpix.server.web.middleware.bodies import BodyDrain
from linpix.server.web.service import Service
from tests.server.test_listening import free_port
from tests.server.web.routes.test_images import encode

PICTURE = encode(np.random.default_rng(0).integers(0, 255, (8, 8), dtype=np.uint8))
LARGE = encode(np.random.default_rng(0).integers(0, 255, (500, 500), dtype=np.uint8))  # room is kept while it is read
VOLATILE = {"created"}


class Near:
    """A Fleet without Ray: one replica, reached by calls, which may be lost after so many of its answers."""

    def __init__(self, replica: Replica, front: str, desk: Desk) -> None:
        self.replica, self.desk, self.front = replica, desk, front
        self.lost_after: list[int] = []  # answers of the next orders, after which their replica is lost
        self.orders: list[Order] = []
        self.replicas, self.asked, self.told = 1, 0, {}

    @property
    def room(self) -> int:
        return self.replica.load().room if self.replicas else 0

    async def draw(self, order: Order) -> list[Answer]:
        return [answer async for answers in self.stream(order) for answer in answers]

    async def stream(self, order: Order) -> AsyncIterator[list[Answer]]:
        while not self.replicas:
            await asyncio.sleep(0.01)
        self.orders.append(order)
        order = pickle.loads(pickle.dumps(order))  # as between processes
        lost, passed = self.lost_after.pop(0) if self.lost_after else None, 0
        async with contextlib.aclosing(self.replica.stream(order)) as answers:
            async for some in answers:
                for answer in pickle.loads(pickle.dumps(some)) or [None]:
                    if passed == lost:
                        raise ReplicaLost("a replica was lost (test)")
                    yield [] if answer is None else [answer]
                    passed += answer is not None

    async def compare(self, what: str, *about: Any) -> Any:
        found = await self.replica.compare(what, *about)
        if isinstance(found, Exception):
            raise found
        return found

    def elsewhere(self, client: str) -> int:
        return self.told.get(client, 0)

    async def enter(self, client: str, here: int, images: int, limit: int) -> int | None:
        self.asked += 1
        return await self.desk.enter(self.front, client, here, images, limit)

    async def take(self, key: str, rate: str) -> float:
        return await self.desk.take(key, rate)

    async def beat(self, *told: Any) -> bool:
        return False

    async def collected(self) -> dict:
        return {"engine-1": self.replica.snapshot()}


class Fronts:
    """Two fronts of one replica and one desk, and a client of each."""

    def __init__(self, settings: Settings) -> None:
        desk, replica = Desk(), Replica(settings)
        self.fleets = [Near(replica, name, desk) for name in ("front-1", "front-2")]
        _, kernel, told = self.fleets[0].replica.describe()
        self.ledgers = [FrontLedger(fleet.front, models_of(told, settings, fleet),
                                    Metrics([("tiny", "linear")], BACKENDS, "1", kernel), fleet, settings)
                        for fleet in self.fleets]
        self.clients = []
        for fleet, ledger in zip(self.fleets, self.ledgers, strict=True):
            keys = SharedKeys(settings, fleet) if settings.api_keys else None
            app = application(Service(settings, ledger, FarComparisons(fleet), None, BodyDrain(), keys))
            self.clients.append(httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost",
                                                  timeout=30))


@contextlib.asynccontextmanager
async def fronts(tiny: Path, **flags: Any) -> AsyncIterator[Fronts]:
    both = Fronts(Settings(checkpoints=tiny.parent, **flags))
    try:
        yield both
    finally:
        for client in both.clients:
            await client.aclose()
        await both.fleets[0].replica.stop()
        assert not any(ledger.tickets or ledger._entered or ledger._orders for ledger in both.ledgers)


def facts(answer: httpx.Response) -> Any:
    return answer.status_code, {name: value for name, value in answer.json().items() if name not in VOLATILE}


def events(text: str) -> list[dict]:
    return [{name: value for name, value in json.loads(line.removeprefix("data: ")).items() if name not in VOLATILE}
            for line in text.splitlines() if line.startswith("data: ")]


JSON = [{"seed": 3, "n": 3}, {"seed": 3, "label": 4, "temperature": 0.5, "size": "16x16"}, {"n": 99},
        {"model": "none"}, {"seed": 1, "timeout": 1e-9}]
FORMS = [{"keep_rows": 4, "seed": 5}, {"keep_rows": 4, "seed": 5, "n": 2}, {"keep_rows": 2, "candidates": 4},
         {"keep_rows": 9}]


def test_answers_and_errors_are_those_of_the_plain_server(tiny):
    with TestClient(create_app(Settings(checkpoints=tiny.parent)), base_url="http://localhost") as plain:

        async def same() -> None:
            async with fronts(tiny) as both:
                client = both.clients[0]
                for body in JSON:
                    assert facts(await client.post("/v1/images/generations", json=body)) \
                        == facts(plain.post("/v1/images/generations", json=body)), body
                    streamed = body | {"stream": True}
                    assert events((await client.post("/v1/images/generations", json=streamed)).text) \
                        == events(plain.post("/v1/images/generations", json=streamed).text), body
                for route in ("edits", "likelihoods"):
                    for form in FORMS:
                        ask = {"url": f"/v1/images/{route}", "data": form, "files": {"image": PICTURE}}
                        assert facts(await client.post(**ask)) == facts(plain.post(**ask)), (route, form)
                    ask["files"] = {"image": LARGE}
                    assert facts(await client.post(**ask)) == facts(plain.post(**ask)), (route, "large")
                assert (await client.get("/v1/models")).json() == plain.get("/v1/models").json()
                assert (await client.get("/readyz")).status_code == 200

        asyncio.run(same())


@pytest.fixture
def class_first(tmp_path: Path) -> Path:
    """A checkpoint folder, also named tiny, that draws the class first and makes three attempts."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Transformer(dataclasses.replace(PRESETS["tiny"], patch=4,
                                              look_ups=("previous", "row", "column", "class")))
        for parameter in net.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    checkpoint.save(tmp_path / "tiny", net, {"attempts": 3}, "#")
    return tmp_path / "tiny"


def test_images_that_are_drawn_again_are_those_of_the_plain_server_and_admitted_as_such(class_first, monkeypatch):
    settings = Settings(checkpoints=class_first.parent)
    bodies = [{"seed": 3, "n": 3}, {"seed": 3, "label": 4, "attempts": 5}, {"seed": 3, "attempts": 1},
              {"seed": 3, "candidates": 4}, {"seed": 3, "attempts": 2, "candidates": 4}]
    admitted = []
    with TestClient(create_app(settings), base_url="http://localhost") as plain:

        async def same() -> None:
            async with fronts(class_first) as both:
                client, ledger = both.clients[0], both.fleets[0].replica._core.ledger
                admit = ledger.admit
                monkeypatch.setattr(ledger, "admit", lambda ticket, *given, **named: (
                    admit(ticket, *given, **named), admitted.append(ticket.demand.attempts)))
                for body in bodies:
                    answer = await client.post("/v1/images/generations", json=body)
                    assert facts(answer) == facts(plain.post("/v1/images/generations", json=body)), body
                    streamed = body | {"stream": True}
                    assert events((await client.post("/v1/images/generations", json=streamed)).text) \
                        == events(plain.post("/v1/images/generations", json=streamed).text), body
                    form = {"url": "/v1/images/edits", "data": {"keep_rows": 4} | body, "files": {"image": PICTURE}}
                    assert facts(await client.post(**form)) == facts(plain.post(**form)), body
                assert [order.specs[0].attempts for order in both.fleets[0].orders] == admitted
                assert (await client.get("/v1/models")).json() == plain.get("/v1/models").json()

        asyncio.run(same())
    assert admitted == [3] * 3 + [5] * 3 + [0] * 3 + [1] * 3, "the last is refused by the front"


def test_an_order_whose_replica_dies_has_the_same_attempts_when_it_runs_again(class_first):
    async def again() -> None:
        async with fronts(class_first) as both:
            [fleet, _], [client, _] = both.fleets, both.clients
            whole = facts(await client.post("/v1/images/generations", json={"seed": 7, "n": 2}))
            fleet.lost_after = [1]
            assert facts(await client.post("/v1/images/generations", json={"seed": 7, "n": 2})) == whole
            assert [image["attempts"] for image in whole[1]["data"]] == [3, 3] and len(fleet.orders) == 3

    asyncio.run(again())


def test_a_request_whose_replica_dies_runs_again_and_has_the_same_image(tiny):
    async def again() -> None:
        async with fronts(tiny) as both:
            [fleet, _], [client, _] = both.fleets, both.clients
            for body in ({"seed": 7, "n": 2}, {"seed": 7, "stream": True}):
                whole = await client.post("/v1/images/generations", json=body)
                fleet.lost_after = [0]  # admitted, and nothing sent
                assert events(whole.text) == events((await client.post("/v1/images/generations", json=body)).text)
            fleet.lost_after = [1]  # one of two images, of an answer in one piece: nothing was sent either
            answer = await client.post("/v1/images/generations", json={"seed": 7, "n": 2})
            assert [image["seed"] for image in answer.json()["data"]] == [7, 8]
            fleet.lost_after = [0, 0]
            answer = await client.post("/v1/images/generations", json={"seed": 7})
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_gone"
            assert answer.headers["retry-after"]

    asyncio.run(again())


def test_a_replica_with_other_weights_draws_nothing(tiny, class_first):
    async def refused() -> None:
        async with fronts(tiny) as both:
            [fleet, _], [client, _] = both.fleets, both.clients
            own, fleet.replica = fleet.replica, Replica(Settings(checkpoints=class_first.parent))
            try:
                assert fleet.replica.load().facts != own.load().facts
                for body in ({"seed": 7}, {"seed": 7, "stream": True}):
                    answer = await client.post("/v1/images/generations", json=body)
                    assert answer.status_code == 503 and "other weights" in answer.json()["error"]["message"]
                    assert answer.headers["retry-after"]
            finally:
                await fleet.replica.stop()
                fleet.replica = own

    asyncio.run(refused())


def test_a_front_waits_for_a_replica_with_its_settings_and_weights(tiny, class_first):
    async def waits() -> None:
        async with fronts(tiny) as both:
            [fleet, _], settings = both.fleets, Settings(checkpoints=class_first.parent, port=0)
            new = Replica(settings)
            described = [fleet.replica.describe(), fleet.replica.describe(), new.describe()]

            async def describe() -> Any:
                return described.pop(0) if len(described) > 1 else described[0]

            server = await front_server(settings, "front-3", describe, fleet, 0.01, patience_s=60)
            await new.stop()
            for listening in server._listening:
                listening.close()
            assert len(described) == 1
            described = [(settings, *fleet.replica.describe()[1:])]
            with pytest.raises(checkpoint.CheckpointError, match="another checkpoint"):
                await front_server(settings, "front-3", describe, fleet, 0.01, patience_s=0.05)
            described = [fleet.replica.describe()]
            settings = settings.model_copy(update={"checkpoints": tiny.parent, "slots": 3})
            with pytest.raises(LookupError, match="the settings of this front"):
                await front_server(settings, "front-3", describe, fleet, 0.01, patience_s=0.05)

    asyncio.run(waits())


def test_a_front_that_is_replaced_leaves_its_port_to_the_others_and_finishes_what_it_has_begun(tiny):
    async def replaced() -> None:
        async with fronts(tiny, port=free_port(), faults="slow:every=1:ms=25", client_images=0) as both:
            described = both.fleets[0].replica.describe()

            async def describe() -> Any:
                return described

            servers = [await front_server(described[0], fleet.front, describe, fleet, 0.05, patience_s=1)
                       for fleet in both.fleets]
            serving = [asyncio.ensure_future(server.serve(server._listening)) for server in servers]
            url = f"http://127.0.0.1:{described[0].port}"

            async def ask(method: str, path: str) -> int:
                async with httpx.AsyncClient(timeout=30) as client:  # a connection of its own
                    return (await client.request(method, url + path, json={"n": 2})).status_code

            while not all(server.started for server in servers):
                await asyncio.sleep(0.01)
            asked = [asyncio.ensure_future(ask("POST", "/v1/images/generations")) for _ in range(16)]
            while not all(server._front.tickets for server in servers):
                await asyncio.sleep(0.01)
            servers[0].drain(others=True)
            await asyncio.sleep(2 * LINGER_S)
            assert not serving[0].done() and servers[0]._front.tickets
            assert {await ask("GET", "/readyz") for _ in range(16)} == {200}, "half would be refused"
            assert await asyncio.gather(*asked) == [200] * len(asked)
            await serving[0]
            servers[1].drain()
            await serving[1]

    asyncio.run(replaced())


def test_a_stream_of_which_something_was_sent_ends_with_an_error(tiny):
    async def ends() -> None:
        async with fronts(tiny) as both:
            both.fleets[0].lost_after = [3]
            sent = events((await both.clients[0].post("/v1/images/generations", json={"seed": 7, "stream": True})).text)
            assert [event.get("type") for event in sent] == ["image_generation.partial_image"] * 3 + [None]
            assert sent[-1]["error"]["code"] == "engine_gone"
            assert len(both.fleets[0].orders) == 1
            values = both.ledgers[0].metrics.values("linpix_requests_total")
            assert values["linpix_requests_total", "generations", "failed"] == 1

    asyncio.run(ends())


def test_limits_of_clients_and_keys_hold_over_all_fronts(tiny, tmp_path):
    keys = tmp_path / "keys"
    keys.touch(0o600)
    key = "lpx_" + "a" * 43
    keys.write_text(f"alice sha256:{hashlib.sha256(key.encode()).hexdigest()} rate=4/h\n")

    async def held() -> None:
        async with fronts(tiny, api_keys=keys, client_images=4) as both:
            headers = {"authorization": f"Bearer {key}"}

            async def ask(front: int, n: int) -> httpx.Response:
                return await both.clients[front].post("/v1/images/generations", json={"n": n}, headers=headers)

            three, two = await asyncio.gather(ask(0, 3), ask(1, 2))
            assert {three.status_code, two.status_code} == {200, 429}
            refused = (three if three.status_code == 429 else two)
            assert refused.json()["error"]["code"] == "client_limit" and refused.headers["retry-after"]
            codes = [(await ask(front, 1)).status_code for front in (0, 1, 0, 1)]
            assert codes.count(200) + 1 <= 3 and codes[-1] == 429, "four requests an hour, at both together"

    asyncio.run(held())


def test_the_desk_is_asked_where_a_client_comes_near_its_limit(tiny):
    async def asks() -> None:
        async with fronts(tiny, client_images=16) as both:
            [fleet, _], [client, _] = both.fleets, both.clients

            async def ask(n: int) -> int:
                assert (await client.post("/v1/images/generations", json={"n": n})).status_code == 200
                return fleet.asked

            assert (await ask(4), await ask(5)) == (0, 1)
            [fleet.told] = [{"127.0.0.1": 3}]
            assert (await ask(1), await ask(2)) == (1, 2)

    asyncio.run(asks())


def test_without_a_replica_it_is_not_ready_and_requests_wait_until_their_deadline(tiny):
    async def waits() -> None:
        async with fronts(tiny, max_queue=2) as both:
            [fleet, _], [client, _] = both.fleets, both.clients
            fleet.replicas = 0
            assert (await client.get("/readyz")).status_code == 503
            late = await client.post("/v1/images/generations", json={"timeout": 0.2})
            assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_passed"
            late = await client.post("/v1/images/generations", json={"timeout": 0.2, "stream": True})
            assert late.status_code == 504
            form = {"data": {"keep_rows": 4, "timeout": 0.2}, "files": {"image": PICTURE}}
            late = await client.post("/v1/images/edits", **form)
            assert late.status_code == 504, "pictures wait as others do"
            values = both.ledgers[0].metrics.values("linpix_requests_total", "linpix_deadlines_passed_total")
            assert values["linpix_requests_total", "generations", "failed"] == 2, "no replica has counted them"
            assert values["linpix_requests_total", "edits", "failed"] == 1
            assert values["linpix_deadlines_passed_total", "waiting"] == 3
            waiting = asyncio.ensure_future(client.post("/v1/images/generations", json={"seed": 1}))
            await asyncio.sleep(0.1)
            [value] = both.ledgers[0].metrics.values("linpix_requests_waiting").values()
            assert value == 1 and not waiting.done()
            full = await client.post("/v1/images/generations", json={"n": 2})
            assert full.status_code == 429 and full.json()["error"]["code"] == "queue_full", "it waits for nothing yet"
            fleet.replicas = 1
            assert (await waiting).status_code == 200
            both.ledgers[0].draining = True
            assert (await client.post("/v1/images/generations", json={})).json()["error"]["code"] == "draining"

    asyncio.run(waits())


def test_a_client_that_leaves_ends_its_order(tiny):
    async def leaves() -> None:
        async with fronts(tiny, faults="slow:every=1:ms=20") as both:
            asked = asyncio.ensure_future(both.clients[0].post("/v1/images/generations", json={"n": 16}))
            while not both.fleets[0].replica.load().ahead:
                await asyncio.sleep(0.005)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await asyncio.sleep(0.1)
            assert not both.fleets[0].replica.load().ahead

    asyncio.run(leaves())


def test_a_client_that_leaves_a_stream_that_no_replica_has_admitted_holds_no_images(tiny):
    async def leaves() -> None:
        async with fronts(tiny) as both:
            both.fleets[0].replicas = 0
            body = json.dumps({"stream": True, "n": 4, "timeout": 30}).encode()
            scope = {"type": "http", "method": "POST", "path": "/v1/images/generations", "scheme": "http",
                     "query_string": b"", "http_version": "1.1", "server": ("localhost", 80), "client": ("::1", 1),
                     "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"),
                                 (b"content-length", str(len(body)).encode())]}
            left, sent, messages = asyncio.Event(), [], [{"type": "http.request", "body": body}]

            async def receive() -> dict:
                if not messages:
                    await left.wait()
                return messages.pop(0) if messages else {"type": "http.disconnect"}

            async def send(message: dict) -> None:
                sent.append(message)

            asked = asyncio.ensure_future(both.clients[0]._transport.app(scope, receive, send))
            while not both.ledgers[0]._entered:
                await asyncio.sleep(0.005)
            assert both.ledgers[0]._entered.total() == 4
            left.set()
            await asyncio.wait_for(asked, 5)
            assert not both.ledgers[0]._entered and not both.ledgers[0]._orders
            assert sent[0]["status"] == 499
            values = both.ledgers[0].metrics.values("linpix_requests_total")
            assert values["linpix_requests_total", "generations", "cancelled"] == 1, "no replica has counted it"

    asyncio.run(leaves())


def test_one_comparison_runs_at_a_time_whichever_front_is_asked(tiny):
    async def compares() -> None:
        async with fronts(tiny) as both:
            first, second = both.clients
            begun = await first.post("/v1/compare", json={"budget": 60, "batch": [1], "backends": ["linear"]})
            id = begun.json()["id"]
            assert (await second.post("/v1/compare", json={"budget": 1, "batch": [1]})).status_code == 409
            assert (await second.get(f"/v1/compare/{id}")).json()["id"] == id
            assert (await second.get("/v1/compare/cmp-9")).status_code == 404
            assert (await second.delete(f"/v1/compare/{id}")).json()["status"] == "cancelled"
            assert (await first.get("/v1/status")).json()["comparison"]["status"] == "cancelled"

    asyncio.run(compares())


