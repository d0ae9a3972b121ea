"""The CNN that judges, and what is measured and written with it."""

import json
import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from linpix.model import checkpoint, provenance
from linpix.model.choice import choose
from linpix.model.config import PRESETS
from linpix.model.generate import generate
from linpix.model.likelihood import class_log_probs_of
from linpix.model.nets import net_for
from linpix.model.packing import pack
from linpix.model.pieces import torn
from linpix.model.transformer import Transformer
from linpix.training import class_agreement, commands
from linpix.training.look import look_of
from tests.linpix.test_main import inside, succeeds
from tests.nets import CLASS_FIRST, net_of
from tests.training.conftest import lay, shapes

TINY = PRESETS["tiny"]
SHARPER = 8.0


def test_a_judge_tells_classes_apart_and_judges_what_a_model_draws():
    data = shapes(60, 8)
    found = class_agreement.trained(data, TINY, steps=60)
    assert class_agreement.trained(data, TINY, steps=60).probabilities(data.images).shape == (60, 2)
    net = net_for(replace(TINY, classes=2))
    packed = pack(net, torch.float32) if choose(net.config).engine == "compiled" else None
    measured = [
        class_agreement.agreement(net, found, data, count=70, temperature=1.0, packed=one)
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
    first = class_agreement.trained(data, TINY, steps=3)
    [kept] = cache.iterdir()
    changed = kept.stat().st_mtime_ns
    again = class_agreement.trained(data, TINY, steps=3)
    assert np.array_equal(again.probabilities(data.images), first.probabilities(data.images))
    assert [*cache.iterdir()] == [kept] and kept.stat().st_mtime_ns == changed
    data.images[0] = 255 - data.images[0]
    class_agreement.trained(data, TINY, steps=3)
    class_agreement.trained(replace(data, classes=("low", "high")), TINY, steps=3)
    assert len([*cache.iterdir()]) == 3
    kept.write_bytes(kept.read_bytes()[:99])
    data.images[0] = 255 - data.images[0]
    mended = class_agreement.trained(data, TINY, steps=3)
    assert np.array_equal(mended.probabilities(data.images), first.probabilities(data.images))


class Watched:
    """A judge, and the images that it is asked about."""

    def __init__(self, of: class_agreement.Judge) -> None:
        self.of, self.seen = of, []

    def probabilities(self, images):
        self.seen.append(images)
        return self.of.probabilities(images)


@pytest.mark.parametrize("attempts", [1, 4])
def test_images_that_are_torn_or_not_recognised_are_drawn_again_before_they_are_judged(attempts):
    data, net = shapes(60, 8), class_first()
    watched, count = Watched(class_agreement.trained(data, TINY, steps=1)), 9
    class_agreement.agreement(net, watched, data, count=count, temperature=1.0, attempts=attempts)
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
    net = net_of(replace(CLASS_FIRST, classes=2), spread=0.1)
    with torch.no_grad():
        net.class_head.weight.data *= SHARPER
    return net


def test_attempts_are_measured_with_and_written_with_their_row_of_the_card(tmp_path, monkeypatch):
    # its opinion does not matter
    monkeypatch.setattr(commands, "trained", partial(class_agreement.trained, steps=1))
    measured_with = []
    monkeypatch.setattr(
        commands,
        "agreement",
        lambda *given, attempts, **named: (
            measured_with.append(attempts)
            or class_agreement.agreement(*given, attempts=attempts, **named)
        ),
    )
    lay(shapes(40, 8), tmp_path / "pictures", 30)
    checkpoint.save(
        tmp_path / "mine",
        class_first(),
        {"data": "pictures", "class_names": ["bright", "dark"]},
        "# mine\n\n| | |\n|---|---|\n| layers | 2 |\n\nText.\n",
    )
    asked = f"evaluate {tmp_path}/mine --json --data {tmp_path}/pictures --classes 8".split()
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
    folder = lay(shapes(60, 8), tmp_path / "pictures", 40)
    config = replace(TINY, classes=2)
    source = {"data": "pictures", "class_names": ["bright", "dark"]}
    checkpoint.save(
        tmp_path / "mine",
        net_for(config),
        source,
        "# mine\n\n| | |\n|---|---|\n| layers | 2 |\n\nText.\n",
    )
    before = checkpoint.read(tmp_path / "mine")
    asked = "--classes 20 --write --temperature 0.9 --temperature-range 0.5,1.1 --json"
    asked += " --recognised 0.8"
    ended = evaluate("--data", folder, asked, "--limits 'Dark or bright.'")
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    after = checkpoint.read(tmp_path / "mine")
    assert (after.temperature, after.temperature_range, after.limits, after.recognised) == (
        0.9,
        (0.5, 1.1),
        "Dark or bright.",
        0.8,
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
