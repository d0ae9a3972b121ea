"""The desk, the replicas and the fronts as deployments of Ray Serve; and `app`, which `serve deploy` builds."""

import asyncio
import dataclasses
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
from grpc import StatusCode
from grpc.aio import AioRpcError
from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, TaskCancelledError, WorkerCrashedError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from .. import logs
from ..compare.jobs import Job
from ..errors import EngineGone, ServiceError
from ..settings import Settings
from .choosing import LOADS
from .desk import Desk, Snapshot
from .messages import Answer, Load, Order, ReplicaLost
from .router import DoneFirst

logger = logging.getLogger("linpix")
BEAT_S = 0.5      # seconds between a process's messages to the desk
STATS_S = 0.5     # seconds between reports of the replicas' loads to the routers
ANY_NUMBER = 10**6  # of concurrent requests: a replica's own ledger knows how many it can take
DESK_S = 1.0      # seconds that the desk may take to answer: while it is replaced, there is no answer
COMPARE_S = 5.0   # seconds that the replica with the comparisons may take to answer
STARTS_S = 60.0   # seconds in which a replica starts, once there are cores for it
ENDS_S = 15.0     # seconds after --drain-timeout, for the last answers and the end of a process
# of a front: requests wait for no other thread; and asyncio's own event loop, for which web/middleware/connection.py is
ONE_LOOP = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0", "RAY_USE_UVLOOP": "0"}
LOG: dict[str, Any] = {"log_level": "WARNING", "enable_access_log": False}  # of Serve's own log; ours is separate
LOST = (RayActorError, WorkerCrashedError, ObjectLostError, TaskCancelledError, RequestCancelledError,
        DeploymentUnavailableError, AioRpcError)  # what a call raises if its process is gone


def settings_of(given: dict[str, Any]) -> Settings:
    return Settings(**given)


class Engine:
    """A replica, and its heartbeat to the desk."""

    async def __init__(self, given: dict[str, Any], threads: int, desk: DeploymentHandle  # type: ignore[misc]
                       ) -> None:  # Serve awaits it
        from .replica import Replica, take_cores

        settings = settings_of(given)
        logs.configure(settings.log_format)
        context = serve.get_replica_context()
        self._name, self._desk = f"engine-{context.replica_tag}", desk
        if threads:
            take_cores(context.rank.local_rank, threads)
        self._replica = Replica(settings)
        self._beating = asyncio.create_task(self._beat())

    async def __del__(self) -> None:
        self._beating.cancel()
        await self._replica.stop()
        await self._report(drained=True)

    async def _beat(self) -> None:
        while True:
            await self._report()
            await asyncio.sleep(BEAT_S)

    async def _report(self, *, drained: bool = False) -> None:
        await _desk_answer(self._desk.beat.remote(self._name, "engine", {}, self._replica.snapshot(), drained))

    async def check_health(self) -> None:
        if self._replica.gone:
            raise RuntimeError(self._replica.gone)

    async def record_routing_stats(self) -> dict[str, Any]:
        return dataclasses.asdict(self._replica.load())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return self._replica.fill()

    async def describe(self) -> Any:
        return self._replica.describe()

    async def draw(self, order: Order) -> list[Answer]:
        return await self._replica.draw(order)

    async def stream(self, order: Order) -> AsyncIterator[list[Answer]]:
        async for answers in self._replica.stream(order):
            yield answers

    async def compare(self, what: str, *about: Any) -> Job | ServiceError | None:
        return await self._replica.compare(what, *about)


class Handles:
    """A front's Fleet, through Serve's handles."""

    def __init__(self, front: str, engines: DeploymentHandle, desk: DeploymentHandle) -> None:
        self._front, self._desk, self._elsewhere = front, desk, dict[str, int]()
        self._engines = engines.options(request_serialization="pickle", response_serialization="pickle")
        self._streams = self._engines.options(stream=True)
        self.facts: dict[str, dict[str, str]] = {}  # of this front's models, once it knows them

    @property
    def room(self) -> int:
        return max((load.room for load in self._loads()), default=0)

    @property
    def replicas(self) -> int:
        return len(self._loads())

    def _loads(self) -> list[Load]:
        """The loads of replicas that serve the same as this front, or have not reported yet."""
        return [load for load in list(LOADS.values()) if not load.facts or load.facts == self.facts]

    async def draw(self, order: Order) -> list[Answer]:
        answer = self._engines.draw.remote(order)
        try:
            return list(await answer)
        except asyncio.CancelledError:
            _cancel(answer)
            raise
        except LOST as lost:
            raise _replica_lost(lost) from lost

    async def stream(self, order: Order) -> AsyncIterator[list[Answer]]:
        answer = self._streams.stream.remote(order)
        try:
            async for answers in answer:
                yield answers
        except (asyncio.CancelledError, GeneratorExit):
            _cancel(answer)
            raise
        except LOST as lost:
            raise _replica_lost(lost) from lost

    async def compare(self, what: str, *about: Any) -> Job | None:
        if not self.replicas:  # Serve would wait for one
            if what == "latest":
                return None
            raise EngineGone("no replica runs that could compare")
        try:
            found = await asyncio.wait_for(self._engines.compare.remote(what, *about), COMPARE_S)
        except (*LOST, TimeoutError) as lost:
            if what == "latest":  # of which the state of the service is a part
                return None
            raise EngineGone("the replica with the comparisons died, or does not answer") from lost
        if isinstance(found, ServiceError):
            raise found
        assert found is None or isinstance(found, Job)
        return found

    def elsewhere(self, client: str) -> int:
        return self._elsewhere.get(client, 0)

    async def enter(self, client: str, here: int, images: int, limit: int) -> int | None:
        taken = await _desk_answer(self._desk.enter.remote(self._front, client, here, images, limit))
        return None if taken is None else int(taken)

    async def take(self, key: str, rate: str) -> float:
        return float(await _desk_answer(self._desk.take.remote(key, rate)) or 0.0)

    async def collected(self) -> dict[str, Snapshot]:
        return await _desk_answer(self._desk.collected.remote()) or {}

    async def beat(self, clients: dict[str, int], snapshot: Snapshot, drained: bool) -> bool:
        reply = await _desk_answer(self._desk.beat.remote(self._front, "front", clients, snapshot, drained))
        if reply is None:
            return False
        self._elsewhere = reply.elsewhere
        return bool(reply.draining)


def _replica_lost(cause: Exception) -> Exception:
    """What to raise for an order whose call failed: if the message itself was at fault, no replica was lost."""
    if isinstance(cause, AioRpcError) and cause.code() not in (StatusCode.CANCELLED, StatusCode.UNAVAILABLE,
                                                               StatusCode.UNKNOWN):
        return RuntimeError(f"{cause.code()}: {cause.details()}")
    return ReplicaLost(f"a replica was lost ({type(cause).__name__})")


def _cancel(answer: Any) -> None:
    """Cancel a call. One that has been sent, and whose result Ray has not stored yet, would go on without this."""
    answer.cancel()
    sent = answer._replica_result_future
    if sent.done() and not sent.cancelled() and sent.exception() is None:
        sent.result().cancel()


async def _desk_answer(answer: Any) -> Any:
    """The desk's answer; None while there is no desk: limits across fronts then do not hold, and no request waits."""
    try:
        return await asyncio.wait_for(answer, DESK_S)
    except (*LOST, TimeoutError) as lost:
        logger.warning("the desk does not answer (%s): until it does, each front applies the limits on its "
                       "own", type(lost).__name__)
    except Exception as failure:  # a bug, of ours or of the transport: beats must go on
        logger.error("the desk was asked in vain: %s: %s", type(failure).__name__, failure)
    return None


class Front:
    """HTTP on the port that all fronts of a machine share, on the event loop of Serve and of its routers."""

    async def __init__(self, given: dict[str, Any], engines: DeploymentHandle,  # type: ignore[misc]
                       desk: DeploymentHandle) -> None:
        from .serving import front_server

        if not isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
            raise RuntimeError("this front would run on another event loop than asyncio's, without the limits of its "
                               f"connections; if you set ray_actor_options, add these env_vars to them: {ONE_LOOP}")
        settings = settings_of(given)
        logs.configure(settings.log_format)
        name = f"front-{serve.get_replica_context().replica_tag}"
        self._fleet = Handles(name, engines, desk)
        self._server = await front_server(settings, name, engines.describe.remote, self._fleet, BEAT_S,
                                          patience_s=settings.drain_timeout + ENDS_S + STARTS_S)
        self._fleet.facts = self._server.facts
        self._serving = asyncio.create_task(self._serve())
        while not (self._server.started or self._server.over):
            await asyncio.sleep(0.01)
        if not self._server.started:
            raise RuntimeError("the HTTP server of this front did not start; its log says why")

    async def _serve(self) -> None:
        await self._server.serve_shared()
        while True:  # until Serve ends this process
            await self._fleet.beat({}, self._server.snapshot(), self._server.draining)
            await asyncio.sleep(BEAT_S)

    async def __del__(self) -> None:
        failed = self._server.over and not self._server.draining
        self._server.drain(others=True)
        while not self._server.over:
            await asyncio.sleep(0.02)
        await self._fleet.beat({}, self._server.snapshot(), not failed)

    async def check_health(self) -> None:
        if self._server.over and not self._server.draining:
            raise RuntimeError("the HTTP server of this front has ended")


def app(arguments: dict[str, Any]) -> Application:
    """The application for Ray Serve: replicas, fronts and their desk.

    arguments: the settings of `linpix serve` by name, in lower case with underscores. `replicas` and `fronts` are
    their numbers; a config file of Serve can give these deployments (Engine, Front) autoscaling and resources instead.
    """
    settings = Settings(**arguments)
    given = settings.model_dump(mode="json") | {
        name: str(Path(value).resolve()) for name in ("checkpoints", "api_keys") if (value := getattr(settings, name))}
    threads, replicas = settings.replica_threads, max(1, settings.replicas)
    ends_s = settings.drain_timeout + ENDS_S
    desk = serve.deployment(Desk, name="Desk", num_replicas=1, max_ongoing_requests=ANY_NUMBER,
                            ray_actor_options={"num_cpus": 0}, logging_config=LOG).bind()
    gpus = ray.cluster_resources().get("GPU", 0.0) if ray.is_initialized() else 0.0
    gpu = {"num_gpus": 1} if settings.device == "cuda" or (settings.device == "auto" and gpus >= replicas) else {}
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    engines = serve.deployment(
        Engine, name="Engine", num_replicas=replicas, max_ongoing_requests=ANY_NUMBER,
        ray_actor_options={"num_cpus": max(1, threads), "runtime_env": {"env_vars": environment}, **gpu},
        request_router_config=RequestRouterConfig(request_router_class=DoneFirst,
                                                  request_routing_stats_period_s=STATS_S),
        health_check_period_s=2, health_check_timeout_s=math.ceil(settings.watchdog_timeout),
        graceful_shutdown_wait_loop_s=0.2, graceful_shutdown_timeout_s=ends_s, logging_config=LOG
        ).bind(given, threads, desk)
    fronts = serve.deployment(
        Front, name="Front", num_replicas=max(1, settings.fronts), max_ongoing_requests=ANY_NUMBER,
        ray_actor_options={"num_cpus": 1, "runtime_env": {"env_vars": ONE_LOOP | {"OMP_NUM_THREADS": "1"}}},
        health_check_period_s=2, graceful_shutdown_wait_loop_s=0.2, graceful_shutdown_timeout_s=ends_s,
        logging_config=LOG).bind(given, engines, desk)
    return fronts
