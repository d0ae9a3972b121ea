"""Processes that train one model together: each computes the gradient of its part of every batch.

On a processor two processes of one thread beat one of two: a step of these models is hundreds of short operations, and
at the end of each the threads wait for one another.
"""

import contextlib
import signal
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed, multiprocessing

LEAST_IMAGES = 4  # of a batch for each process: with fewer, what a step costs in any case is most of it
PATIENCE = timedelta(days=1)  # the others wait while the first evaluates, or is stopped by its user


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
            raise ChildProcessError("another process of the training has ended, perhaps for lack of memory; --resume "
                                    "goes on from the last save, --processes 1 does so in one process") from error
        flat /= self.count
        for tensor, mean in zip(tensors, flat.split_with_sizes([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))


@contextlib.contextmanager
def together(count: int, work: Callable[..., None], *given: object) -> Iterator[Workers]:
    """This process as the first of `count`; each of the others runs work(its Workers, *given), and ends with this one.

    They share the threads that torch has here.
    """
    if count == 1:
        yield Workers()
        return
    threads = torch.get_num_threads()
    share = max(1, threads // count)
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        others = [multiprocessing.get_context("spawn").Process(
            target=_other, args=(rank, count, share, meeting, work, given), daemon=True) for rank in range(1, count)]
        for other in others:
            other.start()
        torch.set_num_threads(share)
        try:
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
    distributed.init_process_group("gloo", init_method=meeting.as_uri(), rank=rank, world_size=count, timeout=PATIENCE)


def _other(rank: int, count: int, threads: int, meeting: Path, work: Callable[..., None],
           given: tuple[object, ...]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches all; the first process tells when to stop
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    _meet(meeting, rank, count)
    with contextlib.suppress(FloatingPointError, ChildProcessError):  # the first process has it too, and says so
        work(Workers(rank, count), *given)
    distributed.destroy_process_group()
