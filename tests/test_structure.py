"""The rooms and their doors: who may import whom (DECISIONS.md says why)."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("model", "server", "training", "linpix")
FILES = sorted(path for room in ROOMS for path in [*(ROOT / room).rglob("*.py"), ROOT / f"{room}.py"] if path.exists())


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, by its full name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {f"{node.module}.{name.name}" for name in node.names} | {str(node.module)}
    return found


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_are_files_to_look_at():
    assert len(FILES) > 25


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) == "model"], ids=names)
def test_model_imports_torch_numpy_and_safetensors_only(path):
    assert tops(path) <= {"model", "torch", "numpy", "safetensors"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) in ("server", "training")], ids=names)
def test_server_and_training_do_not_know_each_other_nor_the_command_line(path):
    assert not tops(path) & ({"server", "training", "linpix"} - {room_of(path)})


def test_the_scheduler_imports_neither_torch_nor_anything_of_ours():
    assert tops(ROOT / "server/scheduler.py") <= sys.stdlib_module_names


def test_only_the_worker_knows_both_threads_and_asyncio():
    both = [names(path) for path in FILES if {"threading", "asyncio"} <= tops(path)]
    assert both == ["server/worker.py"]


@pytest.mark.parametrize("room", ["model", "server", "training"])
def test_imports_within_a_room_go_one_way(room):
    files = {names(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
             for path in (ROOT / room).rglob("*.py") if path != ROOT / room / "__init__.py"}
    graph = {name: imports(path) & files.keys() for name, path in files.items()}
    while graph:
        leaves = [name for name, wanted in graph.items() if not wanted & graph.keys()]
        assert leaves, f"a circle among {sorted(graph)}"
        for name in leaves:
            del graph[name]


def test_a_step_of_the_engine_reads_in_under_sixty_lines():
    tree = ast.parse((ROOT / "server/engine.py").read_text())
    [engine] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Engine"]
    functions = [node for node in engine.body if isinstance(node, ast.FunctionDef)]
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    assert lengths["quantum"] + lengths["step"] < 60


def test_there_are_at_most_eighty_source_files():
    assert len([path for path in FILES if path.read_text()]) <= 80
