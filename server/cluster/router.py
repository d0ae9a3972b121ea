"""The router, which chooses a replica for Ray Serve. It runs in every front, on its event loop.

Serve copies this module into each process by value, so what it shares with the front is in another module.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from . import choosing
from .messages import Load, Order


class DoneFirst(RequestRouter):  # type: ignore[misc]  # Ray's types are not read
    """Sends an order to the replica that will be done first.

    Comparisons go to the oldest replica, which has them all: a replica that the autoscaler adds has none. The newest
    replica is asked what is served: it has what was deployed last.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._backlogs = choosing.Backlogs()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        for gone in choosing.LOADS.keys() - {replica.replica_id.unique_id for replica in replicas}:
            del choosing.LOADS[gone]
        for replica in replicas:
            choosing.LOADS[replica.replica_id.unique_id] = choosing.load_of(replica.routing_stats or {"room": 1})

    async def choose_replicas(self, candidate_replicas: list[RunningReplica],
                              pending_request: PendingRequest | None = None) -> list[list[RunningReplica]]:
        candidates = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None or not candidates:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if none of them can be reached
        order = pending_request.args[0] if pending_request.args else None
        if not isinstance(order, Order):
            oldest, *others = choosing.oldest_first(candidates)
            return [[candidates[name]] for name in ([oldest] if order is not None else [*reversed(others), oldest])]
        loads = {name: choosing.LOADS.get(name) or Load(room=1) for name in candidates}
        names = choosing.by_end(loads, self._backlogs, order)
        self._backlogs.give(names[0], pending_request.metadata.internal_request_id, order.work,
                            order.timeout_s - order.spent_s)
        return [[candidates[name]] for name in names]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        # for an answer in one piece, gRPC says that the request has arrived only once it has been answered
        self._backlogs.move(replica_id.unique_id, pending_request.metadata.internal_request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._backlogs.take(replica_id.unique_id, internal_request_id)
