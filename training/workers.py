"""Processes that train one model together: each computes the gradient of its part of every batch.

On a processor two processes of one thread beat one of two: a step of these models is hundreds of short operations, and
at the end of each the threads wait for one another.
"""

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, distributed, multiprocessing

LEAST_IMAGES = 4  # of a batch for each process: with fewer, what a step costs in any case is most of it
MEETING, PATIENCE = timedelta(minutes=1), timedelta(days=1)  # later, others wait while the first one evaluates

_ENDED = ("another process of the training has ended, perhaps for lack of memory; --resume goes on from the last save, "
          "--processes 1 does so in one process")


def count_for(batch: int, wanted: int | None, device: str) -> int:
    """How many processes share a batch: as many as wanted, or as there are threads, where batch divides by them.

    Raises ValueError where the wanted number cannot be.
    """
    if wanted is None:
        most = min(torch.get_num_threads(), max(1, batch // LEAST_IMAGES)) if device == "cpu" else 1
        return next(count for count in range(most, 0, -1) if batch % count == 0)
    if wanted > 1 and device != "cpu":
        raise ValueError(f"--processes {wanted}: on a GPU one process trains; leave the flag out, or say --device cpu")
    if wanted < 1 or batch % wanted:
        raise ValueError(f"--processes {wanted}: the --batch of {batch} images must divide by it")
    return wanted


class Workers:
    """How many processes train, and which of them this one is: the first, rank 0, alone writes and decides."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count

    def mean(self, tensors: list[Tensor]) -> None:
        """Replace float32 tensors by their means over all processes, the same bits in each. Shapes agree in all.

        Raises ChildProcessError where another process has died.
        """
        if self.count == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        try:
            distributed.all_reduce(flat)
        except RuntimeError as error:
            raise ChildProcessError(_ENDED) from error
        flat /= self.count
        for tensor, mean in zip(tensors, flat.split_with_sizes([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))


@contextlib.contextmanager
def together(count: int, work: Callable[..., None], *given: object) -> Iterator[Workers]:
    """This process as the first of `count`; each of the others runs work(its Workers, *given), and ends with this one.

    They share the threads that torch has here, and heed no SIGINT or SIGTERM: Ctrl-C reaches all of them, and the first
    tells when to stop. Raises ChildProcessError where one ends before it begins.
    """
    if count == 1:
        yield Workers()
        return
    threads, context = torch.get_num_threads(), multiprocessing.get_context("spawn")
    share, others, begun = max(1, threads // count), [], []
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        try:
            handlers = {number: signal.signal(number, signal.SIG_IGN)  # children inherit it
                        for number in (signal.SIGINT, signal.SIGTERM)}
            for rank in range(1, count):
                receiver, sender = context.Pipe(duplex=False)
                others.append(context.Process(target=_other, args=(rank, count, share, meeting, sender, work, given),
                                              daemon=True))
                others[-1].start()
                sender.close()
                begun.append(receiver)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for receiver in begun:  # not by gloo, which would wait for one that has died, and hear no signal
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
                other.kill()  # has ended already, unless there was an error here
                other.join()


def _meet(meeting: Path, rank: int, count: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")  # not on a network
    store = distributed.FileStore(str(meeting), count)  # type: ignore[attr-defined]
    store.set_timeout(MEETING)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=PATIENCE)


def _other(rank: int, count: int, threads: int, meeting: Path, begun: Connection, work: Callable[..., None],
           given: tuple[object, ...]) -> None:
    begun.send(True)
    torch.set_num_threads(threads)
    _meet(meeting, rank, count)
    with contextlib.suppress(FloatingPointError, ChildProcessError):  # the first process has it too, and says so
        work(Workers(rank, count), *given)
    distributed.destroy_process_group()
