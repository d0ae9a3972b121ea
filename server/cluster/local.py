"""`linpix serve --replicas`: a cluster of Ray on this machine alone, which begins and ends with the
command.
"""

import contextlib
import ctypes
import logging
import math
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from linpix.model.machine import usable_cores
from linpix.model.sharing import remove_unused

from .. import logs
from ..engine.catalogue import Catalogue
from ..engine.thread import LOST
from ..listening import listen, url_of
from ..serve import warn_of_exposure
from ..settings import Settings
from ..web.keys import Keys

QUIET = {  # variables that Ray reads before it begins; those that a user has set stay
    "RAY_USAGE_STATS_ENABLED": "0",  # else it reports to its makers
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # else its controller looks ten times a second, on our cores
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    # between fronts and replicas: faster than calls of actors
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # a replica's own work is in the engine thread already
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_DEDUP_LOGS": "0",
    "grpc_proxy": "",  # no proxy of http_proxy between our own processes
    # else it starts processes for tasks, of which we have none
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # else 15: engines and fronts would yield to any other program
}
STORE_BYTES = 80 * 2**20  # of shared memory for large objects, of which we have none
TRIES = 3  # Ray gives up its start after 30 s, which may be too short on a busy machine
LOOK_S = 0.1
END_S = 30.0  # after --drain-timeout, or a second signal, until all of Ray must have ended
PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl

logger = logging.getLogger("linpix")


def serve(settings: Settings) -> None:
    """Run replicas and fronts until a signal ends them. Raises OSError, ValueError or
    ModuleNotFoundError with the cure."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    # some of Ray's processes listen on all addresses, and run what whoever has the token sends
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
        from ray import serve as cluster
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"--replicas needs Ray Serve ({error}); install it with: pip install '.[ray]', or "
            "leave --replicas out"
        ) from error
    logs.configure(settings.log_format, settings.log_level)
    settings = _checked(settings)
    warn_of_exposure(settings)
    _hear(signal.default_int_handler)
    folder = tempfile.mkdtemp(prefix="linpix-ray-")  # for Ray's logs and sockets
    guard = Guard(folder)
    guard.start()
    try:
        _begin(folder, settings.replicas * settings.replica_threads + settings.fronts + 1)
        guard.node = ray._private.worker._global_node
        _hear(signal.default_int_handler)  # Ray has put handlers of its own in the place of these
        _start(settings)
        with contextlib.suppress(KeyboardInterrupt):  # of a signal
            # here, since who has read the address may send one
            logs.announce(
                f"LinPix serves {settings.replicas} replicas through {settings.fronts} fronts at "
                f"{url_of(settings.host or 'localhost', settings.port, settings.scheme)}"
            )
            while True:
                time.sleep(LOOK_S)
        guard.latest = time.monotonic() + settings.drain_timeout + END_S
        # of a second one, which ends what is not finished
        with contextlib.suppress(KeyboardInterrupt):
            # before the replicas, which finish what the fronts have admitted
            cluster.delete("fronts", _blocking=False)
            while "fronts" in cluster.status().applications:
                time.sleep(LOOK_S)
            cluster.shutdown()
    finally:
        _hear(signal.SIG_IGN)
        guard.look()  # what was raised may follow from it
        guard.node = None
        guard.latest = min(guard.latest, time.monotonic() + END_S)
        ray.shutdown()
        guard.clear()


class Guard(threading.Thread):
    """Ends the command and all processes of its cluster when one of Ray's own has died, or when its
    end takes too long: a call of Ray may then wait for ever.
    """

    def __init__(self, folder: str) -> None:
        """folder: Ray's. Becomes the parent of processes whose own parent dies, to end them too."""
        super().__init__(daemon=True)
        self._folder = folder
        self.node: Any = None  # of Ray; its processes have to live
        self.latest = math.inf  # when the command must have ended, on the monotonic clock
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """End this process if it cannot go on."""
        node, why = self.node, ""
        if node is not None and (dead := node.dead_processes()):
            why = f"Ray's {dead[0][0]} has died"
        elif time.monotonic() > self.latest:
            why = "Ray did not end in time"
        if why:
            logger.critical("%s; the command ends with status %d", why, LOST)
            self.clear()
            os._exit(LOST)

    def clear(self) -> None:
        """Kill what is left of the cluster, and remove its files."""
        _kill_family()
        remove_unused()
        shutil.rmtree(self._folder, ignore_errors=True)


def _kill_family() -> None:
    """Kill all processes that this one began, and those that they began, where Linux lists them."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")  # of the thread that began them
    while children.exists() and (found := children.read_text().split()):
        for pid in map(int, found):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _hear(handler: Any) -> None:
    """Have SIGTERM and SIGINT handled so; SIGHUP is only answered."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(
            signal.SIGHUP,
            lambda *_: logger.warning(
                "SIGHUP: ignored, since replicas do not read checkpoints again; start this command"
                " again to serve others (files of keys are read again by themselves)"
            ),
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # linpix/__main__.py blocked it


def _begin(folder: str, cores: int) -> None:
    """Start Ray for this process only."""
    import ray

    for left in reversed(range(TRIES)):
        try:
            ray.init(
                address="local",
                num_cpus=cores,
                include_dashboard=False,
                object_store_memory=STORE_BYTES,
                log_to_driver=True,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
            )
            return
        except Exception as error:  # Ray has no class for it
            ray.shutdown()
            _kill_family()  # of a start that it gave up, Ray ends nothing
            if not left:
                raise OSError(
                    f"Ray did not start: {error}; if {folder} is a long path, set TMPDIR to a short"
                    " one; if not, run 'ray start --head --block' to see the cause"
                ) from error
            logger.warning("Ray did not start; trying again: %s", error)


def _checked(settings: Settings) -> Settings:
    """The settings, with free ports and a replica's threads filled in. Raises here, before there is
    a replica, what would make every one fail."""
    if settings.api_keys:
        Keys(settings.api_keys)
    Catalogue(settings).check()
    ports = {"port": _free(settings.host, settings.port)}
    if settings.metrics_port is not None:
        ports["metrics_port"] = _free(settings.metrics_host, settings.metrics_port, "metrics-")
    threads = settings.replica_threads or max(1, usable_cores() // settings.replicas)
    return settings.model_copy(update={**ports, "replica_threads": threads})


def _free(host: str, port: int, of: str = "") -> int:
    """The port, or one that the system chooses for 0. Raises OSError if another program has it:
    fronts could not see that, since they share the port."""
    taken = listen(host, port, of)
    port = taken[0].getsockname()[1]
    for listening in taken:
        listening.close()
    return int(port)


def _start(settings: Settings) -> None:
    """Start the replicas and fronts."""
    from ray import serve as cluster

    from .deployments import fronts, replicas

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    cluster.start(
        proxy_location="Disabled", logging_config={"log_level": "ERROR", "enable_access_log": False}
    )
    try:
        handle = cluster.run(replicas(settings), name="engines", route_prefix=None)
        cluster.run(fronts(settings, handle), name="fronts", route_prefix=None)
    except RuntimeError as error:
        raise OSError(
            f"the replicas or fronts did not start ({error}); the log above says why"
        ) from error
