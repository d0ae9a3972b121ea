"""Every shell and Python block of the README and the documentation, run as it stands, page by page
in a folder.

Only three things differ: the address is that of a server on a free port, data sets are where
LINPIX_DATA says, and what takes long is made short (SHORTER). JSON after a shell block is what the
block printed, but for what changes from run to run. A block after a comment `not run: REASON` is
not run; NOT_RUN lists them.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import linpix
from linpix.cli import draw
from linpix.model import ops
from linpix.server.engine.decode.choice import new_decoder
from tools.harness.commands import ROOT
from tools.harness.servers import Process, serving

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DECISIONS = ROOT / "DECISIONS.md"
LOGS = sorted((ROOT / "docs" / "log").glob("*.md"))
LINKED = [*PAGES, DECISIONS, ROOT / "CHANGELOG.md", *LOGS]
FOLDERS = (
    "csrc",
    "deploy",
    "docs",
    "examples",
    "linpix",
    "model",
    "server",
    "tests",
    "tools",
    "training",
)
NOT_RUN = [
    (
        "README.md",
        (
            "make run     # in a clone of this repository: installs, compiles, and serves on "
            "http://127.0.0.1:8000; needs Python 3.11"
        ),
    ),
    ("experiments.md", "linpix experiment scaling --quick"),
    (
        "plugins.md",
        (
            "linpix train mnist-small --data data --plugin examples/gated.py --attention gated"
            " --minutes 5 --out runs/gated"
        ),
    ),
    ("run.md", "make run"),
    ("run.md", "docker compose up"),
    ("scale.md", "pip install '.[ray]'"),
    ("scale.md", "linpix serve --replicas 4 --fronts 2 --replica-threads 8"),
    ("scale.md", "linpix serve --replicas 4 --fronts 8 --device cuda --slots 1024"),
    (
        "scale.md",
        "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32)  # the same everywhere",
    ),
    ("scale.md", "serve deploy deploy/ray.yaml"),
    ("scale.md", "kubectl apply --filename deploy/kubernetes.yaml"),
    (
        "train.md",
        (
            "linpix train mnist-conditional --data data --no-compile --images 0 --max-minutes 600"
            " --out runs/trunk"
        ),
    ),
    (
        "train.md",
        (
            "torchrun --standalone --nproc-per-node=4 -m linpix train mnist --data data --batch 64"
            " --out runs/m"
        ),
    ),
    (
        "train.md",
        (
            "python -m linpix.training.preferences runs/mine --data data --augment shift --out"
            " runs/sure"
        ),
    ),
]
SHORTER = {
    "--minutes 45": "--minutes 45 --images 16 --batch 8 --warmup-images 8 --no-compile",
    "minutes=45": "minutes=45, images=16, batch=8, warmup_images=8, compile=False",
    "--images 48": "--images 16",
    "--budget 20": "--budget 5",
    "--classes 200": "--classes 10",
    "--limit 200": "--limit 20",
    "--count 60000 --shards 100": "--count 60 --shards 10",
}
ADDRESS = "http://127.0.0.1:8000"
CHANGES = {
    "attempts",
    "created",
    "checkpoint",
    "confidence",
    "engine",
    "precision",
    "request_id",
    "seconds",
}  # with time, weights or machine
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>[^>]+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    why: str  # it is not run


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            found["text"],
            found["why"] or "",
        )
        for found in BLOCK.finditer(text)
    ]


class Reader:
    """Somebody who does what a page says, in a folder of their own."""

    def __init__(self, folder: Path, default: Process) -> None:
        self.folder, self.server, self.printed = folder, default, ""
        self.own: list[Process] = []
        command = folder / "bin" / "linpix"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-m", "linpix"])} "$@"\n')
        command.chmod(0o755)
        (folder / "checkpoints").mkdir()
        for shipped in (ROOT / "checkpoints").iterdir():
            (folder / "checkpoints" / shipped.name).symlink_to(shipped)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("LINPIX_")},
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "LINPIX_CHECKPOINTS": "checkpoints",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
        }

    def does(self, block: Block) -> None:
        where = f"{block.page.name}:{block.line}"
        text = block.text
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        if block.language == "json":
            assert self.printed, f"{where}: no block before this answer printed one"
            agree(json.loads(block.text), json.loads(self.printed), where)
            return
        if block.language == "sh" and (serve := re.fullmatch(r"linpix serve(.*)\n", text)):
            self.server = Process(self.folder / "checkpoints", serve[1])
            self.own.append(self.server)
            return
        text = text.replace(ADDRESS, self.server.url)
        shell = {"sh": ["bash", "-euo", "pipefail"], "python": [sys.executable]}[block.language]
        ended = subprocess.run(
            [*shell, "-c", text],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, (
            f"{where} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}"
        )
        self.printed = ended.stdout

    def leaves(self) -> None:
        for process in self.own:
            process.stop()


def agree(told: Any, got: Any, where: str) -> None:
    """Raise AssertionError unless an answer is as told: the same fields, and values where they do
    not change.
    """
    if isinstance(told, dict):
        assert isinstance(got, dict), where
        assert list(told) == list(got), f"{where}: {list(told)} in the page, {list(got)} answered"
        for name, value in told.items():
            if name not in CHANGES:
                agree(value, got[name], f"{where}: {name}")
    elif isinstance(told, list):
        assert isinstance(got, list), where
        if "..." in told:
            told, got = told[: told.index("...")], got[: told.index("...")]
        assert len(told) == len(got), where
        for index, (one, other) in enumerate(zip(told, got, strict=True)):
            agree(one, other, f"{where}[{index}]")
    elif isinstance(told, str) and told.endswith("..."):
        assert got.startswith(told[:-3]), f"{where}: {told} in the page, {got[:80]} answered"
    else:
        assert told == got, f"{where}: {told!r} in the page, {got!r} answered"


@pytest.fixture(scope="module")
def shipped() -> Iterator[Process]:
    with serving(ROOT / "checkpoints") as process:
        yield process


@pytest.fixture
def photos(tmp_path: Path) -> None:
    """photos/circle and photos/square, of 10 each, in the kinds that cameras and the web have."""
    y, x = np.mgrid[:40, :40] - 20
    for name, distance in (("circle", np.hypot(x, y)), ("square", np.maximum(abs(x), abs(y)))):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(10):
            inside = (distance < 8 + number).astype(np.uint8) * 255
            kind = ("png", "jpg", "JPEG", "webp", "gif")[number % 5]
            Image.fromarray(inside).save(tmp_path / "photos" / name / f"{number // 2:04}.{kind}")
    (tmp_path / "photos" / "notes.txt").write_text("no picture")


# up to a minute
LONG = ("api.md", "compare.md", "complete.md", "numbers.md", "python.md", "run.md", "train.md")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page.name in LONG else ()) for page in PAGES],
    ids=[page.name for page in PAGES],
)
def test_what_a_page_says_can_be_done(page, tmp_path, photos, shipped, request, monkeypatch):
    found = [block for block in blocks(page) if not block.why]
    if any("--data data" in block.text for block in found):
        (tmp_path / "data").symlink_to(request.getfixturevalue("data"))
    reader = Reader(tmp_path, shipped)
    try:
        for block in found:
            reader.does(block)
        if page.name == "train.md":
            assert len(list((tmp_path / "pictures").rglob("*.png"))) == 20, (
                "every photo, of whatever kind"
            )
        # whoever ships other weights looks at the figure, and chooses another seed
        if page.name == "python.md":
            # alike on all machines
            monkeypatch.setattr(draw, "new_decoder", partial(new_decoder, precision="fp32"))
            made = linpix.sample("mnist-conditional", 12, seed=25).grid()
            same = np.array_equal(made, Image.open(ROOT / "docs/python.png"))
            assert same or not ops.compiled, "docs/python.png is not what the first example draws"
    finally:
        reader.leaves()


def test_blocks_that_are_not_run_are_these():
    found = [
        (page.name, block.text.splitlines()[0])
        for page in PAGES
        for block in blocks(page)
        if block.why
    ]
    assert found == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page):
    fences = re.findall(r"^```(\w*)", page.read_text(), re.M)
    assert all(language in ("sh", "python", "json") for language in fences[::2]), fences


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"no heading for {target}"


def anchors(page: Path) -> set[str]:
    """What a link may name of a page: its headings, as GitHub writes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, DECISIONS], ids=lambda page: page.name)
def test_every_source_file_that_a_page_names_exists(page):
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[^`\s:]*)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_decisions_are_rules_of_one_line_each_with_the_file_that_holds_them():
    text = DECISIONS.read_text().splitlines()
    rules = [
        line
        for line in text
        if line.startswith("|") and line not in ("| rule | why | file |", "|---|---|---|")
    ]
    assert len(text) <= 150
    assert len(rules) > 50
    for rule in rules:
        files = re.findall(r"`([^`]+)`", rule.strip("|").split("|")[-1])
        assert files, f"no file: {rule}"
        assert [path for path in files if not (ROOT / path).is_file()] == [], rule
