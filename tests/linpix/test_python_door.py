"""`import linpix`: load, sample, complete and score from Python, and the one name that an
installation takes.
"""

import dataclasses
import inspect
import json
import multiprocessing
import os
import pydoc
import re
import signal
import subprocess
import sys
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import linpix
from linpix.model.config import PRESETS
from linpix.model.transformer import Transformer
from linpix.training.flags import actions_of, words_of
from tests.linpix.test_main import reported, succeeds
from tests.nets import saved
from tests.server.web.routes.test_images import encode, images_of, occluded
from tests.training.conftest import lay, shapes
from tools.harness.commands import ROOT, ran
from tools.harness.servers import HANG_S, here

GENERATE = "/v1/images/generations"
PICTURE, KNOWN = (
    np.arange(64, dtype=np.uint8).reshape(8, 8),
    np.arange(8)[:, None].repeat(8, axis=1) < 3,
)


@pytest.mark.parametrize(
    "function",
    [
        linpix.load,
        linpix.models,
        linpix.sample,
        linpix.complete,
        linpix.score,
        linpix.inside,
        linpix.train,
        linpix.evaluate,
    ],
)
def test_every_option_of_a_function_has_a_name_and_a_type_and_is_explained(function):
    parameters = inspect.signature(function).parameters.values()
    assert all(
        one.kind is not one.VAR_KEYWORD and one.annotation is not one.empty for one in parameters
    )
    told = pydoc.render_doc(function) + (
        "" if function is not linpix.complete else pydoc.render_doc(linpix.sample)
    )
    assert function is linpix.models or all(
        re.search(rf"^ +{one.name}: ", told, re.M) or one.name == "count" for one in parameters
    )


def test_a_type_checker_reads_the_types_of_an_installation():
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["linpix"]
    assert all((ROOT / "linpix" / name).is_file() for name in files) and "py.typed" in files


def test_load_gives_the_transformer_of_a_folder(tiny):
    net = linpix.load(tiny)
    assert isinstance(net, Transformer) and not net.training
    images = torch.zeros(2, net.config.subpixels, dtype=torch.uint8)
    assert net.parameters_of(images).shape == (2, net.config.subpixels, 3 * net.config.mixtures)
    assert not any(weight.requires_grad for weight in net.parameters())


def test_a_model_that_is_loaded_to_be_trained_learns(tiny):
    net = linpix.load(tiny, trainable=True)
    images = torch.zeros(2, net.config.subpixels, dtype=torch.uint8)
    before = net.head.weight.detach().clone()
    net.parameters_of(images).square().mean().backward()
    torch.optim.Adam(net.parameters()).step()
    assert not torch.equal(net.head.weight, before)


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("tiny", {"label": 4, "temperature": 0.8}),
        ("thrice", {}),
        ("thrice", {"attempts": 2}),
        ("thrice", {"candidates": 6, "label": 2}),
    ],
)
def test_sample_and_complete_give_what_a_server_gives_for_the_same_seed(request, model, asked):
    folder = request.getfixturevalue(model)
    with here(folder.parent) as server, server.client() as client:
        drawn = linpix.sample(str(folder), 3, seed=7, batch=2, **asked)
        assert drawn.shape == (3, 8, 8) and drawn.dtype == np.uint8
        assert np.array_equal(
            drawn, images_of(client.post(GENERATE, json={"n": 3, "seed": 7} | asked))
        )
        completed = linpix.complete(str(folder), PICTURE, KNOWN, 2, seed=7, **asked)
        assert (completed[:, KNOWN] == PICTURE[KNOWN]).all() and not np.array_equal(*completed)
        answer = client.post(
            "/v1/images/edits",
            files={"image": ("a.png", occluded(3, PICTURE))},
            data={"n": 2, "seed": 7} | asked,
        )
        assert np.array_equal(completed, images_of(answer))
    if model == "thrice":
        assert np.array_equal(drawn, linpix.sample(str(folder), 3, seed=7, attempts=3)) == (
            not asked
        )


def test_score_gives_what_a_server_gives(tiny, server):
    found = linpix.score(str(tiny), PICTURE, KNOWN, posterior=True)
    told = (
        server.client()
        .post(
            "/v1/images/likelihoods",
            files={"image": ("a.png", encode(PICTURE))},
            data={"labels": "all", "keep_rows": "3"},
        )
        .json()
    )
    assert found.bits_per_dim == pytest.approx(told["bits_per_dim"], abs=1e-6)
    assert found.log_likelihood == pytest.approx(told["log_likelihood"], abs=1e-3)
    assert list(found.posterior) == [entry["label"] for entry in told["labels"]]
    assert sum(found.posterior.values()) == pytest.approx(1)
    assert np.array_equal(np.isnan(found.map), KNOWN)
    assert np.nansum(found.map) == pytest.approx(-found.log_likelihood / np.log(2))
    whole = linpix.score(str(tiny), PICTURE, label=4)
    assert not whole.posterior and not np.isnan(whole.map).any()


def test_a_look_inside_has_the_bits_of_the_score_and_says_where_a_token_looked(tiny):
    found = linpix.inside(str(tiny), PICTURE, label=4)
    score = linpix.score(str(tiny), PICTURE, label=4)
    np.testing.assert_allclose(found.bits, score.map.reshape(-1), atol=1e-4)
    looked = found.attention(0, 1)[20]
    assert looked[:21].sum() == pytest.approx(1, abs=1e-5) and not looked[21:].any()


@pytest.mark.parametrize(
    ("known", "options", "message"),
    [
        (np.ones((8, 8), bool), {}, "known hides nothing.*leave out known"),
        (np.ones((8, 8)), {}, "known must be bool"),
        (None, {"label": "cat"}, "label must be a class"),
        (None, {"posterior": "x"}, "posterior must be True or False, got 'x'"),
    ],
)
def test_a_score_that_cannot_be_is_refused(tiny, known, options, message):
    with pytest.raises(ValueError, match=message):
        linpix.score(str(tiny), np.zeros((8, 8), np.uint8), known, **options)


def test_a_photographed_digit_is_prepared_and_completed(tmp_path):
    saved(tmp_path / "grey", dataclasses.replace(PRESETS["tiny"], height=28, width=28))
    paper = np.full((200, 300), 220, np.uint8)
    paper[40:140, 180:195] = 30
    known = np.arange(200)[:, None].repeat(300, axis=1) < 90
    [drawn] = linpix.complete(str(tmp_path / "grey"), paper, known, prepare="mnist", seed=1)
    assert drawn.shape == (28, 28) and (drawn[6:12] == 255).any() and not drawn[:3].any()
    with pytest.raises(ValueError, match="known must be bool of shape"):
        linpix.complete(str(tmp_path / "grey"), paper, known[:9], prepare="mnist")


def test_images_say_of_each_its_seed_its_class_and_how_sure_the_model_is(tiny, class_first):
    drawn = linpix.sample(str(tiny), 3, seed=np.int64(7), label=4)
    assert (drawn.seeds, drawn.labels, drawn.confidences) == ([7, 8, 9], ["4"] * 3, [None] * 3)
    assert str(drawn) == repr(drawn) == "<3 images of 8 x 8, seeds from 7, classes 4, 4, 4>"
    assert repr(linpix.sample(str(tiny), seed=7)) == "<1 image of 8 x 8, seeds from 7>"
    found = linpix.sample(str(class_first), 4, seed=7, candidates=12)
    assert found.seeds != [7, 8, 9, 10] and all(name in "0123456789" for name in found.labels)
    for seed, name, sure, image in zip(
        found.seeds, found.labels, found.confidences, found, strict=True
    ):
        again = linpix.sample(str(class_first), seed=seed, candidates=1)
        assert (
            np.array_equal(again[0], image)
            and again.labels == [name]
            and again.confidences == [sure]
        )


def test_each_image_may_have_a_class_of_its_own_and_any_model_says_which_it_drew(class_first):
    model = str(class_first)
    drawn = linpix.sample(model, seed=7, label=["seven", 2, None, "4"], attempts=1)
    assert drawn.labels[:2] == ["7", "2"] and drawn.labels[3] == "4"
    assert drawn.labels[2] in tuple("0123456789") and drawn.confidences == [None] * 4
    for seed, label, image in zip(drawn.seeds, drawn.labels, drawn, strict=True):
        [alone] = linpix.sample(model, seed=seed, label=label, attempts=1)
        assert np.array_equal(alone, image)
    again = linpix.complete(model, PICTURE, KNOWN, 2, seed=7, label=np.array([3, 5]), attempts=2)
    assert again.labels == ["3", "5"]


@pytest.mark.parametrize("dtype", [np.float64, np.uint8])
def test_a_reduction_to_one_number_is_a_number_of_numpy(tiny, dtype):
    drawn = linpix.sample(str(tiny), 2, seed=7).astype(dtype)
    plain = np.asarray(drawn)
    for reduce in (np.mean, np.max, np.sum, np.std, np.median, np.any, np.argmax, np.linalg.norm):
        found, expected = reduce(drawn), reduce(plain)
        assert type(found) is type(expected) and found == expected
    assert drawn.mean(axis=0).shape == (8, 8) and repr(drawn.max()) == repr(plain.max())


def test_a_temperature_at_which_images_are_not_useful_gets_a_warning(tiny):
    with pytest.warns(UserWarning, match=r"draws well at temperatures from .*, got 9$") as warned:
        linpix.sample(str(tiny), seed=7, temperature=9)
    assert warned[0].filename == __file__


def test_numbers_may_be_those_of_numpy(tiny, class_first):
    drawn = linpix.sample(
        str(tiny), np.int64(2), batch=np.uint8(1), seed=np.uint64(7), temperature=np.float32(1)
    )
    assert np.array_equal(drawn, linpix.sample(str(tiny), 2, seed=7, temperature=1))
    found = linpix.sample(str(class_first), seed=7, candidates=np.int16(3), attempts=np.int8(1))
    assert np.array_equal(found, linpix.sample(str(class_first), seed=7, candidates=3, attempts=1))


def test_a_grid_of_no_images_is_refused(tiny):
    with pytest.raises(
        ValueError, match=r"grid needs images as they were drawn, got uint8 of shape \(0, 8, 8\)"
    ):
        linpix.sample(str(tiny), 2)[:0].grid()


@pytest.mark.parametrize("function", [linpix.complete, linpix.score, linpix.inside])
def test_a_picture_in_the_place_of_the_model_is_named_as_one(function):
    with pytest.raises(
        ValueError, match="model must be a name or a folder, and comes first; got a ndarray"
    ):
        function(np.zeros((28, 28), np.uint8), "mnist-conditional")


def test_models_are_known_and_loaded_by_name(tiny):
    assert "mnist-conditional" in linpix.models()
    assert linpix.models(tiny.parent) == ["tiny"]
    assert linpix.load("tiny", tiny.parent).config == linpix.load(tiny).config
    with pytest.raises(ValueError, match=r"there is no model 'huge'.* which has: tiny"):
        linpix.load("huge", tiny.parent)


def test_settings_of_torch_are_left_alone_and_do_not_matter(tiny):
    expected = linpix.sample(str(tiny), 2, seed=7)
    torch.manual_seed(0)
    number = torch.rand(1)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        assert np.array_equal(linpix.sample(str(tiny), 2, seed=7), expected)
        assert linpix.score(str(tiny), expected[0]).bits_per_dim > 0
        assert linpix.load(tiny).head.weight.dtype == torch.float32
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.rand(1) == number


@pytest.mark.parametrize(
    "setting",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        torch.inference_mode,
    ],
    ids=["autocast", "device", "inference"],
)
def test_a_context_of_torch_around_a_call_changes_nothing(setting, class_first):
    def results():
        drawn = linpix.complete(str(class_first), PICTURE, KNOWN, 2, seed=7)
        return (
            drawn,
            linpix.score(str(class_first), PICTURE).bits_per_dim,
            linpix.load(class_first).head.weight.device,
        )

    expected = results()
    with setting():
        found = results()
    assert np.array_equal(found[0], expected[0]) and found[1:] == expected[1:]


def _draw_in_a_fork(folder: str, answers: "multiprocessing.Queue[np.ndarray]") -> None:
    answers.put(linpix.sample(folder, 2, seed=7))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_draws_the_same_images():
    """OpenMP's threads are not in it, so torch would wait for ever; mnist-small is large enough to
    use them.
    """
    drawn = linpix.sample("mnist-small", 2, seed=7)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=_draw_in_a_fork, args=("mnist-small", answers))
    process.start()
    try:
        assert np.array_equal(answers.get(timeout=HANG_S), drawn)
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"count": 2.0}, "count must be a whole number, got 2.0"),
        ({"seed": "1"}, "seed must be a whole number, got '1'"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"temperature": -1}, "temperature must be a number from 0 to 10, got -1"),
        ({"label": [1, 2], "count": 3}, "one for each image.*; got 2 labels for 3 images"),
        ({"label": []}, "got 0 labels for 1 images"),
        ({"label": [1, "ten"]}, "label must be a class of tiny: .*; got 'ten'"),
        ({"model": "none"}, "there is no model 'none'"),
    ],
)
def test_what_cannot_be_drawn_is_a_value_error_that_says_why(tiny, options, words):
    with pytest.raises(ValueError, match=words):
        linpix.sample(**{"model": str(tiny)} | options)


@pytest.mark.parametrize(
    ("image", "known", "words"),
    [
        (
            np.zeros((8, 9, 2), np.uint8),
            np.ones((8, 8), bool),
            r"image must be a path, .* got uint8 of shape \(8, 9, 2\)",
        ),
        (
            np.zeros((7, 9), np.uint8),
            np.ones((7, 9), bool),
            "image must have at least the model's 8x8 pixels",
        ),
        (
            np.zeros((9, 20), np.uint8),
            np.ones((20, 9), bool),
            r"known must be bool of shape \(9, 20\) or \(8, 8\), true",
        ),
        (
            np.zeros((8, 8), np.uint8),
            9,
            "known must be from 0 to 8, the height of the model's image, got 9",
        ),
        (np.zeros((8, 8), np.uint8), None, "not clear what to fill in: .* or known"),
        ("no file.png", None, "No such file"),
        (Image.new("F", (8, 8)), 3, "got float32"),
        (
            np.zeros((8, 8)),
            np.ones((8, 8), bool),
            r"got float64 .* give \(255 \* image\)\.astype\('uint8'\)",
        ),
        (np.zeros((8, 8), np.uint8), np.ones((8, 8)), "known must be bool of shape"),
    ],
)
def test_arrays_of_another_shape_or_kind_are_refused(tiny, image, known, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        linpix.complete(str(tiny), image, known)


def test_other_modules_with_the_names_of_our_rooms_do_not_conflict(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/__init__.py").write_text("raise SystemExit('imported in place of ours')")
    ended = ran(f"{sys.executable} -m linpix doctor --json", cwd=tmp_path)
    assert ended.returncode == 0 and json.loads(ended.stdout), ended.stderr


def test_linpix_is_found_beside_a_clone_of_that_name(tmp_path):
    """Python would take the clone for a package without content, were there no real one later on
    its path.
    """
    (tmp_path / "linpix").symlink_to(ROOT)
    told = subprocess.run(
        [sys.executable, "-c", "import linpix; print(linpix.sample.__name__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert told.stdout == "sample\n", told.stderr


@pytest.mark.slow
@pytest.mark.parametrize("links", ["true", "false"])
def test_every_kind_of_installation_finds_all_packages(links, tmp_path):
    """Also from a clone without symbolic links, as git makes it on Windows."""
    clone = tmp_path / "clone"
    checkout = ["git", "-C", str(ROOT), "-c", f"core.symlinks={links}", "checkout-index", "--all"]
    subprocess.run([*checkout, f"--prefix={clone}/"], check=True)
    assert (clone / "linpix/server").is_symlink() == (links == "true")
    build = "from setuptools import build_meta as b; b.build_{}('../{}')"
    for kind in ("wheel", "editable"):
        subprocess.run(
            [sys.executable, "-c", build.format(kind, kind)],
            cwd=clone,
            env=os.environ | {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"},
            check=True,
        )
        [wheel] = (tmp_path / kind).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(tmp_path / kind)

    find = """if True:
        import importlib.util, site, sys
        site.addsitedir(sys.argv[1])
        for room in ("model", "server", "training"):
            print(importlib.util.find_spec(f"linpix.{room}").origin)
        print(*[name for name in ("model", "server", "tests") if importlib.util.find_spec(name)])
    """
    inside = {"wheel": "wheel/linpix", "editable": "clone", "clone": "clone"}
    for kind, folder in inside.items():
        alone = [sys.executable, "-IS", "-c", find, str(tmp_path / kind)]
        told = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, check=True)
        *found, others = told.stdout.splitlines()
        for file, room in zip(found, ("model", "server", "training"), strict=True):
            assert Path(file).samefile(tmp_path / folder / room / "__init__.py")
        assert others == ("model server tests" if kind == "clone" else "")


# --- training and evaluation ---


def small(pictures: Path, out: Path) -> dict:
    return {
        "preset": "tiny",
        "data": pictures,
        "out": out,
        "batch": 8,
        "max_images": 48,
        "compile": False,
        "betas": (0.8, 0.9),
        "seed": 3,
    }


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return lay(shapes(40, 8), tmp_path_factory.mktemp("pictures"), 30)


def test_train_does_what_the_command_does_and_evaluate_too(pictures, tmp_path):
    number, handler = torch.initial_seed(), signal.getsignal(signal.SIGINT)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        run = linpix.train(**small(pictures, tmp_path / "ours"))
    assert torch.initial_seed() == number and signal.getsignal(signal.SIGINT) is handler
    words = words_of("train", small(pictures, tmp_path / "theirs") | {"processes": 1})
    succeeds("train", *words)
    weights = [tmp_path / name / "model.safetensors" for name in ("ours", "theirs")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    last = run.history[-1]
    assert last["images"] == 48 and last["validation"] == pytest.approx(
        run.bits_per_dim["validation"], rel=1e-4
    )
    assert linpix.sample(run.folder, seed=1).shape == (1, 8, 8)
    told = linpix.evaluate(run.folder, pictures, limit=4, labels="all")
    theirs = reported(f"evaluate {run.folder} --data {pictures} --limit 4 --labels all")
    assert told.pop("seconds") > 0 and theirs.pop("seconds") > 0
    assert told == theirs and told["images"] == 4


def test_every_flag_of_a_command_is_an_option_of_its_function():
    for function, apart in ((linpix.train, set()), (linpix.evaluate, {"model", "json"})):
        options = set(inspect.signature(function).parameters)
        assert options ^ set(actions_of(function.__name__)) == apart


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"out": None}, "the following arguments are required: --out"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"device": "gpu"}, "argument --device: invalid choice: 'gpu'"),
        ({"attention": "gatd"}, "attention must be one of linear, .*, got 'gatd'"),
        ({"preset": "huge"}, "argument --preset: invalid choice: 'huge'"),
    ],
)
def test_a_training_that_cannot_be_is_a_value_error(options, words, pictures, tmp_path):
    with pytest.raises(ValueError, match=words):
        linpix.train(**small(pictures, tmp_path / "out") | options)


def test_training_in_another_thread_is_refused_with_the_cure(pictures, tmp_path):
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="in the main thread only"):
        pool.submit(linpix.train, **small(pictures, tmp_path / "out")).result()
