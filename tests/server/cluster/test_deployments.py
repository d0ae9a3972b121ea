"""What fronts ask of Ray Serve's routers and handles, with stand-ins for both."""

import asyncio
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from linpix.server.cluster.messages import Order
from linpix.server.engine.ledger.ticket import Demand
from linpix.server.errors import EngineGone

pytest.importorskip("ray.serve", reason="the extra is not installed: pip install '.[ray]'")

from linpix.server.cluster import deployments, router


def test_an_answered_order_leaves_no_backlog():
    """Of an answer in one piece, Ray reports the end before it reports that the request has arrived."""
    order = Order(id="1", endpoint="generations", client="", model="tiny", facts={}, demand=Demand(1), work=5.0,
                  timeout_s=60.0, spent_s=0.0)
    request = SimpleNamespace(args=[order], metadata=SimpleNamespace(internal_request_id="1"),
                              routing_context=SimpleNamespace(should_backoff=False))
    replica = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"))
    chooser = router.DoneFirst.__new__(router.DoneFirst)
    chooser.initialize_state()
    assert asyncio.run(chooser.choose_replicas([replica], request)) == [[replica]]
    assert list(chooser._backlogs._open["a"]) == ["1"]
    chooser.on_request_completed(replica.replica_id, "1")
    chooser.on_request_routed(request, replica.replica_id, None)
    assert not any(chooser._backlogs._open.values())


def test_without_a_replica_nobody_waits_for_comparisons():
    async def ask() -> None:
        handles = deployments.Handles("front", MagicMock(), MagicMock())
        assert await handles.compare("latest") is None
        with pytest.raises(EngineGone):
            await handles.compare("find", "cmp-1")

    asyncio.run(ask())


def test_a_call_that_has_just_been_sent_is_cancelled_too():
    async def cancelled() -> None:
        sent = asyncio.get_running_loop().create_future()
        answer = SimpleNamespace(cancel=sent.cancel, _replica_result_future=sent)
        result = MagicMock()
        sent.set_result(result)
        deployments._cancel(answer)
        result.cancel.assert_called_once_with()
        answer._replica_result_future = asyncio.get_running_loop().create_future()
        answer.cancel = answer._replica_result_future.cancel
        deployments._cancel(answer)
        assert answer._replica_result_future.cancelled()

    asyncio.run(cancelled())
