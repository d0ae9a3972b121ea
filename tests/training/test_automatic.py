"""--preset auto: what is chosen from pictures, and how they are brought to one size."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from linpix.__main__ import main
from linpix.model import checkpoint
from linpix.model.config import PRESETS
from linpix.training import automatic, palette
from linpix.training.folders import read_pictures
from tests.conftest import files_of_at_most
from tests.linpix.test_main import succeeds
from tools.harness.servers import here

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"


def put(folder, count, colour, size=(30, 40)):
    random = np.random.default_rng(0)
    for index in range(count):
        place = folder / ("round" if index % 2 else "square")
        place.mkdir(parents=True, exist_ok=True)
        values = random.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
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
    put(tmp_path / "mine", 12, colour, (40, 40))
    (tmp_path / "mine" / "notes.txt").write_text("no picture")
    (tmp_path / "mine" / "round" / "cut.png").write_bytes(b"\x89PNG")
    Image.new("I;16", (30, 30)).save(tmp_path / "mine" / "round" / "deep.png")
    plan = automatic.choose(tmp_path / "mine", tmp_path / "made", plain=plain)
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


@pytest.mark.parametrize(
    ("given", "colour", "asked", "size"),
    [
        ((9, 23), False, None, (9, 23)),
        ((30, 40), False, None, (30, 40)),
        ((30, 24), False, None, (28, 28)),  # nearly square
        ((150, 200), False, None, (24, 32)),
        ((200, 150), True, None, (32, 24)),
        ((60, 50), True, None, (32, 32)),
        ((200, 60), False, None, (48, 16)),
        ((60, 50), True, (17, 8), (17, 8)),
    ],
)
def test_pictures_that_are_not_square_keep_their_shape(tmp_path, given, colour, asked, size):
    put(tmp_path / "mine", 12, colour, given)
    plan = automatic.choose(tmp_path / "mine", tmp_path / "made", size=asked)
    assert plan.size == size and f"converted to {size[0]} x {size[1]} in" in str(plan)
    assert bool(plan.cut) == bool(asked or size in ((28, 28), (32, 32), (48, 16)))
    for path in (tmp_path / "made").rglob("*.png"):
        with Image.open(path) as made:
            assert made.size == size


def test_a_name_may_be_as_long_as_a_file_system_allows(tmp_path):
    """In bytes: a letter with an accent has two. Names that differ late remain two names."""
    (tmp_path / "mine").mkdir()
    accented = "\u00e4" * 125
    for number in range(10):
        for name in (f"{accented}{number}.jpg", f"{number}{'x' * 249}.png"):
            Image.new("L", (30, 30), 20 * number).save(tmp_path / "mine" / name)
    made = automatic.choose(tmp_path / "mine", tmp_path / "made")
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
    plan = automatic.choose(tmp_path / "mine", tmp_path / "made")
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
        assert automatic.choose(tmp_path / str(colour), tmp_path / "made").colours == 0
        plan = automatic.choose(tmp_path / str(colour), tmp_path / "made", colours=16)
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
    assert automatic.choose(tmp_path / "mine", tmp_path / "made").size == (24, 12)
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
    train = f"train --preset auto {tmp_path}/mine --out {out} --processes 1"
    main(f"{train} --max-images 32 --batch 16".split())
    found = checkpoint.read(out)
    assert len(found.net.config.palette) == 4 and found.net.config.background == 0
    main(f"{train} --resume --max-images 16".split())
    assert checkpoint.read(out).provenance["images"] == 48
    main(f"sample --model {out} --count 3 --out {tmp_path}/a.gif".split())
    main(f"sample --model {out} --count 1 --out {tmp_path}/one.png".split())
    with Image.open(tmp_path / "a.gif") as film, Image.open(tmp_path / "one.png") as one:
        assert one.mode == "P" and one.size == (12, 12)
        film.seek(film.n_frames - 1)  # perhaps the only one: equal frames become one frame
        last = np.asarray(film.convert("RGBA"))
    shown = {tuple(colour) for colour in last.reshape(-1, 4).tolist()}
    allowed = {(*colour[:3], 255) for colour in found.net.config.palette[1:]}
    assert {colour for colour in shown if colour[3]} <= allowed | {(96, 96, 96, 255)}


def test_tall_pictures_of_odd_sides_are_trained_on_drawn_completed_and_served(tmp_path):
    put(tmp_path / "mine", 24, False, (9, 23))
    out = tmp_path / "models/tall"
    train = f"train --preset auto {tmp_path}/mine --out {out} --processes 1"
    begun = succeeds(f"{train} --max-images 32 --batch 16").stderr
    assert "converted to 9 x 23 in grey: preset mnist-conditional" in begun
    found = checkpoint.read(out)
    assert "the weights of mnist-conditional" in found.provenance["history"]
    assert found.net.config.patch == 1
    succeeds(f"{train} --resume --max-images 16")
    assert checkpoint.read(out).provenance["images"] == found.provenance["images"] + 16
    succeeds(f"sample --model {out} --count 2 --seed 3 --out {tmp_path}/drawn.gif")
    given = tmp_path / "mine/square/0.jpg"
    succeeds(f"complete {given} --model {out} --keep-rows 9 --seed 3 --out {tmp_path}/one.png")
    with Image.open(tmp_path / "one.png") as completed, Image.open(given) as before:
        assert completed.size == (9, 23)
        assert np.array_equal(np.asarray(completed)[:9], np.asarray(before.convert("L"))[:9])
        wide = before.resize((180, 230), Image.Resampling.NEAREST)  # its middle is used
    wide.save(tmp_path / "wide.png")
    with here(out.parent) as server, server.client() as client:
        answer = client.post(
            "/v1/images/edits",
            files={"image": (tmp_path / "wide.png").read_bytes()},
            data={"keep_rows": 9, "seed": 3, "lay_back": "true"},
        ).json()
        assert (answer["size"], answer["crop"]) == ("180x230", [45, 0, 135, 230])
        assert answer["known"] == 9 * 9


def test_a_palette_is_not_asked_of_a_preset_without_one(tmp_path, capsys):
    put(tmp_path / "mine", 12, False)
    assert main(f"train tiny --data {tmp_path}/mine --out {tmp_path}/x --colours 8".split())
    assert "--colours 8: tiny has no palette" in capsys.readouterr().err


def test_what_a_training_has_written_among_the_pictures_is_left_out_and_named(tmp_path):
    mine = tmp_path / "mine"
    put(mine, 24, False, (40, 40))
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
    plan = automatic.choose(mine, mine / "new.training")
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
    assert automatic.choose(tmp_path / "mine", tmp_path / "made").pictures == 12
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
    plan = automatic.choose(tmp_path / "mine", tmp_path / "made")
    assert (plan.pictures, plan.left_out) == (19, {})

    def fails(*_):
        raise struct.error("as some of Pillow's decoders do")

    monkeypatch.setitem(Image.OPEN, "JPEG", (fails, Image.OPEN["JPEG"][1]))
    left = automatic.choose(tmp_path / "mine", tmp_path / "made")
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
    plan = automatic.choose(tmp_path / "mine", tmp_path / "made", plain=True)
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


@pytest.mark.parametrize(
    ("theirs", "size", "expected"),
    [
        ((67, 71), None, "67 x 71 (width x height), expected sides of 8 to 64 pixels"),
        ((6, 24), None, "6 x 24 (width x height), expected sides of 8 to 64 pixels"),
        ((24, 24), (40, 16), "24 x 24 (width x height), expected 40 x 16 as --size says"),
        ((16, 40), (40, 16), "16 x 40 (width x height), expected 40 x 16 as --size says"),
    ],
)
def test_pictures_of_another_size_get_no_palette_model(tmp_path, capsys, theirs, size, expected):
    put_sprites(tmp_path / "mine", size=theirs)
    arguments = f"train palette --data {tmp_path}/mine --out {tmp_path}/model"
    if size:
        arguments += f" --size {size[0]}x{size[1]}"
    assert main(arguments.split()) == 2
    assert expected in capsys.readouterr().err
    plan = automatic.choose(tmp_path / "mine", tmp_path / "made", colours=8, size=size)
    fitted = palette.of_pictures(tmp_path / "made", PRESETS["palette"], 8, size)
    assert (fitted.width, fitted.height) == plan.size == (size or plan.size)


def test_pictures_that_are_cut_are_counted(tmp_path):
    put(tmp_path / "mine", 12, True)  # noise of 30 x 40, which is 24 x 32
    for index in range(3):
        Image.new("RGB", (30, 30), (index, 90, 0)).save(
            tmp_path / "mine" / "round" / f"a{index}.png"
        )
    assert automatic.choose(tmp_path / "mine", tmp_path / "made").cut == 0
    plan = automatic.choose(tmp_path / "mine", tmp_path / "made", size=(32, 32))
    assert plan.cut == 12 and "; 12 of them are cut at both ends of their longer side" in str(plan)


def test_pictures_that_do_not_fit_on_the_disk_are_removed(tmp_path):
    put(tmp_path / "mine", 12, False)
    with (
        files_of_at_most(100),
        pytest.raises(OSError, match=r"\.png cannot be written \(file too large\); free some"),
    ):
        automatic.choose(tmp_path / "mine", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_pictures_beside_classes_are_refused_where_they_lie(tmp_path):
    put(tmp_path / "mine", 12, False)
    Image.new("L", (30, 30)).save(tmp_path / "mine" / "stray.png")
    with pytest.raises(
        ValueError, match=r"mine has pictures next to sub-folders of pictures \(stray\.png\)"
    ):
        automatic.choose(tmp_path / "mine", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_nine_pictures_are_too_few(tmp_path):
    put(tmp_path / "nine", 9, False)
    with pytest.raises(ValueError, match="has 9 readable pictures"):
        automatic.choose(tmp_path / "nine", tmp_path / "made")


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
    files = f"{tmp_path}/mine --out {tmp_path}/out"
    short = "--minutes 7.5 --max-images 4 --batch 2 --no-compile --processes 1"
    asked = f"train --preset auto {files} {short}".split()
    printed = succeeds(*asked, *options).stderr
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
