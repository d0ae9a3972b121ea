"""sample and complete: what they write and show, read back. The other commands are in
tests/linpix/test_main.py.
"""

import dataclasses
import fcntl
import json
import math
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import termios

import numpy as np
import pyte
import pytest
from PIL import Image

from linpix.cli.draw import produce
from linpix.cli.preview import Progress
from linpix.model import checkpoint, folders
from linpix.model.config import PRESETS
from linpix.model.likelihood import class_log_probs_of
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.engine import Engine
from linpix.server.engine.job import Job
from linpix.server.pictures.animation import UNDRAWN
from tests.fuzz.pictures import noise
from tests.linpix.cli.test_preview import Stream, read_half_blocks, screen_pixels
from tests.linpix.test_main import inside, pixels, reported, succeeds
from tests.nets import saved
from tests.server.pictures.test_animation import enlarged, frames_of
from tools.harness.commands import words_of
from tools.harness.servers import HANG_S

# --- animations ---


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".GIF"])
def test_sample_animates_a_grid_that_ends_as_the_png(tiny, tmp_path, suffix):
    arguments = f"sample --model {tiny} --count 3 --seed 7 --out"
    printed = reported(arguments, f"{tmp_path}/out{suffix}")
    succeeds(arguments, f"{tmp_path}/out.png")
    frames = frames_of((tmp_path / f"out{suffix}").read_bytes(), "L")
    assert len(frames) == printed["frames"] == 9
    assert [milliseconds for _, milliseconds in frames] == [120] * 8 + [2000]
    png = pixels(tmp_path / "out.png")
    assert np.array_equal(frames[-1][0], enlarged(png, 20))  # 28 pixels wide, up to 560
    for rows, (shown, _) in enumerate(frames):
        drawn = enlarged(png, 20)[20 : 20 + 20 * rows]
        assert np.array_equal(shown[20 : 20 + 20 * rows], drawn)
        assert (shown[20 + 20 * rows : 180, 20:180] == UNDRAWN).all()
    assert printed["files"] == [str(tmp_path / f"out{suffix}")]


def test_complete_animates_from_what_is_known(tiny, tmp_path):
    picture = noise(8, 8)
    Image.fromarray(picture).save(tmp_path / "picture.png")
    told = reported(
        f"complete {tmp_path}/picture.png --model {tiny} --keep-rows 3 --seed 1 "
        f"--out {tmp_path}/out.webp",
    )
    assert (told["conditioning"], told["known"]) == ("prefix", 24)
    frames = [
        shown[56::56, 56::56][:8, :8]
        for shown, _ in frames_of((tmp_path / "out.webp").read_bytes(), "L")
    ]
    assert len(frames) == 6
    assert all(np.array_equal(frame[:3], picture[:3]) for frame in frames)
    for rows, frame in enumerate(frames, 3):
        assert np.array_equal(frame[:rows], frames[-1][:rows]) and (frame[rows:] == UNDRAWN).all()


@pytest.mark.parametrize("out", ["out/", "out.png", "out.gif"])
def test_complete_keeps_the_best_candidates_and_tells_how_sure_the_model_is(
    class_first, tmp_path, out
):
    Image.fromarray(noise(8, 8)).save(tmp_path / "picture.png")
    mask = np.full((8, 8, 2), 255, np.uint8)
    mask[2:4] = 0
    Image.fromarray(mask).save(tmp_path / "mask.png")
    asked = (
        f"complete {tmp_path}/picture.png --mask {tmp_path}/mask.png --model {class_first} --seed 3"
    )
    succeeds(asked, f"--count 8 --out {tmp_path}/all/")
    told = reported(asked, f"--count 2 --candidates 8 --out {tmp_path}/{out}")
    assert (told["images"], told["drawn"], told["candidates"], len(set(told["seeds"]))) == (
        2,
        8,
        8,
        2,
    )
    assert told["images_per_second"] == pytest.approx(told["images"] / told["seconds"])
    assert len(told["confidences"]) == 2 and all(0 < sure <= 1 for sure in told["confidences"])
    expected = [pixels(tmp_path / f"all/{seed - 3:05}-{seed}.png") for seed in told["seeds"]]
    if out == "out/":
        found = [pixels(file) for file in told["files"]]
        assert [*map(str, sorted((tmp_path / out).iterdir()))] == told["files"]
    else:
        assert told["files"] == [f"{tmp_path}/{out}"]
        with Image.open(tmp_path / out) as shown:
            shown.seek(getattr(shown, "n_frames", 1) - 1)
            sheet = np.asarray(shown.convert("L"))
        sheet = sheet[:: sheet.shape[0] // 10, :: sheet.shape[0] // 10]
        found = [sheet[1:9, 1:9], sheet[1:9, 10:18]]
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


# --- images that are drawn again ---


@pytest.mark.parametrize("command", ["sample", "complete"])
def test_each_image_comes_with_its_attempts_and_the_models_confidence(
    class_first, tmp_path, command
):
    picture = noise(8, 8)
    Image.fromarray(picture).save(tmp_path / "picture.png")
    given = "" if command == "sample" else f"{tmp_path}/picture.png --keep-rows 4"
    asked = (
        f"{command} {given} --model {class_first} --count 3 --seed 7 --label 4 --batch 2"
        f" --precision fp32 --out {tmp_path}"
    )
    told = reported(f"{asked}/again/ --attempts 3")
    once = reported(f"{asked}/once/")
    assert told["attempts"] == [3, 3, 3] and told["images"] == told["drawn"] == 3
    net = checkpoint.load(class_first)
    sure = [
        math.exp(class_log_probs_of(net, pixels(file).reshape(-1))[4]) for file in told["files"]
    ]
    assert told["confidences"] == pytest.approx(sure, rel=1e-4)
    assert "attempts" not in once and "confidences" not in once
    assert [pixels(file).tolist() for file in told["files"]] != [
        pixels(file).tolist() for file in once["files"]
    ]


def test_a_checkpoint_says_how_many_attempts_are_made(class_first, thrice, tmp_path):
    asked = f"sample --count 2 --seed 7 --out {tmp_path}/out.png --model"
    own = reported(asked, thrice)
    said = reported(asked, class_first, "--attempts 3")
    assert own["attempts"] == [3, 3] and own["confidences"] == said["confidences"]
    for more in ("--attempts 1", "--temperature 0"):
        assert "attempts" not in reported(asked, thrice, more)
    ranked = reported(asked, thrice, "--candidates 4")
    assert "attempts" not in ranked and len(ranked["confidences"]) == 2


@pytest.mark.parametrize("known", [0, 20])
def test_a_bar_of_images_that_are_drawn_again_ends_at_its_total_and_the_film_with_all_rows(
    class_first, known
):
    mask = np.arange(64) < known
    job = Job(
        count=5,
        attempts=4,
        stream=True,
        **({"canvas": np.zeros(64, np.uint8), "known": mask} if known else {}),
    )
    read = checkpoint.read(class_first)
    with Progress(job, read.net.config, Stream(terminal=True), colours=0, frames=60) as progress:
        images, _ = produce(Engine(new_decoder(read, 2)), job, progress.done, progress.advanced)
        assert progress._bar.n == progress._bar.total == 5 * 8
    assert [image.recognised.attempts for image in images] == [4] * 5
    moments = np.stack(progress.film.moments)
    assert (moments[-1] == 8).all() and (np.diff(moments, axis=0) >= 0).all()


def test_scale_enlarges_pngs_too(tiny, tmp_path):
    for scale in (1, 5):
        for out in (f"{scale}.png", f"{scale}/"):
            succeeds(
                f"sample --model {tiny} --seed 7 --scale {scale} --out {tmp_path}/{out}",
            )
    assert np.array_equal(pixels(tmp_path / "5.png"), enlarged(pixels(tmp_path / "1.png"), 5))
    assert np.array_equal(
        pixels(tmp_path / "5/00000-7.png"), enlarged(pixels(tmp_path / "1/00000-7.png"), 5)
    )


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (
            "out.jpg",
            (
                "the format .jpg is not supported; give NAME.png for a grid, NAME.gif or NAME.webp"
                " for an animation"
            ),
        ),
        ("out.mp4", "or a folder"),
        ("none/out.gif", "its folder does not exist"),
        ("folder.gif", "is a folder"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_read(tmp_path, out, words):
    (tmp_path / "folder.gif").mkdir()
    refused = inside(f"sample --model missing --out {tmp_path}/{out}")
    assert refused.returncode == 2
    assert words in refused.stderr and "missing" not in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["folder.gif"]


def test_too_large_an_animation_is_refused_before_anything_is_drawn(tiny, tmp_path):
    refused = inside(f"sample --model {tiny} --count 1000000 --out {tmp_path}/out.gif")
    assert refused.returncode == 2 and "draw fewer images" in refused.stderr


def test_a_folder_may_have_a_dot_in_its_name(tiny, tmp_path):
    succeeds(f"sample --model {tiny} --out {tmp_path}/at-0.5")
    succeeds(f"sample --model {tiny} --out {tmp_path}/v1.jpg/")
    assert (
        len(list((tmp_path / "at-0.5").iterdir()))
        == len(list((tmp_path / "v1.jpg").iterdir()))
        == 1
    )


# --- the preview ---


def test_a_preview_without_a_terminal_is_the_finished_grid_once(tiny, tmp_path):
    ended = succeeds(
        f"sample --model {tiny} --count 3 --seed 7 --preview always --json --out "
        f"{tmp_path}/out.png",
    )
    assert json.loads(ended.stdout)["images"] == 3
    lines = ended.stderr.splitlines()
    assert len(lines) == 5
    png = pixels(tmp_path / "out.png")
    assert np.abs(read_half_blocks(lines)[..., 0] - png.astype(int)).max() <= 8  # 256 colours
    assert succeeds(f"sample --model {tiny} --out {tmp_path}/out.png").stderr == ""


def on_terminal(*command, columns=80, lines=24, stdout_too=True, **environment):
    """Run linpix on a pseudo-terminal; returns what it wrote there, and to standard output where
    that is a pipe.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLORTERM")
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "linpix", *words_of(command)],
        stdin=theirs,
        stdout=theirs if stdout_too else subprocess.PIPE,
        stderr=theirs,
        env=inherited | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"} | environment,
    )
    os.close(theirs)
    written = b""
    while select.select([ours], [], [], 120)[0]:
        try:
            some = os.read(ours, 65536)
        except OSError:  # EIO: nobody has the other end any more
            break
        if not some:
            break
        written += some
    os.close(ours)
    printed = "" if process.stdout is None else process.stdout.read().decode()
    assert process.wait(HANG_S) == 0, written.decode()
    return written.decode(), printed


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "across"), [(100, 3), (40, 1)])
def test_a_terminal_shows_the_images_a_bar_below_them_and_what_was_made(
    slow, tmp_path, columns, across
):
    arguments = f"sample --checkpoints {slow} --model slow --engine eager --count 3 --seed 7"
    written, _ = on_terminal(
        arguments, f"--out {tmp_path}/out", columns=columns, lines=40, COLORTERM="truecolor"
    )
    screen = pyte.Screen(columns, 40)
    pyte.Stream(screen).feed(written)
    images = [pixels(path) for path in sorted((tmp_path / "out").iterdir())]
    shown = screen_pixels(screen, 29 // 2, 29 * across + 1)[1:]
    for index in range(across):
        assert np.array_equal(shown[:27, 1 + 29 * index : 29 + 29 * index], images[index][:27])
    below = [line.strip() for line in screen.display if line.strip() and "▀" not in line]
    assert below[0].startswith("3/3 images: 100%|") and below[1].startswith("3 images in ")
    assert written.count("\x1b[") > 100 and "A\r" in written  # it was drawn over itself


@pytest.mark.slow
def test_json_on_standard_output_is_alone_and_without_a_preview(tiny, tmp_path):
    written, printed = on_terminal(
        f"sample --model {tiny} --json --out {tmp_path}/out.png", stdout_too=False
    )
    assert json.loads(printed)["images"] == 1
    assert "▀" not in written
    written, printed = on_terminal(
        f"sample --model {tiny} --out {tmp_path}/out.png", stdout_too=False
    )
    assert "▀" in written and "▀" not in printed


def test_complete_lays_a_photographed_digit_back(tmp_path):
    saved(tmp_path / "grey", dataclasses.replace(PRESETS["tiny"], height=28, width=28))
    paper = np.full((200, 300), 220, np.uint8)
    paper[40:140, 180:195] = 30
    Image.fromarray(paper).save(tmp_path / "photo.png")
    given = (
        f"complete {tmp_path}/photo.png --model {tmp_path}/grey --keep-rows 14 --prepare "
        "mnist --seed 1 --lay-back --out"
    )
    told = reported(given, f"{tmp_path}/laid")
    assert told["prepared"]["inverted"] and told["crop"][0] > 100
    laid = np.asarray(Image.open(tmp_path / "laid/00000-1.png"))
    assert laid.shape == (200, 300) and np.array_equal(laid[:80], paper[:80])


def test_what_the_api_warns_of_the_commands_say_too(tiny, tmp_path):
    saved(
        tmp_path / "grey", dataclasses.replace(PRESETS["tiny"], height=28, width=28), data="mnist"
    )
    Image.new("L", (28, 28), 255).save(tmp_path / "white.png")
    said = succeeds(
        f"complete {tmp_path}/white.png --model {tmp_path}/grey --keep-rows 14 --out "
        f"{tmp_path}/out.png --temperature 5",
    ).stderr
    assert "linpix complete: grey draws well at temperatures from 0.5 to 1.2, got 5" in said
    assert "edge is not black" in said and "use prepare=mnist" in said
    assert (
        "got 5"
        in succeeds(f"sample --model {tiny} --count 1 --temperature 5 --out {tmp_path}").stderr
    )


def test_complete_and_score_warn_of_holes_outside_the_crop(tiny, tmp_path):
    alpha = np.full((20, 50), 255, np.uint8)
    alpha[:, :12] = alpha[:, 20:22] = 0
    Image.fromarray(np.stack([np.full_like(alpha, 99), alpha], -1)).save(tmp_path / "wide.png")
    for command in (f"complete --out {tmp_path}/out.png --seed 1", "score"):
        ended = succeeds(command, f"{tmp_path}/wide.png --model {tiny}")
        assert "86 % of the hidden pixels are outside" in ended.stderr


# --- models ---


def test_models_are_listed_with_the_default_one_first_which_is_then_drawn(tiny, tmp_path):
    """A model that cannot draw is never the default, and one that cannot be read hides no other."""
    net = checkpoint.load(tiny)
    for name in ("zebra", "mnist-small"):
        saved(tmp_path / name, net)
    shutil.copytree(folders.find("mnist-small-lsh-1"), tmp_path / "ant")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    flags = f"--checkpoints {tmp_path}"
    listed = reported("models", flags)["models"]
    assert [one["model"] for one in listed] == ["mnist-small", "ant", "broken", "zebra"]
    assert (listed[0]["size"], listed[0]["classes"]) == ("8x8", 10)
    assert listed[0]["checkpoint"] == checkpoint.digest_of(tmp_path / "mnist-small")
    assert "broken/config.json" in listed[2]["error"] and "error" not in listed[3]
    lines = succeeds("models", flags).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [one["model"] for one in listed]

    out = f"--out {tmp_path}/drawn --precision FP32"
    assert reported("sample", flags, out)["model"] == "mnist-small"
    for name in ("mnist-small", "broken"):
        shutil.rmtree(tmp_path / name)
    assert reported("sample", flags, out)["model"] == "zebra"


def test_without_any_model_the_cure_is_said(tmp_path):
    ended = inside(f"sample --checkpoints {tmp_path} --out {tmp_path}/out")
    assert ended.returncode == 2 and "train a model with linpix train" in ended.stderr
