"""Any checkpoint folder is read whole, or refused with the name of the file, tensor or field."""

import contextlib
import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from linpix.model.checkpoint import read
from linpix.model.provenance import CheckpointError
from tests.fuzz.harness import Target, lay
from tests.model.test_checkpoint import seal

pytestmark = pytest.mark.slow

FOLDER = r".*/fuzzed"
FIELD = (
    r"(format_version|height|width|channels|layers|heads|key_dim|value_dim|d_model|d_ff|mixtures|attention|"
    r"feature_map|random_features|lsh_\w+|eps|norm|residual|reversible"
    r" residuals|activation|look_ups|"
    r"(a )?neighbours?|neighbour \(.*\)|classes|scale_transform|first_marginal|a model without a"
    r" start token|"
    r"twin_of|the architecture|unknown configuration"
    r" fields|provenance|class_names|bits_per_dim|created|images|"
    r"steps|minutes)"
)
KINDS = {
    "digest": rf"{FOLDER}/\S+ has SHA-256 .*, but SHA256SUMS says .*; restore it .*",
    "list of digests": rf"{FOLDER}/SHA256SUMS (is missing or unreadable|lists) .*",
    "file": rf"{FOLDER}/?.* is listed in SHA256SUMS but cannot be read \(.*\); restore it .*",
    "field": rf"{FOLDER}/config\.json: {FIELD}\b.*",
    "missing field": rf"{FOLDER}/config\.json lacks '(architecture|provenance)'; restore it .*",
    "JSON": (
        rf"{FOLDER}/config\.json( is no JSON)?: (is not a regular file|is longer|must be a JSON"
        r" object|contains \S+, which "
        r"is not|"
        r".* is given twice|Expecting|Extra data|Unterminated|Invalid|'utf-8' codec|Exceeds the"
        r" limit|"
        r"maximum recursion|Unpaired|Illegal).*"
    ),
    "too large": rf"{FOLDER}/config\.json (describes tensors too large|needs \d+ layers).*",
    "safetensors": rf"{FOLDER}/\S+ is not a safetensors file \(.*\); restore it .*",
    "tensor": rf"{FOLDER}:? (lacks|has the unknown|tensor) .*|{FOLDER}/\S+ has tensor .* twice; .*",
}
HOSTILE = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    63,
    64,
    65,
    2**16,
    2**20,
    2**31,
    2**40,
    2**63,
    10**30,
    0.5,
    -0.0,
    1e-6,
    1e308,
    "",
    "x",
    "..",
    "/etc/passwd",
    "\0",
    "\ud800",
    "1" * 300,
    [],
    [[]],
    [1] * 300,
    {},
    {"x": {}},
    [[-1, 0, 0]] * 300,
    [[0, -(2**40), 0]],
    ["previous"],
    ["previous", "previous"],
    [0.0] * 255 + [1.0],
    [1.0] + [0.0] * 255,
    "softmax",
    "lsh",
    "random",
    "polynomial",
    "reversible",
    "pre",
    "post",
]
TEXTS = [
    b"",
    b"{",
    b"[" * 100_000,
    b"null",
    b"\xff\xfe",
    b'{"format_version": 1}',
    b'{"a": 1, "a": 2}',
    b"1e999",
    b'{"format_version": 1, "architecture": NaN}',
    b"9" * 5000,
    b" " * 2**20 + b"{}",
]
NAMES = [
    "..",
    ".",
    "",
    "../fuzzed/config.json",
    "/etc/passwd",
    "a/b.safetensors",
    "x\0.safetensors",
    "\x1b[31m",
    "config.json ",
    "README.md",
    "absent.safetensors",
    "\u2028",
    "x" * 5000,
]
DTYPES = ["F64", "F16", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "C64", "I32", "BOOL", "U64"]
TENSORS = ["head.bias", "layers.7.up.bias", "__metadata__", "", "../x", "\x1b[31m"]
SHAPES = [[], [0], [2**62, 4], [2**40], [-1], [1, 1, 1], [0, 2**63], [4, 0]]
HEADERS = [*DTYPES, *TENSORS, *SHAPES, None, {}]

Change = tuple[Any, ...]


def _changes() -> st.SearchStrategy[tuple[list[Change], bool]]:
    """What is done to a folder, one after the other, before it is read; and whether digests fit
    what was done.
    """
    hostile, spots = st.sampled_from(HOSTILE), st.floats(0, 1, exclude_max=True)
    places = st.sampled_from(["architecture", "provenance", "top"])
    files = st.sampled_from(["config.json", "model.safetensors", "SHA256SUMS"])
    new_names = st.sampled_from(["depth", "twin_of", "bits_per_dim", "images", "", "\ud800"])
    parts = st.sampled_from(["dtype", "shape", "data_offsets", "name", "more", "drop"])
    lengths = st.sampled_from([0, 1, 7, 2**20, 2**27, 2**32, 2**63, 2**64 - 1])
    not_finite = st.sampled_from([b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\xff\xff\x7f\x7f"])
    laid = st.sampled_from(["nothing", "folder", "pipe", "endless", "itself", "elsewhere"])
    drawn_from = {
        "field": (places, spots, hostile),
        "new field": (places, new_names, hostile),
        "text": (st.sampled_from(TEXTS),),
        "header": (parts, spots, st.sampled_from(HEADERS)),
        "swap": (spots, spots),
        "length": (lengths,),
        "flip": (files, spots, st.integers(0, 255)),
        "NaN": (spots, not_finite),
        "cut": (files, spots),
        "listed": (st.sampled_from(NAMES),),
        "instead": (files, laid),
        "second shard": (spots,),
    }
    one = st.one_of([st.tuples(st.just(name), *how) for name, how in drawn_from.items()])
    return st.tuples(st.lists(one, max_size=4), st.sampled_from([True, True, True, False]))


class Folder:
    """A checkpoint folder in the making."""

    def __init__(self, path: Path, original: Path) -> None:
        self.path = path
        shutil.copytree(original, path)

    def make(self, changes: list[Change], sealed: bool) -> None:
        """What replaces a file comes last, and changes of the list of digests after the list was
        made.
        """
        changes = sorted(changes, key=lambda change: change[0] == "instead")
        of_the_list = [
            change for change in changes if change[0] == "listed" or "SHA256SUMS" in change
        ]
        self._do([change for change in changes if change not in of_the_list])
        if sealed:
            seal(self.path)
        self._do(of_the_list)

    def _do(self, changes: list[Change]) -> None:
        for what, *how in changes:
            with contextlib.suppress(
                OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError
            ):
                getattr(self, what.replace(" ", "_"))(*how)  # what is there may be broken already

    def _change_fields(self, change: Callable[[dict[str, Any]], None]) -> None:
        path = self.path / "config.json"
        fields = json.loads(path.read_text())
        change(fields)
        path.write_text(json.dumps(fields))

    def field(self, where: str, spot: float, value: Any) -> None:
        def change(fields: dict[str, Any]) -> None:
            inner = fields if where == "top" else fields[where]
            inner[sorted(inner)[int(spot * len(inner))]] = copy.deepcopy(value)

        self._change_fields(change)

    def new_field(self, where: str, name: str, value: Any) -> None:
        self._change_fields(
            lambda fields: (fields if where == "top" else fields[where]).update({name: value})
        )

    def text(self, raw: bytes) -> None:
        (self.path / "config.json").write_bytes(raw)

    def _change_header(self, change: Callable[[dict[str, Any]], None]) -> None:
        path = self.path / "model.safetensors"
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    def header(self, what: str, spot: float, value: Any) -> None:
        def change(header: dict[str, Any]) -> None:
            name = sorted(header)[int(spot * len(header))]
            if what == "drop":
                del header[name]
            elif what in ("name", "more"):
                header[str(value)] = header[name] if what == "more" else header.pop(name)
            else:
                header[name][what] = value

        self._change_header(change)

    def swap(self, spot: float, other: float) -> None:
        def change(header: dict[str, Any]) -> None:
            names = sorted(header)
            a, b = names[int(spot * len(names))], names[int(other * len(names))]
            header[a], header[b] = header[b], header[a]

        self._change_header(change)

    def length(self, value: int) -> None:
        path = self.path / "model.safetensors"
        path.write_bytes(value.to_bytes(8, "little") + path.read_bytes()[8:])

    def flip(self, name: str, spot: float, value: int) -> None:
        raw = bytearray((self.path / name).read_bytes())
        raw[int(spot * len(raw))] ^= value
        (self.path / name).write_bytes(raw)

    def NaN(self, spot: float, value: bytes) -> None:
        path = self.path / "model.safetensors"
        raw = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        at = start + int(spot * (len(raw) - start)) // 4 * 4
        raw[at : at + 4] = value
        path.write_bytes(raw)

    def cut(self, name: str, spot: float) -> None:
        raw = (self.path / name).read_bytes()
        (self.path / name).write_bytes(raw[: int(spot * len(raw))])

    def listed(self, name: str) -> None:
        path = self.path / "SHA256SUMS"
        path.write_text(path.read_text() + f"{'0' * 64}  {name}\n")

    def instead(self, name: str, what: str) -> None:
        (self.path / name).unlink()
        lay(self.path / name, what)

    def second_shard(self, spot: float) -> None:
        raw = (self.path / "model.safetensors").read_bytes()
        (self.path / "more.safetensors").write_bytes(
            raw[: int(spot * len(raw))] if spot < 0.5 else raw
        )


@pytest.fixture(scope="module")
def checkpoints(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Target[tuple[list[Change], bool]]:
    at = tmp_path_factory.mktemp("fuzz") / "fuzzed"

    def read_changed(case: tuple[list[Change], bool]) -> None:
        shutil.rmtree(at, ignore_errors=True)
        Folder(at, tiny).make(*case)
        found = read(at)
        assert all(bool(tensor.isfinite().all()) for tensor in found.net.state_dict().values())
        assert len(found.class_names) <= found.net.config.classes

    return Target(
        "checkpoint folders", _changes(), read_changed, (CheckpointError,), KINDS, share=10
    )


def test_any_checkpoint_folder_is_read_or_refused_with_what_is_wrong_in_it(run, checkpoints):
    run(checkpoints)
