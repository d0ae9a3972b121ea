"""Which rooms may import which (DECISIONS.md says why). A room is named by its folder:
`linpix.server` is `server`.
"""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tools.house import ROOT, tokens

ROOMS = ("model", "server", "training", "linpix")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, by its full name. It imports its own room
    relatively, so that an import by a full name is one that leaves the room."""
    found, package = set(), path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                assert node.level <= len(package), f"{path} leaves its room by a relative import"
                module = ".".join(
                    [*package[: len(package) - node.level + 1], *([module] if module else [])]
                )
            else:
                assert module.split(".")[0] not in ROOMS[:-1], (
                    f"{path}: {module} does not say linpix"
                )
                if module.split(".")[1:2] and module.split(".")[1] in ROOMS[:-1]:
                    module = module.removeprefix("linpix.")
                assert module.split(".")[0] != package[0], f"{path}: {module} is in its own room"
            found |= {f"{module}.{name.name}" for name in node.names} | {module}
    return found - {"linpix"}


def test_an_installation_has_every_folder_of_python_files():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    folders = {path.parent.relative_to(ROOT).parts for path in FILES}
    assert sorted(packages) == sorted(
        ".".join(parts if parts[0] == "linpix" else ("linpix", *parts)) for parts in folders
    )


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) == "model"], ids=names)
def test_model_imports_torch_numpy_and_safetensors_only(path):
    assert tops(path) <= {"model", "torch", "numpy", "safetensors"} | sys.stdlib_module_names


@pytest.mark.parametrize(
    "path", [path for path in FILES if room_of(path) in ("server", "training")], ids=names
)
def test_server_and_training_import_neither_each_other_nor_the_command_line(path):
    assert not tops(path) & ({"server", "training", "linpix"} - {room_of(path)})


def test_tools_import_no_tests():
    """Tests import tools: what both use is in tools/harness."""
    importing = re.compile(r"^ *(?:from|import) tests\b", re.MULTILINE)
    tools = sorted((ROOT / "tools").rglob("*.py"))
    assert tools and not [names(path) for path in tools if importing.search(path.read_text())]


def test_the_scheduler_imports_no_torch():
    assert "torch" not in tops(ROOT / "server/engine/decode/scheduler.py")


def test_no_file_imports_both_threading_and_asyncio():
    assert not [names(path) for path in FILES if {"threading", "asyncio"} <= tops(path)]


def test_the_event_loop_and_the_engine_thread_share_nothing_that_needs_a_lock():
    words = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"}
    locking = {
        names(path)
        for path in FILES
        if room_of(path) == "server"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and node.attr in words
        and isinstance(node.value, ast.Name)
        and node.value.id == "threading"
    }
    assert locking == set()
    threads = {
        names(path) for path in FILES if room_of(path) == "server" and "threading" in tops(path)
    }
    assert threads == {"server/cluster/local.py", "server/engine/thread.py", "server/logs.py"}


def test_only_the_engine_thread_and_bulk_work_run_quanta():
    running = {
        names(path)
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr == "run_quantum"
    }
    assert running == {"server/engine/thread.py", "linpix/cli/draw.py"}


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if room_of(path) == "server" or path.parent.name == "cli"],
    ids=names,
)
def test_a_file_of_the_server_or_the_commands_is_not_too_long(path):
    assert tokens(path.read_text(), tree_of(path)) <= 3_500


@pytest.mark.parametrize("room", ["server", "linpix"])
def test_each_file_of_a_room_has_a_test_of_its_name_or_is_in_the_map_of_tests(room):
    tests = ROOT / "tests" / room
    told = set(
        re.findall(
            r"[\w/]+", ast.get_docstring(ast.parse((tests / "__init__.py").read_text())) or ""
        )
    )
    files = {
        path.relative_to(ROOT / room).with_suffix("")
        for path in (ROOT / room).rglob("*.py")
        if path.name != "__init__.py"
    }
    found = {path.relative_to(tests).with_suffix("") for path in tests.rglob("test_*.py")}
    mirrored = {path for path in files if path.with_name(f"test_{path.name}") in found}
    assert {str(path) for path in files - mirrored} == {
        word for word in told if Path(word) in files
    }
    named = {
        word for word in told if Path(word).name.startswith("test_") and word != "ROOM/test_FILE"
    }
    assert {str(path) for path in found} >= named
    assert {
        str(path) for path in found if path.with_name(path.name.removeprefix("test_")) not in files
    } <= named


@pytest.mark.parametrize("room", ROOMS)
def test_imports_within_a_room_go_one_way(room):
    files = {
        names(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in (ROOT / room).rglob("*.py")
        if path != ROOT / room / "__init__.py"
    }
    graph = {name: imports(path) & files.keys() for name, path in files.items()}
    while graph:
        leaves = [name for name, wanted in graph.items() if not wanted & graph.keys()]
        assert leaves, f"a circle among {sorted(graph)}"
        for name in leaves:
            del graph[name]


BELOW = {  # a room of the server imports its own files, base files, and these rooms below it
    "pictures": set(),
    "engine": set(),
    "compare": {"engine"},
    "web": {"compare", "engine", "pictures"},
    "cluster": {"app", "compare", "engine", "serve", "web"},
}
BASE = {"errors", "fault_rules", "listening", "logs", "memory", "metrics", "origins", "settings"}


def server_room(module: str) -> str:
    """The room that a module of the server is in, or its own name for a file of the base."""
    return module.split(".")[1]


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) == "server"], ids=names)
def test_rooms_of_the_server_import_only_rooms_below_them(path):
    own = server_room(names(path).removesuffix(".py").replace("/", "."))
    seen = {server_room(name) for name in imports(path) if name.startswith("server.")} - {own}
    if own in BELOW:
        assert seen <= BASE | BELOW[own]
    elif own in BASE:
        assert seen <= BASE


@pytest.mark.parametrize(
    "room",
    sorted({path.parent for path in FILES if room_of(path) in ("server", "linpix")}),
    ids=names,
)
def test_a_room_has_at_most_ten_files(room):
    assert len([path for path in room.glob("*.py") if path.name != "__init__.py"]) <= 10


def test_only_two_files_of_cluster_import_ray():
    knowing = {names(path) for path in FILES if "ray" in tops(path)}
    assert knowing == {f"server/cluster/{name}.py" for name in ("deployments", "local")}


def test_a_plain_server_starts_without_ray():
    code = "import sys, linpix.server.serve, linpix.cli.commands; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_web_app_and_serve_import_fastapi():
    knowing = {
        server_room(names(path).removesuffix(".py").replace("/", "."))
        for path in FILES
        if room_of(path) == "server" and tops(path) & {"fastapi", "starlette"}
    }
    assert knowing == {"web", "app", "serve"}
