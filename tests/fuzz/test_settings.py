"""With any flags and variables, `linpix serve` starts, or names the wrong one in one line."""

import contextlib
import io
import os
from dataclasses import dataclass
from unittest import mock

import pytest
from hypothesis import strategies as st

from linpix.__main__ import main
from linpix.server import serve as service
from linpix.server.cluster import local as cluster
from linpix.server.engine.decode.faults import Faults
from linpix.server.settings import Settings
from tests.fuzz.harness import Target

pytestmark = pytest.mark.slow

NAMES = sorted(Settings.model_fields)
# found wrong when used
ANY_TEXT = ("host", "metrics_host", "models", "checkpoints", "metrics_targets", "api_keys", "trusted_proxies")
VALUES = ["", "0", "1", "-1", "8000", "65535", "65536", "1e3", "0.5", "-0.0", "nan", "inf", "-inf", "1e400", "9" * 400,
          "9" * 5000, "0x10", "1_000", " 1", "true", "no", "auto", "cpu", "fp16", "fp32", "eager", "compiled", "text",
          "127.0.0.1", "::", "[", "*", "https://a.example", "//", "a,,b", ",", "../..", "/", "/dev/null",
          "\udcff", "\u0660", "mnist-small", "x" * 3000, "throw:every=100", "hang",
          "slow:at=1:ms=" + "9" * 400, "seed=" + "9" * 5000,
          "throw:at=1:at=2", "nan:image=\u0663", "lose:from=1,", ":", "=", "seed=-1"]


@dataclass(frozen=True)
class Told:
    flags: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]


class Refused(Exception):
    """What was said instead of serving."""


def serve(told: Told) -> None:
    """All of `linpix serve` but what comes after its settings: reading models, and listening."""
    printed, given = io.StringIO(), []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LINPIX_")}
    with mock.patch.dict(os.environ, environment | dict(told.variables), clear=True), \
            mock.patch.object(service, "serve", given.append), mock.patch.object(cluster, "serve", given.append), \
            mock.patch("gc.disable"), \
            contextlib.redirect_stderr(printed):
        try:
            status = main(["serve", *told.flags])
        except SystemExit as error:  # argparse
            status = error.code
    if status:
        assert status == 2 and not given
        raise Refused(printed.getvalue())
    [settings] = given
    assert isinstance(settings, Settings) and not printed.getvalue()
    if settings.faults:
        Faults(settings.faults)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


values = st.one_of(st.sampled_from(VALUES), st.integers().map(str), st.floats().map(str),
                   st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30))
words = st.one_of(st.tuples(st.sampled_from(NAMES).map(_flag), values), values.map(lambda word: (word,)),
                  st.tuples(st.sampled_from(NAMES).map(_flag), values).map(lambda pair: ("=".join(pair),)),
                  st.sampled_from([("--slot", "3"), ("--s", "3"), ("--no-such-flag",), ("--port",), ("--",), ("-x",)]))
variables = st.tuples(st.sampled_from(NAMES).map(lambda name: f"LINPIX_{name.upper()}"), values)
TOLD = st.builds(Told, st.lists(words, max_size=4).map(lambda lists: tuple(word for one in lists for word in one)),
                 st.lists(variables, max_size=3).map(tuple))
SETTINGS = Target("settings", TOLD, serve, (Refused,), {
    "setting": r"linpix serve: --[a-z-]+ \(LINPIX_[A-Z_]+\): [^\n]+, got [^\n]*\n",
    "flags": r"usage: .*\nlinpix( serve)?: error: (unrecognized arguments|argument --[a-z-]+|ambiguous option): .*\n",
}, share=5)


def test_any_settings_are_taken_or_refused_by_name(run):
    run(SETTINGS)


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_refused_by_its_own_name(name):
    refused = []
    for value in VALUES:
        try:
            serve(Told((f"{_flag(name)}={value}",), ()))
        except Refused as error:
            assert f"linpix serve: {_flag(name)} (LINPIX_{name.upper()}): " in str(error)
            refused.append(value)
    assert refused or name in ANY_TEXT, f"{name} takes anything"
