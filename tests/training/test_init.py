"""Weights that --init takes: of other classes, another head, fewer layers, in negative."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from linpix.__main__ import main
from linpix.model import checkpoint
from linpix.model.config import PRESETS, ModelConfig
from linpix.model.heads import log_likelihood
from linpix.model.inputs import START
from linpix.model.nets import net_for
from linpix.model.transformer import Transformer
from linpix.training.init import (
    differences,
    grown,
    inherited,
    inverted,
    negative,
    rows_of_blocks,
    stretched,
    widened,
)
from linpix.training.palette import at_size
from linpix.training.run import Run, TrainConfig
from tests.nets import CLASS_FIRST
from tests.training.conftest import lay, shapes

TINY = PRESETS["tiny"]


@pytest.mark.parametrize("config", [TINY, CLASS_FIRST])
@pytest.mark.parametrize("classes", [3, 12, 0])
def test_weights_for_other_classes_draw_unconditionally_as_the_old_ones_do(config, classes):
    torch.manual_seed(0)
    look_ups = tuple(name for name in config.look_ups if classes or name != "class")
    here = replace(config, classes=classes, look_ups=look_ups)
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
        replace(
            TINY,
            channels=3,
            tokens="pixel",
            look_ups=("previous", "row", "column"),
            neighbours=((-1, 0, 0), (0, -2, 1)),
        ),
        replace(TINY, head="categorical"),
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
            replace(TINY, classes=0, first_marginal=(1.0,) + (0.0,) * 255),
        )


@pytest.mark.parametrize("head", ["mixture", "categorical"])
def test_so_they_do_of_what_is_known_and_where_background_skips_the_layers(head):
    config = replace(CLASS_FIRST, background=3, head=head)
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
        return replace(CLASS_FIRST, background=3, classes=classes, look_ups=names)

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
    categorical = replace(TINY, head="categorical", classes=2)
    checkpoint.save(tmp_path / "first", net_for(categorical), {"data": "pictures"}, "# first\n")
    dark = shapes(30, 8)
    lay(replace(dark, images=dark.images // 3), tmp_path / "pictures", 20)
    files = f"--data {tmp_path}/pictures --init {tmp_path}/first"
    train = f"train tiny {files} --images 8 --batch 4 --no-compile --processes 1 --validation 0"
    assert main([*train.split(), "--dropout", "0.1", "--out", str(tmp_path / "second")]) == 0
    assert checkpoint.load(tmp_path / "second").config == categorical


def test_a_categorical_head_without_a_background_is_for_light_pictures_on_dark():
    with pytest.raises(
        ValueError, match="needs pictures that are light on dark; give --head mixture"
    ):
        negative(replace(TINY, head="categorical"))


def test_a_categorical_head_begins_anew_on_the_weights_of_a_mixture():
    there = replace(CLASS_FIRST, background=0)
    here = replace(there, head="categorical")
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
    assert differences(TINY, replace(TINY, classes=3, twin_of="x")) == []
    assert differences(TINY, replace(TINY, layers=3, norm="post")) == [
        "layers: 2 in the checkpoint, 3 here",
        "norm: 'pre' in the checkpoint, 'post' here",
    ]
    run = Run(replace(TINY, layers=3), TrainConfig())
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
    files = f"--data {tmp_path}/data --out {tmp_path}/run"
    asked = f"train tiny {files} --no-compile --processes 1 --max-images 16".split()
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
    config = replace(CLASS_FIRST, background=0, layers=3)
    Run(config, TrainConfig(compile=False)).save(tmp_path / "state.pt")
    now = replace(config, background=255, layers=2, head="categorical")
    assert Run.resumed(tmp_path / "state.pt", now, {}).model == config
    with pytest.raises(ValueError, match="another architecture"):
        Run.resumed(tmp_path / "state.pt", now, {}, layers=2)
    with pytest.raises(ValueError, match="another architecture"):
        Run.resumed(tmp_path / "state.pt", now, {}, head="categorical")
    Run(replace(TINY, head="categorical"), TrainConfig(compile=False)).save(tmp_path / "state.pt")
    colour = replace(TINY, channels=3, neighbours=())
    with pytest.raises(ValueError, match="another architecture"):
        Run.resumed(tmp_path / "state.pt", colour, {})


# deeper and wider networks

CONFIGS = [
    TINY,
    replace(TINY, attention="softmax"),
    replace(TINY, norm="post"),
    replace(
        TINY,
        norm="post",
        look_ups=("previous", "row", "column", "class"),
        patch=4,
        background=0,
        following=((0, 1, 0), (1, 0, 0)),
    ),
]


def case(config: ModelConfig) -> tuple[Transformer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    net = net_for(config).eval()
    images = torch.randint(0, 256, (6, config.subpixels)).to(torch.uint8)
    return net, images, START + 1 + torch.arange(6)


@pytest.mark.parametrize("config", CONFIGS, ids=["pre", "softmax", "post", "conditional"])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_a_deeper_network_begins_with_the_same_predictions(config, more):
    net, images, start = case(config)
    deeper = grown(net, config.layers + more, lambda net: net(images, start))
    assert deeper.config == replace(config, layers=config.layers + more)
    with torch.no_grad():
        before, after = net(images, start), deeper(images, start)
    difference = float((after - before).norm() / before.norm())
    assert difference < (1e-6 if config.norm == "pre" or not more else 0.05)


def test_layers_are_not_taken_away_and_reversible_ones_do_not_grow():
    net, images, start = case(TINY)
    with pytest.raises(ValueError, match="2 plain layers cannot start a network of 1"):
        grown(net, 1, lambda net: net(images, start))
    reversible, *_ = case(replace(TINY, residual="reversible"))
    with pytest.raises(ValueError, match="2 reversible layers"):
        grown(reversible, 4, lambda net: net(images, start))


def test_a_norm_that_cannot_give_back_what_comes_in_is_an_error():
    net, images, start = case(CONFIGS[2])
    with torch.no_grad():
        net.layers[0].norm2.weight[0] = 100  # of this channel a norm leaves the sign
    with pytest.raises(ValueError, match="after layer 0 would change its input by"):
        grown(net, 3, lambda net: net(images, start))


@pytest.mark.parametrize(
    "config",
    [
        *CONFIGS,
        replace(TINY, attention="lsh", lsh_buckets=4, lsh_chunk=16),
        replace(TINY, residual="reversible"),
    ],
    ids=["pre", "softmax", "post", "conditional", "lsh", "reversible"],
)
@pytest.mark.parametrize("times", [2, 3])
def test_a_wider_network_begins_with_the_same_predictions(config, times):
    net, images, start = case(config)
    wider = widened(net, times).eval()
    assert (wider.config.heads, wider.config.d_model, wider.config.d_ff) == (
        2 * times,
        16 * times,
        32 * times,
    )
    assert wider.config.key_dim == config.key_dim
    found = []
    for each in (net, wider):
        torch.manual_seed(0)  # lsh hashes all heads with the same random directions
        with torch.no_grad():
            found.append(each(images, start))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_what_a_network_knows_of_places_is_stretched_over_images_of_another_size():
    net, images, start = case(CONFIGS[3])
    config = at_size(net.config, 12, 16)
    other = stretched(net, config).eval()
    assert (other.config.width, other.config.height, other.config.patch) == (12, 16, 4)
    had, has = (rows_of_blocks(one.inputs.table, one.config) for one in (net, other))
    for name, rows in had.items():
        if name in ("row", "column"):
            torch.testing.assert_close(has[name][[0, -1]], rows[[0, -1]])
            assert len(has[name]) == getattr(config, {"row": "height", "column": "width"}[name])
        else:
            assert torch.equal(has[name], rows)
    corners = []
    for one in (net, other):
        positions = one.background.table[: one.config.subpixels]
        corners.append(positions.view(*one.config.image_shape, -1)[[0, -1], [0, -1]])
    torch.testing.assert_close(*corners)
    assert torch.equal(other.patches.linear.weight, net.patches.linear.weight)
    again = stretched(other, net.config)
    assert again.config == net.config and stretched(net, net.config) is net
    with torch.no_grad():
        there = again(images, start)
    assert there.isfinite().all()


def test_patches_of_another_side_begin_anew():
    net, *_ = case(CONFIGS[3])
    other = stretched(net, at_size(net.config, 9, 23))
    assert other.config.patch == 1 and len(other.patches.place) == 9 * 23
    images = torch.randint(0, 256, (2, 9 * 23)).to(torch.uint8)
    with torch.no_grad():
        assert other.eval()(images, START + 1 + torch.arange(2)).isfinite().all()


@pytest.mark.parametrize("config", CONFIGS[2:], ids=["post", "conditional"])
def test_the_copies_of_a_wider_network_learn_different_things(config):
    net, images, start = case(config)
    wider = widened(net, 2)
    wider(images, start).square().mean().backward()
    for layer in wider.layers:
        for linear in (layer.out, layer.up, layer.down):
            one, other = linear.weight.grad.chunk(2)
            assert float((one - other).norm()) > 0.05 * float(one.norm())
