"""Training and evaluation from Python: what the commands do, with options of the same names."""

import contextlib
import shlex
import signal
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from linpix.model import plugins
from linpix.model.checkpoint import read
from linpix.training import commands
from linpix.training.flags import COMMANDS, with_file, words_of
from linpix.training.log import history

from .draw import torch_defaults


@dataclass(frozen=True, slots=True)
class Trained:
    """A run, as far as it has come."""

    folder: Path  # the checkpoint: a model for `linpix.sample` and the others
    # lines of the log: step, images, minutes, and train and validation (bits/dim), norm (of the
    # gradient) and learning_rate where they were measured
    history: list[dict[str, float]]
    bits_per_dim: dict[str, float]  # of the checkpoint, by the images it was measured on


def train(options: Mapping[str, Any]) -> Trained:
    """What `linpix.train` does."""
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "linpix.train handles Ctrl-C and SIGTERM, which Python allows in the main thread only;"
            " call it there, or in a process of its own"
        )
    given = _given(["train", *words_of("train", options)])
    theirs = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with _own_settings():
            commands.train(given)
    finally:
        for number, handler in theirs.items():
            signal.signal(number, handler)
    folder = Path(given.out)
    found = history(folder.with_name(folder.name + ".training"))
    return Trained(folder, found, read(folder).provenance["bits_per_dim"])


def evaluate(model: str | Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """What `linpix.evaluate` does."""
    given = _given(["evaluate", str(model), *words_of("evaluate", options)])
    with _own_settings():
        return commands.measured(given)[0]


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """The settings of torch that commands need; those of the program come back."""
    device, cached = torch.get_default_device(), torch.is_autocast_cache_enabled()
    # torch forgets weights that it has cast to bf16 only at the end of the outermost autocast, ours
    # or the program's: all steps would compute with those of the first
    torch.set_autocast_cache_enabled(False)
    try:
        with torch_defaults(), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        if torch.get_default_device() != device:
            # a device that is set costs time in each operator, the processor too
            torch.set_default_device(None if device.type == "cpu" else device)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _given(words: list[str]) -> Namespace:
    """The flags of a command. Raises ValueError, where a command line would print its usage."""
    parser = _Parser(f"linpix {words[0]}")
    COMMANDS[words[0]][0](parser)
    given = parser.parse_args(with_file(words)[1:])
    given.command_line = shlex.join(["linpix", *words])
    plugins.load(",".join(given.plugin or ()))
    return given
