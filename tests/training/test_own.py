"""Training on a user's pictures, besides the loop: pretrained weights, progress, choice of preset,
and the judge.
"""

import dataclasses
import io
import json
import math
import re
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from linpix.__main__ import main
from linpix.model import checkpoint, provenance
from linpix.model.choice import choose
from linpix.model.config import PRESETS
from linpix.model.generate import generate
from linpix.model.heads import log_likelihood
from linpix.model.likelihood import class_log_probs_of
from linpix.model.nets import net_for
from linpix.model.packing import pack
from linpix.model.pieces import torn
from linpix.model.transformer import Transformer
from linpix.training import commands
from linpix.training.datasets import Dataset
from linpix.training.evaluate import Evaluation
from linpix.training.folders import read_pictures
from linpix.training.own import automatic, curve, judge, palette
from linpix.training.own import progress as progress_module
from linpix.training.own.inherit import differences, inherited, inverted, negative
from linpix.training.own.look import Look, board_of, look_of
from linpix.training.own.progress import Progress
from linpix.training.run import Run, TrainConfig
from tests.conftest import files_of_at_most
from tests.linpix.test_main import inside, succeeds
from tests.nets import CLASS_FIRST, net_of

TINY = PRESETS["tiny"]
SHARPER = 8.0
CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"


def shapes(count: int, size: int, colours: int = 1) -> Dataset:
    """Dark and bright pictures, classes 0 and 1."""
    random, labels = np.random.default_rng(0), np.arange(count) % 2
    images = (random.random((count, size * size * colours)) * 100 + 150 * labels[:, None]).astype(
        np.uint8
    )
    return Dataset("shapes", images, labels, ("dark", "bright"))


# --- --init ---


@pytest.mark.parametrize("config", [TINY, CLASS_FIRST])
@pytest.mark.parametrize("classes", [3, 12, 0])
def test_weights_for_other_classes_draw_unconditionally_as_the_old_ones_do(config, classes):
    torch.manual_seed(0)
    look_ups = tuple(name for name in config.look_ups if classes or name != "class")
    here = dataclasses.replace(config, classes=classes, look_ups=look_ups)
    old, new = net_for(config), net_for(here)
    new.load_state_dict(inherited(old.state_dict(), config, new.state_dict(), here))
    assert not differences(config, here)
    if config is TINY:  # the other draws a class first
        images, start = torch.randint(0, 256, (2, 64), dtype=torch.uint8), torch.full((2,), 256)
        torch.testing.assert_close(new(images, start), old(images, start))
    rows = old.inputs.table[257:267]
    expected = torch.cat([rows, rows.mean(0).expand(2, -1)])[:classes]
    torch.testing.assert_close(new.inputs.table[257 : 257 + classes], expected)


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        dataclasses.replace(
            TINY,
            channels=3,
            tokens="pixel",
            look_ups=("previous", "row", "column"),
            neighbours=((-1, 0, 0), (0, -2, 1)),
        ),
        dataclasses.replace(TINY, head="categorical"),
    ],
)
def test_inverted_weights_give_the_negative_the_probability_of_the_picture(config):
    torch.manual_seed(0)
    old, new = net_for(config), net_for(config)
    new.load_state_dict(inverted(old.state_dict(), config))
    images, start = (
        torch.randint(0, 256, (2, config.subpixels), dtype=torch.uint8),
        torch.tensor([256, 258]),
    )
    torch.testing.assert_close(
        log_likelihood(config, new(255 - images, start), 255 - images),
        log_likelihood(config, old(images, start), images),
        rtol=1e-4,
        atol=1e-4,
    )
    with pytest.raises(ValueError, match="without first marginal"):
        inverted(
            old.state_dict(),
            dataclasses.replace(TINY, classes=0, first_marginal=(1.0,) + (0.0,) * 255),
        )


@pytest.mark.parametrize("head", ["mixture", "categorical"])
def test_so_they_do_of_what_is_known_and_where_background_skips_the_layers(head):
    config = dataclasses.replace(CLASS_FIRST, background=3, head=head)
    torch.manual_seed(0)
    old, new = net_for(config), net_for(negative(config))
    for parameter in old.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    new.load_state_dict(inverted(old.state_dict(), config))
    images = torch.where(torch.rand(3, 64) < 0.1, torch.randint(0, 256, (3, 64)), 3).to(torch.uint8)
    known, start = (
        torch.rand(3, 64) < torch.tensor([[0.0], [0.5], [0.9]]),
        torch.tensor([257, 259, 260]),
    )
    expected = old.predict(old.sequences(images, start, known))
    found = new.predict(new.sequences(255 - images, start, known))
    torch.testing.assert_close(found.class_scores, expected.class_scores, rtol=1e-4, atol=1e-4)
    hidden = ~known
    torch.testing.assert_close(
        log_likelihood(new.config, found.parameters, 255 - images)[hidden],
        log_likelihood(config, expected.parameters, images)[hidden],
        rtol=1e-3,
        atol=1e-3,
    )
    assert len(old.sequences(images, start, known).skipped_t) > 10


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 0), (2, 4)])
def test_background_keeps_what_it_knows_of_positions_and_of_classes(before, after):
    def config(classes):
        names = tuple(name for name in CLASS_FIRST.look_ups if classes or name != "class")
        return dataclasses.replace(CLASS_FIRST, background=3, classes=classes, look_ups=names)

    old, new = net_for(config(before)), net_for(config(after))
    found = inherited(old.state_dict(), old.config, new.state_dict(), new.config)[
        "background.table"
    ]
    rows = old.background.table
    assert torch.equal(found[:65], rows[:65]) and torch.equal(found[-3:], rows[-3:])
    assert found.isfinite().all()
    assert not before or not after or torch.equal(found[65:67], rows[65:67])
    assert before or torch.equal(found[65], rows[64]), (
        "where there were none, as an image without one"
    )


def test_a_run_takes_the_head_of_the_weights_that_it_begins_with(tmp_path):
    categorical = dataclasses.replace(TINY, head="categorical", classes=2)
    checkpoint.save(tmp_path / "first", net_for(categorical), {"data": "pictures"}, "# first\n")
    for index, (values, label) in enumerate(
        zip(*dataclasses.astuple(shapes(30, 8))[1:3], strict=True)
    ):
        place = (
            tmp_path / "pictures" / ("train" if index < 20 else "test") / ("dark", "bright")[label]
        )
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values.reshape(8, 8) // 3).save(place / f"{index}.png")
    train = [
        "train",
        "tiny",
        "--data",
        str(tmp_path / "pictures"),
        "--init",
        str(tmp_path / "first"),
        "--images",
        "8",
        "--batch",
        "4",
        "--no-compile",
        "--processes",
        "1",
        "--validation",
        "0",
        "--dropout",
        "0.1",
    ]
    assert main([*train, "--out", str(tmp_path / "second")]) == 0
    assert checkpoint.load(tmp_path / "second").config == categorical


def test_a_categorical_head_without_a_background_is_for_light_pictures_on_dark():
    with pytest.raises(
        ValueError, match="needs pictures that are light on dark; give --head mixture"
    ):
        negative(dataclasses.replace(TINY, head="categorical"))


def test_a_categorical_head_begins_anew_on_the_weights_of_a_mixture():
    there = dataclasses.replace(CLASS_FIRST, background=0)
    here = dataclasses.replace(there, head="categorical")
    old, new = net_for(there), net_for(here)
    assert not differences(there, here)
    assert differences(here, there) == ["head: 'categorical' in the checkpoint, 'mixture' here"]
    found = inherited(old.state_dict(), there, new.state_dict(), here)
    own = {
        name
        for name, weight in found.items()
        if torch.equal(weight, new.state_dict()[name])
        and not (name in old.state_dict() and torch.equal(weight, old.state_dict()[name]))
    }
    assert own == {"head.weight", "head.bias", "background.head.weight", "background.head.bias"}


def test_an_error_names_only_what_differs(tiny, tmp_path):
    assert differences(TINY, dataclasses.replace(TINY, classes=3, twin_of="x")) == []
    assert differences(TINY, dataclasses.replace(TINY, layers=3, norm="post")) == [
        "layers: 2 in the checkpoint, 3 here",
        "norm: 'pre' in the checkpoint, 'post' here",
    ]
    run = Run(dataclasses.replace(TINY, layers=3), TrainConfig())
    with pytest.raises(
        ValueError,
        match=r"differs in layers: 2 in the checkpoint, 3 here; its weights fit the "
        r"preset tiny with --layers 2$",
    ):
        run.start_from(checkpoint.read(tiny))


def test_a_run_does_not_go_on_with_classes_of_other_names(tmp_path, capsys):
    for name in "ab":
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(10):
            Image.fromarray(np.full((8, 8), index, np.uint8)).save(
                tmp_path / "data" / name / f"{index}.png"
            )
    asked = [
        "train",
        "tiny",
        "--data",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "run"),
        "--no-compile",
        "--processes",
        "1",
        "--max-images",
        "16",
    ]
    assert main(asked) == 0
    (tmp_path / "data/a").rename(tmp_path / "data/c")  # b would now be the first class
    assert main([*asked, "--resume"]) == 2
    assert (
        "data has the classes c, where run has a: give the data that the model was"
        in capsys.readouterr().err
    )
    (tmp_path / "data/c").rename(tmp_path / "data/a")
    assert main([*asked, "--resume"]) == 0


def test_a_run_goes_on_with_the_layers_the_head_and_the_background_that_it_began_with(tmp_path):
    config = dataclasses.replace(CLASS_FIRST, background=0, layers=3)
    Run(config, TrainConfig(compile=False)).save(tmp_path / "state.pt")
    now = dataclasses.replace(config, background=255, layers=2, head="categorical")
    assert Run.resumed(tmp_path / "state.pt", now, {}).model == config
    with pytest.raises(ValueError, match="another architecture"):
        Run.resumed(tmp_path / "state.pt", now, {}, layers=2)
    with pytest.raises(ValueError, match="another architecture"):
        Run.resumed(tmp_path / "state.pt", now, {}, head="categorical")
    Run(dataclasses.replace(TINY, head="categorical"), TrainConfig(compile=False)).save(
        tmp_path / "state.pt"
    )
    colour = dataclasses.replace(TINY, channels=3, neighbours=())
    with pytest.raises(ValueError, match="another architecture"):
        Run.resumed(tmp_path / "state.pt", colour, {})


# --- signs of life ---


def test_a_progress_line_has_images_bits_speed_and_time_left(capsys):
    run = Run(TINY, TrainConfig(images=1_600, batch=16, compile=False))
    progress = Progress(run, max_images=float("inf"), max_minutes=float("inf"))
    run.step, run.minutes = 50, 0.5
    progress._reported_at -= 61
    progress.step([torch.tensor(2.0), torch.tensor(1.0)])
    progress.step([torch.tensor(9.0)])
    progress.evaluated(Evaluation(1.25, 0.5, 30, 1.0), None, None)
    progress.close()
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "training begins"
    assert told[1] == "800 images, 1.500 bits/dim in training, 26.7 images/s, 0.5 minutes left"
    assert told[2].startswith(
        "800 images, 1.250 +- 0.500 bits/dim on 30 pictures held out: too few pictures"
    )
    assert len(told) == 3, "once a minute"


def test_a_schedule_of_minutes_says_how_often_it_has_come_to_each_picture(capsys):
    run = Run(TINY, TrainConfig(minutes=5.0, batch=16, compile=False))
    progress = Progress(run, max_images=float("inf"), max_minutes=float("inf"))
    run.step = 10
    progress.ended(64)
    assert "this run saw each picture 2.5 times" in capsys.readouterr().err
    other = Progress(
        Run(TINY, TrainConfig(compile=False)), max_images=float("inf"), max_minutes=float("inf")
    )
    other.ended(64)
    assert capsys.readouterr().err == "training begins\n"


def test_without_matplotlib_a_run_says_how_to_get_its_curve(tmp_path, monkeypatch, capsys):
    for module in (progress_module, curve):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    run = Run(TINY, TrainConfig(compile=False))
    Progress(run, max_images=float("inf"), max_minutes=float("inf")).ended(64)
    assert (
        "curve.svg needs matplotlib, which is not installed; run: pip install '.[train]'"
        in capsys.readouterr().err
    )
    assert not curve.write_curve(tmp_path)


# --- --preset auto ---


def put(folder, count, colour):
    random = np.random.default_rng(0)
    for index in range(count):
        place = folder / ("round" if index % 2 else "square")
        place.mkdir(parents=True, exist_ok=True)
        values = random.integers(0, 256, (40, 30, 3), dtype=np.uint8)
        picture = Image.fromarray(values if colour else values[..., :1].repeat(3, 2))
        picture.save(place / f"{index}.{'png' if index % 3 else 'jpg'}")


@pytest.mark.parametrize(
    ("colour", "plain", "preset", "size", "mode"),
    [
        (False, False, "mnist-conditional", (28, 28), "L"),
        (False, True, "mnist-small", (28, 28), "L"),
        (True, False, "cifar10-conditional", (32, 32), "RGB"),
        (True, True, "cifar10-small", (32, 32), "RGB"),
    ],
)
def test_pictures_are_looked_at_and_made_one_size(tmp_path, colour, plain, preset, size, mode):
    put(tmp_path / "mine", 12, colour)
    (tmp_path / "mine" / "notes.txt").write_text("no picture")
    (tmp_path / "mine" / "round" / "cut.png").write_bytes(b"\x89PNG")
    Image.new("I;16", (30, 30)).save(tmp_path / "mine" / "round" / "deep.png")
    plan = automatic.plan(tmp_path / "mine", tmp_path / "made", plain=plain)
    assert ("in colour" in str(plan)) == colour
    assert (plan.preset, plan.pictures, plan.left_out, plan.minutes) == (
        preset,
        12,
        {
            "not the suffix of a picture that can be read": ["notes.txt"],
            "not a complete picture, or a huge one": ["round/cut.png"],
            "more than 8 bits a sample": ["round/deep.png"],
        },
        5,
    )
    assert (
        "; round/cut.png (not a complete picture, or a huge one); round/deep.png (more than 8 bits"
        in str(plan)
    )
    made = sorted((tmp_path / "made").rglob("*.png"))
    assert len(made) == 12 and {path.parent.name for path in made} == {"round", "square"}
    with Image.open(made[0]) as picture:
        assert (picture.size, picture.mode) == (size, mode)


def test_a_name_may_be_as_long_as_a_file_system_allows(tmp_path):
    """In bytes: a letter with an accent has two. Names that differ late remain two names."""
    (tmp_path / "mine").mkdir()
    accented = "\u00e4" * 125
    for number in range(10):
        for name in (f"{accented}{number}.jpg", f"{number}{'x' * 249}.png"):
            Image.new("L", (30, 30), 20 * number).save(tmp_path / "mine" / name)
    made = automatic.plan(tmp_path / "mine", tmp_path / "made")
    assert made.pictures == 20 and len(list((tmp_path / "made").iterdir())) == 20


def put_sprites(folder, scale=1, size=(12, 10)):
    """Pictures of five colours on nothing, enlarged."""
    colours = np.array([(0, 0, 0, 0), (9, 9, 9, 255), (250, 20, 30, 255), (30, 200, 40, 255)])
    folder.mkdir()
    for index in range(12):
        values = np.random.default_rng(index).integers(0, 4, size[::-1])
        picture = colours[values].astype(np.uint8).repeat(scale, 0).repeat(scale, 1)
        Image.fromarray(picture).save(folder / f"{index:02}.png")


@pytest.mark.parametrize("scale", [1, 5])
def test_pictures_of_few_colours_get_a_palette_at_their_own_size(tmp_path, scale):
    put_sprites(tmp_path / "mine", scale)
    plan = automatic.plan(tmp_path / "mine", tmp_path / "made")
    assert (plan.preset, plan.size) == ("palette", (12, 12))
    assert "converted to 12 x 12 in a palette of up to 64 colours: preset palette" in str(plan)
    config = palette.of_pictures(tmp_path / "made", PRESETS["palette"], plan.colours)
    assert {colour[:3] for colour in config.palette[1:]} == {
        (9, 9, 9),
        (250, 20, 30),
        (30, 200, 40),
    }
    with (
        Image.open(tmp_path / "mine" / "00.png") as given,
        Image.open(tmp_path / "made" / "00.png.png") as made,
    ):
        inside = np.asarray(made)[1:11]
        assert np.array_equal(inside, np.asarray(given)[::scale, ::scale])
        assert not np.asarray(made)[[0, 11], :, 3].any()


def test_photographs_and_greys_get_a_palette_only_if_colours_are_asked_for(tmp_path):
    for colour in (False, True):
        put(tmp_path / str(colour), 12, colour)
        assert automatic.plan(tmp_path / str(colour), tmp_path / "made").colours == 0
        plan = automatic.plan(tmp_path / str(colour), tmp_path / "made", colours=16)
        assert (plan.preset, plan.colours, plan.size) == ("palette", 16, (20, 24))
        images, _, classes = read_pictures(tmp_path / "made", "train", (24, 20, 4))
        assert classes == ("round", "square") and len(images) == 11


def test_pictures_that_were_too_large_are_reduced_whole(tmp_path):
    (tmp_path / "mine").mkdir()
    for index in range(12):
        picture = Image.new("RGBA", (200, 100), "white")
        picture.paste("red", (0, 0, 100, 100))
        picture.putpixel((index, 0), (0, 0, 255, 255))  # no enlarged pixel art
        picture.save(tmp_path / "mine" / f"{index}.png")
    assert automatic.plan(tmp_path / "mine", tmp_path / "made").size == (24, 12)
    with Image.open(tmp_path / "made" / "3.png.png") as made:
        assert np.asarray(made)[6, [0, 11, 12, 23], 1].tolist() == [0, 0, 255, 255]


def test_a_palette_has_the_colours_that_matter_and_an_opaque_ground_from_the_edge():
    pictures = np.full((4, 8, 8, 4), (240, 240, 250, 255), np.uint8)
    pictures[:, 2:6, 2:6] = (200, 0, 0, 255)
    pictures[:, 3, 3] = (205, 3, 3, 255)  # rarer and alike
    pictures[0, 4, 4] = (0, 250, 0, 255)  # rarest, but unlike all others
    colours = palette.choose(pictures, 3)
    assert colours == ((240, 240, 250, 255), (200, 0, 0, 255), (0, 250, 0, 255))
    assert len(palette.choose(pictures, 64)) == 4


def test_a_palette_model_is_trained_evaluated_and_drawn_from_by_auto(tmp_path):
    put_sprites(tmp_path / "mine")
    out = tmp_path / "sprites"
    flags = ["--max-images", "32", "--batch", "16", "--processes", "1"]
    main(["train", "--preset", "auto", str(tmp_path / "mine"), "--out", str(out), *flags])
    found = checkpoint.read(out)
    assert len(found.net.config.palette) == 4 and found.net.config.background == 0
    again = ["train", "--preset", "auto", str(tmp_path / "mine"), "--out", str(out), "--resume"]
    main([*again, "--max-images", "16", "--processes", "1"])
    assert checkpoint.read(out).provenance["images"] == 48
    main(["sample", "--model", str(out), "--count", "3", "--out", str(tmp_path / "a.gif")])
    main(["sample", "--model", str(out), "--count", "1", "--out", str(tmp_path / "one.png")])
    with Image.open(tmp_path / "a.gif") as film, Image.open(tmp_path / "one.png") as one:
        assert film.n_frames > 1 and one.mode == "P" and one.size == (12, 12)
        film.seek(film.n_frames - 1)
        last = np.asarray(film.convert("RGBA"))
    shown = {tuple(colour) for colour in last.reshape(-1, 4).tolist()}
    allowed = {(*colour[:3], 255) for colour in found.net.config.palette[1:]}
    assert {colour for colour in shown if colour[3]} <= allowed | {(96, 96, 96, 255)}


def test_a_palette_is_not_asked_of_a_preset_without_one(tmp_path, capsys):
    put(tmp_path / "mine", 12, False)
    files = ["--data", str(tmp_path / "mine"), "--out", str(tmp_path / "x")]
    assert main(["train", "tiny", *files, "--colours", "8"])
    assert "--colours 8: tiny has no palette" in capsys.readouterr().err


def test_what_a_training_has_written_among_the_pictures_is_left_out_and_named(tmp_path):
    mine = tmp_path / "mine"
    put(mine, 24, False)
    for name in (
        "run.training/samples-00000032.png",
        "run.training/pictures/round/1.png.png",
        "run/samples.png",
        "round/exported/samples.png",
        "run2/samples.png",
        "run2.training/plan.json",
        "new.training/a/1.png",
    ):
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_bytes((mine / "square" / "0.jpg").read_bytes())
    for name in ("config.json", "SHA256SUMS"):
        (mine / "round" / "exported" / name).touch()
    plan = automatic.plan(mine, mine / "new.training")
    assert plan.pictures == 24 and plan.left_out == {
        "written by LinPix": ["round/exported", "run", "run.training", "run2", "run2.training"]
    }
    images, _, classes = read_pictures(mine / "new.training", "train", (28, 28, 1))
    assert len(images) == 22 and classes == ("round", "square")


@pytest.mark.parametrize(
    ("ink", "ground", "suffix"), [(255, 0, "png"), (0, 255, "dat"), (120, 255, "png")]
)
def test_transparent_pictures_are_laid_on_a_ground_that_their_ink_is_seen_on(
    ink, ground, suffix, tmp_path
):
    for index in range(12):
        values = np.full((28, 28, 4), ink, np.uint8)
        values[..., 3] = np.arange(28) < index + 4
        values[..., 3] *= 255
        (tmp_path / "mine").mkdir(exist_ok=True)
        Image.fromarray(values).save(tmp_path / "mine" / f"{index}.{suffix}", "PNG")
    assert automatic.plan(tmp_path / "mine", tmp_path / "made").pictures == 12
    for path in (tmp_path / "made").glob("*.png"):
        with Image.open(path) as made:
            assert made.getextrema() == (min(ink, ground), max(ink, ground))


def odd_exif(picture: Image.Image) -> bytes:
    """A JPEG that lies on its side, with a width of the wrong type in its EXIF data."""
    whole = io.BytesIO()
    picture.save(whole, "JPEG", quality=95)
    tags = struct.pack("<HHIHH", 0x112, 3, 1, 6, 0) + struct.pack("<HHI4s", 0x100, 7, 1, b"abcd")
    part = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + tags + bytes(4)
    head = b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part
    return whole.getvalue()[:2] + head + whole.getvalue()[2:]


def test_a_photograph_with_an_odd_exif_tag_costs_no_run(tmp_path, monkeypatch):
    put(tmp_path / "mine", 18, False)
    (tmp_path / "mine/round/edited.jpg").write_bytes(odd_exif(Image.new("L", (30, 40), 200)))
    plan = automatic.plan(tmp_path / "mine", tmp_path / "made")
    assert (plan.pictures, plan.left_out) == (19, {})

    def fails(*_):
        raise struct.error("as some of Pillow's decoders do")

    monkeypatch.setitem(Image.OPEN, "JPEG", (fails, Image.OPEN["JPEG"][1]))
    left = automatic.plan(tmp_path / "mine", tmp_path / "made")
    jpegs = [path.name for path in (tmp_path / "mine").rglob("*.jpg")]
    assert left.pictures == 19 - len(jpegs) == 12
    [(reason, names)] = left.left_out.items()
    assert reason == "not a complete picture, or a huge one" and len(names) == len(jpegs)


@pytest.mark.parametrize("size", [(20, 36), (36, 20), (10, 60), (28, 27)])
@pytest.mark.parametrize("ground", [255, 0, 200])
def test_pictures_of_another_shape_get_more_of_their_ground_and_lose_nothing(
    tmp_path, size, ground
):
    ink = 255 - ground if ground != 200 else 0
    width, height = size
    for index in range(12):
        values = np.full((height, width), ground, np.uint8)
        ends = np.s_[[1, -2], 1:-1] if height > width else np.s_[1:-1, [1, -2]]
        values[ends] = ink
        values[height // 2, width // 2] = index  # no two are the same
        (tmp_path / "mine").mkdir(exist_ok=True)
        Image.fromarray(values).save(tmp_path / "mine" / f"{index}.png")
    plan = automatic.plan(tmp_path / "mine", tmp_path / "made", plain=True)
    assert plan.cut == 0 and "cut" not in str(plan)
    for path in (tmp_path / "made").glob("*.png"):
        with Image.open(path) as made:
            away = np.abs(np.asarray(made).astype(int) - ground)
        if height <= width:
            away = away.T
        assert away[:4].max() > 30 < away[-4:].max(), "the bars at both ends are there"
        if min(size) < 25:
            assert away[:, [0, -1]].max() == 0, "the sides are ground"


def test_a_palette_is_chosen_though_a_picture_is_damaged(tmp_path):
    for index in range(12):
        Image.new("RGB", (8, 8), (index, 200, 0)).save(tmp_path / f"{index}.png")
    whole = palette.of_pictures(tmp_path, PRESETS["palette"], 8)
    for name in ("0.png", "a.png", "b.png"):
        content = (tmp_path / "11.png").read_bytes()
        (tmp_path / f"damaged-{name}").write_bytes(content[: 45 if name == "0.png" else 10])
    assert palette.of_pictures(tmp_path, PRESETS["palette"], 8) == whole
    for path in tmp_path.glob("[0-9]*.png"):
        path.unlink()
    assert palette.of_pictures(tmp_path, PRESETS["palette"], 8) == PRESETS["palette"]


def test_pictures_that_are_cut_are_counted(tmp_path):
    put(tmp_path / "mine", 12, True)  # noise of 30 x 40
    for index in range(3):
        Image.new("RGB", (30, 30), (index, 90, 0)).save(
            tmp_path / "mine" / "round" / f"a{index}.png"
        )
    plan = automatic.plan(tmp_path / "mine", tmp_path / "made")
    assert plan.cut == 12 and "; 12 of them are cut at both ends of their longer side" in str(plan)


def test_pictures_that_do_not_fit_on_the_disk_are_removed(tmp_path):
    put(tmp_path / "mine", 12, False)
    with (
        files_of_at_most(100),
        pytest.raises(OSError, match=r"\.png cannot be written \(file too large\); free some"),
    ):
        automatic.plan(tmp_path / "mine", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_pictures_beside_classes_are_refused_where_they_lie(tmp_path):
    put(tmp_path / "mine", 12, False)
    Image.new("L", (30, 30)).save(tmp_path / "mine" / "stray.png")
    with pytest.raises(
        ValueError, match=r"mine has pictures next to sub-folders of pictures \(stray\.png\)"
    ):
        automatic.plan(tmp_path / "mine", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_nine_pictures_are_too_few(tmp_path):
    put(tmp_path / "nine", 9, False)
    with pytest.raises(ValueError, match="has 9 readable pictures"):
        automatic.plan(tmp_path / "nine", tmp_path / "made")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("colour", "options", "preset"),
    [
        (False, [], "mnist-conditional"),
        (True, [], "cifar10-conditional"),
        (False, ["--attention", "softmax"], "mnist-small"),
        (False, ["--feature-map", "relu"], "mnist-small"),
        (True, ["--layers", "2"], "cifar10-conditional"),
    ],
)
def test_pictures_have_a_head_start_from_what_is_shipped_where_options_allow_it(
    tmp_path, colour, options, preset
):
    put(tmp_path / "mine", 12, colour)
    printed = succeeds(
        "train",
        "--preset",
        "auto",
        tmp_path / "mine",
        "--out",
        tmp_path / "out",
        *options,
        "--minutes",
        7.5,
        "--max-images",
        4,
        "--batch",
        2,
        "--no-compile",
        "--processes",
        1,
    ).stderr
    assert f"preset {preset}, 7.5 minutes" in printed, "those that were asked for"
    assert (
        f"linpix evaluate {tmp_path}/out --data {tmp_path}/out.training/pictures"
        in printed.splitlines()[-1]
    )
    mine, shipped = (
        checkpoint.read(folder).net for folder in (tmp_path / "out", CHECKPOINTS / preset)
    )
    assert (mine.config.tokens, mine.config.classes) == (shipped.config.tokens, 2)
    theirs = shipped.layers.state_dict()
    near = [
        torch.allclose(weight, theirs[name], atol=0.05)
        for name, weight in mine.layers.state_dict().items()
        if weight.dim() == 2
    ]
    assert all(near) if not options else not any(near), (
        "four pictures change little of what a run begins with"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "auto", "nowhere"], "nowhere is not a folder"),
        (["tiny"], "--preset auto DIR"),
        (["huge", "--data", "x"], "there is no preset 'huge'"),
        (["--preset", "tiny", "a", "--data", "b"], "leave out --data"),
    ],
)
def test_a_wrong_preset_or_folder_is_refused_with_the_cure(arguments, words, tmp_path, capsys):
    assert main(["train", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err


# --- class agreement ---


def test_a_judge_tells_classes_apart_and_judges_what_a_model_draws():
    data = shapes(60, 8)
    found = judge.trained(data, TINY, steps=60)
    assert judge.trained(data, TINY, steps=60).probabilities(data.images).shape == (60, 2)
    net = net_for(dataclasses.replace(TINY, classes=2))
    packed = pack(net, torch.float32) if choose(net.config).engine == "compiled" else None
    measured = [
        judge.agreement(net, found, data, count=70, temperature=1.0, packed=one)
        for one in (packed, None)
    ]
    for one in measured:
        assert one.attempts == 1
        assert (
            0 <= one.worst_class <= one.class_agreement <= 1
            and one.drawn == 70
            and one.judge > 0.95
        )
        assert one.judge_sure > 0.9 and 0 <= one.sure <= 1
        assert one.real_look == look_of(data.images, TINY, 0, data.labels)
    assert abs(measured[0].class_agreement - measured[-1].class_agreement) < 0.1, (
        "both engines draw alike"
    )


def test_a_judge_is_kept_for_the_same_pictures_alone(cache):
    data = shapes(60, 8)
    first = judge.trained(data, TINY, steps=3)
    [kept] = cache.iterdir()
    changed = kept.stat().st_mtime_ns
    again = judge.trained(data, TINY, steps=3)
    assert np.array_equal(again.probabilities(data.images), first.probabilities(data.images))
    assert [*cache.iterdir()] == [kept] and kept.stat().st_mtime_ns == changed
    data.images[0] = 255 - data.images[0]
    judge.trained(data, TINY, steps=3)
    judge.trained(dataclasses.replace(data, classes=("low", "high")), TINY, steps=3)
    assert len([*cache.iterdir()]) == 3
    kept.write_bytes(kept.read_bytes()[:99])
    data.images[0] = 255 - data.images[0]
    mended = judge.trained(data, TINY, steps=3)
    assert np.array_equal(mended.probabilities(data.images), first.probabilities(data.images))


def test_pieces_specks_greys_and_full_ink_are_counted_on_either_ground():
    config = dataclasses.replace(TINY, height=6, width=6)
    one, corner, speck, two = np.zeros((4, 6, 6), np.uint8)
    one[1:4, 2] = 255
    # corners connect, and what is hardly seen is nothing
    corner[0, 0], corner[1, 1], corner[5, 5] = 40, 253, 31
    speck[1:4, 1:4], speck[5, 5] = 100, 60
    two[0:2, 0:3], two[4:6, 0:3] = 200, 210
    pictures = np.stack([one, corner, speck, two]).reshape(4, 36)
    found = look_of(pictures, config, 0)
    assert found == Look(greys=round((2 + 4 + 3 + 3) / 4, 1), full_ink=1.0, pieces=0.5, specks=0.25)
    assert look_of(255 - pictures, config, 255) == found
    labels = np.array([0, 0, 1, 2])
    found = look_of(pictures, config, 0, labels)
    assert (found.divided, found.pieces, found.specks) == ([1, 2], 0, 0), "of the others, none is"
    assert look_of(pictures, config, 0, labels, [2]) == Look(
        3.0, 1.0, round(1 / 3, 4), round(1 / 3, 4), [2]
    )
    assert look_of(pictures, config, 0, np.array([1, 1, 2, 2]), [1, 2]).pieces == 1, (
        "nothing is left"
    )
    assert look_of(pictures.repeat(3, 0), config, 0, np.repeat([0, 1], [7, 5])).divided == [1], (
        "0: one of seven"
    )


def test_the_board_has_the_ground_and_ink_of_the_pictures_and_prepares_only_what_looks_like_mnist():
    rng, config = np.random.default_rng(0), PRESETS["mnist-small"]
    digits = np.zeros((20, 28, 28), np.uint8)
    digits[:, 4:24, 9:19] = 250
    assert board_of(digits.reshape(20, -1), config) == {
        "ground": [0],
        "ink": [250],
        "prepare": "mnist",
    }
    paper = 235 - (digits > 0) * 175 + rng.integers(-9, 9, digits.shape)
    assert board_of(paper.astype(np.uint8).reshape(20, -1), config) == {
        "ground": [235],
        "ink": [60],
        "prepare": None,
    }
    corner = np.roll(digits, 5, axis=2)
    assert board_of(corner.reshape(20, -1), config)["prepare"] is None
    photographs = rng.integers(0, 256, (20, 32 * 32 * 3)).astype(np.uint8)
    assert board_of(photographs, PRESETS["cifar10-small"]) == {
        "ground": None,
        "ink": None,
        "prepare": None,
    }
    sheets = np.full((20, 32, 32, 3), (250, 240, 220), np.uint8)
    sheets[:, 10:20, 10:20] = (200, 20, 30)
    assert board_of(sheets.reshape(20, -1), PRESETS["cifar10-small"]) == {
        "ground": [250, 240, 220],
        "ink": [200, 20, 30],
        "prepare": None,
    }


class Watched:
    """A judge, and the images that it is asked about."""

    def __init__(self, of: judge.Judge) -> None:
        self.of, self.seen = of, []

    def probabilities(self, images):
        self.seen.append(images)
        return self.of.probabilities(images)


@pytest.mark.parametrize("attempts", [1, 4])
def test_images_that_are_torn_or_not_recognised_are_drawn_again_before_they_are_judged(attempts):
    data, net = shapes(60, 8), class_first()
    watched, count = Watched(judge.trained(data, TINY, steps=1)), 9
    judge.agreement(net, watched, data, count=count, temperature=1.0, attempts=attempts)
    images = next(seen for seen in watched.seen if len(seen) == count)
    todo, best = [*range(count)], {}
    for number in range(attempts):
        drawn = generate(
            net, [index + 2**53 * number for index in todo], labels=[index % 2 for index in todo]
        ).numpy()
        sure = [
            float(class_log_probs_of(net, canvas)[index % 2])
            for index, canvas in zip(todo, drawn, strict=True)
        ]
        whole = [not one for one in torn(drawn.reshape(-1, 8, 8), 0)]
        ranks = [
            (one >= math.log(0.99) and in_one, in_one, one)
            for one, in_one in zip(sure, whole, strict=True)
        ]
        for index, canvas, rank in zip(todo, drawn, ranks, strict=True):
            if index not in best or rank > best[index][0]:
                best[index] = rank, canvas, number
        todo = [index for index, (accepted, *_) in zip(todo, ranks, strict=True) if not accepted]
        assert 0 < len(todo) < count, "some are recognised, and some are not"
    assert np.array_equal(images, np.stack([best[index][1] for index in range(count)]))
    assert (len({number for _, _, number in best.values()}) > 1) == (attempts > 1)


def class_first() -> Transformer:
    """A model of two classes that it recognises in some of its images."""
    net = net_of(dataclasses.replace(CLASS_FIRST, classes=2), spread=0.1)
    with torch.no_grad():
        net.class_head.weight.data *= SHARPER
    return net


def test_attempts_are_measured_with_and_written_with_their_row_of_the_card(tmp_path, monkeypatch):
    # its opinion does not matter
    monkeypatch.setattr(commands, "trained", partial(judge.trained, steps=1))
    measured_with = []
    monkeypatch.setattr(
        commands,
        "agreement",
        lambda *given, attempts, **named: (
            measured_with.append(attempts) or judge.agreement(*given, attempts=attempts, **named)
        ),
    )
    data = shapes(40, 8)
    for index, (values, label) in enumerate(zip(data.images, data.labels, strict=True)):
        place = tmp_path / "pictures" / ("train" if index < 30 else "test") / data.classes[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values.reshape(8, 8)).save(place / f"{index}.png")
    checkpoint.save(
        tmp_path / "mine",
        class_first(),
        {"data": "pictures", "class_names": ["bright", "dark"]},
        "# mine\n\n| | |\n|---|---|\n| layers | 2 |\n\nText.\n",
    )
    asked = (
        "evaluate",
        tmp_path / "mine",
        "--json",
        "--data",
        tmp_path / "pictures",
        "--classes",
        8,
    )
    told = json.loads(succeeds(*asked, "--attempts", 4, "--write").stdout)
    after, card = checkpoint.read(tmp_path / "mine"), (tmp_path / "mine" / "README.md").read_text()
    assert after.attempts == 4 and after.class_agreement == told["class_agreement"]
    assert "| attempts at an image | 4, until the model recognises its class |" in card
    assert json.loads(succeeds(*asked).stdout) == told, "what it has is what it is measured with"
    succeeds(*asked, "--attempts", 1, "--write")
    assert checkpoint.read(tmp_path / "mine").attempts == 1
    assert "| attempts at an image | 1 |" in (tmp_path / "mine" / "README.md").read_text()
    assert measured_with == [4, 4, 1]
    refused = inside(*asked[:-2], "--attempts", 4)
    assert refused.returncode != 0 and "need --classes" in refused.stderr


@pytest.mark.slow
def test_class_agreement_and_how_a_model_is_drawn_from_are_written_into_it(tmp_path):
    evaluate = partial(inside, "evaluate", tmp_path / "mine")
    random, folder = np.random.default_rng(0), tmp_path / "pictures"
    for index in range(60):
        place = folder / ("train" if index < 40 else "test") / ("dark", "bright")[index % 2]
        place.mkdir(parents=True, exist_ok=True)
        values = random.integers(0, 60, (8, 8), dtype=np.uint8) + np.uint8(180 * (index % 2))
        Image.fromarray(values).save(place / f"{index}.png")
    config = dataclasses.replace(TINY, classes=2)
    source = {"data": "pictures", "class_names": ["bright", "dark"]}
    checkpoint.save(
        tmp_path / "mine",
        net_for(config),
        source,
        "# mine\n\n| | |\n|---|---|\n| layers | 2 |\n\nText.\n",
    )
    before = checkpoint.read(tmp_path / "mine")
    ended = evaluate(
        "--data",
        folder,
        "--classes",
        20,
        "--write",
        "--temperature",
        0.9,
        "--temperature-range",
        "0.5,1.1",
        "--limits",
        "Dark or bright.",
        "--json",
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    after = checkpoint.read(tmp_path / "mine")
    assert (after.temperature, after.temperature_range, after.limits) == (
        0.9,
        (0.5, 1.1),
        "Dark or bright.",
    )
    assert (
        after.class_agreement == told["class_agreement"]
        and after.digest == told["checkpoint"] != before.digest
    )
    assert all(
        torch.equal(weight, after.net.state_dict()[name])
        for name, weight in before.net.state_dict().items()
    )
    text = (tmp_path / "mine" / "README.md").read_text()
    assert (
        "| temperature; useful range | 0.9; 0.5 to 1.1 |" in text
        and "| limits | Dark or bright. |" in text
    )
    assert re.search(r"class asked for \| [01]\.\d{3}", text)
    greys = f"{told['look']['greys']:g} (in test images {told['real_look']['greys']:g})"
    assert f"| different greys in an image | {greys} |" in text
    assert "need --classes" in evaluate("--data", folder, "--write").stderr
    for split in ("train", "test"):
        # would now be the second class
        (folder / split / "bright").rename(folder / split / "light")
    for asked in (["--classes", 20], ["--labels", "all"]):
        assert (
            "pictures has the classes light, where mine has bright: "
            in evaluate("--data", folder, *asked).stderr
        )
    assert (
        "does not exist" in evaluate("--data", tmp_path / "typo").stderr
        and not (tmp_path / "typo").exists()
    )


@pytest.mark.parametrize(
    "facts",
    [
        {"temperature": -1},
        {"temperature_range": [2, 1]},
        {"temperature": "hot"},
        {"temperature_range": [1]},
        {"class_agreement": 1.5},
        {"limits": 3},
        {"limits": "x" * 201},
        {"temperature": True},
    ],
)
def test_a_checkpoint_is_not_described_with_nonsense(tiny, tmp_path, facts):
    [name] = facts
    with pytest.raises(provenance.CheckpointError, match=name):
        checkpoint.describe(tiny, facts)
    assert checkpoint.read(tiny).temperature == 1.0
