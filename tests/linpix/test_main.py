"""The command line: once as a user runs it, else in this process."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from linpix.__main__ import _parser, main
from linpix.model import checkpoint, ops
from linpix.training.files import locked
from tools.harness.commands import ran, words_of
from tools.harness.servers import HANG_S, eventually

ENGINE = "compiled" if ops.compiled else "eager"  # of --engine auto


def linpix(*command, **environment):
    """A process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return ran(sys.executable, "-m linpix", *command, env=environment)


def inside(*command, **environment) -> SimpleNamespace:
    printed, said = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(said),
        mock.patch.dict(os.environ, environment),
    ):
        try:
            status = main(words_of(command))
        except SystemExit as ended:
            status = ended.code
    told = [stream.buffer.getvalue().decode() for stream in (printed, said)]
    return SimpleNamespace(returncode=status, stdout=told[0], stderr=told[1])


def succeeds(*command) -> SimpleNamespace:
    ended = inside(*command)
    assert ended.returncode == 0, ended.stderr
    return ended


def reported(*command) -> dict:
    """What a command prints with --json."""
    return json.loads(succeeds(*command, "--json").stdout)


def pixels(path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)


def test_sample_writes_one_png_per_image_named_by_index_and_seed(tiny, tmp_path):
    ended = linpix(f"sample --model {tiny} --count 3 --seed 7 --out {tmp_path}/out --json")
    assert ended.returncode == 0, ended.stderr
    printed = json.loads(ended.stdout)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "00000-7.png",
        "00001-8.png",
        "00002-9.png",
    ]
    assert {
        "images",
        "seconds",
        "images_per_second",
        "engine",
        "precision",
        "seeds",
    } <= printed.keys()
    assert (printed["images"], printed["seeds"], printed["engine"]) == (3, [7, 8, 9], ENGINE)
    assert pixels(tmp_path / "out" / "00000-7.png").shape == (8, 8)


def test_every_command_reports_a_misspelt_variable():
    told = inside("doctor", LINPIX_MODLES="x").stderr
    assert (
        told == "linpix doctor: LINPIX_MODLES is not a setting, so it has no effect; did you mean"
        " LINPIX_MODELS?\n"
    )


def test_an_empty_variable_is_as_good_as_none(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    empty = dict.fromkeys(
        (f"LINPIX_{name}" for name in ("CHECKPOINTS", "ENGINE", "PRECISION", "DEVICE", "STATE")), ""
    )
    assert inside("sample --model nothing --out x.png", **empty).stderr.count("mnist-small,") == 1
    assert inside(f"sample --model {tiny} --out x.png", **empty).returncode == 0


def test_a_name_that_the_output_cannot_encode_is_printed_with_escapes(tiny, tmp_path):
    ended = linpix(
        f"sample --model {tiny} --out {tmp_path}/caf\udce9.png",
        PYTHONIOENCODING="utf-8:strict",
    )
    assert ended.returncode == 0 and "caf\\udce9.png" in ended.stdout and not ended.stderr


@pytest.mark.parametrize(
    "closed", [">&- 2>&-", *(pytest.param(one, marks=pytest.mark.slow) for one in (">&-", "2>&-"))]
)
def test_a_stream_that_the_shell_has_closed_costs_no_picture(closed, tiny, tmp_path):
    ended = subprocess.run(
        [
            "sh",
            "-c",
            f'"$0" -m linpix sample --model "$1" --out "$2" {closed}',
            sys.executable,
            tiny,
            tmp_path / "x.png",
        ],
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"") and (tmp_path / "x.png").exists()


def test_serve_prints_the_settings_of_a_file_and_its_flags_without_serving(tmp_path):
    file = tmp_path / "linpix.toml"
    file.write_text("max-queue = 7\nslots = 3\n")
    printed = succeeds(f"serve --config {file} --slots 4 --print-config").stdout
    settings = tomllib.loads(printed)
    assert (settings["max_queue"], settings["slots"], settings["port"]) == (7, 4, 8000)


def test_lists_of_a_flag_that_is_given_twice_add_up():
    """Each of the two is looked at: the wrong one is named, whichever comes first."""
    for flags in (
        "--models nowhere, --models mnist-small",
        "--models mnist-small --models=nowhere",
    ):
        ended = inside("serve --port 0", flags)
        assert ended.returncode == 2 and "no model 'nowhere'" in ended.stderr
    words = words_of(["experiment copy --kinds lsh-1,lsh-4 --kinds linear"])
    parsed = _parser(["experiment"]).parse_args(words)
    assert parsed.kinds == ["lsh-1", "lsh-4", "linear"]
    refused = inside("compare --model mnist-small --backends nothing --backends linear")
    assert "nothing" in refused.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sample --model nothing --out OUT", "there is no model 'nothing'"),
        ("sample --model TINY --out TINY/config.json", "is a file"),
        ("sample --model TINY --out ''", "--out '' is not a path; give a folder"),
        ("sample --model TINY --out -", "--out '-' is not a path; give a folder"),
        ("sample --model TINY --out OUT/none/grid.png", "its folder does not exist"),
        ("sample --model TINY --label cat --out OUT", "0, 1, 2"),
        ("sample --model TINY --label 10 --out OUT", "0, 1, 2"),
        (
            "sample --model TINY --engine eager --precision bf16 --out OUT",
            "--engine compiled",
        ),
        ("sample --model TINY --state fp16 --out OUT", "leave the flag out"),
        (
            "train tiny --data OUT --out OUT --attention softmax --feature-map relu",
            "--feature-map is not an option of softmax attention",
        ),
        (
            "train tiny --data OUT --out OUT --lsh-rounds 2",
            "--lsh-rounds is not an option of linear attention",
        ),
        (
            f"sample --model TINY --seed {2**53 - 1} --count 2 --out OUT",
            "2^53",
        ),
        (
            "complete missing.png --model nothing --out OUT",
            "missing.png: no such file or directory; ",
        ),
        (
            "complete PICTURES --model nothing --out OUT",
            "is a directory; give a file",
        ),
        (
            "sample --model TINY --out TINY/config.json/x/",
            "not a directory; give another path",
        ),
        ("complete TINY/config.json --model TINY --out OUT", "PNG"),
        ("compare --model TINY --backends linear,quantum", "quantum"),
        ("evaluate TINY --data TINY/config.json", "config.json"),
        ("train tiny --data nowhere --out TINY", "--init"),
        ("train tiny --data nowhere --out TINY --resume", "--init"),
        ("train tiny --data PICTURES --out LINK", "link exists, but"),
        ("train tiny --data PICTURES --out OUT --resume", "no run to continue"),
        (
            "train tiny --data PICTURES --out OUT --fall-from TINY",
            "does not exist; give the --out of a run",
        ),
        (
            "train tiny --data PICTURES --out OUT --fall-from TINY --images 9",
            "--fall-from and --images do not go together",
        ),
        (
            "train tiny --data PICTURES --out OUT --batch 0",
            "batch must be at least 1",
        ),
        pytest.param(
            "evaluate TINY --data PICTURES --device cuda",
            "finds no CUDA GPU",
            marks=[
                pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
                pytest.mark.cuda,
            ],
        ),
        ("import TINY/config.json --heads 2 --out OUT", "config.json"),
    ],
)
def test_what_cannot_work_stops_before_it_starts_with_one_line(tiny, tmp_path, command, words):
    (tmp_path / "pictures").mkdir()
    for index in range(10):
        Image.fromarray(np.full((8, 8), index, np.uint8)).save(
            tmp_path / "pictures" / f"{index}.png"
        )
    (tmp_path / "link").symlink_to("/nowhere/run")
    places = {
        "TINY": tiny,
        "OUT": tmp_path / "out",
        "PICTURES": tmp_path / "pictures",
        "LINK": tmp_path / "link",
    }
    refused = inside(re.sub("|".join(places), lambda found: str(places[found[0]]), command))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert words in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1, refused.stderr
    assert not (tmp_path / "out.training").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "sample --model m --out o --count 0",
            "--count: must be an integer, 1 to 1000000; got '0'",
        ),
        (
            "sample --model m --out o --seed -1",
            "an integer, 0 to 9007199254740991; got '-1'",
        ),
        (
            "sample --model m --out o --temperature nan",
            "must be a number, 0 to 10; got 'nan'",
        ),
        (
            "train mnist-small --data . --out .",
            "--out: must be a folder that does not exist yet",
        ),
        (
            "export r --data . --out ..",
            "--out: must be a folder that does not exist yet",
        ),
        (
            "import m.pth --heads 2 --out /",
            "--out: must be a folder that does not exist yet",
        ),
        (
            "compare --model m --batch 1,x",
            "--batch: must be an integer, 1 to 4096; got 'x'",
        ),
        ("compare --model m --all --backends linear", "--backends"),
        ("fly", "fly"),
        ("", "COMMAND"),
    ],
)
def test_a_flag_out_of_range_is_named(command, words):
    ended = inside(command)
    assert ended.returncode == 2
    assert "error:" in ended.stderr and words in ended.stderr


COMMANDS = "serve sample complete compare train evaluate export import experiment key doctor"


@pytest.mark.parametrize("command", COMMANDS.split())
def test_every_command_explains_itself(command):
    assert "usage: linpix" in succeeds(f"{command} --help").stdout


def test_doctor_says_which_engine_runs_and_why():
    facts = reported("doctor")
    assert facts["engine"] == ENGINE
    assert facts["kernel"] == ops.kernel()
    assert facts["why"]
    assert facts["torch"]
    assert ("using VNNI" in facts["int8_products"]) == (
        facts["kernel"] in ("avx512vnni", "avx512bf16")
    )
    if ENGINE == "compiled":
        assert facts["share_of_limit"]["model"] == "mnist-conditional"
        assert facts["share_of_limit"]["share"] > 0
        assert facts["share_of_limit"]["limited_by"] in ("arithmetic", "memory")
    assert not facts["no_share"]


def test_doctor_examines_a_machine_without_checkpoints(tmp_path):
    told = succeeds(f"doctor --checkpoints {tmp_path}").stdout
    assert "no share" in told and "holds no checkpoint" in told


CONTAINER = ["unshare", "--pid", "--fork", "--kill-child"]  # the program is its first process


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*CONTAINER, "true"]).returncode != 0,
    reason="only root may make a namespace of processes",
)
def test_a_command_that_is_the_first_process_of_a_container_ends_at_sigterm(tiny, tmp_path):
    """For it, the kernel drops signals without a handler."""
    command = [*CONTAINER, sys.executable, "-m", "linpix", "sample", "--model", str(tiny)]
    command += f"--count 1000000 --out {tmp_path}/out".split()
    with subprocess.Popen(command, stderr=subprocess.PIPE) as outer:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        assert eventually((tmp_path / "out").exists), "it draws"
        os.kill(int(children.read_text()), signal.SIGTERM)
        assert outer.wait(HANG_S) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_import_makes_a_checkpoint_that_samples_and_evaluates(golden, data, tmp_path):
    succeeds(
        f"import {golden}/reference_linear_2x32.pth --heads 2 --data {data}/mnist --out "
        f"{tmp_path}/imported",
    )
    config = checkpoint.load(tmp_path / "imported").config
    assert config.first_marginal[0] == 1.0
    printed = reported(f"evaluate {tmp_path}/imported --data {data}/mnist --limit 4")
    # the published loss of these four images is 3.0668 over 783 sub-pixels; the first is certain
    assert printed["bits_per_dim"] == pytest.approx(3.0667671 * 783 / 784, abs=1e-4)
    assert printed["images"] == 4
    succeeds(f"sample --model {tmp_path}/imported --seed 0 --out {tmp_path}/out.png")


def test_a_run_ships_what_a_copy_of_it_has_learnt_and_only_one_process_writes_to_it(
    pictures, tmp_path
):
    trunk, copy = tmp_path / "trunk", tmp_path / "copy"
    words = f"train tiny --data {pictures} --no-compile --processes 1 --batch 4"
    succeeds(words, f"--out {trunk} --images 0 --max-images 80 --head-share 0.4")
    with locked(tmp_path / "trunk.training", trunk, ""):
        assert "another process is writing to" in inside(words, f"--out {trunk} --resume").stderr
        said = succeeds(words, f"--out {copy} --fall-from {trunk} --max-minutes 0").stderr
    assert "at 80 images, whose learning rate falls within 20 more" in said
    again = succeeds(words, f"--out {copy} --fall-from {trunk} --resume")
    assert "100 images in" in again.stderr and "the schedule is complete" in again.stderr
    settings = checkpoint.read(copy).provenance["settings"]
    assert (settings["images"], settings["warmup_images"], settings["head_share"]) == (100, 80, 0.4)
    assert "a copy of" not in again.stderr
    succeeds(words, f"--out {trunk} --resume --max-images 4")


@pytest.fixture
def pictures(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    for split, count in (("train", 60), ("test", 12)):
        for index in range(count):
            folder = tmp_path / "pictures" / split / str(index % 3)
            folder.mkdir(parents=True, exist_ok=True)
            picture = (rng.random((8, 8)) * 40 + 70 * (index % 3)).astype(np.uint8)
            Image.fromarray(picture).save(folder / f"{index}.png")
    return tmp_path / "pictures"


def test_train_export_evaluate_and_compare_follow_each_other(pictures, tmp_path):
    run, shipped = tmp_path / "run", tmp_path / "shipped"
    succeeds(
        f"train tiny --data {pictures} --out {run} --images 80 --batch 8 --no-compile",
    )
    succeeds(f"export {run} --data {pictures} --out {shipped}")
    figures = checkpoint.read(shipped).provenance["bits_per_dim"]
    evaluated = reported(f"evaluate {shipped} --data {pictures} --grid {tmp_path}/grid.png")
    assert figures == {"test_12": pytest.approx(evaluated["bits_per_dim"], abs=1e-4)}
    assert evaluated["interval"] > 0
    assert (tmp_path / "grid.png").exists()
    report = reported(
        f"compare --model {shipped} --batch 1,2 --budget 1 --out {tmp_path}/report",
    )
    assert {result["backend"] for result in report["results"]} == {
        "linear",
        "softmax",
        "stateful-softmax",
        "lsh-1",
        "lsh-4",
    }
    assert (tmp_path / "report/report.svg").exists()


@pytest.mark.slow
def test_a_reversible_model_is_trained_resumed_and_drawn_from_by_the_eager_engine(
    pictures, tmp_path, caplog
):
    run, shipped = tmp_path / "run", tmp_path / "shipped"
    train = (
        f"train tiny --data {pictures} --out {run} --images 160 --batch 8 --no-compile --reversible"
    )
    succeeds(train, "--feed-forward-chunks 4 --max-images 80")
    refused = inside(train.replace("--reversible", "--resume"))
    assert refused.returncode == 2 and "run of another architecture" in refused.stderr
    succeeds(train, "--resume")
    succeeds(f"export {run} --data {pictures} --out {shipped}")
    config = checkpoint.load(shipped).config
    assert (config.residual, config.norm) == ("reversible", "pre")
    drawn = succeeds(f"sample --model {shipped} --count 2 --out {tmp_path}/drawn --json")
    assert json.loads(drawn.stdout)["engine"] == ("eager+operator" if ops.compiled else "eager")
    assert not ops.compiled or "it supports only plain residuals" in caplog.text
    succeeds(
        f"complete {next((pictures / 'test').rglob('*.png'))} --model {shipped} "
        f"--keep-rows 4 --out {tmp_path}/completed",
    )
    report = reported(
        f"compare --model {shipped} --backends linear,softmax --batch 2 --budget 2",
    )
    assert {(result["backend"], result["engine"]) for result in report["results"]} == {
        ("linear", "eager"),
        ("softmax", "eager"),
    }
