"""Processes that train one model together: each computes the gradient of its part of every batch.

On a processor, two processes of one thread each are faster than one process of two threads: a step
of these models is hundreds of short operations, and at the end of each the threads wait for one
another. `together` starts the processes on this machine. torchrun, or another launcher that sets
the same variables, starts them on any number of machines, one per GPU if there are GPUs.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, distributed, multiprocessing

LEAST_IMAGES = 4  # of a batch per process: with fewer, fixed costs are most of a step
# PATIENCE: processes wait while the first one evaluates
MEETING, PATIENCE = timedelta(minutes=1), timedelta(days=1)
ASSEMBLY = timedelta(minutes=10)  # MEETING for several machines, which may start at different times

# variables of torchrun and similar launchers
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ENDED = (
    "another training process has ended, perhaps because memory ran out; --resume continues from"
    " the last save, and --processes 1, or torchrun with fewer processes, needs less memory"
)


def count_for(batch: int, wanted: int | None, device: str, accumulate: int = 1) -> int:
    """Number of processes that share a batch.

    wanted: this number; None: on a processor, at most one per thread and per LEAST_IMAGES images,
    such that they divide the batch; on a GPU, 1 · accumulate: number of parts into which each
    process divides its images. Raises ValueError if the wanted number is not possible.
    """
    part = batch // accumulate
    if wanted is None:
        most = min(torch.get_num_threads(), max(1, part // LEAST_IMAGES)) if device == "cpu" else 1
        return next(count for count in range(most, 0, -1) if part % count == 0)
    if wanted > 1 and device != "cpu":
        raise ValueError(
            f"--processes {wanted}: on a GPU, training uses one process; leave the flag out, or add"
            " --device cpu; for several GPUs, start the command with torchrun"
        )
    _check_share(f"--processes {wanted}", batch, wanted, accumulate)
    return wanted


def _check_share(what: str, batch: int, count: int, accumulate: int) -> None:
    if count < 1 or batch % (count * accumulate):
        parts = f" times --accumulate {accumulate}" if accumulate > 1 else ""
        raise ValueError(f"{what}: the --batch of {batch} images must be a multiple of it{parts}")


class Workers:
    """The number of training processes, and which of them this one is. Only the first, rank 0,
    writes and decides.
    """

    def __init__(
        self, rank: int = 0, count: int = 1, here: int = 1, *, launched: bool = False
    ) -> None:
        """here: number of processes on this machine, each with its own threads · launched: by
        torchrun.
        """
        self.rank, self.count, self.here, self.launched = rank, count, here, launched

    def mean(self, tensors: list[Tensor]) -> None:
        """Replace float32 tensors by their means over all processes, bit-identical in each. Shapes
        must agree.

        Raises ChildProcessError if another process has died.
        """
        if self.count == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        with _with_all():
            distributed.all_reduce(flat)
        means = (flat / self.count).split_with_sizes([tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view_as(tensor))

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the body, such as a download, in the first process, and then in the others."""
        if self.rank:
            self._wait()
        yield
        if not self.rank:
            self._wait()

    def _wait(self) -> None:
        if self.count > 1:
            with _with_all():
                distributed.barrier()

    def check_alike(self, **facts: object) -> None:
        """Wait for all processes. Raises ValueError in every process if one has other facts than
        the first.
        """
        found: list[dict[str, object]] = [{}] * self.count
        with _with_all():
            distributed.all_gather_object(found, facts)
        for rank, other in enumerate(found):
            if differing := [name for name in facts if other[name] != found[0][name]]:
                raise ValueError(
                    f"{' and '.join(differing)} of process {rank} and of process 0 differ; every"
                    " machine must use the same command, --data, --out and --init, with --out on a"
                    " shared disk"
                )

    def leave(self) -> None:
        """Leave the process group, all at about the same time: what the first one does afterwards
        may take long.
        """
        if distributed.is_initialized():
            distributed.destroy_process_group()


@contextmanager
def _with_all() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ChildProcessError(_ENDED) from error


@contextmanager
def launched(device: str) -> Iterator[Workers]:
    """This process's Workers, if torchrun has started it after all processes have connected.

    device: auto, cpu or cuda; each process gets its own GPU. Raises ValueError if there are too few
    GPUs, and TimeoutError if not all processes connect.
    """
    if not all(os.environ.get(name) for name in _LAUNCHED):
        yield Workers()
        return
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", 0))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if 0 < gpus <= local:
        raise ValueError(
            f"{here} processes on this machine, but {gpus} GPUs: each process needs its own; use "
            f"--nproc-per-node={gpus} or --device cpu"
        )
    own = torch.device("cuda", local) if gpus else None
    if own is not None:
        torch.cuda.set_device(own)
    elif here == count:
        _stay_here()
    try:
        meeting = distributed.rendezvous("env://", timeout=ASSEMBLY)  # type: ignore[attr-defined]
        store, rank, count = next(meeting)
        store.set_timeout(ASSEMBLY)
        distributed.init_process_group(
            "gloo" if own is None else "nccl",
            store=store,
            rank=rank,
            world_size=count,
            timeout=PATIENCE,
            device_id=own,
        )
    except RuntimeError as error:
        raise TimeoutError(
            f"not all of the {count} processes met at MASTER_ADDR {os.environ['MASTER_ADDR']},"
            f" MASTER_PORT {os.environ['MASTER_PORT']} within {ASSEMBLY}; start all of them, or"
            " unset WORLD_SIZE to train with this one"
        ) from error
    workers = Workers(rank, count, here, launched=True)
    try:
        yield workers
    finally:
        workers.leave()


def shared(batch: int, accumulate: int, workers: Workers, processes: int | None) -> None:
    """Raise ValueError if the processes that torchrun has started cannot share a batch."""
    if processes is not None:
        raise ValueError(
            f"--processes {processes}: torchrun has started {workers.count} processes already;"
            " leave the flag out"
        )
    _check_share(f"{workers.count} processes", batch, workers.count, accumulate)


@contextmanager
def together(count: int, work: Callable[..., object], *given: object) -> Iterator[Workers]:
    """Workers of this process as the first of `count`. Each other process runs work(its Workers,
    *given).

    The other processes end with this one. All share the threads that torch has here. The others
    ignore SIGINT and SIGTERM: Ctrl-C reaches every process, but the first one decides when to stop.
    Raises ChildProcessError if a process ends before it begins.
    """
    if count == 1:
        yield Workers()
        return
    threads, context = torch.get_num_threads(), multiprocessing.get_context("spawn")
    share, others, begun = max(1, threads // count), [], []
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        try:
            with blocked_in_children():
                for rank in range(1, count):
                    receiver, sender = context.Pipe(duplex=False)
                    others.append(
                        context.Process(
                            target=_other,
                            args=(rank, count, share, meeting, sender, work, given),
                            daemon=True,
                        )
                    )
                    others[-1].start()
                    sender.close()
                    begun.append(receiver)
            # not with gloo, which would wait for a dead process and block signals
            for receiver in begun:
                try:
                    receiver.recv()
                except EOFError as error:
                    raise ChildProcessError(_ENDED) from error
            torch.set_num_threads(share)
            _meet(meeting, 0, count)
            yield Workers(0, count)
            for other in others:
                other.join()
        finally:
            torch.set_num_threads(threads)
            if distributed.is_initialized():
                distributed.destroy_process_group()
            for other in others:
                compilers = [*compilers_of(other.pid or 0)]
                other.kill()  # has already ended, unless there was an error here
                other.join()
                kill(compilers)


@contextmanager
def blocked_in_children() -> Iterator[None]:
    """Processes that start in this block never get SIGINT or SIGTERM; this one gets them, at the
    latest after it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # when it starts, it unblocks them
    # children inherit it
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def compilers_of(pid: int) -> Iterator[int]:
    """The other programs that a process has started, as torch does to compile, and what these have
    started, which would survive them. None where the system does not list them.
    """
    with suppress(OSError):  # of a process that has just ended
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, listed.read_text().split()):
                if not os.path.samefile(f"/proc/{child}/exe", "/proc/self/exe"):
                    yield child
                    yield from compilers_of(child)


def kill(processes: Iterable[int]) -> None:
    for pid in [*processes]:  # all are found before the first ends
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _stay_here() -> None:
    # not on a network
    own = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", own)


def _meet(meeting: Path, rank: int, count: int) -> None:
    _stay_here()
    store = distributed.FileStore(str(meeting), count)  # type: ignore[attr-defined]
    store.set_timeout(MEETING)
    with _with_all():
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=count, timeout=MEETING
        )
        # one that leaves at once would close connections that others still open
        distributed.barrier()
    # not before: gloo would wait as long for one that has died
    distributed.distributed_c10d._set_pg_timeout(PATIENCE)


def _other(
    rank: int,
    count: int,
    threads: int,
    meeting: Path,
    begun: Connection,
    work: Callable[..., object],
    given: tuple[object, ...],
) -> None:
    begun.send(True)
    torch.set_num_threads(threads)
    # the first process reports the same error
    with suppress(FloatingPointError, ChildProcessError):
        _meet(meeting, rank, count)
        work(Workers(rank, count), *given)
    distributed.destroy_process_group()
