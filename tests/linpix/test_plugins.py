"""A kind of attention from a file outside the project, from training to the race."""

import json

import pytest

from linpix.model.checkpoint import digest_of
from linpix.server.cluster.front import models_of
from linpix.server.settings import Settings
from tests.linpix.test_main import inside, linpix, pixels, reported, succeeds
from tests.training.conftest import lay, shapes
from tools.harness.commands import ROOT
from tools.harness.servers import serving

PLUGIN = f"--plugin {ROOT}/examples/gated.py"


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """A checkpoint that two processes have trained."""
    folder = tmp_path_factory.mktemp("gated")
    lay(shapes(40, 8), folder / "pictures", 30)
    ended = linpix(
        f"train tiny --data {folder}/pictures --out {folder}/run --attention gated {PLUGIN}",
        "--no-compile --batch 8 --processes 2 --max-images 80",
        OMP_NUM_THREADS="2",
    )
    assert ended.returncode == 0, ended.stderr
    return folder / "run"


def test_it_draws_as_the_same_seed_did_one_by_one(gated, tmp_path, no_plugins):
    told = reported(f"sample --model {gated} {PLUGIN} --count 2 --seed 7 --out {tmp_path}/two")
    assert told["engine"] == "eager"
    succeeds(f"sample --model {gated} {PLUGIN} --seed 8 --out {tmp_path}/one")
    assert (pixels(tmp_path / "two/00001-8.png") == pixels(tmp_path / "one/00000-8.png")).all()


def test_without_the_plugin_it_is_refused_with_the_cure(gated, tmp_path, no_plugins):
    ended = inside(f"sample --model {gated} --out {tmp_path}/out")
    assert ended.returncode == 2
    assert "got 'gated'" in ended.stderr and "by --plugin or LINPIX_PLUGIN" in ended.stderr


def test_it_is_raced(gated):
    ended = linpix(
        f"compare --model {gated} {PLUGIN} --backends linear,gated --batch 1 --budget 1 --json"
    )
    assert ended.returncode == 0, ended.stderr
    found = {one["backend"]: one for one in json.loads(ended.stdout)["results"]}
    assert found["gated"]["weights"] == gated.name and found["linear"]["weights"] is None
    assert found["gated"]["engine"] == "eager" and found["gated"]["images_per_second"] > 0
    # two layers and heads, S of 8 x 8 and z of 8, in float32
    assert found["gated"]["state_bytes"] == 4 * 2 * 2 * 8 * 9


def test_it_is_served(gated):
    with serving(gated.parent, f"--models {gated.name} {PLUGIN}") as server:
        answer = server.post("/v1/images/generations", json={"seed": 8}).json()
        assert answer["engine"] == "eager" and answer["data"]
        # its memory is small: it has as many slots as linear models, and softmax has 8
        assert server.metric(f'linpix_state_slots{{model="{gated.name}"}}') == 64


def test_a_front_on_another_machine_loads_it(gated, no_plugins):
    """It reads the checkpoints, and has the settings but not the variable."""
    settings = Settings(checkpoints=gated.parent, plugin=f"{ROOT}/examples/gated.py")
    facts = {"checkpoint": digest_of(gated)}
    [model] = models_of({gated.name: (facts, 64)}, settings).values()
    assert model.backend == "gated"


def test_a_kind_that_cannot_draw_is_refused_when_its_model_is_loaded(gated, tmp_path):
    plugin = tmp_path / "broken.py"
    example = (ROOT / "examples/gated.py").read_text()
    plugin.write_text(example.replace("gate = torch", "gate = self.gone"))
    ended = linpix(
        f"serve --port 0 --checkpoints {gated.parent} --models {gated.name} --plugin {plugin}"
    )
    assert ended.returncode not in (0, None)
    assert "gated attention raised AttributeError in its first step" in ended.stderr
    assert "leave the model out with --models" in ended.stderr
