"""Every file of examples/, run as a reader would run it, against a server of the shipped
mnist-small.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.linpix.test_main import pixels
from tests.server.web.test_openai import OLD_CLIENT
from tools.harness.commands import ROOT
from tools.harness.servers import Quiet, listening, serving

FOLDER = ROOT / "examples"
NODE_MODULES = Path(sys.prefix) / "node_modules"  # where `make test` puts the openai package of npm
TOURS = {
    "curl.sh": "bash",
    "httpx_python.py": sys.executable,
    "requests_python.py": sys.executable,
    "openai_python.py": sys.executable,
    "openai_node.mjs": "node",
}
CLIENTS = [
    "curl.sh",
    "openai_python.py",
    *(
        pytest.param(client, marks=pytest.mark.slow)
        for client in (
            "httpx_python.py",
            "requests_python.py",
            "openai_node.mjs",
            "openai_python.py, openai 1.x",
        )
    ),
]
PARTIAL_ROWS = (5, 11, 16, 22)  # of 28: four partial images, evenly spread


@pytest.fixture(scope="module")
def server():
    with serving(ROOT / "checkpoints", "--models mnist-small,mnist-conditional") as process:
        yield process


def run(
    client: str, folder: Path, url: str, key: str = "none", *, script: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a client of CLIENTS in a folder, or another script for it; skips where what it needs is
    not there.
    """
    name = client.split(",")[0]
    program, script = shutil.which(TOURS.get(name, sys.executable)), script or FOLDER / name
    environment = os.environ | {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
    if client == "openai_python.py, openai 1.x":
        if not OLD_CLIENT.is_dir():
            pytest.skip(f"openai 1.x is not at {OLD_CLIENT}; make venv installs it there")
        environment["PYTHONPATH"] = str(OLD_CLIENT)
    if name.endswith(".sh") and (program is None or shutil.which("curl") is None):
        pytest.skip("bash and curl are not both on the PATH")
    if name.endswith(".mjs"):
        if program is None or not (NODE_MODULES / "openai").is_dir():
            pytest.skip(
                f"node is not on the PATH, or npm's openai not in {NODE_MODULES}; where npm is,"
                " make test puts it there"
            )
        if script.parent != folder:
            script = shutil.copy(script, folder)  # node looks for modules from where a file is
        (folder / "node_modules").symlink_to(NODE_MODULES)
    return subprocess.run(
        [str(program), str(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_example_is_run_here():
    # of the last two, tests/server/cluster/test_deploy.py and tests/linpix/test_plugins.py
    others = {"README.md", "digits.gif", "kubernetes", "gated.py", "__pycache__"}
    assert {path.name for path in FOLDER.iterdir()} - others == {*TOURS, "quickstart.py"}


def shows(partial: np.ndarray, whole: np.ndarray, rows: int) -> bool:
    """Whether a picture of 10 pixels a cell is the first rows of another one, and black below."""
    return (
        np.array_equal(partial[: 10 * rows], whole[: 10 * rows]) and not partial[10 * rows :].any()
    )


@pytest.mark.parametrize("client", CLIENTS)
def test_an_example_draws_streams_and_completes(client, server, tmp_path):
    ended = run(client, tmp_path, server.url)
    assert ended.returncode == 0, ended.stderr
    pictures = {path.name: pixels(path) for path in tmp_path.glob("*.png")}
    streamed = sorted(name for name in pictures if name.startswith("streamed-"))
    assert streamed == [f"streamed-{number}.png" for number in range(len(streamed))]
    assert pictures.keys() == {"drawn.png", "completed.png", *streamed}
    for picture in pictures.values():
        assert picture.shape == (280, 280)
        assert np.array_equal(picture, picture[::10, ::10].repeat(10, axis=0).repeat(10, axis=1))
    drawn, completed = pictures["drawn.png"], pictures["completed.png"]
    *partial, whole = (pictures[name] for name in streamed)
    assert drawn.max() > 200 and whole.max() > 200 and not np.array_equal(drawn, whole)
    # a server that encodes more slowly than it draws leaves out partial images, never the last one
    shown = [[rows for rows in PARTIAL_ROWS if shows(each, whole, rows)] for each in partial]
    assert all(shown) and shown == sorted(shown) and PARTIAL_ROWS[-1] in shown[-1]
    # no seed is given, so what is drawn below may be anything, even the same again
    assert np.array_equal(completed[:140], drawn[:140])


@pytest.mark.parametrize("client", [*CLIENTS, "quickstart.py"])
def test_an_example_sends_the_key_and_fails_when_it_is_refused(client, tmp_path):
    keys = []

    class Refusing(Quiet):
        """A server that wants another key."""

        def do_POST(self) -> None:
            keys.append(self.headers["authorization"])
            self.rfile.read(int(self.headers["content-length"]))
            error = {
                "message": "wrong key",
                "type": "authentication_error",
                "param": None,
                "code": "invalid_api_key",
            }
            self.answer(json.dumps({"error": error}).encode(), "application/json", 401)

    with listening(Refusing) as url:
        ended = run(client, tmp_path, url, "a-key")
    assert ended.returncode != 0
    assert keys == ["Bearer a-key"]
    assert "401" in ended.stderr


# --- the quickstart ---


def panels(grid: np.ndarray) -> list[np.ndarray]:
    assert grid.shape == (448, 448)
    return [
        grid[top : top + 112, left : left + 112]
        for top in range(0, 448, 112)
        for left in range(0, 448, 112)
    ]


def test_the_quickstart_writes_a_grid_of_sixteen_digits(server, tmp_path):
    ended = run("quickstart.py", tmp_path, server.url)
    assert ended.returncode == 0, ended.stderr
    digits = panels(pixels(tmp_path / "quickstart.png"))
    assert all(digit.max() > 200 for digit in digits)
    assert len({digit.tobytes() for digit in digits}) == 16
