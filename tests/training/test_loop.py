"""The loop on a data set of a few small pictures: it learns, it resumes, it stops on request."""

import csv
import functools
import json
import math
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from linpix.model import checkpoint, mixture
from linpix.model.config import PRESETS, AttentionKind, FeatureMap, ModelConfig
from linpix.model.generate import generate
from linpix.model.inputs import START
from linpix.model.likelihood import class_log_probs_of
from linpix.model.nets import net_for
from linpix.model.transformer import Transformer
from linpix.training import loop
from linpix.training.batches import Batches
from linpix.training.datasets import Dataset
from linpix.training.evaluate import evaluate
from linpix.training.export import export
from linpix.training.files import load_state, save_state
from linpix.training.run import Run, TrainConfig
from tests.training.conftest import train_command
from tools.harness.servers import eventually

train = functools.partial(loop.train, command="test")
TINY = PRESETS["tiny"]
SETTINGS = TrainConfig(
    images=640,
    batch=8,
    warmup_images=80,
    learning_rate=3e-3,
    head_share=1.0,
    ema=0.9,
    compile=False,
    validation=10,
)


def learns(run: Run, data: Dataset, folder: Path) -> Transformer:
    """Train; the weights that were exported, which must have far fewer bits than those before."""
    before = evaluate(run.exported.eval(), data.images).bits_per_dim
    assert train(run, data, folder)
    net = checkpoint.load(folder)
    assert net.config == run.net.config
    assert evaluate(net, data.images).bits_per_dim < 0.6 * before
    return net


def resumed(out: Path, model: ModelConfig = TINY, **changes: object) -> Run:
    """The run that was saved beside this folder."""
    return Run.resumed(out.with_name(f"{out.name}.training") / "state.pt", model, changes)


def weights(run: Run) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in run.net.parameters()])


@pytest.mark.parametrize(
    "optimizer",
    ["muon", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adamw", "radam"))],
)
def test_training_learns_with_every_optimizer(stripes, tmp_path, optimizer):
    learns(Run(TINY, replace(SETTINGS, optimizer=optimizer)), stripes, tmp_path / "run")


def test_averaged_weights_forget_the_random_beginning_within_few_steps():
    run = Run(TINY, replace(SETTINGS, ema=0.998))
    beginning = weights(run)
    for parameter in run.net.parameters():
        parameter.data.add_(1.0)
    for _ in range(50):
        run.average()
        run.step += 1
    averaged = torch.cat([parameter.detach().flatten() for parameter in run.exported.parameters()])
    torch.testing.assert_close(averaged, beginning + 1, rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("attention", get_args(AttentionKind))
def test_a_model_that_draws_pixels_learns_how_channels_depend_on_each_other(
    stripes, tmp_path, attention
):
    red = np.random.default_rng(0).integers(0, 256, (100, 64), dtype=np.uint8)
    colours = replace(stripes, images=np.stack([red, 255 - red, red], 2).reshape(100, 192))
    config = replace(
        TINY, channels=3, tokens="pixel", attention=attention, neighbours=((-1, 0, 0),)
    )
    run = Run(config, replace(SETTINGS, images=1600, learning_rate=1e-2))
    before = evaluate(run.exported.eval(), colours.images).bits_per_dim
    train(run, colours, tmp_path / "run")
    net = checkpoint.load(tmp_path / "run")
    assert net.config == config
    # of red nothing can be known, of the others all
    assert evaluate(net, colours.images).bits_per_dim < before - 1


CONDITIONAL = replace(
    TINY,
    look_ups=("previous", "row", "column", "class"),
    following=((0, 1, 0), (1, 0, 0), (1, 1, 0)),
    patch=4,
    background=0,
    background_dim=16,
)


def hidden_nats(net: Transformer, data: Dataset, known: torch.Tensor) -> float:
    """Nats of what is not known of a picture, given its class and what is."""
    images, start = torch.from_numpy(data.images), torch.from_numpy(START + 1 + data.labels)
    with torch.inference_mode():
        found = net.predict(net.sequences(images, start, known)).parameters
        return -float(mixture.log_likelihood(found, images).masked_fill(known, 0).sum(1).mean())


@pytest.mark.slow
def test_a_conditional_model_learns_from_what_is_known_later(stripes, tmp_path):
    settings = replace(SETTINGS, images=1600, unconditional=0.2)
    net = learns(Run(CONDITIONAL, settings), stripes, tmp_path / "run")
    hidden = torch.zeros(100, 64, dtype=torch.bool)
    told = hidden.clone()
    told[:, 32:] = True  # the lower half: where the edge is, if it is there
    assert torch.equal(
        generate(net, [0, 1], known=torch.from_numpy(stripes.images[:2]), given=told[:2])[:, 32:],
        torch.from_numpy(stripes.images[:2, 32:]),
    )
    assert hidden_nats(net, stripes, told) < hidden_nats(net, stripes, hidden)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_classes_are_learnt_from_readings_of_images_that_are_drawn_whole(
    stripes, tmp_path, processes
):
    settings = replace(SETTINGS, images=1600, conditional=0.0, weight_decay=0.0)
    for readings, images in ((0, 80), (3, 1600)):
        run = Run(CONDITIONAL, replace(settings, readings=readings, images=images))
        before = run.net.class_head.weight.clone()
        assert train(run, stripes, tmp_path / f"{readings}", processes=processes)
        assert torch.equal(before, run.net.class_head.weight) is (readings == 0)
    net = checkpoint.load(tmp_path / "3")
    found = [class_log_probs_of(net, image).argmax() for image in stripes.images]
    assert np.mean(found == stripes.labels) > 0.9


@pytest.mark.parametrize("classes", [0, 10])
def test_a_conditional_model_trains_on_pictures_without_labels(stripes, tmp_path, classes):
    unlabelled = replace(stripes, labels=np.full(100, -1), classes=())
    config = replace(
        CONDITIONAL,
        classes=classes,
        look_ups=CONDITIONAL.look_ups if classes else ("previous", "row", "column"),
    )
    run = Run(config, replace(SETTINGS, images=80))
    train(run, unlabelled, tmp_path / "run")
    net, told = checkpoint.load(tmp_path / "run"), torch.rand(2, 64) < 0.5
    images = torch.from_numpy(stripes.images[:2])
    drawn = generate(net, [0, 1], known=images, given=told)
    assert torch.equal(drawn[told], images[told])


LSH = replace(TINY, attention="lsh", lsh_rounds=2, lsh_buckets=4, lsh_chunk=16)


@pytest.mark.slow
def test_lsh_attention_learns_and_is_exported_with_a_card_that_names_its_exception(
    stripes, tmp_path
):
    learns(Run(LSH, SETTINGS), stripes, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "shipped", lambda config: stripes)
    shipped = checkpoint.load(tmp_path / "shipped").eval()
    first, again = (evaluate(shipped, stripes.images).bits_per_dim for _ in range(2))
    assert first == again
    assert "not strictly autoregressive" in (tmp_path / "shipped/README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "compile_"), [*((name, False) for name in get_args(FeatureMap)), ("random", True)]
)
def test_every_feature_map_learns(stripes, tmp_path, name, compile_):
    # a layer takes its time to be compiled
    run = Run(replace(TINY, feature_map=name, layers=1), replace(SETTINGS, compile=compile_))
    assert learns(run, stripes, tmp_path / "run").config.feature_map == name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "compile_"),
    [(TINY, False), (replace(TINY, layers=1), True)],
    ids=["plain", "compiled"],
)
def test_reversible_layers_learn_with_a_feed_forward_in_chunks(stripes, tmp_path, model, compile_):
    run = Run(
        replace(model, residual="reversible"),
        replace(SETTINGS, compile=compile_, feed_forward_chunks=2),
    )
    assert {layer.chunks for layer in run.net.layers} == {2}
    learns(run, stripes, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "shipped", lambda config: stripes)
    assert checkpoint.load(tmp_path / "shipped").config.residual == "reversible"
    assert (
        "| residuals, norm, activation | reversible, pre, gelu |"
        in (tmp_path / "shipped/README.md").read_text()
    )


def test_a_feed_forward_in_chunks_trains_alike(stripes, tmp_path):
    """A resumed run may change their number: it decides what is in memory, not what is learned."""
    settings = replace(SETTINGS, images=160, bf16=False)
    whole = Run(TINY, settings)
    first = Run(TINY, replace(settings, feed_forward_chunks=5))
    train(whole, stripes, tmp_path / "whole")
    train(first, stripes, tmp_path / "parts", max_images=80)
    second = resumed(tmp_path / "parts", feed_forward_chunks=2)
    train(second, stripes, tmp_path / "parts")
    torch.testing.assert_close(weights(second), weights(whole), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("attention", "dropout"),
    [("linear", 0.2), pytest.param("lsh", 0.0, marks=pytest.mark.slow)],
)
def test_a_run_that_is_interrupted_ends_as_one_that_is_not(stripes, tmp_path, attention, dropout):
    """With the same dropout and, with lsh, hashed by the same random rotations at every step."""
    model = replace(TINY, attention=attention, lsh_buckets=4, lsh_chunk=16)
    settings = replace(SETTINGS, dropout=dropout, images=160)
    whole, first = Run(model, settings), Run(model, settings)
    assert {layer.dropout.p for layer in whole.net.layers} == {dropout}
    assert train(whole, stripes, tmp_path / "whole")
    assert not train(first, stripes, tmp_path / "parts", max_images=56)
    second = resumed(tmp_path / "parts", model)
    assert second.images == 56
    assert train(second, stripes, tmp_path / "parts")
    assert torch.equal(weights(whole), weights(second))


def test_the_learning_rate_rises_linearly_and_falls_to_its_final_share():
    config = TrainConfig(images=1000, batch=10, warmup_images=100, final_learning_rate=0.1)
    shares = [config.learning_rate_share(images, 0.0) for images in range(0, 1001, 10)]
    assert shares[0] < 0.15
    assert max(shares) == pytest.approx(1.0)
    assert shares == sorted(shares[:11]) + sorted(shares[11:], reverse=True)
    assert shares[-1] == pytest.approx(0.1)


def test_the_log_and_the_sample_grids_are_written(stripes, tmp_path):
    run = Run(TINY, replace(SETTINGS, images=800))
    train(run, stripes, tmp_path / "run")
    rows = list(csv.DictReader((tmp_path / "run.training" / "log.csv").open()))
    assert float(rows[0]["train"]) > 0
    assert float(rows[-1]["validation"]) > 0
    with Image.open(tmp_path / "run.training" / "samples-00000800.png") as grid:
        assert grid.size == (10 * 9 + 1, 2 * 9 + 1)
    drawn = ElementTree.parse(tmp_path / "run.training" / "curve.svg").getroot()
    told = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"images", "bits/dim", "in training", "pictures held out"} <= told
    source = checkpoint.read(tmp_path / "run").provenance
    wanted = {"images": 800, "steps": 100, "data": "stripes", "command": "test"}
    assert source | wanted == source


def test_a_resumed_run_keeps_its_settings_but_for_those_given_anew(stripes, tmp_path):
    train(Run(TINY, SETTINGS), stripes, tmp_path / "run", max_images=8)
    run = resumed(tmp_path / "run", weight_decay=0.3)
    assert run.config == replace(SETTINGS, weight_decay=0.3)
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0, 0.0]


def test_a_run_that_begins_with_the_weights_of_another_adds_up_what_both_have_seen(
    stripes, tmp_path
):
    train(Run(TINY, SETTINGS), stripes, tmp_path / "first", max_images=80)
    first = checkpoint.read(tmp_path / "first")
    run = Run(TINY, SETTINGS)
    run.start_from(first)
    assert torch.equal(run.net.head.weight, first.net.head.weight)
    train(run, stripes, tmp_path / "second", max_images=40)
    again = resumed(tmp_path / "second")
    train(again, stripes, tmp_path / "second", max_images=8)
    source = checkpoint.read(tmp_path / "second").provenance
    assert (source["images"], source["steps"]) == (128, 16)
    deeper = Run(replace(TINY, layers=3), SETTINGS)
    deeper.start_from(first, Batches(stripes, SETTINGS, TINY)[0])
    wider = Run(replace(TINY, heads=4, d_model=32, d_ff=64, layers=3), SETTINGS)
    wider.start_from(first, Batches(stripes, SETTINGS, TINY)[0])
    nets = first.net, deeper.net.eval(), deeper.exported, wider.exported
    scores = [evaluate(net, stripes.images[:20]).bits_per_dim for net in nets]
    assert scores == pytest.approx(scores[:1] * 4, rel=1e-6)
    with pytest.raises(
        ValueError, match=r"differs in heads: 2 in the checkpoint, 4 here; d_model: 16 .*, 32 here;"
    ):
        Run(replace(TINY, heads=4, d_model=32), SETTINGS).start_from(first)


def test_a_save_of_another_architecture_or_optimizer_is_refused(stripes, tmp_path):
    train(Run(TINY, SETTINGS), stripes, tmp_path / "run", max_images=8)
    with pytest.raises(ValueError, match="another architecture"):
        resumed(tmp_path / "run", replace(TINY, heads=1))
    for name, value, had in (("optimizer", "adamw", "muon"), ("batch", 4, "8"), ("seed", 1, "0")):
        with pytest.raises(ValueError, match=f"saved with --{name} {had}"):
            resumed(tmp_path / "run", **{name: value})


def test_a_save_with_a_digest_but_without_what_a_run_needs_is_called_damaged(tmp_path):
    path = tmp_path / "state.pt"
    Run(TINY, SETTINGS).save(path)
    good = load_state(path.read_bytes())
    assert Run.resumed(path, TINY, {}).config == SETTINGS
    without_optimizers = {name: value for name, value in good.items() if name != "optimizers"}
    unknown_setting = json.dumps(json.loads(good["config"]) | {"later": 1})
    for other in (
        [1],
        None,
        without_optimizers,
        good | {"net": {}},
        good | {"config": unknown_setting},
        good | {"config": "["},
        good | {"model": "3"},
        good | {"optimizers": [1, 2]},
        good | {"step": "x"},
        good | {"averaged": 3},
        good | {"inherited": 3},
    ):
        save_state(path, other)
        with pytest.raises(ValueError, match=r"state\.pt is damaged \(\w+\); restore it, or start"):
            Run.resumed(path, TINY, {})


def test_a_run_that_begins_with_a_damaged_log_keeps_the_lines_that_are_whole(stripes, tmp_path):
    train(Run(TINY, SETTINGS), stripes, tmp_path / "run", max_images=16)
    log = tmp_path / "run.training" / "log.csv"
    whole = log.read_text()
    log.write_bytes(whole.encode() + b"2,16,x,,,,\n\xff\0,\n1,8\n2,1")
    train(resumed(tmp_path / "run"), stripes, tmp_path / "run", max_images=8)
    lines = log.read_text().splitlines()
    assert [line.split(",")[:2] for line in lines[1:]] == [["2", "16"], ["3", "24"]]
    assert whole.splitlines() == lines[:-1]


@pytest.mark.parametrize("name", ["state.pt", "log.csv", "curve.svg", "samples-00000024.png"])
def test_a_full_disk_ends_a_run_with_path_and_cure_and_the_last_save_is_whole(
    stripes, tmp_path, name
):
    """/dev/full is such a disk, in the place of the file that is not complete yet."""
    if name == "curve.svg":
        pytest.importorskip("matplotlib")
    train(Run(TINY, SETTINGS), stripes, tmp_path / "run", max_images=16)
    run = resumed(tmp_path / "run")
    (tmp_path / "run.training" / f"{name}.new").symlink_to("/dev/full")
    words = f"{name} cannot be written \\(no space left on device\\); free some .* --resume$"
    with pytest.raises(OSError, match=words):
        train(run, stripes, tmp_path / "run", max_images=8)
    assert not [*tmp_path.rglob("*.new")]
    kept = 24 if name in ("curve.svg", "samples-00000024.png") else 16
    assert resumed(tmp_path / "run").images == kept
    checkpoint.read(tmp_path / "run")


def test_a_signal_while_torch_compiles_ends_the_run_with_a_save(stripes, tmp_path, monkeypatch):
    def signalled(module, inputs):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it compiles on")

    monkeypatch.setattr(loop, "compiled", functools.partial(torch.compile, backend=signalled))
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        run = Run(TINY, replace(SETTINGS, compile=True))
        before = weights(run)
        assert not train(run, stripes, tmp_path / "run")
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(number, handler)
    again = resumed(tmp_path / "run")
    assert again.images == 0 and torch.equal(weights(again), before)
    assert checkpoint.load(tmp_path / "run").config == TINY


# --- a trunk ---


def test_without_a_number_of_images_the_learning_rate_stays_at_its_peak():
    config = TrainConfig(images=0, batch=10, warmup_images=100)
    shares = [config.learning_rate_share(images, 5.0) for images in (0, 100, 10**9)]
    assert shares[0] < 0.2 and shares[1:] == [1.0, 1.0]
    assert not config.complete(10**9, 10.0**9)
    minutes = replace(config, minutes=10.0)
    assert minutes.learning_rate_share(10**6, 10.0) == pytest.approx(0.02)
    assert minutes.complete(0, 10.0)


def test_a_copy_of_a_run_goes_on_with_all_its_state_while_its_learning_rate_falls(
    stripes, tmp_path
):
    settings = replace(SETTINGS, images=0, dropout=0.1)
    trunk = Run(TINY, settings)
    assert not train(trunk, stripes, tmp_path / "trunk", max_images=160)
    state = tmp_path / "trunk.training" / "state.pt"
    before = state.read_bytes()
    copy = resumed(tmp_path / "trunk")
    momentum = copy.optimizers[0].state_dict()["state"][0]["momentum_buffer"]
    assert momentum.abs().sum() > 0 and copy.best == trunk.best
    copy.fall(80)
    assert torch.equal(weights(copy), weights(trunk)) and copy.best == math.inf
    shares = [copy.config.learning_rate_share(images, 99.0) for images in (160, 200, 240)]
    assert shares == pytest.approx([1.0, 0.51, 0.02])
    assert not train(copy, stripes, tmp_path / "copy", max_images=40)
    again = resumed(tmp_path / "copy")
    assert train(again, stripes, tmp_path / "copy") and again.images == 240
    assert state.read_bytes() == before
    assert checkpoint.read(tmp_path / "copy").provenance["images"] == 240


def test_a_fall_begins_at_the_rate_that_the_run_has():
    earlier = Run(TINY, replace(SETTINGS, final_learning_rate=1.0, images=10**8))
    earlier.step = 5  # in its warm-up
    rate = earlier.config.learning_rate * earlier.config.learning_rate_share(40, 0.0)
    earlier.fall(100)
    found = earlier.config
    assert found.learning_rate == rate < SETTINGS.learning_rate
    assert found.learning_rate_share(40, 0.0) == 1.0
    assert found.learning_rate_share(140, 0.0) == found.final_learning_rate == 0.02


def test_a_loss_that_is_not_a_number_stops_the_run_and_keeps_the_last_save(stripes, tmp_path):
    run = Run(TINY, SETTINGS)
    train(run, stripes, tmp_path / "run", max_images=16)
    saved = (tmp_path / "run.training" / "state.pt").read_bytes()
    with torch.no_grad():
        run.net.head.bias.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="--learning-rate"):
        train(run, stripes, tmp_path / "run")
    assert (tmp_path / "run.training" / "state.pt").read_bytes() == saved


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("images", -1),
        ("batch", 0),
        ("ema", 1.5),
        ("learning_rate", 0.0),
        ("optimizer", "sgd"),
        ("seed", -1),
        ("readings", -1),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_value(field, value):
    with pytest.raises(ValueError, match=f"{field}.*{value}"):
        TrainConfig(**{field: value})


@pytest.mark.slow
@pytest.mark.parametrize(("number", "processes"), [(signal.SIGTERM, "2"), (signal.SIGKILL, "1")])
def test_a_killed_run_resumes_from_its_last_save(pictures, tmp_path, number, processes):
    """The real command in a real process: SIGTERM saves and exits 0; after SIGKILL the last save is
    there.
    """
    command = train_command(pictures, 4)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--processes", processes], stderr=subprocess.PIPE, text=True, env=environment
    )
    state = tmp_path / "run.training" / "state.pt"
    assert eventually(state.exists)
    process.send_signal(number)
    _, printed = process.communicate()
    assert process.returncode == (0 if number == signal.SIGTERM else -9), printed
    config = replace(TINY, classes=4)
    done = resumed(tmp_path / "run", config).images
    assert done > 0
    command += ["--resume", "--max-images", "40"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    assert resumed(tmp_path / "run", config).images == done + 40
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_with_minutes_the_learning_rate_follows_the_clock_and_ends_with_it():
    config = TrainConfig(
        images=100_000, minutes=10.0, batch=10, warmup_images=100, final_learning_rate=0.1
    )
    shares = [config.learning_rate_share(200, minutes) for minutes in (0.0, 2.5, 5.0, 7.5, 10.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(1.0, abs=1e-3) and shares[-1] == pytest.approx(0.1)
    assert (
        not config.complete(200, 9.99)
        and config.complete(200, 10.0)
        and config.complete(100_000, 0.0)
    )


def test_the_checkpoint_keeps_the_weights_that_were_best_on_held_out_pictures(
    stripes, tmp_path, capsys
):
    first = Run(TINY, SETTINGS)
    train(first, stripes, tmp_path / "run")
    kept = (tmp_path / "run/SHA256SUMS").read_text()
    run = resumed(tmp_path / "run", images=800, learning_rate=1.0, final_learning_rate=1.0)
    assert run.best == first.best < 8
    train(run, stripes, tmp_path / "run")  # a rate at which weights come to nothing
    assert run.images == 800 and (tmp_path / "run/SHA256SUMS").read_text() == kept
    assert (
        f"the checkpoint keeps earlier weights, which have {first.best:.3f}"
        in capsys.readouterr().err
    )


# --- dropout, mirrored pictures ---


@pytest.mark.parametrize("config", [TINY, CONDITIONAL], ids=["all", "packed"])
def test_dropout_is_for_training_only(config):
    images, start = torch.randint(0, 256, (2, 64), dtype=torch.uint8), torch.tensor([257, 258])
    torch.manual_seed(0)
    plain = net_for(config)
    dropping = net_for(config, dropout=0.5)
    dropping.load_state_dict(plain.state_dict())
    assert torch.equal(dropping.eval()(images, start), plain.eval()(images, start))
    assert not torch.equal(dropping.train()(images, start), plain.train()(images, start))
    with pytest.raises(ValueError, match="dropout must be 0 with reversible residuals"):
        net_for(replace(TINY, residual="reversible"), dropout=0.1)


def test_half_of_the_images_with_known_pixels_are_moved_and_the_same_ones_after_a_resume():
    images = np.random.default_rng(0).integers(1, 256, (50, 8 * 8), dtype=np.uint8)
    data = Dataset("noise", images, np.zeros(50, np.int64), ("noise",))
    settings = TrainConfig(batch=40, augment="shift", conditional=0.5)
    plain = Batches(data, replace(settings, augment="none"), CONDITIONAL)
    moved = Batches(data, settings, CONDITIONAL)
    ways, completed = [], 0
    for step in range(10):
        for before, after, known in zip(
            plain[step][0], moved[step][0], moved[step][2], strict=True
        ):
            completed += bool(known.any())
            if torch.equal(before, after):
                continue
            assert known.any(), "an image that is drawn whole was moved"
            wide = F.pad(before.view(1, 8, 8), (3, 3, 3, 3))[0]
            [way] = [
                (y, x)
                for y in range(-3, 4)
                for x in range(-3, 4)
                if torch.equal(wide[3 - y : 11 - y, 3 - x : 11 - x], after.view(8, 8))
            ]
            ways.append(way)
        for one, again in zip(moved[step], Batches(data, settings, CONDITIONAL)[step], strict=True):
            assert torch.equal(one, again)
    assert 0.4 < len(ways) / completed < 0.6 and 120 < completed < 280
    assert {y for y, _ in ways} == {x for _, x in ways} == {*range(-3, 4)}
    with pytest.raises(ValueError, match="--augment shift moves images with known pixels"):
        Run(TINY, settings)


def test_half_of_the_pictures_are_mirrored_and_the_same_ones_after_a_resume():
    config = replace(
        TINY,
        channels=3,
        tokens="pixel",
        look_ups=("previous", "row", "column"),
        neighbours=((-1, 0, 0),),
    )
    images = np.random.default_rng(0).integers(0, 256, (50, 8 * 8 * 3), dtype=np.uint8)
    data = Dataset("noise", images, np.zeros(50, np.int64), ("noise",))
    settings = TrainConfig(batch=40, augment="flip")
    plain = Batches(data, replace(settings, augment="none"), config)
    mirrored = Batches(data, settings, config)
    count = 0
    for step in range(3):
        for before, after in zip(plain[step][0], mirrored[step][0], strict=True):
            assert torch.equal(after, before) or torch.equal(
                after.view(8, 8, 3), before.view(8, 8, 3).flip(1)
            )
            count += not torch.equal(after, before)
        assert torch.equal(mirrored[step][0], Batches(data, settings, config)[step][0])
    assert 40 < count < 80
