"""The replicas and the fronts as deployments of Ray Serve; and `app`, which `serve deploy`
builds.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator
from typing import Any

import ray
from grpc import StatusCode
from grpc.aio import AioRpcError
from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, TaskCancelledError, WorkerCrashedError
from ray.serve import Application
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from linpix.model import plugins

from .. import logs
from ..settings import Settings
from .front import front_server
from .remote import Call, News, ReplicaLost
from .replica import Replica, take_cores

logger = logging.getLogger("linpix")
STARTS_S = 60.0  # seconds in which a replica starts, once there are cores for it
ENDS_S = 15.0  # seconds after --drain-timeout, for the last answers and the end of a process
# of a front: requests wait for no other thread; and asyncio's own event loop, for which
# web/middleware/connection.py is
ONE_LOOP = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0", "RAY_USE_UVLOOP": "0"}
# options of replicas and fronts
BOTH: dict[str, Any] = {
    "max_ongoing_requests": 10**6,  # a replica's own admission knows how many it can take
    "health_check_period_s": 2,
    "graceful_shutdown_wait_loop_s": 0.2,
    # Serve's own log; ours is separate
    "logging_config": {"log_level": "WARNING", "enable_access_log": False},
}
LOST = (
    RayActorError,
    WorkerCrashedError,
    ObjectLostError,
    TaskCancelledError,
    RequestCancelledError,
    DeploymentUnavailableError,
    AioRpcError,
)  # what a call raises if its process is gone


class ReplicaActor(Replica):
    async def __init__(self, settings: Settings, threads: int) -> None:  # type: ignore[misc]  # Serve awaits it
        logs.configure(settings.log_format, settings.log_level)
        if threads:
            take_cores(serve.get_replica_context().rank.local_rank, threads)
        super().__init__(settings)
        await self.begin()

    async def __del__(self) -> None:
        await self.stop()

    async def describe(self) -> Any:
        return self.description


class Front:
    """HTTP on the port that all fronts of a machine share, on the event loop of Serve and of its
    routers.
    """

    async def __init__(self, settings: Settings, replicas: DeploymentHandle) -> None:  # type: ignore[misc]
        if not isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
            raise RuntimeError(
                "this front would run on another event loop than asyncio's, without the limits of"
                " its connections; if you set ray_actor_options, add these env_vars to them:"
                f" {ONE_LOOP}"
            )
        logs.configure(settings.log_format, settings.log_level)
        self._replicas = replicas.options(
            request_serialization="pickle", response_serialization="pickle", stream=True
        )
        self._server = await front_server(
            settings,
            replicas.describe.remote,
            self._run,
            patience_s=settings.drain_timeout + ENDS_S + STARTS_S,
        )
        self._serving = asyncio.create_task(self._server.serve_shared())
        while not (self._server.started or self._serving.done()):
            await asyncio.sleep(0.01)
        if not self._server.started:
            raise RuntimeError("the HTTP server of this front did not start; its log says why")

    async def _run(self, call: Call) -> AsyncIterator[News]:
        answer = self._replicas.run.remote(call)
        try:
            async for news in answer:
                yield news
        except (asyncio.CancelledError, GeneratorExit):
            answer.cancel()
            raise
        except AioRpcError as error:  # if the message itself was at fault, no replica was lost
            if error.code() not in (
                StatusCode.CANCELLED,
                StatusCode.UNAVAILABLE,
                StatusCode.UNKNOWN,
            ):
                raise RuntimeError(f"{error.code()}: {error.details()}") from error
            raise ReplicaLost(f"a replica was lost ({error.code()})") from error
        except LOST as lost:
            raise ReplicaLost(f"a replica was lost ({type(lost).__name__})") from lost

    async def __del__(self) -> None:
        self._server.drain()
        with contextlib.suppress(Exception):
            await self._serving

    async def check_health(self) -> None:
        if self._serving.done() and not self._server.draining:
            raise RuntimeError("the HTTP server of this front has ended")


def _anywhere(settings: Settings) -> Settings:
    """With absolute paths, since Ray's processes have folders of their own."""
    paths = {
        name: path.resolve()
        for name in ("checkpoints", "api_keys", "metrics_targets")
        if (path := getattr(settings, name)) is not None
    }
    return settings.model_copy(update=paths | {"plugin": plugins.absolute(settings.plugin)})


def replicas(settings: Settings) -> Application:
    threads, number = settings.replica_threads, max(1, settings.replicas)
    gpus = ray.cluster_resources().get("GPU", 0.0) if ray.is_initialized() else 0.0
    environment = {"OMP_WAIT_POLICY": "PASSIVE", "RAY_USE_UVLOOP": "0"}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    actor: dict[str, Any] = {"num_cpus": max(1, threads), "runtime_env": {"env_vars": environment}}
    if settings.device == "cuda" or (settings.device == "auto" and gpus >= number):
        actor["num_gpus"] = 1
    return serve.deployment(
        ReplicaActor,
        name="Engine",
        num_replicas=number,
        ray_actor_options=actor,
        health_check_timeout_s=math.ceil(settings.watchdog_timeout),
        graceful_shutdown_timeout_s=settings.drain_timeout + ENDS_S,
        **BOTH,
    ).bind(_anywhere(settings), threads)


def fronts(settings: Settings, replicas: Application | DeploymentHandle) -> Application:
    """The fronts of some replicas."""
    return serve.deployment(
        Front,
        name="Front",
        num_replicas=max(1, settings.fronts),
        ray_actor_options={
            "num_cpus": 1,
            "runtime_env": {"env_vars": ONE_LOOP | {"OMP_NUM_THREADS": "1"}},
        },
        graceful_shutdown_timeout_s=settings.drain_timeout + ENDS_S,
        **BOTH,
    ).bind(_anywhere(settings), replicas)


def app(arguments: dict[str, Any]) -> Application:
    """The application for Ray Serve.

    arguments: the settings of `linpix serve` by name, in lower case with underscores. `replicas`
    and `fronts` are their numbers; a config file of Serve can give these deployments (Engine,
    Front) autoscaling and resources instead.
    """
    settings = Settings(**arguments)
    return fronts(settings, replicas(settings))
