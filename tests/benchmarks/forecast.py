"""How well the end of a request is predicted when it is admitted: predicted over actual seconds, under load.

    python -m tests.benchmarks.forecast --data DIR [--models mnist-small,...] [--clients 12] [--seconds 60]

Clients ask for one to eight images each, again and again, more than there are slots: half of the requests draw whole
images, and half complete test images of which some is hidden. The service's own scheduler, decoder and predictions run
on one thread, without HTTP, and seconds are processor time, so that other programs do not count. Errors are (actual -
predicted) / actual, of requests admitted after the first fifth of the time.
"""

import argparse
import random
import time
from pathlib import Path

import numpy as np
import torch

time.perf_counter = time.thread_time  # before it is imported by name

from linpix.model import checkpoint, ops
from linpix.model.config import ModelConfig
from linpix.server.engine.batch import Batcher
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.image_spec import ImageSpec
from linpix.server.engine.ledger.local_model import LocalModel
from linpix.server.engine.ledger.ticket import Demand, Ticket
from linpix.server.engine.messages import Submission
from linpix.training import datasets
from tests.benchmarks.decode import machine

SLOTS = 16


def hole(config: ModelConfig, chance: random.Random) -> np.ndarray:
    """(T,) bool, what is known when a half or a rectangle is hidden."""
    height, width = config.height, config.width
    known = np.ones((height, width, config.channels), np.bool_)
    top, left = chance.randrange(height // 2), chance.randrange(width // 2)
    known[[slice(0, height // 2), slice(height // 2, None), slice(top, top + height // 2)][chance.randrange(3)],
          slice(left, left + width // 2) if chance.random() < 0.5 else slice(None)] = False
    return known.reshape(-1)


def errors(name: str, images: np.ndarray, clients: int, seconds: float) -> tuple[list[float], list[float]]:
    """Of requests for whole images, and of completions."""
    chance = random.Random(0)
    batcher = Batcher(new_decoder(checkpoint.read(checkpoint.find(name)), SLOTS))
    model, config = LocalModel(batcher, 256), batcher.decoder.config
    open_: dict[str, tuple[Ticket, float, bool]] = {}
    found: tuple[list[float], list[float]] = ([], [])
    began, number = time.perf_counter(), 0
    while (now := time.perf_counter()) - began < seconds:
        while len(open_) < clients:
            number += 1
            ticket, n = Ticket(str(number), "generations", "somebody", float("inf")), chance.choice([1, 1, 2, 4, 8])
            completes = chance.random() < 0.5
            canvas = images[chance.randrange(len(images))].reshape(-1) if completes else None
            known = hole(config, chance) if completes else None
            specs = [ImageSpec(seed=number * 100 + i, canvas=canvas, known=known) for i in range(n)]
            model.admit(ticket, Demand(n, known=specs[0].known_tokens(config)))
            batcher.submit(Submission(ticket.id, specs))
            ticket.began, settled = now, now - began > seconds / 5
            open_[ticket.id] = ticket, now + model.ends([ticket])[-1] if settled else 0.0, completes
        report = batcher.run_quantum()
        for request in report.joined:
            model.joined(open_[request][0])
        for image in report.finished:
            model.finished(open_[image.request][0])
        model.apply(report)
        now = time.perf_counter()
        for request in {image.request for image in report.finished}:
            ticket, end, completes = open_[request]
            if not ticket.undone:
                del open_[request]
                model.leave(ticket)
                if end:
                    found[completes].append((now - end) / (now - ticket.began))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST")
    parser.add_argument("--models", default="mnist-small,mnist-conditional")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}; kernel {ops.kernel()}, commit {checkpoint.commit()}")
    for name in given.models.split(","):
        config = checkpoint.config_of(checkpoint.find(name))
        images = datasets.load(given.data, "test", config).images
        for what, found in zip(("whole images", "completions"), errors(name, images, given.clients, given.seconds),
                               strict=True):
            size = np.abs(found)
            print(f"{name}, {what}: {len(found)} requests, mean {np.mean(found):+.3f}, absolute median "
                  f"{np.median(size):.3f}, 95 % {np.quantile(size, 0.95):.3f}, too early by over a quarter "
                  f"{np.mean(np.array(found) > 0.25):.3f}")


if __name__ == "__main__":
    main()
