"""How large and how dense the code is: `python -m tools.house` prints a table, a row for each room.

Tokens are those of Python's tokenizer without comments, docstrings, layout and trailing commas, so
neither long lines nor blank ones move them much. An expression is folded if a reader has to take it
apart: a comprehension inside another one, or with two loops; a conditional expression inside a
call, a comprehension, a dictionary, an f-string or another conditional expression; a walrus that is
not simply what `if` or `while` tests; `zip(*...)`. `any` counts all comprehensions, conditional
expressions, walruses and lambdas. `--json` prints one object.
"""

import ast
import io
import json
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    "server": "server + linpix",
    "linpix": "server + linpix",
    "model": "model",
    "training": "training",
    "tests": "tests + tools + examples",
    "tools": "tests + tools + examples",
    "examples": "tests + tools + examples",
}
LONGEST_LINE = 100
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
UNFIT_FOR_CONDITIONS = (ast.Call, ast.IfExp, ast.Dict, ast.JoinedStr, *COMPREHENSIONS)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Size:
    """Counts over the files of one room."""

    lines: int = 0
    long_lines: int = 0
    tokens: int = 0
    statements: int = 0
    folded: int = 0
    any: int = 0

    def add(self, source: str) -> None:
        tree = ast.parse(source)
        lines = source.splitlines()
        self.lines += len(lines)
        self.long_lines += sum(len(line) > LONGEST_LINE for line in lines)
        self.tokens += tokens(source, tree)
        self.statements += sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
        self.folded += sum(1 for _ in folded(tree))
        self.any += sum(dense(node) for node in ast.walk(tree))


def docstrings(tree: ast.AST) -> set[tuple[int, int]]:
    """Where the docstrings of a file begin: line and column."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            found.add((node.body[0].lineno, node.body[0].col_offset))
    return found


def tokens(source: str, tree: ast.AST) -> int:
    """Tokens of a file that say something: see the module."""
    prose = docstrings(tree)
    count, comma = 0, False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in LAYOUT or token.start in prose:
            continue
        if comma and token.string in (")", "]", "}"):
            count -= 1  # the formatter's trailing comma
        count += 1
        comma = token.string == ","
    return count


def dense(node: ast.AST) -> bool:
    return isinstance(node, (*COMPREHENSIONS, ast.IfExp, ast.NamedExpr, ast.Lambda))


def folded(tree: ast.AST) -> Iterator[ast.AST]:
    """The expressions of a file that a reader has to take apart."""
    parent_of: dict[ast.AST, ast.AST] = {}
    for parent in ast.walk(tree):
        for child in ast.iter_child_nodes(parent):
            parent_of[child] = parent
    for node in ast.walk(tree):
        around = enclosing(node, parent_of)
        if isinstance(node, COMPREHENSIONS):
            within = any(isinstance(outer, COMPREHENSIONS) for outer in around)
            if within or len(node.generators) > 1:
                yield node
        elif isinstance(node, ast.IfExp):
            if any(isinstance(outer, UNFIT_FOR_CONDITIONS) for outer in around):
                yield node
        elif isinstance(node, ast.NamedExpr):
            if not simple_test(node, parent_of):
                yield node
        elif is_transposition(node):
            yield node


def enclosing(node: ast.AST, parent_of: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    """The expressions around a node, from the inside out, up to its statement."""
    outer = parent_of.get(node)
    while outer is not None and not isinstance(outer, ast.stmt):
        yield outer
        outer = parent_of.get(outer)


def simple_test(node: ast.NamedExpr, parent_of: dict[ast.AST, ast.AST]) -> bool:
    """Whether `if` or `while` tests just this walrus, or one comparison of it."""
    outer = parent_of[node]
    if isinstance(outer, (ast.Compare, ast.UnaryOp)):
        outer = parent_of[outer]
    return isinstance(outer, (ast.If, ast.While))


def is_transposition(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    return node.func.id == "zip" and any(isinstance(arg, ast.Starred) for arg in node.args)


def tracked(*patterns: str) -> list[Path]:
    """The files of the repository that match, without links."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", *patterns]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    paths = (ROOT / name for name in names.split("\0") if name)
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def rooms() -> dict[str, Size]:
    """The sizes of all rooms with Python."""
    found = {name: Size() for name in dict.fromkeys(ROOMS.values())}
    for path in tracked("*.py"):
        folder = path.relative_to(ROOT).parts[0]
        if folder in ROOMS:
            found[ROOMS[folder]].add(path.read_text())
    return found


def other_lines() -> dict[str, int]:
    """Lines of what is not Python, without what others wrote."""
    csrc = tracked("csrc")
    page = [path for path in tracked("server/static") if path.suffix in (".js", ".html", ".css")]
    ours = [path for path in page if "swagger" not in path.name]
    return {"csrc": lines_of(csrc), "server/static": lines_of(ours)}


def lines_of(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def main() -> None:
    sizes, lines = rooms(), other_lines()
    if "--json" in sys.argv:
        python = {room: asdict(size) for room, size in sizes.items()}
        print(json.dumps({"python": python, "lines": lines}))
        return
    print(f"{'':26}{'tokens':>8}{'lines':>8}{'long':>6}{'folded in 100':>15}{'any in 100':>12}")
    for room, size in sizes.items():
        share = 100 / size.statements
        print(
            f"{room:26}{size.tokens:8,}{size.lines:8,}{size.long_lines:6,}"
            f"{size.folded * share:15.1f}{size.any * share:12.1f}"
        )
    for room, count in lines.items():
        print(f"{room:34}{count:8,}")


if __name__ == "__main__":
    main()
