"""Runs the targets; with LINPIX_FUZZ_CASES (`make fuzz`) it prints the outcomes of their cases."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from linpix.model import provenance
from tests.fuzz.harness import HEAD, Tally, Target, fuzz
from tools.harness.machine import machine

TALLIES = pytest.StashKey[list[Tally]]()


@pytest.fixture
def run(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Callable[..., Tally]:
    """Fuzz a target: what it prints, as libraries in C do, is a failure too."""

    def run(target: Target[Any], **options: Any) -> Tally:
        tally = fuzz(target, **options)
        request.config.stash.setdefault(TALLIES, []).append(tally)
        printed = capfd.readouterr()
        assert not printed.err and not printed.out
        return tally

    return run


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    tallies = config.stash.get(TALLIES, [])
    if tallies and "LINPIX_FUZZ_CASES" in os.environ:
        terminalreporter.write_line(
            "\n".join(
                [
                    HEAD,
                    *(tally.row() for tally in tallies),
                    "",
                    f"{machine()}, commit {provenance.commit()}",
                ]
            )
        )
