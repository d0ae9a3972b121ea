import dataclasses
import hashlib
import json
import resource
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from linpix.model import checkpoint, load
from linpix.model.checkpoint import read, save
from linpix.model.config import PRESETS
from linpix.model.provenance import CheckpointError
from linpix.model.transformer import Transformer
from tests.fuzz.harness import lay
from tests.nets import net_of
from tools.harness.commands import ROOT, python

PROVENANCE = {"data": "random", "steps": 3, "class_names": list("abcdefghij")}


def assert_same(ours: Transformer, theirs: Transformer) -> None:
    assert ours.config == theirs.config
    ours_state, theirs_state = ours.state_dict(), theirs.state_dict()
    assert ours_state.keys() == theirs_state.keys()
    assert all(torch.equal(ours_state[name], theirs_state[name]) for name in ours_state)


def seal(folder: Path) -> None:
    """Write SHA256SUMS anew, so that damage is found by what it is and not by its digest."""
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in (".json", ".safetensors")
        and path.is_file()
        and path.stat().st_size < 2**24
    ]
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums))


def change_tensors(folder: Path, **changes) -> None:
    """Replace, add or (None) remove tensors; `__` in a name stands for a dot."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    safetensors.torch.save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        folder / "model.safetensors",
    )
    seal(folder)


def change_fields(folder: Path, part: str = "", **changes) -> None:
    """Replace, add or (None) remove fields of a part of config.json, or of its outermost object."""
    fields = json.loads((folder / "config.json").read_text())
    inner = fields[part] if part else fields
    inner |= changes
    for name in [name for name, value in changes.items() if value is None]:
        del inner[name]
    (folder / "config.json").write_text(json.dumps(fields))
    seal(folder)


def assert_refused(folder: Path, message: str, name: str = "") -> None:
    """By a message that names the folder, or a file of it."""
    with pytest.raises(CheckpointError, match=message) as error:
        read(folder)
    assert str(folder / name) in str(error.value)


def test_a_saved_network_is_read_back_bit_for_bit(tmp_path):
    net = net_of(
        dataclasses.replace(PRESETS["tiny"], first_marginal=(0.5, 0.5) + (0.0,) * 254, classes=0)
    )
    save(tmp_path / "made" / "here", net, {"data": "random"}, "# here\n")
    found = read(tmp_path / "made" / "here")
    assert_same(found.net, net)
    assert (found.name, found.provenance, found.class_names) == ("here", {"data": "random"}, ())
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["here"]
    assert sorted(path.name for path in (tmp_path / "made" / "here").iterdir()) == [
        "README.md",
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
    ]
    assert (tmp_path / "made" / "here" / "README.md").read_text() == "# here\n"


def test_bf16_halves_the_file_and_rounds_all_weights_but_those_of_the_head(tmp_path):
    net = net_of(PRESETS["tiny"], seed=1)
    save(tmp_path / "full", net, PROVENANCE, "")
    save(tmp_path / "half", net, PROVENANCE, "", dtype=torch.bfloat16)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("full", "half")]
    assert sizes[1] < 0.6 * sizes[0]
    found = load(tmp_path / "half")
    for name, tensor in net.state_dict().items():
        assert found.state_dict()[name].dtype == torch.float32
        exact = name.startswith(("head.", "norm."))
        assert torch.equal(found.state_dict()[name], tensor if exact else tensor.bfloat16().float())
        assert exact or tensor.ndim < 2 or not torch.equal(found.state_dict()[name], tensor)


def test_a_file_of_tensors_says_what_it_is(tmp_path):
    save(tmp_path / "made", net := net_of(PRESETS["tiny"], seed=1), PROVENANCE, "# made\n")
    file = tmp_path / "made/model.safetensors"
    with safetensors.safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    assert metadata == {
        "format": "pt",
        "model": "LinPix 1, 8x8x1, linear attention",
        "digest": f"sha256:{hashlib.sha256(content[end:]).hexdigest()}",
    }
    assert (
        end % 8 == 0
        and content[end:] == safetensors.torch.save(net.state_dict())[-len(content) + end :]
    )


def test_large_checkpoints_are_cut_into_shards(tmp_path, monkeypatch):
    net = net_of(PRESETS["tiny"], seed=1)
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 4096)
    save(tmp_path / "cut", net, PROVENANCE, "")
    shards = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    for shard in shards:
        tensors = safetensors.torch.load_file(shard)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 4096
    assert_same(load(tmp_path / "cut"), net)


def test_the_digest_tells_checkpoints_apart_and_nothing_else(tmp_path):
    made = {
        "a": (1, PROVENANCE),
        "b": (1, PROVENANCE),
        "other weights": (2, PROVENANCE),
        "other facts": (1, PROVENANCE | {"steps": 4}),
    }
    for name, (seed, provenance) in made.items():
        save(tmp_path / name, net_of(PRESETS["tiny"], seed=seed), provenance, f"# {name}\n")
    a, b, weights, facts = (read(tmp_path / name).digest for name in made)
    assert a == b
    assert len({a, weights, facts}) == 3


def test_a_class_is_found_by_its_name_exactly_or_else_without_case_and_with_accents_of_either_form(
    folder,
):
    names = ["a", "A", "Caf\u00e9", "the\u0301", *"efghij"]
    change_fields(folder, "provenance", class_names=names)
    found = read(folder)
    asked = ["a", "A", "caf\u00e9", "CAFE\u0301", "th\u00e9", " th\u00c9 ", "3", "cafe"]
    assert [found.class_of(text) for text in asked] == [0, 1, 2, 2, 3, 3, 3, None]


def test_a_name_is_found_as_keyboards_write_it(folder):
    names = ["O'Neil", "\u0130zmir", "T-shirt", "Diyarbak\u0131r", "polar bear", *"ABCDE"]
    change_fields(folder, "provenance", class_names=names)
    asked = {
        "O\u2019Neil": 0,
        "o\u02bcneil": 0,
        "O`NEIL": 0,
        "izmir": 1,
        "IZMIR": 1,
        "i\u0307zmir": 1,
    }
    asked |= {
        "T\u2011shirt": 2,
        "DIYARBAKIR": 3,
        "diyarbakir": 3,
        "Polar\u00a0 bear": 4,
        "ONeil": None,
    }
    found = read(folder)
    assert {text: found.class_of(text) for text in asked} == asked


def test_names_of_any_whole_characters_are_read(folder):
    names = ["\U0001f469\u200d\U0001f52c", "\uffff", "e\u0301", *"abcdefg"]
    change_fields(folder, "provenance", class_names=names)
    assert read(folder).class_names == tuple(names)


def test_an_almost_blank_picture_is_torn_where_real_ones_have_more_ink(tiny):
    source = read(tiny)
    height, width = source.net.config.image_shape[:2]
    pictures = np.zeros((3, height, width), np.uint8)
    pictures[1, 2, 2:4] = pictures[2, 2:5, 2:5] = 255  # blank; a dot of 2 pixels; a figure of 9
    known, labels = np.zeros(pictures.shape, np.bool_), [0, 1, None]
    for look, torn in (
        ({"pieces": 0, "full_ink": 20}, [True, True, False]),
        ({"pieces": 0.5, "full_ink": 20}, [True, True, False]),
        ({"pieces": 0}, [False] * 3),  # of a checkpoint that does not say
        (None, [False] * 3),
    ):
        found = dataclasses.replace(
            source,
            provenance={"real_look": look},
            board={"ground": [0], "ink": [255], "prepare": None},
        )
        assert found.torn(pictures.reshape(3, -1), known.reshape(3, -1), labels) == torn


def test_a_checkpoint_from_before_a_field_was_added_has_its_default(folder):
    before = load(folder)
    change_fields(
        folder, "architecture", twin_of=None, first_marginal=None, scale_transform=None, eps=None
    )
    assert_same(load(folder), before)


def test_a_checkpoint_without_a_board_gets_the_ground_that_its_model_begins_with(tmp_path):
    for ground in (0, 255):
        tiny, net = PRESETS["tiny"], net_of(PRESETS["tiny"], seed=0)
        with torch.no_grad():
            net.head.weight.zero_()
            net.head.bias.zero_()
            net.head.bias[tiny.mixtures : 2 * tiny.mixtures] = ground / 127.5 - 1  # the means
        save(tmp_path / f"g{ground}", net, {"data": "mine"}, "")
        board = read(tmp_path / f"g{ground}").board
        assert board["ground"][0] == pytest.approx(ground, abs=1) and board["ink"] == [255 - ground]
        assert board["prepare"] is None, "only MNIST's digits are known to look as prepared ones"
    save(
        tmp_path / "stated",
        net,
        {"data": "mnist", "board": {"ground": [9], "ink": [70], "prepare": "mnist"}},
        "",
    )
    assert read(tmp_path / "stated").board == {"ground": [9], "ink": [70], "prepare": "mnist"}


TENSORS = {
    "missing": ({"layers__1__up__bias": None}, "lacks tensor layers.1.up.bias"),
    "unknown": ({"layers__2__up__bias": torch.zeros(32)}, "unknown tensor layers.2.up.bias"),
    "misshapen": (
        {"head__weight": torch.zeros(9, 15)},
        r"tensor head.weight has shape \(9, 15\).*\(9, 16\)",
    ),
    "transposed": (
        {"layers__0__down__weight": torch.zeros(32, 16)},
        "tensor layers.0.down.weight has shape",
    ),
    "NaN": (
        {"norm__bias": torch.full((16,), torch.nan)},
        "tensor norm.bias holds values that are not",
    ),
    "infinite": ({"norm__bias": torch.full((16,), -torch.inf)}, "tensor norm.bias holds values"),
    "infinite in float32": (
        {"norm__bias": torch.full((16,), 1e39, dtype=torch.float64)},
        "tensor norm.bias holds values that are not finite numbers in float32",
    ),
    "integers": (
        {"norm__bias": torch.zeros(16, dtype=torch.int32)},
        "tensor norm.bias holds values of torch.int32",
    ),
    "eight bits": (
        {"norm__bias": torch.zeros(16).to(torch.float8_e4m3fn)},
        "tensor norm.bias holds values of torch.float8_e4m3fn; expected one of torch.float32",
    ),
    "a terminal's": ({"\x1b[31m": torch.zeros(1)}, r"unknown tensor '\\x1b\[31m'"),
}


@pytest.mark.parametrize(("changes", "message"), TENSORS.values(), ids=TENSORS)
def test_a_wrong_tensor_is_refused_by_name(changes, message, folder):
    change_tensors(folder, **changes)
    assert_refused(folder, message)


@pytest.mark.parametrize(
    "change",
    [
        {"height": 2**40},
        {"height": 2**20, "width": 2**20},
        {"neighbours": [[-1, 0, 0]] * 257},
        {"neighbours": [[0, -(2**40), 0]]},
        {"layers": 2**20},
        {"d_model": 2**20, "d_ff": 2**20, "key_dim": 2**20},
        {"feature_map": "random", "random_features": 2**19},
        {"feature_map": "random", "key_dim": 2**19},
        {"random_features": 2**20, "mixtures": 2**20},
        {"classes": 2**20, "heads": 2**20, "value_dim": 2**20},
    ],
    ids=str,
)
def test_a_configuration_that_asks_for_more_than_there_is_costs_nothing(change, folder):
    """Found out by its numbers, or by shapes, before there is memory for any of it."""
    change_fields(folder, "architecture", **change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_refused(folder, r"config\.json")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


@pytest.mark.slow
def test_reading_a_checkpoint_does_not_wait_for_torchs_compiler():
    """Importing it takes as long as importing torch, at each start of a command or a server."""
    code = """if True:
        import sys
        from linpix.model import load
        for folder in sys.argv[1:]:
            load(folder)
        print(sys.modules.keys() & {"torch._dynamo", "sympy"})"""
    shipped = [path.parent for path in (ROOT / "checkpoints").glob("*/config.json")]
    assert len(shipped) > 3
    ended = python(code, *shipped)
    assert ended.stdout == "set()\n", ended.stderr


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "SHA256SUMS"])
@pytest.mark.parametrize("what", ["pipe", "endless", "itself"])
def test_a_file_that_is_not_regular_is_refused_without_waiting(name, what, folder):
    (folder / name).unlink()
    lay(folder / name, what)
    assert_refused(folder, "regular file|cannot be read|missing or unreadable", name)


@pytest.mark.parametrize("name", ["config.json", "SHA256SUMS"])
def test_a_text_without_end_is_refused_before_it_is_read(name, folder):
    with (folder / name).open("r+b") as file:
        file.truncate(2**34)  # a hole, of which the disk has nothing
    assert_refused(folder, "is longer than 1,048,576 bytes: 17,179,869,184", name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_one_changed_bit_is_found_by_its_digest(name, at, folder):
    raw = bytearray((folder / name).read_bytes())
    raw[int(at * (len(raw) - 1))] ^= 1
    (folder / name).write_bytes(raw)
    assert_refused(folder, "has SHA-256 .*SHA256SUMS says .*restore", name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "SHA256SUMS"])
def test_a_missing_file_is_named(name, folder):
    (folder / name).unlink()
    assert_refused(folder, name, name)


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        ("", "lists no config.json"),
        ("garbage\n", "missing or unreadable"),
        ("0  config.json\n", r"lists no \*\.safetensors"),
        ("0  ../tiny/model.safetensors\n0  config.json\n", "which is not a file name"),
        ("0  config.json\0\n0  config.json\n0  model.safetensors\n", "cannot be read"),
    ],
)
def test_a_wrong_list_of_digests_is_refused(sums, message, folder):
    (folder / "SHA256SUMS").write_text(sums)
    assert_refused(folder, message)


def test_a_tensor_in_two_shards_is_refused_by_name(folder):
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(
        {"head.bias": tensors["head.bias"] + 1}, folder / "more.safetensors"
    )
    seal(folder)
    assert_refused(folder, r"has tensor head\.bias twice", "more.safetensors")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="mnist is not a checkpoint folder"):
        load(tmp_path / "mnist")


def test_a_save_replaces_the_folder_whole(folder, monkeypatch):
    (folder / "left over").touch()
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 4096)
    save(folder, net_of(PRESETS["tiny"], seed=7), PROVENANCE, "")
    assert_same(load(folder), net_of(PRESETS["tiny"], seed=7))
    assert not (folder / "left over").exists() and not (folder / "model.safetensors").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


class PowerCut(BaseException):
    """Nothing may catch it."""


def cut(*_, **__):
    raise PowerCut


@pytest.mark.parametrize(
    "name", ["safetensors.torch.save", "json.dumps", "hashlib.sha256", "pathlib.Path.rename"]
)
def test_an_interrupted_save_leaves_the_old_checkpoint(name, folder, monkeypatch):
    before = load(folder)
    with monkeypatch.context() as patch:
        patch.setattr(name, cut)
        with pytest.raises(PowerCut):
            save(folder, net_of(PRESETS["tiny"], seed=7), PROVENANCE, "")
    assert_same(load(folder), before)
    save(folder, net_of(PRESETS["tiny"], seed=7), PROVENANCE, "")
    assert_same(load(folder), net_of(PRESETS["tiny"], seed=7))


def test_a_save_cut_between_its_renames_loses_nothing_and_says_where_it_is(folder, monkeypatch):
    before, rename = load(folder), Path.rename

    def cut_the_second(path: Path, target: Path) -> Path:
        if path.name.endswith(".new"):
            raise PowerCut
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", cut_the_second)
        with pytest.raises(PowerCut):
            save(folder, net_of(PRESETS["tiny"], seed=7), PROVENANCE, "")
    with pytest.raises(CheckpointError, match=r"interrupted save left .*tiny\.new and .*tiny\.old"):
        load(folder)
    assert_same(load(folder.with_name("tiny.new")), net_of(PRESETS["tiny"], seed=7))
    assert_same(load(folder.with_name("tiny.old")), before)
    # cut again, early: the old checkpoint is back under its name
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save", cut)
        with pytest.raises(PowerCut):
            save(folder, net_of(PRESETS["tiny"], seed=8), PROVENANCE, "")
    assert_same(load(folder), before)
