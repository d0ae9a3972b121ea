"""sample --shards: the contents of shards; an interrupted command ends with the same shards as an
uninterrupted one.
"""

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import tarfile
from pathlib import Path

import pytest
import webdataset

from tests.linpix.test_main import inside, linpix, reported
from tests.nets import CONDITIONAL, saved
from tools.harness.commands import python

ENGINES = [
    pytest.param("compiled", marks=pytest.mark.kernels),
    pytest.param("eager", marks=pytest.mark.slow),
]


def sampled(*flags) -> dict:
    """What `linpix sample` says of what it has drawn."""
    return reported("sample", *flags)


def refusal(*flags) -> str:
    refused = inside("sample", *flags)
    assert refused.returncode == 2
    return refused.stderr


@pytest.fixture(scope="module")
def skipping(tmp_path_factory) -> Path:
    """A checkpoint that draws the class first, and whose images end at different times: background
    skips the layers.
    """
    config = dataclasses.replace(CONDITIONAL, following=((0, 1, 0), (1, 0, 0), (1, 1, 0)))
    return saved(
        tmp_path_factory.mktemp("checkpoints") / "skipping", config, class_names=list("abcdefghij")
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below folder, by its path there."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_shards_hold_the_images_that_sample_draws_each_once_with_what_they_are(tiny, tmp_path):
    asked = f"--model {tiny} --count 11 --seed 7 --label 3 --batch 4 --out"
    told = sampled(asked, f"{tmp_path}/shards --shards 3")
    sampled(asked, f"{tmp_path}/one/")
    assert (told["images"], told["drawn"], told["seed"], told["shards"]) == (11, 11, 7, 3)
    assert told["files"] == [f"{tmp_path}/shards/shard-0000{shard}.tar" for shard in range(3)]
    found: dict[str, bytes] = {}
    for file, count in zip(told["files"], (3, 4, 4), strict=True):
        with tarfile.open(file) as tar:
            members = tar.getmembers()
            assert len(members) == 2 * count
            assert {
                (member.mtime, member.uid, member.gid, member.uname, member.gname, member.mode)
                for member in members
            } == {(0, 0, 0, "", "", 0o644)}
            found |= {member.name: tar.extractfile(member).read() for member in members}
    assert list(found) == [f"{index:09}.{kind}" for index in range(11) for kind in ("png", "json")]
    for index in range(11):
        assert (
            found[f"{index:09}.png"] == (tmp_path / f"one/{index:05}-{7 + index}.png").read_bytes()
        )
        facts = json.loads(found[f"{index:09}.json"])
        assert (facts["seed"], facts["label"], facts["class"]) == (7 + index, 3, "3")
        assert (facts["model"], facts["digest"]) == ("tiny", told["checkpoint"])


def test_webdataset_reads_the_samples_of_all_shards(tiny, tmp_path):
    sampled(f"--model {tiny} --count 10 --seed 1 --out {tmp_path} --shards 2")
    dataset = webdataset.WebDataset(f"{tmp_path}/shard-{{00000..00001}}.tar", shardshuffle=False)
    samples = list(dataset.decode("l8").to_tuple("png", "json"))
    assert [facts["seed"] for _, facts in samples] == list(range(1, 11))
    assert all(image.shape == (8, 8) for image, _ in samples)


def test_folders_have_the_files_of_the_tars(tiny, tmp_path):
    asked = f"--model {tiny} --count 5 --seed 1 --scale 2 --shards 2 --out"
    tars = sampled(asked, f"{tmp_path}/tar")["files"]
    for tar, folder in zip(
        tars, sampled(asked, f"{tmp_path}/png --shard-format png")["files"], strict=True
    ):
        with tarfile.open(tar) as opened:
            assert {
                name: opened.extractfile(name).read() for name in opened.getnames()
            } == contents(Path(folder))


KILLED = """
import os, signal, sys

def watch(event, given):
    if event == "open" and "shard-00003" in str(given[0]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
from linpix.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("engine", "shard_format"),
    [pytest.param("compiled", "tar", marks=pytest.mark.kernels), ("eager", "png")],
)
@pytest.mark.slow
def test_a_killed_command_goes_on_to_the_bytes_of_an_unbroken_one(
    tiny, tmp_path, engine, shard_format
):
    count, shards = (400, 8) if engine == "compiled" else (64, 8)
    asked = (
        f"sample --model {tiny} --count {count} --shards {shards} --seed 1 --engine {engine}"
        f" --batch 16 --shard-format {shard_format} --json --out {tmp_path}"
    )
    killed = python(KILLED, *f"{asked}/killed".split(), OMP_NUM_THREADS="1")
    assert killed.returncode == -signal.SIGKILL
    whole = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "killed").glob("shard-*")
        if path.suffix != ".new"
    }
    assert 2 <= len(whole) < shards
    for folder in ("killed", "unbroken"):
        ended = linpix(f"{asked}/{folder}")
        assert ended.returncode == 0, ended.stderr
        assert (
            0 < json.loads(ended.stdout)["drawn"] <= (count if folder == "unbroken" else count - 1)
        )
        assert all(path.stat().st_mtime_ns == written for path, written in whole.items()), (
            "whole shards stay"
        )
    killed, unbroken = contents(tmp_path / "killed"), contents(tmp_path / "unbroken")
    assert len(unbroken) == 1 + (shards if shard_format == "tar" else 2 * count)
    assert killed == unbroken


@pytest.mark.parametrize("engine", ENGINES)
def test_shards_drawn_later_are_the_same_where_images_end_at_different_times(
    skipping, tmp_path, engine
):
    asked = (
        f"--model {skipping} --count 60 --seed 1 --batch 7 --shards 6 --engine {engine} "
        f"--out {tmp_path}"
    )
    sampled(asked)
    before = contents(tmp_path)
    for shard in (1, 4, 5):
        (tmp_path / f"shard-0000{shard}.tar").unlink()
    assert sampled(asked)["drawn"] == 30
    assert contents(tmp_path) == before
    with tarfile.open(tmp_path / "shard-00004.tar") as tar:
        facts = json.loads(tar.extractfile("000000040.json").read())
    assert facts["class"] == "abcdefghij"[facts["label"]], "the class that was drawn first"


def test_the_first_call_draws_the_seed_and_a_complete_folder_stays_as_it_is(tiny, tmp_path):
    asked = f"--model {tiny} --count 6 --shards 3 --out {tmp_path}"
    first = sampled(asked)
    before = contents(tmp_path)
    (tmp_path / "shard-00001.tar").unlink()
    again = sampled(asked)
    assert (again["drawn"], again["seed"]) == (2, first["seed"])
    assert contents(tmp_path) == before
    told = sampled(asked, "--seed", first["seed"])
    assert (told["drawn"], told["images"], told["images_per_second"]) == (0, 6, None)


def test_other_settings_are_refused_by_name_and_change_nothing(tiny, skipping, tmp_path):
    asked = f"--model {tiny} --count 6 --shards 3 --seed 1 --engine eager --out {tmp_path}"
    sampled(asked)
    before = contents(tmp_path)
    for flags, words in (
        ("--seed 2", "seed 1, now 2"),
        ("--count 7", "count 6, now 7"),
        ("--shards 2", "shards 3, now 2"),
        ("--temperature 0.5", "temperature 1.0, now 0.5"),
        ("--label 3", "label None, now 3"),
        ("--scale 2", "scale 1, now 2"),
        ("--shard-format png", "shard_format 'tar', now 'png'"),
        ("--batch 2", "batch 6, now 2"),
        (f"--model {skipping}", "model 'tiny', now 'skipping'; checkpoint "),
    ):
        said = refusal(asked, flags)
        assert words in said and "use the settings of the first call" in said
    versions = json.loads(before["linpix.json"]) | {"pillow": "1.0"}
    (tmp_path / "linpix.json").write_text(json.dumps(versions))
    assert "pillow '1.0', now " in refusal(asked)
    (tmp_path / "linpix.json").write_text("{")
    assert "linpix.json is damaged; restore it" in refusal(asked)
    (tmp_path / "linpix.json").unlink()
    assert "has shards, but the file linpix.json that describes them is missing" in refusal(asked)
    assert contents(tmp_path) == {
        name: raw for name, raw in before.items() if name != "linpix.json"
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_a_second_command_goes_on_with_images_that_are_drawn_again(skipping, tmp_path, engine):
    """The eager engine draws these one by one: its batches would depend on the clock."""
    asked = f"--model {skipping} --batch 2 --engine {engine} --attempts 2 --seed"
    shards = "7 --count 4 --shards 2 --out"
    assert sampled(asked, shards, f"{tmp_path}/unbroken")["drawn"] == 4
    unbroken = contents(tmp_path / "unbroken")
    shutil.copytree(tmp_path / "unbroken", tmp_path / "broken")
    (tmp_path / "broken/shard-00001.tar").unlink()
    again = sampled(asked, shards, f"{tmp_path}/broken")
    assert again["drawn"] == 2 and contents(tmp_path / "broken") == unbroken
    alone = sampled(asked, f"10 --count 1 --out {tmp_path}/one/")
    assert alone["attempts"] == [2], "else it was not drawn again"
    with tarfile.open(tmp_path / "unbroken/shard-00001.tar") as tar:
        assert tar.extractfile("000000003.png").read() == Path(alone["files"][0]).read_bytes()
        assert json.loads(tar.extractfile("000000003.json").read())["seed"] == 10


def test_two_commands_at_once_in_one_folder_are_refused(tiny, tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert "another process is drawing into this folder" in refusal(
            f"--model {tiny} --shards 1 --out {tmp_path}"
        )
    finally:
        os.close(descriptor)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--shards 3 --count 2 --out OUT",
            "--shards 3: each shard needs at least one image",
        ),
        ("--shards 3 --count 4 --out OUT.png", "give a folder as --out"),
        ("--shards 1 --candidates 4 --out OUT", "leave out --candidates"),
        ("--shards 1 --preview always --out OUT", "--preview always"),
        ("--shard-format png --out OUT", "--shard-format png needs --shards"),
    ],
)
def test_what_shards_cannot_be_is_refused_before_the_model_is_read(tmp_path, flags, words):
    assert words in refusal("--model missing", flags.replace("OUT", f"{tmp_path}/out"))
    assert not list(tmp_path.iterdir())
